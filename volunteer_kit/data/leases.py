"""Who reads what: leases of ranges of a shard, for one stream epoch.

The stream asks for a lease before it reads and says how far it got; whoever gives leases sees to it that no two
readers have the same ranges. swarm/leases.py gives them for a swarm, LocalLeases for one reader alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Lease(NamedTuple):
    """Ranges [first, last) of a shard in one stream epoch; `last` None: up to the shard's end, wherever that is."""

    epoch: int
    shard: int  # its number in the source's list
    first: int
    last: int | None
    used: int = 0  # records of range `first`, in that range's order, that an earlier holder has trained on
    owned: bool = True  # False: read without a lease, since none was to be had; what is read so earns no credit


class Leases(Protocol):
    """Gives leases. Calls come from the thread that reads, `applied` from the one that trains. `shared`: what one
    does not get, another may, and may leave it later; each shard is then asked for again and again in an epoch."""

    shared: bool

    def claim(self, epoch: int, shard: int, ranges: int | None, want: int) -> Lease | None:
        """A lease of up to `want` of the shard's `ranges` (None: nobody knows how many; the lease is then of all
        that are left), or None: others have them all."""
        ...

    def resume(self, lease: Lease) -> Lease | None:
        """A lease from before a restart: what is still to be read of it, or None."""
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

    def claim(self, epoch: int, shard: int, ranges: int | None, want: int) -> Lease | None:
        return Lease(epoch, shard, 0, ranges)

    def resume(self, lease: Lease) -> Lease | None:
        return lease

    def holds(self, lease: Lease) -> bool:
        return True

    def ended(self, lease: Lease, before: int | None) -> None:
        pass

    def applied(self, lease: Lease, range_: int, used: int) -> None:
        pass
