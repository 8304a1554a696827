"""Parquet files by byte ranges: the rows that pyarrow gives, for few bytes; of damaged and hostile ones an error."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import multiprocessing
import random
from collections import Counter
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from volunteer_kit.data.byte_window import HELD, Span, Window
from volunteer_kit.data.parquet import Table
from volunteer_kit.data.parquet_pages import DELTA_BYTE_ARRAY, MAX_HEADER, MAX_SHARED, PageGuard
from volunteer_kit.data.source import ShardError
from volunteer_kit.data.table_columns import suits, values_of
from volunteer_kit.data.thrift import ThriftError, read_struct

COLUMNS = ["caption", "code", "list", "image.bytes", "width"]
WRITERS: dict[str, dict[str, Any]] = {
    "default": {},
    "zstd": {"compression": "zstd"},
    "plain pages of the second version": {"compression": "none", "data_page_version": "2.0"},
    "delta": {
        "compression": "gzip",
        "use_dictionary": False,
        "column_encoding": {"caption": "DELTA_BYTE_ARRAY", "width": "DELTA_BINARY_PACKED"},
    },
}


class File:
    """Bytes of which ranges are asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.asked = data, []

    def open(self, start: int, stop: int) -> BinaryIO:
        self.asked.append(Span(start, stop))
        return io.BytesIO(self.data[start:stop])

    def table(self) -> Table:
        return Table(len(self.data), self.open)

    def rows(self, start: int = 0, stop: int | None = None) -> list[tuple[Any, ...]]:
        table, found = self.table(), []
        columns = [name for name in COLUMNS if name.split(".")[0] in table.columns]
        for at, batch in table.batches(columns, start, table.num_rows if stop is None else stop, self.open):
            values = [values_of(batch.column(n)) for n in range(batch.num_columns)]
            found += [(at + n, *row) for n, row in enumerate(zip(*values, strict=True))]
        return found


def rows_of(count: int) -> pa.Table:
    return pa.table(
        {
            "caption": [f"caption {n % 7} of all" for n in range(count)],
            "code": [random.Random(n).randbytes(32) for n in range(count)],
            "list": [list(range(n % 9)) for n in range(count)],
            "unread": [random.Random(-n).randbytes(3000) for n in range(count)],
            "image": [{"bytes": b"x" * (n % 50), "path": None} for n in range(count)],
            "width": [n for n in range(count)],
        }
    )


def written(rows: pa.Table, group: int = 100, **settings: Any) -> bytes:
    data = io.BytesIO()
    pq.write_table(rows, data, row_group_size=group, **settings)
    return data.getvalue()


@pytest.mark.parametrize("writer", WRITERS)
def test_the_rows_are_those_of_pyarrow(writer: str):
    rows = rows_of(430)
    found = File(written(rows, **WRITERS[writer])).rows(95, 405)
    assert [index for index, *_ in found] == list(range(95, 405))
    for index, caption, code, numbers, image, width in found:
        theirs = {name: rows[name][index].as_py() for name in rows.column_names}
        assert (caption, code, width) == (theirs["caption"], theirs["code"], theirs["width"])
        assert numbers.tolist() == theirs["list"] and image == {"bytes": theirs["image"]["bytes"]}


# fixed_size_list<int16>[2]: [1, 2], null, [3, 4]; pyarrow 18 can neither write nor, by itself, read it
FIXED_SIZE_LIST = base64.b64decode(
    "UEFSMRUAFToVOiwVChUAFQYVBhwAAAACAAAAAxIDAAAAA88DAQAAAAIAAAADAAAABAAAABUEGUw1ABgGc2NoZW1hFQIANQIYBGxp"
    "c3QVAhUGTDwAAAA1BBgEbGlzdBUCABUCJQIYB2VsZW1lbnQlIEysExARAAAAFgYZHBkcJgAcFQIZJQYAGTgEbGlzdARsaXN0B2Vs"
    "ZW1lbnQVABYKFmAWYCYISRwVABUAFQIAPCkmBgQZRgIAAAgAAAAWYBYGJggWYAAZHBgMQVJST1c6c2NoZW1hGPgBLy8vLy83QUFB"
    "QUFRQUFBQUFBQUtBQXdBQmdBRkFBZ0FDZ0FBQUFBQkJBQU1BQUFBQ0FBSUFBQUFCQUFJQUFBQUJBQUFBQUVBQUFBRUFBQUF6UC8v"
    "L3dBQUFSQVVBQUFBSUFBQUFBUUFBQUFCQUFBQUxBQUFBQVFBQUFCc2FYTjBBQUFHQUFnQUJBQUdBQUFBQWdBQUFCQUFGQUFJQUFZ"
    "QUJ3QU1BQUFBRUFBUUFBQUFBQUFCQWhBQUFBQWdBQUFBQkFBQUFBQUFBQUFFQUFBQWFYUmxiUUFBQUFBSUFBd0FDQUFIQUFnQUFB"
    "QUFBQUFCRUFBQUFBPT0AGCBwYXJxdWV0LWNwcC1hcnJvdyB2ZXJzaW9uIDI2LjAuMRkcHAAAAMUBAABQQVIx"
)


