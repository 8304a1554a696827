"""Free the locks and the pipe of hivemind's futures, which all processes share, after one of them was killed.

Every answer from a process of a peer goes through one pipe for the whole program, and whoever writes there holds a lock
that all processes share. A process that is killed at that moment leaves the lock taken and half an answer in the pipe:
no later answer would arrive, not even of a new peer in the same program.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress

from hivemind.utils import MPFuture
from hivemind.utils.asyncio import _AsyncContextWrapper
from hivemind.utils.mpfuture import SharedBytes

from volunteer_kit.swarm.net.surviving_lock import HELD_FOR

_users: weakref.WeakSet[object] = weakref.WeakSet()  # peers of this program that run
_lock = threading.Lock()
_were_used = False


def begin_to_use(user: object) -> None:
    """Announce a peer that is about to start. Where others ran before and none runs now, it gets a new pipe and new
    locks."""
    global _were_used
    with _lock:
        if _were_used and not _users:
            MPFuture.reset_backend()
        _users.add(user)
        _were_used = True


def end_use(user: object) -> None:
    """The processes of this peer have ended, or soon will. May be called again and again."""
    with _lock:
        _users.discard(user)


def free_locks_of_killed() -> None:
    """Free what a killed process held, so that those that wait for it go on. To be called after it was killed."""
    of_futures = (SharedBytes._lock, MPFuture._initialization_lock, MPFuture._update_lock)
    for lock in (*of_futures, _AsyncContextWrapper.EXECUTOR_LOCK):
        lock.acquire(timeout=HELD_FOR)
        with suppress(ValueError):  # its holder lived after all, and has released it meanwhile
            lock.release()
