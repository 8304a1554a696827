"""Files that are there whole or not at all: a kill, a full disk, writers beside each other, and damage."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from volunteer_kit import storage
from volunteer_kit.storage import DamagedFile, part_folder, put_in_place, read_json, set_aside, write_once, write_whole
from volunteer_kit.storage import whole as whole_module


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "list.json"
    write_whole(path, "[1]")
    write_whole(path, b"[2]", mode=0o600)
    assert read_json(path) == [2] and names(tmp_path) == ["list.json"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_there_stays(tmp_path):
    assert write_once(tmp_path / "key", b"first") and not write_once(tmp_path / "key", b"second")
    assert (tmp_path / "key").read_bytes() == b"first" and names(tmp_path) == ["key"]


def test_without_hard_links_what_is_there_stays_too(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    test_what_is_there_stays(tmp_path)


def test_of_writers_that_begin_together_one_writes(tmp_path):
    start, wrote = threading.Barrier(8), []

    def write(number: int) -> None:
        start.wait()
        if write_once(tmp_path / "key", str(number)):
            wrote.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrote) == 1 and (tmp_path / "key").read_text() == str(wrote[0]) and names(tmp_path) == ["key"]


def test_a_full_disk_changes_nothing(tiny_disk):
    write_whole(tiny_disk / "list", b"good")
    with pytest.raises(OSError):
        write_whole(tiny_disk / "list", bytes(4_000_000))
    with pytest.raises(OSError):
        write_once(tiny_disk / "other", bytes(4_000_000))
    assert (tiny_disk / "list").read_bytes() == b"good" and names(tiny_disk) == ["list"]


WRITER = """
import sys, time
from volunteer_kit.storage import part_folder
with part_folder(sys.argv[1]) as part:
    (part / "half").write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path):
    """A process that writes a folder `model`, and does not finish."""
    command = [sys.executable, "-c", WRITER, tmp_path / "model"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.getcwd()}) as process:
        assert process.stdout.readline() == b"writing\n"
        yield process
        process.kill()


@pytest.mark.parametrize("locks", [True, False], ids=["locks", "no locks"])
def test_what_a_killed_writer_left_goes_and_a_living_ones_stays(tmp_path, writer, monkeypatch, locks):
    if not locks:  # Lustre, some NFS and FUSE mounts

        def flock(*_):
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", flock)
    [part] = names(tmp_path)
    write_whole(tmp_path / "model", b"x")
    assert set(names(tmp_path)) == {part, "model"}
    writer.kill()
    writer.wait()
    if not locks:
        write_whole(tmp_path / "model", b"x")
        assert set(names(tmp_path)) == {part, "model"}, "a writer may be alive on another machine"
        long_ago = time.time() - 2 * whole_module.LEFT_FOR
        for path in (tmp_path / part / "half", tmp_path / part):
            os.utime(path, (long_ago, long_ago))
    write_whole(tmp_path / "model", b"x")
    assert names(tmp_path) == ["model"]


def test_what_is_named_after_a_dead_process_goes(tmp_path):
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    for name in (".list.json.{}.part", ".list.{}.part", ".list.json.{}.tmp", ".list.json.{}"):
        (tmp_path / name.format(dead.pid)).write_text("half")
    alive = f".list.json.{os.getppid()}.part"
    foreign = [".other.json.1.part", "list.json.1", ".list.json.part", ".list.json.0123.txt"]
    for name in (alive, *foreign):
        (tmp_path / name).write_text("half")
    write_whole(tmp_path / "list.json", "[]")
    assert set(names(tmp_path)) == {"list.json", alive, *foreign}
    os.utime(tmp_path / alive, (0, 0))
    write_whole(tmp_path / "list.json", "[]")
    assert set(names(tmp_path)) == {"list.json", *foreign}, "the process id is another process's now"


def test_a_file_of_a_library_is_put_in_place(tmp_path):
    with part_folder(tmp_path / "model") as part:
        (part / "weights").write_bytes(b"new")
        put_in_place(part / "weights", tmp_path / "model")
    with pytest.raises(RuntimeError), part_folder(tmp_path / "model") as part:
        (part / "weights").write_bytes(b"half")
        raise RuntimeError
    assert names(tmp_path) == ["model"] and (tmp_path / "model").read_bytes() == b"new"


# --- damage ---


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 100, b"[1", b'{"a": NaN}', b'{"a": 1e999}', b"[-Infinity]", b"\xff\xfe", b"[" * 100_000, b"9" * 5000,
     b"[0]" + b" " * storage.damaged.LARGEST],
)  # fmt: skip
def test_what_no_writer_of_ours_wrote_is_damaged(tmp_path, content):
    (tmp_path / "list.json").write_bytes(content)
    with pytest.raises(DamagedFile, match=r"list\.json is damaged") as found:
        read_json(tmp_path / "list.json")
    assert found.value.path == tmp_path / "list.json" and len(found.value.reason) < 300


def test_a_missing_file_is_not_damaged_and_a_folder_is(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "list.json")
    (tmp_path / "list.json").mkdir()
    with pytest.raises(DamagedFile):
        read_json(tmp_path / "list.json")


def test_what_is_damaged_is_kept_aside_each_time(tmp_path):
    path = tmp_path / "list.json"
    for number in range(3):
        path.write_text(str(number))
        (tmp_path / "list.json-wal").write_text(f"wal {number}")
        aside = set_aside(path, beside=("-wal", "-shm"))
        assert aside.read_text() == str(number)
        assert Path(f"{aside}-wal").read_text() == f"wal {number}"
    assert not path.exists() and len(names(tmp_path)) == 6
    path.mkdir()
    assert set_aside(path).is_dir()
