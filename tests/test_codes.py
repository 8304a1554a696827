"""Code shards: what they look like, one sample as one range, and everything that can be wrong with them."""

from __future__ import annotations

import io
import json
import math
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import webdataset

from tests.shard_files import SAFE, serve
from volunteer_kit.data import codes as codes_module
from volunteer_kit.data.code_shards import (
    MAX_INDEX,
    MadeFrom,
    checksum,
    dump_index,
    index_name,
    pack_record,
    parse_index,
    stored_metadata,
    unpack_record,
)
from volunteer_kit.data.codes import CodeSource
from volunteer_kit.data.settings import Columns, Filters
from volunteer_kit.data.source import LeftOut, Limits, Raw, ShardError
from volunteer_kit.encode.folder import Target
from volunteer_kit.encode.part import Part
from volunteer_kit.encode.settings import Settings

FAST = Limits(timeout=20, retries=2)
N, K = 16, 300  # codes of a record, different codes
TOKENIZER = "0123456789abcdef" * 2
SETTINGS = Settings("tok", TOKENIZER, 8, N, K, Filters(), Columns(), FAST)
MADE_FROM = MadeFrom(name="x.tar", beginning="0" * 32)


def picture_codes(n: int) -> np.ndarray:
    return (np.arange(N) * 7 + n) % K


def meta(n: int, **more: object) -> dict[str, object]:
    return {"caption": f"picture number {n}", **SAFE, "key": f"{n:06d}", "index": n, "sha256": f"{n:064x}", **more}


def code_shard(folder: Path, count: int, name: str = "00000", settings: Settings = SETTINGS, **more: object) -> Path:
    """A shard as the encoder writes it."""
    folder.mkdir(exist_ok=True)
    part = Part(Target(folder, name), settings, MADE_FROM)
    for n in range(count):
        part.add(n, f"{n:06d}", picture_codes(n), meta(n, **more))
    part.commit([], count)
    part.finish({}, None)
    part.close()
    return folder / f"{name}.tar"


def source(*shards: object, **options: object) -> CodeSource:
    about = {"codes": N, "num_codes": K, "tokenizer": TOKENIZER, "filters": Filters(), "limits": FAST}
    return CodeSource([str(shard) for shard in shards], counts=Counter(), **{**about, **options})


def read_all(found: CodeSource, shard: object, start: int = 0, stop: int | None = None) -> list[Raw]:
    return list(found.read(str(shard), start, stop, math.inf))


def change_index(shard: Path, **fields: object) -> None:
    path = Path(index_name(str(shard)))
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


# the format


@pytest.mark.parametrize(
    "caption", ["a red square", "ein Würfel \N{ELEPHANT}", "half \ud800 a pair", 'quo"te\n\0', "x" * 5000]
)
def test_a_record_comes_back_as_it_went(caption):
    packed = pack_record("000017", [0, 1, 255, 256, 65535], {"caption": caption, "NSFW": "UNLIKELY"})
    assert len(packed) % 512 == 0
    stored = unpack_record(packed)
    assert stored.key == "000017" and np.frombuffer(stored.codes, "<u2").tolist() == [0, 1, 255, 256, 65535]
    assert json.loads(stored.meta) == {"caption": caption.replace("\ud800", "?"), "NSFW": "UNLIKELY"}


def test_webdataset_and_tar_read_a_shard_as_we_do(tmp_path):
    shard = code_shard(tmp_path / "a", 5)
    found = source(shard)
    ours = read_all(found, shard)
    theirs = list(webdataset.WebDataset(str(shard), shardshuffle=False))
    assert [item["__key__"] for item in theirs] == [f"{n:06d}" for n in range(5)]
    for raw, item in zip(ours, theirs, strict=True):
        record = found.use(raw)
        assert np.array_equal(np.frombuffer(item["codes"], "<u2"), record.codes)
        assert json.loads(item["json"])["caption"] == record.caption
    with tarfile.open(shard) as tar:
        assert {(info.mtime, info.uid, info.gid, info.uname, info.mode) for info in tar} == {(0, 0, 0, "", 0o644)}


