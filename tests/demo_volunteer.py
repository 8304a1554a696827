"""One volunteer of the run `demo`, a real worker under a real supervisor; it is a swarm that others can join."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from volunteer_kit.runs import load_run
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec


class DemoVolunteer:
    def __init__(self, supervisor: Supervisor):
        self.supervisor, self.epoch = supervisor, 0
        self.maddrs: list[str] = self.wait("connected")["maddrs"]

    def wait(self, name: str, timeout: float = 240.0) -> dict[str, Any]:
        """The next event of this name."""
        deadline = time.monotonic() + timeout
        while (event := self.supervisor.next_event(max(0.0, deadline - time.monotonic()))) is not None:
            assert event["event"] not in ("error", "gave_up"), event
            if event["event"] == "epoch":
                self.epoch = event["epoch"]
            if event["event"] == name:
                return event
        raise AssertionError(f"no {name} within {timeout} s; {self.supervisor.log_path.read_text()[-2000:]}")

    def wait_epoch(self, epoch: int) -> dict[str, Any]:
        """The first applied step at `epoch` or later, of those not read yet."""
        while True:
            event = self.wait("epoch")
            if event["epoch"] >= epoch:
                return event


@contextlib.contextmanager
def demo_volunteer(folder: Path) -> Iterator[DemoVolunteer]:
    """`folder` gets its log; it is gone when the context ends."""
    spec = WorkerSpec(
        run=load_run("demo").model_dump(mode="json"),
        name="test",
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        identity_path=str(folder / "identity.key"),
        client_mode=False,
        threads=1,
        peer_seed=1,
    )
    with Supervisor(spec, log_path=folder / "worker.log", restart=False) as supervisor:
        yield DemoVolunteer(supervisor)
