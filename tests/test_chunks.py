"""A signed state in chunks: its bytes, its store, and its way from many donors, some of them slow, dead or false."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer, ValueWithExpiration

from tests.waiting import wait_until
from volunteer_kit.swarm import fetching
from volunteer_kit.swarm.chunk_transfer import _read_request, read_chunk_donors
from volunteer_kit.swarm.chunks import ChunksError, ChunkStore, root_of, state_bytes, state_root
from volunteer_kit.swarm.fetching import HASHES, ChunkFetch, NotNow
from volunteer_kit.swarm.hub_chunks import HubDonor
from volunteer_kit.swarm.manifest import Manifest

CHUNK = 2**12
METADATA = {"epoch": 20, "lineage": "12" * 8, "numbers": [3, 4]}


def state(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(64, 48, generator=generator),
        torch.randint(0, 255, (5000,), generator=generator, dtype=torch.uint8),
        torch.randn(7, 5, generator=generator).bfloat16(),
        torch.zeros(0),
        torch.tensor(3),
        torch.randn(12, 9, generator=generator).t(),
        torch.randn(20_000, generator=generator),
    ]


def manifest_of(store: ChunkStore) -> Manifest:
    return Manifest("run", 20, 1, 0, b"12345678", store.root, store.total_bytes, store.chunk_size, 1.0, 2.0)


@pytest.fixture
def whole(tmp_path) -> ChunkStore:
    return ChunkStore.write(tmp_path / "donor", METADATA, state(), CHUNK)


@pytest.fixture
def empty(tmp_path, whole) -> ChunkStore:
    return ChunkStore.of(tmp_path / "joiner", manifest_of(whole))


# --- bytes ---


def test_equal_states_have_equal_bytes_and_others_do_not():
    root, total = state_root(METADATA, state(), CHUNK)
    assert state_root(METADATA, [tensor.clone() for tensor in state()], CHUNK) == (root, total)
    assert total == sum(len(piece) for piece in state_bytes(METADATA, state()))
    one_bit = state()
    one_bit[1][77] ^= 1
    others = [
        state_root(METADATA, one_bit, CHUNK),
        state_root({**METADATA, "epoch": 21}, state(), CHUNK),
        state_root({**METADATA, "lineage": "34" * 8}, state(), CHUNK),
        state_root({**METADATA, "numbers": [3, 5]}, state(), CHUNK),
        state_root(METADATA, state()[:-1], CHUNK),
        state_root(METADATA, [state()[0].t(), *state()[1:]], CHUNK),
    ]
    assert len({root, *(other for other, _ in others)}) == 1 + len(others)


def test_a_state_comes_back_to_the_last_bit(whole):
    metadata, tensors = whole.read(state())
    assert metadata == METADATA and whole.is_complete and whole.verify()
    for ours, theirs in zip(state(), tensors, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    assert len(whole.read(state(), only=2)[1]) == 2
    assert whole.root == state_root(METADATA, state(), CHUNK)[0]
    for other in (state()[:-1], [*state(), torch.zeros(1)], [torch.zeros(3), *state()[1:]]):
        with pytest.raises(ChunksError, match="another model"):
            whole.read(other)


# --- the store ---


def test_a_store_keeps_what_is_right_only(whole, empty):
    assert empty.missing() == list(range(whole.num_chunks)) and not empty.is_complete
    with pytest.raises(ChunksError):
        empty.put(0, whole.get(0))  # nothing is known yet of what is right
    assert not empty.put_hashes(b"\0" * len(whole.hashes)) and not empty.put_hashes(whole.hashes[:-1])
    assert empty.hashes is None and empty.put_hashes(whole.hashes)
    data = whole.get(3)
    assert not empty.put(3, data[:-1] + bytes([data[-1] ^ 1])) and not empty.put(3, data[:-1])
    assert not empty.put(4, data) and empty.get(3) is None
    assert empty.put(3, data) and empty.get(3) == data and 3 not in empty.missing()
    last = whole.num_chunks - 1
    assert empty.put(last, whole.get(last)) and len(empty.get(last)) == whole.total_bytes - last * CHUNK
    assert empty.get(-1) is None and empty.get(whole.num_chunks) is None


def test_a_store_is_found_again_after_a_crash(whole, empty, tmp_path):
    empty.put_hashes(whole.hashes)
    for index in (0, 2, 5):
        empty.put(index, whole.get(index))
    again = ChunkStore.of(tmp_path / "joiner", manifest_of(whole))
    assert again.hashes == whole.hashes and [i for i, there in enumerate(again.have()) if there] == [0, 2, 5]
    with open(again.path / "state", "r+b") as file:  # marked, and lost with the power
        file.seek(2 * CHUNK)
        file.write(b"\0" * 10)
    assert not again.verify() and again.missing()[:2] == [1, 2]
    (again.path / "have").write_bytes(b"")  # of a crash at the very beginning
    assert ChunkStore.find(tmp_path / "joiner", whole.root) is None
    assert ChunkStore.of(tmp_path / "joiner", manifest_of(whole)).missing() == list(range(whole.num_chunks))
    assert ChunkStore.find(tmp_path / "nowhere", whole.root) is None


def test_a_full_disk_is_told_at_the_beginning(tiny_disk, whole):
    with pytest.raises(OSError):
        ChunkStore.of(tiny_disk, Manifest("run", 1, 1, 0, b"12345678", b"r" * 32, 2**23, 2**20, 1.0, 2.0))


def test_old_stores_go(tmp_path):
    roots = [ChunkStore.write(tmp_path, METADATA, state(seed), CHUNK).root for seed in range(3)]
    (tmp_path / ".state-x.part").mkdir()
    os.utime(tmp_path / ".state-x.part", (0, 0))
    (tmp_path / ".state-y.part").mkdir()  # somebody is writing it
    (tmp_path / "sequences.json").write_text("{}")
    ChunkStore.keep(tmp_path, roots[1:])
    assert [ChunkStore.find(tmp_path, root) is not None for root in roots] == [False, True, True]
    assert (tmp_path / "sequences.json").exists() and not (tmp_path / ".state-x.part").exists()
    assert (tmp_path / ".state-y.part").exists()


# --- many donors ---


class Donor:
    """Answers from a store after `delay` s; what it does wrong is said by `fault`."""

    def __init__(self, store: ChunkStore, delay: float = 0.002, fault: str = "", has: set | None = None):
        self.store, self.delay, self.fault, self.has = store, delay, fault, has
        self.asked, self.now, self.most = [], 0, 0

    async def answer(self, index: int) -> bytes:
        self.asked.append(index)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(self.delay)
            if self.fault == "silent":
                await asyncio.sleep(60)
            if self.fault == "dies" and len(self.asked) > 3:
                raise ConnectionError("gone")
            if self.fault == "busy" and len(self.asked) % 2:
                raise NotNow()
            if index == HASHES:
                if self.fault == "no hashes":
                    raise NotNow(lacks=True)
                return self.store.hashes
            if self.has is not None and index not in self.has:
                raise NotNow(lacks=True)
            data = self.store.get(index)
            return bytes([data[0] ^ 1]) + data[1:] if self.fault == "corrupt" else data
        finally:
            self.now -= 1


def fetch(store: ChunkStore, donors: dict[str, Donor], seconds: float = 80.0, timeout: float = 60.0):
    told = []

    async def run():
        fetcher = ChunkFetch(store, lambda name, index: donors[name].answer(index), timeout, lambda: told.append(1))

        async def find():
            return list(donors)

        deadline = time.monotonic() + seconds
        return await fetcher.run(find, lambda: time.monotonic() > deadline)

    found = asyncio.run(run())
    assert len(told) == found.chunks
    return found


def test_several_donors_share_the_work(whole, empty):
    donors = {name: Donor(whole) for name in "abc"}
    found = fetch(empty, donors)
    assert found.complete and found.again == 0 and found.chunks == whole.num_chunks
    assert empty.verify() and empty.read(state())[0] == METADATA
    assert all(found.given[name] >= whole.num_chunks // 6 for name in "abc")
    assert all(1 < donor.most <= fetching.MAX_WINDOW for donor in donors.values())


def test_a_corrupt_donor_is_asked_once_and_named(whole, empty):
    donors = {"right": Donor(whole), "false": Donor(whole, fault="corrupt"), "other": Donor(whole)}
    found = fetch(empty, donors)
    assert found.complete and found.corrupt == ["false"] and "false" not in found.given
    chunks = [index for index in donors["false"].asked if index != HASHES]
    assert len(chunks) == 1 and found.again == 1
    assert empty.verify()


def test_a_donor_of_false_hashes_is_dropped_too(whole, empty, tmp_path):
    other = ChunkStore.write(tmp_path / "other", METADATA, state(9), CHUNK)
    found = fetch(empty, {"false": Donor(other), "right": Donor(whole, delay=0.05)})
    assert found.complete and found.corrupt == ["false"]


def test_who_has_no_hashes_yet_is_not_asked_over_and_over(whole, empty):
    donors = {name: Donor(whole, fault="no hashes") for name in "abc"}
    assert not fetch(empty, donors, seconds=2.0).complete
    assert all(len(donor.asked) <= 4 for donor in donors.values())


def test_it_ends_when_another_way_has_filled_the_store(whole, empty):
    """The Hub's thread, when no donor is there, or none is left."""

    async def run():
        async def nobody():
            return []

        fetching = asyncio.create_task(ChunkFetch(empty, None).run(nobody, lambda: time.monotonic() > deadline))
        await asyncio.sleep(0.1)
        empty.put_hashes(whole.hashes)
        for index in range(whole.num_chunks):
            await asyncio.sleep(0.01)
            empty.put(index, whole.get(index))
        return await fetching

    deadline = time.monotonic() + 80
    assert asyncio.run(run()).complete and time.monotonic() < deadline - 10


