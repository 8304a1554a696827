"""Watch the processes of a peer: notice the death of one at once, and say so in plain words.

hivemind starts a process for the DHT, with p2pd below it, and watches none of them: calls to one that has died neither
answer nor fail, and the peer looks alive for ever. The node is a process as well.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NoReturn, Protocol

import psutil

from volunteer_kit.storage.socket_folders import remove_own_folders
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.net.fork_context import FORK
from volunteer_kit.swarm.net.shared_futures import free_locks_of_killed
from volunteer_kit.swarm.net.sockets import SocketGuard, sockets_of_multiprocessing

LOOK_EVERY = 1.0  # s between looks at the sockets of this process
ROOT_CAUSE_WITHIN = 0.5  # s after the first death: the process that died of the cause may be seen second
CAUSE_WITHIN = 3.0  # s, until the first death has been noticed and its cause is known
SAY_WITHIN = 2.0  # s to tell the reason, before the process ends all the same
SHARED_MEMORY = "torch_shm_manager"
BROKEN = "broken"  # the kind of SwarmError
LACKS = {  # signal -> what it mostly means
    signal.SIGKILL: ", often the system's answer to a lack of memory",
    signal.SIGBUS: ", mostly because shared memory was full: df -h /dev/shm",
}


class LastWords:
    """What a process says before it ends itself: its parent reads it afterwards."""

    def __init__(self) -> None:
        self._text = FORK.RawArray(ctypes.c_char, 400)  # no lock: a process may die that holds it

    def write(self, text: str) -> None:
        self._text.value = text.encode()[:399]

    def read(self) -> str:
        return self._text.value.decode(errors="replace")


class Words(Protocol):
    """LastWords, and others'."""

    def read(self) -> str: ...


class WatchedProcess(Protocol):
    """A process of hivemind's that is ours, or a node (swarm/node/link.py): as multiprocessing has them."""

    @property
    def last_words(self) -> Words: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...

    def break_off(self, error: SwarmError) -> None:
        """Fail the calls to it that wait for an answer, and all to come."""


@dataclass(eq=False)
class _Child:
    role: str  # begins the sentence that tells how it ended
    sentinel: int  # is readable when it has ended
    exit_code: Callable[[], int | None]
    process: Any = None  # a WatchedProcess; None: it is not ours

    def how_ended(self) -> str:
        said = self.process.last_words.read() if self.process is not None else ""
        return said or f"{self.role} {end_in_words(self.exit_code())}"


