"""Keep credit per account in SQLite over restarts. Several monitors may write it, and every process here may read it.

The ledger enters a committed step once, by its lineage, in one transaction with the samples of each account. So a
monitor that is killed in the middle, that restarts, or that shares the file with another one counts nothing twice.
`provisional` comes from older ledgers. A round may lose some cells and so take a part of a sample: sums are exact, and
reported in whole samples.
"""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.storage import part_folder, write_once
from volunteer_kit.storage.sqlite import require_whole

VERSION = 1
BUSY = 20.0  # s to wait for another writer
LONGEST = 1800.0  # s between two rounds that somebody is taken to have been at work
SCHEMA = """
CREATE TABLE accounts (account BLOB PRIMARY KEY, username TEXT, samples INTEGER NOT NULL DEFAULT 0,
    provisional INTEGER NOT NULL DEFAULT 0, seconds REAL NOT NULL DEFAULT 0, last_epoch INTEGER NOT NULL DEFAULT -1);
CREATE TABLE machines (digest BLOB PRIMARY KEY, account BLOB NOT NULL);
CREATE TABLE earned (account BLOB, digest BLOB, samples INTEGER NOT NULL, provisional INTEGER NOT NULL,
    last_epoch INTEGER NOT NULL, PRIMARY KEY (account, digest));
CREATE TABLE steps (epoch INTEGER, round BLOB, before BLOB NOT NULL, after BLOB NOT NULL, time REAL NOT NULL,
    samples INTEGER NOT NULL, provisional INTEGER NOT NULL, PRIMARY KEY (epoch, round));
CREATE INDEX steps_by_time ON steps (time);
"""
MISSED = "CREATE TABLE IF NOT EXISTS missed (lineage BLOB PRIMARY KEY, epochs INTEGER NOT NULL)"  # since older ledgers
SHARES = """
CREATE TABLE IF NOT EXISTS shares (lineage BLOB, account BLOB, digest BLOB, samples REAL NOT NULL,
    PRIMARY KEY (lineage, digest));
CREATE TABLE IF NOT EXISTS lost (lineage BLOB PRIMARY KEY, samples REAL NOT NULL);
"""  # of steps that may still be lost with their branch, and of those that were
SHARES_KEPT = 256  # steps; the log's tail, in which branches part, is shorter
ROUNDING = 1e-6  # of a sample


class Place(NamedTuple):
    """A round: the epoch that it led to, its name, the lineages before and after it, and when it was over."""

    epoch: int
    round: bytes
    before: bytes
    after: bytes
    time: float  # s since 1970


class Total(NamedTuple):
    """Of one account. `seconds`: of epochs in which it had a part, however many machines did."""

    account: bytes
    username: str | None
    samples: int
    provisional: int
    seconds: float
    machines: int
    last_epoch: int


def _make(path: Path) -> None:
    """An empty ledger, there whole or not at all; of two monitors that begin together, one makes it. Raises
    sqlite3.Error."""
    try:
        with part_folder(path) as part:
            with closing(sqlite3.connect(part / "ledger")) as db:
                db.executescript(f"{SCHEMA} PRAGMA user_version = {VERSION};")
            write_once(path, (part / "ledger").read_bytes())
    except OSError as error:
        raise sqlite3.OperationalError(str(error)) from error


