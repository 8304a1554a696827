"""Shards on this machine: found by pattern within bounds, and opened only if they are regular files."""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import DataError

MAX_ENTRIES = 500_000  # files and folders that one pattern may make us look at
MAX_SECONDS = 20.0  # s for the same: a disk that has gone to sleep, or a network's
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def list_files(pattern: str) -> list[str]:
    """The regular files that a pattern with *, ?, [...] and ** matches, sorted. As in `glob`, what begins with a dot is
    matched only by a pattern that does; ** does not follow symbolic links. Raises DataError when it would take too
    long."""
    path = Path(pattern)
    top, parts = (path.anchor, path.parts[1:]) if path.anchor else ("", path.parts)
    return sorted({found for found in _matches(top, parts, _Budget(pattern)) if os.path.isfile(found)})


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """"a folder", "a FIFO", "a socket", "a device": what is no regular file; None for a regular one. Raises OSError."""
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        return None
    return next((name for is_kind, name in KINDS if is_kind(mode)), "no regular file")


def open_regular(path: str, buffering: int) -> BinaryIO:
    """As open(path, "rb"), which waits for ever at a FIFO that nobody writes to. Raises OSError."""
    if (kind := kind_of(path)) is not None:  # before it is opened: opening a device may do something
        raise OSError(f"it is {kind}, not a regular file")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have been replaced since
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        return os.fdopen(descriptor, "rb", buffering=buffering)
    except BaseException:
        os.close(descriptor)
        raise


class _Budget:
    """Counts what is looked at. Raises DataError when it is too much."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._entries, self._until = pattern, 0, time.monotonic() + MAX_SECONDS

    def spend(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES or time.monotonic() > self._until:
            raise DataError(
                f"The pattern {self._pattern!r} makes the kit look through too much: {self._entries} files and folders "
                f"so far (at most {MAX_ENTRIES}, and {MAX_SECONDS:.0f} s).\n"
                "1. Name the folder that holds the shards: --data FOLDER\n"
                "2. Or a pattern that begins there: --data 'FOLDER/*.tar'"
            )


def _matches(folder: str, parts: tuple[str, ...], budget: _Budget) -> Iterator[str]:
    """The paths below `folder` that match the parts of a pattern."""
    if not parts:
        yield folder
        return
    first, rest = parts[0], parts[1:]
    if first == "**":
        yield from _matches(folder, rest, budget)
        for entry in _entries(folder, budget):
            if entry.name.startswith("."):
                continue
            if _is_real_folder(entry):
                yield from _matches(os.path.join(folder, entry.name), parts, budget)
            elif not rest:
                yield os.path.join(folder, entry.name)
    elif glob.has_magic(first):
        for entry in _entries(folder, budget):
            is_hidden = entry.name.startswith(".") and not first.startswith(".")
            if not is_hidden and fnmatch.fnmatch(entry.name, first):
                yield from _matches(os.path.join(folder, entry.name), rest, budget)
    else:
        place = os.path.join(folder, first)
        if rest or os.path.lexists(place):
            yield from _matches(place, rest, budget)


def _entries(folder: str, budget: _Budget) -> Iterator[os.DirEntry[str]]:
    try:
        entries = os.scandir(folder or ".")
    except OSError:  # not a folder, or not ours to read
        return
    with entries:
        while True:
            try:
                entry = next(entries, None)
            except OSError:  # it has gone meanwhile
                return
            if entry is None:
                return
            budget.spend()
            yield entry


def _is_real_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
