"""Image-text shards: every fault of real crawls and servers is skipped and counted, nothing is executed."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.shard_files import FAST, SAFE, good_shard, open_source, picture, read, record, red_level, serve, write_tar
from volunteer_kit.data import laion
from volunteer_kit.data.causes import CAUSES
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.laion import decode_image
from volunteer_kit.data.settings import Columns, Filters
from volunteer_kit.data.shards import catalogue_of, expand_shards, open_shard
from volunteer_kit.data.source import LeftOut, ShardError

LONG = FAST._replace(retries=20)


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
        ("az://bucket/x.tar", "not from az"),
        ("pipe:touch executed", "not from pipe"),
        ("file:///etc/x.tar", "not from file"),
        ("x{0..9999999999}.tar", "more than 1000000"),
        ("x{0..9999}{0..9999}.tar", "more than 1000000"),
        ("x" * 2001, "too long"),
        ("x{a,b}{a,b}{a,b}{a,b}{a,b}.tar", "too long: 2000 characters and 4 braces at most"),
        ("x{0..2.tar", "cannot be read"),
    ],
)
def test_patterns_that_make_no_sense(pattern, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    with pytest.raises(DataError, match=message):
        expand_shards(pattern)
    assert time.process_time() - started < 1 and not list(tmp_path.iterdir())


def test_names_that_would_fill_the_memory_are_not_written_out():
    with pytest.raises(DataError, match="characters together"):
        expand_shards(f"https://host/{{0..999999}}/{'x' * 1900}.tar")


def test_a_catalogue_is_the_same_wherever_its_shards_lie():
    here = catalogue_of("shards", ["/home/me/laion/a/0.tar", "/home/me/laion/b/1.tar"])
    for place in ("", "data/", "https://host/x/y/", "http://me:secret@mirror:8000/deep/er/"):
        assert catalogue_of("shards", [f"{place}a/0.tar", f"{place}b/1.tar"]) == here, place
    signed = [f"https://host/{name}.tar?token={n}" for n, name in enumerate(("a/0", "b/1"))]
    assert catalogue_of("shards", signed) == here
    assert catalogue_of("shards", ["/x/a/0.tar"]) == catalogue_of("shards", ["0.tar"])
    others = [
        ("codes", ["a/0.tar", "b/1.tar"]),
        ("shards", ["b/1.tar", "a/0.tar"]),
        ("shards", ["a/0.tar"]),
        ("shards", ["a/0.tar", "b/2.tar"]),
        ("shards", []),
        ("shards", ["a/0?.tar", "b/1?.tar"]),
    ]
    assert len({here, *(catalogue_of(*other) for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("road", ["file", "ok", "breaks", "norange"])
def test_a_part_of_a_shard(road, tmp_path):
    data = np.random.default_rng(0).bytes(200_000)
    (tmp_path / "x").write_bytes(data)
    with serve(tmp_path) as server:
        place = tmp_path / "x" if road == "file" else f"{server.url}/{road}/x"
        for start, stop in ((0, 10), (150_000, 150_003), (5, None), (199_999, 300_000), (200_000, None), (7, 7)):
            with open_shard(str(place), LONG, time.monotonic() + 60, start, stop) as stream:
                assert stream.read() == data[start:stop], (start, stop)
        if road == "ok":
            ranges = ["bytes=0-9", "bytes=150000-150002", "bytes=5-", "bytes=199999-299999", "bytes=200000-"]
            assert [asked for _, asked in server.asked] == ranges


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


def in_tar(path: Path, *files: tuple[str, bytes]) -> Path:
    """Files in their order, several of one name too."""
    with tarfile.open(path, "w") as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


JPG, TXT, META = picture(), b"a red square", json.dumps(SAFE).encode()


def named(*names: str) -> list[tuple[str, bytes]]:
    """Files with the contents that their endings say."""
    dark = picture(colour=(9, 9, 9), kind="PNG")
    kinds = {"jpg": JPG, "png": dark, "txt": TXT, "json": META, "gz": gzip.compress(TXT)}
    return [(name, kinds.get(name.rpartition(".")[2].lower(), b"something else")) for name in names]


def dotted(*stems: str) -> list[tuple[str, bytes]]:
    return named(*(f"{stem}.{ending}" for stem in stems for ending in ("jpg", "txt", "json")))


@pytest.mark.parametrize(
    ("files", "keys", "counts"),
    [
        (dotted("shoe.1", "shoe.2", "shoe.3"), ["shoe.1", "shoe.2", "shoe.3"], {}),
        (dotted("cat", "shoe.1", "img_1.5x", "cow"), ["cat", "shoe.1", "img_1.5x", "cow"], {}),
        (dotted("st.john", "dr.who", "dr.no"), ["st.john", "dr.who", "dr.no"], {}),
        (dotted("a.b/c", "a.b/d.1", "a.b/d.2"), ["a.b/c", "a.b/d.1", "a.b/d.2"], {}),
        (named("0.image.jpg", "0.txt", "0.json", "1.image.jpg", "1.txt", "1.json"), ["0", "1"], {}),
        (named("0.image.jpg", "0.caption.txt", "0.meta.json"), ["0"], {}),
        (named("0.jpg", "0.seg.png", "0.txt", "0.json", "1.seg.png", "1.jpg", "1.txt", "1.json"), ["0", "1"],
         {"other_member": 2}),
        (named("0.mask.png", "0.image.jpg", "0.txt", "0.json"), ["0"], {"other_member": 1}),
        (named("0.JPG", "0.TXT", "0.JSON", "1.Jpeg.JPG", "1.txt", "1.json"), ["0", "1"], {}),
        (named("0.jpg", "0.txt.gz", "0.json", "1.jpg", "1.TXT.GZ", "1.json"), ["0", "1"], {}),
        ([("0.jpg", JPG), ("0.text", TXT), ("0.json", META), ("1.jpg", JPG), ("1.caption", TXT), ("1.json", META)],
         ["0", "1"], {}),
        (named("0.jpg", "0.txt", "0.json", "0.cls", "0.npy", "._0.jpg", "LICENSE"), ["0"], {"other_member": 4}),
        (named("0.jpg", "0.jpg", "0.txt", "0.json"), ["0"], {"duplicate_member": 1}),
        (named("shoe.1.jpg", "shoe.1.txt", "shoe.2.jpg", "shoe.2.txt", "shoe.2.json"), ["shoe.2"], {"missing_json": 1}),
        (named("0.tiff", "0.txt", "0.json", "1.jpg", "1.txt", "1.json"), ["1"],
         {"other_member": 1, "missing_image": 1}),
    ],
)  # fmt: skip
def test_every_name_is_a_record_or_is_counted(files, keys, counts, tmp_path):
    records, counted = read(in_tar(tmp_path / "x.tar", *files))
    assert [found.key.partition(":")[2] for found in records] == keys
    assert counted == counts
    assert all(found.caption == "a red square" and red_level(found.image) > 190 for found in records)


def test_a_reader_that_goes_on_reads_names_by_the_same_rule(tmp_path):
    """By 0.image.jpg the first dot ends a key; read alone, 7.1.jpg and 7.1.txt would be a record called 7.1."""
    files = named(*(f"{n}.{end}" for n in range(40) for end in ("image.jpg", "txt", "json")))
    files += named(*(f"{n}.1.{end}" for n in range(40, 44) for end in ("jpg", "txt", "json")))
    shard = in_tar(tmp_path / "x.tar", ("9.jpg", JPG), ("9.txt", TXT), ("9.json", META), *files)
    whole = [found.key for found in read(shard)[0]]
    assert len(whole) == 45 and whole[-1] == "x.tar#44:43"
    source = open_source(shard)
    for step in (1, 7, 41, 44):
        found: list[str] = []
        while len(found) < 45 and (part := list(source.read(str(shard), len(found), len(found) + step, math.inf))):
            found += [raw.key for raw in part]
        assert found == whole
    source.counts.clear()
    assert [raw.key for raw in source.read(str(shard), 41, None, math.inf)] == whole[41:] and not source.counts


def test_the_rule_of_a_shard_costs_bounded_memory(tmp_path):
    """A look ahead ends after some files, and after some bytes."""
    many = [("a.b.jpg", JPG), *((f"{n}", b"") for n in range(5000)), ("a.b.txt", TXT), ("a.b.json", META)]
    records, counts = read(in_tar(tmp_path / "x.tar", *many))
    assert len(records) == 1 and counts == {"other_member": 5000}
    large = [("a.b.jpg", JPG + bytes(9 * 2**20)), ("a.txt", TXT), ("a.json", META)]
    records, counts = read(in_tar(tmp_path / "x.tar", *large))
    assert counts == {"missing_json": 1, "missing_image": 1}, "of what was seen, a.b is a name"


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_are_counted(kind, tmp_path):
    with tarfile.open(in_tar(tmp_path / "x.tar", *dotted("0")), "a") as tar:
        for end in ("jpg", "txt", "json"):
            info = tarfile.TarInfo(f"1.{end}")
            info.type, info.linkname = kind, f"0.{end}"
            tar.addfile(info)
    assert len(read(tmp_path / "x.tar")[0]) == 1 and read(tmp_path / "x.tar")[1] == {"other_member": 3}


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("caption", "meta"),
    [
        (BOM + TXT, BOM + META),
        (TXT.decode().encode("utf-16"), META.decode().encode("utf-16")),
        (gzip.compress(BOM + TXT), gzip.compress(META)),
        (BOM, json.dumps({**SAFE, "caption": "\ufeffa red square"}).encode()),
    ],
    ids=["utf-8", "utf-16", "gzip", "caption in the json"],
)
def test_marks_of_byte_order_and_gzip_are_no_part_of_a_text(caption, meta, tmp_path):
    records, counts = read(in_tar(tmp_path / "x.tar", ("0.jpg", JPG), ("0.txt", caption), ("0.json", meta)))
    assert [found.caption for found in records] == ["a red square"] and not counts


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ([("0.jpg", gzip.compress(bytes(2**22))), ("0.txt", TXT), ("0.json", META)], "image_too_large"),
        ([("0.jpg", gzip.compress(JPG)[:40] + b"xx"), ("0.txt", TXT), ("0.json", META)], "bad_image"),
        ([("0.jpg", JPG), ("0.txt", gzip.compress(bytes(2**22))), ("0.json", META)], "missing_caption"),
        ([("0.jpg", JPG), ("0.txt", TXT), ("0.json", gzip.compress(b" " * 2**22 + META))], "bad_json"),
    ],
)
def test_what_is_gzipped_unpacks_to_no_more_than_is_allowed(files, cause, tmp_path):
    records, counts = read(in_tar(tmp_path / "x.tar", *files), limits=FAST._replace(member_bytes=2**20))
    assert not records and counts == {cause: 1}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (gzip.compress(bytes(10240)), "gzipped; a shard is read by ranges of bytes, so unpack it: gzip -d"),
        (b"BZh91AY&SY" + bytes(600), "bzip2 -d"),
        (b"\xfd7zXZ\0" + bytes(600), "xz -d"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "zstd -d"),
        (b"PK\x03\x04" + bytes(600), "zip archive"),
        (b"PAR1" + bytes(600), "parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"<!doctype html><html>" + b" " * 600, "a web page"),
        (b"\0\1" * 600, "not a tar file"),
    ],
    ids=["gzip", "bzip2", "xz", "zstd", "zip", "parquet", "git-lfs", "html", "noise"],
)
def test_what_is_no_tar_is_called_by_its_name(data, says, tmp_path):
    (tmp_path / "x.tar").write_bytes(data)
    source = open_source(tmp_path / "x.tar")
    with pytest.raises(ShardError, match=says) as found:
        list(source.read(source.shards[0], 0, None, math.inf))
    assert found.value.cause == "bad_shard"


def test_a_shard_without_a_record_says_what_is_in_it(tmp_path):
    in_tar(tmp_path / "x.tar", *named("0.npy", "1.npy", "2.cls", "README", ".hidden"))
    source = open_source(tmp_path / "x.tar")
    with pytest.raises(ShardError, match=r"among its 5 files \(\.npy 2, ") as found:
        list(source.read(source.shards[0], 0, None, math.inf))
    assert found.value.cause == "empty_shard" and source.counts == {"other_member": 5}


def test_a_folder_of_packed_shards_says_so(tmp_path):
    (tmp_path / "0.tar.gz").touch()
    with pytest.raises(DataError, match=r"no \.tar, but 1 packed.*0\.tar\.gz(.|\n)*gzip -d"):
        expand_shards(str(tmp_path))
    (tmp_path / "1.TAR").touch()
    assert expand_shards(str(tmp_path)) == [str(tmp_path / "1.TAR")]


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


@pytest.mark.parametrize("road", ["file", "http"])
def test_a_range_goes_on_where_the_last_one_stopped(road, tmp_path):
    """A second range is not reached through the first one's bytes, whoever reads it."""
    shard = good_shard(tmp_path / "x.tar", 30)
    with serve(tmp_path) as server:
        source = open_source(f"{server.url}/ok/x.tar" if road == "http" else shard)
        place = source.shards[0]
        for start, stop in ((0, 10), (10, 20), (20, 40), (40, 50), (10, 12), (5, 5)):
            found = list(source.read(place, start, stop, time.monotonic() + 60))
            assert [raw.index for raw in found] == list(range(start, min(stop, 30)))
            for raw in found:
                assert raw.key == f"x.tar#{raw.index}:{raw.index:06d}"
                assert source.use(raw).caption == f"picture number {raw.index}"
                assert len(picture(kind="PNG")) < raw.size < 2000
    if road == "http":
        size = shard.stat().st_size / 30  # of a record, about
        starts = [int(asked[6:-1]) / size if asked else 0 for _, asked in server.asked]
        assert [round(start / 10) * 10 for start in starts] == [0, 10, 20, 0, 10]