def test_equal_contents_are_equal_bytes_and_an_index_survives_its_file(tmp_path):
    first, second = code_shard(tmp_path / "a", 7), code_shard(tmp_path / "b", 7)
    assert first.read_bytes() == second.read_bytes()
    text = Path(index_name(str(first))).read_bytes()
    assert text == Path(index_name(str(second))).read_bytes() == dump_index(parse_index(text))


def test_keys_that_webdataset_would_misread_or_mix_are_replaced(tmp_path):
    part = Part(Target(tmp_path, "a"), SETTINGS, MADE_FROM)
    for n, key in enumerate(["plain", "plain", "with.dots", "../up", "folder/in", "", "x" * 90, "000000001", "ü"]):
        part.add(n, key, picture_codes(n), meta(n))
    part.commit([], 9)
    part.finish({}, None)
    part.close()
    keys = [item["__key__"] for item in webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)]
    assert keys[:6] == ["plain", "000000001", "000000002", "up", "in", "000000005"]
    assert keys[6:] == ["000000006", "000000007", "000000008"]  # its own name was taken by the second


def test_only_plain_metadata_of_bounded_length_is_stored():
    columns = ("NSFW", "width", "similarity", "LANGUAGE", "absent")
    wild = {"NSFW": "UNLIKELY", "width": float("nan"), "similarity": 0.3, "LANGUAGE": "x" * 5000, "other": 1}
    assert stored_metadata(wild, columns) == {"NSFW": "UNLIKELY", "similarity": 0.3}
    assert stored_metadata({"NSFW": ["UNLIKELY"], "width": None}, columns) == {}


@pytest.mark.parametrize(
    ("shard", "index"),
    [
        ("a/00000.tar", "a/00000.index.json"),
        ("https://host/a/00000.tar?key=x.tar", "https://host/a/00000.index.json?key=x.tar"),
        ("odd?name.tar", "odd?name.index.json"),
        ("a.tgz", "a.tgz.index.json"),
    ],
)
def test_where_an_index_lies(shard, index):
    assert index_name(shard) == index


# reading


def test_codes_captions_and_pictures_come_back(tmp_path):
    shard = code_shard(tmp_path / "a", 5)
    found = source(shard)
    records = [found.use(raw) for raw in read_all(found, shard)]
    assert [record.caption for record in records] == [f"picture number {n}" for n in range(5)]
    assert all(np.array_equal(record.codes, picture_codes(n)) for n, record in enumerate(records))
    assert records[3].codes.dtype == np.int64 and records[3].image is None and records[3].picture == f"{3:064x}"
    raw = read_all(found, shard, 3, 4)
    assert [(each.index, each.key) for each in raw] == [(3, "00000.tar#3:000003")] and raw[0].size == 2048


def test_a_shard_is_cut_into_ranges(tmp_path):
    shard = code_shard(tmp_path / "a", 10)
    assert source(shard, range_length=4).ranges(str(shard), math.inf) == [0, 4, 8, 10]
    assert source(shard, range_length=5).ranges(str(shard), math.inf) == [0, 5, 10]
    found = source(shard)
    assert found.ranges(str(shard), math.inf) == [0, 10]
    assert [raw.index for raw in read_all(found, shard, 8, 99)] == [8, 9]
    assert read_all(found, shard, 10, 20) == read_all(found, shard, 4, 4) == []


