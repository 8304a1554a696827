"""Two people who fine-tune together: their processes, their scripts, and what both have at the end."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.local_swarm import LocalPeer

ALONE = '"dht": {}'  # in a script, of whoever begins
INVITATION = "To join the training, use initial_peers = "


def on_loopback(maddrs: list[str], transport: str = "tcp") -> list[str]:
    return [maddr for maddr in maddrs if maddr.startswith(f"/ip4/127.0.0.1/{transport}/")]


def edited(script: str, dht: dict[str, Any], wait_for: int = 1) -> str:
    """As a person would."""
    assert ALONE in script
    return script.replace(ALONE, f'"dht": {dht!r}').replace('"opt": {', f'"opt": {{"wait_for_peers": {wait_for}, ')


class TalkingPeer(LocalPeer):
    """What it prints besides events is events as well, "line"."""

    def _read(self) -> None:
        for line in self.process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            self._queue.put(event if isinstance(event, dict) else {"event": "line", "text": line.rstrip("\n")})
        self._queue.put(None)

    @property
    def said(self) -> str:
        return "\n".join(event["text"] for event in self.events if event["event"] == "line")


class Person(TalkingPeer):
    """A process of tests/fine_tune.py."""

    def __init__(self, folder: Path, name: str):
        super().__init__(folder / f"{name}.log", module="tests.fine_tune")
        self.folder, self.runs, self.busy = folder / name, 0, False

    def begin(self, script: str, **order) -> None:
        self.events.clear()
        self.busy, self.runs = True, self.runs + 1
        self.here = self.folder / str(self.runs)
        self.here.mkdir(parents=True)
        self.order(json.dumps({"script": script, "folder": str(self.here), **order}))

    def wait_for(self, found, timeout: float = 240.0) -> dict:
        event = super().wait_for(lambda e: e["event"] == "failed" or found(e), timeout)
        assert event["event"] != "failed", event["why"]
        return event

    def invitation(self) -> list[str]:
        """The addresses in the line that it prints for others."""
        line = self.wait_for(lambda e: e["event"] == "line" and e["text"].startswith(INVITATION))["text"]
        return re.findall(r"'(/[^']+)'", line.removeprefix(INVITATION))

    def end(self) -> None:
        self.log_history = self.wait_event("done")["log"]
        self.trained: dict[str, torch.Tensor] = load_file(self.here / "trained.safetensors")
        self.busy = False

    def logged(self, name: str) -> list[Any]:
        return [entry[name] for entry in self.log_history if name in entry]


class Pair:
    """Two processes, for one test after another; new ones after a test that failed."""

    def __init__(self, folder: Path):
        self._folder, self._made, self._people = folder, 0, []

    def train(
        self,
        script: str,
        first: dict[str, Any] | None = None,
        second: dict[str, Any] | None = None,
        choose: Callable[[list[str]], list[str]] = on_loopback,
        **order,
    ) -> list[Person]:
        """Both run `script`, the second with what it chooses of the first one's initial_peers.

        :param first: hivemind_config["dht"] of the first; `second`: of the other, less initial_peers
        :returns: both, at the end; they have averaged, and hold equal parameters
        """
        one, other = people = self.idle()
        one.begin(edited(script, first or {}, wait_for=2), **order)
        invited = {"initial_peers": choose(one.invitation())}
        other.begin(edited(script, {**(second or {}), **invited}, wait_for=2), **order)
        for person in people:
            person.end()
        assert one.trained.keys() == other.trained.keys()
        assert all(torch.equal(one.trained[name], other.trained[name]) for name in one.trained)
        for person in people:
            sizes = [event["group_size"] for event in person.events if event["event"] == "step"]
            assert sizes.count(2) > len(sizes) / 2, sizes
        return people

    def idle(self) -> list[Person]:
        if any(person.busy for person in self._people):
            self.close()
        if not self._people:
            self._made += 1
            self._people = [Person(self._folder, f"{self._made}-{name}") for name in ("one", "other")]
        return self._people

    def leave(self) -> None:
        """They end by themselves, and have nothing to complain of."""
        idle = [person for person in self._people if not person.busy]
        for person in idle:
            person.process.stdin.close()
        codes = [person.process.wait(120) for person in idle]
        assert not any(codes) and not any("Traceback" in person.log.read_text() for person in idle)

    def close(self) -> None:
        for person in self._people:
            person.kill()
        self._people = []
