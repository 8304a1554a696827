"""Encoding one shard: equal bytes however often it is killed, and every fault in the report."""

from __future__ import annotations

import contextlib
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.damage import JSON
from tests.encoding import FAST, TOY, Killed, faults_of, faulty_shard, killed_at, make, toy_codes, tree
from tests.shard_files import good_shard, serve
from volunteer_kit.data.code_shards import checksum, parse_index
from volunteer_kit.data.codes import CodeSource
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.laion import LaionSource
from volunteer_kit.data.settings import Filters
from volunteer_kit.data.source import LeftOut, ShardError
from volunteer_kit.encode.folder import Target
from volunteer_kit.encode.part import Part
from volunteer_kit.encode.settings import BATCH
from volunteer_kit.encode.shard import encode_shard


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


FINISHED = ("00000.tar", "00000.index.json", "00000.report.json")


@pytest.mark.parametrize("name", FINISHED[1:])
@pytest.mark.parametrize("damage", JSON.values(), ids=list(JSON))
def test_a_finished_shard_is_not_written_over_when_what_is_said_of_it_is_damaged(tmp_path, name, damage):
    shard = good_shard(tmp_path / "00000.tar", 2)
    out = tmp_path / "out"
    make(shard, out)
    damage(out / name)
    before = {one: content(out / one) for one in FINISHED}
    with contextlib.suppress(DataError):  # where the damage makes a difference
        make(shard, out)
    assert {one: content(out / one) for one in FINISHED} == before


def content(path: Path) -> object:
    return path.read_bytes() if path.is_file() else "a folder"
