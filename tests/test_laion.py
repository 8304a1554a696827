"""Image-text shards: every fault of real crawls and servers is skipped and counted, nothing is executed."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import tarfile
import time
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_files import good_shard, picture, record, red_level, serve, write_tar

from volunteer_kit.data.errors import DataError
from volunteer_kit.data.laion import CAUSES, Filters, LaionSource, decode_image
from volunteer_kit.data.shards import expand_shards
from volunteer_kit.data.source import Limits, Record, ShardError

FAST = Limits(timeout=0.5, retries=2)
SAFE = Filters()


def read(
    *shards: object,
    filters: Filters = SAFE,
    limits: Limits = FAST,
    patience: float = 5,
    start: int = 0,
    size: int = 16,
) -> tuple[list[Record], Counter[str]]:
    """All usable records of some shards, and what was left out."""
    counts: Counter[str] = Counter()
    source = LaionSource(
        [str(shard) for shard in shards], image_size=size, filters=filters, limits=limits, counts=counts
    )
    records = []
    for shard in source.shards:
        try:
            for found in source.read(shard, start, time.monotonic() + patience):
                records.append(found)
        except ShardError as error:
            counts[error.cause] += 1
    return records, counts


def emoji_folder() -> Path | None:
    places = [Path(__file__).parents[1] / "../shared/data/emoji"]
    if os.environ.get("VOLUNTEER_KIT_EMOJI"):
        places.insert(0, Path(os.environ["VOLUNTEER_KIT_EMOJI"]))
    return next((place for place in places if place.is_dir()), None)


# which shards


def test_patterns(tmp_path):
    for n in range(4):
        (tmp_path / f"{n:05d}.tar").touch()
    all_four = [str(tmp_path / f"{n:05d}.tar") for n in range(4)]
    for pattern in ("{00000..00003}.tar", "*.tar", "0000[0-3].tar", "0000{0,1,2,3}.tar", ""):
        assert expand_shards(str(tmp_path / pattern)) == all_four, pattern
    assert expand_shards([all_four[2], str(tmp_path / "*.tar")]) == [all_four[2], *all_four[:2], all_four[3]]
    assert expand_shards("https://host/{08..10}.tar?x=1") == [f"https://host/{n}.tar?x=1" for n in ("08", "09", "10")]


@pytest.mark.parametrize(
    "pattern, message",
    [
        ("nothing/*.tar", "No shard matches"),
        ([], "No shard matches"),
        ("s3://bucket/x.tar", "not from s3"),
        ("pipe:touch executed", "not from pipe"),
        ("file:///etc/x.tar", "not from file"),
        ("x{0..9999999999}.tar", "more than 1000000"),
        ("x{0..9999}{0..9999}.tar", "more than 1000000"),
        ("x{0..2.tar", "cannot be read"),
    ],
)
def test_patterns_that_make_no_sense(pattern, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    with pytest.raises(DataError, match=message):
        expand_shards(pattern)
    assert time.monotonic() - started < 1 and not list(tmp_path.iterdir())


# records


def test_a_good_record(tmp_path):
    shard = write_tar(tmp_path / "00000.tar", record("000001", " a  red\nsquare "))
    (found,), counts = read(shard, size=8)
    assert found.index == 0 and found.key == "00000.tar#0:000001" and found.caption == "a red square"
    assert found.image.shape == (8, 8, 3) and found.image.dtype == np.uint8
    assert abs(found.image.reshape(-1, 3).mean(0) - (200, 30, 30)).max() < 6
    assert not counts


FAULTS = {
    "short_caption": record("k", "ok"),
    "missing_caption": {**record("k", None)},
    "nsfw": record("k", NSFW="NSFW"),
    "aspect": record("k", original_width=641, original_height=320),
    "missing_image": record("k", image=None),
    "bad_image": record("k", image=picture()[:400]),
    "bad_json": {**record("k"), "k.json": b'{"NSFW": "UNLIKELY"'},
    "missing_json": {name: data for name, data in record("k").items() if not name.endswith("json")},
    "image_too_large": record("k", image=bytes(3000)),
}
MORE_FAULTS = [
    ("nsfw", record("k", NSFW="UNSURE")),
    ("nsfw", record("k", NSFW=None)),
    ("nsfw", record("k", NSFW=["UNLIKELY"])),
    ("missing_caption", record("k", " \n ")),
    ("aspect", record("k", original_width=100, original_height=201)),
    ("aspect", record("k", image=picture(20, 41), original_width=None, original_height="x")),
    ("bad_image", record("k", image=b"\xff\xd8\xff\xe0 not a picture")),
    ("bad_image", record("k", image=b"GIF89a" + bytes(100))),
    ("bad_json", {**record("k"), "k.json": b"[1]"}),
    ("bad_json", {**record("k"), "k.json": b"[" * 2000}),
    ("bad_json", {**record("k"), "k.json": b"\xff\xfe"}),
]


@pytest.mark.parametrize("cause, files", [*FAULTS.items(), *MORE_FAULTS])
def test_each_fault_costs_one_record_and_is_counted(cause, files, tmp_path):
    assert cause in CAUSES
    shard = write_tar(tmp_path / "x.tar", record("a"), files, record("z"))
    records, counts = read(shard, limits=FAST._replace(member_bytes=2500))
    assert [found.key for found in records] == ["x.tar#0:a", "x.tar#2:z"]
    assert counts == {cause: 1}


def test_a_caption_may_stand_in_the_metadata_only(tmp_path):
    files = record("k", "from the json")
    del files["k.txt"]
    assert read(write_tar(tmp_path / "x.tar", files))[0][0].caption == "from the json"


def test_filters_are_settings(tmp_path):
    faulty = ("short_caption", "nsfw", "aspect", "missing_json")
    renamed = ({name.replace("k", cause): data for name, data in FAULTS[cause].items()} for cause in faulty)
    shard = write_tar(tmp_path / "x.tar", *renamed)
    records, counts = read(shard, filters=Filters(min_caption=2, nsfw_allowed=None, max_aspect=3))
    assert len(records) == 4 and not counts
    records, counts = read(shard, filters=Filters(nsfw_allowed=("NSFW",)))
    assert len(records) == 1 and counts == {"short_caption": 1, "nsfw": 1, "missing_json": 1}


def test_a_second_member_of_the_same_name_is_counted(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for files in (record("a", "the first"), {"a.txt": b"the second"}, record("b")):
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    records, counts = read(tmp_path / "x.tar")
    assert [found.caption for found in records] == ["the first", "a red square"]
    assert counts == {"duplicate_member": 1}


def test_reading_from_the_middle_keeps_the_names(tmp_path):
    shard = write_tar(tmp_path / "x.tar", *(record(f"{n}", "no" if n == 1 else "yes") for n in range(5)))
    assert [found.index for found in read(shard)[0]] == [0, 2, 3, 4]
    records, counts = read(shard, start=2)
    assert [found.index for found in records] == [2, 3, 4] and not counts


# pictures


def test_the_central_square_is_kept():
    image = Image.new("RGB", (40, 20), "blue")
    image.paste("red", (10, 0, 30, 20))
    data = io.BytesIO()
    image.save(data, "PNG")
    assert red_level(decode_image(data.getvalue(), 8)) == 255


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_kinds_of_pictures(kind):
    pixels = decode_image(picture(100, 80, (10, 120, 240), kind), 16).reshape(-1, 3).mean(0)
    assert abs(pixels - (10, 120, 240)).max() < 6


def test_transparency_becomes_white():
    assert decode_image(picture(colour=(0, 0, 0, 0), kind="PNG"), 4).min() == 255


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [8_000, 12_000, 60_000])
def test_a_decompression_bomb_is_not_unpacked(side, tmp_path):
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    tracemalloc.start()
    records, counts = read(write_tar(tmp_path / "x.tar", record("a", image=bomb), record("b")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == {"image_too_large": 1} and len(records) == 1 and peak < 10e6


# shards


def test_a_pickle_is_not_even_looked_at(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    evil = {f"a.{suffix}": pickle.dumps(Bomb()) for suffix in ("pyd", "pkl", "pickle", "pth", "npy", "ten")}
    records, counts = read(write_tar(tmp_path / "x.tar", {**record("a"), **evil}, record("b")))
    assert len(records) == 2 and not counts
    everything = {f"k.{suffix}": pickle.dumps(Bomb()) for suffix in ("jpg", "txt", "json")}
    records, counts = read(write_tar(tmp_path / "y.tar", everything, record("b")))
    assert len(records) == 1 and counts == {"bad_json": 1}
    assert not (tmp_path / "executed").exists()


def test_links_and_absolute_paths_touch_nothing(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret caption")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name, kind in (("a.txt", tarfile.SYMTYPE), ("b.txt", tarfile.LNKTYPE), ("pipe.txt", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, str(secret)
            tar.addfile(info)
        for prefix in ("/etc/evil", "../../evil", "dir/evil"):
            for name, data in record("k").items():
                info = tarfile.TarInfo(f"{prefix}.{name.rsplit('.')[-1]}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    before = sorted(tmp_path.rglob("*"))
    records, counts = read(tmp_path / "x.tar")
    assert {found.caption for found in records} == {"a red square"}
    assert sorted(tmp_path.rglob("*")) == before and not Path("/etc/evil.jpg").exists()


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_in_every_kind_of_tar(kind, tmp_path):
    long = "f/" * 30 + "k" * 90 + ("ü" * 30 if kind != tarfile.USTAR_FORMAT else "")
    with tarfile.open(tmp_path / "x.tar", "w", format=kind) as tar:
        for name, data in record(long).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    records, counts = read(tmp_path / "x.tar")
    assert len(records) == 1 and not counts and records[0].key.isascii()


def test_bad_shards_are_counted_and_the_others_read(tmp_path):
    good = good_shard(tmp_path / "good.tar", 6)
    whole = good.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.index(b"000003.png") if b"000003.png" in whole else whole.index(b"000003.jpg")] ^= 1
    broken = {
        "empty_shard": b"",
        "bad_shard": b"<html>404</html>" * 100,
        "cut_shard": whole[: len(whole) // 2 + 700],
        "bad_shard#2": bytes(damaged),
        "empty_shard#2": bytes(10240),
        "bad_shard#3": b"\x1f\x8b" + os.urandom(2000),
    }
    for cause, data in broken.items():
        (tmp_path / "bad.tar").write_bytes(data)
        records, counts = read(tmp_path / "bad.tar", good)
        assert counts == {cause.split("#")[0]: 1}, cause
        assert len(records) == (9 if cause in ("cut_shard", "bad_shard#2") else 6), cause
    records, counts = read(tmp_path / "nothing.tar", tmp_path, good)
    assert counts == {"missing_shard": 1, "unreachable_shard": 1} and len(records) == 6


def test_every_cut_leaves_whole_records_only(tmp_path):
    whole = good_shard(tmp_path / "good.tar", 3).read_bytes()
    for end in range(1, len(whole), 997):
        (tmp_path / "cut.tar").write_bytes(whole[:end])
        records, counts = read(tmp_path / "cut.tar")
        assert [found.caption for found in records] == [f"picture number {n}" for n in range(len(records))]
        assert not set(counts) - {"cut_shard", "bad_shard"}


@pytest.mark.parametrize("size", [3 * 2**30, -1])
def test_huge_members_and_headers_cost_no_memory(size, tmp_path):
    """A header may claim any size: the member is skipped, an extended header of that size ends the shard."""
    for kind in (tarfile.REGTYPE, tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME):
        info = tarfile.TarInfo("huge.jpg")
        info.size, info.type = max(size, 0), kind
        header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
        if size < 0:
            header[124:136] = b"\xff" * 12
            header[148:156] = b" " * 8
            header[148:156] = b"%06o\0 " % sum(header)
        with open(tmp_path / "x.tar", "wb") as file:
            file.write(write_tar(tmp_path / "y.tar", record("a")).read_bytes().rstrip(b"\0").ljust(6144, b"\0"))
            file.write(header)
            file.truncate(file.tell() + max(size, 0))  # sparse: takes no disk
            file.seek(0, io.SEEK_END)
            file.write(write_tar(tmp_path / "z.tar", record("b")).read_bytes())
        tracemalloc.start()
        records, counts = read(tmp_path / "x.tar")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 10e6 and records, (kind, counts)


# servers


@pytest.fixture
def server(tmp_path):
    (tmp_path / "www").mkdir()
    with serve(tmp_path / "www") as running:
        yield running


@pytest.mark.parametrize("road", ["ok", "breaks", "norange", "busy"])
def test_http_gives_the_same_records_as_a_file(road, server):
    shard = good_shard(server.folder / "x.tar", 12)
    expected, _ = read(shard)
    records, counts = read(f"{server.url}/{road}/x.tar", limits=FAST._replace(retries=9), patience=20)
    assert not counts and [r.caption for r in records] == [r.caption for r in expected]
    assert all(np.array_equal(a.image, b.image) for a, b in zip(records, expected, strict=True))
    ranges = [asked for _, asked in server.asked]
    assert {"ok": len(ranges) == 1, "busy": len(ranges) == 3}.get(road, any(ranges))


@pytest.mark.parametrize(
    "road, cause",
    [("status/404", "missing_shard"), ("status/403", "unreachable_shard"), ("redirect/x.tar", "unreachable_shard")],
)
def test_some_answers_are_final(road, cause, server):
    good_shard(server.folder / "x.tar", 2)
    records, counts = read(f"{server.url}/{road}")
    assert counts == {cause: 1} and not records and len(server.asked) == 1


@pytest.mark.parametrize(
    "road, cause",
    [("status/500", "unreachable_shard"), ("status/429", "unreachable_shard"), ("stall/x.tar", "cut_shard"),
     ("drip/x.tar", "unreachable_shard"), ("changes/x.tar", "cut_shard")],
)  # fmt: skip
def test_servers_that_never_get_there_are_given_up(road, cause, server):
    good_shard(server.folder / "x.tar", 60)
    started = time.monotonic()
    records, counts = read(f"{server.url}/{road}", limits=FAST._replace(timeout=0.3), patience=4)
    assert counts == {cause: 1} and time.monotonic() - started < 8


def test_a_body_without_end(server):
    tracemalloc.start()
    started = time.monotonic()
    records, counts = read(f"{server.url}/endless/x", patience=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == {"unreachable_shard": 1} and time.monotonic() - started < 3 and peak < 20e6
    records, counts = read(f"{server.url}/endless/x", limits=FAST._replace(shard_bytes=2**20))
    assert counts == {"bad_shard": 1}


# the real thing


@pytest.mark.skipif(emoji_folder() is None, reason="no emoji shards: set VOLUNTEER_KIT_EMOJI to their folder")
@pytest.mark.parametrize("road", ["files", "http"])
def test_emoji(road):
    folder = emoji_folder()
    with serve(folder) as server:
        place = f"{server.url}/ok" if road == "http" else folder
        records, counts = read(*expand_shards(f"{place}/{{00000..00003}}.tar"), size=64)
    assert counts == {"nsfw": 8, "bad_image": 4, "short_caption": 4, "missing_caption": 4, "aspect": 4}
    assert len(records) == 916 - 24 and all(found.image.shape == (64, 64, 3) for found in records)
    for shard in sorted(folder.glob("*.tar"))[:1]:  # what is kept is what the metadata says may be kept
        with tarfile.open(shard) as tar:
            metas = [json.load(tar.extractfile(m)) for m in tar if m.name.endswith(".json")]
        safe = {m["key"] for m in metas if m["NSFW"] == "UNLIKELY"}
        assert {r.key.split(":")[1] for r in records if r.key.startswith(shard.name)} <= safe
