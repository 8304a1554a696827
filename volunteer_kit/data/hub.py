"""Data sets of the Hugging Face Hub: parquet files, read by HTTP range as they are needed."""

from __future__ import annotations

import contextlib
import hashlib
import io
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from .errors import DataError
from .filters import accept
from .hosts import hosts_of, wait_for_a_host
from .http_body import READ_AHEAD, HttpBody
from .http_session import Session
from .hub_access import hub_addresses
from .hub_client import Place, find_place, list_parquet
from .parquet import Table
from .pictures import decode_image
from .settings import Columns, Filters
from .source import LeftOut, Limits, Raw, Record, ShardError
from .table_columns import WANTED, Kind, suits, values_of

if TYPE_CHECKING:
    import pyarrow as pa

KEPT_TABLES = 8  # footers in memory
PLACE_LASTS = 600.0  # s; the Hub signs addresses for an hour
MAX_PICTURES = 100_000  # of one range, among which duplicates are looked for
ROW_SIZE = 1000  # bytes of a row beside its picture, about
DUPLICATE = object()  # stands for a picture that an earlier row of the range has
TOO_LARGE = object()  # stands for a picture that was dropped


class HubSource:
    """The parquet files of one split as a Source; a row has codes (int16 bytes or integers), or else an image.

    Asks the Hub for the list of files, for at most `patience` s. Raises DataError when it cannot be had, or when the
    files lack a column that is needed.
    """

    def __init__(
        self,
        dataset: str,
        *,
        subset: str | None = None,
        split: str = "train",
        columns: Columns,
        image_size: int,
        codes: int,
        filters: Filters,
        limits: Limits,
        counts: Counter[str],
        range_length: int,
        patience: float = 60.0,
    ) -> None:
        self._dataset, self._repo = dataset, dataset.partition("@")[0]
        self._columns, self._filters, self._limits = columns, filters, limits
        self._image_size, self._codes, self._range_length = image_size, codes, range_length
        self.counts = counts
        give_up_at = time.monotonic() + patience
        listing = list_parquet(dataset, subset, split, give_up_at)
        self._commit = listing.commit
        self.shards: Sequence[str] = listing.shards
        self.catalogue = f"hub/{self._repo}@{listing.commit}/{listing.subset}/{split}"
        self._tables: OrderedDict[str, Table] = OrderedDict()
        self._places: dict[str, tuple[Place, float]] = {}
        self._connections = _Connections(hub_addresses(limits.addresses))
        self._check_columns(give_up_at)

    def ranges(self, shard: str, give_up_at: float) -> Sequence[int]:
        """See Source.ranges: row groups, together where they are small."""
        table = self._table(shard, give_up_at)
        if not table.num_rows:
            raise ShardError("empty_shard", "a table without rows")
        return table.ranges(self._range_length)

    def read(self, shard: str, start: int, stop: int | None, give_up_at: float) -> Iterator[Raw]:
        """See Source.read. Duplicates are those of an earlier record of the same range."""
        patience = give_up_at - time.monotonic()
        table = self._table(shard, give_up_at)
        columns = self._wanted(table)
        stop = table.num_rows if stop is None else min(stop, table.num_rows)
        seen: set[bytes] = set()
        cuts = set(table.ranges(self._range_length)) if self._filters.drop_duplicates else set()
        name = shard.rsplit("/", 1)[-1]

        def open_range(first: int, last: int) -> BinaryIO:
            return self._open(shard, first, last, time.monotonic() + patience)

        paths = _paths(table, columns, self._columns)
        with self._forgetting(shard), contextlib.closing(table.batches(paths, start, stop, open_range)) as parts:
            for at, batch in parts:
                for index, row in enumerate(_rows(batch, columns, self._columns), at):
                    pixels = self._pixels(row)
                    if index in cuts:
                        seen.clear()  # where a lease may begin: it is the same for whoever reads on here
                    if self._filters.drop_duplicates and self._is_known(pixels, seen):
                        row = {**row, columns[1]: DUPLICATE}
                        pixels = None
                    size = 0 if pixels is None else memoryview(pixels).nbytes
                    if size > self._limits.member_bytes:  # not to wait in memory for its turn
                        row, size = {**row, columns[1]: TOO_LARGE}, 0
                    yield Raw(index, f"{name}#{index}", row, size + ROW_SIZE)

    def _is_known(self, pixels: bytes | np.ndarray | None, seen: set[bytes]) -> bool:
        """Whether an earlier record of the range has the same picture."""
        if pixels is None:
            return False
        digest = hashlib.blake2b(pixels, digest_size=16).digest()
        if digest in seen:
            return True
        if len(seen) < MAX_PICTURES:
            seen.add(digest)
        return False

    @contextlib.contextmanager
    def _forgetting(self, shard: str) -> Iterator[None]:
        """Where a shard lies, when it cannot be read there: its address may have been valid for a time only."""
        try:
            yield
        except ShardError:
            self._places.pop(shard, None)
            raise

    def use(self, raw: Raw) -> Record:
        """See Source.use."""
        row, columns = raw.data, self._columns
        caption = accept(row.get(columns.caption), row, self._filters, columns)
        if any(row.get(column) is DUPLICATE for column in (columns.code, columns.image)):
            raise LeftOut("duplicate")
        if columns.code in row:
            return Record(caption, codes=_codes(row[columns.code], self._codes))
        data = self._pixels(row)
        if row.get(columns.image) is TOO_LARGE:
            raise LeftOut("image_too_large")
        if data is None:
            raise LeftOut("missing_image")
        image = decode_image(data, self._image_size, self._filters.max_aspect)
        return Record(caption, image, picture=hashlib.blake2b(data, digest_size=16).hexdigest())

    def _pixels(self, row: dict[str, Any]) -> bytes | np.ndarray | None:
        """What a row's picture is made of."""
        code = self._columns.code
        return row[code] if code in row else _image_bytes(row.get(self._columns.image))

    def _table(self, shard: str, give_up_at: float) -> Table:
        if shard not in self._tables:
            place = self._place(shard, give_up_at)
            table = Table(place.size, lambda start, stop: self._open(shard, start, stop, give_up_at))
            self._tables[shard] = table
            while len(self._tables) > KEPT_TABLES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(shard)
        return self._tables[shard]

    def _place(self, shard: str, give_up_at: float) -> Place:
        place, since = self._places.get(shard, (None, 0.0))
        if place is None or time.monotonic() - since > PLACE_LASTS:
            place = find_place(self._repo, self._commit, shard, self._limits, give_up_at)
            if len(self._places) > 1000:
                self._places.clear()
            self._places[shard] = place, time.monotonic()
        return place

    def _open(self, shard: str, start: int, stop: int, give_up_at: float) -> BinaryIO:
        place = self._place(shard, give_up_at)
        wait_for_a_host(hosts_of([place.url]), give_up_at)
        limits = self._limits._replace(addresses=hub_addresses(self._limits.addresses))  # as the session's
        body = HttpBody(place.url, limits, give_up_at, start, stop, self._connections)
        return io.BufferedReader(body, READ_AHEAD)

    def _wanted(self, table: Table) -> list[str]:
        """The columns that are read: the caption, what the picture is made of, and what filters look at. Raises
        ShardError when one is missing."""
        if missing := self._missing(table):
            raise ShardError("bad_shard", f"a table that lacks {self._in_words(table, missing)}")
        pixels = self._columns.code if self._columns.code in table.columns else self._columns.image
        has = table.columns
        known = [name for name in _about_columns(self._columns) if name in has and suits(has[name], "value")]
        return list(dict.fromkeys([self._columns.caption, pixels, *known]))

    def _missing(self, table: Table) -> dict[str, Kind]:
        """Columns that are needed and not there, or there with values of another kind."""
        columns, filters, has = self._columns, self._filters, table.columns
        pixels = columns.code if columns.code in has else columns.image
        needed: dict[str, Kind] = {columns.caption: "text", pixels: "codes" if pixels == columns.code else "image"}
        rest = [columns.nsfw] * (filters.nsfw_allowed is not None)
        rest += [columns.similarity] * (filters.min_similarity is not None)
        rest += [columns.language] * (filters.languages is not None)
        rest += [columns.width, columns.height] * bool(filters.min_size)
        needed |= {name: "value" for name in rest if name not in needed}
        return {name: kind for name, kind in needed.items() if name not in has or not suits(has[name], kind)}

    def _in_words(self, table: Table, missing: dict[str, Kind]) -> str:
        """Names what is missing; where a column is there, of which type, and what it has to hold."""
        has = table.columns
        return ", ".join(
            f"{name} (it is {str(has[name])[:40]}, and has to be {WANTED[kind]})" if name in has else name
            for name, kind in missing.items()
        )

    def _check_columns(self, give_up_at: float) -> None:
        """Of the first shard; one that cannot be read now is left to whoever reads it later."""
        try:
            table = self._table(self.shards[0], give_up_at)
        except ShardError:
            return
        if missing := self._missing(table):
            fields = {name: field for field, name in self._columns}
            there = ", ".join(f"{name[:40]} ({str(kind)[:40]})" for name, kind in list(table.columns.items())[:30])
            raise DataError(
                f"The data set {self._dataset} lacks what this run looks at: {self._in_words(table, missing)}. It has: "
                f"{there}.\n"
                f"1. Say what it calls them, in section data: columns: {{{fields[next(iter(missing))]}: NAME}}\n"
                "2. Or take filters off that it knows nothing about (nsfw_allowed: null takes everything)."
            )