def test_what_a_dead_donor_had_goes_to_others(whole, empty):
    found = fetch(empty, {"a": Donor(whole), "b": Donor(whole, fault="dies"), "c": Donor(whole)})
    assert found.complete and found.corrupt == [] and found.again == 1, "the one that it was at"


def test_a_silent_donor_costs_its_window_and_no_more(whole, empty):
    donors = {"a": Donor(whole), "silent": Donor(whole, fault="silent")}
    found = fetch(empty, donors, timeout=0.3)
    assert found.complete and len(donors["silent"].asked) <= 1 + fetching.MAX_STRIKES
    assert found.seconds < 50


def test_what_hangs_is_asked_of_another_in_the_end(whole, empty, monkeypatch):
    monkeypatch.setattr(fetching, "SLOWEST_USUAL", 0.5)
    found = fetch(empty, {"a": Donor(whole), "silent": Donor(whole, fault="silent")}, timeout=120.0)
    assert found.complete and found.seconds < 50, "long before its time is over"
    assert found.again <= 1


def test_busy_donors_and_such_with_a_part_are_used(whole, empty, monkeypatch):
    monkeypatch.setattr(fetching, "RESTING", 0.02)
    monkeypatch.setattr(fetching, "LOOK_AGAIN", 0.2)
    half = set(range(0, whole.num_chunks, 2))
    rest = set(range(whole.num_chunks)) - half
    donors = {"even": Donor(whole, has=half), "odd": Donor(whole, has=rest), "busy": Donor(whole, fault="busy")}
    found = fetch(empty, donors)
    assert found.complete and found.again == 0


