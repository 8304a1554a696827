"""Virtual time: a queue of calls, and clocks that go wrong."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, NamedTuple


class Clock:
    """Calls what is due, in the order of time; calls of one time come in the order in which they were planned."""

    __slots__ = ("now", "stopped", "_queue", "_order")

    def __init__(self) -> None:
        self.now = 0.0  # s
        self.stopped = False
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Plan a call; a time in the past is now."""
        self._order += 1
        heapq.heappush(self._queue, (max(time, self.now), self._order, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        """Plan a call in so many seconds."""
        self.at(self.now + seconds, call, *arguments)

    def run(self, until: float) -> None:
        """Call everything that is due until then, or until `stop`."""
        queue = self._queue
        while queue and queue[0][0] <= until and not self.stopped:
            self.now, _, call, arguments = heapq.heappop(queue)
            call(*arguments)
        if not self.stopped:
            self.now = until

    def stop(self) -> None:
        """End `run` after the call that is being made."""
        self.stopped = True


class LocalClock(NamedTuple):
    """A peer's own clock, which is ahead or behind and goes too fast or too slow."""

    ahead: float = 0.0  # s at time 0
    rate: float = 1.0  # its seconds in a true second

    def read(self, now: float) -> float:
        """What it shows at this true time."""
        return now * self.rate + self.ahead

    def when(self, local: float) -> float:
        """The true time at which it shows `local`."""
        return (local - self.ahead) / self.rate + 1e-6  # never before, whatever the rounding
