"""What a node of the DHT keeps: bounded for each writer, under each key and in all."""

from __future__ import annotations

import random

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils import get_dht_time

from volunteer_kit.swarm.net.dht_storage import OVERHEAD, OWN, SWEEP_EVERY, BoundedStorage, StorageBounds

SMALL = StorageBounds(per_writer=10 * OVERHEAD + 1000, per_key=2000, total=50 * OVERHEAD + 5000)


@pytest.fixture
def storage():
    return BoundedStorage(SMALL)


def key(number: int) -> DHTID:
    return DHTID.generate(number)


def soon(seconds: float = 60.0) -> float:
    return get_dht_time() + seconds


def records(storage: BoundedStorage) -> dict:
    """(key, subkey) -> value of all that can be found."""
    found = {}
    for key, item in list(storage.items()):
        if isinstance(item.value, DictionaryDHTValue):
            found |= {(key, subkey): entry.value for subkey, entry in item.value.items()}
        else:
            found[key, None] = item.value
    return found


def test_a_writer_over_its_bound_loses_what_expires_first(storage):
    for number in range(8):
        assert storage.put("anna", key(number), b"a", soon(100 + number))
    for number in range(100, 130):
        assert storage.put("mallory", key(number), b"m", soon(number))
    assert storage.bytes_of("mallory") <= SMALL.per_writer
    kept = records(storage)
    assert {(key(number), None) for number in range(8)} <= set(kept), "another's records are not touched"
    assert (key(129), None) in kept and (key(100), None) not in kept


def test_a_full_node_takes_room_from_the_largest_writers(storage):
    for number in range(4):
        assert storage.put("anna", key(number), b"a", soon())
    for number in range(120):
        storage.put(f"sybil {number % 6}", key(1000 + number), b"s", soon(600))
    assert storage.total_bytes <= SMALL.total
    assert {(key(number), None) for number in range(4)} <= set(records(storage))
    assert storage.put("bob", key(7), b"b", soon()), "a newcomer finds room"


def test_a_key_holds_no_more_than_can_be_answered(storage):
    kept = [storage.put(f"peer {number}", key(1), b"x" * 50, soon(), subkey=b"%d" % number) for number in range(60)]
    assert 20 < sum(kept) < 30 and storage.bytes_under(key(1)) <= SMALL.per_key
    assert storage.put("peer 1", key(1), b"y" * 50, soon(90), subkey=b"1"), "who stands there can renew its record"
    assert not storage.put("peer", key(2), b"x" * (SMALL.per_key + 1), soon())


def test_a_later_record_stays_whatever_is_stored_after_it(storage):
    """hivemind drops a record at the expiration of the last store, also of one that it has refused."""
    now = [get_dht_time()]
    storage = BoundedStorage(SMALL, clock=lambda: now[0])
    assert storage.put("anna", key(1), b"new", soon(60), subkey=b"anna")
    assert not storage.put("mallory", key(1), b"old", soon(0.2), subkey=b"anna")
    assert not storage.put("mallory", key(1), b"plain", soon(0.2)), "no plain value in place of a dictionary"
    assert not storage.put("anna", key(1), b"late", soon(-1), subkey=b"bob")
    heaps = (storage.expiration_heap, storage.get(key(1)).value.expiration_heap)
    assert all(entry.expiration_time > soon(30) for heap in heaps for entry in heap)
    assert records(storage) == {(key(1), b"anna"): b"new"}


def test_a_plain_value_blocks_no_dictionary(storage):
    assert storage.put("mallory", key(1), b"blocked", soon(600))
    assert not storage.put("mallory", key(1), b"again", soon(500)), "the one that lives longer stays"
    assert storage.put("anna", key(1), b"leader", soon(20), subkey=b"anna")
    assert records(storage) == {(key(1), b"anna"): b"leader"} and storage.bytes_of("mallory") == 0


def test_what_is_got_is_a_copy(storage):
    """A search adds what other nodes answer to what it got here: that is on nobody's account."""
    storage.put("anna", key(1), b"1", soon(), subkey=b"anna")
    storage.get(key(1)).value.store(b"mallory", b"x" * 10_000, soon())
    assert records(storage) == {(key(1), b"anna"): b"1"}


def test_our_own_peer_stores_as_with_hivemind(storage):
    assert storage.store(key(1), b"v", soon()) and storage.get(key(1)).value == b"v"
    assert storage.store(key(2), b"v", soon(), subkey=b"s") and storage.store_subkey(key(2), b"t", b"w", soon())
    assert storage.bytes_of(OWN) == storage.total_bytes == 3 * OVERHEAD + 5
    assert len(storage) == 2


def test_a_record_that_is_stored_a_thousand_times_takes_the_room_of_one(storage):
    until = soon()
    for number in range(1000):
        assert storage.put("mallory", key(1), b"x", until + number, subkey=b"m")
        assert storage.put("mallory", key(2), b"x", until + number)
    assert len(storage.expiration_heap) < 50 and len(storage.get(key(1)).value.expiration_heap) < 50
    assert storage.bytes_of("mallory") == 2 * OVERHEAD + 3


def test_what_has_expired_leaves_the_accounts():
    now = [get_dht_time()]
    storage = BoundedStorage(SMALL, clock=lambda: now[0])
    for number in range(5):
        storage.put("anna", key(number), b"x", soon(10), subkey=b"s")
    now[0] += SWEEP_EVERY + 11
    storage.put("bob", key(9), b"x", now[0] + 60)
    assert storage.bytes_of("anna") == 0 and storage.total_bytes == OVERHEAD + 1


def test_accounts_agree_with_what_is_kept_after_any_history():
    dice, storage = random.Random(7), BoundedStorage(SMALL)
    for _ in range(5000):
        subkey = dice.choice([None, b"a", b"b", b"c", b"d"])
        value, until = bytes(dice.randrange(200)), soon(dice.uniform(5, 600))
        storage.put(dice.choice("anna bob cleo dora".split()), key(dice.randrange(30)), value, until, subkey=subkey)
        assert storage.total_bytes <= SMALL.total
    kept = records(storage)
    sizes = sum(len(value) + len(subkey or b"") + OVERHEAD for (_, subkey), value in kept.items())
    assert sizes == storage.total_bytes and len(kept) > 20
    assert all(storage.bytes_of(name) <= SMALL.per_writer for name in ("anna", "bob", "cleo", "dora"))
