"""`volunteer-kit encode`: equal bytes however often it is killed, every fault in the report, one message when it
cannot go on."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
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

import numpy as np
import psutil
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from tests.shard_files import good_shard, picture, record, serve, write_tar
from tests.test_laion import emoji_folder
from volunteer_kit.cli import app
from volunteer_kit.data.code_shards import checksum, parse_index
from volunteer_kit.data.codes import CodeSource
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.laion import LaionSource
from volunteer_kit.data.settings import Columns, Filters
from volunteer_kit.data.source import LeftOut, Limits, ShardError
from volunteer_kit.encode import folder as folder_module
from volunteer_kit.encode.door import encode
from volunteer_kit.encode.folder import Summary, Target, locked, refuse_other_settings, targets, write_report
from volunteer_kit.encode.part import Part
from volunteer_kit.encode.pool import Done, Moved, Plan, Unreadable, _in_words, encode_shards
from volunteer_kit.encode.progress import EncodeProgress
from volunteer_kit.encode.settings import BATCH, Settings
from volunteer_kit.encode.shard import encode_shard
from volunteer_kit.model.image_tokenizer import load_image_tokenizer
from volunteer_kit.run_tokenizers import image_identity

CLI = [sys.executable, "-m", "volunteer_kit.cli", "encode"]
FAST = Limits(timeout=0.5, retries=1)
TOY = Settings("toy", "0" * 32, 16, 4, 256, Filters(), Columns(), FAST)
EMOJI = Settings("emoji64", image_identity("emoji64"), 64, 64, 512, Filters(), Columns(), FAST)
needs_emoji = pytest.mark.skipif(
    emoji_folder() is None, reason="no emoji shards: set VOLUNTEER_KIT_EMOJI to their folder"
)


def toy_codes(images: torch.Tensor) -> torch.Tensor:
    """A tokenizer of four codes: the red of each corner."""
    red = (images[:, 0] * 255).round().long()  # (B, S, S)
    return torch.stack([red[:, 0, 0], red[:, 0, -1], red[:, -1, 0], red[:, -1, -1]], dim=1)  # (B, 4)


def make(shard: object, out: Path, settings: Settings = TOY, **options: object) -> Summary:
    out.mkdir(exist_ok=True)
    return encode_shard(str(shard), Target.of(str(shard), out), settings, toy_codes, **options)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def faults_of(folder: Path, name: str = "00000") -> list[tuple[int, str, str]]:
    report = json.loads((folder / f"{name}.report.json").read_text())
    return [(fault["index"], fault["key"], fault["cause"]) for fault in report["faults"]]


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
        output, errors = process.communicate(timeout=120)
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


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)


# one shard


def faulty_shard(path: Path) -> Path:
    """Good and faulty records, more than two batches of them, with duplicates among both."""
    red, green = picture(colour=(200, 0, 0)), picture(colour=(0, 200, 0))
    records = [
        record("000", "first", red),
        record("001", "not safe", green, NSFW="NSFW"),
        record("002", "first again", red),
        record("003", "the picture of one that is left out", green),
        record("004", None),
        record("005", "ab"),
        record("006", "no picture", None),
        record("007", "broken", picture()[:300]),
        record("008", "wide", original_width=999),
        {"009.jpg": picture()},
        {"010.jpg": picture(), "010.txt": b"bad json", "010.json": b"{"},
        *(record(f"{n:03d}", f"picture {n}", picture(colour=(n, n, 0), kind="PNG")) for n in range(11, 150)),
    ]
    return write_tar(path, *records)


def test_every_faulty_record_is_in_the_report_and_all_others_in_the_shard(tmp_path):
    shard = faulty_shard(tmp_path / "00000.tar")
    summary = make(shard, tmp_path / "out")
    causes = {1: "nsfw", 4: "missing_caption", 5: "short_caption", 6: "missing_image", 7: "bad_image", 8: "aspect"}
    causes |= {9: "missing_json", 10: "bad_json"}
    assert faults_of(tmp_path / "out") == [(n, f"{n:03d}", cause) for n, cause in causes.items()]
    assert summary == ("00000", 142, Counter(causes.values()), None)
    index = parse_index((tmp_path / "out" / "00000.index.json").read_bytes())
    assert index.records == 142 and index.codes_per_record == 4 and index.num_codes == 256
    data = (tmp_path / "out" / "00000.tar").read_bytes()
    spans = zip(index.offsets, index.offsets[1:], strict=False)
    assert [checksum(data[a:b]) for a, b in spans] == index.crc32 and len(data) == index.size


def test_what_comes_out_is_what_the_image_road_reads(tmp_path):
    shard = faulty_shard(tmp_path / "00000.tar")
    for drop_duplicates in (False, True):
        filters = Filters(drop_duplicates=drop_duplicates)
        make(shard, tmp_path / "out", TOY._replace(filters=filters))
        made = str(tmp_path / "out" / "00000.tar")
        images = LaionSource([str(shard)], image_size=16, filters=filters, limits=FAST, counts=Counter())
        codes = CodeSource(
            [made], codes=4, num_codes=256, tokenizer="0" * 32, filters=filters, limits=FAST, counts=Counter()
        )
        expected, found = [], []
        for source, place, records in ((images, str(shard), expected), (codes, made, found)):
            for raw in source.read(place, 0, None, math.inf):
                with contextlib.suppress(LeftOut):
                    records.append(source.use(raw))
        assert [r.caption for r in found] == [r.caption for r in expected]
        assert len(found) == (140 if drop_duplicates else 142)
        for ours, theirs in zip(found, expected, strict=True):
            image = torch.tensor(theirs.image)[None].permute(0, 3, 1, 2).float() / 255
            assert np.array_equal(ours.codes, toy_codes(image)[0].numpy())


def test_codes_outside_the_vocabulary_are_left_out(tmp_path):
    shard = good_shard(tmp_path / "00000.tar", 10)
    summary = make(shard, tmp_path / "out", TOY._replace(num_codes=5))
    assert summary.records == 5 and summary.counts == {"codes_out_of_range": 5}
    assert [index for index, _, _ in faults_of(tmp_path / "out")] == [5, 6, 7, 8, 9]


def test_many_threads_give_the_same_bytes(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    shard = faulty_shard(tmp_path / "00000.tar")
    make(shard, tmp_path / "one")
    with ThreadPoolExecutor(4) as threads:
        make(shard, tmp_path / "four", threads=threads)
    assert tree(tmp_path / "one") == tree(tmp_path / "four")


def test_images_are_encoded_in_the_same_company_after_a_restart(tmp_path):
    """Another company may round otherwise, so an image's codes could depend on where a kill came."""
    shard = good_shard(tmp_path / "00000.tar", 3 * BATCH + 10)

    def sizes(stop_after: int) -> list[int]:
        seen: list[int] = []

        def codes(images: torch.Tensor) -> torch.Tensor:
            if len(seen) == stop_after:
                raise KeyboardInterrupt
            seen.append(len(images))
            return toy_codes(images)

        with contextlib.suppress(KeyboardInterrupt):
            encode_shard(str(shard), Target.of(str(shard), tmp_path), TOY, codes)
        return seen

    tmp_path = tmp_path / "out"
    tmp_path.mkdir()
    assert sizes(1) == [BATCH] and sizes(2) == [BATCH, BATCH] and sizes(9) == [10]


