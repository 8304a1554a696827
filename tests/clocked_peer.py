"""A peer of tests/swarm_peer.py whose wall clock a test can set, in all of its processes: {"ask": "set_clock"}."""

from __future__ import annotations

import multiprocessing
import sys
import time

from tests import swarm_peer
from tests.peer_questions import Questions

OFFSET = multiprocessing.RawValue("d", 0.0)  # s that it is ahead of the machine's
ASLEEP = multiprocessing.RawValue("d", 0.0)  # s that the machine has slept, in which time.monotonic() stood still
_real, _real_gettime = time.time, time.clock_gettime


def wall() -> float:
    return _real() + OFFSET.value + ASLEEP.value


def gettime(clock: int) -> float:
    return _real_gettime(clock) + (ASLEEP.value if clock == time.CLOCK_BOOTTIME else 0.0)


def take_clocks() -> None:
    """This process, and those that it forks, go by these clocks from now on."""
    time.time, time.clock_gettime = wall, gettime
    for module in list(sys.modules.values()):  # those that have taken hivemind's clock by name, which is time.time
        if vars(module).get("get_dht_time") is _real:
            module.get_dht_time = wall


def set_clock(self: Questions, seconds: float) -> dict:
    """Let it be so far ahead of the machine's, s."""
    OFFSET.value = seconds
    return {}


def main() -> None:
    take_clocks()
    Questions.set_clock = set_clock
    swarm_peer.main()


if __name__ == "__main__":
    main()
