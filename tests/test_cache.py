"""The cache of samples: capped, last used stays, and whatever happens to its file costs no more than the cache."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from volunteer_kit.data.cache import SampleCache

KB, MB = 1000, 1_000_000


def value(number: int, size: int = 20 * KB) -> bytes:
    return f"{number}:".encode() + bytes([number % 251]) * size


def is_mine(found: bytes | None, number: int) -> bool:
    return found is not None and found == value(number, len(found) - len(f"{number}:"))


class Told(list):
    """What the cache said."""

    def __call__(self, text: str) -> None:
        self.append(text)


def size_of(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:  # a journal that came and went
            continue
    return total


@pytest.fixture(params=["file", "memory"])
def path(request, tmp_path):
    return tmp_path / "deep" / "samples" if request.param == "file" else None


def test_what_was_put_is_found(path):
    cache = SampleCache(path, MB)
    odd = {"a": b"", "b": bytes(100 * KB), "ü/\udcff": b"\x00\xff", "k" * 10_000: b"1"}
    for key, data in odd.items():
        cache.put(key, data)
    cache.put("a", b"the first stays")
    assert {key: cache.get(key) for key in odd} == odd and cache.get("nothing") is None
    cache.close()
    assert cache.get("b") is None
    cache.put("c", b"after the end")
    cache.close()
    if path:
        again = SampleCache(path, MB)
        assert {key: again.get(key) for key in odd} == odd and again.get("c") is None
        again.close()


def test_what_was_not_used_for_longest_goes_first(path):
    cache = SampleCache(path, MB)
    for number in range(200):
        cache.put(str(number), value(number))
        assert is_mine(cache.get("0"), 0)
    there = [number for number in range(200) if cache.get(str(number)) is not None]
    assert there == [0, *range(there[1], 200)]
    assert 25 <= len(there) <= 40  # of 20 kB in 1 MB
    cache.close()


def test_a_value_that_would_push_out_all_others_is_not_kept(path):
    cache = SampleCache(path, MB)
    cache.put("small", b"small")
    cache.put("large", bytes(MB // 2))
    assert cache.get("small") == b"small" and cache.get("large") is None
    cache.close()


@pytest.mark.parametrize("room", [0, 10, 64 * 1024, 100 * KB])
def test_hardly_any_room(room, tmp_path):
    cache = SampleCache(tmp_path / "samples", room, told := Told())
    for number in range(50):
        cache.put(str(number), value(number, 5 * KB))
        assert size_of(tmp_path) <= room
        found = cache.get(str(number))
        assert found is None or is_mine(found, number)
    cache.close()
    assert not told


@pytest.mark.parametrize("sizes", [(100,), (60 * KB,), (10, 30 * KB, 3 * KB, 120 * KB)])
def test_the_file_and_its_journal_never_outgrow_the_room(sizes, tmp_path):
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            most[0] = max(most[0], size_of(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    cache = SampleCache(tmp_path / "samples", MB, told := Told())
    try:
        for number in range(400):
            cache.put(str(number), value(number, sizes[number % len(sizes)]))
            cache.get(str(number // 2))
    finally:
        done.set()
        watcher.join()
        cache.close()
    assert max(most[0], size_of(tmp_path)) <= MB and not told


def test_a_file_that_was_made_for_more_room_shrinks(tmp_path):
    cache = SampleCache(tmp_path / "samples", 4 * MB)
    for number in range(140):
        cache.put(str(number), value(number))
    cache.close()
    assert size_of(tmp_path) > 2 * MB
    cache = SampleCache(tmp_path / "samples", MB, told := Told())
    assert size_of(tmp_path) <= MB and not told
    assert is_mine(cache.get("139"), 139) and cache.get("0") is None
    cache.put("new", b"new")
    assert cache.get("new") == b"new"
    cache.close()


# what happens to files


def test_a_full_disk_is_told_once_and_what_is_there_stays(tiny_disk):
    cache = SampleCache(tiny_disk / "samples", 100 * MB, told := Told())
    for number in range(300):
        cache.put(str(number), value(number))
    assert len(told) == 1 and "disk is full" in told[0] and str(tiny_disk) in told[0]
    there = [number for number in range(300) if cache.get(str(number)) is not None]
    assert len(there) > 50 and there == list(range(len(there)))
    assert all(is_mine(cache.get(str(number)), number) for number in there)
    cache.close()
    assert len(told) == 1
    again = SampleCache(tiny_disk / "samples", 100 * MB, told := Told())
    assert is_mine(again.get("0"), 0)
    again.close()


def test_a_disk_that_is_full_from_the_start(tiny_disk):
    with open(tiny_disk / "others", "wb") as file, pytest.raises(OSError):
        while True:
            file.write(bytes(64 * 1024))
            file.flush()
    cache = SampleCache(tiny_disk / "samples", 100 * MB, told := Told())
    cache.put("a", b"a")
    assert cache.get("a") is None
    cache.close()
    assert len(told) == 1


def test_a_read_only_disk(tiny_disk):
    cache = SampleCache(tiny_disk / "samples", MB)
    cache.put("a", b"a")
    cache.close()
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    for name in ("samples", "other"):
        cache = SampleCache(tiny_disk / name, MB, told := Told())
        cache.put("b", b"b")
        cache.put("c", b"c")
        assert cache.get("a") in (None, b"a") and cache.get("b") is None
        cache.close()
        assert len(told) == 1, name


@pytest.mark.parametrize("place", ["a file/samples", "a folder"])
def test_a_place_where_no_file_can_be(place, tmp_path):
    (tmp_path / "a file").write_text("mine")
    (tmp_path / "a folder").mkdir()
    cache = SampleCache(tmp_path / place, MB, told := Told())
    cache.put("a", b"a")
    assert cache.get("a") is None
    cache.close()
    assert len(told) == 1 and (tmp_path / "a file").read_text() == "mine"


def damages():
    def cut(data: bytes) -> bytes:
        return data[: len(data) // 2 + 100]

    def zeroed(data: bytes) -> bytes:
        return data[:100] + bytes(8 * 4096) + data[100 + 8 * 4096 :]

    return {"empty": lambda data: b"", "text": lambda data: b"not a cache\n" * 1000, "cut": cut, "zeroed": zeroed}


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_file_is_begun_anew(damage, tmp_path):
    path = tmp_path / "samples"
    cache = SampleCache(path, MB)
    for number in range(20):
        cache.put(str(number), value(number))
    cache.close()
    path.write_bytes(damages()[damage](path.read_bytes()))
    cache = SampleCache(path, MB, told := Told())
    for number in range(20):
        found = cache.get(str(number))
        assert found is None or is_mine(found, number)
        cache.put(str(number), value(number))
    for number in range(20):  # whatever was found damaged on the way is whole by now
        cache.put(str(number), value(number))
        assert is_mine(cache.get(str(number)), number)
    cache.close()
    assert not told


def test_a_changed_value_is_not_given_out(tmp_path):
    path = tmp_path / "samples"
    cache = SampleCache(path, MB)
    cache.put("a", b"A" * 3000)
    cache.close()
    data = path.read_bytes()
    path.write_bytes(data.replace(b"A" * 3000, b"A" * 2000 + b"B" + b"A" * 999))
    cache = SampleCache(path, MB)
    assert cache.get("a") is None
    cache.put("a", b"A" * 3000)
    assert cache.get("a") == b"A" * 3000
    cache.close()


def test_a_newer_kits_cache_is_left_alone(tmp_path):
    path = tmp_path / "samples"
    cache = SampleCache(path, MB)
    cache.put("a", b"a")
    cache.close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 2")
    db.close()
    before = path.read_bytes()
    cache = SampleCache(path, MB, told := Told())
    cache.put("b", b"b")
    cache.close()
    assert path.read_bytes() == before and len(told) == 1 and "newer version" in told[0]


def test_another_programs_file_is_left_alone(tmp_path):
    path = tmp_path / "samples"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE precious (x)")
    other.commit()
    other.close()
    before = path.read_bytes()
    cache = SampleCache(path, MB, told := Told())
    cache.put("a", b"a")
    cache.close()
    assert path.read_bytes() == before and len(told) == 1 and "another program" in told[0]


def test_a_damaged_file_that_somebody_else_replaced_is_not_deleted(tmp_path):
    path = tmp_path / "samples"
    ours = SampleCache(path, MB)
    ours.put("a", bytes(50 * KB))
    with open(path, "r+b") as file:
        file.write(b"damaged " * 10_000)
    path.unlink()
    theirs = SampleCache(path, MB)
    theirs.put("b", b"theirs")
    ours.get("a")
    ours.put("c", b"ours")
    assert theirs.get("b") == b"theirs" and ours.get("b") == b"theirs"
    theirs.close()
    ours.close()


# others


WRITER = """
import sys
from pathlib import Path
from volunteer_kit.data.cache import SampleCache
first, last = int(sys.argv[2]), int(sys.argv[3])
cache = SampleCache(Path(sys.argv[1]), 1_000_000)
print("ready", flush=True)
sys.stdin.readline()
number = first
while number < last:
    cache.put(str(number), f"{number}:".encode() + bytes([number % 251]) * 20_000)
    number += 1
    if number == first + 20:
        print("twenty", flush=True)