class Killed(BaseException):
    """Stands for a kill."""


def killed_at(enough: int) -> Callable[[int, int], None]:
    """Ends the work once there are so many records."""

    def tell(records: int, left_out: int) -> None:
        if records >= enough:
            raise Killed

    return tell


def test_killed_at_any_moment_between_two_steps_on_the_disk(tmp_path, monkeypatch):
    """Each fsync, rename, removal and line of the journal is once the last thing that happens."""
    shard = faulty_shard(tmp_path / "00000.tar")
    make(shard, tmp_path / "undisturbed")
    left = math.inf

    def counted(step: Callable) -> Callable:
        def wrapper(*args: object, **kwargs: object) -> object:
            nonlocal left
            if left <= 0:
                raise Killed
            left -= 1
            return step(*args, **kwargs)

        return wrapper

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    for name in ("replace", "unlink", "rename"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    monkeypatch.setattr(Part, "commit", counted(Part.commit))
    killed = 0
    for steps in range(100):
        out = tmp_path / f"out{steps}"
        left = steps
        try:
            make(shard, out)
        except Killed:
            killed += 1
            index = out / "00000.index.json"
            assert not index.exists() or (out / "00000.tar").stat().st_size == parse_index(index.read_bytes()).size
            left = 2
            with contextlib.suppress(Killed):  # killed once more, while it goes on
                make(shard, out)
            left = math.inf
            make(shard, out)
        assert tree(out) == tree(tmp_path / "undisturbed"), steps
        if killed == steps:
            break
    assert 10 <= killed < 100


@pytest.mark.parametrize("seed", range(12))
def test_torn_and_damaged_parts_are_made_again(tmp_path, seed):
    """A kill tears the last write; a power cut may leave anything."""
    shard = faulty_shard(tmp_path / "00000.tar")
    make(shard, tmp_path / "undisturbed")
    out = tmp_path / "out"
    with pytest.raises(Killed):
        make(shard, out, tell=killed_at(100))
    dice = random.Random(seed)
    for path in (out / ".00000.tar.part", out / ".00000.journal"):
        data = bytearray(path.read_bytes())
        what = dice.choice(["cut", "bit", "more", "zeros"])
        if what == "cut":
            data = data[: dice.randrange(len(data) + 1)]
        elif what == "bit":
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        elif what == "more":
            data += dice.randbytes(700)
        else:
            at = dice.randrange(len(data))
            data[at:] = bytes(len(data) - at)
        path.write_bytes(data)
    make(shard, out)
    assert tree(out) == tree(tmp_path / "undisturbed")


def test_what_was_made_before_a_stop_is_not_made_again(tmp_path):
    shard = good_shard(tmp_path / "00000.tar", 3 * BATCH)
    told: list[int] = []
    with pytest.raises(Killed):
        make(shard, tmp_path / "out", tell=killed_at(2 * BATCH))
    make(shard, tmp_path / "out", tell=lambda records, left_out: told.append(records))
    assert told == [2 * BATCH, 3 * BATCH]
    told.clear()
    assert make(shard, tmp_path / "out", tell=lambda *_: told.append(0)).records == 3 * BATCH
    assert told == []  # finished: neither read nor encoded


def test_what_comes_before_a_cut_is_kept_and_the_report_says_so(tmp_path):
    shard = good_shard(tmp_path / "00000.tar", 100)
    shard.write_bytes(shard.read_bytes()[:-120_000])
    summary = make(shard, tmp_path / "out")
    assert summary.ended_early == "cut_shard" and summary.counts == {"cut_shard": 1} and 10 < summary.records < 90
    assert make(shard, tmp_path / "out") == summary


@pytest.mark.parametrize("data", [None, b"", b"no tar" * 1000, bytes(10240)], ids=["missing", "empty", "text", "zeros"])
def test_a_shard_of_which_nothing_can_be_read_leaves_no_code_shard(tmp_path, data):
    shard = tmp_path / "00000.tar"
    if data is not None:
        shard.write_bytes(data)
    with pytest.raises(ShardError):
        make(shard, tmp_path / "out")
    assert tree(tmp_path / "out") == {}


def test_the_input_may_be_removed_once_its_code_shard_is_there(tmp_path):
    shard = good_shard(tmp_path / "00000.tar", 10)
    summary = make(shard, tmp_path / "out")
    shard.unlink()
    assert make(shard, tmp_path / "out") == summary
    with pytest.raises(DataError, match="other settings"):
        make(shard, tmp_path / "out", TOY._replace(identity="f" * 32))


def test_a_connection_that_breaks_for_good_leaves_the_shard_to_the_next_attempt(tmp_path):
    """Not the server's last word: what came is neither taken for the whole nor lost."""
    (tmp_path / "in").mkdir()
    shard = good_shard(tmp_path / "in" / "00000.tar", 3 * BATCH)
    make(shard, tmp_path / "undisturbed")
    whole = shard.read_bytes()
    with serve(tmp_path / "in") as server:
        url = f"{server.url}/ok/00000.tar"
        shard.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ShardError):
            make(url, tmp_path / "out")
        assert {".00000.tar.part", ".00000.journal"} == set(tree(tmp_path / "out"))
        shard.write_bytes(whole)
        make(url, tmp_path / "out")
    assert (tmp_path / "out" / "00000.tar").read_bytes() == (tmp_path / "undisturbed" / "00000.tar").read_bytes()


