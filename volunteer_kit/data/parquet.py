"""A parquet file that is read by byte ranges: only the columns and row groups that are wanted, in bounded memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from .byte_window import HELD, Span, Window
from .parquet_pages import MAX_PAGE, MAX_PULLED, MAX_SHARED, PageGuard
from .source import ShardError
from .thrift import ThriftError, read_struct

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet as pq

MAX_FOOTER = 12 * 2**20  # bytes
MAX_ROW_GROUPS = 100_000
MAX_COLUMNS = 10_000
MAX_ROWS = 2**31
TAIL = 64 * 2**10  # bytes fetched at once in the hope that the whole footer is among them
BATCH = 4 * 2**20  # bytes decoded at once, about
MAX_LARGE = 128 * 2**20  # bytes of a batch whose rows may all have one large value
MAX_REPEATED = 32  # times that a large value may be there, on average; else a few kB cost minutes of copying
BATCH_ROWS = 64  # many rows may share one value of MAX_SHARED bytes, and are then unpacked to as many copies

# The key, as Thrift writes it, under which a writer notes its own types. They are not parquet's: pyarrow 18 fails on a
# fixed_size_list with a null row, and versions differ in views of strings. Under another key they are not looked at.
WRITERS_TYPES, NOT_LOOKED_AT = b"\x18\x0cARROW:schema", b"\x18\x0cwriters-note"

# What bad bytes lead to.
WRONG = (ValueError, TypeError, LookupError, AttributeError, OverflowError, MemoryError, RecursionError)

Opener = Callable[[int, int], BinaryIO]  # gives the bytes [start, stop) of the file


class _RowGroup(NamedTuple):
    rows: int
    columns: list[Span]
    sizes: list[int]  # bytes of the columns, unpacked
    dictionaries: list[int]  # bytes of their dictionaries, unpacked, about; 0 for none


class Table:
    """The rows of a parquet file of `size` bytes. Raises ShardError for a footer that is damaged or absurd."""

    def __init__(self, size: int, open_range: Opener) -> None:
        import pyarrow as pa

        self._size = size
        try:
            footer = _read_footer(size, open_range)
            _parse(footer)  # first: pyarrow is strict about what must be there
            about = read_struct(footer)[0]
            self._groups = _row_groups(about)
            self._footer = _parse(_by_parquets_types(footer, about))
            fields = self._footer.schema.to_arrow_schema()
            self.columns = {field.name: field.type for field in fields}
        except (pa.ArrowException, OSError, *WRONG) as error:
            raise _damaged(error) from None
        if len(self.columns) != len(fields):
            raise ShardError("bad_shard", "a parquet file with two columns of one name")
        if any(len(group.columns) != self._footer.num_columns for group in self._groups):
            raise ShardError("bad_shard", "a damaged parquet file: row groups of other columns than its own")
        self._ends = list(itertools.accumulate((group.rows for group in self._groups), initial=0))
        self.num_rows = self._ends[-1]
        if self.num_rows > MAX_ROWS or self.num_rows != self._footer.num_rows:
            raise ShardError("bad_shard", f"a parquet file that says {self._footer.num_rows} rows, and has others")

    def ranges(self, length: int) -> list[int]:
        """Where the rows can be cut: at ends of row groups, no range shorter than `length` but the last."""
        cuts = [0]
        for end in self._ends:
            if end - cuts[-1] >= length:
                cuts.append(end)
        return cuts if cuts[-1] == self.num_rows else [*cuts, self.num_rows]

    def batches(
        self, columns: Sequence[str], start: int, stop: int, open_range: Opener
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows [start, stop) of some columns ("image.bytes" is a part of one), as pieces and their first row's
        number. Raises ShardError."""
        import pyarrow as pa

        chunks = [n for n, path in enumerate(self._paths()) if any(f"{path}.".startswith(f"{c}.") for c in columns)]
        for groups in self._parcels(chunks, start, stop):
            try:
                with contextlib.closing(self._parcel(groups, chunks, columns, open_range)) as batches:
                    for at, batch in batches:
                        first, last = max(start - at, 0), min(stop - at, batch.num_rows)
                        if first < last:
                            yield at + first, batch.slice(first, last - first)
                        if at + batch.num_rows >= stop:
                            return
            except (pa.ArrowException, OSError, *WRONG) as error:
                raise _damaged(error) from None

    def _parcels(self, chunks: Sequence[int], start: int, stop: int) -> Iterator[list[int]]:
        """Row groups that hold some of the rows [start, stop), together as far as they can be fetched at once."""
        groups: list[int] = []
        held = 0
        for group in range(len(self._ends) - 1):
            if self._ends[group + 1] <= start or self._ends[group] >= min(stop, self._ends[group + 1]):
                continue
            size = sum(span.stop - span.start for span in self._spans(group, chunks))
            if groups and held + size > HELD:
                yield groups
                groups, held = [], 0
            groups.append(group)
            held += size
        if groups:
            yield groups

    def _parcel(
        self, groups: list[int], chunks: Sequence[int], columns: Sequence[str], open_range: Opener
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        from pyarrow import parquet as pq

        spans = [span for group in groups for span in self._spans(group, chunks)]
        repeated = [self._footer.schema.column(n).max_repetition_level > 0 for _ in groups for n in chunks]
        at = self._ends[groups[0]]
        with Window(self._size, open_range, spans) as window:
            rows = self._batch_rows(groups, chunks)
            most = MAX_SHARED if rows == BATCH_ROWS else MAX_PAGE if rows == 1 else max(MAX_SHARED, MAX_LARGE // rows)
            pages = _Watched(spans, repeated, most)
            window.watch = pages.pass_by
            file = pq.ParquetFile(window, metadata=self._footer, pre_buffer=False, buffer_size=2**20)
            unpacked = sum(self._groups[group].sizes[n] for group in groups for n in chunks)
            left = MAX_REPEATED * unpacked + MAX_LARGE
            for batch in file.iter_batches(rows, groups, list(columns), use_threads=False):
                pages.pulled = 0
                left -= batch.nbytes
                if left < 0 and rows < BATCH_ROWS:
                    raise ShardError(
                        "bad_shard",
                        f"rows of a parquet file become {MAX_REPEATED} times what it says: nothing sane is so large",
                    )
                yield at, batch
                at += batch.num_rows
        if at != self._ends[groups[-1] + 1]:
            raise ShardError("bad_shard", "a parquet file with fewer rows than it says")

    def _paths(self) -> list[str]:
        return [self._footer.schema.column(n).path for n in range(self._footer.num_columns)]

    def _spans(self, group: int, chunks: Sequence[int]) -> list[Span]:
        """Where some columns of a row group lie in the file."""
        spans = [self._groups[group].columns[n] for n in chunks]
        ordered = sorted(spans)
        if any(one.stop > other.start for one, other in zip(ordered, ordered[1:], strict=False)):
            raise ShardError("bad_shard", "a damaged parquet file: columns that overlap")
        if not all(4 <= span.start <= span.stop <= self._size - 8 for span in spans):
            raise ShardError("bad_shard", "a damaged parquet file: a column outside the file")
        return spans

    def _batch_rows(self, groups: list[int], chunks: Sequence[int]) -> int:
        size = sum(self._groups[group].sizes[n] for group in groups for n in chunks)
        rows = self._ends[groups[-1] + 1] - self._ends[groups[0]]
        shared = max((self._groups[group].dictionaries[n] for group in groups for n in chunks), default=0)
        most = BATCH_ROWS if shared <= MAX_SHARED else MAX_LARGE // shared  # the longest value may be as long as all
        return max(1, min(BATCH_ROWS, BATCH * rows // max(size, 1), most))


class _Watched:
    """A guard for every column of every row group of a parcel, and what they have pulled for one batch."""

    def __init__(self, spans: Sequence[Span], repeated: Sequence[bool], max_shared: int) -> None:
        guards = zip(spans, repeated, strict=True)
        self._guards = {  # by the byte they wait for
            span.start: (span.stop, PageGuard(many, max_shared)) for span, many in guards
        }
        self.pulled = 0  # bytes

    def pass_by(self, start: int, data: bytes) -> None:
        if start not in self._guards:
            return
        stop, guard = self._guards.pop(start)
        self.pulled += guard.pass_by(data[: stop - start])
        if start + len(data) < stop:
            self._guards[start + len(data)] = stop, guard
        if self.pulled > MAX_PULLED:
            raise ShardError("bad_shard", f"a few rows of a parquet file become more than {MAX_PULLED} bytes")


def _read_footer(size: int, open_range: Opener) -> bytes:
    tail = _fetch(open_range, max(0, size - TAIL), size)
    if size < 12 or tail[-4:] != b"PAR1":
        raise ShardError("bad_shard", "not a parquet file, or one that is encrypted")
    length = int.from_bytes(tail[-8:-4], "little")
    if length > min(MAX_FOOTER, size - 12):
        raise ShardError("bad_shard", f"a parquet file whose footer says it has {length} bytes")
    if length + 8 > len(tail):
        tail = _fetch(open_range, size - length - 8, size - len(tail)) + tail
    return tail[-length - 8 : -8]


def _parse(footer: bytes) -> pq.FileMetaData:
    import pyarrow as pa
    from pyarrow import parquet as pq

    alone = b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"  # pyarrow takes it for a file without data
    limits = {"thrift_string_size_limit": MAX_FOOTER, "thrift_container_size_limit": MAX_ROW_GROUPS}
    return pq.ParquetFile(pa.BufferReader(alone), **limits).metadata


def _by_parquets_types(footer: bytes, about: dict[int, Any]) -> bytes:
    """The footer without the types that the writer noted beside parquet's own."""
    at = footer.rfind(WRITERS_TYPES)
    if at < 0 or not any(entry.get(1) == b"ARROW:schema" for entry in about.get(5, [])):
        return footer
    return footer[:at] + NOT_LOOKED_AT + footer[at + len(WRITERS_TYPES) :]


def _row_groups(about: dict[int, Any]) -> list[_RowGroup]:
    """Read here, since pyarrow (26) ends the process when it is asked about a column of a damaged footer."""
    groups = []
    for group in about.get(4, []):
        places, sizes, dictionaries = [], [], []
        for column in group[1]:
            about = column[3]
            start = about[11] if 0 < about.get(11, 0) < about[9] else about[9]  # dictionaries come first
            places.append(Span(start, start + about[7] if 1 not in column else -1))  # 1: it is in another file
            sizes.append(about[6])
            growth = 2 * about[6] / about[7] if about[6] > about[7] > 0 else 1.0  # twice the column's, to be sure
            dictionaries.append(int((about[9] - start) * growth))
        groups.append(_RowGroup(group[3], places, sizes, dictionaries))
        if not 0 <= group[3] <= MAX_ROWS or len(places) > MAX_COLUMNS or len(groups) > MAX_ROW_GROUPS:
            raise ThriftError(f"row group {len(groups)} of {group[3]} rows and {len(places)} columns")
    return groups


def _fetch(open_range: Opener, start: int, stop: int) -> bytes:
    with open_range(start, stop) as stream:
        data = stream.read(stop - start)
    if len(data) != stop - start:
        raise ShardError("cut_shard", f"it ends after {start + len(data)} bytes, before byte {stop}")
    return data


def _damaged(error: Exception) -> ShardError:
    """pyarrow's own words say something, those of Python about our reading do not."""
    line = "" if isinstance(error, WRONG[1:]) else ": " + (str(error).splitlines() or [""])[0][:160]
    return ShardError("bad_shard", f"a damaged parquet file{line}")
