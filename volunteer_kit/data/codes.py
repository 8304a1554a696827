"""Code shards as a Source: image codes that somebody has made once, by `volunteer-kit encode`."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .code_shards import MAX_INDEX, CodeIndex, Stored, checksum, index_name, parse_index, unpack_record
from .filters import accept
from .hosts import hosts_of, wait_for_a_host
from .settings import Columns, Filters
from .shards import catalogue_of, open_shard
from .source import LeftOut, Limits, Raw, Record, ShardError

INDEXES = 16  # kept in memory; one of 10,000 records takes 120 kB there
NO_INDEX = (
    "no index beside it: {index}. "
    "Of image shards, make code shards: volunteer-kit encode SHARDS OUT --run RUN. "
    "Of code shards, copy OUT/*.index.json to the same place as OUT/*.tar"
)


class _Index(NamedTuple):
    """What reading needs of a shard's index."""

    offsets: np.ndarray  # int64 (records + 1,)
    crc32: np.ndarray  # uint32 (records,)


class CodeSource:
    """Shards of `codes` image codes a record, each below `num_codes`. `tokenizer` is the identity of the run's image
    tokenizer: shards of another one are refused; None takes any. A shard may be cut every `range_length` records."""

    def __init__(
        self,
        shards: Sequence[str],
        *,
        codes: int,
        num_codes: int,
        tokenizer: str | None,
        filters: Filters,
        columns: Columns = Columns(),  # noqa: B008  frozen
        limits: Limits = Limits(),  # noqa: B008  a tuple
        counts: Counter[str],
        range_length: int = 512,
    ) -> None:
        self.shards, self.counts, self.catalogue = list(shards), counts, catalogue_of("codes", shards)
        self._codes, self._num_codes, self._tokenizer = codes, num_codes, tokenizer
        self._filters, self._columns, self._limits, self._range_length = filters, columns, limits, range_length
        self._hosts = hosts_of(self.shards)
        self._indexes: OrderedDict[str, _Index] = OrderedDict()
        self._lock = threading.Lock()

    def ranges(self, shard: str, give_up_at: float) -> Sequence[int]:
        """See Source.ranges. Raises ShardError: no index, a damaged one, one of another tokenizer."""
        records = len(self._index(shard, give_up_at).crc32)
        if not records:
            raise ShardError("empty_shard", "a shard without records")
        return [*range(0, records, self._range_length), records]

    def read(self, shard: str, start: int, stop: int | None, give_up_at: float) -> Iterator[Raw]:
        """See Source.read: one request for the bytes of all records asked for. Damaged records are counted."""
        index = self._index(shard, give_up_at)
        records = len(index.crc32)
        stop = records if stop is None else min(stop, records)
        if not 0 <= start < stop:
            return
        offsets = index.offsets[start : stop + 1].tolist()
        wait_for_a_host(self._hosts, give_up_at)
        with open_shard(shard, self._limits, give_up_at, offsets[0], offsets[-1]) as stream:
            for number, (begin, end) in enumerate(zip(offsets, offsets[1:], strict=False), start):
                data = _exactly(stream, begin, end)
                if checksum(data) != index.crc32[number]:
                    self.counts["bad_codes"] += 1
                    continue
                yield Raw(number, _readable(shard, number, data), data, len(data))

    def use(self, raw: Raw) -> Record:
        """See Source.use."""
        stored = _stored(raw.data)
        meta = _metadata(stored.meta)
        caption = accept(meta.get("caption"), meta, self._filters, self._columns)
        if self._filters.drop_duplicates and meta.get("duplicate_of") is not None:
            raise LeftOut("duplicate")
        if len(stored.codes) != 2 * self._codes:
            raise LeftOut("bad_codes")
        codes = np.frombuffer(stored.codes, "<u2").astype(np.int64)  # (N,)
        if codes.max() >= self._num_codes:
            raise LeftOut("codes_out_of_range")
        picture = meta.get("sha256")
        is_hash = isinstance(picture, str) and re.fullmatch("[0-9a-f]{64}", picture)
        return Record(caption, codes=codes, picture=picture if is_hash else None)

    def _index(self, shard: str, give_up_at: float) -> _Index:
        with self._lock:
            if shard in self._indexes:
                self._indexes.move_to_end(shard)
                return self._indexes[shard]
        full = self._fetch(shard, give_up_at)
        self._check(full)
        index = _Index(np.array(full.offsets, np.int64), np.array(full.crc32, np.uint32))
        with self._lock:
            self._indexes[shard] = index
            while len(self._indexes) > INDEXES:
                self._indexes.popitem(last=False)
        return index

    def _fetch(self, shard: str, give_up_at: float) -> CodeIndex:
        if time.monotonic() > give_up_at:
            raise ShardError("unreachable_shard", "no time was left to read its index")
        place = index_name(shard)
        wait_for_a_host(self._hosts, give_up_at)
        try:
            with open_shard(place, self._limits, give_up_at, 0, MAX_INDEX + 1) as stream:
                return parse_index(stream.read(MAX_INDEX + 1))
        except ShardError as error:
            if error.cause == "missing_shard":
                raise ShardError("unindexed_shard", NO_INDEX.format(index=_last_part(place))) from None
            raise ShardError(error.cause, f"its index: {error}") from None
        except ValueError as error:
            raise ShardError("bad_index_shard", f"{_last_part(place)} is no index of code shards: {error}") from None
        except OSError as error:
            raise ShardError("unreachable_shard", f"its index: {error.strerror or error}") from None

    def _check(self, index: CodeIndex) -> None:
        theirs = index.image_tokenizer
        if self._tokenizer is not None and theirs.identity != self._tokenizer:
            raise ShardError(
                "other_tokenizer_shard",
                f"its codes are of the image tokenizer {theirs.name!r} ({theirs.identity}), the run's is "
                f"{self._tokenizer}: use shards that were encoded with --run of this run",
            )
        if (index.codes_per_record, index.num_codes) != (self._codes, self._num_codes):
            raise ShardError(
                "other_tokenizer_shard",
                f"it has {index.codes_per_record} codes a picture out of {index.num_codes}, the run's model reads "
                f"{self._codes} out of {self._num_codes}",
            )


def _exactly(stream: Any, begin: int, end: int) -> bytes:
    try:
        data = stream.read(end - begin)
    except OSError as error:
        raise ShardError("unreachable_shard", error.strerror or str(error)) from None
    if len(data) < end - begin:
        raise ShardError("cut_shard", f"it ends after {begin + len(data)} bytes; its index knows more")
    return data


def _stored(data: bytes) -> Stored:
    try:
        return unpack_record(data)
    except ValueError:
        raise LeftOut("bad_codes") from None


def _metadata(text: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise LeftOut("bad_json")
    return meta


def _last_part(place: str) -> str:
    return place.split("?")[0].rstrip("/").rsplit("/", 1)[-1]


def _readable(shard: str, number: int, data: bytes) -> str:
    """A name people can read: shard, position, and the key found there without anything unprintable."""
    key = data[:100].split(b"\0", 1)[0].decode("ascii", "replace").removesuffix(".codes")
    return f"{_last_part(shard)}#{number}:{re.sub('[^ -~]', '?', key)}"