VIEWS = [
    (pa.string_view(), ["a view of a longer string", None]),
    (pa.binary_view(), [b"a view of longer bytes", None]),
    (pa.list_view(pa.int16()), [[1, 2], None]),
    (pa.large_list_view(pa.int16()), [[1, 2], None]),
]


def can_be_written(kind: pa.DataType, values: list[Any]) -> bool:
    """pyarrow 18 writes no views."""
    try:
        return bool(written(pa.table({"list": pa.array(values, kind)})))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return False


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (None, [[1, 2], None, [3, 4]]),
        (pa.list_(pa.int16(), 2), [[1, 2], [3, 4]]),
        (pa.large_list(pa.int16()), [[1, 2], None]),
        (pa.large_string(), ["a", None]),
        *(column for column in VIEWS if can_be_written(*column)),
        (pa.dictionary(pa.int32(), pa.string()), ["a", None]),
        (pa.dictionary(pa.int32(), pa.binary()), [b"a", None]),
        (pa.binary(3), [b"abc", None]),
    ],
    ids=str,
)
def test_all_versions_of_pyarrow_read_the_types_that_a_writer_noted(kind: pa.DataType | None, values: list[Any]):
    file = File(FIXED_SIZE_LIST if kind is None else written(pa.table({"list": pa.array(values, kind)})))
    found = [value.tolist() if hasattr(value, "tolist") else value for _, value in file.rows()]
    assert found == values
    wanted = {list: "codes", str: "text", bytes: "bytes"}[type(values[0])]
    assert suits(file.table().columns["list"], wanted)


@pytest.mark.parametrize(
    "kind", [pa.string_view(), pa.binary_view(), pa.binary(1), pa.large_binary(), pa.string()], ids=str
)
def test_columns_of_text_and_bytes_in_memory(kind: pa.DataType):
    values: list[Any] = ["a", None] if "string" in str(kind) else [b"a", None]
    assert suits(kind, "text") and suits(kind, "value") and values_of(pa.array(values, kind), "text") == ["a", None]
    assert suits(kind, "bytes") == suits(kind, "codes") == suits(kind, "image") == ("string" not in str(kind))


@pytest.mark.parametrize(
    "kind", [pa.list_view(pa.int16()), pa.large_list_view(pa.int64()), pa.list_(pa.uint8(), 2)], ids=str
)
def test_columns_of_lists_in_memory(kind: pa.DataType):
    found = values_of(pa.array([[1, 2], None, [3, 4]], kind))
    assert suits(kind, "codes") and not suits(kind, "text")
    assert [row if row is None else row.tolist() for row in found] == [[1, 2], None, [3, 4]]


def test_ranges_are_cut_where_row_groups_end():
    table = File(written(rows_of(430))).table()
    assert table.ranges(1) == table.ranges(100) == [0, 100, 200, 300, 400, 430]
    assert table.ranges(150) == [0, 200, 400, 430] and table.ranges(10**6) == [0, 430]
    assert File(written(rows_of(0))).table().ranges(10) == [0]


def test_only_what_is_wanted_is_fetched():
    file = File(written(rows_of(1000)))
    table = file.table()
    assert sum(stop - start for start, stop in file.asked) < 0.03 * len(file.data), "the footer, once"
    file.asked.clear()
    list(table.batches(["caption", "code"], 200, 400, file.open))
    assert len(file.asked) <= 4 and sum(stop - start for start, stop in file.asked) < 0.02 * len(file.data)


