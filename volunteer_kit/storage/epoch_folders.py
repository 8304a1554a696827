"""A folder of folders, one an epoch, each whole or not there at all, whenever its writer is killed.

    epoch-000123/                whole
    .epoch-000123.5f3a01bc.part/ being written
    .epoch-000123.old/           moved aside until its successor of the same epoch is in its place
    epoch-000123.damaged/        its successor, which was not whole
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from volunteer_kit.storage.damaged import set_aside
from volunteer_kit.storage.whole import clear_leftovers, flush

_NAME = re.compile(r"epoch-(\d{6,12})")
_MOVED_ASIDE = re.compile(r"\.epoch-(\d{6,12})\.old")
_PART = re.compile(r"\.(epoch-\d{6,12})\..*(part|tmp)")

logger = logging.getLogger(__name__)


def name_of(epoch: int) -> str:
    return f"epoch-{epoch:06d}"


def epoch_of(path: Path) -> int | None:
    """Of a folder's name; None: it is no epoch's."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


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


def tidy(folder: Path, is_whole: Callable[[Path], bool]) -> None:
    """After a writer that was killed: what it was writing goes, and what it had moved aside comes back, if its
    successor is not whole. Raises OSError."""
    for path in list(folder.iterdir()):
        part, aside = _PART.fullmatch(path.name), _MOVED_ASIDE.fullmatch(path.name)
        if part:
            clear_leftovers(folder / part[1])
        elif aside:
            successor = folder / f"epoch-{aside[1]}"
            if successor.exists():
                if is_whole(successor) or not is_whole(path):
                    shutil.rmtree(path, ignore_errors=True)
                    continue
                logger.warning("%s is damaged; it is kept as %s", successor, set_aside(successor))
            path.rename(successor)


def put_in_place(part: Path, path: Path) -> None:
    """Give what is written its name; the same epoch's earlier folder goes when that is done. Raises OSError."""
    aside = path.with_name(f".{path.name}.old")
    replaces = path.exists()
    if replaces:
        path.rename(aside)
    part.rename(path)
    flush(path.parent)
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)
