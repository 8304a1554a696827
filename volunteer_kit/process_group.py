"""A process that meets the swarm: started in a session of its own, and nothing of it stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from volunteer_kit.packages import with_kit_path

PROC = Path("/proc")
JANITOR = "torch_shm_manager"  # each peer has one; it unlinks the shared memory of processes that died, and ends


def start(module: str, mark: str, *, without: Collection[str] = (), **settings: Any) -> subprocess.Popen:
    """`python -m module` of this kit, leader of its own session, `mark` (NAME=value) in its environment; its stdin and
    stdout are pipes.

    :param without: names of the environment that it does not get
    :param settings: Popen's
    Raises OSError.
    """
    environment = {name: value for name, value in os.environ.items() if name not in without}
    name, _, value = mark.partition("=")
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=with_kit_path(environment) | {name: value, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        **settings,
    )


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
def sigterm_as_interrupt() -> Iterator[None]:
    """Within it SIGTERM raises KeyboardInterrupt; without effect outside the main thread, where none can arrive."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
