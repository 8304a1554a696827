"""One lock on every file system: with flock, without it, and without any lock of open files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sqlite3
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from volunteer_kit.auth.authority.settings import AuthorityError
from volunteer_kit.auth.authority.storage import Storage
from volunteer_kit.doctor import locks as doctor_locks
from volunteer_kit.encode.folder import locked
from volunteer_kit.home import Home
from volunteer_kit.host.folder import HostFolder
from volunteer_kit.host.settings import HostError
from volunteer_kit.journal.file import JournalError
from volunteer_kit.journal.file import told as in_words
from volunteer_kit.storage import locks
from volunteer_kit.storage.locks import LockFile, is_locked, try_lock, who_holds
from volunteer_kit.storage.socket_folders import SocketFolder, remove_stale_folders
from volunteer_kit.storage.sqlite import lacks_locks

LACKS = {"flock": (), "no flock": ("flock",), "no locks": ("flock", "fcntl", "lockf")}
HOLDER = """
import errno, fcntl, sys
def fails(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
for name in sys.argv[2].split():
    setattr(fcntl, name, fails)
from volunteer_kit.storage.locks import LockFile
print(LockFile(sys.argv[1]).acquire(), flush=True)
sys.stdin.read()
"""


def without(monkeypatch, names, number=errno.ENOSYS):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    for name in names:
        monkeypatch.setattr(fcntl, name, fails)


@pytest.fixture(params=LACKS)
def lacks(request, monkeypatch):
    without(monkeypatch, LACKS[request.param])
    return LACKS[request.param]


@contextmanager
def held_elsewhere(path, lacks):
    """A process that holds the lock until it is killed."""
    command = [sys.executable, "-c", HOLDER, str(path), " ".join(lacks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


def test_one_holds_it_and_it_is_free_when_that_one_is_killed(tmp_path, lacks):
    path = tmp_path / "a.lock"
    assert not is_locked(path) and not path.exists()
    with held_elsewhere(path, lacks) as holder:
        assert is_locked(path) and not LockFile(path).acquire() and who_holds(path) == ""
        holder.kill()
        holder.wait()
        lock = LockFile(path)
        assert not is_locked(path) and lock.acquire() and is_locked(path)
        assert lock.kind == {0: "flock", 1: "record", 3: "file"}[len(lacks)]
        lock.release()
        lock.release()
        assert LockFile(path).acquire()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EIO, errno.EBADF])
def test_only_would_block_means_that_another_holds_it(tmp_path, monkeypatch, number):
    without(monkeypatch, ["flock"], number)
    assert Home(tmp_path).lock() and not Home(tmp_path).lock()
    without(monkeypatch, ["fcntl", "lockf"], number)
    assert Home(tmp_path / "other").lock() and not Home(tmp_path / "other").lock()
    with open(tmp_path / "file", "w") as file:
        assert try_lock(file.fileno()) is None
    without(monkeypatch, ["flock"], errno.EWOULDBLOCK)
    with open(tmp_path / "file", "w") as file:
        assert try_lock(file.fileno()) is False


def test_every_door_opens_and_shuts_whatever_the_file_system_knows(tmp_path, lacks):
    """Volunteer, worker, host, encoder, and the folder of sockets."""
    home = Home(tmp_path / "home")
    for name in ("volunteer", "worker", "monitor"):
        assert home.lock(name) and not Home(tmp_path / "home").lock(name)
    host = HostFolder(tmp_path / "host")
    host.lock()
    with pytest.raises(HostError, match="Another host runs"):
        HostFolder(tmp_path / "host").lock()
    host.unlock()
    HostFolder(tmp_path / "host").lock()
    for _ in range(2):
        with locked(tmp_path / "codes"):
            assert is_locked(tmp_path / "codes" / ".lock")
    assert os.listdir(tmp_path / "codes") == []
    sockets = SocketFolder()
    remove_stale_folders()
    assert sockets.path.is_dir(), "it is in use"
    sockets.remove()
    assert not sockets.path.exists()


def test_sockets_of_a_process_that_locks_by_another_kind_stay(tmp_path, monkeypatch, lacks):
    """Another container may have the folder for temporary files by another mount."""
    sockets = SocketFolder()
    monkeypatch.undo()
    remove_stale_folders()
    assert sockets.path.is_dir()
    sockets.remove()


def holder_file(path, **fields):
    here = locks.Holder.current()
    Path(f"{path}.holder").write_text(json.dumps(here._replace(**fields)))


def test_a_holder_on_another_machine_is_named_with_the_way_out(tmp_path, monkeypatch):
    without(monkeypatch, LACKS["no locks"])
    path = tmp_path / "volunteer.lock"
    path.touch()
    holder_file(path, machine="node\x1b7", where="another boot", pid=7)
    assert not Home(tmp_path).lock() and is_locked(path)
    told = Home(tmp_path).who_holds()
    assert "process 7 of the machine node7" in told and told.endswith(f"rm {path}.holder")


@pytest.mark.parametrize("found", [{"pid": 2**22 - 1}, {"start": "1"}], ids=["ended", "its id is another's now"])
def test_a_dead_holder_is_followed(tmp_path, monkeypatch, found):
    without(monkeypatch, LACKS["no locks"])
    holder_file(tmp_path / "a.lock", **found)
    assert LockFile(tmp_path / "a.lock").acquire()
    assert json.loads((tmp_path / "a.lock.holder").read_text())[0] == socket.gethostname()


@pytest.mark.parametrize("text", ["", "{", "[" * 5000, "[1, 2, 3, 4, 5]"])
def test_a_holders_file_that_cannot_be_read_is_one_for_a_moment_only(tmp_path, monkeypatch, text):
    without(monkeypatch, LACKS["no locks"])
    file = tmp_path / "a.lock.holder"
    file.write_text(text)
    assert not LockFile(tmp_path / "a.lock").acquire(), "it is being written"
    os.utime(file, (0, 0))
    assert LockFile(tmp_path / "a.lock").acquire()


@pytest.mark.parametrize(
    "lacking, words",
    [((), "ok locks flock"), (("flock",), "ok locks record"), (LACKS["no locks"], "warning locks knows no locks")],
)
def test_the_doctor_tests_the_locks_of_the_home_folder(tmp_path, monkeypatch, lacking, words):
    without(monkeypatch, lacking)
    found = doctor_locks.look(tmp_path / "not yet" / "there")
    level, name, text = words.split(" ", 2)
    assert (found.level, found.name) == (level, name) and text in found.text
    assert os.listdir(tmp_path) == []


def test_the_doctor_finds_locks_that_exclude_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    found = doctor_locks.look(tmp_path)
    assert found.level == "warning" and "two processes have one lock" in found.text


def test_a_database_names_the_locks_that_it_lacks(tmp_path, monkeypatch):
    """SQLite calls that a disk I/O error."""
    monkeypatch.setattr(fcntl, "lockf", lambda *_: None)
    assert lacks_locks(tmp_path / "journal.sqlite") == ""
    without(monkeypatch, ["lockf"])
    told = f"The file system of {tmp_path} knows no record locks"
    with pytest.raises(JournalError, match=told), in_words(tmp_path / "journal.sqlite"):
        raise sqlite3.OperationalError("disk I/O error")
    (tmp_path / "authority.sqlite").mkdir()
    with pytest.raises(AuthorityError, match=told):
        Storage(tmp_path / "authority.sqlite", "demo")
