"""Writing a journal: each call is one transaction, on the disk when it returns; what is old is thinned."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from volunteer_kit.journal import bounds
from volunteer_kit.journal.bounds import account_key, amount, line, maybe, moment, whole
from volunteer_kit.journal.file import open_for_writing, told
from volunteer_kit.journal.reader import DAY, HOUR, JournalReader

THIN_EVERY = 500  # rows of metrics
# Metrics older than this (s) -> one row in so many s: a year of a row each 5 s is some 25,000 rows, about 2 MB
THINNER = ((DAY, 600.0), (30 * DAY, 7200.0))
EVENTS_OF_A_KIND = 1000  # so that somebody who joins and leaves all day does not push the bans out
PICTURES = 500
ACCOUNTS = 20_000  # rows of members and of the leaderboard


class Journal(JournalReader):
    """The monitor's: everything a reader can, and writing. Open it after the peer is started, since that forks.

    Every method raises JournalError when the disk is full or the file cannot be used; nothing is half written then,
    and the next call may succeed. Threads may share one.
    """

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._added = 0

    def _open(self) -> sqlite3.Connection:
        return open_for_writing(self.path)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock, told(self.path):
            self._require_own_process()
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk may have rolled back already
                    self._db.execute("ROLLBACK")
                raise

    def add_metrics(
        self,
        time: float,
        epoch: int,
        loss: float | None,
        samples_per_second: float,
        volunteers: int,
        progress: float,
        samples_total: int,
    ) -> None:
        """How the swarm stands.

        :param time: s since the Unix epoch; the same again replaces
        :param loss: the swarm's; None or not finite: not known
        :param samples_per_second: of all volunteers together
        :param progress: of the next epoch, 0 to 1
        :param samples_total: that entered applied epochs since the run began
        """
        row = (
            moment(time), whole(epoch), maybe(loss), amount(samples_per_second), whole(volunteers),
            min(amount(progress), 1.0), whole(samples_total),
        )  # fmt: skip
        with self._writing() as db:
            db.execute("DELETE FROM metrics WHERE time > ?", (time + HOUR,))  # the clock was wrong, and is right now
            db.execute("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            if self._added % THIN_EVERY == 0:
                _thin(db, time)
        self._added += 1

    def add_event(self, time: float, kind: str, text: str = "", **detail: Any) -> None:
        """Something that happened.

        :param kind: one of KINDS; readers have words for each, so `text` may stay empty
        :param text: a template, as "{username} was seen twice": names and what else is known go into the fields
        :param detail: texts and numbers; username (and by: the moderator) is hidden if its owner wishes so
        """
        if kind not in bounds.KINDS:
            raise ValueError(f"{kind!r} is no kind of event; there are: {', '.join(bounds.KINDS)}")
        fields = json.dumps(bounds.fields(detail), ensure_ascii=False)
        with self._writing() as db:
            row = (moment(time), kind, line(text, bounds.TEXT), fields)
            db.execute("INSERT INTO events (time, kind, text, detail) VALUES (?, ?, ?, ?)", row)
            db.execute("INSERT INTO counts VALUES (?, 1) ON CONFLICT DO UPDATE SET number = number + 1", (kind,))
            db.execute(
                "DELETE FROM events WHERE kind = ?1 AND id <= "
                "(SELECT id FROM events WHERE kind = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                (kind, EVENTS_OF_A_KIND),
            )

    def add_rounds(self, rounds: int, complete_groups: int, failed: Mapping[str, int]) -> None:
        """So many more, as members count them.

        :param complete_groups: of these, all met who were expected; :param failed: by cause
        """
        more = {"rounds": rounds, "complete_groups": complete_groups, **dict(list(failed.items())[: bounds.FIELDS])}
        rows = [(line(name, bounds.NAME), whole(number)) for name, number in more.items() if number]
        with self._writing() as db:
            db.executemany(
                "INSERT INTO rounds VALUES (?, ?) ON CONFLICT DO UPDATE SET number = number + excluded.number", rows
            )

    def add_picture(self, time: float, epoch: int, caption: str, path: str | Path) -> None:
        """A PNG that the model drew. Raises ValueError if `path` is not below the journal's folder."""
        folder = self.path.parent.resolve()
        inside = Path(path).resolve().relative_to(folder)
        with self._writing() as db:
            row = (moment(time), whole(epoch), line(caption, bounds.CAPTION), inside.as_posix())
            db.execute("INSERT INTO pictures (time, epoch, caption, path) VALUES (?, ?, ?, ?)", row)
            db.execute("DELETE FROM pictures WHERE id <= (SELECT max(id) FROM pictures) - ?", (PICTURES,))

    def set_members(self, members: Iterable[Mapping[str, Any]]) -> None:
        """All peers as they are now; only what differs is written. Each has username, peer_id, device, here,
        samples_per_second."""
        rows = {}
        for member in members:
            key = line(member["peer_id"], bounds.NAME)
            rows[key] = (
                key, line(member.get("username") or "", bounds.NAME), line(member.get("device") or "", bounds.DEVICE),
                int(bool(member.get("here"))), amount(member.get("samples_per_second")),
            )  # fmt: skip
        self._replace("members", rows)

    def set_leaderboard(self, accounts: Iterable[Mapping[str, Any]]) -> None:
        """All accounts as they are now; only what differs is written. Each has username, samples, provisional (not
        yet vouched for), seconds (of work, all machines together), machines (ever)."""
        rows = {}
        for account in accounts:
            key = account_key(account["username"])
            rows[key] = (
                key, line(account["username"], bounds.NAME), whole(account.get("samples")),
                whole(account.get("provisional")), amount(account.get("seconds")), whole(account.get("machines")),
            )  # fmt: skip
        self._replace("leaderboard", rows)

    def _replace(self, table: str, rows: dict[str, tuple[Any, ...]]) -> None:
        rows = dict(list(rows.items())[:ACCOUNTS])
        with self._writing() as db:
            before = {row[0]: tuple(row) for row in db.execute(f"SELECT * FROM {table}")}
            key = {"members": "peer_id", "leaderboard": "account"}[table]
            gone = [(name,) for name in before.keys() - rows.keys()]
            db.executemany(f"DELETE FROM {table} WHERE {key} = ?", gone)
            changed = [row for name, row in rows.items() if before.get(name) != row]
            places = ", ".join("?" * len(next(iter(rows.values()), ())))
            db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({places})", changed) if changed else None

    def hide(self, username: str, hidden: bool) -> None:
        """Show this account's name nowhere, or again; what it gave and did stays."""
        query = "INSERT OR IGNORE INTO hidden VALUES (?)" if hidden else "DELETE FROM hidden WHERE account = ?"
        with self._writing() as db:
            db.execute(query, (account_key(username),))


def _thin(db: sqlite3.Connection, now: float) -> None:
    """Of old metrics, the last row of each stretch stays."""
    for age, stretch in THINNER:
        db.execute(
            "DELETE FROM metrics WHERE time < ?1 AND time NOT IN "
            "(SELECT max(time) FROM metrics WHERE time < ?1 GROUP BY CAST(time / ?2 AS INTEGER))",
            (now - age, stretch),
        )
