"""Store a state as a file: its canonical bytes in chunks, in a store that survives an interruption.

The bytes are a header (epoch, lineage, counters, sizes; msgpack, padded to 4 KB) and then the tensors, in order, each
in its own type, little-endian. Two peers with the same state have the same bytes, so any holder may serve it, signed or
not. Each MiB has a BLAKE2b-256, and the root is that of all of them in order.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import torch

from volunteer_kit.storage import clear_leftovers, flush, part_folder, set_aside, write_whole
from volunteer_kit.swarm.state.manifest import CHUNK_SIZE, MAX_CHUNKS, ROOT_SIZE, Manifest
from volunteer_kit.swarm.state.message_body import read_body

ALIGN = 4096  # bytes; tensors begin at whole pages
HEADER = struct.Struct("<8sQ")  # magic, bytes of msgpack that follow
MAGIC = b"vkstate1"
MAX_HEADER = 2**24  # bytes
MAX_NUMBERS = 2**20  # plain numbers or tensors of a state
STATE, HASHES, HAVE, SIZE = "state", "hashes", "have", "size"
LEFT_FOR = 3600.0  # s; no disk takes as long for a state. Of parts that older versions left
HASHED_AT_ONCE = 2**22  # bytes of a tensor looked at together

assert sys.byteorder == "little", "states travel in little-endian order, and tensors are copied as they lie"


class ChunksError(ValueError):
    """Bytes that are not those of the root."""


def chunk_hash(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=ROOT_SIZE).digest()


def root_of(hashes: bytes) -> bytes:
    """Of the chunks' hashes, one after another."""
    return hashlib.blake2b(hashes, digest_size=ROOT_SIZE, person=b"chunk hashes").digest()


# --- canonical bytes ---


