"""Give the core a clock that does not count the time in which its process was stopped or its machine slept.

A process that runs again finds its timers due before it has read the messages of the others. With a clock that went on
it would believe that it is alone, and open a branch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LONGEST_GAP: Final = 2.5  # s between two looks at the clock; the core's heartbeat takes one each second


class RunningClock:
    """s that this process has run. It has to be looked at more often than every `LONGEST_GAP` s."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._seen = clock()
        self._slept = 0.0

    def __call__(self) -> float:
        now = self._clock()
        gap = now - self._seen
        if gap > LONGEST_GAP:
            self._slept += gap
        self._seen = now
        return now - self._slept
