"""The stream: endless, seeded, resumable anywhere, and clear when nothing can be read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tests.shard_files import good_shard, record, serve, write_tar
from tests.waiting import wait_until
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.scenes import all_scenes, is_held_out, parse_caption
from volunteer_kit.data.settings import DataConfig, Filters
from volunteer_kit.data.source import SampleName
from volunteer_kit.data.stream import Batch, SampleStream, open_stream
from volunteer_kit.data.tokenizer import load_tokenizer

WORDS = load_tokenizer("words")
CALLS: list[int] = []


def encode(images: torch.Tensor) -> torch.Tensor:
    """4 codes: the red of the four quarters."""
    assert images.dtype == torch.float32 and images.shape[1:] == (3, 8, 8) and 0 <= images.min() <= images.max() <= 1
    CALLS.append(len(images))
    return torch.nn.functional.avg_pool2d(images[:, :1], 4).flatten(1).mul(255).round().long()


def stream(seed: int = 0, peer_seed: int = 0, num_codes: int = 256, encode_images=encode, **config) -> SampleStream:
    return open_stream(
        DataConfig(**{"kind": "shards" if "shards" in config else "scenes", "disk_cache_mb": 0, **config}),
        tokenizer=WORDS,
        encode_images=encode_images,
        image_size=8,
        text_seq_len=16,
        image_seq_len=4,
        num_codes=num_codes,
        image_tokenizer="red",
        seed=seed,
        peer_seed=peer_seed,
    )


def keys(reader: SampleStream, count: int, batch_size: int = 5) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        found += reader.next_batch(min(batch_size, count - len(found))).keys
    return found


@pytest.fixture
def shards(tmp_path):
    """Three shards: 40, 7 and 90 good records, with faults between."""
    good_shard(tmp_path / "0.tar", 40)
    write_tar(tmp_path / "1.tar", *(record(f"k{n}", "no" if n % 3 else f"caption {n}") for n in range(21)))
    good_shard(tmp_path / "2.tar", 90, first=100)
    return str(tmp_path / "{0..2}.tar")


# batches


def test_a_batch_of_scenes():
    batch = stream().next_batch(6)
    assert isinstance(batch, Batch)
    assert batch.text.shape == (6, 16) and batch.text.dtype == torch.int64
    assert batch.codes.shape == (6, 4) and batch.codes.dtype == torch.int64
    assert len(set(batch.keys)) == len(set(batch.names)) == 6
    for text, codes in zip(batch.text.tolist(), batch.codes, strict=True):
        scene = parse_caption(WORDS.decode(text))
        assert not is_held_out(scene)
        image = torch.from_numpy(scene.render(8)).permute(2, 0, 1)[None].float() / 255
        assert torch.equal(encode(image)[0], codes)


def test_a_shard_of_scenes_has_every_training_scene_equally_often():
    scenes = {scene.caption for scene in all_scenes(1, "train")}
    source = stream().source
    length = source.ranges(source.shards[0], 0)[-1]
    seen = Counter(raw.data.caption for raw in source.read(source.shards[0], 0, None, 0))
    assert set(seen) == scenes and len(set(seen.values())) == 1 and seen.total() == length >= 4096
    again = [raw.data.caption for raw in source.read(source.shards[0], len(scenes), 2 * len(scenes), 0)]
    assert set(again) == scenes  # whole rounds one after the other
    assert again != [raw.data.caption for raw in source.read(source.shards[1], len(scenes), 2 * len(scenes), 0)]


@pytest.mark.parametrize("level", [1, 2])
def test_an_epoch_over_scenes_has_every_sample_once(level):
    found = keys(stream(level=level), 2000, 64)
    assert len(set(found)) == 2000


def test_early_samples_of_level_2_are_mixed():
    """Neighbours in all_scenes share their words; a stream cut from it in order would learn few at a time."""
    texts = stream(level=2).next_batch(64).text.tolist()
    first_colours = {WORDS.decode(text).split()[2] for text in texts}
    assert len(first_colours) == 8


def test_each_scene_is_encoded_once():
    CALLS.clear()
    reader = stream()
    keys(reader, 6000, 64)
    scenes = len(all_scenes(1, "train"))  # twice only where both are in one batch of the encoder
    assert scenes <= sum(CALLS) < 1.02 * scenes and max(CALLS) <= 32


def test_a_batch_of_shards(shards):
    reader = stream(shards=shards)
    batch = reader.next_batch(30)
    for text, codes, key in zip(batch.text.tolist(), batch.codes.tolist(), batch.keys, strict=True):
        if not key.startswith("1.tar"):
            number = int(WORDS.decode(text).split()[-1])
            assert key == f"{0 if number < 100 else 2}.tar#{number % 100}:{number:06d}" and codes == [number] * 4


def test_a_pass_has_every_record_once_and_the_next_one_another_order(shards):
    reader = stream(shards=shards)
    passes = [keys(reader, 137) for _ in range(4)]
    assert all(sorted(found) == sorted(passes[0]) and len(set(found)) == 137 for found in passes)
    assert len({tuple(found) for found in passes}) == 4


def test_the_order_does_not_depend_on_batch_sizes(shards):
    steady = keys(stream(shards=shards), 300)
    reader, changing = stream(shards=shards), []
    for size in (1, 100, 3, 7, 150, 2, 37):
        changing += reader.next_batch(size).keys
    assert changing == steady
    assert sum((batch.keys for batch in islice(stream(shards=shards).batches(10), 30)), []) == steady
    with pytest.raises(ValueError, match="1 sample or more"):
        reader.next_batch(0)


@pytest.mark.parametrize("kind", ["scenes", "shards"])
def test_seeds_decide_the_order_in_every_process(kind, shards):
    source = {"shards": shards} if kind == "shards" else {}
    first = keys(stream(1, 1, **source), 60)
    assert first == keys(stream(1, 1, **source), 60)
    others = ((1, 2), (1, 3), (1, 4), (2, 1), (12, 1))
    assert first not in [keys(stream(a, b, **source), 60) for a, b in others if kind == "scenes" or a != 1]
    assert len({keys(stream(1, b, **source), 60)[0].split("#")[0] for b in range(5)}) > 1  # peers begin elsewhere


def test_the_order_is_not_pythons_hash():
    code = (
        "import torch\nfrom volunteer_kit.data.stream import *\nfrom volunteer_kit.data.settings import DataConfig\n"
        "from volunteer_kit.data.tokenizer import load_tokenizer\n"
        "s = open_stream(DataConfig(kind='scenes'), tokenizer=load_tokenizer('words'), image_size=8, text_seq_len=4,"
        "encode_images=lambda x: torch.zeros(len(x), 4), image_seq_len=4, image_tokenizer='0', seed=3, peer_seed=4, "
        "num_codes=1)\n"
        "print(s.next_batch(8).keys)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout == f"{keys(stream(3, 4), 8, 8)}\n"


# memory


def test_later_passes_come_from_memory(shards):
    CALLS.clear()
    reader = stream(shards=shards)
    keys(reader, 137 * 3)
    assert sum(CALLS) == 137
    assert reader.counts == {"short_caption": 14}


def test_memory_is_bounded_by_the_setting(shards):
    CALLS.clear()
    reader = stream(shards=shards, cache_mb=0)
    keys(reader, 137 * 3)
    assert sum(CALLS) == 137 * 3
    assert reader.counts == {"short_caption": 42}
    assert keys(reader, 30) == keys(stream(shards=shards), 137 * 3 + 30)[-30:]


def test_what_is_on_disk_is_not_encoded_by_the_next_process(shards, tmp_path):
    settings = {"shards": shards, "cache_mb": 0, "disk_cache_mb": 10, "cache_dir": str(tmp_path / "cache")}
    reader = stream(**settings)
    expected = keys(reader, 137)
    reader.close()
    CALLS.clear()
    reader = stream(**settings)
    assert keys(reader, 137) == expected and sum(CALLS) == 0
    assert reader.counts == {"short_caption": 14}  # told by everybody who reads it
    good_shard(tmp_path / "0.tar", 40, first=50)  # written anew: what was remembered of it is of another file
    captions = [text for text in stream(**settings).next_batch(137).text.tolist()]
    assert sum(WORDS.decode(text) == "picture number 89" for text in captions) == 1 and sum(CALLS) == 40


# resuming


@pytest.mark.parametrize("length", [1, 16, 1024])
@pytest.mark.parametrize("kind", ["scenes", "shards"])
def test_a_stream_goes_on_exactly_where_it_stopped(kind, length, shards):
    source = {"shards": shards} if kind == "shards" else {}
    expected = keys(stream(range_length=length, **source), 700, 50)
    rng = np.random.default_rng(length)
    found: list[str] = []
    reader = stream(range_length=length, **source)
    while len(found) < 650:
        if rng.random() < 0.3:
            reader.read_ahead()
        found += reader.next_batch(int(rng.integers(1, 60))).keys
        state = json.loads(json.dumps(reader.state_dict()))
        reader.close()
        reader = stream(peer_seed=77, range_length=length, **source)  # the order goes on with the state's seed
        reader.load_state_dict(state)
        assert reader.state_dict() == state
        if rng.random() < 0.3:  # closing does not move it
            reader.close()
    assert found == expected[: len(found)]
    reader.close()


def test_a_stream_can_go_back_to_any_earlier_batch(shards):
    reader = stream(shards=shards)
    batches = [reader.next_batch(13) for _ in range(30)]
    for n in (28, 3, 17):
        reader.load_state_dict(reader.state_dict(batches[n].after))
        assert reader.next_batch(13).names == batches[n + 1].names


def test_going_on_does_not_encode_what_was_read_before(tmp_path):
    for n in range(8):
        good_shard(tmp_path / f"{n}.tar", 30, first=30 * n)
    pattern = str(tmp_path / "*.tar")
    reader = stream(shards=pattern)
    keys(reader, 200)
    state = reader.state_dict()
    CALLS.clear()
    reader = stream(shards=pattern)
    reader.load_state_dict(state)
    reader.next_batch(1)
    assert sum(CALLS) == 4  # images encoded at once to begin with


def test_a_state_of_other_shards_starts_a_new_epoch(shards, tmp_path):
    reader = stream(shards=shards)
    keys(reader, 50)
    other = stream(shards=str(tmp_path / "2.tar"))
    other.load_state_dict(reader.state_dict())
    assert other.epoch == 1 and len(set(keys(other, 90))) == 90


def test_the_same_shards_elsewhere_are_the_same_stream(shards, tmp_path):
    reader = stream(shards=shards)
    keys(reader, 50)
    state, rest = reader.state_dict(), keys(reader, 60)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for n in range(3):
        (tmp_path / f"{n}.tar").rename(moved / f"{n}.tar")
    other = stream(shards=str(moved))
    other.load_state_dict(state)
    assert keys(other, 60) == rest


GOOD_STATE = {"version": 2, "order": "", "peer_seed": 0, "epoch": 0, "place": 0, "lease": None, "range": 0, "used": 0}


@pytest.mark.parametrize(
    "change",
    [{"version": 1}, {"epoch": -1}, {"place": "0"}, {"lease": 7}, {"lease": [0, 0]}, {"lease": [0, -1, None, True]},
     {"lease": [0, 0, 2.5, True]}, {"used": None}, {"peer_seed": "x"}, {"epoch": 2**60}],
)  # fmt: skip
def test_what_is_no_state_is_refused(change):
    with pytest.raises(ValueError, match="not the state"):
        stream().load_state_dict({**GOOD_STATE, **change})
    reader = stream()
    assert keys(reader, 5) == keys(stream(), 5)
    reader.load_state_dict(GOOD_STATE)  # of other data
    assert reader.epoch == 1


# names


@pytest.mark.parametrize("kind", ["scenes", "shards"])
def test_anybody_can_fetch_a_sample_by_its_name(kind, shards):
    source = {"shards": shards} if kind == "shards" else {}
    reader = stream(**source)
    keys(reader, 100)
    batch = reader.next_batch(12)
    other = stream(5, 6, **source)
    names = [SampleName.parse(str(name)) for name in batch.names]
    found = other.fetch(names)
    assert torch.equal(found.text, batch.text) and torch.equal(found.codes, batch.codes)
    assert found.names == batch.names and found.keys == batch.keys


def test_a_name_that_leads_nowhere_is_told(shards):
    reader = stream(shards=shards)
    for name in (SampleName(0, 9, 0), SampleName(0, 0, 4000), SampleName(0, 1, 1)):
        with pytest.raises(DataError, match=f"sample {name}"):
            reader.fetch([name])
    for text in ("", "0/0", "0/-1/0", "a/b/c", "0/0/0/0", "1" * 30 + "/0/0"):
        with pytest.raises(ValueError, match="no sample's name"):
            SampleName.parse(text)


# ahead


def test_reading_ahead_gives_the_same_and_stops_at_its_bound(shards):
    expected = keys(stream(shards=shards), 300, 10)
    CALLS.clear()
    reader = stream(shards=shards, prefetch=8, cache_mb=0)
    reader.read_ahead()
    found = reader.next_batch(1).keys
    waiting = next(thread for thread in threading.enumerate() if thread.name == "read-ahead")
    wait_until(lambda: sum(CALLS) >= 12)
    assert sum(CALLS) <= 1 + 8 + 32  # given, ready, and one batch of the encoder
    found += keys(reader, 299, 10)
    assert found == expected
    reader.close()
    waiting.join(60)
    assert not waiting.is_alive()


def test_what_goes_wrong_ahead_is_told_and_can_be_tried_again(tmp_path):
    reader = stream(shards=str(tmp_path / "0.tar"), patience=1)
    reader.read_ahead()
    for _ in range(2):
        with pytest.raises(DataError, match="no such file"):
            reader.next_batch(1)
    good_shard(tmp_path / "0.tar", 20)
    assert len(keys(reader, 20)) == 20
    reader.close()


# faults


def test_codes_outside_the_vocabulary_are_left_out(shards):
    reader = stream(shards=shards, num_codes=120)  # codes are 0..39, about 200, 100..189
    assert all(batch.codes.max() < 120 for batch in islice(reader.batches(10), 6))
    assert reader.counts["codes_out_of_range"] == 70 + 7
    reader = stream(encode_images=lambda images: torch.full((len(images), 4), -1))
    with pytest.raises(DataError, match="vocabulary"):
        reader.next_batch(1)


def test_an_encoder_that_fails_is_heard_and_can_be_tried_again(shards):
    broken = [True]

    def moody(images: torch.Tensor) -> torch.Tensor:
        if broken[0] and sum(CALLS) > 70:
            raise RuntimeError("out of memory")
        return encode(images)

    CALLS.clear()
    reader = stream(shards=shards, encode_images=moody)
    found = []
    with pytest.raises(RuntimeError, match="out of memory"):
        while True:
            found += reader.next_batch(5).keys
    broken[0] = False
    found += keys(reader, 150)
    assert found == keys(stream(shards=shards), len(found))


def test_a_bad_shard_is_tried_again_in_the_next_pass(tmp_path):
    good_shard(tmp_path / "0.tar", 5)
    reader = stream(shards=[str(tmp_path / "0.tar"), str(tmp_path / "1.tar")])
    assert len(keys(reader, 10)) == 10
    assert reader.counts["missing_shard"] >= 1 and "no such file" in reader.failures[str(tmp_path / "1.tar")]
    good_shard(tmp_path / "1.tar", 5, first=100)
    assert Counter(key.split("#")[0] for key in keys(reader, 40))["1.tar"] >= 15


def test_a_shard_of_no_use_is_told_once_with_the_causes(tmp_path, caplog):
    good_shard(tmp_path / "0.tar", 3)
    write_tar(tmp_path / "1.tar", *(record(f"{n}", "no") for n in range(7)), record("x", image=None))
    reader = stream(shards=str(tmp_path / "{0,1}.tar"), cache_mb=0)
    keys(reader, 12)
    told = [each.getMessage() for each in caplog.records if "can be used" in each.getMessage()]
    assert len(told) == 1 and "Not one of the 8 records read of the shard" in told[0] and "1.tar" in told[0]
    assert "a caption shorter than the run allows: 7; no image: 1" in told[0]
    assert reader.counts["short_caption"] >= 21


def test_nothing_to_read_is_one_clear_error(tmp_path):
    write_tar(tmp_path / "x.tar", *(record(f"{n}", NSFW="NSFW") for n in range(3)))
    (tmp_path / "empty.tar").touch()
    reader = stream(shards=[str(tmp_path / "x.tar"), str(tmp_path / "empty.tar"), str(tmp_path / "missing.tar")])
    for _ in range(2):  # asked again, it tries again
        with pytest.raises(DataError) as error:
            reader.next_batch(1)
    said = str(error.value)
    assert "Not one usable sample in 3 shards" in said and "no such file" in said and "the file is empty" in said
    assert "not marked as safe for work: 3" in said and "nsfw_allowed" in said and "1. " in said
    with pytest.raises(DataError, match="No shard matches"):
        stream(shards=str(tmp_path / "*.zip"))
    with pytest.raises(DataError, match="No shard"):
        stream(kind="shards", shards=None)


def test_keys_in_an_address_are_not_told():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        url = f"http://me:secret1@127.0.0.1:{busy.getsockname()[1]}/a.tar?token=secret2"
        with pytest.raises(DataError, match=r"127.0.0.1:\d+/a.tar: ") as error:
            stream(shards=url, patience=1, timeout=1, retries=0).next_batch(1)
    assert "secret" not in str(error.value)


def test_an_unreachable_server_is_told_within_the_patience():
    with socket.socket() as busy:  # bound, but nobody listens
        busy.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{busy.getsockname()[1]}/{{0..99}}.tar"
        reader = stream(shards=url, patience=2, timeout=1, retries=1)
        started = time.monotonic()
        with pytest.raises(DataError, match="connection refused") as error:
            reader.next_batch(1)
    assert time.monotonic() - started < 60
    assert "curl -I" in str(error.value)


def test_a_short_outage_is_waited_for_and_a_long_one_told(tmp_path):
    good_shard(tmp_path / "0.tar", 70)
    reader = stream(shards=str(tmp_path / "{0..0}.tar"), cache_mb=0, patience=5)
    found = keys(reader, 70)
    (tmp_path / "0.tar").rename(tmp_path / "away")

    def come_back() -> None:
        while not reader.counts["missing_shard"]:
            time.sleep(0.01)
        (tmp_path / "away").rename(tmp_path / "0.tar")

    back = threading.Thread(target=come_back, daemon=True)
    back.start()
    found += keys(reader, 70)
    back.join()
    assert Counter(found) == dict.fromkeys(found, 2) and reader.counts["missing_shard"] >= 1
    (tmp_path / "0.tar").unlink()
    started = time.monotonic()
    with pytest.raises(DataError, match="no such file"):
        keys(reader, 70)
    assert 4.9 < time.monotonic() - started < 60


def test_a_silent_server_is_told_within_the_patience():
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        reader = stream(shards=f"http://127.0.0.1:{silent.getsockname()[1]}/{{0..99}}.tar", patience=2, timeout=0.7)
        started = time.monotonic()
        with pytest.raises(DataError, match="no answer in time"):
            reader.next_batch(1)
    assert time.monotonic() - started < 60


def test_shards_over_http_are_the_same_stream(shards, tmp_path):
    with serve(tmp_path) as server:
        reader = stream(shards=f"{server.url}/ok/{{0..2}}.tar")
        batch = reader.next_batch(137)
        assert len(server.asked) == 3
        keys(reader, 300)
        assert len(server.asked) == 3  # the rest came from memory
    assert sorted(batch.keys) == sorted(keys(stream(shards=shards), 137))


# settings


def test_settings_are_checked():
    for wrong in ({"kind": "files"}, {"kind": "scenes", "level": 3}, {"kind": "shards", "max_aspect": 0.5},
                  {"kind": "scenes", "shufle_buffer": 3}, {"kind": "shards", "patience": float("inf")}):  # fmt: skip
        with pytest.raises(ValidationError):
            DataConfig(**wrong)
    assert set(DataConfig.LOCAL) < set(DataConfig.model_fields)
    assert DataConfig.LOCAL & {"kind", "level", "dataset", *Filters._fields, "range_length"} == set()
    for impossible in ({"kind": "hub"}, {"kind": "shards", "dataset": "a/b"}, {"kind": "scenes", "shards": "x.tar"},
                       {"kind": "hub", "dataset": "../../etc"}):  # fmt: skip
        with pytest.raises(ValidationError):
            DataConfig(**impossible)
