"""A folder of folders, one an epoch, each whole or not there at all, whenever its writer is killed.

    epoch-000123/             whole
    .epoch-000123.4711.tmp/   being written, by the process 4711
    .epoch-000123.old/        moved aside until its successor of the same epoch is in its place
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

_NAME = re.compile(r"epoch-(\d{6,12})")
_MOVED_ASIDE = re.compile(r"\.epoch-(\d{6,12})\.old")
_TEMPORARY = re.compile(r"\.epoch-\d{6,12}\.(\d+)\.tmp")


def name_of(epoch: int) -> str:
    return f"epoch-{epoch:06d}"


def temporary_of(path: Path) -> Path:
    """Where this process writes what is to become `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def newest_first(folder: Path) -> list[Path]:
    """What is there, newest epoch first; one that was moved aside counts while its successor is missing."""
    found: dict[int, Path] = {}
    try:
        entries = sorted(folder.iterdir())  # ".epoch-" sorts before "epoch-": a whole successor wins
    except (FileNotFoundError, NotADirectoryError):
        return []
    for path in entries:
        match = _NAME.fullmatch(path.name) or _MOVED_ASIDE.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return [found[epoch] for epoch in sorted(found, reverse=True)]


def clear_leftovers(folder: Path) -> None:
    """What a killed writer left behind: half-written folders go, one moved aside comes back."""
    for path in list(folder.iterdir()):
        temporary, aside = _TEMPORARY.fullmatch(path.name), _MOVED_ASIDE.fullmatch(path.name)
        if temporary and (int(temporary[1]) == os.getpid() or not _is_alive(int(temporary[1]))):
            shutil.rmtree(path, ignore_errors=True)
        elif aside and (folder / f"epoch-{aside[1]}").exists():
            shutil.rmtree(path, ignore_errors=True)
        elif aside:
            path.rename(folder / f"epoch-{aside[1]}")


def put_in_place(temporary: Path, path: Path) -> None:
    """Give what is written its name; the same epoch's earlier folder goes when that is done."""
    aside = path.with_name(f".{path.name}.old")
    replaces = path.exists()
    if replaces:
        path.rename(aside)
    temporary.rename(path)
    flush(path.parent)
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)


def flush(path: Path) -> None:
    """fsync of a file, or of a folder: names that were given stay given."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
