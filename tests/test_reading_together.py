"""Many readers of the same shards, in one process and by one clock: whatever comes and goes, and whatever the DHT
forgets, no sample enters two steps of one epoch, and hardly any is left unread. (On a real DHT: test_leases.py.)"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hivemind.utils import ValueWithExpiration

from tests.shard_files import good_shard
from volunteer_kit.data.leases import Lease
from volunteer_kit.data.ledger import Ledger
from volunteer_kit.data.settings import DataConfig
from volunteer_kit.data.source import ShardError
from volunteer_kit.data.stream import open_stream
from volunteer_kit.data.tokenizer import load_tokenizer
from volunteer_kit.swarm.leases import client as room
from volunteer_kit.swarm.leases.client import SwarmLeases

SHARDS, RECORDS, RANGE, LIFETIME = 12, 60, 16, 50.0


class World:
    """A clock and a DHT in a dict; keys may be forgotten."""

    def __init__(self, seed: int):
        self.now, self.stored, self.rng = 1000.0, {}, random.Random(seed)
        self.applied: Counter = Counter()  # samples by name
        self.readers: list[Reader] = []
        self.dead: dict[bytes, float] = {}  # since when

    def forget_the_long_dead(self) -> None:
        """What only they had said goes with the nodes that held it."""
        gone = {own for own, since in self.dead.items() if since < self.now - 3 * LIFETIME}
        for records in self.stored.values():
            for subkey in gone & set(records):
                del records[subkey]


class DictDHT:
    """One peer's end of it."""

    def __init__(self, world: World, own: bytes):
        self.world, self.own, self.peer_id = world, own, self

    def to_bytes(self) -> bytes:
        return self.own

    def add_validators(self, validators: list) -> None:
        pass

    def store(self, key, value, expiration_time, subkey, return_future):
        self.world.stored.setdefault(key, {})[self.own] = ValueWithExpiration(value, expiration_time)

    def get(self, key, latest):
        return ValueWithExpiration(dict(self.world.stored.get(key, {})), self.world.now + 1e6)


class Reader:
    """A stream with leases, and steps taken of what it reads."""

    def __init__(self, world: World, shards: str, number: int):
        self.world, self.dht = world, DictDHT(world, b"%06d" % number)
        self.leases, self.ledger, self.names = SwarmLeases(self.dht, "x", Lease, lifetime=LIFETIME), Ledger(), []
        self.stream = open_stream(
            DataConfig(kind="shards", shards=shards, range_length=RANGE, disk_cache_mb=0, nsfw_allowed=None),
            tokenizer=load_tokenizer("words"), encode_images=lambda images: torch.zeros(len(images), 1),
            image_size=4, text_seq_len=4, image_seq_len=1, num_codes=1, image_tokenizer="", seed=0, peer_seed=number,
        )  # fmt: skip
        self.stream.lease_from(self.leases)

    def read(self) -> None:
        self.names += self.ledger.given(self.stream.next_batch(self.world.rng.randint(1, 8))).names
        self.leases._renew()

    def step(self) -> None:
        found = self.ledger.applied(self.names)
        self.world.applied.update(self.names)
        if found.after is not None:
            self.stream.applied(found.after)
        self.names = []


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    for n in range(SHARDS):
        good_shard(folder / f"{n:02d}.tar", RECORDS, first=RECORDS * n)
    return str(folder)


def make_world(monkeypatch, seed: int) -> World:
    world = World(seed)
    monkeypatch.setattr(room, "get_dht_time", lambda: world.now)

    def trusted(dht, schema, subkey, value):
        return schema.parse_obj(value.value) if value.expiration_time > world.now else None

    monkeypatch.setattr(room, "read_record", trusted)  # one process has one key; signatures: test_leases.py
    return world


@pytest.mark.parametrize("lengths", ["known", "unknown"])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_read_twice_and_nothing_left_unread(shards, monkeypatch, seed, lengths):
    world = make_world(monkeypatch, seed)
    rng, number = np.random.default_rng(seed), 0

    def join() -> None:
        nonlocal number
        number += 1
        reader = Reader(world, shards, number)
        if lengths == "known":
            reader.stream.source.ranges = lambda shard, give_up_at: [*range(0, RECORDS, RANGE), RECORDS]
        world.readers.append(reader)

    for _ in range(5):
        join()
    while max((name.epoch for name in world.applied), default=0) < 3:
        world.now += 1.0
        reader = world.readers[int(rng.integers(len(world.readers)))]
        reader.read()
        if rng.random() < 0.3:
            reader.step()
        if rng.random() < 0.02 and len(world.readers) > 2:
            world.readers.remove(reader)
            if rng.random() < 0.5:
                reader.step()
                reader.leases.close()
            world.dead[reader.dht.own] = world.now
            world.forget_the_long_dead()
            join()
    twice = [name for name, times in world.applied.items() if times > 1]
    assert not twice
    finished = Counter(name.epoch for name in world.applied)
    for epoch in range(2):  # held by the dead when the others went on to the next epoch
        assert SHARDS * RECORDS - finished[epoch] <= 3 * RECORDS, finished


