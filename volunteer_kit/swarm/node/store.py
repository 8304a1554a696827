"""Keep a node's data on its disk: the core's records, the slot table, names of samples, answers, places of states.

    node.lock       held by the one process that owns the folder
    node.sqlite     records, slot table, names, signatures, snapshots of the states
    gradients.bin   the slots, see slots.py
    answers/        the bytes of each answer, by the hex digest
    states/         parameters and statistics, by the hex lineage; the training process writes them

One `write` is one SQLite transaction, so kill -9 leaves all of it or nothing. Each blob has a checksum, because SQLite
has none, and a flipped bit in a promise must not become another vote.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from volunteer_kit.storage import DamagedFile, clear_if_left, keep_aside, part_folder, put_in_place, write_whole
from volunteer_kit.storage.locks import LockFile, knows_record_locks, who_holds
from volunteer_kit.storage.places import make_folder
from volunteer_kit.storage.sqlite import require_whole
from volunteer_kit.swarm import wire
from volunteer_kit.swarm.node.slots import StoreError, no_room
from volunteer_kit.swarm.sync.certificates import Goodbye
from volunteer_kit.swarm.sync.contributions import Accounts, LedgerRecord
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import BallotRecord, Durable, HeadRecord, OpeningRecord, Record, Snapshot

__all__ = ["NodeStore", "StoreError"]

FORMAT: Final = 1  # PRAGMA user_version
WAL_LIMIT: Final = 16 * 2**20  # bytes that the log beside the database keeps once it has been taken over
READ: Final = 2**20  # bytes that are hashed at a time
OWN: Final = 2**30  # bytes; a bound for what this store wrote itself
HEAD: Final = "head"  # its row has the accounts; the items have rows of their own
KINDS: Final[dict[type, str]] = {
    BallotRecord: "ballot",
    OpeningRecord: "opening",
    LedgerRecord: "ledger",
    Goodbye: "goodbye",
}
TABLES: Final = {
    "meta": "key TEXT PRIMARY KEY, data BLOB NOT NULL",
    "records": "kind TEXT PRIMARY KEY, data BLOB NOT NULL",
    "items": "place INTEGER PRIMARY KEY, data BLOB NOT NULL",
    "slots": "number INTEGER PRIMARY KEY, slot INTEGER NOT NULL",
    "names": "number INTEGER, place INTEGER, data BLOB NOT NULL, PRIMARY KEY (number, place)",
    "states": "place INTEGER PRIMARY KEY AUTOINCREMENT, lineage BLOB NOT NULL UNIQUE, size INTEGER NOT NULL, "
    "digest BLOB NOT NULL, data BLOB NOT NULL",
}
OURS: Final = "store."  # prefix of the store's own keys in the table `meta`
_HASH = re.compile(r"[0-9a-f]{64}")
_STATE = re.compile(r"[0-9a-f]*\.safetensors")


class NodeStore:
    """A node's folder. One process at a time owns it; its threads may share the object.

    A database that is damaged, of another version, or about another model is set aside, and an empty one takes its
    place. The votes of this peer id are lost with it: the process then has to take a new identity.

    :param elements: float32 numbers of one gradient slot
    :ivar trouble: what was set aside and why, in words; None: nothing
    :ivar rebooted: the machine started anew since the last `write`, so gradient slots may be torn
    :raises StoreError: if another process owns the folder, or the disk or its rights do not allow to use it
    """

    def __init__(self, folder: str | Path, elements: int):
        self.folder, self.elements = Path(folder), elements
        self.trouble: str | None = None
        self.rebooted = False
        self._path, self._states = self.folder / "node.sqlite", self.folder / "states"
        self._lock = threading.RLock()
        self._owner = LockFile(self.folder / "node.lock")
        self._db: sqlite3.Connection | None = None
        self._flushes = False
        self._boot, self._boot_noted = b"", False
        self._head: HeadRecord | None = None
        self._first = 0  # place of the log's first item in its table
        self._records: dict[type, Any] = {}  # the last one of each other kind
        self._slots: dict[int, int] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._newest: tuple[bytes, Snapshot] | None = None  # the state that was asked for last
        try:
            make_folder(self.folder)
            owns = self._owner.acquire()
        except OSError as error:
            raise no_room(self._owner.path, "to make", error.strerror or str(error)) from error
        if not owns:
            holder = who_holds(self._owner.path)
            raise StoreError(
                f"Another process uses {self.folder}. {holder}\n"
                f"1. See which: fuser -v {self._owner.path}\n2. Wait until it has ended, or end it."
            )
        try:
            try:
                self._open()
            except DamagedFile as error:
                self._begin_anew(error.reason)
            self._tidy_states()
            self._answers = _Answers(self.folder / "answers")
        except BaseException:
            self.close()
            raise

    @property
    def slots_path(self) -> Path:
        """The file for `Slots`."""
        return self.folder / "gradients.bin"

    def close(self) -> None:
        """Let go of the folder. May be called again and again."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None
            self._owner.release()

    def belongs_to(self, peer_id: str) -> bool:
        """Whether the records are this peer's, or nobody's: then they are its from now on. Another peer's are set aside
        first, for identity and votes belong together.

        :raises StoreError: if the disk refuses it
        """
        owner = self.meta(f"{OURS}peer")
        if owner == peer_id.encode():
            return True
        if owner is not None:
            self._begin_anew(f"it belongs to the peer {owner.decode(errors='replace')[:60]}")
        with self._transaction(flush=True) as db:
            _put_meta(db, f"{OURS}peer", peer_id.encode())
        return owner is None

    # --- records ---

    def durable(self) -> Durable:
        """The last record of each kind, and the answers whose bytes are here."""
        with self._lock:
            return Durable(
                head=self._head,
                ballot=self._records.get(BallotRecord),
                opening=self._records.get(OpeningRecord),
                ledger=self._records.get(LedgerRecord),
                held=self._answers.held,
            )

    @property
    def goodbye(self) -> Goodbye | None:
        """The promise never to vote again; a process that finds one starts as a new peer."""
        return self._records.get(Goodbye)

    def slot_table(self) -> dict[int, int]:
        """Number of each contribution that has a slot -> the slot."""
        return dict(self._slots)

    def names(self, number: int) -> tuple[str, ...]:
        """Names of the samples in a contribution; () if it has none."""
        return self._names.get(number, ())

    @property
    def signatures(self) -> bytes:
        """What was last written as such; b"": nothing. To set it is a transaction of its own; `write` takes it along
        with the records."""
        return self.meta(f"{OURS}signatures") or b""

    @signatures.setter
    def signatures(self, data: bytes) -> None:
        self.write(signatures=data, flush=False)

    def write(
        self,
        records: Iterable[Record] = (),
        *,
        slots: Mapping[int, int] | None = None,
        names: Mapping[int, tuple[str, ...]] | None = None,
        signatures: bytes | None = None,
        flush: bool,
    ) -> None:
        """Write all that is given, or nothing if it fails. A record replaces the last one of its kind.

        :param slots: the whole table, number of a contribution -> slot; None: as it was
        :param names: those of all contributions, by number; None: as they were
        :param signatures: of the log's items; None: as they were
        :param flush: it survives a power cut when this returns; False: kill -9 only
        :raises StoreError: if the disk refuses it
        """
        latest: dict[type, Any] = {type(record): record for record in records}
        head: HeadRecord | None = latest.pop(HeadRecord, None)
        rows = [(KINDS[kind], _sealed(wire.encode(record))) for kind, record in latest.items()]
        with self._lock:
            with self._transaction(flush) as db:
                first = self._write_head(db, head.snapshot) if head is not None else self._first
                db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?)", rows)
                if slots is not None:
                    _replace_slots(db, self._slots, slots)
                if names is not None:
                    _replace_names(db, self._names, names)
                if signatures is not None:
                    _put_meta(db, f"{OURS}signatures", signatures)
                if not self._boot_noted:
                    _put_meta(db, f"{OURS}boot", self._boot)
            self._boot_noted = True
            self._records.update(latest)
            if head is not None:
                self._head, self._first = head, first
            if slots is not None:
                self._slots = dict(slots)
            if names is not None:
                self._names = {number: tuple(found) for number, found in names.items() if found}

    def _write_head(self, db: sqlite3.Connection, snapshot: Snapshot) -> int:
        """Write what differs from the log that is there, mostly one item. :returns: the place of the first item."""
        before = self._head.snapshot.items if self._head is not None else ()
        items = snapshot.items
        lineages = [item.head.lineage for item in before]
        skipped = lineages.index(items[0].head.lineage) if items[0].head.lineage in lineages else len(before)
        kept = 0
        for old, new in zip(before[skipped:], items, strict=False):
            if old is not new and old != new:
                break
            kept += 1
        first = self._first + skipped
        rows = [(first + at, _sealed(wire.encode(items[at]))) for at in range(kept, len(items))]
        db.execute("DELETE FROM items WHERE place < ? OR place >= ?", (first, first + kept))
        db.executemany("INSERT INTO items VALUES (?, ?)", rows)
        db.execute("INSERT OR REPLACE INTO records VALUES (?, ?)", (HEAD, _sealed(wire.encode(snapshot.accounts))))
        return first

    def meta(self, key: str) -> bytes | None:
        """What was stored under this key; None: nothing, or it is damaged."""
        with self._using() as db:
            found = db.execute("SELECT data FROM meta WHERE key = ?", (key,)).fetchone()
        with suppress(ValueError):
            return None if found is None else _opened(found[0])
        return None

    def set_meta(self, key: str, data: bytes) -> None:
        """Store a few bytes; they survive kill -9.

        :raises StoreError: if the disk refuses it
        """
        if key.startswith(OURS):
            raise ValueError(f"{key} is the store's own")
        with self._transaction(flush=False) as db:
            _put_meta(db, key, data)

    # --- answers ---

    def put_answer(self, digest: bytes, data: bytes) -> None:
        """Keep the bytes of an answer; they are on the disk when this returns.

        :raises ValueError: if `digest` is not their SHA-256
        :raises StoreError: if the disk refuses it
        """
        self._answers.put(digest, data)

    def has_answer(self, digest: bytes) -> bool:
        """Whether its bytes are here; `answer` may still find them damaged."""
        return digest in self._answers.held

    def answer(self, digest: bytes) -> bytes:
        """The bytes of an answer, checked.

        :raises KeyError: if they are not here, or are damaged: then they are not here from now on
        """
        return self._answers.get(digest)

    def answer_path(self, digest: bytes) -> Path:
        """Where its bytes are, if they are here."""
        return self._answers.path(digest)

    def prune_answers(self, keep: Iterable[bytes], most_bytes: int) -> None:
        """Delete the oldest answers until all take `most_bytes` at most; those to `keep` stay in any case."""
        self._answers.prune(frozenset(keep), most_bytes)

    # --- states ---

    def state_path(self, lineage: bytes) -> Path:
        """Where the state at this lineage is written to, in one piece; `note_state` counts it."""
        return self._states / f"{lineage.hex()}.safetensors"

    def note_state(self, lineage: bytes, snapshot: Snapshot, digest: bytes) -> None:
        """The file of this state is written, and is the newest.

        :param snapshot: log tail and accounts at that lineage
        :param digest: SHA-256 of the file
        :raises StoreError: if the file is not there, or the disk refuses it
        """
        try:
            size = self.state_path(lineage).stat().st_size
        except OSError as error:
            raise StoreError(f"The state {self.state_path(lineage)} is not there: {error.strerror}") from error
        row = (lineage, size, digest, _sealed(wire.encode(snapshot)))
        with self._transaction(flush=False) as db:
            db.execute("DELETE FROM states WHERE lineage = ?", (lineage,))
            db.execute("INSERT INTO states (lineage, size, digest, data) VALUES (?, ?, ?, ?)", row)
        self._newest = (lineage, snapshot)

    def state_digest(self, lineage: bytes) -> bytes | None:
        """SHA-256 of the file of this state, as it was noted; None: it was not."""
        with self._using() as db:
            found = db.execute("SELECT digest FROM states WHERE lineage = ?", (lineage,)).fetchone()
        return None if found is None else found[0]

    def noted_state(self, lineage: bytes) -> tuple[Snapshot, bytes] | None:
        """Return the snapshot (log tail and accounts) and the SHA-256 noted of the state at this lineage; None: nothing
        was noted, or it is damaged."""
        digest = self.state_digest(lineage)
        with suppress(ValueError):
            return None if digest is None else (self._snapshot_of(lineage), digest)
        return None

    def newest_state(self, check: bool = False) -> tuple[Snapshot, Path] | None:
        """The newest state whose file is there, with its size; None: there is none. Those that are not whole are
        forgotten.

        :param check: read the whole file, and compare its SHA-256
        :raises StoreError: if the disk refuses it
        """
        with self._using() as db:
            rows = db.execute("SELECT lineage, size, digest FROM states ORDER BY place DESC").fetchall()
        for lineage, size, digest in rows:
            path = self.state_path(lineage)
            if _is_whole(path, size, digest if check else None):
                with suppress(ValueError):
                    return self._snapshot_of(lineage), path
            self._forget_states([lineage])
        return None

    def _snapshot_of(self, lineage: bytes) -> Snapshot:
        """Raises ValueError."""
        if self._newest is None or self._newest[0] != lineage:
            with self._using() as db:
                (data,) = db.execute("SELECT data FROM states WHERE lineage = ?", (lineage,)).fetchone()
            found = _opened(data)
            self._newest = (lineage, wire.decode(Snapshot, found, OWN))
        return self._newest[1]

    def prune_states(self, keep: int) -> None:
        """Delete all states but the newest `keep`.

        :raises StoreError: if the disk refuses it
        """
        with self._using() as db:
            rows = db.execute("SELECT lineage FROM states ORDER BY place DESC LIMIT -1 OFFSET ?", (keep,)).fetchall()
        self._forget_states([lineage for (lineage,) in rows])

    def _forget_states(self, lineages: list[bytes]) -> None:
        if lineages:
            with self._transaction(flush=False) as db:
                db.executemany("DELETE FROM states WHERE lineage = ?", [(lineage,) for lineage in lineages])
        for lineage in lineages:
            with suppress(OSError):
                self.state_path(lineage).unlink()

    def _tidy_states(self) -> None:
        """Delete files that a killed process left: never noted, or half written."""
        try:
            self._states.mkdir(exist_ok=True)
        except OSError as error:
            raise no_room(self._states, "to make", error.strerror or str(error)) from error
        with self._using() as db:
            noted = {self.state_path(lineage).name for (lineage,) in db.execute("SELECT lineage FROM states")}
        for path in _files(self._states):
            if path.name.endswith(".part"):
                clear_if_left(path)
            elif _STATE.fullmatch(path.name) and path.name not in noted:
                with suppress(OSError):
                    path.unlink()

    # --- the database ---

    def _open(self) -> None:
        """Read everything. Raises DamagedFile, StoreError."""
        if self._path.is_dir():
            raise DamagedFile(self._path, "it is a folder")
        if not self._path.exists():
            self._make()
        try:
            require_whole(self._path)
            self._db = _connect(self._path)
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._flushes = False
            self._read(self._db)
        except sqlite3.OperationalError as error:
            raise self._in_words(error) from error
        except (sqlite3.Error, ValueError, TypeError, LookupError) as error:
            raise error if isinstance(error, DamagedFile) else DamagedFile(self._path, str(error)[:200]) from error

    def _make(self) -> None:
        """An empty database, there whole or not at all. Raises StoreError."""
        try:
            for ending in ("-wal", "-shm"):  # SQLite would take the log of a lost database for the new one's
                Path(f"{self._path}{ending}").unlink(missing_ok=True)
            with part_folder(self._path) as part:
                with closing(_connect(part / "new")) as db:
                    tables = "; ".join(f"CREATE TABLE {name} ({columns})" for name, columns in TABLES.items())
                    db.executescript(f"BEGIN; {tables}; PRAGMA user_version = {FORMAT}; COMMIT")
                    db.execute("BEGIN IMMEDIATE")
                    _put_meta(db, f"{OURS}elements", str(self.elements).encode())
                    db.execute("COMMIT")
                put_in_place(part / "new", self._path)
        except sqlite3.Error as error:
            raise self._in_words(error) from error
        except OSError as error:
            raise no_room(self._path, "to make", error.strerror or str(error)) from error

    def _read(self, db: sqlite3.Connection) -> None:
        """Raises sqlite3.Error, ValueError, TypeError, LookupError."""
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version != FORMAT:
            raise DamagedFile(self._path, f"it has the format {version}, and this version of the kit has {FORMAT}")
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if not set(TABLES) <= tables:
            raise DamagedFile(self._path, "it is a database of something else")
        (fine,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if fine != "ok":
            raise DamagedFile(self._path, str(fine))
        meta = {key: _opened(data) for key, data in db.execute("SELECT key, data FROM meta")}
        if int(meta[f"{OURS}elements"]) != self.elements:
            raise DamagedFile(self._path, "it is about another model")

        kinds = {name: kind for kind, name in KINDS.items()} | {HEAD: Accounts}
        records: dict[type, Any] = {}
        for name, data in db.execute("SELECT kind, data FROM records"):
            found = _opened(data)
            records[kinds[name]] = wire.decode(kinds[name], found, OWN)
        places, items = [], []
        for place, data in db.execute("SELECT place, data FROM items ORDER BY place"):
            found = _opened(data)
            places.append(place)
            items.append(wire.decode(LogItem, found, OWN))
        accounts = records.pop(Accounts, None)
        self._first = places[0] if places else 0
        if (accounts is None) != (not items) or places != list(range(self._first, self._first + len(items))):
            raise DamagedFile(self._path, "parts of the log are missing")
        self._head = HeadRecord(Snapshot(tuple(items), accounts)) if accounts is not None else None
        self._records = records
        self._slots = dict(db.execute("SELECT number, slot FROM slots"))
        self._names = {}
        for number, data in db.execute("SELECT number, data FROM names ORDER BY number, place"):
            self._names[number] = (*self._names.get(number, ()), *json.loads(_opened(data)))

        self._boot = boot_id()
        self._boot_noted = meta.get(f"{OURS}boot") == self._boot
        self.rebooted = f"{OURS}boot" in meta and not self._boot_noted

    def _begin_anew(self, reason: str) -> None:
        """Set aside what is there. Answers stay, since their names prove them; so do slots, which the table grants
        anew. Raises StoreError."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None
            aside = keep_aside(self._path, beside=("-wal", "-shm"))
            if any(_files(self._states)):
                shutil.rmtree(f"{self._states}.damaged", ignore_errors=True)  # one copy: states are large
                aside += keep_aside(self._states)
            self.trouble = (
                f"{self._path} cannot be used: {reason}.{aside} The votes and the unfinished contributions in it are "
                "gone, so this machine goes on as a new peer."
            )
            try:
                self._open()
                self._states.mkdir(exist_ok=True)
            except DamagedFile as error:
                raise StoreError(f"{self.trouble} And the new one is damaged, too: {error.reason}.") from error
            except OSError as error:
                raise error if isinstance(error, StoreError) else StoreError(str(error)) from error

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        """Raises StoreError."""
        with self._lock:
            if self._db is None:
                raise StoreError(f"{self._path} is closed.")
            try:
                yield self._db
            except sqlite3.Error as error:
                raise self._in_words(error) from error

    @contextmanager
    def _transaction(self, flush: bool) -> Iterator[sqlite3.Connection]:
        """Raises StoreError; nothing is written then."""
        with self._using() as db:
            if flush != self._flushes:
                db.execute(f"PRAGMA synchronous = {'FULL' if flush else 'NORMAL'}")
                self._flushes = flush
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    def _in_words(self, error: sqlite3.Error) -> StoreError:
        reason = str(error)
        if "malformed" in reason or "not a database" in reason:
            return StoreError(
                f"{self._path} is damaged ({reason}).\n"
                "1. Start again: the damaged file is set aside, and this machine goes on as a new peer."
            )
        if "full" in reason or "I/O" in reason:
            return no_room(self._path, "to write", reason)
        return StoreError(
            f"{self._path} cannot be used ({reason}).\n"
            f"1. Look at the owner and the rights: ls -la {self.folder}\n2. See who has it open: fuser -v {self._path}"
        )


class _Answers:
    """Files by the SHA-256 of their bytes. Threads may share it."""

    def __init__(self, folder: Path):
        """Raises StoreError."""
        self._folder = folder
        self._lock = threading.Lock()
        self._sizes: dict[bytes, int] = {}  # digest -> bytes, oldest first
        try:
            folder.mkdir(exist_ok=True)
        except OSError as error:
            raise no_room(folder, "to make", error.strerror or str(error)) from error
        found = []
        for path in _files(folder):
            if path.name.endswith(".part"):
                clear_if_left(path)
            elif _HASH.fullmatch(path.name):
                with suppress(OSError):
                    about = path.stat()
                    found.append((about.st_mtime_ns, path.name, about.st_size))
        for _, name, size in sorted(found):
            self._sizes[bytes.fromhex(name)] = size
        self.held = frozenset(self._sizes)

    def path(self, digest: bytes) -> Path:
        return self._folder / digest.hex()

    def put(self, digest: bytes, data: bytes) -> None:
        if hashlib.sha256(data).digest() != digest:
            raise ValueError("these are not the bytes of the answer")
        if digest in self.held:
            return
        try:
            write_whole(self.path(digest), data, mode=0o600)
        except OSError as error:
            raise no_room(self.path(digest), "to write", error.strerror or str(error)) from error
        with self._lock:
            self._sizes[digest] = len(data)
            self.held = frozenset(self._sizes)

    def get(self, digest: bytes) -> bytes:
        if digest not in self.held:
            raise KeyError(digest.hex())
        with suppress(OSError):
            data = self.path(digest).read_bytes()
            if hashlib.sha256(data).digest() == digest:
                return data
        self._delete([digest])
        raise KeyError(digest.hex())

    def prune(self, keep: frozenset[bytes], most_bytes: int) -> None:
        total, doomed = sum(self._sizes.values()), []
        for digest, size in list(self._sizes.items()):
            if total <= most_bytes:
                break
            if digest not in keep:
                total -= size
                doomed.append(digest)
        self._delete(doomed)

    def _delete(self, digests: list[bytes]) -> None:
        with self._lock:
            for digest in digests:
                self._sizes.pop(digest, None)
                with suppress(OSError):
                    self.path(digest).unlink()
            self.held = frozenset(self._sizes)


def _connect(path: Path) -> sqlite3.Connection:
    """One process owns the store, so SQLite locks once and for all, and needs no memory shared between processes. Where
    the file system knows no record locks, the store's own lock has to do. Raises sqlite3.Error."""
    vfs = "" if knows_record_locks(path.parent) else "&vfs=unix-none"
    where = f"{path.absolute().as_uri()}?mode=rwc{vfs}"
    db = sqlite3.connect(where, uri=True, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT}")
    except BaseException:
        db.close()
        raise
    return db


def _put_meta(db: sqlite3.Connection, key: str, data: bytes) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, _sealed(data)))


