"""A capped store of encoded samples, so that later passes need neither the network nor the image tokenizer.

It is sqlite3, for what a cache of its own would have to learn again: a process killed in the middle of a write, two
processes at one file, a full disk. Whatever goes wrong costs the cache, never the training.
"""

from __future__ import annotations

import hashlib
import sqlite3
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
PAGE = 4096  # bytes
SPARE_PAGES = 16  # for the tables themselves, beside a value's own
LARGEST = 8  # a value has an eighth of the room at most, so that there is always something to evict
SHARE = 0.85  # of the room is for pages; the rest is for the journal, which a transaction writes beside them
VACUUM = 256  # pages given back in one transaction
SMALLEST = 64 * 1024  # bytes; with less room there is no cache
OURS = 0x766B6974  # says that a file is a cache of this kit
VERSION = 1
WAIT, WAIT_TO_OPEN = 1.0, 10.0  # s for another process
MAX_BEGUN_ANEW = 3  # a disk that damages every file is not written to
MAX_TOUCHED = 1000  # values whose last use is not yet written down


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class SampleCache:
    """Bytes by key, at most `max_bytes` of file (of memory, if `path` is None) with everything beside it; what was
    not used for longest goes first. One file serves several threads and processes.

    Nothing here raises: what cannot be read is None, what cannot be written is forgotten, a damaged file is begun
    anew, and `say` is told once if the cache must do without its disk.
    """

    def __init__(self, path: Path | None, max_bytes: int, say: Callable[[str], None] = _to_stderr) -> None:
        self._path, self._say, self._lock = path, say, threading.Lock()
        self._pages, self._max_value = int(max_bytes * SHARE) // PAGE, max_bytes // LARGEST
        self._db: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._is_open, self._can_write, self._begun_anew = False, True, 0
        self._touched: dict[int, int] = {}  # id -> when it was last used, ns
        self.outlives = path is not None
        if max_bytes >= SMALLEST:
            self._try(self._open)

    def get(self, key: str) -> bytes | None:
        """The value of `key`, exactly as it was put; None if it is not there (any more)."""
        with self._lock:
            return self._try(lambda: self._find(key)) if self._is_open else None

    def put(self, key: str, value: bytes) -> None:
        """Keep `value`, which is the same for everybody who puts `key`; what is there already stays."""
        with self._lock:
            if self._is_open and self._can_write and len(value) <= self._max_value:
                self._try(lambda: self._insert(key, value))

    def close(self) -> None:
        """Let go of the file; from now on nothing is found and nothing is kept."""
        with self._lock:
            if self._is_open and self._can_write:
                self._try(self._write_touched)
            self._let_go()

    # reading and writing

    def _find(self, key: str) -> bytes | None:
        query = "SELECT samples.id, crc, value FROM samples JOIN contents USING (id) WHERE key = ?"
        row = self._db.execute(query, (_digest(key),)).fetchone()
        if row is None:
            return None
        number, crc, value = row
        if not isinstance(value, bytes) or zlib.crc32(value) != crc:
            self._remove("id = ?", number)
            return None
        self._touched[number] = time.time_ns()
        if len(self._touched) > MAX_TOUCHED and self._can_write:
            self._write_touched()
        return value

    def _insert(self, key: str, value: bytes) -> None:
        self._write_touched()
        pages = len(value) // (PAGE - 4) + SPARE_PAGES
        while self._has_room(pages) or self._evict():
            with _transaction(self._db):
                if not self._has_room(pages):
                    continue  # another process was quicker
                row = (_digest(key), time.time_ns(), zlib.crc32(value))
                added = self._db.execute("INSERT OR IGNORE INTO samples (key, used, crc) VALUES (?, ?, ?)", row)
                if added.rowcount:
                    self._db.execute("INSERT INTO contents (id, value) VALUES (?, ?)", (added.lastrowid, value))
                return

    def _has_room(self, pages: int) -> bool:
        return self._number("page_count") - self._number("freelist_count") + pages <= self._pages

    def _evict(self) -> int:
        """One value a transaction, which keeps the journal small."""
        return self._remove("used = (SELECT min(used) FROM samples)")

    def _remove(self, where: str, *args: Any) -> int:
        with _transaction(self._db):
            ids = self._db.execute(f"SELECT id FROM samples WHERE {where}", args).fetchall()
            self._db.executemany("DELETE FROM contents WHERE id = ?", ids)
            self._db.executemany("DELETE FROM samples WHERE id = ?", ids)
        return len(ids)

    def _write_touched(self) -> None:
        if self._touched:
            with _transaction(self._db):
                rows = [(used, number) for number, used in self._touched.items()]
                self._db.executemany("UPDATE samples SET used = ? WHERE id = ?", rows)
        self._touched.clear()

    def _number(self, pragma: str) -> int:
        return self._db.execute(f"PRAGMA {pragma}").fetchone()[0]

    # the file

    def _open(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(
            self._path or ":memory:", timeout=WAIT_TO_OPEN, isolation_level=None, check_same_thread=False
        )
        self._inode = self._path.stat().st_ino if self._path else None
        if self._is_empty():
            self._create()
        self._db.execute("PRAGMA synchronous = OFF")  # a killed process loses nothing; after a power cut, crc tells
        if self._number("page_count") > self._pages:
            self._shrink()
        self._db.execute(f"PRAGMA max_page_count = {self._pages}")
        self._db.execute(f"PRAGMA busy_timeout = {int(WAIT * 1000)}")
        self._is_open = True

    def _is_empty(self) -> bool:
        """Raises OSError for another program's file or a newer kit's, sqlite3.DatabaseError for an
        older one's."""
        self._db.execute("BEGIN")  # so that the three belong together
        kind, version, schema = map(self._number, ("application_id", "user_version", "schema_version"))
        self._db.execute("COMMIT")
        if kind == 0 and schema == 0:
            return True
        if kind != OURS:
            raise OSError("it is another program's file")
        if version > VERSION:
            raise OSError("it is of a newer version of the kit")
        if version != VERSION:
            raise sqlite3.DatabaseError("a cache of another version")
        return False

    def _create(self) -> None:
        self._db.execute(f"PRAGMA page_size = {PAGE}")
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # lets a file shrink in place, under others' eyes
        columns = "id INTEGER PRIMARY KEY, key BLOB UNIQUE, used INTEGER, crc INTEGER"
        with _transaction(self._db):
            self._db.execute(f"CREATE TABLE IF NOT EXISTS samples ({columns})")
            self._db.execute("CREATE INDEX IF NOT EXISTS by_use ON samples (used)")
            self._db.execute("CREATE TABLE IF NOT EXISTS contents (id INTEGER PRIMARY KEY, value BLOB)")
            self._db.execute(f"PRAGMA application_id = {OURS}")
            self._db.execute(f"PRAGMA user_version = {VERSION}")

    def _shrink(self) -> None:
        """The file was made for more room than there is now."""
        while not self._has_room(SPARE_PAGES) and self._evict():
            pass
        for _ in range(-(-self._number("freelist_count") // VACUUM)):
            self._db.executescript(f"PRAGMA incremental_vacuum({VACUUM})")  # execute would give back one page only

    # what goes wrong

    def _try(self, work: Callable[[], T]) -> T | None:
        """What `work` gives; None, and what there is to do about it, where it fails."""
        try:
            return work()
        except sqlite3.DatabaseError as error:
            if type(error) is sqlite3.DatabaseError:  # what is derived from it is not about a damaged file
                self._begin_anew(str(error))
            else:
                self._fails(str(error))
        except OSError as error:
            self._fails(str(error))
        return None

    def _fails(self, why: str) -> None:
        if "locked" in why and self._is_open:
            return  # another process is at work, and this value is worth no waiting
        if "full" in why and self._is_open:
            self._do_without("the disk is full", "Nothing more is kept")
        else:
            self._let_go()
            self._do_without(why)

    def _begin_anew(self, why: str) -> None:
        """Delete a damaged file, unless another process has put a new one in its place."""
        self._let_go()
        self._begun_anew += 1
        if self._path is None or self._begun_anew > MAX_BEGUN_ANEW:
            self._do_without(why)
            return
        try:
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
                Path(f"{self._path}-journal").unlink(missing_ok=True)
        except OSError as error:
            self._do_without(str(error))
        else:
            self._try(self._open)

    def _do_without(self, why: str, what: str = "The run goes on without it") -> None:
        if self._can_write:
            self._say(f"The cache {self._path or 'in memory'}: {why}. {what}; more is read and encoded again.")
        self._can_write = False

    def _let_go(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db, self._is_open = None, False
        self._touched.clear()


class _transaction:
    """BEGIN, then COMMIT or ROLLBACK; sqlite3's own does not begin before the first change."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:  # a reader that stays stops a COMMIT; a full disk has rolled back already
                self._db.execute("ROLLBACK")


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
