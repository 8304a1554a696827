"""Whole states on our disk, in chunks: signed ones, fetched from many donors and adopted; and our own, put down for
others to fetch, or for a monitor to sign."""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in one on Python 3.10
from contextlib import suppress

import torch
from hivemind.utils import MPFuture
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.chunks import ChunksError, ChunkStore
from volunteer_kit.swarm.fetching import Fetched
from volunteer_kit.swarm.ground import GroundedState
from volunteer_kit.swarm.hub_chunks import HubDonor
from volunteer_kit.swarm.manifest import MANIFEST_EVERY, Manifest

logger = get_logger(__name__)
KEPT_SIGNED = 4  # states that a monitor keeps; to one of them it can roll back
LOOK_EVERY = 0.2  # s between looks at how far a download is


class StoredState(GroundedState):
    """Fetches signed states, and keeps of our own what others may ask for. `trust` says in which folder."""

    checkpoint: ChunkStore | None = None  # signed, and adopted

    def __init__(self, *args, **kwargs):
        self._snapshots: list[bytes] = []  # roots of our own states on the disk, oldest first
        self._writing: threading.Thread | None = None
        self._fetching: tuple[bytes, ...] = ()  # root of the signed state that was asked for last
        self.signed: deque[bytes] = deque(maxlen=KEPT_SIGNED)  # roots of what we, a monitor, have signed
        super().__init__(*args, **kwargs)

    # --- signed states ---

    def take_checkpoint(self, manifest: Manifest, store: ChunkStore, **instead) -> bool:
        """Adopt what a manifest describes, fetched. :returns: whether it was; if not, nothing has changed.

        :param instead: of the epoch, lineage and order that it has
        """
        try:
            metadata, tensors = store.read(self.state_tensors())
            metadata = {**metadata, "order": manifest.order, **instead}
            self.check_state(metadata, tensors)
        except (OSError, ValueError, TypeError) as e:  # of another model: the monitor's mistake, or ours
            logger.warning(f"The signed state of epoch {manifest.epoch} cannot be used: {e}")
            return False
        self.adopt_state(metadata, tensors)
        self.ground_is_own(is_veteran=False)
        self.checkpoint = store
        self._clear()
        return True

    def fetch(
        self, manifest: Manifest, timeout: float, on_download: Callable[[int, int], None] | None = None
    ) -> ChunkStore | None:
        """A signed state, whole and verified, on our disk; None if it did not come in time (s)."""
        deadline = time.monotonic() + timeout
        self.last_fetch = Fetched()
        try:
            self._fetching = (manifest.root,)
            store = ChunkStore.of(self.trust.folder, manifest)
            if store.has_doubtful_bytes and store.hashes is not None:
                logger.warning(f"What {store.path} says of itself is damaged; the bytes in it are checked and used")
                store.verify_all()
            while not (store.is_complete and store.verify()):
                if time.monotonic() > deadline:
                    return None
                self._fetch_missing(manifest, store, deadline, on_download)
        except (OSError, ChunksError) as e:
            free = shutil.disk_usage(self.trust.folder).free / 1e6
            logger.warning(f"The signed state needs {manifest.total_bytes / 1e6:,.0f} MB in {self.trust.folder}, where "
                           f"{free:,.0f} MB are free: {e}")  # fmt: skip
            return None
        return store

    def _fetch_missing(self, manifest: Manifest, store: ChunkStore, deadline: float, on_download) -> None:
        result: MPFuture = MPFuture()
        order = [str(self.trust.folder), manifest.root, manifest.total_bytes, manifest.chunk_size, result]
        self._outer_pipe.send(("_fetch_chunks", order, {}))
        hub = HubDonor(self.trust.fetch_from_hub, manifest, store) if self.trust.fetch_from_hub else None
        try:
            while time.monotonic() < deadline:
                if on_download is not None:
                    on_download(min(self._chunk_bytes.value, manifest.total_bytes), manifest.total_bytes)
                with suppress(FutureTimeoutError):
                    self._note(result.result(LOOK_EVERY))
                    return
        finally:
            result.cancel()
            if hub is not None:
                hub.stop()

    def _note(self, found: list | None) -> None:
        if found is None:
            raise OSError("the disk refused it")
        complete, chunks, again, corrupt, given, seconds = found
        self.last_fetch = Fetched(complete, chunks, again, corrupt, given, seconds)
        for donor in corrupt:
            self.refuse(donor, "it gave other bytes than the monitor signed")

    # --- our own states, for others ---

    def after_own_step(self) -> None:
        self.ground_is_own()
        trust, epoch = self.trust, self._state_epoch
        if trust is not None and trust.keep_own and not self.client_mode and epoch % MANIFEST_EVERY == 0:
            self._put_down()

    def put_down(self, folder) -> tuple[dict, ChunkStore]:
        """Write the state of this moment. :returns: its metadata, and where it is. Raises StateRefused, OSError."""
        metadata, tensors, _ = self.get_current_state()
        return metadata, ChunkStore.write(folder, metadata, tensors)

    def _put_down(self) -> None:
        """The same in the background, of the state after a step. One at a time: a slow disk skips some."""
        if self._writing is not None and self._writing.is_alive():
            return
        with torch.no_grad(), self.lock_averaged_tensors:
            metadata, tensors = self.metadata(), [tensor.detach().clone() for tensor in self.state_tensors()]

        def write() -> None:
            try:
                self._snapshots.append(ChunkStore.write(self.trust.folder, metadata, tensors).root)
                self._clear()
            except OSError as e:
                logger.warning(f"Our state of epoch {metadata['epoch']} is not kept for others: {e}")

        self._writing = threading.Thread(target=write, name="put_down", daemon=True)
        self._writing.start()

    def _clear(self) -> None:
        """Two of our own, and the last signed ones: enough for a rollback that needs no download."""
        checkpoint = [self.checkpoint.root] if self.checkpoint is not None else []
        ChunkStore.keep(self.trust.folder, [*self._snapshots[-2:], *self.signed, *checkpoint, *self._fetching])


def manifest_of(
    averager: StoredState, folder, run_key: str, sequence: int, created_at: float, expires_at: float
) -> tuple[Manifest, ChunkStore]:
    """What a monitor signs of the state that its averager holds, put down in `folder`. It must be a state that was
    judged good: signing is what makes it everybody's ground.

    Raises StateRefused while statistics are on their way, OSError (disk).
    """
    metadata, store = averager.put_down(folder)
    averager.signed.append(store.root)
    manifest = Manifest(
        run_key=run_key,
        epoch=metadata["epoch"],
        sequence=sequence,
        order=metadata.get("order", 0),
        lineage=bytes.fromhex(metadata["lineage"]),
        root=store.root,
        total_bytes=store.total_bytes,
        chunk_size=store.chunk_size,
        created_at=created_at,
        expires_at=expires_at,
    )
    return manifest, store