# what is in OUT already


def test_another_input_of_the_same_name_is_told_apart(tmp_path):
    for n, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        good_shard(tmp_path / name / "00000.tar", 70, first=n)
    make(tmp_path / "a" / "00000.tar", tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(DataError, match="another 00000.tar"):
        make(tmp_path / "b" / "00000.tar", tmp_path / "out")
    assert tree(tmp_path / "out") == before
    with pytest.raises(Killed):
        make(tmp_path / "a" / "00000.tar", tmp_path / "part", tell=killed_at(1))
    with pytest.raises(DataError, match="another 00000.tar"):
        make(tmp_path / "b" / "00000.tar", tmp_path / "part")


@pytest.mark.parametrize(
    "other",
    [{"identity": "f" * 32}, {"filters": Filters(min_caption=4)}, {"columns": Columns(nsfw="rating")}, {"codes": 5}],
    ids=str,
)
def test_shards_of_other_settings_are_told_apart(tmp_path, other):
    shard = good_shard(tmp_path / "00000.tar", 10)
    make(shard, tmp_path / "out")
    with pytest.raises(DataError, match="other settings") as caught:
        refuse_other_settings(tmp_path / "out", TOY._replace(**other))
    assert "--run" in str(caught.value)
    with pytest.raises(DataError, match="other settings"):
        make(shard, tmp_path / "out", TOY._replace(**other))
    refuse_other_settings(tmp_path / "out", TOY._replace(limits=Limits(), tokenizer="/elsewhere/toy"))


def test_a_part_of_other_settings_is_told_apart(tmp_path):
    shard = good_shard(tmp_path / "00000.tar", 10)
    with pytest.raises(Killed):
        make(shard, tmp_path / "out", tell=killed_at(1))
    with pytest.raises(DataError, match="begun with other settings"):
        make(shard, tmp_path / "out", TOY._replace(identity="f" * 32))


def test_what_was_not_made_here_is_not_written_over(tmp_path):
    shard = good_shard(tmp_path / "00000.tar", 10)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "00000.tar").write_bytes(b"somebody's")
    with pytest.raises(DataError, match="did not make it"):
        make(shard, tmp_path / "out")
    assert tree(tmp_path / "out") == {"00000.tar": b"somebody's"}