class _Connections(Session):
    """One for all files of a source."""

    def close(self) -> None:
        """Not with one file: they close when the source is forgotten."""


def _about_columns(columns: Columns) -> list[str]:
    return [columns.nsfw, columns.width, columns.height, columns.similarity, columns.language]


def _paths(table: Table, wanted: Sequence[str], columns: Columns) -> list[str]:
    """As pyarrow calls them: of an image only the bytes."""
    is_struct = columns.image in wanted and not suits(table.columns[columns.image], "bytes")
    return [f"{name}.bytes" if name == columns.image and is_struct else name for name in wanted]


def _rows(batch: pa.RecordBatch, columns: Sequence[str], named: Columns) -> Iterator[dict[str, Any]]:
    kinds: dict[str, Kind] = {named.caption: "text", named.code: "codes", named.image: "image"}
    values = [values_of(batch.column(name), kinds.get(name, "value")) for name in columns]
    for row in zip(*values, strict=True):
        yield dict(zip(columns, row, strict=True))


def _codes(value: Any, length: int) -> np.ndarray:
    if value is None:
        raise LeftOut("missing_codes")
    if isinstance(value, bytes):
        if len(value) != 2 * length:
            raise LeftOut("bad_codes")
        return np.frombuffer(value, "<u2").astype(np.int32)
    if not (isinstance(value, np.ndarray) and value.shape == (length,) and value.dtype.kind in "iu"):
        raise LeftOut("bad_codes")
    return value


def _image_bytes(value: Any) -> bytes | None:
    data = value.get("bytes") if isinstance(value, dict) else value
    return data if isinstance(data, bytes) and data else None
