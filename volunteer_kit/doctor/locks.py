"""Do locks work where the kit keeps its files? Two processes that take each other for dead would share one identity."""

from __future__ import annotations

import tempfile
from pathlib import Path

from volunteer_kit.doctor.finding import Finding
from volunteer_kit.storage.locks import Kind, LockFile

NAME = "locks"


def look(folder: Path) -> Finding:
    """Lock a file twice in `folder`, or in the nearest one above it that is there. It is removed again."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    try:
        with tempfile.TemporaryDirectory(prefix=".volunteer-kit-doctor-", dir=there) as place:
            first, second = (LockFile(Path(place) / "lock") for _ in range(2))
            is_ours = first.acquire()
            excludes = is_ours and not second.acquire()
            for lock in (second, first):
                lock.release()
    except OSError as error:
        return cannot_write(str(there), error.strerror or str(error))
    return verdict(str(there), first.kind or "file", excludes)


def verdict(folder: str, kind: Kind, excludes: bool) -> Finding:
    """:param kind: of lock that works there
    :param excludes: a second one was refused while the first was held"""
    if not excludes:
        text = f"the file system of {folder} lets two processes have one lock: two workers would not notice each other"
        return Finding(NAME, "warning", text, _elsewhere("Start the kit once at a time there, or choose"))
    if kind == "file":
        text = (
            f"the file system of {folder} knows no locks, so a file names the holder; after a crash on another machine "
            "or in another container it must be removed by hand (the error says which)"
        )
        return Finding(NAME, "warning", text, _elsewhere("Choose"))
    return Finding(NAME, "ok", {"flock": "flock", "record": "record locks; there is no flock"}[kind] + f" in {folder}")


def cannot_write(folder: str, reason: str) -> Finding:
    return Finding(NAME, "problem", f"{folder} cannot be written: {reason}", _elsewhere("Choose"))


def _elsewhere(begin: str) -> str:
    return f"{begin} a folder on a local disk: --home FOLDER, or export VOLUNTEER_KIT_HOME=/PATH"
