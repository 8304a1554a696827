"""A run with an authority, a monitor and real workers, each a process of its own, on loopback.

with monitored(tmp_path) as run:
    monitor = run.monitor()
    ada = run.volunteer("ada")
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests import nursery
from tests.free_ports import free_port
from tests.hub import Hub
from tests.local_authority import Authority, add_person, make_authority, served, this_hub
from tests.local_swarm import ROOT, LocalPeer
from volunteer_kit.auth.moderation import Allowlist
from volunteer_kit.journal import JournalReader
from volunteer_kit.monitor.judge import PROBATION
from volunteer_kit.monitor.watch import CHECKPOINT_EVERY
from volunteer_kit.run_reader import find_run_file
from volunteer_kit.training.protocol import WorkerSpec

SECOND_CHECKPOINT = 2 * CHECKPOINT_EVERY + PROBATION  # the step at which also this one should have been found good
# small enough for several processes on two cores, with epochs of some seconds
SMALLER = {
    "target_batch_size": 1024,
    "swarm": {
        "matchmaking_time": 2.0, "allreduce_timeout": 8, "averaging_timeout": 12, "progress_expiration": 10,
        "load_state_timeout": 60, "delay_optimizer_step": False,
    },
}  # fmt: skip


class Volunteer(LocalPeer):
    """A real worker (tests/worker_with.py), perhaps with an attack in it."""

    def __init__(self, log: Path, spec: WorkerSpec, **settings: Any):
        super().__init__(log, module="tests.worker_with", **settings)
        self.order(json.dumps({**spec.model_dump(mode="json"), "hf_token": spec.hf_token}))

    def leave(self) -> None:
        self.order('{"command": "leave"}')


@dataclasses.dataclass
class MonitoredRun:
    folder: Path
    hub: Hub
    authority: Authority | None
    url: str
    run: dict
    peers: list[LocalPeer] = dataclasses.field(default_factory=list)
    maddrs: list[str] = dataclasses.field(default_factory=list)

    @property
    def file(self) -> Path:
        return self.folder / "run.yaml"

    def volunteer(self, name: str, **settings: Any) -> Volunteer:
        token = add_person(self.hub, name) if self.authority else None
        home = self.folder / name
        home.mkdir(exist_ok=True)
        spec = WorkerSpec(
            run=self.run, name=name, initial_peers=self.maddrs, host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            identity_path=str(home / "identity.key"), client_mode=False, threads=1, batch_size=8,
            peer_seed=len(self.peers), hf_token=token,
        )  # fmt: skip
        peer = Volunteer(self.folder / f"{name}-{len(self.peers)}.log", spec, **settings)
        self.peers.append(peer)
        return peer

    def monitor(self, *options: str, name: str = "monitor", wait: bool = True) -> MonitorProcess:
        place = self.folder / name
        words = ["monitor", str(self.file), "--folder", str(place), "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
        if self.authority:
            words += ["--keys", str(self.folder / "keys")]
        for maddr in self.maddrs:
            words += ["--initial-peers", maddr]
        monitor = MonitorProcess(place, self.folder / f"{name}-{len(self.peers)}.log", [*words, *options], self.hub)
        self.peers.append(monitor)
        if wait:
            self.maddrs = self.maddrs or monitor.ready()["maddrs"]
        return monitor


class MonitorProcess:
    """`python -m volunteer_kit.cli monitor ...`."""

    def __init__(self, folder: Path, log: Path, words: list[str], hub: Hub):
        self.folder, self.log = folder, log
        home = {"HF_HOME": str(log.parent / "hf"), "VOLUNTEER_KIT_HOME": os.environ.get("VOLUNTEER_KIT_HOME", "")}
        extra = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_TOKEN": "hf_host", **home}
        environment = {**hub.environment(log.parent / "hf"), **extra}
        self.process = nursery.start("volunteer_kit.cli", words, log=log, environment=environment)

    def ready(self) -> dict[str, Any]:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError, TypeError):
                return json.loads(line)["ready"]
        raise AssertionError(f"the monitor ended; {self.story()}")

    def wait(self, found: Callable[[JournalReader], Any], timeout: float = 240.0) -> Any:
        """What `found` makes of its journal, as soon as that is true."""
        deadline, reader = time.monotonic() + timeout, None
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the monitor ended; {self.story()}"
            with contextlib.suppress(FileNotFoundError):
                reader = reader or JournalReader(self.folder / "journal.sqlite")
            if reader is not None and (value := found(reader)):
                return value
            time.sleep(0.2)
        seen = f"events: {reader.events(20)}, credit: {reader.leaderboard()}" if reader else "no journal"
        raise AssertionError(f"not within {timeout} s; {seen}, {self.story()}")

    def wait_event(self, kind: str, timeout: float = 240.0, **detail: Any) -> dict:
        """The first event of this kind with these details."""

        def found(journal: JournalReader) -> dict | None:
            fitting = [e for e in journal.events(1000, (kind,)) if detail.items() <= e["detail"].items()]
            return fitting[-1] if fitting else None

        return self.wait(found, timeout)

    def wait_checkpoint(self, timeout: float = 240.0) -> dict:
        """The event of the first one, which is a matter of steps: how many seconds these take is the machine's.

        :param timeout: s without a step after which it is waited for no longer
        """
        latest = -1
        while True:
            try:
                return self.wait_event("checkpoint", timeout)
            except AssertionError:
                before, latest = latest, self.wait(JournalReader.latest)["epoch"]
                if not before < latest < SECOND_CHECKPOINT:
                    raise

    def stop(self) -> float:
        """SIGTERM. :returns: s until it was gone"""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        return time.monotonic() - started

    def story(self) -> str:
        return f"log: {self.log.read_text()[-4000:]}"

    def kill(self) -> None:
        nursery.kill_group(self.process.pid)
        self.process.wait(60)


def write_run(folder: Path, authority: dict | None, **changes: Any) -> dict:
    """The demo's file, smaller; with this authority."""
    run = yaml.safe_load(find_run_file("demo").read_text())
    run |= {**SMALLER, **changes, **({"authority": authority} if authority else {})}
    run = {name: value for name, value in run.items() if value is not None}
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    return run


@contextlib.contextmanager
def monitored(folder: Path, *, open_run: bool = False, **changes: Any) -> Iterator[MonitoredRun]:
    """`open_run`: without an authority; `changes`: of the run file."""
    with Hub() as hub, contextlib.ExitStack() as stack:
        if open_run:
            run = MonitoredRun(folder, hub, None, "", write_run(folder, None, **changes))
        else:
            stack.enter_context(this_hub(hub))
            port = free_port()
            url = f"http://127.0.0.1:{port}"
            authority = make_authority(folder, allowlist=Allowlist.of(is_open=True), url=url)
            stack.enter_context(served(authority, port))
            about = {"url": url, "public_key": authority.public_key, "open": True}
            run = MonitoredRun(folder, hub, authority, url, write_run(folder, about, **changes))
        try:
            yield run
        finally:
            for peer in run.peers:
                peer.kill()