class PeerProcesses:
    """Watches the processes of one peer, in one thread. The first death breaks the peer for good.

    Then the callback of `when_broken` is called, in that thread; if it returns, the other processes are killed, and all
    calls that wait for an answer raise SwarmError (kind "broken").

    :ivar why_broken: what happened, in one sentence without its full stop; None: all is well
    """

    def __init__(self) -> None:
        self.why_broken: str | None = None
        self._children: list[_Child] = []
        self._lock = threading.Lock()
        self._woken, self._wake = FORK.Pipe(duplex=False)  # the list has changed
        self._guard = SocketGuard()
        self._on_broken: Callable[[str], None] | None = None
        self._is_broken = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, process: WatchedProcess, role: str) -> None:
        """Watch a process that has been started.

        :param role: "The process that ...", begins the sentence that tells of its end
        """
        self._add(_Child(role, process.sentinel, partial(_exit_code_of, process), process))

    def add_shared_memory_manager(self) -> None:
        """Watch torch's helper for shared memory: without it no tensor crosses processes any more. On Linux only."""
        if not hasattr(os, "pidfd_open"):
            return
        for process in psutil.Process().children():
            with suppress(psutil.Error, OSError):
                if process.name() == SHARED_MEMORY:
                    descriptor, exit_code = os.pidfd_open(process.pid), partial(_exit_code_of_pid, process.pid)
                    self._add(_Child("The helper for shared memory", descriptor, exit_code))

    def _add(self, child: _Child) -> None:
        with self._lock:
            self._children.append(child)
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="peer processes", daemon=True)
                self._thread.start()
        self._wake_up()

    def remove(self, process: WatchedProcess) -> None:
        """It is about to end, as it should."""
        with self._lock:
            self._children = [child for child in self._children if child.process is not process]
        self._wake_up()

    def when_broken(self, callback: Callable[[str], None]) -> None:
        """:param callback: gets `why_broken`; at once if the peer is broken already"""
        with self._lock:
            self._on_broken = callback
            why = self.why_broken
        if why is not None:
            callback(why)

    def cause_of(self, why: str) -> str:
        """Return the cause of a death, for which it waits some time; `why` itself if it finds none. Call it from
        another thread than the one that watches.

        :param why: what came of the death
        """
        self._is_broken.wait(CAUSE_WITHIN)
        return self.why_broken or why

    def close(self) -> None:
        """The peer is about to end, as it should. May be called again and again."""
        with self._lock:
            self._is_closed = True
            children, self._children = self._children, []
        self._wake_up()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)
        for child in children:
            if child.process is None:
                os.close(child.sentinel)
        self._wake.close()
        self._woken.close()

    def raise_if_broken(self, advice: str = "") -> None:
        """Raises SwarmError (broken)."""
        if self.why_broken is not None:
            raise broken(self.why_broken, advice)

    # --- the thread ---

    def _wake_up(self) -> None:
        with suppress(OSError):  # closed
            self._wake.send_bytes(b"")

    def _watch(self) -> None:
        while not self._is_closed:
            with self._lock:
                children = list(self._children)
            ready = wait([self._woken, *(child.sentinel for child in children)], timeout=LOOK_EVERY)
            if self._woken in ready:
                self._woken.recv_bytes()
            if dead := [child for child in children if child.sentinel in ready]:
                if (why := self._root_cause(dead)) is not None:
                    self._break(why)
                    return
            elif (lost := self._guard.find_lost(sockets_of_multiprocessing())) is not None:
                self._break(socket_lost(lost))
                return

    def _root_cause(self, dead: list[_Child]) -> str | None:
        """How the process ended that was started first, of those that end now: the others may have died of it. None:
        all was as it should. What is not ours is the cause itself, and torch soon aborts all of us for it."""
        until = time.monotonic() + ROOT_CAUSE_WITHIN
        while not any(child.process is None for child in dead):
            with self._lock:
                living = [child for child in self._children if child not in dead]
            ready = wait([child.sentinel for child in living], timeout=max(0.0, until - time.monotonic()))
            dead += [child for child in living if child.sentinel in ready]
            if time.monotonic() >= until or not living:
                break
        with self._lock:
            dead = [child for child in self._children if child in dead]
        dead.sort(key=lambda child: child.process is not None)
        return dead[0].how_ended() if dead else None

    def _break(self, why: str) -> None:
        with self._lock:
            if self._is_closed:
                return
            self.why_broken, children, callback = why, list(self._children), self._on_broken
        self._is_broken.set()
        if callback is not None:
            callback(why)
        ours = [child.process for child in children if child.process is not None]
        for process in ours:
            process.kill()
        for process in ours:
            process.join(timeout=5.0)
        free_locks_of_killed()
        for process in ours:
            process.break_off(broken(why))


def broken(why: str, advice: str = "") -> SwarmError:
    """:param advice: what to do, in numbered lines"""
    return SwarmError(f"{why}." + (f"\n{advice}" if advice else " This peer has to be started again."), kind=BROKEN)


def end_in_words(code: int | None) -> str:
    """How a process ended, as the second half of a sentence.

    :param code: as of multiprocessing: negative, if a signal killed it; None: not known
    """
    if code is None:
        return "has ended"
    if code >= 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        return f"was killed by signal {-code} ({name}){LACKS.get(-code, '')}"
    return f"was killed by signal {-code}"


def socket_lost(path: str) -> str:
    return f"Another program removed {path}, where the processes of this peer meet"


def _exit_code_of(process: WatchedProcess) -> int | None:
    process.join(timeout=1.0)
    return process.exitcode


def _exit_code_of_pid(pid: int) -> int | None:
    with suppress(OSError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return None


def end_program(say: Callable[[], None], code: int) -> NoReturn:
    """End this program at once, with all that it started: its main thread may wait for an answer that never comes.

    What is saved is saved in one piece at any time, so nothing of it is lost.

    :param say: tells the reason; it is given SAY_WITHIN s, for whoever should read it may not
    """
    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    speaker.join(timeout=SAY_WITHIN)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            child.kill()
    remove_own_folders()
    os._exit(code)
