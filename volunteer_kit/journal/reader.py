"""Reading a journal, while another process writes it."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from volunteer_kit.journal.file import JournalError, open_for_reading, told

HOUR, DAY = 3600.0, 86_400.0  # s
Row = dict[str, Any]


class JournalReader:
    """A journal that somebody else writes. Threads may share one; processes may not.

    Raises FileNotFoundError where the monitor has not written yet, JournalError for a file that cannot be used.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._depth = 0  # of snapshots in snapshots
        self._db = self._open()
        self._file = self._identity()

    def _open(self) -> sqlite3.Connection:
        return open_for_reading(self.path)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def version(self) -> int:
        """Another number whenever another process has written. Raises JournalError: the file was put aside."""
        if self._identity() != self._file:
            raise JournalError(f"{self.path} is another file than before; open it again")
        return self._one("PRAGMA data_version")

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """What is read inside belongs together: nothing written meanwhile is seen."""
        with self._lock, told(self.path):
            self._require_own_process()
            self._depth += 1
            try:
                if self._depth == 1 and not self._db.in_transaction:
                    self._db.execute("BEGIN")
                    try:
                        yield
                    finally:
                        self._db.execute("COMMIT")
                else:
                    yield
            finally:
                self._depth -= 1

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:  # SQLite's locks do not survive a fork: both would write over each other
            raise JournalError(f"{self.path} was opened before this process was forked; open it again here")

    def _all(self, query: str, values: Sequence[Any] = ()) -> list[Row]:
        with self.snapshot():
            return [dict(row) for row in self._db.execute(query, values)]

    def _one(self, query: str, values: Sequence[Any] = ()) -> Any:
        """The first column of the first row, or None."""
        with self._lock, told(self.path):
            self._require_own_process()
            row = self._db.execute(query, values).fetchone()
            return None if row is None else row[0]

    # --- what is in it ---

    def latest(self) -> Row | None:
        """The newest metrics; None before the first."""
        return next(iter(self._all("SELECT * FROM metrics ORDER BY time DESC LIMIT 1")), None)

    def began(self) -> float | None:
        """When the first metrics were written (s); None before."""
        return self._one("SELECT min(time) FROM metrics")

    def metrics(self, max_points: int = 500) -> list[Row]:
        """Oldest first, at most `max_points`: the last hour, the day before it and all before that get a part each,
        so that one list is enough for a look at any of them. A point may be the mean of several; the last is the
        newest row itself."""
        with self.snapshot():
            number = self._one("SELECT count(*) FROM metrics")
            if number <= max_points:
                return self._all("SELECT * FROM metrics ORDER BY time")
            first, last = self.began(), self._one("SELECT max(time) FROM metrics")
            edges = [first, *(edge for edge in (last - DAY, last - HOUR) if edge > first), last]
            share = (max_points - 1) // (len(edges) - 1)
            stretches = zip(edges[:-1], edges[1:], strict=True)
            means = [row for begin, end in stretches for row in self._means(begin, end, share)]
            return means + self._all("SELECT * FROM metrics WHERE time = ?", (last,))

    def _means(self, begin: float, end: float, number: int) -> list[Row]:
        """Means of `number` equal stretches of [begin, end); stretches without rows are left out."""
        return self._all(
            "SELECT max(time) AS time, max(epoch) AS epoch, avg(loss) AS loss,"
            " avg(samples_per_second) AS samples_per_second, CAST(round(avg(volunteers)) AS INTEGER) AS volunteers,"
            " max(progress) AS progress, max(samples_total) AS samples_total"
            " FROM metrics WHERE time >= ?1 AND time < ?2"
            " GROUP BY min(CAST((time - ?1) / ?3 AS INTEGER), ?4) ORDER BY time",
            (begin, end, (end - begin) / number, number - 1),
        )

    def events(self, limit: int = 100, kinds: Sequence[str] = ()) -> list[Row]:
        """Newest first: id, time, kind, text (a template or empty), detail (its fields). Of `kinds` only, if given."""
        chosen = f"WHERE kind IN ({','.join('?' * len(kinds))})" if kinds else ""
        rows = self._all(f"SELECT * FROM events {chosen} ORDER BY id DESC LIMIT ?", (*kinds, limit))
        return [{**row, "detail": json.loads(row["detail"])} for row in rows]

    def counts(self) -> dict[str, int]:
        """How many events of each kind there ever were."""
        return {row["kind"]: row["number"] for row in self._all("SELECT * FROM counts")}

    def rounds(self) -> dict[str, int]:
        """Rounds of averaging, each counted by every member: "rounds", "complete_groups", and those that failed by
        cause. Empty in files of older kits."""
        if not self._one("SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'rounds'"):
            return {}
        return {row["name"]: row["number"] for row in self._all("SELECT * FROM rounds")}

    def pictures(self, limit: int = 24) -> list[Row]:
        """Newest first: id, time, epoch, caption, path (relative to the journal's folder)."""
        return self._all("SELECT * FROM pictures ORDER BY epoch DESC, id LIMIT ?", (limit,))

    def picture(self, number: int) -> Row | None:
        """One of them by its id."""
        return next(iter(self._all("SELECT * FROM pictures WHERE id = ?", (number,))), None)

    def members(self) -> list[Row]:
        """Peers: peer_id, username, device, here, samples_per_second."""
        return [{**row, "here": bool(row["here"])} for row in self._all("SELECT * FROM members ORDER BY peer_id")]

    def leaderboard(self) -> list[Row]:
        """Accounts, most samples first: account, username, samples, provisional, seconds, machines."""
        return self._all("SELECT * FROM leaderboard ORDER BY samples DESC, provisional DESC, seconds DESC, account")

    def hidden(self) -> frozenset[str]:
        """Keys (account_key) of accounts whose owners hide their names."""
        return frozenset(row["account"] for row in self._all("SELECT account FROM hidden"))