def test_one_sample_is_one_range_and_the_index_is_fetched_once(tmp_path):
    shard = code_shard(tmp_path, 10)
    with serve(tmp_path) as server:
        url = f"{server.url}/ok/00000.tar"
        found = source(url)
        assert found.ranges(url, math.inf) == [0, 10]
        (raw,) = read_all(found, url, 7, 8)
        assert [r.index for r in read_all(found, url, 2, 6)] == [2, 3, 4, 5]
        asked = list(server.asked)
    assert found.use(raw).caption == "picture number 7"
    assert [path for path, _ in asked] == ["/ok/00000.index.json", "/ok/00000.tar", "/ok/00000.tar"]
    assert asked[1][1] == f"bytes={7 * 2048}-{8 * 2048 - 1}" and asked[2][1] == f"bytes={2 * 2048}-{6 * 2048 - 1}"
    assert raw.data == shard.read_bytes()[7 * 2048 : 8 * 2048]


def test_indexes_of_many_shards_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr(codes_module, "INDEXES", 2)
    shards = [code_shard(tmp_path, 2, f"{n:05d}") for n in range(4)]
    found = source(*shards)
    with serve(tmp_path) as server:
        urls = [f"{server.url}/ok/{shard.name}" for shard in shards]
        for n in (0, 1, 0, 2, 0, 3, 1):
            found.ranges(urls[n], math.inf)
        asked = [path.removeprefix("/ok/")[:5] for path, _ in server.asked]
    assert asked == ["00000", "00001", "00002", "00003", "00001"]  # those used last are kept


def test_the_same_list_has_the_same_catalogue_wherever_it_lies(tmp_path):
    here, there = source("/a/00000.tar", "/a/00001.tar"), source("http://h/x/00000.tar?k", "http://h/x/00001.tar?k")
    assert here.catalogue == there.catalogue != source("/a/00000.tar", "/a/00002.tar").catalogue


@pytest.mark.parametrize(
    ("more", "filters", "cause"),
    [
        ({"NSFW": "NSFW"}, Filters(), "nsfw"),
        ({"NSFW": "NSFW"}, Filters(nsfw_allowed=None), None),
        ({"caption": "ab"}, Filters(), "short_caption"),
        ({"caption": None}, Filters(), "missing_caption"),
        ({"original_width": 999}, Filters(), "aspect"),
        ({"similarity": 0.2}, Filters(min_similarity=0.3), "similarity"),
        ({"duplicate_of": 0}, Filters(), None),
        ({"duplicate_of": 0}, Filters(drop_duplicates=True), "duplicate"),
    ],
)
def test_filters_apply_to_code_shards_too(tmp_path, more, filters, cause):
    shard = code_shard(tmp_path / "a", 1, **more)
    found = source(shard, filters=filters)
    (raw,) = read_all(found, shard)
    if cause is None:
        assert found.use(raw).codes is not None
    else:
        with pytest.raises(LeftOut, match=f"^{cause}$"):
            found.use(raw)


def test_renamed_columns_are_found(tmp_path):
    shard = code_shard(tmp_path / "a", 1, rating="unsafe")
    found = source(shard, columns=Columns(nsfw="rating"))
    with pytest.raises(LeftOut, match="nsfw"):
        found.use(read_all(found, shard)[0])


# what strangers send