def test_who_claims_everything_starves_nobody(shards, monkeypatch):
    """A liar holds or has done all there is, in every epoch: the others read without a lease, and without credit."""
    world = make_world(monkeypatch, 0)
    liar = {"peer_id": b"liar", "held": [], "used": 0, "until": 0.0, "done": [[0, 2**31]], "seen": []}

    def lying(dht, key, latest):
        said = {} if key.endswith("places") else {b"liar": ValueWithExpiration(liar, world.now + 9e9)}
        return ValueWithExpiration({**world.stored.get(key, {}), **said}, world.now + 1e6)

    monkeypatch.setattr(DictDHT, "get", lying)
    reader = Reader(world, shards, 1)
    batch = reader.stream.next_batch(20)
    assert len(batch.names) == 20 and reader.stream.counts["unleased"] == 1
    assert not any(reader.leases.earns(lease) for lease in batch.leases)


def test_one_who_is_far_ahead_leads_nobody_astray(shards, monkeypatch):
    world = make_world(monkeypatch, 0)
    world.readers = [Reader(world, shards, n) for n in range(3)]
    for reader in world.readers:
        reader.read()
    world.readers[0].leases.where(10**6, 0)
    for reader in world.readers[1:]:
        for _ in range(30):
            reader.read()
        assert reader.stream.epoch < 5


def test_the_only_other_one_may_say_what_it_likes(shards, monkeypatch):
    world = make_world(monkeypatch, 0)
    last = {"peer_id": b"liar", "epoch": 2**31 - 1, "place": 2**31 - 1}
    world.stored["x_places"] = {b"liar": ValueWithExpiration(last, world.now + 9e9)}
    reader = Reader(world, shards, 1)
    for _ in range(200):
        reader.read()
        reader.step()
    assert world.applied.total() > 500 and max(world.applied.values()) == 1
    state = reader.stream.state_dict()
    again = Reader(world, shards, 2)
    again.stream.load_state_dict(state)
    again.read()


def reader_of(world: World, shards: str, number: int, cuts: list[int], state: dict | None = None) -> Reader:
    reader = Reader(world, shards, number)
    reader.stream.source.ranges = lambda shard, give_up_at: cuts
    if state is not None:
        reader.stream.load_state_dict(state["stream"])
        reader.leases.load_state_dict(state["leases"])
    return reader


KNOWN = [*range(0, RECORDS, RANGE), RECORDS]


@pytest.mark.parametrize("dht", ["remembers", "forgets"])
def test_a_lone_reader_that_is_killed_reads_nothing_twice(shards, monkeypatch, dht):
    """The DHT of a lone peer dies with it; what it had done of the shards in work is saved beside the stream."""
    world, state, number = make_world(monkeypatch, 0), None, 0
    while max((name.epoch for name in world.applied), default=0) < 2:
        number += 1
        reader = reader_of(world, shards, 1, KNOWN, state)
        for _ in range(world.rng.randint(3, 12)):
            world.now += 1
            reader.read()
            if world.rng.random() < 0.5 and reader.names:
                after = reader.ledger._given[-1].after
                reader.step()
                state = {"stream": reader.stream.state_dict(after), "leases": reader.leases.state_dict()}
        if dht == "forgets":
            world.stored.clear()
    epochs = Counter(name.epoch for name in world.applied)
    assert max(world.applied.values()) == 1 and number > 10
    assert epochs[0] == epochs[1] == SHARDS * RECORDS


def test_a_lease_whose_shard_is_gone_or_shorter_after_a_restart_is_left(shards, monkeypatch):
    world = make_world(monkeypatch, 0)
    reader = reader_of(world, shards, 1, KNOWN)
    while reader.stream._at.lease is None or reader.stream._at.lease.last < len(KNOWN) - 1:
        reader.read()
        reader.step()
    state = {"stream": reader.stream.state_dict(), "leases": {}}
    shorter = reader_of(world, shards, 1, KNOWN[:2], state)
    assert len(shorter.stream.next_batch(8).names) == 8
    left = state["stream"]["lease"][0]
    gone = reader_of(world, shards, 1, KNOWN, state)
    read, name = gone.stream.source.ranges, gone.stream.source.shards[left]

    def ranges(shard: str, give_up_at: float) -> list[int]:
        if shard == name:
            raise ShardError("unreachable_shard", "busy")
        return read(shard, give_up_at)

    gone.stream.source.ranges = ranges
    for _ in range(20):
        gone.read()
        gone.step()
    done = [span for reader in (gone,) for span in reader.leases.state_dict().get(f"x_lease_0_{left}", [])]
    assert not any(first <= len(KNOWN) - 2 < last for first, last in done)  # nobody has read its last range


def test_samples_of_a_shard_that_breaks_are_not_read_again(shards, monkeypatch):
    world = make_world(monkeypatch, 0)
    readers = [reader_of(world, shards, n, KNOWN) for n in (1, 2)]
    first = readers[0].stream.source
    whole, broken = first.read, set()

    def breaks(shard: str, start: int, stop: int | None, give_up_at: float):
        for raw in whole(shard, start, stop, give_up_at):
            if raw.index == 21:
                broken.add(shard)
                raise ShardError("cut_shard", "it ends here, for this reader")
            yield raw

    first.read = breaks
    for n in range(300):
        readers[n % 2].read()
        readers[n % 2].step()
    assert broken and max(world.applied.values()) == 1