@pytest.mark.parametrize("damage", ["index", "tar", "report"])
def test_damage_in_the_folder_is_told_with_the_way_out(tmp_path, damage):
    shard = good_shard(tmp_path / "00000.tar", 10)
    make(shard, tmp_path / "out")
    undisturbed = tree(tmp_path / "out")
    name = {"index": "00000.index.json", "tar": "00000.tar", "report": "00000.report.json"}[damage]
    (tmp_path / "out" / name).write_bytes(b"{")
    with pytest.raises(DataError) as caught:
        make(shard, tmp_path / "out")
    way_out = next(line for line in str(caught.value).splitlines() if "rm -f" in line)
    subprocess.run(["bash", "-c", way_out[way_out.index("rm -f") :]], check=True)
    make(shard, tmp_path / "out")
    assert tree(tmp_path / "out") == undisturbed


def test_shards_that_would_write_over_each_other_or_themselves(tmp_path):
    with pytest.raises(DataError, match="would both become"):
        targets(["a/00000.tar", "http://host/b/00000.tar?x"], tmp_path)
    shard = good_shard(tmp_path / "00000.tar", 1)
    with pytest.raises(DataError, match="over itself"):
        targets([str(shard)], tmp_path)
    for name in ("a/.hidden.tar", "http://host/%2e%2e", "a b.tar"):
        with pytest.raises(DataError, match="cannot be taken over"):
            targets([name], tmp_path)
    assert targets(["http://host/b/00017.tar?x=/y.tar"], tmp_path)["http://host/b/00017.tar?x=/y.tar"].name == "00017"


def test_only_one_encoder_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "ORPHANS", 0.1)
    with locked(tmp_path / "out"):
        with pytest.raises(DataError, match="Another encoder is at work"), locked(tmp_path / "out"):
            pass
    with locked(tmp_path / "out"):
        pass
    assert tree(tmp_path / "out") == {}


def test_the_report_counts_finished_shards_only(tmp_path):
    for n in range(2):
        make(good_shard(tmp_path / f"{n:05d}.tar", 10), tmp_path / "out")
    (tmp_path / "out" / "00001.index.json").unlink()
    write_report(tmp_path / "out", TOY)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["records"] == 10 and [shard["shard"] for shard in report["shards"]] == ["00000"]
    assert report["settings"]["image_tokenizer"] == {"name": "toy", "identity": "0" * 32}


# many shards


def through(shards: list[Path], out: Path, settings: Settings = EMOJI, workers: int = 1) -> list[Done | Unreadable]:
    with locked(out) as lock:
        events = encode_shards(targets(list(map(str, shards)), out), settings, Plan(workers, 1, "cpu"), lock)
        return [event for event in events if isinstance(event, (Done, Unreadable))]


