"""A shard's records in blocks that are shuffled together: read once, in order, and decoded when their turn comes."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from .encoding import Coded, Contents, pack, unpack
from .source import Raw, ShardError, Source

FIRST_BLOCK = 64  # records; blocks double from here within a range, so that the first batch comes soon
BLOCK_BYTES = 64 * 2**20  # of raw records held for one block


class Cache(Protocol):
    """Bytes by name, as many as fit. `outlives`: also those that an earlier process has put there."""

    outlives: bool

    def get(self, key: str) -> bytes | None: ...

    def put(self, key: str, value: bytes) -> None: ...


class Block(NamedTuple):
    """Records read one after the other, as they were read or coded already."""

    name: str  # in the caches
    stop: int  # index where the next block begins
    records: int  # how many were read
    ends: bool  # the shard, of which nobody knew the length, has no more
    raws: list[Raw]  # empty if they are coded already
    coded: list[Coded] | None = None
    left_out: Counter[str] = Counter()  # of what is coded already, and was not told yet


class BlockReader:
    """The blocks of one shard, from memory or disk where they are, else from the source.

    :param last: index after the last record to read; None: to the shard's end
    :param give_up_at: asked before each attempt to read, time.monotonic()
    :param caches: looked into in this order
    """

    def __init__(
        self,
        source: Source,
        shard: str,
        last: int | None,
        give_up_at: Callable[[], float],
        caches: Sequence[Cache] = (),
    ) -> None:
        self._source, self._shard, self._last = source, shard, last
        self._identity = _identity(shard) if caches else shard
        self._give_up_at, self._caches = give_up_at, caches
        self._records: Iterator[Raw] = iter(())
        self._ahead: Raw | None = None  # read, and not yet in a block
        self._at = -1  # index from which the iterator goes on
        self.failure: ShardError | None = None  # why the shard could not be read further

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The blocks of the range [start, stop); they depend on nothing but the range and what is in it. After a
        `failure` comes no more."""
        size = FIRST_BLOCK
        while start < stop and self.failure is None:
            end = min(start + size, stop)
            block = self._cached(start, end) or self._read(start, end)
            yield block
            if block.ends:
                return
            start, size = block.stop, 2 * size

    def keep(self, block: Block, coded: list[Coded], left_out: Counter[str]) -> None:
        """Remember what was usable of a block, once all of it was looked at."""
        coded = sorted(coded, key=lambda one: one.at)
        data = pack(Contents(block.records, block.ends, block.stop, left_out, coded))
        for cache in self._caches:
            cache.put(block.name, data)

    def close(self) -> None:
        if hasattr(self._records, "close"):
            self._records.close()
        self._records, self._at = iter(()), -1

    def _name(self, start: int, end: int) -> str:
        return f"{self._identity}:{start}:{end}"

    def _cached(self, start: int, end: int) -> Block | None:
        name = self._name(start, end)
        for number, cache in enumerate(self._caches):
            if (data := cache.get(name)) is not None:
                try:
                    records, ends, stop, left_out, coded = unpack(data)
                except ValueError:
                    continue
                for quicker in self._caches[:number]:
                    quicker.put(name, data)
                return Block(name, stop, records, ends, [], coded, left_out if cache.outlives else Counter())
        return None

    def _read(self, start: int, end: int) -> Block:
        if self._at != start:
            self.close()
            self._records, self._ahead = self._source.read(self._shard, start, self._last, self._give_up_at()), None
        raws: list[Raw] = []
        held = 0
        try:
            while True:
                raw = self._ahead or next(self._records, None)
                self._ahead = raw
                if raw is None or raw.index >= end or (raws and held + raw.size > BLOCK_BYTES):
                    break
                raws.append(raw)
                self._ahead, held = None, held + raw.size
        except ShardError as error:
            self.failure, self._ahead = error, None
        stop = end if self._ahead is None or self._ahead.index >= end else self._ahead.index
        self._at, ends = stop, self._ahead is None and self._last is None  # else the lease has ended, not the shard
        return Block(self._name(start, end), stop, len(raws), ends, raws)


def _identity(shard: str) -> str:
    """A shard's name in caches. A file may be written anew; what an address gives stays, as leases rely on as well."""
    try:
        about = os.stat(shard)
    except (OSError, ValueError):
        return shard
    return f"{shard}@{about.st_size}-{about.st_mtime_ns}"


def shuffled(length: int, use: str, *numbers: int) -> np.ndarray:
    """A shuffled range(length), the same on every machine and release: RandomState's stream is frozen, while a
    numpy Generator's may change."""
    digest = hashlib.blake2b(json.dumps([use, *numbers]).encode(), digest_size=16).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4").astype(np.uint32)).permutation(length)
