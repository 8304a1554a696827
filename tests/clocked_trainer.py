"""A peer of the Trainer's benchmark (benchmarks/trainer_parts/peer.py) whose clocks a test can set, in all of its
processes. After the first line of stdin: {"clock": SECONDS} ahead of the machine's, {"sleep": SECONDS}."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterable

from benchmarks.trainer_parts import peer
from tests import clocked_peer
from volunteer_kit.swarm.net import clock_watch
from volunteer_kit.worker import own_stdin


def follow(lines: Iterable[bytes]) -> None:
    for line in lines:
        order = json.loads(line)
        clocked_peer.OFFSET.value = order.get("clock", clocked_peer.OFFSET.value)
        clocked_peer.ASLEEP.value += order.get("sleep", 0.0)


def main() -> None:
    clocked_peer.take_clocks()
    clock_watch.LONG = 0.0  # s; however short it was wrong, a test sees what follows
    lines = iter(own_stdin())
    sys.stdin = io.StringIO(next(lines).decode())
    threading.Thread(target=follow, args=(lines,), daemon=True).start()
    peer.main()


if __name__ == "__main__":
    main()