def test_a_missing_shard_does_not_keep_the_others_from_being_made(tmp_path):
    shards = [good_shard(tmp_path / "00000.tar", 5), tmp_path / "00001.tar", good_shard(tmp_path / "00002.tar", 5)]
    events = through(shards, tmp_path / "out", workers=2)
    assert {Path(e.shard).name: type(e) for e in events} == {
        "00000.tar": Done, "00001.tar": Unreadable, "00002.tar": Done,
    }  # fmt: skip


def test_the_codes_are_the_tokenizers_own(tmp_path):
    through([good_shard(tmp_path / "00000.tar", 20)], tmp_path / "out")
    shard, tokenizer = str(tmp_path / "out" / "00000.tar"), load_image_tokenizer("emoji64")
    codes = CodeSource([shard], codes=64, num_codes=512, tokenizer=EMOJI.identity, filters=Filters(), counts=Counter())
    found = [codes.use(raw) for raw in codes.read(shard, 0, None, math.inf)]
    images = LaionSource([str(tmp_path / "00000.tar")], image_size=64, filters=Filters(), limits=FAST, counts=Counter())
    pixels = [images.use(raw).image for raw in images.read(images.shards[0], 0, None, math.inf)]
    expected = tokenizer.encode(torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255)
    assert np.mean(np.stack([r.codes for r in found]) == expected.numpy()) > 0.999


def test_a_worker_that_cannot_write_says_why():
    assert "disk" in _in_words(OSError(errno.ENOSPC, "No space left on device"))
    assert "Permission denied" in _in_words(PermissionError(errno.EACCES, "Permission denied", "/x/y"))
    assert _in_words(DataError("what\n1. do")) == "what\n1. do"
    assert _in_words(KeyError("a bug")) is None


# the command


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
            assert process.wait(30) == -signal.SIGKILL
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
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 130, errors
        assert "Stopped: 0 of 1 shards" in output and "run the same command again" in output
        assert "Traceback" not in errors
        assert family and not psutil.wait_procs(family, timeout=10)[1]


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
        assert not psutil.wait_procs(family, timeout=10)[1]
    with running(*arguments) as process:  # at once: what the killed one left does not stand in the way
        done = batches(tmp_path / "out")
        wait_until(lambda: batches(tmp_path / "out") > done, process)
        worker = max(psutil.Process(process.pid).children(), key=lambda each: each.memory_info().rss)
        worker.kill()
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 2 and "was killed by signal 9" in errors and "--workers" in errors
        assert "Traceback" not in errors


def test_a_full_disk_is_told_and_room_is_all_it_takes(tmp_path, tiny_disk):
    shard = good_shard(tmp_path / "00000.tar", 1800)
    with running(shard, tiny_disk / "out", "--run", "emoji") as process:
        _, errors = process.communicate(timeout=60)
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
        (["s3://bucket/x.tar", "{tmp}/out", "--run", "emoji"], ["not from s3"]),
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
    good_shard(tmp_path / "00000.tar", 3)
    arguments = ["encode", f"{tmp_path}/{{00000..00001}}.tar", f"{tmp_path}/out", "--run", "emoji", "--workers", "1"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 2 and "1 of 2 shards cannot be read now; 1 are finished" in done.stderr
    assert "00001.tar (missing_shard): no such file" in done.stderr and "[1/2] 00000.tar: 3 records;" in done.stdout
    shutil.copy(tmp_path / "00000.tar", tmp_path / "00001.tar")
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and "[2/2] 00001.tar: 3 records" in done.stdout


def test_on_a_terminal_there_is_one_bar_and_no_lines():
    screen, said = io.StringIO(), []
    console = Console(file=screen, force_terminal=True, width=120)
    with EncodeProgress(3, said.append, console) as progress:
        progress.follow(Moved("a.tar", 0, 0))
        progress.follow(Moved("a.tar", 90, 10))
        progress.follow(Done("a.tar", Summary("a", 180, {"nsfw": 20}, None)))
        progress.follow(Unreadable("b.tar", "missing_shard", "no such file"))
        progress.follow(Moved("c.tar", 50, 0))
    assert not said
    for words in ("1/3", "250 records", "records/s", "left"):
        assert words in screen.getvalue()
    assert progress.finished == 1 and [each.shard for each in progress.unreadable] == ["b.tar"]
