"""Take and renew leases of ranges of the data through the DHT, so that two peers rarely read the same range.

All peers take the shards of an epoch in one order, and tell the others the first place in it that they do not know to
be done. So few shards are in work at a time, and no peer has to remember the earlier ones: DHT records go with the
nodes that hold them, and after hours of coming and going none of these nodes is left.

A shard has one DHT key an epoch, under which each peer that reads it keeps one signed record: the ranges it holds,
until when, how far it got, and the ranges that are done. To claim, a peer looks what is free, writes its record, and
looks again: a peer that then sees another's claim on the same ranges gives up its own, so that of two simultaneous
claims at most one stands. A claim that is not renewed expires; its ranges are free for others, who go on at the record
where the last holder was, since the order inside a range is the same for all. Peers that cannot see each other may hold
the same ranges until one of them renews; both see it then, both count it, and the same one of them lets go.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from statistics import median_low
from typing import Any, Literal

from hivemind.dht import DHT
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils import get_dht_time
from pydantic.v1 import BaseModel

from volunteer_kit.swarm.leases.records import (
    END,
    MAX_HELD,
    MAX_SPANS,
    LeaseRecord,
    PlaceRecord,
    Span,
    done_ranges,
    free_ranges,
    merged,
    overlap,
    rank,
)
from volunteer_kit.swarm.records.peer_record import read_record

MAX_HOLDERS = 256  # records looked at under one key
MAX_REMEMBERED = 1000  # shards of which our own record is kept here; of others the DHT tells
SAVED = 32  # shards that are remembered over a restart
MEMORY = 24 * 3600.0  # s that done ranges are remembered
PATIENCE = 10.0  # s for the DHT to store a claim
ATTEMPTS = 5  # to claim in one shard, when others claim at the same moment, as all do when a run begins
PAUSE = 0.2  # s between them, at most, doubled each time; a claim takes a tenth of a second


@dataclass
class _Held:
    lease: Any
    first: int
    last: int


@dataclass
class _Mine:
    """Our own record of one shard in one epoch."""

    done: list[Span] = field(default_factory=list)
    seen: list[Span] = field(default_factory=list)  # done by others
    held: list[_Held] = field(default_factory=list)  # in the order in which they are read
    used: int = 0  # of the first range of the first
    until: float = 0.0

    def finish(self, held: _Held, before: int) -> None:
        """Ranges up to `before` are done."""
        before = min(before, held.last)
        if before > held.first:
            self.done = merged([*self.done, (held.first, before)])[-MAX_SPANS:]
            held.first, self.used = before, 0

    def record(self, peer_id: bytes) -> LeaseRecord:
        held = [[one.first, one.last] for one in self.held if one.first < one.last]
        about = {"held": held, "used": self.used, "until": self.until}
        return LeaseRecord(peer_id=peer_id, **about, done=self.done, seen=self.seen[-MAX_SPANS:])


class SwarmLeases:
    """Leases of one run's data among its peers: data.leases.Leases.

    :param prefix: of the DHT keys: peers that share it share the data. Run key and the source's catalogue
    :param make: (epoch, shard, first, last, used) -> lease, `last` None for up to the shard's end
    :param lifetime: s a claim stands without renewal. Below several microbatches, a slow peer would lose its leases
        while it trains; the higher, the longer nobody goes on where a peer died
    :ivar counts: "conflict": claims given up because another was as quick; "duplicate": ranges that another peer
        turned out to hold as well; "lost": leases given up for that; "taken_over": of peers that went silent
    """

    shared = True

    def __init__(self, dht: DHT, prefix: str, make: Callable[..., Any], lifetime: float = 600.0):
        self._dht, self._prefix, self._make, self._lifetime = dht, prefix, make, lifetime
        signer = RSASignatureValidator()
        dht.add_validators([signer])
        self._subkey, self._own_id = signer.local_public_key, dht.peer_id.to_bytes()
        self._lock = threading.RLock()
        self._mine: dict[str, _Mine] = {}  # by DHT key
        self._active: list[tuple[Any, str]] = []  # leases whose samples are not all trained on, in order; their keys
        self._ended: dict[Any, int | None] = {}  # how far those were read that will be read no further
        self._lost: set[Any] = set()
        self._renewed, self._closed = get_dht_time(), False
        self.counts: Counter[str] = Counter()

    # what the stream asks

    def where(self, epoch: int, place: int) -> tuple[int, int]:
        """See data.leases.Leases: the median, so that no single one leads the others astray."""
        record = PlaceRecord(peer_id=self._own_id, epoch=min(epoch, END - 1), place=min(place, END - 1))
        self._store(f"{self._prefix}_places", record, self._lifetime)
        found = self._get(f"{self._prefix}_places", PlaceRecord)
        others = [(r.epoch, r.place) for r in found if r.peer_id != self._own_id]
        own = [] if others and not self._active and not self._mine else [(epoch, place)]  # a newcomer has no vote
        return median_low([*others, *own])

    def claim(self, epoch: int, shard: int, ranges: int | None, want: int) -> Any | Literal["held", "done"]:
        """See data.leases.Leases. Three calls to the DHT; where it does not answer, all seems free."""
        for attempt in range(ATTEMPTS):
            time.sleep(attempt and random.uniform(0, PAUSE * 2**attempt))
            found = self._try_claim(self._key(epoch, shard), epoch, shard, ranges, want)
            if found is not None:
                return found
        return "held"

    def _try_claim(self, key: str, epoch: int, shard: int, ranges: int | None, want: int) -> Any | None:
        """As claim; None if another claimed the same at the same moment."""
        now = get_dht_time()
        mine, others = self._look(key)
        own = mine.record(self._own_id).copy(update={"until": now + 1})  # what we read is not free for us
        free = free_ranges([*others, own], ranges, want, now)
        if free is None or len(mine.held) >= MAX_HELD:
            done = done_ranges([*others, own])
            is_done = done and done[0][0] == 0 and done[0][1] >= (END if ranges is None else ranges)
            return "done" if is_done else "held"
        before = [record for record in others if any(overlap(span, free) for span in record.held)]
        lease = self._make(epoch, shard, free.first, None if free.last == END else free.last, free.used)
        if not self._hold(key, lease, free.last):
            return None
        self.counts["taken_over"] += bool(before)
        return lease

    def resume(self, lease: Any, range_: int, used: int) -> Any | None:
        """The rest of a lease from before a restart, unless others have taken it up meanwhile."""
        key, now, first = self._key(lease.epoch, lease.shard), get_dht_time(), range_
        mine, others = self._look(key)
        with self._lock:
            mine.done = merged([*mine.done, (lease.first, range_)])
        for span in mine.done:  # what we had told the others may be newer than what was saved
            if overlap(span, (first, first + 1)):
                first, used = span[1], 0
        wanted = (first, END if lease.last is None else lease.last)
        used = max([used, *(r.used for r in others if r.held and r.held[0][0] == first)])
        busy = [*done_ranges(others), *(span for r in others for span in r.holds(now))]
        busy = [span for span in busy if overlap(span, wanted)]
        last = min([wanted[1], *(max(start, first) for start, _ in busy)])
        if last <= first or (lease.last is None and busy):
            return None
        lease = self._make(lease.epoch, lease.shard, first, None if last == END else last, used)
        return lease if self._hold(key, lease, last) else None

    def holds(self, lease: Any) -> bool:
        """Whether a lease is still ours. One that ran out (the machine slept) is renewed if nobody has taken it."""
        now = get_dht_time()
        if any(held == lease and self._mine[key].until <= now for held, key in self._active):
            self._renew()
        return lease not in self._lost

    def ended(self, lease: Any, before: int | None) -> None:
        with self._lock:
            self._ended[lease] = before

    def applied(self, lease: Any, range_: int, used: int) -> None:
        """Ranges before `range_` of the lease, and all leases before it, are done. The others are told in the
        background."""
        with self._lock:
            if all(one != lease for one, _ in self._active):
                return
            changed = []
            while self._active[0][0] != lease:
                changed.append(self._finish(*self._active.pop(0)))
            mine = self._mine[self._active[0][1]]
            for held in mine.held:
                if held.lease == lease:
                    mine.finish(held, range_)
                    mine.used = used
            changed.append(self._active[0][1])
        for key in dict.fromkeys(changed):
            self._publish(key)

    def earns(self, lease: Any) -> bool:
        """Whether work on a lease's samples is credited: it is ours, and was not another's as well."""
        return lease.owned and lease not in self._lost

    # what the trainer calls

    def keep(self) -> None:
        """Renew what is held once a third of its lifetime is over; to be called between microbatches, does not
        wait."""
        if get_dht_time() - self._renewed > self._lifetime / 3:
            self._renewed = get_dht_time()
            threading.Thread(target=self._renew, name="renew-leases", daemon=True).start()

    def close(self) -> None:
        """Leave what is held to others, and tell how far we got."""
        with self._lock:
            keys, self._closed = list(dict.fromkeys(key for _, key in self._active)), True
            self._active.clear()
            for key in keys:
                self._mine[key].until = 0.0
        for key in keys:
            self._publish(key, wait=True)

    # over a restart

    def state_dict(self) -> dict[str, list[Span]]:
        """What is done of the shards read last, as far as we know: a lone peer's DHT dies with it."""
        with self._lock:
            return {key: mine.done + mine.seen for key, mine in list(self._mine.items())[-SAVED:]}

    def load_state_dict(self, state: dict[str, list[Span]]) -> None:
        """Raises ValueError for what is no state."""
        for key, spans in state.items():
            checked = LeaseRecord(peer_id=b"", held=[], used=0, until=0.0, done=spans[:MAX_SPANS]).done
            if key.startswith(self._prefix):
                self._mine[key] = _Mine(seen=merged(checked))

    # how

    def _key(self, epoch: int, shard: int) -> str:
        return f"{self._prefix}_lease_{epoch}_{shard}"

    def _hold(self, key: str, lease: Any, last: int) -> bool:
        """Write a claim and look again. :returns: False if another has claimed the same meanwhile."""
        mine, held = self._mine[key], _Held(lease, lease.first, last)
        with self._lock:
            if self._closed:
                return False
            mine.until = get_dht_time() + self._lifetime
            if not mine.held:
                mine.used = lease.used
            mine.held.append(held)
        self._publish(key, wait=True)
        span = (held.first, held.last)
        if any(overlap(span, theirs) for record in self._others(key) for theirs in record.holds(get_dht_time())):
            self.counts["conflict"] += 1
            with self._lock:
                mine.held.remove(held)
            self._publish(key)
            return False
        with self._lock:
            if not self._closed:
                self._lost.discard(lease)
                self._active.append((lease, key))
                return True
            mine.until = 0.0
        self._publish(key)
        return False

    def _finish(self, lease: Any, key: str) -> str:
        """A lease is over: read as far as `ended` said, and all that was read of it is trained on."""
        mine, unread = self._mine[key], lease not in self._ended  # its reader was dropped
        before = self._ended.pop(lease, None)
        for held in [held for held in mine.held if held.lease == lease]:
            end = held.first if unread else held.last if before is None else before
            begun = mine.used > 0 and held is mine.held[0]
            mine.held.remove(held)
            if begun and not any(other.first <= held.first < other.last for other in mine.held):
                end = max(end, held.first + 1)  # nobody is told where we were in it, so that nobody can go on there
            mine.finish(held, end)
            mine.used = mine.held[0].lease.used if mine.held else 0
        return key

    def _look(self, key: str) -> tuple[_Mine, list[LeaseRecord]]:
        """Our own record of a shard, also from before a restart, and the others'."""
        own, others = self._fetch(key)
        with self._lock:
            if key not in self._mine:
                busy = {active for _, active in self._active}
                idle = [old for old, mine in self._mine.items() if not mine.held and old not in busy]
                for old in idle[: max(0, len(self._mine) - MAX_REMEMBERED)]:
                    del self._mine[old]
                self._mine[key] = _Mine(merged(own.done) if own is not None else [])
            mine = self._mine[key]
            mine.seen = merged([*mine.seen, *done_ranges(others)])
        if own is not None and not mine.held:  # what we held before a restart is as free as what the dead held
            others = [*others, own.copy(update={"until": 0.0, "done": [], "seen": []})]
        return mine, others

    def _others(self, key: str) -> list[LeaseRecord]:
        return self._fetch(key)[1]

    def _fetch(self, key: str) -> tuple[LeaseRecord | None, list[LeaseRecord]]:
        found = self._get(key, LeaseRecord)
        own = next((record for record in found if record.peer_id == self._own_id), None)
        return own, [record for record in found if record is not own]

    def _get(self, key: str, schema: type[BaseModel]) -> list[Any]:
        """What peers say under a key; a bounded number of them."""
        found = self._dht.get(key, latest=True)
        entries = found.value.items() if found and isinstance(found.value, dict) else ()
        records = (read_record(self._dht, schema, subkey, value) for subkey, value in entries)
        return list(islice((record for record in records if record is not None), MAX_HOLDERS))

    def _store(self, key: str, record: BaseModel, lasts: float) -> Any:
        expiration = get_dht_time() + lasts
        return self._dht.store(key, record.dict(), expiration_time=expiration, subkey=self._subkey, return_future=True)

    def _publish(self, key: str, wait: bool = False) -> None:
        with self._lock:
            future = self._store(key, self._mine[key].record(self._own_id), MEMORY)
        if wait:
            with contextlib.suppress(Exception):  # a DHT that does not answer must not stop the training
                future.result(timeout=PATIENCE)

    def _renew(self) -> None:
        """Renew every claim; of two peers that hold the same ranges one lets go."""
        with self._lock:
            keys = list(dict.fromkeys(key for _, key in self._active))
        for key in keys:
            others, now = self._others(key), get_dht_time()
            with self._lock:
                mine = self._mine[key]
                if all(active != key for _, active in self._active):
                    continue  # finished or closed meanwhile
                gone = done_ranges(others) if mine.until <= now else []  # while we slept others may have done it all
                for held in list(mine.held):
                    self._settle(key, mine, held, [record for record in others if record.until > now], gone)
                mine.until = now + self._lifetime
            self._publish(key)

    def _settle(self, key: str, mine: _Mine, held: _Held, others: list[LeaseRecord], gone: list[Span]) -> None:
        """Count what others hold of our lease, and give it up if it stays with one of them, or is `gone`."""
        span, expired = (held.first, held.last), mine.until <= get_dht_time()
        same = {r.peer_id: sum(overlap(span, theirs) for theirs in r.held) for r in others}
        self.counts["duplicate"] += sum(same.values())
        stays = [count for peer, count in same.items() if expired or rank(key, peer) < rank(key, self._own_id)]
        if any(stays) or any(overlap(span, theirs) for theirs in gone):
            self.counts["lost"] += 1
            self._lost.add(held.lease)
            mine.held.remove(held)
