"""A lock between processes that survives the death of its holder."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

from volunteer_kit.swarm.net.fork_context import FORK

HELD_FOR = 2.0  # s; a living process holds such a lock for well under a millisecond


class SurvivingLock:
    """For multiprocessing.Array (`lock=`): as its own lock, the same thread may take it again.

    A process that is killed while it holds multiprocessing's lock keeps it for ever, and all others wait. This one is
    taken over after HELD_FOR s. It guards short work on shared memory only.
    """

    def __init__(self) -> None:
        self._lock = FORK.Lock()
        self._held = threading.local()  # how often by this thread, and in which process

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        """As multiprocessing's. Waits for HELD_FOR s at most, and then has the lock all the same."""
        if self._depth == 0 and not self._lock.acquire(block, HELD_FOR if timeout is None else timeout):
            if not block or timeout is not None:
                return False
        self._held.depth, self._held.pid = self._depth + 1, os.getpid()
        return True

    def release(self) -> None:
        """As multiprocessing's."""
        self._held.depth = self._depth - 1
        if self._held.depth == 0:
            with suppress(ValueError):  # it was taken over, and is free again
                self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    @property
    def _depth(self) -> int:
        return self._held.depth if getattr(self._held, "pid", None) == os.getpid() else 0
