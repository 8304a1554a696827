"""The journal: one process writes, others read; whole after kill -9 and a full disk, small after months."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from volunteer_kit.journal import Journal, JournalError, JournalReader
from volunteer_kit.journal.writer import EVENTS_OF_A_KIND, THIN_EVERY

DAY = 86_400.0
NOW = 1_790_000_000.0


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "monitor" / "journal.sqlite") as journal:
        yield journal


def add(journal: Journal, time: float = NOW, **given) -> None:
    row = dict(epoch=3, loss=4.5, samples_per_second=12.5, volunteers=2, progress=0.5, samples_total=768) | given
    journal.add_metrics(time, **row)


def fill(journal: Journal, times) -> None:
    """Many rows in one transaction."""
    with journal._writing() as db:
        db.executemany("INSERT INTO metrics VALUES (?, 1, 4.0, 10.0, 2, 0.5, 100)", [(time,) for time in times])


def in_another_process(code: str, path: Path) -> str:
    program = f"import sys\nfrom volunteer_kit.journal import *\npath = sys.argv[1]\n{code}"
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_process_reads_what_was_written_while_the_writer_goes_on(journal):
    add(journal)
    assert in_another_process("print(JournalReader(path).latest()['samples_total'])", journal.path) == "768"
    with JournalReader(journal.path) as reader:
        before = reader.version()
        assert reader.version() == before
        add(journal, NOW + 5, samples_total=1024)
        assert reader.version() != before
        assert reader.latest()["samples_total"] == 1024


def test_a_reader_cannot_write(journal):
    with JournalReader(journal.path) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._db.execute("DELETE FROM events")


def test_what_is_read_in_a_snapshot_belongs_together(journal):
    add(journal)
    with JournalReader(journal.path) as reader:
        with reader.snapshot():
            first = reader.latest()
            add(journal, NOW + 5)
            assert reader.latest() == first
        assert reader.latest()["time"] == NOW + 5


def test_two_writers_share_one_file(journal):
    with Journal(journal.path) as other:
        for number in range(20):
            (journal if number % 2 else other).add_event(NOW + number, "checkpoint", epoch=number)
        assert [event["detail"]["epoch"] for event in other.events(5)] == [19, 18, 17, 16, 15]


def test_everything_is_there_again_after_a_new_start(tmp_path):
    path, picture = tmp_path / "journal.sqlite", tmp_path / "pictures" / "a.png"
    with Journal(path) as journal:
        add(journal)
        journal.add_event(NOW, "banned", username="mallory", reason="noise")
        journal.add_picture(NOW, 7, "a red circle", picture)
        journal.set_members([{"username": "ada", "peer_id": "Qm1", "device": "T4", "here": True}])
        journal.set_leaderboard([{"username": "Ada", "samples": 5}, {"username": "bob", "samples": 9}])
        journal.hide("ada", True)
    with Journal(path) as journal:
        assert journal.latest()["loss"] == 4.5 and journal.began() == NOW
        (event,) = journal.events(9)
        assert event["kind"] == "banned" and event["detail"] == {"username": "mallory", "reason": "noise"}
        assert journal.pictures()[0]["path"] == "pictures/a.png"
        assert journal.members()[0]["here"] is True
        assert [account["username"] for account in journal.leaderboard()] == ["bob", "Ada"]
        assert journal.hidden() == {"ada"}
        journal.hide("ADA", False)
        assert not journal.hidden()


def test_strangers_text_is_short_and_in_one_line_and_their_numbers_are_finite(journal):
    add(journal, loss=float("nan"), samples_per_second=float("inf"), volunteers=-3, progress=7.0, samples_total=10**30)
    row = journal.latest()
    assert row["loss"] is None and row["samples_per_second"] == 0 and row["volunteers"] == 0
    assert row["progress"] == 1.0 and row["samples_total"] == 2**53
    journal.add_event(NOW, "refused", username="a\x1b[31m\u202eb\n" * 100, reason="r" * 9999, speed=float("nan"))
    detail = journal.events(1)[0]["detail"]
    assert detail["username"].startswith("a[31mb a[31mb") and len(detail["username"]) == 96
    assert len(detail["reason"]) == 300 and detail["speed"] == "nan"
    journal.set_members([{"username": "x" * 999, "peer_id": "p" * 999, "device": "d" * 999, "samples_per_second": "?"}])
    (member,) = journal.members()
    assert [len(member[name]) for name in ("username", "peer_id", "device")] == [96, 96, 80]
    assert member["samples_per_second"] == 0 and member["here"] is False


def test_the_writers_own_mistakes_are_told(journal, tmp_path):
    with pytest.raises(ValueError, match="no kind of event"):
        journal.add_event(NOW, "exploded")
    with pytest.raises(ValueError, match="no time"):
        add(journal, float("nan"))
    with pytest.raises(ValueError):
        journal.add_picture(NOW, 1, "outside", tmp_path.parent / "elsewhere.png")


def test_old_metrics_are_thinned_and_the_last_day_is_kept(journal):
    fill(journal, [NOW - 100 * DAY + 60 * number for number in range(100 * 1440)])
    add(journal)
    times = [row["time"] for row in journal.metrics(10**6)]
    last_day = [time for time in times if time >= NOW - DAY]
    month = [time for time in times if NOW - 30 * DAY <= time < NOW - DAY]
    older = [time for time in times if time < NOW - 30 * DAY]
    assert len(last_day) == 1441
    assert len(month) == pytest.approx(29 * 144, abs=2)
    assert len(older) == pytest.approx(70 * 12, abs=2)


def test_thinning_happens_again_and_again(journal):
    add(journal, NOW)
    fill(journal, [NOW - 3 * DAY + number for number in range(1000)])
    for number in range(THIN_EVERY):
        add(journal, NOW + number + 1)
    assert len([row for row in journal.metrics(10**6) if row["time"] < NOW - DAY]) <= 3


def test_metrics_of_months_come_as_few_points_dense_at_the_end(journal):
    fill(journal, [NOW - 20 * DAY + 60 * number for number in range(20 * 1440)])
    add(journal, NOW, loss=1.25)
    points = journal.metrics(500)
    times = [row["time"] for row in points]
    assert len(points) <= 500 and times == sorted(times)
    assert times[-1] == NOW and points[-1]["loss"] == 1.25
    assert times[0] < NOW - 19.5 * DAY
    assert len([time for time in times if time > NOW - 3600]) == 60
    assert len([time for time in times if NOW - DAY < time <= NOW - 3600]) > 150


def test_a_clock_that_was_wrong_is_forgotten(journal):
    add(journal, NOW + 400 * DAY)
    add(journal, NOW)
    assert journal.latest()["time"] == NOW


def test_many_joins_do_not_push_a_ban_out(journal):
    journal.add_event(NOW, "banned", username="mallory")
    with journal._writing() as db:
        db.executemany(
            "INSERT INTO events (time, kind, text, detail) VALUES (?, 'joined', '', '{}')",
            [(NOW + number,) for number in range(3 * EVENTS_OF_A_KIND)],
        )
    journal.add_event(NOW, "joined", username="ada")
    assert journal.events(5, kinds=("banned",))[0]["detail"]["username"] == "mallory"
    assert len(journal.events(10**6)) == EVENTS_OF_A_KIND + 1
    assert journal.counts() == {"banned": 1, "joined": 1}


def test_the_same_leaderboard_again_writes_nothing(journal):
    accounts = [{"username": f"v{number}", "samples": number} for number in range(50)]
    journal.set_leaderboard(accounts)
    with JournalReader(journal.path) as reader:
        before = reader.version()
        journal.set_leaderboard(accounts)
        assert reader.version() == before
        journal.set_leaderboard(accounts[:10])
        assert reader.version() != before and len(reader.leaderboard()) == 10
        journal.set_leaderboard([])
        assert reader.leaderboard() == []


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    path = tmp_path / "journal.sqlite"
    code = (
        "import itertools, sys\nfrom volunteer_kit.journal import Journal\n"
        "journal = Journal(sys.argv[1])\n"
        "for number in itertools.count(1):\n"
        "    journal.add_metrics(1e9 + number, number, 1.0, 1.0, 1, 0.5, number)\n"
        "    print(number, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    try:
        for line in writer.stdout:
            if int(line) >= 200:
                break
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
    finally:
        writer.kill()
        writer.wait()
    acknowledged = int(rest[-1]) if rest else 200
    with Journal(path) as journal:
        assert journal.latest()["epoch"] >= acknowledged
        assert journal._one("PRAGMA integrity_check") == "ok"
        add(journal, 2e9)


def test_a_full_disk_is_told_and_survived(tiny_disk):
    with Journal(tiny_disk / "journal.sqlite") as journal:
        add(journal, NOW)
        ballast = tiny_disk / "ballast"
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError):
            while True:
                file.write(bytes(4096))
        with pytest.raises(JournalError, match="disk does not take") as told:
            for number in range(1000):
                journal.add_event(NOW, "warning", "x" * 400, number=number)
        assert "1. Make room" in str(told.value)
        written = len(journal.events(2000))
        ballast.unlink()
        journal.add_event(NOW, "checkpoint", epoch=1)
        assert len(journal.events(2000)) == written + 1 and journal.latest()["time"] == NOW
        assert journal._one("PRAGMA integrity_check") == "ok"


def test_a_newer_format_is_told_and_left_alone(journal):
    journal._db.execute("PRAGMA user_version = 99")
    for kind in (Journal, JournalReader):
        with pytest.raises(JournalError, match="newer volunteer-kit .format 99"):
            kind(journal.path)


def test_a_damaged_file_is_told_with_the_way_out(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"no database at all, but long enough to be looked at as one" * 100)
    for kind in (Journal, JournalReader):
        with pytest.raises(JournalError, match="damaged") as told:
            kind(path)
        assert f"mv {path} {path}.damaged" in str(told.value)


def test_no_file_yet_is_no_error_of_the_journals(tmp_path):
    with pytest.raises(FileNotFoundError):
        JournalReader(tmp_path / "journal.sqlite")
    (tmp_path / "journal.sqlite").touch()  # as it is between being made and getting its tables
    with pytest.raises(FileNotFoundError):
        JournalReader(tmp_path / "journal.sqlite")


def test_a_file_that_was_replaced_is_noticed(journal):
    with JournalReader(journal.path) as reader:
        journal.path.rename(journal.path.with_suffix(".old"))
        with pytest.raises(JournalError, match="another file"):
            reader.version()


def test_a_forked_process_may_not_use_it(journal):
    child = os.fork()
    if not child:
        code = 1
        try:
            add(journal)
        except JournalError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert journal.latest() is None
