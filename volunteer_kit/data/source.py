"""What a source of text-image pairs looks like to the stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Record(NamedTuple):
    """One text-image pair before it is tokenized. `index` counts the records of its shard, those left out too, so
    that (shard, index) names a record for everyone."""

    index: int
    key: str
    caption: str
    image: np.ndarray  # uint8 (S, S, 3)


class Source(Protocol):
    """A fixed list of shards, each an ordered list of records that reads the same every time."""

    shards: Sequence[str]

    def read(self, shard: str, start: int, give_up_at: float) -> Iterator[Record]:
        """The usable records of a shard from index `start` on. Raises ShardError where the shard cannot be read
        further; no attempt begins after `give_up_at` (time.monotonic())."""
        ...


class ShardError(Exception):
    """A shard that cannot be read, or not to its end. `cause` is a key of laion.CAUSES."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Limits(NamedTuple):
    """What reading a shard may cost."""

    timeout: float = 10.0  # s without a byte from a server
    retries: int = 4  # new connections a shard, each goes on where the last one broke
    member_bytes: int = 32 * 2**20  # of one file in a shard
    shard_bytes: int = 16 * 2**30  # a stream without end stops here
