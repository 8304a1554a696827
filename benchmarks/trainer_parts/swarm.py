"""Processes of peer.py, or of another module that speaks as it does, and what they say."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from volunteer_kit.process_group import kill_all

ROOT = Path(__file__).parents[2]


class TrainerPeer:
    """One of them, a process group of its own.

    :param inside: what stands before its command
    :param look: -> fields that are added to each of its events as it comes
    :param module: what it runs
    :param settings: peer.py's
    """

    def __init__(
        self,
        out: Path,
        inside: Sequence[str] = (),
        look: Callable[[], dict] = dict,
        module: str = "benchmarks.trainer_parts.peer",
        **settings,
    ):
        self.out, self.events, self._look = out, [], look
        self._log = out.with_suffix(".log")
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", module],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log.open("w"), text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        self.process.stdin.write(json.dumps({**settings, "out": str(out)}) + "\n")
        self.process.stdin.flush()
        self._queue: queue.Queue[dict | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith('{"event"'):
                self._queue.put(json.loads(line) | self._look())
        self._queue.put(None)

    def wait_for(self, name: str, timeout: float) -> dict:
        """The next event of this name. Raises SystemExit if it does not come within `timeout` (s)."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                event = self._queue.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"A peer has not come to {name!r} within {timeout:g} s.\n{self._story()}") from None
            if event is None:
                raise SystemExit(f"A peer ended before it came to {name!r}.\n{self._story()}")
            self.events.append(event)
            if event["event"] == name:
                return event

    def said(self, name: str) -> list[dict]:
        return [event for event in self.events if event["event"] == name]

    def parameters(self) -> dict[str, Tensor]:
        """As it had them at the end."""
        return load_file(self.out)

    def kill(self) -> None:
        kill_all(self.process.pid)
        self.process.wait(10)

    def _story(self) -> str:
        return self._log.read_text()[-3000:]


@contextlib.contextmanager
def trained(
    folder: Path, each: Sequence[dict], dht: Callable[[int], dict], patience: float, **settings
) -> Iterator[list[TrainerPeer]]:
    """Peers that have trained together to the end, the others invited by the first.

    :param each: settings of each alone
    :param dht: number of a peer, from 0 -> its hivemind_config["dht"], less initial_peers
    :param patience: s for everything
    """
    peers: list[TrainerPeer] = []
    invited: list[str] = []
    try:
        for number, own in enumerate(each):
            address = {"dht": {**dht(number), "initial_peers": invited}}
            peers.append(TrainerPeer(folder / f"{number}.safetensors", **settings, **own, **address))
            if number == 0:
                invited = peers[0].wait_for("invitation", patience)["maddrs"]
        for peer in peers:
            peer.wait_for("done", patience)
        yield peers
    finally:
        for peer in peers:
            peer.kill()
