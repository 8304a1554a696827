"""Who reads what: leases of ranges of a shard, for one stream epoch.

The stream asks for a lease before it reads and says how far it got; whoever gives leases sees to it that no two
readers have the same ranges. swarm/leases/client.py gives them for a swarm, LocalLeases for one reader alone.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol


class Lease(NamedTuple):
    """Ranges [first, last) of a shard in one stream epoch; `last` None: up to the shard's end, wherever that is."""

    epoch: int
    shard: int  # its number in the source's list
    first: int
    last: int | None
    used: int = 0  # records of range `first`, in that range's order, that an earlier holder has trained on
    owned: bool = True  # False: read without a lease, since none was to be had; what is read so earns no credit


# Why there is no lease of a shard: others are reading what is left of it, or all of it is read and trained on.
Refusal = Literal["held", "done"]


class Leases(Protocol):
    """Gives leases. Calls come from the thread that reads, `applied` from the one that trains.

    `shared`: there are other readers. All then walk through the shards of an epoch in one order, so that only few are
    in work at a time, and what lies behind needs nobody's memory.
    """

    shared: bool

    def where(self, epoch: int, place: int) -> tuple[int, int]:
        """Tell the others the first place in the epoch's order that is not known to be done; gives theirs, or ours if
        there are none."""
        ...

    def claim(self, epoch: int, shard: int, ranges: int | None, want: int) -> Lease | Refusal:
        """A lease of up to `want` of the shard's `ranges`; where nobody knows how many it has (None), of all that
        are left."""
        ...

    def resume(self, lease: Lease, range_: int, used: int) -> Lease | None:
        """A lease from before a restart, which had been trained on up to `used` records of `range_`: what is still to
        be read of it, or None."""
        ...

    def holds(self, lease: Lease) -> bool:
        """Whether a lease is still ours."""
        ...

    def ended(self, lease: Lease, before: int | None) -> None:
        """The lease was read to its end, or (`before` a range) could not be read further than that."""
        ...

    def applied(self, lease: Lease, range_: int, used: int) -> None:
        """Training is past all earlier leases, and in this one past `used` records of `range_`."""
        ...


class LocalLeases:
    """One reader, so that everything is free: each shard is leased once an epoch, whole."""

    shared = False

    def where(self, epoch: int, place: int) -> tuple[int, int]:
        return epoch, place

    def claim(self, epoch: int, shard: int, ranges: int | None, want: int) -> Lease | Refusal:
        return Lease(epoch, shard, 0, ranges)

    def resume(self, lease: Lease, range_: int, used: int) -> Lease | None:
        return lease._replace(first=range_, used=used)

    def holds(self, lease: Lease) -> bool:
        return True

    def ended(self, lease: Lease, before: int | None) -> None:
        pass

    def applied(self, lease: Lease, range_: int, used: int) -> None:
        pass
