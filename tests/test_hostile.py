"""Hostile shards and servers: one clear line each, memory and disk bounded, nothing executed or written."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import struct
import tarfile
import threading
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.shard_files import FAST, SHORT, answering, good_shard, open_source, read, record, serve, write_tar
from volunteer_kit.data.shards import open_shard
from volunteer_kit.data.source import Limits, ShardError
from volunteer_kit.data.sources import usable_records

# shards


def test_a_pickle_is_not_even_looked_at(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    evil = {f"a.{suffix}": pickle.dumps(Bomb()) for suffix in ("pyd", "pkl", "pickle", "pth", "npy", "ten")}
    records, counts = read(write_tar(tmp_path / "x.tar", {**record("a"), **evil}, record("b")))
    assert len(records) == 2 and counts == {"other_member": 6}
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


@pytest.mark.parametrize("size", ["\xb2", "9" * 5000, "9" * 17, "-1", "", "1e3", "0x10"])
def test_sizes_in_extended_headers_are_numbers_or_nothing(size, tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in record("a").items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        info = tarfile.TarInfo("k.jpg")
        info.pax_headers = {"size": size}
        tar.addfile(info)
        for name, data in record("z").items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    records, counts = read(tmp_path / "x.tar")
    if size == "9" * 17:
        assert len(records) == 1 and counts == {"bad_shard": 1}
    else:
        assert len(records) == 2 and counts == {"missing_json": 1}


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(side: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(10**6)))
    return b"".join((b"\x89PNG\r\n\x1a\n", header, *chunks, pixels, chunk(b"IEND", b"")))


@pytest.mark.parametrize("kind, start", [(b"zTXt", b"k\0\0"), (b"iTXt", b"k\0\1\0\0\0"), (b"iCCP", b"k\0\0")])
def test_what_is_compressed_beside_the_pixels_is_not_unpacked_either(kind, start, tmp_path):
    bomb = png(64, chunk(kind, start + zlib.compress(bytes(10**8))))
    tracemalloc.start()
    records, counts = read(write_tar(tmp_path / "x.tar", record("a", image=bomb), record("b")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts <= Counter(bad_image=1) and records[-1].key.endswith("b") and peak < 10e6


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [8_000, 12_000, 60_000])
def test_a_decompression_bomb_is_not_unpacked(side, tmp_path):
    bomb = png(side)
    tracemalloc.start()
    records, counts = read(write_tar(tmp_path / "x.tar", record("a", image=bomb), record("b")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == {"image_too_large": 1} and len(records) == 1 and peak < 10e6


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
    records, counts = read(f"{server.url}/{road}/x.tar", limits=FAST._replace(retries=9), patience=60)
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
    assert counts == {cause: 1} and time.monotonic() - started < 60


def test_a_body_without_end(server):
    tracemalloc.start()
    started = time.monotonic()
    records, counts = read(f"{server.url}/endless/x", patience=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts == {"unreachable_shard": 1} and time.monotonic() - started < 60 and peak < 20e6
    records, counts = read(f"{server.url}/endless/x", limits=FAST._replace(shard_bytes=2**20))
    assert counts == {"bad_shard": 1}


# answers, byte by byte


ONCE = FAST._replace(retries=0)


class Fate(NamedTuple):
    """What became of a shard."""

    records: int
    cause: str | None
    said: str
    peak: int  # bytes of memory


def fate(url: str, limits: Limits = ONCE, patience: float = 60.0) -> Fate:
    source = open_source(url, limits=limits)
    records, cause, said = 0, None, ""
    tracemalloc.start()
    try:
        for _ in usable_records(source, url, time.monotonic() + patience):
            records += 1
    except ShardError as error:
        cause, said = error.cause, str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Fate(records, cause, said, peak)


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode("latin1")


def chunked(*chunks: bytes, last: bytes = b"0\r\n\r\n") -> bytes:
    return head("Transfer-Encoding: chunked") + b"".join(b"%x\r\n%s\r\n" % (len(c), c) for c in chunks) + last


def without_end(start: bytes, piece: bytes) -> Iterator[bytes]:
    return itertools.chain([start], itertools.repeat(piece))


def lengths(value: str) -> bytes:
    return head(f"Content-Length: {value}")


def part(content_range: str) -> bytes:
    return head(f"Content-Range: {content_range}", status="206 Partial Content")


def redirect(location: str) -> bytes:
    return head(f"Location: {location}", "Content-Length: 0", status="302 Found")


WHOLE = 12  # records of the shard that is asked for
# what the server sends, SHARD standing for the shard; records that are used, cause, words
SHARD = b"<the shard>"
ANSWERS: dict[str, tuple[Iterable[bytes], int, str | None, str]] = {
    # lengths
    "length too large": ([lengths("99999999"), SHARD], WHOLE, None, ""),  # the tar's end mark comes first
    "length too small": ([lengths("9216"), SHARD], 3, "cut_shard", "it ends after 9216 bytes"),
    "length negative": ([lengths("-5"), SHARD], WHOLE, None, ""),
    "length in words": ([lengths("many"), SHARD], WHOLE, None, ""),
    "length of odd digits": ([lengths("\xb2"), SHARD], WHOLE, None, ""),
    "length of many digits": ([lengths("9" * 5000), SHARD], WHOLE, None, ""),
    "two lengths": ([lengths("5\r\nContent-Length: 7"), SHARD], 0, "unreachable_shard", "unmatching"),
    "no length": ([head(), SHARD], WHOLE, None, ""),
    "nothing at all": ([], 0, "unreachable_shard", "closed connection"),
    "an empty file": ([lengths("0")], 0, "empty_shard", "the file is empty"),
    # ranges
    "a part nobody asked for": ([part("bytes 0-9/99"), SHARD], 0, "unreachable_shard", "another range"),
    "a part that makes no sense": ([part("bytes 9-0/5"), SHARD], 0, "unreachable_shard", "makes no sense"),
    "a part in words": ([part("some of it"), SHARD], 0, "unreachable_shard", "makes no sense: 'some of it'"),
    # chunks
    "chunks": ([chunked(SHARD)], WHOLE, None, ""),
    "a chunk of negative length": ([chunked(last=b"-9\r\n"), SHARD], WHOLE, None, ""),
    "a chunk of no length": ([chunked(last=b"zz\r\n"), SHARD], 0, "unreachable_shard", "Protocol"),
    "a last chunk that never ends": (
        without_end(chunked(last=b"0\r\n"), b"Trailer: x\r\n" * 1000), 0, "unreachable_shard", "in time"),
    # headers
    "not HTTP": ([b"SSH-2.0-OpenSSH_9.2\r\n", SHARD], 0, "unreachable_shard", "BadStatusLine"),
    "a status in words": ([b"HTTP/1.1 fine OK\r\n\r\n"], 0, "unreachable_shard", "BadStatusLine"),
    "a huge header": ([head("X: " + "x" * 10**6), SHARD], 0, "unreachable_shard", "header line"),
    "a header without end": (
        without_end(b"HTTP/1.1 200 OK\r\nX: ", b"x" * 65536), 0, "unreachable_shard", "header line"),
    "headers without end": (without_end(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 99), 0, "unreachable_shard", "headers"),
    "patience asked for without end": (
        without_end(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99), 0, "unreachable_shard", "in time"),
    "a reason without end": ([head(status="418 " + "I am " * 10_000)], 0, "unreachable_shard", "HTTP 418 I am"),
    "compressed": ([head("Content-Encoding: gzip"), zlib.compress(bytes(10**6))], 0, "bad_shard", "not a tar"),
    # bodies without end
    "zeros without end": (without_end(head(), bytes(65536)), 0, "empty_shard", "no files"),
    "text without end": (without_end(head(), b"<html>" * 9999), 0, "bad_shard", "not a tar file"),
    "an error page without end": (without_end(head(status="403 No"), b"<html>" * 9999), 0, "unreachable_shard", "403"),
    "a busy page without end": (without_end(head(status="503 No"), b"<html>" * 999), 0, "unreachable_shard", "503"),
    # redirects
    "a redirect without end": ([redirect("/x.tar")], 0, "unreachable_shard", "more than 5 redirects"),
    "a redirect to a file": ([redirect("file:///etc/passwd")], 0, "unreachable_shard", "'file:///etc/passwd'"),
    "a redirect to ftp": ([redirect("ftp://x/y.tar")], 0, "unreachable_shard", "not an http"),
    "a redirect to a script": ([redirect("javascript:x")], 0, "unreachable_shard", "not an http"),
    "a redirect to nonsense": ([redirect("http://[::1")], 0, "unreachable_shard", "IPv6"),
    "a redirect to no port": ([redirect("http://x:99999/")], 0, "unreachable_shard", ""),
    "a redirect in no encoding": ([redirect("http://\xff\xfe/")], 0, "unreachable_shard", ""),
    "a redirect with a body without end": (
        without_end(head("Location: file:///x", status="301 No"), bytes(65536)), 0, "unreachable_shard", "not an http"),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_one_clear_line(name, tmp_path, monkeypatch):
    shard = good_shard(tmp_path / "x.tar", WHOLE).read_bytes()
    pieces, records, cause, words = ANSWERS[name]
    monkeypatch.chdir(tmp_path)

    def answer(number: int, asked: str | None) -> Iterator[bytes]:
        if name == "chunks":
            return iter([chunked(shard[:700], shard[700:])])
        return (shard if piece == SHARD else piece for piece in pieces)

    with answering(answer) as url:
        found = fate(url, SHORT._replace(retries=0) if words == "in time" else ONCE)
    assert (found.records, found.cause) == (records, cause), found
    assert words in found.said and "\n" not in found.said and len(found.said) < 250
    assert found.peak < 10e6
    assert os.listdir(tmp_path) == ["x.tar"]


@pytest.mark.parametrize("start", [b"", head(), head("Transfer-Encoding: chunked")])
def test_a_drip_of_headers_or_chunks_does_not_hold_us(start):
    """Every byte comes in time, and the line never ends."""

    def answer(number: int, asked: str | None) -> Iterator[bytes]:
        yield start
        while not threading.Event().wait(0.02):
            yield b"1"

    with answering(answer) as url:
        found = fate(url, Limits(timeout=0.1, retries=0), patience=100)
    assert found.cause in ("unreachable_shard", "bad_shard") and found.records == 0 and found.peak < 10e6


DATA = bytes(range(256)) * 4


def ranged(first: int, last: int, body: bytes, total: object = len(DATA)) -> bytes:
    return part(f"bytes {first}-{last}/{total}") + body


PARTS: dict[str, tuple[list[bytes], bytes | str]] = {
    # answers, one a request; what comes of asking for the bytes [100, 200)
    "what was asked": ([ranged(100, 199, DATA[100:200])], DATA[100:200]),
    "an unknown whole": ([ranged(100, 199, DATA[100:200], "*")], DATA[100:200]),
    "more bytes than it says": ([ranged(100, 199, DATA[100:])], DATA[100:200]),
    "a longer part": ([ranged(100, 1023, DATA[100:])], DATA[100:200]),
    "two shorter parts": ([ranged(100, 129, DATA[100:]), ranged(130, 199, DATA[130:])], DATA[100:200]),
    "a break": ([ranged(100, 199, DATA[100:150]), ranged(150, 199, DATA[150:200])], DATA[100:200]),
    "the whole file": ([lengths("1024") + DATA], DATA[100:200]),
    "the whole file, unmeasured": ([head() + DATA], DATA[100:200]),
    "the end comes first": ([ranged(100, 149, DATA[100:150], 150)], DATA[100:150]),
    "nothing there": ([head("Content-Range: bytes */100", status="416 No")], b""),
    "too short a file": ([head("Content-Range: bytes */50", status="416 No")], "cut_shard: it ends after 50 bytes"),
    "416 without sense": ([head(status="416 No")], "unreachable_shard: HTTP 416 for a range from byte 100"),
    "416 with a lie": ([head("Content-Range: bytes */999", status="416 No")], "unreachable_shard: HTTP 416"),
    "too short a whole file": ([lengths("50") + DATA[:50]], "cut_shard: it ends after 50 bytes, before byte 100"),
    "too short, unmeasured": ([head() + DATA[:50]] * 2, "unreachable_shard: .* the file has fewer than 100 bytes"),
    "another part": ([ranged(0, 99, DATA)], "unreachable_shard: the server answered with another range"),
    "breaks only": ([ranged(100, 199, DATA[100:110]), ranged(110, 199, b"")], "cut_shard: .* 90 bytes before the end"),
    "another file after a break": (
        [ranged(100, 199, DATA[100:150]), ranged(150, 199, DATA, 500)], "cut_shard: the file changed on the server"),
    "too large a chunk": (
        [chunked(last=b"-9\r\n" + DATA).replace(b"200 OK", b"206 OK\r\nContent-Range: bytes 100-199/*")] * 2,
        "unreachable_shard: .* damaged answer"),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_answers_to_a_range(name):
    answers, expected = PARTS[name]
    ranges = []

    def answer(number: int, asked: str | None) -> list[bytes]:
        ranges.append(asked)
        return [answers[number]]

    with answering(answer) as url:
        shard = open_shard(url, FAST._replace(retries=1), time.monotonic() + 60, 100, 200)
        with shard:
            if isinstance(expected, bytes):
                assert shard.read() == expected
            else:
                cause, _, said = expected.partition(": ")
                with pytest.raises(ShardError, match=said) as error:
                    shard.read()
                assert error.value.cause == cause
    assert len(ranges) == len(answers) and ranges[0] == "bytes=100-199"