# Windows


def test_a_window_holds_little_and_streams_much():
    file = File(bytes(range(256)) * 2**18)  # 64 MB
    near, far, large = Span(100, 3000), Span(4000, 5000), Span(2**20, 2**20 + HELD + 5)
    with Window(len(file.data), file.open, [large, far, near]) as window:
        for start, stop in (large, far, near):
            window.seek(start)
            while window.tell() < stop:
                at = window.tell()
                size = min(stop - at, 2**20)
                assert window.read(size) == file.data[at : at + size]
        assert file.asked == [large, Span(near.start, far.stop)]
        window.seek(-4, io.SEEK_END)
        assert window.read() == file.data[-4:] and file.asked[-1] == Span(len(file.data) - 4, len(file.data))


def test_a_window_does_not_take_in_a_whole_file():
    with Window(2**40, File(b"").open, []) as window, pytest.raises(ShardError, match="where none should be"):
        window.read()
    with Window(100, File(b"short").open, [Span(0, 100)]) as window, pytest.raises(ShardError, match="ends after 5 b"):
        window.read(10)


# Hostile files


@pytest.mark.parametrize(
    "data, says",
    [
        (b"", "not a parquet file"),
        (b"PAR1PAR1", "not a parquet file"),
        (b"<html>the page you look for</html>", "not a parquet file"),
        (b"PAR1" + bytes(100) + b"PARE", "encrypted"),
        (b"PAR1" + bytes(100) + b"\xff\xff\xff\x7fPAR1", "footer says it has 2147483647 bytes"),
        (b"PAR1" + bytes(100) + b"\x65\0\0\0PAR1", "footer says it has 101 bytes"),
        (b"PAR1" + bytes(100) + b"\x10\0\0\0PAR1", "damaged"),
        (b"PAR1" + b"\x1c" * 100 + b"\x64\0\0\0PAR1", "damaged"),
        (b"PAR1" + b"\x49\xf0" + b"\xff" * 98 + b"\x64\0\0\0PAR1", "damaged"),
    ],
)
def test_footers_that_are_none(data: bytes, says: str):
    with pytest.raises(ShardError, match=says) as told:
        File(data).table()
    assert told.value.cause == "bad_shard" and "\n" not in str(told.value)


def test_a_footer_that_counts_other_rows_than_its_row_groups():
    good = written(rows_of(300), group=300)
    assert File(good).table().num_rows == 300
    at = good.index(b"\x16\xd8\x04", len(good) - 8 - int.from_bytes(good[-8:-4], "little"))  # i64 300, the file's
    with pytest.raises(ShardError, match="says 301 rows"):
        File(good[:at] + b"\x16\xda\x04" + good[at + 3 :]).table()


def test_a_dictionary_that_would_become_gigabytes():
    """Many rows of one long value: a few kB of a file, and as many copies as rows once they are unpacked."""
    long = pa.array(["x" * (MAX_SHARED + 10)])
    rows = pa.table({"caption": pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int32()), long)})
    data = written(rows, group=5000, compression="zstd", dictionary_pagesize_limit=2 * MAX_SHARED, store_schema=False)
    assert len(data) < 100_000
    with pytest.raises(ShardError, match="nothing sane is so large"):
        File(data).rows()


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_a_dictionary_of_pictures_is_read(compression: str):
    """pyarrow looks at a dictionary's size after 1,024 values: all pictures of a row group are one by then."""
    pictures = [random.Random(n).randbytes(100_000) for n in range(130)]
    rows = pa.table({"image": [{"bytes": picture} for picture in pictures], "caption": ["the same"] * 130})
    found = File(written(rows, group=120, compression=compression)).rows()
    assert [(index, image["bytes"]) for index, _, image in found] == list(enumerate(pictures))
    grey = [bytes([n]) * 200_000 for n in range(130)]
    rows = pa.table({"image": [{"bytes": picture} for picture in grey]})
    assert [image["bytes"] for _, image in File(written(rows, group=120, compression=compression)).rows()] == grey


