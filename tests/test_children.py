"""A process that a peer consists of dies, or the sockets where they meet are removed: the peer ends, says why, and is
started again."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hivemind.utils import MPFuture
from hivemind.utils.mpfuture import SharedBytes

from tests.monitored import monitored
from tests.trainers import At, callback_of, make
from volunteer_kit.home import Home
from volunteer_kit.host.parts import PEER_MODULE
from volunteer_kit.host.watch import News, Part, Watch
from volunteer_kit.runs import load_run
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.training.protocol import BROKEN, WorkerSpec

UP = 120.0  # s
SOON = 120.0  # s; it takes one or two, and many times that on a busy machine


def node_of(main: psutil.Process) -> psutil.Process | None:
    """Its process that takes part in rounds."""
    return next((child for child in main.children() if "volunteer_kit.swarm.node" in child.cmdline()), None)


class Family:
    """The processes of one peer, by what they do.

    :param pid: of its main process
    """

    def __init__(self, pid: int):
        self.main = psutil.Process(pid)
        children = self.main.children()
        self.shared_memory = next(child for child in children if child.name() == "torch_shm_manager")
        self.dht = next(c for c in children if any(below.name() == "p2pd" for below in c.children()))
        self.daemon = next(child for child in self.dht.children() if child.name() == "p2pd")
        self.node = node_of(self.main)
        [listens] = [word for word in self.daemon.cmdline() if word.startswith("-listen=/unix")]
        self.control = Path(listens.partition("/unix")[2])
        self.listeners = [
            Path(c.laddr) for c in self.main.net_connections("unix") if "/listener-" in c.laddr and "pymp-" in c.laddr
        ]

    def all(self) -> list[psutil.Process]:
        return [self.main, *self.main.children(recursive=True)]


FAULTS: dict[str, tuple[Callable[[Family], None], str]] = {
    "DHT crashes": (
        lambda family: family.dht.send_signal(signal.SIGSEGV),
        "The process that talks to the swarm was killed by signal 11 (SIGSEGV)",
    ),
    "DHT killed": (lambda family: family.dht.kill(), "The process that talks to the swarm was killed by signal 9"),
    "p2pd killed": (lambda family: family.daemon.kill(), "(p2pd) was killed by signal 9 (SIGKILL)"),
    "node killed": (
        lambda family: family.node.kill(),
        "The process that takes part in the swarm's rounds was killed by signal 9 (SIGKILL)",
    ),
    "node crashes": (lambda family: family.node.send_signal(signal.SIGSEGV), "was killed by signal 11 (SIGSEGV)"),
    "folder of sockets removed": (lambda family: shutil.rmtree(family.control.parent), "Another program removed"),
    "control socket removed": (lambda family: family.control.unlink(), "Another program removed"),
    "socket of the node removed": (
        lambda family: [path.unlink() for path in family.control.parent.glob("node-*")],
        "Another program removed",
    ),
    "socket of multiprocessing removed": (lambda family: family.listeners[0].unlink(), "Another program removed"),
    "helper for shared memory killed": (
        lambda family: family.shared_memory.kill(),
        "The helper for shared memory was killed by signal 9",
    ),
}


class Volunteer:
    """A worker of the run `demo` under its supervisor, with a home."""

    def __init__(self, folder: Path, **settings):
        folder.mkdir(exist_ok=True)
        self.home = Home(folder / "home")
        spec = WorkerSpec(
            run=load_run("demo").model_dump(mode="json"),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            client_mode=False,
            home=str(self.home.path),
            checkpoint_dir=str(self.home.checkpoints),
            threads=1,
            peer_seed=len(settings),
            **settings,
        )
        self.supervisor = Supervisor(spec, log_path=folder / "worker.log")
        self.events: list[dict] = []

    def wait_for(self, found: Callable[[dict], bool], timeout: float = UP) -> dict:
        """The next event for which `found` is true."""
        deadline = time.monotonic() + timeout
        while (event := self.supervisor.next_event(max(0.0, deadline - time.monotonic()))) is not None:
            self.events.append(event)
            assert event["event"] not in ("error", "gave_up"), event
            if found(event):
                return event
        raise AssertionError(f"nothing within {timeout} s; {self.events[-9:]}; {self.supervisor.log_path.read_text()}")

    def wait(self, name: str, timeout: float = UP) -> dict:
        return self.wait_for(lambda event: event["event"] == name, timeout)

    def wait_epoch(self, group_size: int = 1, timeout: float = UP) -> dict:
        return self.wait_for(lambda e: e["event"] == "epoch" and e["group_size"] >= group_size, timeout)

    def family(self) -> Family:
        return Family(self.supervisor.pid)

    def is_hit(self, fault: str) -> dict:
        """:returns: the event "restarting" that follows"""
        hit, words = FAULTS[fault]
        family = self.family()
        members = family.all()
        hit(family)
        event = self.wait("restarting", SOON)
        if event["exit_code"] != -signal.SIGABRT or fault != "helper for shared memory killed":  # torch may be faster
            assert event["exit_code"] == BROKEN and words in event["message"], (event, self.events[-3:])
            assert any(words in event["message"] for event in self.events if event["event"] == "broken")
        assert not psutil.wait_procs(members, timeout=SOON)[1], "none of its processes stays"
        return event


@contextlib.contextmanager
def volunteer(folder: Path, **settings) -> Iterator[Volunteer]:
    made = Volunteer(folder, **settings)
    with made.supervisor:
        yield made


def test_a_worker_whose_dht_dies_says_so_and_is_back_with_its_totals(tmp_path):
    with volunteer(tmp_path) as one:
        one.wait_for(lambda event: event["event"] == "totals" and event["samples"] > 0)
        sockets = one.family().control.parent
        assert sockets.stat().st_mode & 0o777 == 0o700
        one.is_hit("DHT crashes")
        assert not sockets.exists()
        saved = Home(one.home.path).totals()
        assert saved.samples > 0
        again = one.wait("totals")
        assert again["samples"] >= saved.samples, "what was saved is not lost"
        assert one.family().control.parent != sockets


@pytest.mark.slow
def test_a_worker_of_a_swarm_that_was_hit_comes_back_into_rounds(tmp_path):
    with volunteer(tmp_path / "first") as first:
        maddrs = first.wait("connected")["maddrs"]
        with volunteer(tmp_path / "second", initial_peers=maddrs) as second:
            second.wait_epoch(group_size=2)
            second.is_hit("p2pd killed")
            second.wait_epoch(group_size=2)


@pytest.mark.slow
def test_each_fault_ends_a_worker_and_it_is_back(tmp_path):
    """The others: another test has the fault."""
    others = ("DHT crashes", "p2pd killed", "node killed")
    with volunteer(tmp_path) as one:
        for fault in FAULTS.keys() - set(others):
            one.wait("state_loaded")
            one.is_hit(fault)
        one.wait("state_loaded")


# --- a host's processes ---


def test_a_first_peer_whose_dht_dies_is_started_again_with_its_identity(tmp_path):
    news: queue.SimpleQueue[News] = queue.SimpleQueue()
    command = (PEER_MODULE, "demo", "--identity-path", str(tmp_path / "identity.key"))
    part = Part("first peer", (*command, "--host-maddrs", "/ip4/127.0.0.1/tcp/0"))
    watch = Watch(part, tmp_path / "log", f"MARK={tmp_path}", news.put)
    watch.start()
    try:
        assert news.get(timeout=UP).kind == "ready"
        hit, words = FAULTS["DHT crashes"]
        family = Family(watch.pid)
        members = family.all()
        hit(family)
        told = news.get(timeout=SOON)
        assert told.kind == "restarting" and words in told.text
        assert not psutil.wait_procs(members, timeout=SOON)[1]
        peer_id = watch.ready["peer_id"]
        assert news.get(timeout=UP).kind == "ready" and watch.ready["peer_id"] == peer_id
    finally:
        watch.begin_stop()
        if not watch.join(60):
            watch.kill()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["p2pd killed", "node killed"])
def test_a_monitor_that_is_broken_ends_and_says_why(tmp_path, fault):
    with monitored(tmp_path, open_run=True) as run:
        monitor = run.monitor()
        hit, words = FAULTS[fault]
        hit(Family(monitor.process.pid))
        assert monitor.process.wait(SOON) == 1
        assert words in monitor.log.read_text()


# --- a Trainer: its program goes on ---


def kill(process) -> None:
    os.kill(process.pid, signal.SIGKILL)


def kill_while_it_answers(process) -> None:
    """With half an answer in the pipe of all futures and all their locks held, as if by this process."""
    os.write(MPFuture._global_sender_pipe.fileno(), (2**20).to_bytes(4, "big") + b"half an answer")
    for lock in (SharedBytes._lock, MPFuture._initialization_lock, MPFuture._update_lock):
        assert lock.acquire(timeout=SOON)
    kill(process)


TRAINERS_FAULTS: dict[str, Callable] = {
    "DHT": lambda member: kill(member.peer.dht),
    "DHT, in the middle of an answer": lambda member: kill_while_it_answers(member.peer.dht),
    "p2pd": lambda member: psutil.Process(member.peer.dht.pid).children()[0].kill(),
    "node": lambda member: node_of(psutil.Process()).kill(),
    "folder of sockets": lambda member: shutil.rmtree(member.peer.dht.sockets.path),
}


@pytest.mark.parametrize(
    "fault",
    [name if name.startswith("DHT") else pytest.param(name, marks=pytest.mark.slow) for name in TRAINERS_FAULTS],
)
def test_a_trainer_raises_says_how_to_go_on_and_goes_on(tmp_path, fault):
    """Whatever it does at that moment: it never hangs."""
    hits: list[Callable] = [TRAINERS_FAULTS[fault]]

    def act(control) -> None:
        if hits:
            hits.pop()(callback_of(trainer).member)

    saving = {"save_strategy": "steps", "save_steps": 2}
    trainer = make(tmp_path / "out", 8, callbacks=[At(4, act)], max_steps=10_000, **saving)
    with pytest.raises(SwarmError) as told:
        trainer.train()
    words = "Another program removed" if fault == "folder of sockets" else "was killed by signal 9"
    assert told.value.kind == "broken" and words in str(told.value)
    resume = next(word for word in str(told.value).split() if word.startswith("trainer.train("))
    folder = resume.partition("resume_from_checkpoint='")[2].rstrip("')")
    assert Path(folder).is_dir()
    last = int(folder.rpartition("-")[2]) + 3
    again = make(tmp_path / "out", 8, max_steps=last, **saving)
    again.train(resume_from_checkpoint=folder)
    assert again.state.global_step == last
