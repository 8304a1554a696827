"""The folder of a peer's sockets: whose it is, when it is removed, and what is missed in it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from volunteer_kit.storage import socket_folders
from volunteer_kit.storage.socket_folders import NEW_PREFIX, PREFIX, SocketFolder
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.swarm.net.children import end_in_words
from volunteer_kit.swarm.net.sockets import SocketGuard, SwarmError, make_socket_folder
from volunteer_kit.training.protocol import BROKEN, WorkerSpec
from volunteer_kit.worker_end import WorkerEnd

KILLED = """
import os, signal
from volunteer_kit.storage.socket_folders import SocketFolder
print(SocketFolder().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

LOSES_ITS_SOCKET = """
import asyncio
from hivemind.p2p import P2P
from volunteer_kit.storage.socket_folders import SocketFolder
from volunteer_kit.swarm.net.children import LastWords
from volunteer_kit.swarm.net.daemon_link import DaemonLink

async def main():
    folder = SocketFolder()
    asyncio.subprocess.create_subprocess_exec = DaemonLink(LastWords(), folder).start_daemon
    p2p = await P2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=120)
    await p2p.add_binary_stream_handler("called", None)
    while not (there := list(folder.path.glob("p2pclient-*"))):
        await asyncio.sleep(0)
    there[0].unlink()
    print("lost", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    """The folder for temporary files, with a short path."""
    with tempfile.TemporaryDirectory(prefix="vk", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_folder_is_private_and_a_path_in_it_is_short_enough(base):
    folder = SocketFolder()
    assert folder.path.parent == base and folder.path.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as longest:
        longest.bind(f"{folder.path}/p2pclient-{'x' * 11}.sock")
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_where_the_path_for_temporary_files_is_long_another_one_is_taken(base, monkeypatch):
    deep = base / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    folder = SocketFolder()
    assert folder.path.parent == Path("/tmp")
    folder.remove()


def test_what_a_killed_peer_left_is_removed_by_the_next_and_nothing_else_is(base, monkeypatch):
    environment = {**os.environ, "TMPDIR": str(base)}
    done = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, env=environment)
    assert done.returncode == -signal.SIGKILL
    left, starting = Path(done.stdout.strip()), base / f"{NEW_PREFIX}one"
    assert left.is_dir()
    for folder in (starting, base / "other"):
        folder.mkdir()
    used = SocketFolder()
    assert not left.exists()
    assert starting.is_dir(), "it is young: its owner may be about to lock it"
    monkeypatch.setattr(socket_folders, "YOUNG", -1.0)
    (base / f"{PREFIX}link").symlink_to(base / "other")
    later = SocketFolder()
    assert not starting.exists() and used.path.is_dir() and later.path.is_dir()
    assert (base / "other").is_dir() and (base / f"{PREFIX}link").is_symlink()
    used.remove()
    later.remove()


def test_a_supervisor_removes_what_its_killed_worker_left(base, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(base))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "killed_worker.py").write_text(KILLED)
    spec = WorkerSpec(run={}, name="killed")
    with Supervisor(spec, log_path=tmp_path / "log", restart=False, module="killed_worker") as supervisor:
        while supervisor.next_event(timeout=60):
            pass
    assert supervisor.exit_code == -signal.SIGKILL and PREFIX in (tmp_path / "log").read_text()
    assert list(base.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_with_what_to_do(base, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(base / "gone"))
    with pytest.raises(SwarmError, match="export TMPDIR") as told:
        make_socket_folder()
    assert told.value.kind == "startup"


def test_a_full_disk_is_told_and_ends_no_supervisor(base, monkeypatch):
    def find_none():
        raise FileNotFoundError("No usable temporary directory found")

    def fill(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "gettempdir", find_none)
    monkeypatch.setattr(tempfile, "mkdtemp", fill)
    socket_folders.remove_stale_folders()
    with pytest.raises(SwarmError, match="in /tmp: No space left on device"):
        make_socket_folder()


def test_a_socket_that_was_removed_or_replaced_is_missed(base):
    one, other = str(base / "one"), str(base / "other")
    made = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    made[0].bind(one)
    guard = SocketGuard()
    assert guard.find_lost([one], may_come=[other]) is None
    made[1].bind(other)
    assert guard.find_lost([one], may_come=[other]) is None
    os.unlink(other)
    assert guard.find_lost([one], may_come=[other]) == other
    made[2].bind(str(base / "new"))
    os.rename(base / "new", one)
    assert guard.find_lost([one]) == one, "somebody else's is there"
    os.unlink(one)
    Path(one).touch()
    assert SocketGuard().find_lost([one]) == one, "it is no socket"
    for each in made:
        each.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-9, "was killed by signal 9 (SIGKILL), often the system's answer to a lack of memory"),
        (-999, "was killed by signal 999"),
        (0, "ended with exit code 0"),
        (1, "ended with exit code 1"),
        (None, "has ended"),
    ],
)
def test_how_a_process_ended_in_words(code, words):
    assert end_in_words(code) == words


def test_a_broken_worker_is_followed_and_says_why():
    end = WorkerEnd(BROKEN, "The process that talks to the swarm was killed by signal 11.\nmore", "")
    assert end.in_words() == "The process that talks to the swarm was killed by signal 11"
    assert end.may_be_followed(1, 10, was_connected=False) and not end.may_be_followed(11, 10, was_connected=True)


def test_a_socket_that_is_removed_as_soon_as_it_is_there_ends_the_process(base):
    """It was looked for once a second, and never missed unless it had been seen: nobody could call the peer, and its
    worker waited for rounds for ever."""
    environment = {**os.environ, "TMPDIR": str(base), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", LOSES_ITS_SOCKET], stdout=subprocess.PIPE, text=True, env=environment, timeout=240
    )
    assert done.stdout == "lost\n" and done.returncode == 1
