"""An authority's SQLite file: made for its owner's eyes only, checked before it is used, and copied beside itself.

PostgreSQL is not the subject here: it checks its files itself, and has backup tools of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shlex
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from volunteer_kit.auth.authority.settings import AuthorityError

KEPT = 10  # backups
EVERY = 3600.0  # s between two of them
LOOK_EVERY = 60.0  # s; a change of the ban list is in a backup that soon
IS_BACKUP = 1  # SQLite's user_version of a backup; the file that is served has 0
_COMPANIONS = ("-wal", "-shm", "-journal")
_log = logging.getLogger(__name__)


def is_damage(error: BaseException) -> bool:
    """Does SQLite say that the file is none of its own (any more)? Its other troubles are of a class below this one."""
    return type(error) is sqlite3.DatabaseError


def require_private(path: Path) -> bool:
    """Make the file, or take from others what they may do with it. :returns: whether it was made.

    Raises OSError; AuthorityError where it is empty, or missing beside its own backups: SQLite would make a new
    database without a word, and nobody would be a member, or banned.
    """
    if path.exists():
        for one in (path, *(path.with_name(path.name + ending) for ending in _COMPANIONS)):
            if one.exists() and one.stat().st_mode & 0o077:
                one.chmod(0o600)
        if path.is_file() and not path.stat().st_size:
            raise damaged(path, "it is empty")
        return False
    if Backups(path).newest() is not None:
        raise damaged(path, "it is missing")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))  # SQLite gives its companions the same mode
    return True


def require_whole(path: Path) -> None:
    """Raises AuthorityError if the file is damaged, or not an authority's; sqlite3.Error if it cannot be read now."""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=5)) as database:
            found = _check(database) or _check_end(path, database)
            rows = [] if found else database.execute("SELECT name FROM sqlite_master WHERE name = 'run'").fetchall()
            rows = rows and database.execute("SELECT id FROM run").fetchall()
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        found = str(error)
    if not found and not rows:
        found = "it has no records of an authority in it"
    if found:
        raise damaged(path, found)


def _check(database: sqlite3.Connection) -> str:
    """What SQLite finds wrong; "" if nothing."""
    lines = [str(row[0]) for row in database.execute("PRAGMA integrity_check(1)")]
    return "" if lines == ["ok"] else " ".join(lines)[:200] or "unknown"


def _check_end(path: Path, database: sqlite3.Connection) -> str:
    """SQLite takes a last page that was cut as one that ends in zeros. With a log (-wal), the page is still in that."""
    log = path.with_name(f"{path.name}-wal")
    page = database.execute("PRAGMA page_size").fetchone()[0]
    is_cut = path.stat().st_size % page and not (log.exists() and log.stat().st_size)
    return "it ends inside a page" if is_cut else ""


def damaged(path: Path, why: str) -> AuthorityError:
    """An error that says how the newest backup comes back."""
    file, aside = shlex.quote(str(path)), shlex.quote(f"{path}.damaged")
    companions = " ".join(shlex.quote(f"{path}{ending}") for ending in _COMPANIONS)
    away = f"rm -f {companions}" if why == "it is missing" else f"mv {file} {aside}; rm -f {companions}"
    newest = Backups(path).newest()
    if newest is None:
        return AuthorityError(
            f"The authority's database {path} is damaged ({why}), and there is no backup beside it.\n"
            f"1. Put it away: {away}\n"
            f"2. If you have a copy elsewhere, put it there: cp COPY {file}\n"
            "3. Start the authority again. Without a copy it begins anew: members join by themselves, bans are lost."
        )
    made = datetime.datetime.fromtimestamp(newest.stat().st_mtime, datetime.timezone.utc)
    return AuthorityError(
        f"The authority's database {path} is damaged ({why}).\n"
        f"The newest backup is of {made:%Y-%m-%d %H:%M} UTC: {newest}\n"
        f"1. Put the damaged one away: {away}\n"
        f"2. Put the backup in its place: cp -p {shlex.quote(str(newest))} {file}\n"
        "3. Start the authority again. Members come back by themselves; look whether a ban is missing."
    )


class Backups:
    """The copies beside a SQLite file, NAME.backup-20261127T083000Z, of which the newest KEPT stay."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def newest(self) -> Path | None:
        return max(self._all(), default=None)

    def _all(self) -> list[Path]:
        prefix = f"{self._path.name}.backup-"
        with contextlib.suppress(OSError):
            return [one for one in self._path.parent.iterdir() if one.name.startswith(prefix)]
        return []

    def make(self) -> Path:
        """One more, whole or not at all. Raises OSError, sqlite3.Error; AuthorityError if the file is damaged: then
        the earlier ones stay."""
        part = self._path.with_name(f".{self._path.name}.backup.part")
        part.unlink(missing_ok=True)
        try:
            os.close(os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            self._copy(part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            made = self._path.with_name(time.strftime(f"{self._path.name}.backup-%Y%m%dT%H%M%SZ", time.gmtime()))
            os.replace(part, made)
        finally:
            part.unlink(missing_ok=True)
        for old in sorted(self._all())[:-KEPT]:
            old.unlink(missing_ok=True)
        return made

    def _copy(self, part: Path) -> None:
        source = f"{self._path.absolute().as_uri()}?mode=ro"
        with (
            contextlib.closing(sqlite3.connect(source, uri=True, timeout=5)) as database,
            contextlib.closing(sqlite3.connect(part, isolation_level=None)) as copy,
        ):
            try:
                database.backup(copy)
                found = _check(copy)
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                found = str(error)
            if found:
                raise damaged(self._path, found)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, with no companions
            copy.execute(f"PRAGMA user_version={IS_BACKUP}")

    def is_due(self) -> bool:
        newest = self.newest()
        return newest is None or not 0 <= time.time() - newest.stat().st_mtime < EVERY

    @contextlib.contextmanager
    def made_while(self, version: Callable[[], int], look_every: float = LOOK_EVERY) -> Iterator[None]:
        """Make one now and then, in a thread: when the last is EVERY old, or `version()` is another."""
        stop = threading.Event()
        thread = threading.Thread(target=self._keep, args=(version, look_every, stop), name="backups", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(10)

    def _keep(self, version: Callable[[], int], look_every: float, stop: threading.Event) -> None:
        saved, told = -1, ""
        while True:
            try:
                now = version()
                if self.is_due() or saved not in (-1, now):
                    self.make()
                saved, told = now, ""
            except Exception as error:  # whatever it is, the authority serves on, and its host reads why
                said = str(error)
                if said != told:
                    _log.error("No backup of the authority's database could be made: %s", said)
                told = said
            if stop.wait(look_every):
                return