def test_skipped_records_of_a_file_are_not_read(tmp_path):
    """A file of 192 GB that takes no disk: reading it through would take longer than the patience."""
    with open(tmp_path / "x.tar", "wb") as file:
        for n in range(3):
            info = tarfile.TarInfo(f"{n}.jpg")
            info.size = 2**36
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            file.seek(2**36, os.SEEK_CUR)
        file.write(write_tar(tmp_path / "y.tar", record("last")).read_bytes())
    source = open_source(tmp_path / "x.tar", limits=FAST._replace(member_bytes=2**37, shard_bytes=2**40))
    (raw,) = source.read(source.shards[0], 3, None, time.monotonic() + 20)
    assert source.use(raw).caption == "a red square"


@pytest.mark.parametrize("start", [0, 2, 4])
def test_duplicates_are_found_from_wherever_reading_begins(start, tmp_path):
    reds = [picture(colour=(red, 0, 0), kind="PNG") for red in (10, 20, 30)]
    images = [reds[0], reds[1], reds[0], reds[2], reds[1], reds[2]]
    files = [record(f"{n}", "no" if n == 1 else "yes", image) for n, image in enumerate(images)]
    shard = write_tar(tmp_path / "x.tar", *files)
    records, counts = read(shard, start=start, filters=Filters(drop_duplicates=True))
    assert [found.index for found in records] == [n for n in (0, 3) if n >= start]
    first_seen = {"short_caption": 1} if start < 2 else {}
    assert counts == {"duplicate": 3 if start < 4 else 2, **first_seen}
    assert len(read(shard, start=start)[0]) == 6 - start - (start < 2)