def _replace_slots(db: sqlite3.Connection, before: Mapping[int, int], after: Mapping[int, int]) -> None:
    db.executemany("DELETE FROM slots WHERE number = ?", [(number,) for number in before if number not in after])
    changed = [(number, slot) for number, slot in after.items() if before.get(number) != slot]
    db.executemany("INSERT OR REPLACE INTO slots VALUES (?, ?)", changed)


def _replace_names(
    db: sqlite3.Connection, before: Mapping[int, tuple[str, ...]], after: Mapping[int, tuple[str, ...]]
) -> None:
    """Names that are added to a contribution get a row of their own."""
    for number in before:
        if number not in after:
            db.execute("DELETE FROM names WHERE number = ?", (number,))
    for number, names in after.items():
        old = before.get(number, ())
        if names[: len(old)] != old:
            db.execute("DELETE FROM names WHERE number = ?", (number,))
            old = ()
        if more := names[len(old) :]:
            row = (number, len(old), _sealed(json.dumps(more).encode()))
            db.execute("INSERT INTO names VALUES (?, ?, ?)", row)


def _sealed(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big") + data


def _opened(sealed: Any) -> bytes:
    """Raises ValueError."""
    if not isinstance(sealed, bytes) or zlib.crc32(sealed[4:]) != int.from_bytes(sealed[:4], "big"):
        raise ValueError("a checksum does not hold")
    return sealed[4:]


def _is_whole(path: Path, size: int, digest: bytes | None) -> bool:
    """Whether a file is there, with this size and, if it is given, this SHA-256."""
    found = hashlib.sha256()
    try:
        if path.stat().st_size != size:
            return False
        if digest is not None:
            with path.open("rb") as file:
                while block := file.read(READ):
                    found.update(block)
    except OSError:
        return False
    return digest is None or found.digest() == digest


def _files(folder: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(folder)]
    except OSError:
        return []


def boot_id() -> bytes:
    """What tells one start of this machine from the next; b"": not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return b""
