"""The authority's SQLite file: for its owner only, damaged, missing, and brought back from a backup."""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bounded_server import authority_run
from tests.waiting import wait_until
from volunteer_kit.auth.authority import accounts
from volunteer_kit.auth.authority.backups import KEPT, Backups, require_private
from volunteer_kit.auth.authority.settings import AuthorityError
from volunteer_kit.auth.authority.storage import Storage
from volunteer_kit.auth.authority.tables import BanRow

RUN = "demo"


@pytest.fixture
def everybody_may_read() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with a database that has 300 bans, closed, and a backup of it."""
    path = tmp_path_factory.mktemp("made") / "authority.sqlite"
    storage = Storage(path, RUN)
    with storage.writing() as db:
        for number in range(300):
            name = f"person{number}"
            db.add(BanRow(account=name, name=name, reason="spam " * 20, by="Mona", at=1.0))
    storage.close()
    Backups(path).make()
    return path.parent


@pytest.fixture
def file(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "host folder") / "authority.sqlite"


def modes(folder: Path) -> set[int]:
    return {one.stat().st_mode & 0o777 for one in folder.iterdir() if one.name.startswith("authority.sqlite")}


def bans_of(path: Path) -> tuple[int, int]:
    """How many, and the list's version."""
    storage = Storage(path, RUN)
    with storage.reading() as db:
        listed = accounts.shut_out(db, RUN, time.time())
    storage.close()
    return len(listed.accounts), listed.version


def obey(error: AuthorityError) -> None:
    """Do what it says, as its host would."""
    for command in re.findall(r"^\d\. Put [^:]*: (.*)$", str(error), re.MULTILINE):
        subprocess.run(["sh", "-c", command], check=True)


# --- modes ---


def test_only_its_owner_may_read_it(tmp_path, everybody_may_read):
    path = tmp_path / "authority.sqlite"
    assert require_private(path) and modes(tmp_path) == {0o600}, "before SQLite opens it"
    path.unlink()
    storage = Storage(path, RUN)
    with storage.reading(), storage.writing() as db:
        accounts.ban(db, RUN, "eve", "spam", "Mona", 1.0)
        assert len(list(tmp_path.iterdir())) == 3, "with -wal and -shm"
        Backups(path).make()
        assert modes(tmp_path) == {0o600}
    storage.close()


def test_an_older_file_is_closed_to_others(file, everybody_may_read):
    before = Storage(file, RUN)  # so that -wal and -shm stay
    for one in file.parent.glob("authority.sqlite*"):
        one.chmod(0o644)
    after = Storage(file, RUN)
    served = {one for one in file.parent.iterdir() if "backup" not in one.name}
    assert len(served) == 3 and {one.stat().st_mode & 0o777 for one in served} == {0o600}
    before.close()
    after.close()


# --- damage ---


def truncate(size: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(size if size > 1 else size * path.stat().st_size))


def overwrite(begin: int, end: int | None = None) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[begin:end] = random.Random(1).randbytes(len(data[begin:end]))
        path.write_bytes(data)

    return change


def another_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE a (b)")
    database.close()


DAMAGES = {
    "emptied": truncate(0), "a few bytes": truncate(50), "a header": truncate(100), "a page": truncate(4096),
    "half": truncate(0.5), "all but a byte": truncate(0.9999), "no header": overwrite(0, 100),
    "first page": overwrite(100, 4096), "second page": overwrite(4096, 8192), "random": overwrite(0),
    "text": lambda path: path.write_text("this is not a database\n" * 100), "zeros": lambda path: path.write_bytes(
        bytes(path.stat().st_size)), "another": another_database, "missing": Path.unlink,
}  # fmt: skip