def state_bytes(metadata: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    """A state as pieces of its canonical bytes.

    :param metadata: epoch, lineage and numbers, as NodeOptimizer.named_state() has them
    """
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    words = [metadata["epoch"], metadata["lineage"], list(metadata["numbers"]), sizes]
    packed = msgpack.packb(words)
    yield memoryview(HEADER.pack(MAGIC, len(packed)) + packed + bytes(-(HEADER.size + len(packed)) % ALIGN))
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        for start in range(0, len(flat), HASHED_AT_ONCE):
            yield memoryview(flat[start : start + HASHED_AT_ONCE])


def _in_chunks(pieces: Iterator[memoryview], size: int) -> Iterator[bytes | bytearray]:
    chunk = bytearray()
    for piece in pieces:
        while piece:
            taken = piece[: size - len(chunk)]
            chunk += taken
            piece = piece[len(taken) :]
            if len(chunk) == size:
                yield chunk
                chunk = bytearray()
    if chunk:
        yield chunk


# --- on the disk ---


class ChunkStore:
    """The chunks of one root in a folder: `state` (the bytes, with holes), `have` (a byte per chunk), `hashes`.

    A download writes it chunk by chunk and goes on from it after a restart; others are served from it meanwhile. Two
    processes may write: a chunk is marked after it is written, and what is marked was right when it was written.
    """

    def __init__(self, path: str | Path, root: bytes, total_bytes: int, chunk_size: int = CHUNK_SIZE):
        self.path, self.root, self.total_bytes, self.chunk_size = Path(path), root, total_bytes, chunk_size
        if not 0 < total_bytes <= MAX_CHUNKS * chunk_size:
            raise ChunksError(f"{total_bytes} bytes in chunks of {chunk_size}")
        self.num_chunks = -(-total_bytes // chunk_size)
        self._hashes: bytes | None = None

    # --- which there are ---

    @classmethod
    def place(cls, folder: str | Path, root: bytes) -> Path:
        return Path(folder) / f"state-{root.hex()}"

    @classmethod
    def of(cls, folder: str | Path, manifest: Manifest) -> ChunkStore:
        """The store of a manifest's state, begun if it is not there. What is there of it stays, whatever is damaged.
        Raises OSError (disk full)."""
        return cls.begun(folder, manifest.root, manifest.total_bytes, manifest.chunk_size)

    @classmethod
    def begun(cls, folder: str | Path, root: bytes, total_bytes: int, chunk_size: int = CHUNK_SIZE) -> ChunkStore:
        """Do as of() does, for a root. Raises OSError (disk full), ChunksError."""
        store = cls(cls.place(folder, root), root, total_bytes, chunk_size)
        found = cls.find(folder, root)
        if found is None or (found.total_bytes, found.chunk_size) != (store.total_bytes, store.chunk_size):
            store._begin()
        return store

    @classmethod
    def find(cls, folder: str | Path, root: bytes) -> ChunkStore | None:
        """What is here of a root, whole or not; None: nothing that can be read."""
        path = cls.place(folder, root)
        try:
            total, chunk_size = (int(word) for word in (path / SIZE).read_text().split())
            store = cls(path, root, total, chunk_size)
            return store if len((path / HAVE).read_bytes()) == store.num_chunks else None
        except (OSError, ValueError):
            return None

    @classmethod
    def restore(cls, folder: str | Path, root: bytes, chunk_size: int = CHUNK_SIZE) -> ChunkStore | None:
        """The whole store of a root from its bytes alone, where what lies beside them is damaged or missing; None: they
        are not the root's. Reads all of them, about a second a GB."""
        path = cls.place(folder, root)
        try:
            store = cls(path, root, (path / STATE).stat().st_size, chunk_size)
            hashes = b"".join(chunk_hash(store._read(index)) for index in range(store.num_chunks))
            if not store._fit(hashes):
                return None
            _set_folders_aside(path)
            store._describe(b"\1" * store.num_chunks)
            write_whole(path / HASHES, hashes)
            return store
        except (OSError, ChunksError):
            return None

    @classmethod
    def write(
        cls, folder: str | Path, metadata: dict, tensors: Sequence[torch.Tensor], chunk_size: int = CHUNK_SIZE
    ) -> ChunkStore:
        """Put a whole state down, beside its place and then renamed. Raises OSError (disk full)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with part_folder(folder / STATE) as part:
            hashes, total = bytearray(), 0
            with open(part / STATE, "wb") as file:
                for chunk in _in_chunks(state_bytes(metadata, tensors), chunk_size):
                    file.write(chunk)
                    hashes += chunk_hash(chunk)
                    total += len(chunk)
                file.flush()
                os.fsync(file.fileno())
            root = root_of(bytes(hashes))
            place = cls.place(folder, root)
            cls(part, root, total, chunk_size)._describe(b"\1" * (len(hashes) // ROOT_SIZE))
            write_whole(part / HASHES, bytes(hashes))
            there = cls.find(folder, root)
            if there is None or not there.is_complete:
                shutil.rmtree(place, ignore_errors=True)  # of a download that this state makes needless
                try:
                    os.rename(part, place)
                    flush(folder)
                except OSError as error:  # another writer of the same state was quicker
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
        return cls(place, root, total, chunk_size)

    def _begin(self) -> None:
        """Nothing counts as here yet; bytes that are here are written over."""
        if os.path.lexists(self.path) and not self.path.is_dir():
            set_aside(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        _set_folders_aside(self.path)
        with open(self.path / STATE, "ab") as file:
            file.truncate(min(file.tell(), self.total_bytes))
            os.posix_fallocate(file.fileno(), 0, self.total_bytes)  # a full disk is told now, not after an hour
        self._describe(bytes(self.num_chunks))

    def _describe(self, have: bytes) -> None:
        write_whole(self.path / HAVE, have)
        write_whole(self.path / SIZE, f"{self.total_bytes} {self.chunk_size}")

    @staticmethod
    def keep(folder: str | Path, roots: Sequence[bytes]) -> None:
        """Delete all stores but those of `roots`, and what killed writers left long ago."""
        kept = {ChunkStore.place(folder, root).name for root in roots}
        clear_leftovers(Path(folder) / STATE)
        with suppress(OSError):
            for path in Path(folder).iterdir():
                left = path.name.startswith(".state-") and path.stat().st_mtime < time.time() - LEFT_FOR
                if left or path.name.startswith("state-") and path.name not in kept:
                    shutil.rmtree(path, ignore_errors=True)

    # --- hashes ---

    @property
    def hashes(self) -> bytes | None:
        """All chunks' hashes, checked against the root; None while they are not here."""
        if self._hashes is None:
            with suppress(OSError):
                found = (self.path / HASHES).read_bytes()
                if self._fit(found):
                    self._hashes = found
        return self._hashes

    def put_hashes(self, hashes: bytes) -> bool:
        """Keep a stranger's list, if it is the root's. :returns: whether it is."""
        if not self._fit(hashes):
            return False
        if self._hashes is None:
            write_whole(self.path / HASHES, hashes)
            self._hashes = hashes
        return True

    def fill_zeros(self) -> None:
        """Write the missing chunks of zeros, which need not travel. The hashes are here. Raises OSError (disk).

        The statistics of an optimizer that has taken no step are nothing else.
        """
        hash_of: dict[int, bytes] = {}  # by size
        for index in self.missing():
            size = self.size_of(index)
            if size not in hash_of:
                hash_of[size] = chunk_hash(bytes(size))
            if self._hash(index) == hash_of[size]:
                self.put(index, bytes(size))

    def _fit(self, hashes: bytes) -> bool:
        return len(hashes) == ROOT_SIZE * self.num_chunks and root_of(hashes) == self.root

    def _hash(self, index: int) -> bytes:
        if self.hashes is None:
            raise ChunksError("the list of hashes is not here yet")
        return self.hashes[ROOT_SIZE * index : ROOT_SIZE * (index + 1)]

    # --- chunks ---

    def size_of(self, index: int) -> int:
        return min(self.chunk_size, self.total_bytes - index * self.chunk_size)

    def have(self) -> bytes:
        """A byte per chunk: 1 for those that are here."""
        return (self.path / HAVE).read_bytes()

    def missing(self) -> list[int]:
        return [index for index, there in enumerate(self.have()) if not there]

    @property
    def is_complete(self) -> bool:
        return self.hashes is not None and not self.missing()

    def put(self, index: int, data: bytes) -> bool:
        """Keep a stranger's chunk, if it is the right one. :returns: whether it is. Raises OSError (disk)."""
        if len(data) != self.size_of(index) or chunk_hash(data) != self._hash(index):
            return False
        with open(self.path / STATE, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data, index * self.chunk_size)
        self._mark(index, b"\1")
        return True

    def get(self, index: int) -> bytes | None:
        """A chunk's bytes, None if it is not here."""
        if not 0 <= index < self.num_chunks or not self.have()[index]:
            return None
        data = self._read(index)
        return data if len(data) == self.size_of(index) else None

    def _read(self, index: int) -> bytes:
        with open(self.path / STATE, "rb", buffering=0) as file:
            return os.pread(file.fileno(), self.size_of(index), index * self.chunk_size)

    def _mark(self, index: int, there: bytes) -> None:
        with open(self.path / HAVE, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), there, index)

    def verify(self) -> bool:
        """Read all of it again; what has changed on the disk is missing from then on. :returns: whether all is there.

        A power cut may have lost what was marked, and disks err: once before it is trained from costs a second a GB.
        """
        for index in range(self.num_chunks):
            if self.have()[index] and not self._is_right(index):
                self._mark(index, b"\0")
        return self.is_complete

    def _is_right(self, index: int) -> bool:
        return chunk_hash(self._read(index)) == self._hash(index)

    # --- the state in it ---

    def of_epoch(self) -> tuple[int, str]:
        """(epoch, lineage in hex digits) of the state, by its header. Raises ChunksError, OSError."""
        with open(self.path / STATE, "rb") as file:
            (epoch, lineage, *_), _ = _read_header(file)
        return epoch, lineage


def _set_folders_aside(path: Path) -> None:
    """Folders in the place of a store's files. Raises OSError."""
    for name in (STATE, HASHES, HAVE, SIZE):
        if (path / name).is_dir():
            set_aside(path / name)


def _read_header(file: BinaryIO) -> tuple[tuple[int, str, list, list], int]:
    """((epoch, lineage, numbers, sizes of the tensors), bytes of it), of an open state. Raises ChunksError."""
    start = file.read(HEADER.size)
    magic, length = HEADER.unpack(start) if len(start) == HEADER.size else (b"", 0)
    if magic != MAGIC or length > MAX_HEADER:
        raise ChunksError("no state")
    types = (int, str, list, list)
    try:
        epoch, lineage, numbers, sizes = read_body(file.read(length), *types, longest=MAX_HEADER, most=MAX_NUMBERS)
    except ValueError as error:
        raise ChunksError("its header is damaged") from error
    return (epoch, lineage, numbers, sizes), length