def test_damage_never_ends_the_process():
    """pyarrow aborts on some; in a process of its own, so that this would be told."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        outcomes = pool.submit(_read_damaged, 1200).result()  # pytest ends one that hangs
    assert outcomes["read"] > 100 and outcomes["bad_shard"] > 300
    assert set(outcomes) <= {"read", "bad_shard"}


def _read_damaged(times: int) -> Counter[str]:
    dice, outcomes = random.Random(5), Counter[str]()
    files = [written(rows_of(60).drop_columns(["unread"]), 20, **settings) for settings in WRITERS.values()]
    for _ in range(times):
        data = bytearray(dice.choice(files))
        footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        for _ in range(dice.choice((1, 1, 2, 4))):
            first = dice.choice((0, footer))
            data[dice.randrange(first, len(data) if first else footer)] = dice.choice(
                (0, 127, 255, dice.randrange(256))
            )
        try:
            File(bytes(data)).rows()
            outcomes["read"] += 1
        except ShardError as error:
            outcomes[error.cause] += 1
    return outcomes


# Pages


def number(value: int) -> bytes:
    raw, data = (value << 1) ^ (value >> 63), b""
    while raw > 127:
        data, raw = data + bytes([raw & 127 | 128]), raw >> 7
    return data + bytes([raw])


def header(kind: int = 0, size: int = 10, packed: int = 10, values: int = 1, encoding: int = 0) -> bytes:
    """Of a page, as parquet's thrift has it."""
    about = b"\x15" + number(values) + b"\x15" + number(encoding) + b"\0"
    place = {0: b"\x2c", 2: b"\x4c"}[kind]  # field 5 or 7 after field 3
    return b"\x15" + number(kind) + b"\x15" + number(size) + b"\x15" + number(packed) + place + about + b"\0"


def test_pages_pass_by_in_pieces_of_any_length():
    pages = (header(2) + bytes(10)) + 3 * (header(size=70, values=5) + bytes(10))
    for step in (1, 3, 7, 1000):
        guard = PageGuard(is_repeated=True)
        pulled = sum(guard.pass_by(pages[at : at + step]) for at in range(0, len(pages), step))
        assert pulled == 10 + 8 + 3 * (70 + 8 * 5)


@pytest.mark.parametrize(
    "page, says",
    [
        (header(size=2**31 - 1), "nothing sane"),
        (header(packed=2**31 - 1), "nothing sane"),
        (header(kind=2, size=MAX_SHARED + 1), "nothing sane"),
        (header(size=MAX_SHARED + 1, encoding=DELTA_BYTE_ARRAY), "nothing sane"),
        (header(size=-1), "of no size"),
        (header(packed=-1), "of no size"),
        (header(values=-1), "of no size"),
        (b"\0", "of no size"),
        (b"\x15" + b"\xff" * 20, "cannot be read"),
        (b"\x1f", "cannot be read"),
        (b"\x1c" * 50, "cannot be read"),
        (b"\x18" + b"\xff\xff\xff\x7f" + bytes(MAX_HEADER), "without a header"),
    ],
)
def test_absurd_pages(page: bytes, says: str):
    with pytest.raises(ShardError, match=says):
        PageGuard(is_repeated=False).pass_by(page)


def test_thrift():
    data = b"\x11\x12\x16" + number(-(2**40)) + b"\x18\x02ab" + b"\x19\x25" + number(3) + number(-4)
    data += b"\x17" + bytes(8) + b"\x13\x07" + b"\x0c" + number(30) + b"\x15\x02\0" + b"\0rest"
    expected = {1: True, 2: False, 3: -(2**40), 4: b"ab", 5: [3, -4], 6: 0.0, 7: 7, 30: {1: 1}}
    assert read_struct(data) == (expected, len(data) - 4)
    for cut in range(len(data) - 5):
        with pytest.raises((IndexError, ThriftError)):
            read_struct(data[:cut])


@pytest.mark.parametrize(
    "data",
    [
        b"\x19\xfc" + b"\xff\xff\x7f" + bytes(2**21),  # a byte each, and an object each once they are read
        b"\x1c" * 100,
        b"\x19" * 100,
        b"\x15" + b"\xff" * 100,
    ],
    ids=["many", "deep structs", "deep lists", "long number"],
)
def test_thrift_without_measure(data: bytes):
    with pytest.raises(ThriftError):
        read_struct(data)
