"""Define the records of leases, and compute from them which ranges of a shard are free."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydantic.v1 import BaseModel, confloat, conint, conlist

END = 2**31  # in place of a range's number: up to the shard's end, wherever that is
MAX_SPANS = 64  # separate runs of done ranges in one record; more are forgotten, and read again by others
MAX_HELD = 16  # separate runs of ranges that one peer may hold in one shard

Span = tuple[int, int]  # ranges [first, last)
_Span = conlist(conint(strict=True, ge=0, le=END), min_items=2, max_items=2)


class LeaseRecord(BaseModel):
    """What one peer says about one shard in one epoch. At most a few hundred bytes."""

    peer_id: bytes
    held: conlist(_Span, max_items=MAX_HELD)  # in the order in which they are read
    used: conint(strict=True, ge=0, le=END)  # records of the first held range that are in applied steps
    until: confloat(strict=True, ge=0, lt=1e12)  # DHT time, s, at which the claim ends
    done: conlist(_Span, max_items=MAX_SPANS)
    seen: conlist(_Span, max_items=MAX_SPANS) = []  # what others had done, who may be forgotten by now

    def holds(self, now: float) -> list[Span]:
        """What is claimed at this time."""
        return [(first, last) for first, last in self.held if first < last] if self.until > now else []


class Free(NamedTuple):
    """Ranges that nobody has, and how far a former holder got in the first."""

    first: int
    last: int
    used: int


class PlaceRecord(BaseModel):
    """Where a peer is in the data: the stream epoch, and the first place in its order of shards that it does not know
    to be done."""

    peer_id: bytes
    epoch: conint(strict=True, ge=0, lt=END)
    place: conint(strict=True, ge=0, lt=END)


def done_ranges(records: Iterable[LeaseRecord]) -> list[Span]:
    """All that somebody says is done."""
    return merged(span for record in records for span in (*record.done, *record.seen))


def free_ranges(records: Iterable[LeaseRecord], ranges: int | None, want: int, now: float) -> Free | None:
    """The first ranges that nobody holds or has done, up to `want` of them; of a shard that nobody knows the end of
    (`ranges` None) all after the last that is done, if nobody holds any. None: nothing is free."""
    records = list(records)
    end, first = (END if ranges is None else ranges), 0
    last = end
    held = [span for record in records for span in record.holds(now)]
    for start, stop in merged([*done_ranges(records), *held]):
        if start > first:
            last = min(start, end)
            break
        first = max(first, stop)
    if first >= end or (ranges is None and last < end):
        return None
    if ranges is not None:
        last = min(last, first + want)
    left = [(record.held[0][0], record.used) for record in records if record.until <= now and record.held]
    last = min([last, *(start for start, used in left if used and start > first)])  # a lease has one `used`, its first
    return Free(first, last, max((used for start, used in left if start == first), default=0))


def overlap(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ranges two spans have in common; 1 if both go to an end that nobody knows."""
    first, last = max(a[0], b[0]), min(a[1], b[1])
    return 1 if last == END and first < last else max(0, last - first)


def merged(spans: Iterable[Sequence[int]]) -> list[Span]:
    """Spans in order, those that touch made one."""
    found: list[Span] = []
    for first, last in sorted(tuple(span) for span in spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        elif first < last:
            found.append((first, last))
    return found


def rank(key: str, peer_id: bytes) -> bytes:
    """Who keeps ranges that two hold, the lower: the same for both to see, and by chance."""
    return hashlib.blake2b(key.encode() + peer_id, digest_size=8).digest()
