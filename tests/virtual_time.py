"""asyncio on a clock that moves only when every task waits for it, so that no load on the machine makes a peer late."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock


class PatientSelector(selectors.DefaultSelector):
    """Instead of a wait for a timer it tells `skip` how long that would have taken, in seconds.

    It waits for real while `is_busy()`: a thread works for the loop then.
    """

    def __init__(self, is_busy: Callable[[], bool], skip: Callable[[float], None]):
        super().__init__()
        self._is_busy, self._skip = is_busy, skip

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if self._is_busy():
            return super().select(None)
        found = super().select(0)
        if not found:
            self._skip(timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop for one process without sockets to others: its seconds pass at once when it is idle.

    Work in an executor takes no time. `time.monotonic` must be this loop's `time`: see `run_in_virtual_time`.
    """

    def __init__(self) -> None:
        self._now, self._working = 1000.0, 0
        super().__init__(PatientSelector(lambda: self._working > 0, self._skip))

    def time(self) -> float:
        return self._now

    def _skip(self, seconds: float) -> None:
        self._now += seconds

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self._working += 1
        future.add_done_callback(self._end_work)
        return future

    def _end_work(self, future: asyncio.Future[Any]) -> None:
        self._working -= 1


def run_in_virtual_time(story: Callable[[], Coroutine[Any, Any, Any]], timeout: float) -> Any:
    """Run `story()` to its end.

    :param timeout: virtual seconds after which it is given up with TimeoutError
    """
    with contextlib.closing(VirtualLoop()) as loop, mock.patch.object(time, "monotonic", loop.time):
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(asyncio.wait_for(story(), timeout))
        finally:
            for task in (left := asyncio.all_tasks(loop)):
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
            asyncio.set_event_loop(None)