class CreditLedger:
    """The file `path`, made if it is missing. May be used from several threads and processes.

    :param read_only: never writes, and the file must be there
    Raises sqlite3.DatabaseError for a file of another kind or version, and for an empty one: a ledger is never
    empty, so what was in it is lost, and a new one in its place would be taken for the truth.
    """

    def __init__(self, path: str | Path, read_only: bool = False):
        self._lock = threading.Lock()
        path = Path(path)
        if not read_only and not path.exists():
            _make(path)
        require_whole(path)
        where = f"{Path(path).resolve().as_uri()}?mode={'ro' if read_only else 'rw'}"
        self._db = sqlite3.connect(where, uri=True, timeout=BUSY, isolation_level=None, check_same_thread=False)
        try:
            if not read_only:
                self._db.execute("PRAGMA journal_mode = WAL")  # who reads does not wait
                self._db.execute("PRAGMA synchronous = FULL")  # credit is not to be lost with the power
                self._db.execute(MISSED)
                self._db.executescript(SHARES)
            if (version := self._version()) != VERSION:
                raise sqlite3.DatabaseError(f"{path} is a ledger of version {version}, not {VERSION}")
        except BaseException:
            self._db.close()
            raise

    def _version(self) -> int:
        return self._db.execute("PRAGMA user_version").fetchone()[0]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _ask(self, query: str, *values: Any) -> list[tuple]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # --- whose machines ---

    def learn(self, machines: Mapping[bytes, bytes], usernames: Mapping[bytes, str]) -> None:
        """:param machines: digest of a peer id -> account; a machine that changes hands keeps what it earned
        :param usernames: account -> name; a later one takes the place of an earlier one"""
        with self._transaction() as db:
            db.executemany(
                "INSERT INTO machines VALUES (?, ?) ON CONFLICT (digest) DO UPDATE SET account = excluded.account",
                machines.items(),
            )
            db.executemany(
                "INSERT INTO accounts (account, username) VALUES (?, ?)"
                " ON CONFLICT (account) DO UPDATE SET username = excluded.username",
                usernames.items(),
            )

    def machines(self) -> dict[bytes, bytes]:
        """Digest of a peer id -> account, of all that were ever known."""
        return dict(self._ask("SELECT digest, account FROM machines"))

    # --- rounds ---

    def enter_committed(
        self, place: Place, samples: Mapping[bytes, float], owners: Mapping[bytes, bytes], missed: int = 0
    ) -> bool:
        """Enter a step that a quorum has certified; all its samples are credited.

        :param place: its `round` is its lineage
        :param samples: digest of a peer id -> samples
        :param missed: epochs before it whose steps nobody can tell any more
        :returns: False, and nothing is changed, if it is here already
        """
        with self._transaction() as db:
            if db.execute("SELECT 1 FROM steps WHERE epoch = ? AND round = ?", place[:2]).fetchone():
                return False
            _enter(db, place, samples, owners)
            shares = [(place.round, owners[digest], digest, amount) for digest, amount in samples.items()]
            db.executemany("INSERT OR REPLACE INTO shares VALUES (?, ?, ?, ?)", shares)
            db.execute("DELETE FROM lost WHERE lineage = ?", (place.round,))  # its branch has won in the end
            kept = "SELECT round FROM steps ORDER BY time DESC, epoch DESC LIMIT ?"
            db.execute(f"DELETE FROM shares WHERE lineage NOT IN ({kept})", (SHARES_KEPT,))
            if missed:
                db.execute("INSERT OR REPLACE INTO missed VALUES (?, ?)", (place.round, missed))
        return True

    def take_back(self, lineages: Iterable[bytes]) -> int:
        """Steps of a branch that has lost: nobody's model holds their samples, so they are in nobody's credit any more.

        :returns: samples of these steps; those that are not here, or too old, change nothing
        """
        total = 0.0
        with self._transaction() as db:
            for lineage in lineages:
                found = db.execute("SELECT account, digest, samples FROM shares WHERE lineage = ?", (lineage,))
                rows = found.fetchall()
                for account, digest, samples in rows:
                    where = (samples, account)
                    db.execute("UPDATE accounts SET samples = samples - ? WHERE account = ?", where)
                    db.execute(
                        "UPDATE earned SET samples = samples - ? WHERE account = ? AND digest = ?", (*where, digest)
                    )
                lost = sum(samples for _, _, samples in rows)
                if db.execute("SELECT 1 FROM steps WHERE round = ?", (lineage,)).fetchone():
                    db.execute("INSERT OR REPLACE INTO lost VALUES (?, ?)", (lineage, lost))
                    db.execute("DELETE FROM steps WHERE round = ?", (lineage,))
                    db.execute("DELETE FROM shares WHERE lineage = ?", (lineage,))
                    total += lost
        return _whole(total)

    def lost(self) -> int:
        """Samples of steps whose branch has lost."""
        [[samples]] = self._ask("SELECT COALESCE(SUM(samples), 0) FROM lost")
        return _whole(samples)

    def line(self) -> list[bytes]:
        """The lineages that lead to the step that was entered last, as far as `shares` go back; oldest first."""
        rows = self._ask(
            "SELECT after, before FROM steps ORDER BY time DESC, epoch DESC LIMIT ?", SHARES_KEPT
        )
        before = dict(rows)
        found = [rows[0][0]] if rows else []
        while found and before.get(found[-1]) in before:
            found.append(before[found[-1]])
        return found[::-1]

    def missed(self) -> int:
        """Epochs whose samples are in nobody's credit, for no monitor was there when their steps could be told."""
        [[epochs]] = self._ask("SELECT COALESCE(SUM(epochs), 0) FROM missed")
        return int(epochs)

    def last_epoch(self) -> int | None:
        """The epoch of the step that was entered last; None: there is none."""
        found = self._ask("SELECT epoch FROM steps ORDER BY time DESC, epoch DESC LIMIT 1")
        return found[0][0] if found else None

    def lineages(self, count: int = 4096) -> set[bytes]:
        """What the last rounds entered have left."""
        return {after for (after,) in self._ask("SELECT after FROM steps ORDER BY time DESC LIMIT ?", count)}

    # --- what it came to ---

    def totals(self) -> list[Total]:
        """Accounts that earned something, most samples first."""
        rows = self._ask(
            "SELECT account, username, samples, provisional, seconds,"
            " (SELECT COUNT(*) FROM earned WHERE earned.account = accounts.account), last_epoch FROM accounts"
            " WHERE samples > 0 OR provisional > 0 ORDER BY samples DESC, provisional DESC, account"
        )
        return [Total(*row)._replace(samples=_whole(row[2])) for row in rows]

    def leaderboard(self) -> list[dict[str, Any]]:
        """The same, by username, as journal.set_leaderboard takes it. An account without a name has its digest's
        beginning."""
        return [
            {
                "username": total.username or total.account.hex()[:12],
                "samples": total.samples,
                "provisional": total.provisional,
                "seconds": round(total.seconds, 1),
                "machines": total.machines,
                "last_epoch": total.last_epoch,
            }
            for total in self.totals()
        ]

    def of_machines(self) -> dict[bytes, tuple[int, int]]:
        """Digest of a peer id -> (samples, provisional), of all accounts that it had."""
        return {
            digest: (_whole(samples), provisional)
            for digest, samples, provisional in self._ask(
                "SELECT digest, SUM(samples), SUM(provisional) FROM earned GROUP BY digest"
            )
        }

    def sums(self) -> tuple[int, int]:
        """(samples, provisional) of all rounds entered."""
        [row] = self._ask("SELECT COALESCE(SUM(samples), 0), COALESCE(SUM(provisional), 0) FROM steps")
        return _whole(row[0]), row[1]


def _whole(samples: float) -> int:
    return math.floor(samples + ROUNDING)


def _enter(
    db: sqlite3.Connection,
    place: Place,
    samples: Mapping[bytes, float],
    owners: Mapping[bytes, bytes],
) -> None:
    [[before]] = db.execute("SELECT MAX(time) FROM steps WHERE time < ?", (place.time,)).fetchall()
    seconds = 0.0 if before is None else min(LONGEST, place.time - before)
    db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?)", (*place, sum(samples.values()), 0))
    for digest in samples:
        db.execute(
            "INSERT INTO earned VALUES (?, ?, ?, ?, ?) ON CONFLICT (account, digest) DO UPDATE SET"
            " samples = samples + excluded.samples, last_epoch = excluded.last_epoch",
            (owners[digest], digest, samples[digest], 0, place.epoch),
        )
    for account in {owners[digest] for digest in samples}:
        machines = [digest for digest in samples if owners[digest] == account]
        db.execute("INSERT OR IGNORE INTO accounts (account) VALUES (?)", (account,))
        db.execute(
            "UPDATE accounts SET samples = samples + ?, seconds = seconds + ?, last_epoch = ? WHERE account = ?",
            (sum(samples[digest] for digest in machines), seconds, place.epoch, account),
        )
