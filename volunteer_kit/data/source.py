"""What a source of text-image pairs looks like to the stream."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .addresses import ANY_ADDRESS, AddressPolicy


class SampleName(NamedTuple):
    """What anybody can fetch a sample by: the stream's epoch, the shard's number in the source's list, and the
    record's place in the shard, counting those that are left out. Its text form is "epoch/shard/index"."""

    epoch: int
    shard: int
    index: int

    def __str__(self) -> str:
        return f"{self.epoch}/{self.shard}/{self.index}"

    @classmethod
    def parse(cls, text: str) -> SampleName:
        """The inverse of str(). Raises ValueError."""
        if not (match := re.fullmatch(r"(\d{1,12})/(\d{1,12})/(\d{1,12})", text, re.ASCII)):
            raise ValueError(f"no sample's name: {text[:80]!r}; it looks like 0/17/4711")
        return cls(*map(int, match.groups()))


class Raw(NamedTuple):
    """A record as it was read: filtered, decoded and tokenized only when its turn comes."""

    index: int  # counts the shard's records, those left out too
    key: str  # a name that people can read
    data: Any  # for the source's `use`
    size: int  # bytes held, about


class Record(NamedTuple):
    """One text-image pair before it is tokenized: pixels to be encoded, or codes that somebody has made of them."""

    caption: str
    image: np.ndarray | None = None  # uint8 (S, S, 3)
    codes: np.ndarray | None = None  # integers (N,)
    picture: str | None = None  # records of the same `picture` have the same pixels; None: nobody knows


class Source(Protocol):
    """A list of shards, each an ordered list of records that reads the same every time and for everybody."""

    shards: Sequence[str]
    catalogue: str  # equal for all who read the same list, wherever it lies for them
    counts: Counter[str]  # what was left out while reading, by cause

    def ranges(self, shard: str, give_up_at: float) -> Sequence[int] | None:
        """Where a shard can be cut: (0, ..., number of records). None where only reading it to its end tells; its
        ranges are then as long as the run says, and are read one after the other. Raises ShardError."""
        ...

    def read(self, shard: str, start: int, stop: int | None, give_up_at: float) -> Iterator[Raw]:
        """The records from index `start` up to `stop` (None: the shard's end), in order. Raises ShardError where it
        cannot be read further; no attempt begins after `give_up_at` (time.monotonic())."""
        ...

    def use(self, raw: Raw) -> Record:
        """Filter and decode a record. Raises LeftOut with the cause."""
        ...


class LeftOut(Exception):
    """A record that is not used; its argument is the cause, a key of causes.CAUSES."""


class ShardError(Exception):
    """A shard that cannot be read, or not to its end. `cause` is a key of causes.CAUSES."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Limits(NamedTuple):
    """What reading a shard may cost, and where it may lie."""

    timeout: float = 10.0  # s without a byte from a server
    retries: int = 4  # new connections a shard, each goes on where the last one broke
    member_bytes: int = 32 * 2**20  # of one file in a shard
    shard_bytes: int = 16 * 2**30  # a stream without end stops here
    addresses: AddressPolicy = ANY_ADDRESS  # which servers may be connected to
