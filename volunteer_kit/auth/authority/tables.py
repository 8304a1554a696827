"""What an authority keeps: accounts, their peers, bans and why, what moderators did. No token, session or address."""

from __future__ import annotations

from sqlalchemy import DDL, BigInteger, ForeignKey, Integer, String, Text, event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA = 1  # raise it with a change that an older authority could not read
Number = BigInteger().with_variant(Integer, "sqlite")  # SQLite counts up by itself in INTEGER only


class Table(DeclarativeBase):
    pass


class RunRow(Table):
    """The one row that says whose database this is. `ban_version` begins with the time, s since 1970, and grows
    with each change of who is shut out."""

    __tablename__ = "run"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(String(64))
    schema: Mapped[int]
    ban_version: Mapped[int] = mapped_column(Number)


class AccountRow(Table):
    """Somebody who was let in, or whom a moderator added. Times are s since 1970; `account` is the name in lower case.

    `checked_at`: when the Hub was last asked, and `is_member`: what it then said of the run's organization.
    """

    __tablename__ = "accounts"
    account: Mapped[str] = mapped_column(String(100), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    hub_id: Mapped[str] = mapped_column(String(100), default="", index=True)
    is_member: Mapped[bool] = mapped_column(default=False)
    added_by: Mapped[str | None] = mapped_column(String(100))
    removed_at: Mapped[float | None]
    joined_at: Mapped[float | None]
    checked_at: Mapped[float | None]
    seen_at: Mapped[float | None] = mapped_column(index=True)


class PeerRow(Table):
    """A key with which an account takes part, by its libp2p peer id (hex)."""

    __tablename__ = "peers"
    peer_id: Mapped[str] = mapped_column(String(80), primary_key=True)
    account: Mapped[str] = mapped_column(ForeignKey("accounts.account"), index=True)
    joined_at: Mapped[float]
    expires_at: Mapped[float]  # of its latest token


class BanRow(Table):
    __tablename__ = "bans"
    account: Mapped[str] = mapped_column(String(100), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    hub_id: Mapped[str] = mapped_column(String(100), default="", index=True)
    reason: Mapped[str] = mapped_column(String(400))
    by: Mapped[str] = mapped_column(String(100))
    at: Mapped[float]


class ConvictionRow(Table):
    """Why the swarm has banned an account, the last time that it did. `evidence`: JSON, see convictions.readable."""

    __tablename__ = "convictions"
    account: Mapped[str] = mapped_column(String(100), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    at: Mapped[float]
    evidence: Mapped[str] = mapped_column(Text)
    set_aside_at: Mapped[float | None]
    set_aside_by: Mapped[str | None] = mapped_column(String(100))


class PardonRow(Table):
    """When a moderator has last let a banned account in again: what the swarm found until then is set aside."""

    __tablename__ = "pardons"
    account: Mapped[str] = mapped_column(String(100), primary_key=True)
    hub_id: Mapped[str] = mapped_column(String(100), default="", index=True)
    at: Mapped[float]


class LogRow(Table):
    """What a moderator or the swarm did. Rows are only ever added: the database refuses to change or delete one."""

    __tablename__ = "log"
    id: Mapped[int] = mapped_column(Number, primary_key=True)
    at: Mapped[float]
    by: Mapped[str] = mapped_column(String(100))
    action: Mapped[str] = mapped_column(String(20))
    name: Mapped[str] = mapped_column(String(100))
    reason: Mapped[str] = mapped_column(String(400), default="")
    via: Mapped[str] = mapped_column(String(20))  # page, api or swarm


for _change in ("UPDATE", "DELETE"):
    event.listen(
        LogRow.__table__,
        "after_create",
        DDL(
            f"CREATE TRIGGER log_no_{_change.lower()} BEFORE {_change} ON log "
            "BEGIN SELECT RAISE(ABORT, 'the log is only added to'); END"
        ).execute_if(dialect="sqlite"),
    )
event.listen(
    LogRow.__table__,
    "after_create",
    DDL(
        "CREATE OR REPLACE FUNCTION log_is_only_added_to() RETURNS trigger AS "
        "'BEGIN RAISE EXCEPTION ''the log is only added to''; END' LANGUAGE plpgsql"
    ).execute_if(dialect="postgresql"),
)
event.listen(
    LogRow.__table__,
    "after_create",
    DDL(
        "CREATE TRIGGER log_no_change BEFORE UPDATE OR DELETE OR TRUNCATE ON log "
        "FOR EACH STATEMENT EXECUTE FUNCTION log_is_only_added_to()"
    ).execute_if(dialect="postgresql"),
)
