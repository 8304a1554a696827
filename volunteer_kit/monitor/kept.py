"""The states that a monitor keeps: written beside the loop, on probation, then signed; a rollback goes to one."""

from __future__ import annotations

import json
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from volunteer_kit.checkpoint import CheckpointError, clear_leftovers, read_meta, save_checkpoint
from volunteer_kit.storage import DamagedFile, keep_aside, read_json, write_whole
from volunteer_kit.storage.epoch_folders import epoch_of, newest_first
from volunteer_kit.swarm.state.agreement import MAX_EPOCH
from volunteer_kit.swarm.state.chunk_store import ChunksError, ChunkStore
from volunteer_kit.swarm.state.manifest import MAX_SEQUENCE, ROOT_SIZE, Manifest

KEPT = 5  # confirmed states; each as large as a state, twice where they are signed
RECORD = "kept.json"  # in a checkpoint's folder: its entry of the list, of which the list can be made anew


@dataclass(frozen=True)
class Kept:
    """A state on the disk.

    :param root, total_bytes, chunk_size: of its chunks; root is empty in a run that nobody signs for
    :param checkpoint: the folder's name, below checkpoints/
    :param confirmed: it and what came after it was good
    :param manifest: what was signed of it, without its signature; None: nothing yet
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # a newer version's entry is none of ours

    epoch: Annotated[int, Field(ge=0, lt=MAX_EPOCH)]
    order: Annotated[int, Field(ge=0, lt=MAX_SEQUENCE)]
    lineage: Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=64)]
    checkpoint: Annotated[str, Field(pattern=r"^epoch-[0-9]{6,12}$")]
    root: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    total_bytes: Annotated[int, Field(ge=0, lt=2**53)] = 0
    chunk_size: Annotated[int, Field(ge=0, lt=2**53)] = 0
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


_LIST = TypeAdapter(list[Kept])


def _entries(found: Any) -> list[Kept]:
    """What JSON says. Raises ValueError for what is no list of entries."""
    try:
        entries = _LIST.validate_json(json.dumps(found))
        for one in entries:
            one.signed  # noqa: B018  raises for words that are no manifest
        return entries
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class KeptStates:
    """The list, in a file; oldest first.

    Only what is known to be superseded is deleted: what was taken off the list, and what is on no list and older than
    KEPT confirmed states. A list that is damaged or missing is made anew from the folders.

    :param folder: the monitor's: states.json, checkpoints/, states/
    :param warn: told in words what was found damaged
    """

    def __init__(self, folder: Path, warn: Callable[[str], None] = _say):
        self._file, self.checkpoints, self.states = folder / "states.json", folder / "checkpoints", folder / "states"
        self._warn = warn
        with suppress(OSError):  # no folder yet, or a sick disk, which is told when something is added
            clear_leftovers(self.checkpoints)
        self.all: list[Kept] = self._read()
        listed = {ChunkStore.place(self.states, root).name for root in self.roots}
        # of whom they are is not known; others come later, of downloads
        self._unlisted = {path.name for path in self._stores() if path.name not in listed and not _is_unfinished(path)}

    # --- what is there ---

    def _read(self) -> list[Kept]:
        try:
            found = read_json(self._file, _entries)
            if not found and newest_first(self.checkpoints):  # what is taken off the list is deleted with it
                return self._rebuilt("is empty")
        except FileNotFoundError:
            return self._rebuilt("is missing") if newest_first(self.checkpoints) else []
        except DamagedFile as error:
            return self._rebuilt(f"is damaged, or of another version of the kit ({error.reason})")
        return [one for one in map(self._as_it_is, found) if one is not None]

    def _as_it_is(self, one: Kept) -> Kept | None:
        """An entry, by what is there of it; None: no checkpoint."""
        if not (self.checkpoints / one.checkpoint).is_dir():
            return None
        root = bytes.fromhex(one.root)
        store = ChunkStore.find(self.states, root) if root else None
        if not root or (store is not None and store.is_complete):
            return one
        if one.chunk_size and ChunkStore.restore(self.states, root, one.chunk_size):
            self._warn(f"The chunks of step {one.epoch} in {self.states} were damaged, and are whole again.")
            return one
        self._warn(
            f"The chunks of step {one.epoch} in {self.states} are damaged: nobody can be ordered back to it. "
            "Its checkpoint is kept."
        )
        return replace(one, root="", total_bytes=0, chunk_size=0, manifest=None)

    def _rebuilt(self, what: str) -> list[Kept]:
        """The list, from the folders: what the checkpoints say of themselves, and the chunks that belong to them."""
        aside = keep_aside(self._file) if os.path.lexists(self._file) else ""
        stores = self._complete_stores()
        found = []
        for path in newest_first(self.checkpoints):
            try:
                found.append(_entry_of(path, stores))
            except CheckpointError as error:
                self._warn(str(error).partition("\n")[0])
        found = sorted(filter(None, map(self._as_it_is, found)), key=lambda one: (one.order, one.epoch))
        steps = ", ".join(str(one.epoch) for one in found) or "none"
        self._warn(
            f"The list of checkpoints {self._file} {what}.{aside} It was made anew from the folders in "
            f"{self.checkpoints} (steps: {steps}); nothing is deleted."
        )
        self.all = found
        with suppress(OSError):  # a sick disk is told when something is added
            self._save()
        return found

    def _stores(self) -> list[Path]:
        return sorted(self.states.glob("state-*"))

    def _complete_stores(self) -> dict[tuple[int, str], ChunkStore]:
        """By epoch and lineage."""
        found = {}
        for path in self._stores():
            with suppress(OSError, ValueError):
                root = bytes.fromhex(path.name.removeprefix("state-"))
                store = ChunkStore.find(self.states, root)
                if store is None or (not store.is_complete and not _is_unfinished(path)):
                    store = ChunkStore.restore(self.states, root)
                if store is not None and store.is_complete:
                    found[store.of_epoch()] = store
        return found

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

    # --- changes; they raise OSError ---

    def add(self, one: Kept) -> None:
        """A state that was just written."""
        all_now = [other for other in self.all if other.epoch != one.epoch] + [one]
        newest_signed = max((one for one in all_now if one.signed), key=lambda one: one.epoch, default=None)
        for old in [one for one in all_now if one.confirmed][:-KEPT]:
            if old is not newest_signed:  # joiners stand on it until there is another
                all_now.remove(old)
        self._become(all_now)
        self._sweep()

    def update(self, before: Kept, after: Kept) -> None:
        self._become([after if one == before else one for one in self.all])

    def remove(self, one: Kept) -> None:
        self._become([other for other in self.all if other is not one])

    def give_up_after(self, epoch: int) -> None:
        """What came after this epoch was of a model that is no longer the run's."""
        self._become([one for one in self.all if one.epoch <= epoch])

    def _become(self, all_now: list[Kept]) -> None:
        """Save the list; then what is no longer on it is deleted."""
        before, self.all = self.all, all_now
        self._save()
        names, roots = {one.checkpoint for one in all_now}, {one.root for one in all_now}
        for one in before:
            if one.checkpoint not in names:
                shutil.rmtree(self.checkpoints / one.checkpoint, ignore_errors=True)
            if one.root and one.root not in roots:
                shutil.rmtree(ChunkStore.place(self.states, bytes.fromhex(one.root)), ignore_errors=True)

    def _save(self) -> None:
        """Raises OSError."""
        write_whole(self._file, json.dumps([asdict(one) for one in self.all]))
        for one in self.all:
            record, text = self.checkpoints / one.checkpoint / RECORD, json.dumps(asdict(one))
            with suppress(OSError):  # the list is written; this is for the day when it is damaged
                if not record.is_file() or record.read_text(errors="replace") != text:
                    write_whole(record, text)

    def _sweep(self) -> None:
        """Delete what is on no list, and known to be superseded."""
        confirmed = self.confirmed
        oldest = confirmed[-KEPT].epoch if len(confirmed) >= KEPT else -1
        names = {one.checkpoint for one in self.all}
        for path in self.checkpoints.glob("epoch-*"):
            epoch = epoch_of(path)
            if path.name not in names and epoch is not None and epoch < oldest:
                shutil.rmtree(path, ignore_errors=True)
        self._unlisted = {name for name in self._unlisted if not self._is_older(self.states / name, oldest)}
        unlisted = [bytes.fromhex(name.removeprefix("state-")) for name in self._unlisted]
        ChunkStore.keep(self.states, [*self.roots, *unlisted])

    def _is_older(self, path: Path, epoch: int) -> bool:
        try:
            store = ChunkStore.find(self.states, bytes.fromhex(path.name.removeprefix("state-")))
            return store is not None and store.of_epoch()[0] < epoch
        except (OSError, ChunksError):
            return False


