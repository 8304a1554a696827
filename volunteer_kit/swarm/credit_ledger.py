"""Credit per account, kept in SQLite over restarts, for several monitors to write and everybody here to read.

A round is entered once, in one transaction with what it gave to whom: a monitor that is killed in the middle, comes
again, or is one of two that share the file, changes nothing that is there. Nothing is entered later: provisional
samples stay provisional.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from volunteer_kit.storage import part_folder, write_once
from volunteer_kit.storage.sqlite import require_whole
from volunteer_kit.swarm.credit import Credit, Step

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

    def enter(self, step: Step, credits: Mapping[bytes, Credit], owners: Mapping[bytes, bytes]) -> bool:
        """Enter a round that is on the line. :returns: False, and nothing is changed, if it is here already or the
        swarm was past its epoch at that time, by what is here.

        :param owners: digest of a sender's peer id -> account
        """
        final = {d: 0 if c.provisional else c.samples for d, c in credits.items()}
        waiting = {d: c.samples if c.provisional else 0 for d, c in credits.items()}
        with self._transaction() as db:
            if not self._is_next(step):
                return False
            [[before]] = db.execute("SELECT MAX(time) FROM steps WHERE time < ?", (step.time,)).fetchall()
            seconds = 0.0 if before is None else min(LONGEST, step.time - before)
            db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?, ?)",
                (*step.key, step.before, step.after, step.time, sum(final.values()), sum(waiting.values())),
            )
            for digest in credits:
                db.execute(
                    "INSERT INTO earned VALUES (?, ?, ?, ?, ?) ON CONFLICT (account, digest) DO UPDATE SET"
                    " samples = samples + excluded.samples, provisional = provisional + excluded.provisional,"
                    " last_epoch = excluded.last_epoch",
                    (owners[digest], digest, final[digest], waiting[digest], step.epoch),
                )
            for account in {owners[digest] for digest in credits}:
                machines = [digest for digest in credits if owners[digest] == account]
                db.execute("INSERT OR IGNORE INTO accounts (account) VALUES (?)", (account,))
                db.execute(
                    "UPDATE accounts SET samples = samples + ?, provisional = provisional + ?, seconds = seconds + ?,"
                    " last_epoch = ? WHERE account = ?",
                    (sum(final[d] for d in machines), sum(waiting[d] for d in machines), seconds, step.epoch, account),
                )
        return True

    def _is_next(self, step: Step) -> bool:
        """After all that is here of its epoch and later ones, as after a restart from a checkpoint; or in a place that
        is free, with a neighbour here."""

        def exists(condition: str, *values: Any) -> bool:
            return bool(self._db.execute(f"SELECT 1 FROM steps WHERE {condition} LIMIT 1", values).fetchone())

        if exists("epoch = ? AND round = ?", *step.key):
            return False
        if not exists("epoch >= ? AND time >= ?", step.epoch, step.time):
            return True
        return not exists("epoch = ?", step.epoch) and (
            exists("epoch = ? AND after = ?", step.epoch - 1, step.before)
            or exists("epoch = ? AND before = ?", step.epoch + 1, step.after)
        )

    def epochs_since(self, time: float) -> set[int]:
        """Epochs of rounds entered that were over at `time` (DHT time, s) or later."""
        return {epoch for (epoch,) in self._ask("SELECT epoch FROM steps WHERE time >= ?", time)}

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
        return [Total(*row) for row in rows]

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
            digest: (samples, provisional)
            for digest, samples, provisional in self._ask(
                "SELECT digest, SUM(samples), SUM(provisional) FROM earned GROUP BY digest"
            )
        }

    def sums(self) -> tuple[int, int]:
        """(samples, provisional) of all rounds entered."""
        [row] = self._ask("SELECT COALESCE(SUM(samples), 0), COALESCE(SUM(provisional), 0) FROM steps")
        return row
