"""The database of an authority: a SQLite file, or PostgreSQL by URL. Opening it, and transactions."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, case, create_engine, event, make_url, select, text, update
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from volunteer_kit.auth.authority.backups import Backups, damaged, is_damage, require_private, require_whole
from volunteer_kit.auth.authority.settings import AuthorityError
from volunteer_kit.auth.authority.tables import SCHEMA, RunRow, Table
from volunteer_kit.packages import setup_command
from volunteer_kit.storage.sqlite import lacks_locks

PATIENCE = 5  # s that a statement waits for another's lock, or for a connection
LOST_CHANGES = 1000  # of the ban list, at most, since the backup was made
LOCK = 0x766B6175  # of PostgreSQL, while tables are made: two authorities may start at once


class Storage:
    """Raises AuthorityError where the database cannot be opened, is damaged, or is of another run."""

    def __init__(self, database: str | Path, run_id: str) -> None:
        """`database`: the path of a SQLite file, or postgresql://USER:PASSWORD@HOST/NAME"""
        self._engine = _engine(str(database))
        self._sessions = sessionmaker(self._engine, expire_on_commit=False)
        self._writing = sessionmaker(
            self._engine.execution_options(writes=True) if self.is_sqlite else self._engine, expire_on_commit=False
        )
        where = self._engine.url.render_as_string(hide_password=True)
        is_new = False
        try:
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                is_new = require_private(self.file)
                if not is_new:
                    require_whole(self.file)
            self._make_tables(run_id)
        except AuthorityError:
            self.close()
            raise
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            self.close()
            if is_new:
                self.file.unlink(missing_ok=True)  # an empty one is taken for a loss
            if self.file is not None and (lack := lacks_locks(self.file)):
                raise AuthorityError(lack) from None
            raise AuthorityError(
                f"The authority's database {where} cannot be used ({_cause(error)}).\n"
                "1. Look whether it is running, may be written to, and has room.\n"
                "2. Another one: --database PATH, or --database postgresql://USER@HOST/NAME"
            ) from None
        found = self.run_id
        if found != run_id:
            self.close()
            raise AuthorityError(
                f"The database {where} is of the run {found!r}, not {run_id!r}.\n1. Name another one: --database"
            )

    @property
    def is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    @property
    def file(self) -> Path | None:
        """Of SQLite."""
        name = self._engine.url.database if self.is_sqlite else None
        return Path(name) if name and name != ":memory:" else None

    @contextlib.contextmanager
    def backed_up(self) -> Iterator[None]:
        """Copy the SQLite file now and then, while this lasts; see backups.py."""
        with contextlib.nullcontext() if self.file is None else Backups(self.file).made_while(self._ban_version):
            yield

    def _ban_version(self) -> int:
        with self.reading() as db:
            return db.scalars(select(RunRow.ban_version)).one()

    def explain(self, error: BaseException) -> str:
        """What its host is told of an error of the database; "" if there is no more to say than the error itself."""
        return str(damaged(self.file, str(error))) if self.file is not None and is_damage(error) else ""

    @property
    def run_id(self) -> str:
        with self.reading() as db:
            return db.scalars(select(RunRow.run_id)).one()

    @contextlib.contextmanager
    def writing(self) -> Iterator[Session]:
        """One transaction that may change something; nothing of it stays if an exception leaves it."""
        with self._writing() as session, session.begin():
            yield session

    @contextlib.contextmanager
    def reading(self) -> Iterator[Session]:
        with self._sessions() as session:
            yield session

    def close(self) -> None:
        self._engine.dispose()

    def _make_tables(self, run_id: str) -> None:
        with self._engine.connect() as connection:
            connection = connection.execution_options(writes=True)
            with connection.begin():
                if not self.is_sqlite:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": LOCK})
                Table.metadata.create_all(connection)
                row = connection.execute(select(RunRow.schema)).first()
                if row is None:
                    # peers take greater versions only: one made anew after a loss must be ahead of the lost one
                    values = {"id": 1, "run_id": run_id, "schema": SCHEMA, "ban_version": int(time.time())}
                    connection.execute(RunRow.__table__.insert().values(values))
                elif row[0] > SCHEMA:
                    raise OSError("a newer volunteer-kit has written it")
                if self.is_sqlite and connection.execute(text("PRAGMA user_version")).scalar():
                    self._go_on_from_a_backup(connection)

    @staticmethod
    def _go_on_from_a_backup(connection: Connection) -> None:
        """Peers know a later ban list than this one, and take greater versions only."""
        newest = case((RunRow.ban_version > int(time.time()), RunRow.ban_version), else_=int(time.time()))
        connection.execute(update(RunRow).values(ban_version=newest + LOST_CHANGES))
        connection.execute(text("PRAGMA user_version=0"))


def _engine(database: str) -> Engine:
    # hide_parameters: else an error's text, which is logged, would quote what was to be written
    options: dict[str, Any] = {"hide_parameters": True, "pool_timeout": PATIENCE}
    if "://" not in database:
        database = f"sqlite:///{Path(database).absolute()}"
    try:
        url = make_url(database)
        if url.get_backend_name() == "sqlite":
            engine = create_engine(url, connect_args={"timeout": PATIENCE}, pool_size=16, **options)
            event.listen(engine, "connect", _set_up_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        if url.drivername in ("postgresql", "postgres"):
            url = url.set(drivername="postgresql+psycopg")
        limits = f"-c statement_timeout={PATIENCE}s -c lock_timeout={PATIENCE}s"
        arguments = {"connect_timeout": PATIENCE, "options": limits}
        return create_engine(
            url, connect_args=arguments, pool_size=16, pool_pre_ping=True, isolation_level="READ COMMITTED", **options
        )
    except ModuleNotFoundError as error:
        raise AuthorityError(
            f"The package {error.name!r}, which speaks to this database, is not installed.\n"
            f"1. Run: {setup_command(['postgresql'])}"
        ) from None
    except ArgumentError:
        raise AuthorityError(
            "This is no database: give the path of a SQLite file, or postgresql://USER:PASSWORD@HOST/NAME"
        ) from None


def _set_up_sqlite(connection: Any, record: object) -> None:
    connection.isolation_level = None  # sqlite3 would begin transactions by rules of its own
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA foreign_keys=ON")


def _begin_sqlite(connection: Any) -> None:
    """Who will write says so at once: a reader that becomes a writer midway may find the database changed, and fail."""
    is_writer = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writer else "BEGIN")


def _cause(error: BaseException) -> str:
    """Its first line, without the statement around it; a database's own words have no password in them."""
    original = getattr(error, "orig", None) or error
    return (str(original).strip().splitlines() or [type(original).__name__])[0][:200]