def test_a_fetch_that_was_cut_off_goes_on(whole, empty):
    empty.put_hashes(whole.hashes)
    for index in range(0, 10):
        empty.put(index, whole.get(index))
    donor = Donor(whole)
    found = fetch(empty, {"a": donor})
    assert found.complete and sorted(donor.asked) == list(range(10, whole.num_chunks))


def test_without_donors_it_ends_when_it_must(empty):
    found = fetch(empty, {}, seconds=0.3)
    assert not found.complete and found.chunks == 0


# --- the Hub ---


def hub_file(store: ChunkStore, ranges: list | None = None, spoil: int | None = None):
    data = bytearray((store.path / "state").read_bytes())
    if spoil is not None:
        data[spoil * CHUNK] ^= 1

    def read(manifest: Manifest, offset: int, length: int) -> bytes:
        assert manifest.root == store.root
        if ranges is not None:
            ranges.append((offset, length))
        return bytes(data[offset : offset + length])

    return read


def test_the_hub_gives_what_is_missing(whole, empty):
    empty.put_hashes(whole.hashes)
    for index in (1, 4):
        empty.put(index, whole.get(index))
    ranges = []
    hub = HubDonor(hub_file(whole, ranges), manifest_of(whole), empty)
    wait_until(lambda: empty.is_complete)
    hub.stop()
    assert empty.verify() and hub.given == whole.num_chunks - 2
    assert all(offset % CHUNK == 0 and length <= 8 * CHUNK for offset, length in ranges)
    assert sum(length for _, length in ranges) == whole.total_bytes - 2 * CHUNK, "nothing twice"