def test_duplicates_are_found_over_ranges(tmp_path):
    """Also when a range is read again, and without reading what was seen before."""
    files = [record(f"{n}", "yes", picture(colour=(n % 4, 0, 0), kind="PNG")) for n in range(12)]
    write_tar(tmp_path / "x.tar", *files)
    with serve(tmp_path) as server:
        source = open_source(f"{server.url}/ok/x.tar", filters=Filters(drop_duplicates=True))
        kept = []
        for start in (0, 3, 6, 3, 9, 0):
            for raw in source.read(source.shards[0], start, start + 3, time.monotonic() + 60):
                try:
                    kept += [raw.index] if source.use(raw) else []
                except LeftOut as why:
                    assert str(why) == "duplicate" and raw.size < 1000
        assert kept == [0, 1, 2, 3, 3, 0, 1, 2]
        assert [bool(asked) for _, asked in server.asked] == [False, True, True, True, True, False]


def test_duplicates_are_found_in_a_shard_that_was_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(laion, "SHARDS_WITH_PICTURES", 1)
    shards = [write_tar(tmp_path / f"{n}.tar", *(record(f"{i}") for i in range(4))) for n in range(2)]
    source = open_source(*shards, filters=Filters(drop_duplicates=True))
    for start, stop, shard in ((0, 2, 0), (0, 2, 1), (2, 4, 0), (2, 4, 1)):
        for raw in source.read(source.shards[shard], start, stop, time.monotonic() + 60):
            assert source.use(raw) if raw.index == 0 else raw.data[1], (start, shard, raw.index)


