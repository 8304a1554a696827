"""The file itself: how it is opened, its tables, its version, and what its errors mean to a person."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from volunteer_kit.packages import update_lines
from volunteer_kit.storage.sqlite import lacks_locks

FORMAT = 1  # PRAGMA user_version
BUSY = 10.0  # s to wait for the other process; a write takes milliseconds
WAL_LIMIT = 4 * 2**20  # bytes that the log beside the file may keep once it has been taken over

_TABLES = """
CREATE TABLE metrics (
    time REAL PRIMARY KEY, epoch INTEGER NOT NULL, loss REAL, samples_per_second REAL NOT NULL,
    volunteers INTEGER NOT NULL, progress REAL NOT NULL, samples_total INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX events_by_kind ON events (kind, id);
CREATE TABLE counts (kind TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE pictures (
    id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, epoch INTEGER NOT NULL, caption TEXT NOT NULL,
    path TEXT NOT NULL
);
CREATE TABLE members (
    peer_id TEXT PRIMARY KEY, username TEXT NOT NULL, device TEXT NOT NULL, here INTEGER NOT NULL,
    samples_per_second REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE leaderboard (
    account TEXT PRIMARY KEY, username TEXT NOT NULL, samples INTEGER NOT NULL, provisional INTEGER NOT NULL,
    seconds REAL NOT NULL, machines INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE hidden (account TEXT PRIMARY KEY) WITHOUT ROWID;
"""
# came later; older kits' readers do not miss it, and older files get it when they are written to
_ROUNDS = "CREATE TABLE IF NOT EXISTS rounds (name TEXT PRIMARY KEY, number INTEGER NOT NULL) WITHOUT ROWID"


class JournalError(OSError):
    """The journal could not be read or written. The message says why and what to do."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The file, made if it is not there. Raises JournalError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JournalError(_in_words(path, error.strerror or str(error))) from error
    with told(path):
        connection = _connect(f"{path.absolute().as_uri()}?mode=rwc")
        try:
            connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer never wait for each other
            connection.execute("PRAGMA synchronous = NORMAL")  # whole after kill -9; a power cut may take the last rows
            connection.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT}")
            _make_tables(connection, path)
            connection.execute(_ROUNDS)
        except BaseException:
            connection.close()
            raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """The file as it is. Raises FileNotFoundError (nothing has been written yet), JournalError."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there yet; the monitor makes it")
    with told(path):
        connection = _connect(f"{path.absolute().as_uri()}?mode=ro")
        try:
            found = _version(connection, path)
        except BaseException:
            connection.close()
            raise
    if found == 0:  # made a moment ago, its tables are still to come
        connection.close()
        raise FileNotFoundError(f"{path} is empty so far; the monitor fills it")
    return connection


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, timeout=BUSY, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    return connection


def _version(connection: sqlite3.Connection, path: Path) -> int:
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > FORMAT:
        raise JournalError(
            f"{path} was written by a newer volunteer-kit (format {found}; this one knows up to {FORMAT}).\n"
            f"{update_lines()}"
        )
    return found


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    """All of them or none: two monitors may start at once, and a kill may come in between."""
    if _version(connection, path):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if not _version(connection, path):
            for statement in _TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {FORMAT}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """SQLite's errors become a JournalError in words."""
    try:
        yield
    except sqlite3.Error as error:
        raise JournalError(_in_words(path, str(error))) from error


def _in_words(path: Path, reason: str) -> str:
    if ("I/O" in reason or "lock" in reason) and (lack := lacks_locks(path)):
        return lack
    if "full" in reason or "I/O" in reason or "No space" in reason:
        return (
            f"The disk does not take what should be written to {path} ({reason}).\n"
            f"1. Make room: df -h {path.parent}\n2. What was written before is whole; it goes on once there is room."
        )
    if "not a database" in reason or "malformed" in reason:
        return (
            f"{path} is damaged ({reason}).\n1. Put it aside: mv {path} {path}.damaged\n"
            "2. Start the monitor again: it begins a new one. Curves and events are lost; credit, checkpoints and bans "
            "are kept elsewhere."
        )
    if "locked" in reason:
        return f"{path} was kept busy for more than {BUSY:.0f} s by another process.\n1. See which: fuser -v {path}"
    return (
        f"{path} cannot be opened or used ({reason}).\n1. Look at its folder's owner and rights: ls -la {path.parent}\n"
        "2. Readers need to write there, too: SQLite keeps a small file beside it."
    )
