"""What SQLite does not say in words: files that were cut off between two starts (it takes an empty one for new, and
fills a cut page up), and file systems without the locks that it needs ("disk I/O error")."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from volunteer_kit.storage.locks import knows_record_locks

HEADER = b"SQLite format 3\0"


def require_whole(path: str | Path) -> None:
    """Raises sqlite3.DatabaseError for a file that is there and empty, or ends within a page. What it says is SQLite's
    to find out; a file with a log beside it, whose writer was killed, may be as long as it likes."""
    path = Path(path)
    try:
        size, log = path.stat().st_size, Path(f"{path}-wal")
        with path.open("rb") as file:
            start = file.read(18)
        has_log = log.exists() and log.stat().st_size > 0
    except OSError:
        return  # missing, or no file: SQLite says so
    if not start.strip(b"\0"):
        raise sqlite3.DatabaseError(f"{path} is empty")
    page = int.from_bytes(start[16:18], "big")
    if start.startswith(HEADER) and not has_log and size % (65_536 if page == 1 else max(page, 512)):
        raise sqlite3.DatabaseError(f"{path} is cut off: the database disk image is malformed")


def lacks_locks(path: str | Path) -> str:
    """What to tell a person where a database cannot work since its folder's file system knows no record locks; ""
    where it does."""
    folder = Path(path).absolute().parent
    if knows_record_locks(folder):
        return ""
    return (
        f"The file system of {folder} knows no record locks, and SQLite, which keeps {Path(path).name}, needs them.\n"
        "1. Choose a folder on a local disk: --folder PATH\n"
        "2. Or mount that file system with locks (Lustre: -o flock; NFS: without nolock)."
    )
