"""What moderators may do, whoever carries it to them: the page, the API. Knows no HTTP."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from volunteer_kit.auth.authority import accounts
from volunteer_kit.auth.authority.desk import Desk
from volunteer_kit.auth.authority.tables import AccountRow, BanRow, ConvictionRow, LogRow, PeerRow
from volunteer_kit.auth.moderation import (
    BY_SWARM,
    Ban,
    Refused,
    Way,
    account_of,
    check_ban,
    check_name,
    check_reason,
    check_removal,
)

MAX_SESSIONS = 1000
PAGE = 100  # rows of a list at once


@dataclass
class Signed:
    """A moderator who has signed in. `form_key` goes into each form of the page; `said` is shown there once."""

    name: str
    expires_at: float  # by time.monotonic()
    form_key: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    said: str = ""


class Member(NamedTuple):
    """`way`: by what the person may take part. `peers`: machines with a token that is good now."""

    name: str
    way: Way | None
    peers: int
    joined_at: float | None
    seen_at: float | None
    added_by: str | None


class Entry(NamedTuple):
    id: int
    at: float
    by: str
    action: str
    name: str
    reason: str
    via: str


class Sessions:
    """Who has signed in, by a secret that only that one has; in memory, so a restart signs everybody out."""

    def __init__(self, lifetime: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lifetime, self._clock, self._lock = lifetime, clock, threading.Lock()
        self._signed: dict[bytes, Signed] = {}

    def open(self, name: str) -> str:
        """:returns: the secret"""
        secret, now = secrets.token_urlsafe(32), self._clock()
        with self._lock:
            self._signed = {key: one for key, one in self._signed.items() if one.expires_at > now}
            while len(self._signed) >= MAX_SESSIONS:
                del self._signed[next(iter(self._signed))]
            self._signed[_hash(secret)] = Signed(name, now + self._lifetime)
        return secret

    def find(self, secret: str) -> Signed | None:
        found = self._signed.get(_hash(secret))
        return found if found is not None and found.expires_at > self._clock() else None

    def close(self, secret: str) -> None:
        with self._lock:
            self._signed.pop(_hash(secret), None)


class Moderators:
    """Each action is one transaction with its line in the log. Raises Refused."""

    def __init__(self, desk: Desk) -> None:
        self._desk, self._storage, self._allowlist = desk, desk.storage, desk.settings.allowlist
        self.sessions = Sessions(desk.settings.session_lifetime)

    def sign_in(self, hf_token: str, address: str) -> tuple[str, str]:
        """:returns: the session's secret and the moderator's name. Nothing of the login is kept."""
        person = self._desk.ask_hub(hf_token, address)
        if not self._allowlist.is_moderator(person.name):
            raise Refused(
                "not_moderator",
                f"{person.name} is not a moderator of this run.\n"
                "1. The host can name moderators in the run file: authority.moderators",
            )
        return self.sessions.open(person.name), person.name

    # --- actions ---

    def add(self, by: str, name: str, via: str) -> str:
        """Let somebody in. :returns: what was done, in words."""
        name, account = _named(name)
        with self._storage.writing() as db:
            if accounts.ban_of(db, account):
                raise Refused("banned", f"{name} is banned. Lift the ban first.")
            row = db.get(AccountRow, account)
            if row is not None and row.added_by is not None:
                raise Refused("already", f"{name} was added already, by {row.added_by}.")
            if row is None:
                accounts.put(db, AccountRow, "account", {"account": account, "name": name, "added_by": by})
            else:
                row.added_by = by
                if row.removed_at is not None:
                    row.removed_at = None
                    accounts.count_change(db)
            self._log(db, by, "added", name, "", via)
        self._desk.bans_changed()
        return f"{name} may take part now."

    def remove(self, by: str, name: str, via: str) -> str:
        """Take back an addition: every token of the account ends, as with a ban."""
        name, account = _named(name)
        with self._storage.writing() as db:
            row = db.get(AccountRow, account)
            check_removal(self._allowlist, row.name if row else name, accounts.standing(db, account))
            assert row is not None
            row.added_by, row.removed_at, name = None, self._desk.clock(), row.name
            accounts.count_change(db)
            self._log(db, by, "removed", name, "", via)
        self._desk.bans_changed()
        return f"{name} is out, within a minute, and may be added again."

    def ban(self, by: str, name: str, reason: str, via: str) -> str:
        """Put somebody out, and keep him out."""
        name, account = _named(name)
        check_ban(self._allowlist, name)
        reason = check_reason(reason)
        with self._storage.writing() as db:
            if (ban := db.get(BanRow, account)) is not None:
                raise Refused("already", f"{ban.name} is banned already, by {ban.by}: {ban.reason}")
            name = accounts.ban(db, self._desk.settings.run_id, name, reason, by, self._desk.clock())
            self._log(db, by, "banned", name, reason, via)
        self._desk.bans_changed()
        return f"{name} is banned, and out within a minute."

    def unban(self, by: str, name: str, via: str) -> str:
        """Let somebody in again. What the swarm has found until now is set aside, or it would ban at once anew."""
        name, account = _named(name)
        with self._storage.writing() as db:
            row = db.get(BanRow, account)
            if row is None:
                raise Refused("not_banned", f"{name} is not banned.")
            name, now = row.name, self._desk.clock()
            accounts.pardon(db, account, row.hub_id, now)
            if row.by == BY_SWARM and (conviction := db.get(ConvictionRow, account)) is not None:
                conviction.set_aside_at, conviction.set_aside_by = now, by
            db.execute(delete(BanRow).where(BanRow.account == account))
            accounts.count_change(db)
            self._log(db, by, "unbanned", name, "", via)
        self._desk.bans_changed()
        if row.by == BY_SWARM:
            return f"The ban of {name} is lifted, and what the swarm has found until now is set aside."
        return f"The ban of {name} is lifted."

    def _log(self, db: Session, by: str, action: str, name: str, reason: str, via: str) -> None:
        accounts.write_log(db, self._desk.clock(), by, action, name, reason, via)

    # --- lists ---

    def members(self, part: str = "", limit: int = PAGE) -> list[Member]:
        """Who took part or may, the latest first; `part`: of the name."""
        now = self._desk.clock()
        is_known = or_(AccountRow.joined_at.is_not(None), AccountRow.added_by.is_not(None))
        query = select(AccountRow).outerjoin(BanRow, BanRow.account == AccountRow.account)
        query = query.where(BanRow.account.is_(None), is_known)
        query = query.order_by(AccountRow.seen_at.desc().nullslast(), AccountRow.account)
        if part:
            query = query.where(AccountRow.account.contains(account_of(part), autoescape=True))
        with self._storage.reading() as db:
            rows = list(db.scalars(query.limit(limit)))
            names = [row.account for row in rows]
            here = select(PeerRow.account).where(PeerRow.account.in_(names), PeerRow.expires_at > now)
            peers = Counter(db.scalars(here))
        return [
            Member(row.name, self._way(row), peers[row.account], row.joined_at, row.seen_at, row.added_by)
            for row in rows
        ]

    def _way(self, row: AccountRow) -> Way | None:
        return self._allowlist.way_in(row.name, is_member=row.is_member, is_added=row.added_by is not None)

    def bans(self, limit: int = 1000) -> list[Ban]:
        with self._storage.reading() as db:
            rows = db.scalars(select(BanRow).order_by(BanRow.at.desc(), BanRow.account).limit(limit))
            return [Ban(row.name, row.reason, row.by, row.at) for row in rows]

    def convictions(self, of: Iterable[Ban]) -> dict[str, dict[str, Any]]:
        """Name -> why the swarm has banned it, as convictions.readable; of those among the bans that are its."""
        names = {account_of(ban.name): ban.name for ban in of if ban.by == BY_SWARM}
        with self._storage.reading() as db:
            rows = list(db.scalars(select(ConvictionRow).where(ConvictionRow.account.in_(names))))
        return {names[row.account]: json.loads(row.evidence) for row in rows}

    def log(self, before: int | None = None, limit: int = PAGE) -> list[Entry]:
        """The latest first. `before`: of an entry's id, for the next page."""
        query = select(LogRow).order_by(LogRow.id.desc()).limit(limit)
        if before is not None:
            query = query.where(LogRow.id < before)
        with self._storage.reading() as db:
            rows = db.scalars(query)
            return [Entry(row.id, row.at, row.by, row.action, row.name, row.reason, row.via) for row in rows]


def _named(name: str) -> tuple[str, str]:
    name = check_name(name)
    return name, account_of(name)


def _hash(secret: str) -> bytes:
    """What is kept of a secret: looking it up takes a time that tells nothing of it."""
    return hashlib.sha256(secret.encode()).digest()
