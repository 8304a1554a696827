"""Bound the records that a DHT node keeps for others, for each writer and in total.

hivemind keeps whatever it is asked to until it expires: one member of a run filled 912 MB in 25 s. Here each record is
on the account of the peer that wrote it. A writer over its bound loses records of its own, the first to expire first;
when the node is full, the writers that take the most room lose theirs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.utils import get_dht_time
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

OWN = "own"  # the account of what this node's own peer stores here
SWEEP_EVERY = 30.0  # s between two searches for records that have expired
OVERHEAD = 1600  # bytes of memory beside a record's name and value, measured: 740 among others of its key, 1,640 alone
FRAME = 24  # bytes of an answer that a record takes beside its name and value: its expiration, and lengths
MADE_ROOM = 8  # a full account loses this part of it at once; record by record, each store would look at all others


class StorageBounds(NamedTuple):
    """Bytes of memory, with OVERHEAD for each record; `per_key` in bytes of an answer.

    They were set when a member of a run with an epoch a second wrote some 4.5 MiB of receipts, and 2,000 members of a
    run with usual epochs some 40 MiB in all. There are no receipts any more, so today's records need less.
    """

    per_writer: int = 8 * 2**20
    per_key: int = 2**20
    total: int = 64 * 2**20


class _Entry(NamedTuple):
    account: Hashable
    payload: int  # bytes
    expiration: float


_Place = tuple[DHTID, Any]  # a record's key and subkey


class BoundedStorage(DHTLocalStorage):
    """hivemind's storage with an account for each writer.

    :param bounds: how much it keeps
    :param clock: DHT time, s
    """

    def __init__(self, bounds: StorageBounds | None = None, clock: Callable[[], float] = get_dht_time):
        super().__init__()
        self.bounds, self._clock = bounds or StorageBounds(), clock
        self._entries: dict[_Place, _Entry] = {}
        self._accounts: dict[Hashable, dict[_Place, _Entry]] = {}
        self._account_bytes: dict[Hashable, int] = {}
        self._key_bytes: dict[DHTID, int] = {}
        self._total = 0
        self._next_sweep = 0.0

    @property
    def total_bytes(self) -> int:
        """Of all records, with OVERHEAD for each; those that have expired are counted until they are looked for."""
        return self._total

    def bytes_of(self, account: Hashable) -> int:
        return self._account_bytes.get(account, 0)

    def bytes_under(self, key: DHTID) -> int:
        """Bytes of an answer with all that stands under a key; what has expired is counted until it is looked for."""
        return self._key_bytes.get(key, 0)

    def count_under(self, key: DHTID) -> int:
        """How many records stand under a key."""
        found = self.data[key].value if key in self else None
        return len(found) if isinstance(found, DictionaryDHTValue) else int(found is not None)

    def put(self, account: Hashable, key: DHTID, value: bytes, expiration: float, subkey: Any = None) -> bool:
        """Keep a record that `account` has written; without a subkey, the key's only value.

        :returns: whether it stands here now. Not if what stands there lives longer, or if the key has no room

        A dictionary takes the place of a plain value however long that lives: one call of a stranger would otherwise
        keep all leaders and donors from being found.
        """
        self._sweep()
        payload = len(value) + (len(subkey) if isinstance(subkey, (bytes, str)) else 0)
        if payload + OVERHEAD > min(self.bounds) or expiration <= self._clock():
            return False
        place = (key, subkey)
        before = self.data[key] if key in self else None
        dictionary = before.value if before is not None and isinstance(before.value, DictionaryDHTValue) else None
        if subkey is None:
            if dictionary is not None or (before is not None and before.expiration_time >= expiration):
                return False
        elif dictionary is not None:
            standing = dictionary.get(subkey)
            if standing is not None and standing.expiration_time >= expiration:
                return False
        replaced = self._entries.get(place)
        freed = replaced.payload + FRAME if replaced else 0
        if self.bytes_under(key) + payload + FRAME - freed > self.bounds.per_key:
            return False
        self._forget(place)
        if subkey is None:
            super().store(key, value, expiration)
        else:
            if dictionary is None:
                self._drop((key, None))
                dictionary = DictionaryDHTValue()
            dictionary.store(subkey, value, expiration)
            super().store(key, dictionary, dictionary.latest_expiration_time)
            _compact(dictionary)
        _compact(self)
        self._note(place, _Entry(account, payload, expiration))
        if self.bytes_of(account) > self.bounds.per_writer:
            self._make_room(account, keep=place)
        while self._total > self.bounds.total:
            self._make_room(max(self._account_bytes, key=self._account_bytes.get), keep=place)
        return place in self._entries

    def store(self, key: DHTID, value: bytes, expiration_time: float, subkey: Any = None) -> bool:
        """As hivemind's: of this node's own peer."""
        return self.put(OWN, key, value, expiration_time, subkey)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """As hivemind's: of this node's own peer."""
        return self.put(OWN, key, value, expiration_time, subkey)

    def get(self, key: DHTID) -> ValueWithExpiration | None:
        """As hivemind's, but a copy: who looks for a key adds what others answer to what it got here."""
        found = super().get(key)
        if found is None or not isinstance(found.value, DictionaryDHTValue):
            return found
        standing, copied = found.value, DictionaryDHTValue()
        standing.items()  # drops what has expired
        copied.data, copied.key_to_heap = dict(standing.data), dict(standing.key_to_heap)
        copied.expiration_heap = list(standing.expiration_heap)
        copied.latest_expiration_time = standing.latest_expiration_time
        return ValueWithExpiration(copied, found.expiration_time)

    # --- accounts ---

    def _note(self, place: _Place, entry: _Entry) -> None:
        self._entries[place] = self._accounts.setdefault(entry.account, {})[place] = entry
        self._count(place, entry, 1)

    def _forget(self, place: _Place) -> None:
        """Take a record off its account."""
        entry = self._entries.pop(place, None)
        if entry is None:
            return
        del self._accounts[entry.account][place]
        self._count(place, entry, -1)
        if not self._accounts[entry.account]:
            del self._accounts[entry.account]

    def _count(self, place: _Place, entry: _Entry, sign: int) -> None:
        memory, answer = sign * (entry.payload + OVERHEAD), sign * (entry.payload + FRAME)
        self._total += memory
        for counts, name, change in (
            (self._account_bytes, entry.account, memory),
            (self._key_bytes, place[0], answer),
        ):
            counts[name] = counts.get(name, 0) + change
            if not counts[name]:
                del counts[name]

    def _drop(self, place: _Place) -> None:
        """Forget a record, and keep it no longer."""
        self._forget(place)
        key, subkey = place
        standing = self.data.get(key)
        if standing is None or (subkey is not None) != isinstance(standing.value, DictionaryDHTValue):
            return
        if subkey is not None:
            del standing.value[subkey]
            if standing.value.data:
                return
        del self[key]

    def _make_room(self, account: Hashable, keep: _Place) -> None:
        """Drop what of an account expires first; `keep` has just come, and goes only if nothing else is there."""
        held = self._accounts[account]
        by_expiration = sorted(held, key=lambda place: (place == keep, held[place].expiration))
        for place in by_expiration[: max(1, len(held) // MADE_ROOM)]:
            self._drop(place)

    def _sweep(self) -> None:
        now = self._clock()
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_EVERY
        for place in [place for place, entry in self._entries.items() if entry.expiration < now]:
            self._drop(place)


def _compact(storage: TimedStorage) -> None:
    """hivemind's heap of expirations keeps one of each store, also of those that a later one has replaced."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 16:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)
