"""SQLite files that were cut off between two starts: SQLite takes an empty one for new, and fills a cut page up."""

from __future__ import annotations

import sqlite3
from pathlib import Path

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