def _is_unfinished(path: Path) -> bool:
    """Is it a download that was cut off, or no store at all? It can be fetched again."""
    try:
        root = bytes.fromhex(path.name.removeprefix("state-"))
        store = ChunkStore.find(path.parent, root)
        return len(root) != ROOT_SIZE or (store is not None and bool(store.missing()))
    except (OSError, ValueError):
        return True


def _entry_of(path: Path, stores: Mapping[tuple[int, str], ChunkStore]) -> Kept:
    """A checkpoint's own entry; where there is none, what its meta.json says, on probation. Raises CheckpointError."""
    meta = read_meta(path)
    with suppress(OSError, DamagedFile):  # missing, damaged, or of another version
        [entry] = read_json(path / RECORD, lambda found: _entries([found]))
        if (entry.epoch, entry.lineage) == (meta["epoch"], meta.get("lineage")):
            return replace(entry, checkpoint=path.name)
    entry = {"epoch": meta["epoch"], "order": meta.get("order", 0), "lineage": meta.get("lineage", "")}
    if (store := stores.get((entry["epoch"], entry["lineage"]))) is not None:
        entry |= {"root": store.root.hex(), "total_bytes": store.total_bytes, "chunk_size": store.chunk_size}
    try:
        [found] = _entries([{**entry, "checkpoint": path.name}])
        return found
    except ValueError as error:
        raise CheckpointError(f"The checkpoint {path} is no monitor's: {error}.") from error


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