@pytest.mark.parametrize("harm", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_database_names_the_backup_and_how_it_comes_back(file, harm):
    known = bans_of(file)
    backup = Backups(file).newest()
    harm(file)
    left = file.read_bytes() if file.exists() else None
    with pytest.raises(AuthorityError) as caught:
        Storage(file, RUN)
    assert str(backup) in str(caught.value) and "damaged" in str(caught.value)
    assert (file.read_bytes() if file.exists() else None) == left, "nothing was changed"
    obey(caught.value)
    count, version = bans_of(file)
    assert count == known[0] == 300
    assert version > known[1], "peers know the lost list, and take a greater version only"
    assert file.stat().st_mode & 0o777 == 0o600
    assert bans_of(file) == (count, version), "once"


@pytest.mark.parametrize("harm", [truncate(0), overwrite(0)])
def test_without_a_backup_it_is_said(file, harm):
    Backups(file).newest().unlink()
    harm(file)
    with pytest.raises(AuthorityError, match="no backup") as caught:
        Storage(file, RUN)
    obey(caught.value)
    assert bans_of(file)[0] == 0, "begun anew by its host, not by itself"


def test_leftovers_of_the_damaged_one_do_not_come_into_the_backup(file):
    storage = Storage(file, RUN)
    with storage.writing() as db:
        accounts.ban(db, RUN, "eve", "spam", "Mona", 1.0)
    wal = file.with_name(file.name + "-wal")
    kept = wal.read_bytes()
    storage.close()
    wal.write_bytes(kept)
    overwrite(0)(file)
    with pytest.raises(AuthorityError) as caught:
        Storage(file, RUN)
    obey(caught.value)
    assert bans_of(file)[0] == 300


def test_a_first_start_on_a_full_disk_leaves_nothing_that_looks_like_a_loss(tiny_disk):
    filler = tiny_disk / "filler"
    with filler.open("wb", buffering=0) as out, pytest.raises(OSError):
        while out.write(b"x" * 4096):
            pass
    with pytest.raises(AuthorityError, match="cannot be used"):
        Storage(tiny_disk / "authority.sqlite", RUN)
    filler.unlink()
    assert bans_of(tiny_disk / "authority.sqlite")[0] == 0


def test_its_process_says_it_without_a_traceback(tmp_path):
    run, folder = authority_run(tmp_path)
    Storage(folder / "authority.sqlite", RUN).close()
    backup = Backups(folder / "authority.sqlite").make()
    overwrite(0)(folder / "authority.sqlite")
    command = [sys.executable, "-m", "volunteer_kit.cli", "authority", str(run), "--folder", str(folder), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode and "Traceback" not in said
    assert str(backup) in said.replace("\n", ""), said


# --- backups ---


def test_the_newest_backups_stay(file, monkeypatch):
    backups = Backups(file)
    for day in range(1, KEPT + 5):
        moment = time.struct_time((2031, 1, day, 0, 0, 0, 0, 0, 0))
        monkeypatch.setattr(time, "gmtime", lambda moment=moment: moment)
        made = backups.make()
        assert backups.newest() == made
    kept = sorted(one.name for one in file.parent.iterdir() if "backup" in one.name)
    assert len(kept) == KEPT and kept[-1].endswith(f"203101{KEPT + 4}T000000Z")


def test_a_damaged_database_displaces_no_backup(file):
    before = {one.name: one.read_bytes() for one in file.parent.iterdir() if "backup" in one.name}
    overwrite(4096, 8192)(file)
    with pytest.raises(AuthorityError, match="damaged"):
        Backups(file).make()
    assert {one.name: one.read_bytes() for one in file.parent.iterdir() if "backup" in one.name} == before


def test_a_backup_is_made_at_once_and_after_a_change_of_the_bans(file):
    backups, version = Backups(file), [1]
    backups.newest().unlink()
    with backups.made_while(lambda: version[0], look_every=0.01):
        wait_until(lambda: backups.newest() is not None)
        seen = backups.newest().stat().st_ino
        version[0] = 2
        wait_until(lambda: backups.newest().stat().st_ino != seen)
    assert not list(file.parent.glob(".*part"))


def test_a_backup_that_fails_is_told_once_and_the_authority_serves_on(file, caplog):
    storage = Storage(file, RUN)
    shutil.rmtree(file.parent)
    with Backups(file).made_while(lambda: 1, look_every=0.01):
        wait_until(lambda: "No backup" in caplog.text)
        time.sleep(0.1)
    assert caplog.text.count("No backup") == 1
    storage.close()


def test_serving_makes_backups(file):
    Backups(file).newest().unlink()
    storage = Storage(file, RUN)
    with storage.backed_up():
        wait_until(lambda: Backups(file).newest() is not None)
    storage.close()
