"""A volunteer who trains, as `volunteer-kit join` has one: a worker and its supervisor."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.hostile_parts.ports import lasting_port
from benchmarks.hostile_parts.processes import HonestPeer, limit_files
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec

BATCH = 16  # samples; larger ones, which the tuner tries while it trains, would be taken for memory that attacks cost


class Volunteer:
    """Its events are read in a thread; times are monotonic.

    :ivar epochs: (when, how many samples of its own counted, size of the group) of each
    """

    def __init__(self, number: int, folder: Path, run: dict[str, Any], peers: list[str], token: str | None):
        self.name = f"volunteer {number}"
        self.home = folder / f"home-{number}"
        self.epochs: list[tuple[float, int, int]] = []
        self.told: list[str] = []  # what ended or went wrong
        spec = WorkerSpec(
            run=run, name=self.name, initial_peers=peers, home=str(self.home), hf_token=token, peer_seed=number,
            host_maddrs=[f"/ip4/127.0.0.1/tcp/{lasting_port()}"], client_mode=False, peers_on_machine=3, threads=1,
            batch_size=BATCH,
        )  # fmt: skip
        self.identity = self.home / "identity.key"
        spec.identity_path = str(self.identity)
        self.supervisor = Supervisor(spec, log_path=folder / f"volunteer-{number}.log")
        self.honest = HonestPeer(self.name, lambda: self.supervisor.pid, self.identity, has_node=True)

    def start(self) -> None:
        self.supervisor.start()
        threading.Thread(target=self._limit, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()

    def _limit(self) -> None:
        """Each worker, long before it starts other processes."""
        limited = None
        while self.supervisor.running:
            pid = self.supervisor.pid
            if pid is not None and pid != limited:
                limit_files(pid)
                limited = pid
            time.sleep(0.1)

    def _read(self) -> None:
        while self.supervisor.running or self.supervisor.exit_code is None:
            event = self.supervisor.next_event(timeout=1.0)
            if event is None:
                continue
            if event["event"] == "epoch":
                self.epochs.append((time.monotonic(), event["samples"], event["group_size"]))
            elif event["event"] in ("restarting", "gave_up", "error", "cut_off", "warning"):
                self.told.append(f"{event['event']}: {event.get('message') or event.get('reason')}"[:300])

    def steps_since(self, since: float, least_samples: int = 0) -> int:
        return sum(at > since and samples >= least_samples for at, samples, _ in self.epochs[-100:])

    def close(self) -> None:
        self.supervisor.close()