def test_a_shard_that_was_replaced_is_read_from_its_beginning_the_next_time(tmp_path):
    shard = good_shard(tmp_path / "x.tar", 30)
    source = open_source(shard)
    list(source.read(str(shard), 0, 10, time.monotonic() + 60))
    write_tar(shard, *(record(f"other{n}", image=os.urandom(700)) for n in range(30)))
    with pytest.raises(ShardError):
        list(source.read(str(shard), 10, 20, time.monotonic() + 60))
    assert [raw.index for raw in source.read(str(shard), 10, 20, time.monotonic() + 60)] == list(range(10, 20))


def test_columns_have_other_names_elsewhere(tmp_path):
    files = record("k", "from the json", NSFW="NSFW", punsafe="no", TEXT="another text")
    del files["k.txt"]
    source = open_source(write_tar(tmp_path / "x.tar", files), filters=Filters(nsfw_allowed=("no",)))
    (raw,) = source.read(source.shards[0], 0, None, time.monotonic() + 60)
    with pytest.raises(LeftOut, match="nsfw"):
        source.use(raw)
    renamed = open_source(
        *source.shards, filters=Filters(nsfw_allowed=("no",)), columns=Columns(nsfw="punsafe", caption="TEXT")
    )
    assert renamed.use(raw).caption == "another text"


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


# shards


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
