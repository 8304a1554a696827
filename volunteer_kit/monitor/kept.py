"""The states that a monitor keeps: written beside the loop, on probation, then signed; a rollback goes to one."""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from volunteer_kit.checkpoint import CheckpointError, save_checkpoint
from volunteer_kit.swarm.chunks import ChunkStore
from volunteer_kit.swarm.manifest import Manifest

KEPT = 5  # confirmed states; each as large as a state, twice where they are signed


@dataclass(frozen=True)
class Kept:
    """A state on the disk.

    :param root, total_bytes, chunk_size: of its chunks; root is empty in a run that nobody signs for
    :param checkpoint: the folder's name, below checkpoints/
    :param confirmed: it and what came after it was good
    :param manifest: what was signed of it, without its signature; None: nothing yet
    """

    epoch: int
    order: int
    lineage: str
    checkpoint: str
    root: str = ""
    total_bytes: int = 0
    chunk_size: int = 0
    confirmed: bool = False
    manifest: list | None = None

    @property
    def signed(self) -> Manifest | None:
        if self.manifest is None:
            return None
        words = [bytes.fromhex(w[4:]) if isinstance(w, str) and w.startswith("hex:") else w for w in self.manifest]
        return Manifest.from_list(words)

    def with_manifest(self, manifest: Manifest) -> Kept:
        words = [f"hex:{word.hex()}" if isinstance(word, bytes) else word for word in manifest.to_list()]
        return replace(self, manifest=words)


class KeptStates:
    """The list, in a file; oldest first. What is no longer in it is deleted from the disk.

    :param folder: the monitor's: states.json, checkpoints/, states/
    """

    def __init__(self, folder: Path):
        self._file, self.checkpoints, self.states = folder / "states.json", folder / "checkpoints", folder / "states"
        self.all: list[Kept] = [one for one in self._read() if self._is_there(one)]

    def _read(self) -> list[Kept]:
        try:
            found = [Kept(**fields) for fields in json.loads(self._file.read_text())]
            for one in found:
                one.signed  # noqa: B018  raises for words that are no manifest
            return found
        except (OSError, ValueError, TypeError, KeyError):  # missing or damaged: as on a new machine
            return []

    def _is_there(self, one: Kept) -> bool:
        store = ChunkStore.find(self.states, bytes.fromhex(one.root)) if one.root else None
        return (self.checkpoints / one.checkpoint).is_dir() and (not one.root or bool(store and store.is_complete))

    @property
    def roots(self) -> list[bytes]:
        return [bytes.fromhex(one.root) for one in self.all if one.root]

    @property
    def confirmed(self) -> list[Kept]:
        return [one for one in self.all if one.confirmed]

    @property
    def waiting(self) -> list[Kept]:
        return [one for one in self.all if not one.confirmed]

    def of_epoch(self, epoch: int) -> Kept | None:
        return next((one for one in reversed(self.all) if one.epoch == epoch), None)

    def add(self, one: Kept) -> None:
        """A state that was just written. Only now is anything deleted: what is being written is not in the list yet."""
        self.all = [other for other in self.all if other.epoch != one.epoch] + [one]
        newest_signed = max((one for one in self.all if one.signed), key=lambda one: one.epoch, default=None)
        for old in self.confirmed[:-KEPT]:
            if old is not newest_signed:  # joiners stand on it until there is another
                self.all.remove(old)
        self._save()
        self._sweep()

    def update(self, before: Kept, after: Kept) -> None:
        self.all = [after if one == before else one for one in self.all]
        self._save()

    def remove(self, one: Kept) -> None:
        self.all.remove(one)
        self._save()

    def give_up_after(self, epoch: int) -> None:
        """What came after this epoch was of a model that is no longer the run's."""
        self.all = [one for one in self.all if one.epoch <= epoch]
        self._save()

    def _save(self) -> None:
        """Raises OSError."""
        part = self._file.with_name(f".states.{os.getpid()}.part")
        with open(part, "w") as file:
            json.dump([asdict(one) for one in self.all], file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self._file)

    def _sweep(self) -> None:
        ChunkStore.keep(self.states, self.roots)
        names = {one.checkpoint for one in self.all}
        for path in self.checkpoints.glob("epoch-*"):
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)


class Writer:
    """A thread that writes states; one at a time, and nobody waits for the disk.

    :param names: of the tensors, in the order of state_tensors()
    :param meta: what each checkpoint says of its run
    :param chunks: put the state down for others to fetch as well
    """

    def __init__(self, kept: KeptStates, names: Sequence[str], meta: Mapping[str, Any], chunks: bool):
        self._kept, self._names, self._meta, self._chunks = kept, list(names), dict(meta), chunks
        self._todo: queue.Queue[tuple[dict, list[torch.Tensor]] | None] = queue.Queue(maxsize=1)
        self._done: queue.Queue[Kept | OSError] = queue.Queue()
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="writer", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """It writes, or nobody has asked yet what came of it."""
        return self._busy.is_set() or not self._todo.empty() or not self._done.empty()

    def submit(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        """A copy of a state. Not while it is busy."""
        self._busy.set()
        self._todo.put_nowait((metadata, tensors))

    def results(self) -> Iterable[Kept | OSError]:
        """What was written, or why it was not."""
        while not self._done.empty():
            yield self._done.get_nowait()

    def close(self) -> None:
        self._todo.put(None)

    def _run(self) -> None:
        while (job := self._todo.get()) is not None:
            try:
                self._done.put(self._write(*job))
            except OSError as error:
                self._done.put(error)
            except Exception as error:  # a bug in here must not be the end of all checkpoints
                self._done.put(CheckpointError(f"A checkpoint could not be saved: {error!r}"))
            finally:
                del job
                self._busy.clear()

    def _write(self, metadata: dict, tensors: list[torch.Tensor]) -> Kept:
        metadata = {name: value for name, value in metadata.items() if name != "past"}
        named = dict(zip(self._names, tensors, strict=True))
        path = save_checkpoint(self._kept.checkpoints, named, {**self._meta, **metadata})
        one = Kept(metadata["epoch"], metadata.get("order", 0), metadata["lineage"], path.name)
        if not self._chunks:
            return one
        store = ChunkStore.write(self._kept.states, metadata, tensors)
        return replace(one, root=store.root.hex(), total_bytes=store.total_bytes, chunk_size=store.chunk_size)
