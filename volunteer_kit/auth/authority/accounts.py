"""Accounts, peers and bans in the database; each function works inside the transaction that it is given."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from volunteer_kit.auth.access_token import MAX_BANS, MAX_PARDONS, BanList, account_digest
from volunteer_kit.auth.authority.tables import AccountRow, BanRow, LogRow, PardonRow, PeerRow, RunRow
from volunteer_kit.auth.evidence import FORGOTTEN_AFTER
from volunteer_kit.auth.moderation import Ban, Person, Refused, Standing, account_of


def put(db: Session, table: type, key: str, values: dict[str, Any], keep: tuple[str, ...] = ()) -> None:
    """Insert a row, or set its columns but `keep`; the row is then locked until the transaction ends. Two peers of an
    account may join in the same moment, and neither must fail."""
    dialect = sqlite if db.get_bind().dialect.name == "sqlite" else postgresql
    statement = dialect.insert(table).values(values)
    changed = {name: value for name, value in values.items() if name != key and name not in keep}
    db.execute(statement.on_conflict_do_update(index_elements=[key], set_=changed))


def standing(db: Session, account: str, hub_id: str = "", is_member: bool | None = None) -> Standing:
    """What is known of it. `is_member`: as the Hub says now; None: as it said last."""
    row = db.get(AccountRow, account)
    member = row is not None and row.is_member if is_member is None else is_member
    return Standing(member, row is not None and row.added_by is not None, ban_of(db, account, hub_id))


def ban_of(db: Session, account: str, hub_id: str = "") -> Ban | None:
    """The ban of this name, or of the same account under an earlier one."""
    same = or_(BanRow.account == account, BanRow.hub_id == hub_id) if hub_id else BanRow.account == account
    row = db.scalars(select(BanRow).where(same)).first()
    return row and Ban(row.name, row.reason, row.by, row.at)


def ban(db: Session, run_id: str, name: str, reason: str, by: str, at: float) -> str:
    """Put an account on the list. :returns: its name as it is written here. Raises Refused (full)."""
    if (count := len(shut_out(db, run_id, at).accounts)) >= MAX_BANS - 100:
        raise Refused("full", f"{count} accounts are shut out, and a list has no room for more.")
    row = db.get(AccountRow, account_of(name))
    name, hub_id = (row.name, row.hub_id) if row else (name, "")
    values = {"account": account_of(name), "name": name, "hub_id": hub_id, "reason": reason, "by": by, "at": at}
    put(db, BanRow, "account", values)
    count_change(db)
    return name


def pardon(db: Session, account: str, hub_id: str, at: float) -> None:
    put(db, PardonRow, "account", {"account": account, "hub_id": hub_id, "at": at})


def pardoned_at(db: Session, account: str, hub_id: str = "") -> float:
    """When this account, under whatever name, was last let in again, s since 1970; 0: never."""
    same = or_(PardonRow.account == account, PardonRow.hub_id == hub_id) if hub_id else PardonRow.account == account
    return db.scalars(select(func.max(PardonRow.at)).where(same)).one() or 0.0


def remember_whom_a_ban_means(db: Session, person: Person) -> None:
    """A ban of a name that had never been here gets the account behind it, so that renaming it does not help."""
    if person.hub_id:
        row = db.get(BanRow, person.account)
        if row is not None and not row.hub_id:
            row.hub_id = person.hub_id
            count_change(db)


def admit(db: Session, person: Person, *, is_member: bool, now: float) -> None:
    """This person was let in now."""
    before = db.get(AccountRow, person.account)
    if before is not None and before.removed_at is not None:
        count_change(db)  # no longer shut out
    values = {
        "account": person.account, "name": person.name, "hub_id": person.hub_id, "is_member": is_member,
        "removed_at": None, "joined_at": now, "checked_at": now, "seen_at": now,
    }  # fmt: skip
    first = before is None or before.joined_at is None
    put(db, AccountRow, "account", values, keep=() if first else ("joined_at",))


def count_peers(db: Session, account: str, now: float, but: str) -> int:
    """How many other peers of the account hold a token that is good now."""
    count = select(func.count()).select_from(PeerRow).where(PeerRow.account == account, PeerRow.expires_at > now)
    return db.scalars(count.where(PeerRow.peer_id != but)).one()


def note_peer(db: Session, peer_id: str, account: str, now: float, expires_at: float) -> None:
    values = {"peer_id": peer_id, "account": account, "joined_at": now, "expires_at": expires_at}
    put(db, PeerRow, "peer_id", values, keep=("joined_at",))


def shut_out(db: Session, run_id: str, now: float) -> BanList:
    """Who may not take part although a token may say so: the banned, by each name that they had here, and those whose
    admission was taken back. And who was pardoned so lately that it matters."""
    version = db.scalars(select(RunRow.ban_version)).one()
    names = set(db.scalars(select(BanRow.account)))
    names |= set(db.scalars(select(AccountRow.account).where(AccountRow.removed_at.is_not(None))))
    renamed = select(AccountRow.account).join(BanRow, BanRow.hub_id == AccountRow.hub_id)
    names |= set(db.scalars(renamed.where(AccountRow.hub_id != "")))
    return BanList(version, frozenset(account_digest(run_id, name) for name in names), _pardons(db, run_id, now))


def _pardons(db: Session, run_id: str, now: float) -> dict[bytes, float]:
    query = select(PardonRow).where(PardonRow.at > now - 2 * FORGOTTEN_AFTER).order_by(PardonRow.at.desc())
    found: dict[str, float] = {}
    for row in db.scalars(query.limit(MAX_PARDONS)):
        same = select(AccountRow.account).where(AccountRow.hub_id == row.hub_id)
        for name in {row.account, *(db.scalars(same) if row.hub_id else ())}:
            found[name] = max(row.at, found.get(name, 0.0))
    return {account_digest(run_id, name): at for name, at in found.items()}


def count_change(db: Session) -> None:
    """The ban list has changed, in this very transaction: whoever reads it reads its new version."""
    db.execute(update(RunRow).values(ban_version=RunRow.ban_version + 1))


def write_log(db: Session, at: float, by: str, action: str, name: str, reason: str, via: str) -> None:
    db.add(LogRow(at=at, by=by, action=action, name=name, reason=reason, via=via))
