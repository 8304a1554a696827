"""Real peers on loopback, each a process group of its own; events awaited, everything reaped."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import nursery

ROOT = Path(__file__).parent.parent


def is_whole(event: dict, members: int = 3) -> bool:
    """A step of all `members`, of which nothing is missing."""
    return event["event"] == "epoch" and event["group_size"] == members and event["cause"] is None


class LocalPeer:
    """One process of tests/swarm_peer.py, or of another module that speaks as it does."""

    def __init__(self, log: Path, module: str = "tests.swarm_peer", **settings):
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self.log = log
        self.process = nursery.start(module, [json.dumps(settings)], log=log, environment=environment)
        self._begin_to_read()

    def _begin_to_read(self) -> None:
        self.events: list[dict] = []
        self._queue: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self._queue.put(json.loads(line))
        self._queue.put(None)

    def wait_for(self, found: Callable[[dict], bool], timeout: float = 240.0) -> dict:
        """The first event, of those that came and those to come, for which `found` is true."""
        for event in self.events:
            if found(event):
                return event
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"nothing within {timeout} s; {self.story()}") from None
            if event is None:
                raise AssertionError(f"the peer ended; {self.story()}")
            self.events.append(event)
            if found(event):
                return event

    def said(self) -> list[dict]:
        """Its events so far."""
        with contextlib.suppress(queue.Empty):
            while (event := self._queue.get_nowait()) is not None:
                self.events.append(event)
            self._queue.put(None)
        return self.events

    def wait_event(self, name: str, timeout: float = 240.0) -> dict:
        return self.wait_for(lambda event: event["event"] == name, timeout)

    def wait_epoch(self, epoch: int, group_size: int = 1, timeout: float = 240.0) -> dict:
        """An applied step at `epoch` or later, in a group of at least `group_size`."""
        return self.wait_for(
            lambda e: e["event"] == "epoch" and e["epoch"] >= epoch and e["group_size"] >= group_size, timeout
        )

    def wait_whole(self, members: int = 3, times: int = 2, timeout: float = 240.0) -> None:
        """Rounds of all, in step, `times` of them: see `is_whole`."""
        self.wait_for(
            lambda e: is_whole(e, members) and sum(is_whole(each, members) for each in self.events) >= times, timeout
        )

    def story(self) -> str:
        told = [event for event in self.events if event["event"] not in ("step", "traffic", "swarm")]
        return f"events: {told[-16:]}, {self.events[-2:]}\nlog: {self.log.read_text()[-3000:]}"

    def brief(self) -> str:
        """Its last rounds, and the last that it logged: for whom another peer waited in vain."""
        told = [f"{e['event']} {e.get('epoch', '')}:{e.get('group_size', '')}" for e in self.said()]
        return f"{self.log.name}: {told[:4]} ... {told[-6:]}\n{self.log.read_text()[-600:]}"

    def ask(self, timeout: float = 240.0, **order) -> dict:
        """Send an order and await its own answer."""
        number = sum(event["event"] == "answer" for event in self.events)
        self.order(json.dumps(order))
        self.wait_for(lambda e: e["event"] == "answer" and e["number"] == number, timeout)
        return self.events[-1]

    def order(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, as a lost VM: no goodbye, and nothing of it stays."""
        nursery.kill_group(self.process.pid)
        self.process.wait(60)


class LocalSwarm:
    """Peers that know the first one."""

    def __init__(self, folder: Path):
        self.folder, self.peers = folder, []

    def add(self, **settings) -> LocalPeer:
        if self.peers:
            settings.setdefault("initial_peers", self.peers[0].wait_event("connected")["maddrs"])
        index = len(self.peers)
        peer = LocalPeer(self.folder / f"peer-{index}.log", seed=index + 1, **settings)
        self.peers.append(peer)
        return peer

    def finish(self, *peers: LocalPeer, more: int = 10) -> list[dict]:
        """Let `peers` end together, a few epochs on; :returns: their "finished" events."""
        last = more + max(e["epoch"] for p in peers for e in p.said() if e["event"] == "epoch")
        for peer in peers:
            peer.order(f"finish {last}")
        return [peer.wait_event("finished") for peer in peers]


@contextlib.contextmanager
def local_swarm(folder: Path) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(folder)
    try:
        yield swarm
    except AssertionError:
        for peer in swarm.peers:
            print(peer.brief())
        raise
    finally:
        for peer in swarm.peers:
            peer.kill()
