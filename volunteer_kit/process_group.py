"""A process that meets the swarm: started in a session of its own, and nothing of it stays behind. Ctrl-Z, which the
terminal sends to the kit's own process alone, stops and continues all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from volunteer_kit.packages import with_kit_path

PROC = Path("/proc")
STOPPED = "Stopped, and {} stands still too; other peers miss it. `fg` or `bg` goes on with all of it."
GOES_ON = "All of it goes on, after {:.0f} s of standing still."
JANITOR = "torch_shm_manager"  # each peer has one; it unlinks the shared memory of processes that died, and ends

_leaders: dict[int, str | None] = {}  # of sessions that this process has started -> their mark


def start(module: str, mark: str, *, without: Collection[str] = (), **settings: Any) -> subprocess.Popen:
    """`python -m module` of this kit, leader of its own session, `mark` (NAME=value) in its environment; its stdin and
    stdout are pipes.

    :param without: names of the environment that it does not get
    :param settings: Popen's
    Raises OSError.
    """
    environment = {name: value for name, value in os.environ.items() if name not in without}
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=with_kit_path(environment) | {name: value, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        **settings,
    )
    note_leader(process.pid, mark)
    return process


def note_leader(pid: int, mark: str | None = None) -> None:
    """A process in a session of its own that was started otherwise: Ctrl-Z is to stop it too, until kill_all()."""
    _leaders[pid] = mark


def wait_for_exit(process: subprocess.Popen) -> None:
    """Block until a child has ended, and leave it unreaped: its pid, and its group's, cannot be given to another."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        process.wait()
        return
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def kill_all(leader: int, mark: str | None = None, timeout: float = 5.0) -> list[int]:
    """SIGKILL the leader's process group and session, and every process with `mark` (NAME=value) in its environment.

    The mark finds those that began a session of their own. torch's helper for shared memory has half of the time to end
    by itself: it unlinks the others' tensors from /dev/shm, a model's size for each kill.

    :param timeout: s
    :returns: the pids that still live after that time
    """
    began = time.monotonic()
    _leaders.pop(leader, None)
    if not PROC.is_dir():
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
    while remaining := find(leader, mark):
        if (waited := time.monotonic() - began) > timeout:
            return remaining
        for pid in remaining:
            if waited < timeout / 2 and _is_janitor(pid):
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return []


def _is_janitor(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "comm").read_text().strip() == JANITOR[:15]  # all that the kernel keeps of a name
    except OSError:
        return False


def find(leader: int, mark: str | None = None) -> list[int]:
    """Living processes of the leader's group or session, or with `mark` in their environment. Linux only, else []."""
    found = []
    for entry in PROC.iterdir() if PROC.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            related = leader in (int(fields[2]), int(fields[3]))  # process group, session
            if related or mark and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (OSError, IndexError, ValueError):
            continue
    return found


@contextmanager
def stops_as_one(say: Callable[[str], None], what: str = "the training") -> Iterator[None]:
    """Within it SIGTSTP stops what start() has started before this process, and SIGCONT continues it after; without
    effect outside the main thread, and where SIGTSTP is ignored already.

    If this process is killed while it is stopped, the others go on, see that it is gone, and leave.

    :param say: called in the main thread, at any line of it
    :param what: stands still then
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner and _leaders:  # else a forked child's own matter
            stopped = _stop_all()
            with suppress(RuntimeError):  # in the middle of another line
                say(STOPPED.format(what))
            with _continued_at_our_end(stopped):
                began = time.monotonic()
                try:
                    _stop_ourselves()
                finally:  # `kill` and then `kill -CONT`: what is to say goodbye must run
                    _signal_all(stopped, signal.SIGCONT)
            with suppress(RuntimeError):
                say(GOES_ON.format(time.monotonic() - began))
        else:
            _stop_ourselves()

    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


def _stop_ourselves() -> None:
    """Returns when we are continued. The shell that waits for us is to see this very signal."""
    handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    try:
        signal.raise_signal(signal.SIGTSTP)
    finally:
        signal.signal(signal.SIGTSTP, handler)


def _stop_all() -> list[int]:
    """SIGSTOP everything that start() has started. :returns: the pids; a process may fork until it is stopped"""
    if not PROC.is_dir():  # macOS: by groups, whose numbers os.kill takes negative
        groups = [-leader for leader in [*_leaders]]
        _signal_all(groups, signal.SIGSTOP)
        return groups
    stopped: list[int] = []
    while more := [pid for leader, mark in [*_leaders.items()] for pid in find(leader, mark) if pid not in stopped]:
        _signal_all(more, signal.SIGSTOP)
        stopped += more
    return stopped


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


@contextmanager
def _continued_at_our_end(pids: list[int]) -> Iterator[None]:
    """A shell waits for our end, which a stopped process could not see."""
    if not pids:
        yield
        return
    command = f"read line || kill -CONT {'-- ' if pids[0] < 0 else ''}{' '.join(map(str, pids))}"
    with subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as guard:  # fmt: skip
        try:
            yield
        finally:
            with suppress(OSError):
                guard.stdin.write(b"\n")
                guard.stdin.flush()


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt, and so does SIGHUP, the signal of a terminal that was closed, unless
    it is ignored as under nohup. Without effect outside the main thread, where none can arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [signal.SIGTERM]
    numbers += [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
