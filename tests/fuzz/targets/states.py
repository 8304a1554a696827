"""States: what the monitor signs about them, and their bytes on a disk."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import msgpack
import torch

from tests.fuzz.forms import JSON, MSGPACK, Text
from tests.fuzz.frozen_clock import NOW
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import UNREADABLE, folder, run_keys, signer
from volunteer_kit.auth.keys import TokenError
from volunteer_kit.swarm.state.chunk_store import ChunksError, ChunkStore, root_of
from volunteer_kit.swarm.state.manifest import Manifest, Sequences, seal, unseal

registry = Registry()
MANIFEST = Manifest("run-0123", 20, 1, 0, b"12345678", b"r" * 32, 5000, 4096, NOW, NOW + 1000)
METADATA = {"epoch": 20, "lineage": "12" * 8, "numbers": [3, 4.5], "order": 1}
TENSORS = [torch.ones(20, 30), torch.zeros(0), torch.arange(5, dtype=torch.uint8), torch.ones(7).bfloat16()]
CHUNK = 4096


@registry.add(lambda: [seal(signer("monitor").sign, MANIFEST)], TokenError, form=MSGPACK)
def monitor_statement(data: bytes) -> bool:
    """A manifest, by anybody."""
    return unseal(run_keys().trust, "manifest", "run-0123", data, NOW) is not None


@registry.add(lambda: [msgpack.packb(MANIFEST.to_list())], TokenError, form=MSGPACK)
def signed_statement(data: bytes) -> bool:
    """The same where the monitor's key has signed the content: a monitor may err, or be taken over."""
    envelope = signer("monitor").sign("manifest", data)
    return unseal(run_keys().trust, "manifest", "run-0123", envelope, NOW) is not None


@functools.lru_cache(maxsize=1)
def _store() -> ChunkStore:
    return ChunkStore.write(folder() / "states", METADATA, TENSORS, CHUNK)


def _state_files() -> Iterator[bytes]:
    yield (_store().path / "state").read_bytes()


@registry.add(_state_files, ChunksError, *UNREADABLE, max_bytes=16_384)
def state_file(data: bytes) -> bool:
    """A state's bytes, of a root that the monitor has signed."""
    path = folder() / "state-file"
    path.mkdir(exist_ok=True)
    (path / "state").write_bytes(data)
    epoch, lineage = ChunkStore(path, b"r" * 32, max(1, len(data)), CHUNK).of_epoch()
    return (epoch, lineage) == (METADATA["epoch"], METADATA["lineage"])


@registry.add(lambda: [b"16768 4096", b"1 1024"], form=Text("0", "-1", " ", "99999999999999999999", "1e5", "_", "\n"))
def chunk_store(data: bytes) -> bool:
    """The files beside a state: how large it is, and what of it is here."""
    path = ChunkStore.place(folder() / "stores", b"s" * 32)
    path.mkdir(parents=True, exist_ok=True)
    size, _, rest = data.partition(b"|")
    (path / "size").write_bytes(size)
    (path / "have").write_bytes(rest or b"\0")
    (path / "hashes").write_bytes(rest)
    store = ChunkStore.find(path.parent, b"s" * 32)
    if store is None:
        return size == b"16768 4096"  # it is well written, and what is here is not of that size
    store.get(0)
    return store.hashes is not None or not store.is_complete


@registry.add(lambda: [b"h" * 64, b"h" * 32, bytes(range(64))])
def chunk_hashes(data: bytes) -> bool:
    """A donor's list of hashes, and a chunk."""
    path = folder() / "hashes"
    path.mkdir(exist_ok=True)
    store = ChunkStore(path, root_of(b"h" * 64), 5000, CHUNK)
    is_right = store.put_hashes(data)
    if is_right:
        assert not store.put(0, data)
    return is_right


@registry.add(lambda: [b'{"manifest": 3, "rollback": 17}', b"{}"], form=JSON)
def sequences(data: bytes) -> bool:
    """The file that remembers what this machine has acted on."""
    path = folder() / "sequences.json"
    path.write_bytes(data)
    return Sequences(path)["manifest"] == 3