def test_the_hub_alone_is_enough(whole, empty, monkeypatch):
    monkeypatch.setattr("volunteer_kit.swarm.hub_chunks.PATIENCE", 0.0)
    HubDonor(hub_file(whole), manifest_of(whole), empty)
    wait_until(lambda: empty.is_complete)
    assert empty.verify() and empty.read(state())[0] == METADATA


@pytest.mark.parametrize("listed", [True, False])
def test_a_false_file_on_the_hub_is_left_alone(whole, empty, monkeypatch, listed):
    monkeypatch.setattr("volunteer_kit.swarm.hub_chunks.PATIENCE", 0.0)
    if listed:
        empty.put_hashes(whole.hashes)
    before = set(threading.enumerate())
    HubDonor(hub_file(whole, spoil=3), manifest_of(whole), empty)
    wait_until(lambda: not [t for t in set(threading.enumerate()) - before if t.name == "hub chunks"])
    assert not empty.is_complete and 3 in empty.missing()


# --- what strangers ask and say ---


@pytest.mark.parametrize(
    "words",
    [None, 7, [], [b"r" * 32], [b"r" * 31, 0], ["r" * 32, 0], [b"r" * 32, -2], [b"r" * 32, 2**40], [b"r" * 32, True]],
    ids=str,
)
def test_what_is_no_request_is_refused(words):
    with pytest.raises(ValueError):
        _read_request(MSGPackSerializer, MSGPackSerializer.dumps(words))
    assert _read_request(MSGPackSerializer, MSGPackSerializer.dumps([b"r" * 32, HASHES])) == (b"r" * 32, HASHES)


def test_who_says_that_it_has_chunks():
    a, b, own = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(3))
    root = b"r" * 32
    records = {
        a.to_bytes(): ValueWithExpiration([b"other678", root[:8]], 1e10),
        b.to_bytes(): ValueWithExpiration([b"other678"], 1e10),
        own.to_bytes(): ValueWithExpiration([root[:8]], 1e10),
        b"": ValueWithExpiration([root[:8]], 1e10),
        b"\xff" * 300: ValueWithExpiration([root[:8]], 1e10),
        "words": ValueWithExpiration([root[:8]], 1e10),
        b"c" * 34: root[:8],
        b"d" * 34: ValueWithExpiration(7, 1e10),
    }
    assert read_chunk_donors(records, root, own) == [a]
    for nothing in (None, 7, "words", []):
        assert read_chunk_donors(nothing, root, own) == []


def test_a_root_is_of_its_hashes_in_order():
    assert root_of(b"a" * 32 + b"b" * 32) != root_of(b"b" * 32 + b"a" * 32) and len(root_of(b"")) == 32


@pytest.mark.parametrize("left", [0, 5, 16, 30])
def test_a_store_whose_file_is_cut_off_is_refused(tmp_path, left):
    metadata, tensors = {"epoch": 3, "lineage": "00" * 8, "numbers": [1, 2.0]}, [torch.arange(10.0)]
    store = ChunkStore.write(tmp_path, metadata, tensors)
    assert store.read(tensors)[0] == metadata
    with open(store.path / "state", "r+b") as file:
        file.truncate(left)
    with pytest.raises(ValueError):
        store.read(tensors)
