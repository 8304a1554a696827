"""Which processes of this machine hold a folder of the kit's, and whether they stand stopped (Ctrl-Z): such a one keeps
all others out, and computes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

LOCKS = ("volunteer", "worker", "host", "monitor")  # in the order in which one starts the other


class Holder(NamedTuple):
    """A process that has a lock's file open.

    :param lock: of LOCKS
    :param terminal: "/dev/pts/3"; "": it has none
    """

    pid: int
    lock: str
    is_stopped: bool
    terminal: str = ""


class Stopped(NamedTuple):
    """In words: what stands stopped, and the commands that mend it, each for a line."""

    text: str
    ways_out: tuple[str, ...]


def holders(folder: Path) -> list[Holder]:
    """Processes that this user may look at and that have a lock of this folder open, in the order of LOCKS."""
    files = {os.path.realpath(folder / f"{name}.lock"): name for name in LOCKS}
    if not any(map(os.path.exists, files)):
        return []
    found = []
    for process in psutil.process_iter():
        try:
            held = {files[file.path] for file in process.open_files() if file.path in files}
            stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            found += [Holder(process.pid, lock, stopped, process.terminal() or "") for lock in held]
        except psutil.Error:  # another user's, or it has ended
            continue
    return sorted((one for one in found if one.pid != os.getpid()), key=lambda one: (LOCKS.index(one.lock), one.pid))


def what_is_stopped(folder: Path, there: list[Holder]) -> Stopped | None:
    """:param there: the folder's holders
    :returns: None: none of them is"""
    first = next((one for one in there if one.is_stopped), None)
    if first is None:
        return None
    pids = " ".join(str(one.pid) for one in there if one.is_stopped and one.lock == first.lock)
    text = f"process {pids} ({first.lock}) stands stopped, as Ctrl-Z does it: it holds {folder}, and computes nothing"
    if " " in pids:
        text = f"processes {pids} ({first.lock}) stand stopped: they hold {folder}, and compute nothing"
    if first.lock in ("worker", "monitor"):  # what has started them says goodbye for them
        return Stopped(text, (f"Go on: kill -CONT {pids}",))
    where = f"in its terminal ({first.terminal})" if first.terminal else "in the terminal where it was started"
    end = f"kill {pids}; kill -CONT {pids}   (a stopped process takes `kill` when it goes on)"
    go_on = f"Go on: fg   {where}, or from anywhere: kill -CONT {pids}"
    return Stopped(text, (go_on, f"Or end it with a goodbye: {end}"))