def hostile_tar(*members: tuple[str, bytes, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, kind, body in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname = kind, len(body) if kind == tarfile.REGTYPE else 0, "/etc/passwd"
            tar.addfile(info, io.BytesIO(body))
    return data.getvalue()[: 1024 * len(members)]


CODES = picture_codes(0).astype("<u2").tobytes()
SHORT = json.dumps(meta(0)).encode()
REG = tarfile.REGTYPE


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        (pack_record("a", picture_codes(0)[:-1], meta(0)), "bad_codes"),
        (pack_record("a", [], meta(0)), "bad_codes"),
        (pack_record("a", [K] * N, meta(0)), "codes_out_of_range"),
        (hostile_tar(("a.codes", REG, CODES), ("b.json", REG, SHORT)), "bad_codes"),
        (hostile_tar(("a.json", REG, SHORT), ("a.codes", REG, CODES)), "bad_codes"),
        (hostile_tar(("a.codes", REG, CODES), ("a.pickle", REG, b"cos\nsystem\n")), "bad_codes"),
        (hostile_tar(("a.codes", tarfile.SYMTYPE, b""), ("a.json", REG, SHORT)), "bad_codes"),
        (hostile_tar(("a.codes", REG, CODES), ("a.json", tarfile.LNKTYPE, b"")), "bad_codes"),
        (hostile_tar(("a.codes", REG, CODES)), "bad_codes"),
        (hostile_tar(("a.codes", REG, CODES), ("a.json", REG, b"[1]")), "bad_json"),
        (hostile_tar(("a.codes", REG, CODES), ("a.json", REG, b"{" * 500)), "bad_json"),
        (hostile_tar(("a.codes", REG, CODES), ("a.json", REG, b"\xff")), "bad_json"),
        (bytes(2048), "bad_codes"),
        (b"x" * 2048, "bad_codes"),
        (b"", "bad_codes"),
        (pack_record("a", picture_codes(0), meta(0)) + bytes(512), "bad_codes"),
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_left_out(record, cause):
    with pytest.raises(LeftOut, match=f"^{cause}$"):
        source("x.tar").use(Raw(0, "x", record, len(record)))


def test_a_picture_is_named_by_a_hash_or_not_at_all():
    record = pack_record("a", picture_codes(0), meta(0, sha256="../../etc"))
    assert source("x.tar").use(Raw(0, "x", record, len(record))).picture is None


def test_unprintable_keys_do_not_reach_a_terminal(tmp_path):
    shard = code_shard(tmp_path / "a", 1)
    data = bytearray(shard.read_bytes())
    data[:6] = b"\x1b[31m\n"
    shard.write_bytes(data)
    change_index(shard, crc32=[checksum(bytes(data[:2048]))])
    assert read_all(source(shard), shard)[0].key == "00000.tar#0:?[31m?"


def test_a_damaged_record_is_counted_and_the_others_are_read(tmp_path):
    shard = code_shard(tmp_path / "a", 6)
    data = bytearray(shard.read_bytes())
    data[2 * 2048 + 600] ^= 1
    shard.write_bytes(data)
    found = source(shard)
    assert [raw.index for raw in read_all(found, shard)] == [0, 1, 3, 4, 5]
    assert found.counts == {"bad_codes": 1}


def test_what_comes_before_a_cut_is_read(tmp_path):
    shard = code_shard(tmp_path / "a", 6)
    shard.write_bytes(shard.read_bytes()[: 3 * 2048 + 100])
    found, got = source(shard), []
    with pytest.raises(ShardError, match="its index knows more") as caught:
        for raw in found.read(str(shard), 1, 6, math.inf):
            got.append(raw.index)
    assert caught.value.cause == "cut_shard" and got == [1, 2]


def test_a_cut_over_http_is_told_too(tmp_path):
    shard = code_shard(tmp_path, 6)
    shard.write_bytes(shard.read_bytes()[: 3 * 2048 + 100])
    with serve(tmp_path) as server:
        url, got = f"{server.url}/ok/00000.tar", []
        with pytest.raises(ShardError) as caught:
            for raw in source(url).read(url, 1, 6, math.inf):
                got.append(raw.index)
    assert caught.value.cause in ("cut_shard", "unreachable_shard") and got == [1, 2]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"version": 2}, "version"),
        ({"records": 5}, "as many checksums as records"),
        ({"records": 10**9}, "less than or equal"),
        ({"records": -1}, "greater than or equal"),
        ({"crc32": [0, 1, 2]}, "as many checksums as records"),
        ({"crc32": [0, 1, 2, 2**32]}, "crc32.3"),
        ({"offsets": [0, 2048, 4096, 4096, 8192]}, "offsets rise"),
        ({"offsets": [0, 4096, 2048, 6144, 8192]}, "offsets rise"),
        ({"offsets": [512, 4096, 6144, 8192, 10240]}, "offsets rise"),
        ({"offsets": [0, 2048, 4096, 6144, 2**40], "size": 2**40 + 1024}, "offsets rise"),
        ({"offsets": [0, 2048, 4096, 6144, 10**30]}, "offsets.4"),
        ({"offsets": [0, 2048, 4096, 6144, "8192"]}, "as it is"),
        ({"offsets": []}, "offsets"),
        ({"size": 7}, "the tar's end mark"),
        ({"sha256": "x"}, "sha256"),
        ({"num_codes": 70_000}, "num_codes"),
        ({"image_tokenizer": None}, "image_tokenizer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_index_that_lies_is_refused(tmp_path, fields, words):
    shard = code_shard(tmp_path / "a", 4)
    change_index(shard, **fields)
    if words == "as it is":  # a number in quotes means the same
        assert source(shard).ranges(str(shard), math.inf) == [0, 4]
        return
    with pytest.raises(ShardError, match="00000.index.json is no index of code shards") as caught:
        source(shard).ranges(str(shard), math.inf)
    assert caught.value.cause == "bad_index_shard" and words in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"<html>404</html>", b" " * (MAX_INDEX + 1)],
    ids=lambda d: repr(d[:8]),
)
def test_what_is_no_index_is_refused(tmp_path, data):
    shard = code_shard(tmp_path / "a", 4)
    Path(index_name(str(shard))).write_bytes(data)
    with pytest.raises(ShardError) as caught:
        read_all(source(shard), shard)
    assert caught.value.cause == "bad_index_shard" and len(str(caught.value)) < 400