cache.close()
"""


def writer(path: Path, first: int, last: int) -> subprocess.Popen:
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(last)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


def test_processes_share_a_file(tmp_path):
    path = tmp_path / "samples"
    children = [writer(path, first, first + 300) for first in (0, 1000)]
    for child in children:
        child.communicate("go\n", timeout=240)
        assert child.returncode == 0
    assert size_of(tmp_path) <= MB
    cache = SampleCache(path, MB, told := Told())
    there = [n for n in (*range(300), *range(1000, 1300)) if (found := cache.get(str(n))) and is_mine(found, n)]
    assert len(there) > 20 and not told
    cache.close()


def test_a_process_killed_while_it_writes_leaves_a_good_file(tmp_path):
    path = tmp_path / "samples"
    for round_ in range(5):
        child = writer(path, 0, 5000)
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "twenty\n"
        child.send_signal(signal.SIGKILL)
        child.communicate()
        cache = SampleCache(path, MB, told := Told())
        there = [(n, found) for n in range(5000) if (found := cache.get(str(n))) is not None]
        assert len(there) > 10 and all(is_mine(found, n) for n, found in there), round_
        cache.close()
        assert not told and sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_threads_share_a_cache(tmp_path):
    cache = SampleCache(tmp_path / "samples", MB, told := Told())
    wrong: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 60):
            cache.put(str(number), value(number, 3 * KB))
            if not is_mine(cache.get(str(number)), number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 60, 120)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.close()
    assert not wrong and not told


@pytest.mark.parametrize("lock", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE", "BEGIN; SELECT * FROM samples"])
def test_a_file_that_another_process_keeps_locked_costs_nothing_but_its_values(lock, tmp_path):
    cache = SampleCache(tmp_path / "samples", MB, told := Told())
    cache.put("a", b"a")
    other = sqlite3.connect(tmp_path / "samples", isolation_level=None)
    for statement in lock.split("; "):
        other.execute(statement).fetchall()
    assert (cache.get("a") is None) == ("EXCLUSIVE" in lock)
    cache.put("b", b"b")
    other.execute("ROLLBACK")
    other.close()
    assert cache.get("a") == b"a" and cache.get("b") is None
    cache.put("c", b"c")
    assert cache.get("c") == b"c" and not told
    cache.close()
