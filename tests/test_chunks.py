"""A signed state in chunks: its bytes and its store."""

from __future__ import annotations

import os

import pytest
import torch

from volunteer_kit.swarm.state.chunk_store import ChunksError, ChunkStore, root_of
from volunteer_kit.swarm.state.manifest import Manifest

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


def test_a_root_is_of_its_hashes_in_order():
    assert root_of(b"a" * 32 + b"b" * 32) != root_of(b"b" * 32 + b"a" * 32) and len(root_of(b"")) == 32


@pytest.mark.parametrize("left", [0, 5, 16])
def test_a_store_tells_whose_step_its_state_is_of_unless_it_is_cut_off(whole, left):
    assert whole.of_epoch() == (20, "12" * 8)
    with open(whole.path / "state", "r+b") as file:
        file.truncate(left)
    with pytest.raises(ValueError):
        whole.of_epoch()
