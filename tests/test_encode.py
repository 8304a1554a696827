"""`volunteer-kit encode`: killed and interrupted it goes on where it was, and one message when it cannot go on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.encoding import faults_of, through, tree
from tests.shard_files import good_shard, record, write_tar
from tests.test_laion import emoji_folder
from volunteer_kit.cli import app
from volunteer_kit.data.code_shards import parse_index
from volunteer_kit.data.errors import DataError
from volunteer_kit.encode import folder as folder_module
from volunteer_kit.encode.door import encode
from volunteer_kit.encode.folder import Summary, locked
from volunteer_kit.encode.pool import Done, Moved, Unreadable
from volunteer_kit.encode.progress import EncodeProgress
from volunteer_kit.encode.settings import BATCH

CLI = [sys.executable, "-m", "volunteer_kit.cli", "encode"]
needs_emoji = pytest.mark.skipif(
    emoji_folder() is None, reason="no emoji shards: set VOLUNTEER_KIT_EMOJI to their folder"
)


def command(*arguments: object, **options: object) -> subprocess.Popen:
    environment = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*CLI, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env=environment, **options,
    )  # fmt: skip


@contextlib.contextmanager
def running(*arguments: object, **options: object) -> Iterator[subprocess.Popen]:
    """A command in a process group of its own, of which nothing stays behind."""
    process = command(*arguments, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(*arguments: object) -> str:
    """Run a command to its good end; what it said."""
    with running(*arguments) as process:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        return output


def batches(out: Path) -> int:
    """Lines that journals have; of a finished shard of the emoji, those that its had."""
    lines = 0
    for path in out.glob(".*.journal") if out.exists() else ():
        with contextlib.suppress(FileNotFoundError):
            lines += path.read_bytes().count(b"\n")
    done = len(list(out.glob("*.index.json"))) if out.exists() else 0
    return lines + (1 + -(-229 // BATCH)) * done


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen, timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.slow
@needs_emoji
def test_emoji_killed_five_times_at_random_is_byte_equal_to_undisturbed(tmp_path):
    shards = str(emoji_folder() / "{00000..00003}.tar")
    said: list[str] = []
    assert encode(shards, tmp_path / "undisturbed", run="emoji", workers=1, say=said.append) == (4, 4, False)
    assert said[0].startswith("[1/4] 00000.tar: 223 records, 6 left out (aspect 1") and "kind: codes" in said[-1]
    dice, out, seen = random.Random(os.getpid()), tmp_path / "out", 0
    for kill in range(5):
        with running(shards, out, "--run", "emoji", "--workers", 1 + kill % 2) as process:
            goal = seen + dice.randint(1, 6)
            wait_until(lambda goal=goal: batches(out) >= goal, process)
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait(120) == -signal.SIGKILL
        assert batches(out) >= seen  # nothing that was journalled is lost
        seen = batches(out)
        for index in out.glob("*.index.json"):
            assert index.with_name(f"{index.name[:5]}.tar").stat().st_size == parse_index(index.read_bytes()).size
    finish(shards, out, "--run", "emoji", "--workers", 2)
    assert tree(out) == tree(tmp_path / "undisturbed")
    report = json.loads((out / "report.json").read_text())
    assert report["records"] == 916 - 24
    known = {"nsfw": 8, "bad_image": 4, "short_caption": 4, "missing_caption": 4, "aspect": 4}
    assert report["counts"] == known
    assert Counter(cause for n in range(4) for _, _, cause in faults_of(out, f"{n:05d}")) == known


def test_ctrl_c_stops_in_good_order(tmp_path):
    good_shard(tmp_path / "00000.tar", 4000)
    with running(tmp_path / "00000.tar", tmp_path / "out", "--run", "emoji") as process:
        wait_until(lambda: batches(tmp_path / "out") > 1, process)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 130, errors
        assert "Stopped: 0 of 1 shards" in output and "run the same command again" in output
        assert "Traceback" not in errors
        assert family and not psutil.wait_procs(family, timeout=60)[1]


def test_workers_die_with_their_parent_and_a_worker_that_dies_is_told(tmp_path, monkeypatch):
    good_shard(tmp_path / "00000.tar", 4000)
    arguments = (tmp_path / "00000.tar", tmp_path / "out", "--run", "emoji")
    with running(*arguments) as process:
        wait_until(lambda: batches(tmp_path / "out") > 1, process)
        family = psutil.Process(process.pid).children(recursive=True)
        worker = max(family, key=lambda each: each.memory_info().rss)
        worker.suspend()
        process.kill()
        process.wait()
        monkeypatch.setattr(folder_module, "ORPHANS", 0.1)
        with pytest.raises(DataError, match="at work"), locked(tmp_path / "out"):
            pass  # as long as the worker may still write, nobody else does
        worker.resume()
        assert not psutil.wait_procs(family, timeout=60)[1]
    with running(*arguments) as process:  # at once: what the killed one left does not stand in the way
        done = batches(tmp_path / "out")
        wait_until(lambda: batches(tmp_path / "out") > done, process)
        worker = max(psutil.Process(process.pid).children(), key=lambda each: each.memory_info().rss)
        worker.kill()
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 2 and "was killed by signal 9" in errors and "--workers" in errors
        assert "Traceback" not in errors


def test_a_full_disk_is_told_and_room_is_all_it_takes(tmp_path, tiny_disk):
    shard = good_shard(tmp_path / "00000.tar", 1800)
    with running(shard, tiny_disk / "out", "--run", "emoji") as process:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 2 and "full" in errors and "goes on where it stopped" in errors
        assert "Traceback" not in errors
    assert batches(tiny_disk / "out") > 2
    subprocess.run(["mount", "-o", "remount,size=30m", tiny_disk], check=True)
    through([shard], tiny_disk / "out")
    through([shard], tmp_path / "undisturbed")
    assert tree(tiny_disk / "out") == tree(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{tmp}/in", "{tmp}/out", "--run", "dmo"], ["There is no run 'dmo'", "'demo'"]),
        (["{tmp}/in", "{tmp}/out", "--run", "demo"], ["makes its own data", "--run emoji"]),
        (["{tmp}/nothing-*.tar", "{tmp}/out", "--run", "emoji"], ["No shard matches", "1."]),
        (["{tmp}/in", "{tmp}/in/00000.tar", "--run", "emoji"], ["is a file, not a folder"]),
        (["{tmp}/in", "{tmp}/in", "--run", "emoji"], ["written over itself"]),
        (["ftp://bucket/x.tar", "{tmp}/out", "--run", "emoji"], ["not from ftp"]),
        (["{tmp}/in", "{tmp}/out", "--run", "emoji", "--workers", "0"], ["--workers"]),
        (["{tmp}/in", "{tmp}/out"], ["--run"]),
        (["{tmp}/in", "--run", "emoji"], ["out"]),
        (["{tmp}/in", "{tmp}/out", "--run", "dalle-laion"], ["not on this machine", "volunteer-kit convert"]),
    ],
    ids=lambda value: " ".join(value)[:60],
)
def test_bad_input_is_one_message_and_exit_code_2(tmp_path, monkeypatch, arguments, words):
    monkeypatch.setenv("VOLUNTEER_KIT_HOME", str(tmp_path))
    (tmp_path / "in").mkdir()
    good_shard(tmp_path / "in" / "00000.tar", 2)
    before = tree(tmp_path / "in")
    done = CliRunner().invoke(app, ["encode", *(a.format(tmp=tmp_path) for a in arguments)], catch_exceptions=False)
    assert done.exit_code == 2
    for word in words:
        assert word in done.stderr
    assert tree(tmp_path / "in") == before


def test_a_missing_shard_is_told_at_the_end_and_made_by_the_next_command(tmp_path):
    records = [*(record(f"{n}.5", f"picture {n}") for n in range(3)), record("3.5", "no"), {"4.cls": b"7"}]
    write_tar(tmp_path / "00000.tar", *records)
    arguments = ["encode", f"{tmp_path}/{{00000..00001}}.tar", f"{tmp_path}/out", "--run", "emoji", "--workers", "1"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 2 and "1 of 2 shards cannot be read now; 1 are finished" in done.stderr
    assert "00001.tar (missing_shard): no such file" in done.stderr
    assert "[1/2] 00000.tar: 3 records, 1 left out" in done.stdout
    shutil.copy(tmp_path / "00000.tar", tmp_path / "00001.tar")
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "[2/2] 00001.tar: 3 records" in done.stdout
    told = "6 records, 2 left out (short_caption 2), 2 files passed over (other_member 2); "
    assert f"2 shards are finished in {tmp_path}/out: {told}" in done.stdout


def test_on_a_terminal_there_is_one_bar_and_no_lines():
    screen, said = io.StringIO(), []
    console = Console(file=screen, force_terminal=True, width=120)
    with EncodeProgress(3, said.append, console) as progress:
        progress.follow(Moved("a.tar", 0, 0))
        progress.follow(Moved("a.tar", 90, 10))
        progress.follow(Done("a.tar", Summary("a", 180, {"nsfw": 20}, None)))
        progress.follow(Unreadable("b.tar", "missing_shard", "no such file"))
        progress.follow(Moved("c.tar", 50, 0))
        progress.follow(Done("c.tar", Summary("c", 0, {"missing_caption": 50}, None)))
    assert not said
    warning = "WARNING: nothing of this shard can be used. c.tar: 0 records, 50 left out (missing_caption 50)"
    for words in ("2/3", "250 records", "records/s", "left", warning):
        assert words in screen.getvalue()
    assert progress.finished == 2 and [each.shard for each in progress.unreadable] == ["b.tar"]