def test_an_endless_index_is_not_read_to_its_end(tmp_path):
    with serve(tmp_path) as server:
        url = f"{server.url}/endless/00000.tar"
        with pytest.raises(ShardError) as caught:
            source(url).ranges(url, math.inf)
    assert caught.value.cause == "bad_index_shard"


def test_a_shard_without_an_index_says_how_to_make_one(tmp_path):
    shard = code_shard(tmp_path / "a", 4)
    Path(index_name(str(shard))).unlink()
    with pytest.raises(ShardError, match="volunteer-kit encode") as caught:
        source(shard).ranges(str(shard), math.inf)
    assert caught.value.cause == "unindexed_shard" and "00000.index.json" in str(caught.value)


def test_codes_of_another_tokenizer_are_refused_and_both_are_named(tmp_path):
    shard = code_shard(tmp_path / "a", 4, settings=SETTINGS._replace(identity="f" * 32))
    with pytest.raises(ShardError) as caught:
        read_all(source(shard), shard)
    assert caught.value.cause == "other_tokenizer_shard"
    assert "f" * 32 in str(caught.value) and TOKENIZER in str(caught.value)
    assert len(read_all(source(shard, tokenizer=None), shard)) == 4


@pytest.mark.parametrize("sizes", [{"codes": 25}, {"num_codes": 512}])
def test_codes_of_other_sizes_are_refused(tmp_path, sizes):
    shard = code_shard(tmp_path / "a", 4)
    with pytest.raises(ShardError, match="16 codes a picture out of 300") as caught:
        read_all(source(shard, tokenizer=None, **sizes), shard)
    assert caught.value.cause == "other_tokenizer_shard"


def test_an_empty_shard_is_told(tmp_path):
    shard = code_shard(tmp_path / "a", 0)
    with pytest.raises(ShardError) as caught:
        source(shard).ranges(str(shard), math.inf)
    assert caught.value.cause == "empty_shard"


def test_nothing_is_asked_for_when_the_time_is_over(tmp_path):
    code_shard(tmp_path, 4)
    with serve(tmp_path) as server:
        url = f"{server.url}/ok/00000.tar"
        with pytest.raises(ShardError, match="no time"):
            source(url).ranges(url, 0.0)
        assert server.asked == []
