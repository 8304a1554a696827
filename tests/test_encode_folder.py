"""The encoder's folder: what is in it already is told apart, and many shards come into it."""

from __future__ import annotations

import errno
import json
import math
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.encoding import EMOJI, FAST, TOY, Killed, killed_at, make, through, tree
from tests.shard_files import good_shard
from volunteer_kit.data.codes import CodeSource
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.laion import LaionSource
from volunteer_kit.data.settings import Columns, Filters
from volunteer_kit.data.source import Limits
from volunteer_kit.encode import folder as folder_module
from volunteer_kit.encode.folder import locked, refuse_other_settings, targets, write_report
from volunteer_kit.encode.pool import Done, Unreadable, _in_words
from volunteer_kit.model.image_tokenizer import load_image_tokenizer


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
