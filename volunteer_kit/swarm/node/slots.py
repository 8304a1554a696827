"""Keep gradient sums in a file that two processes map: the training process adds to them, the node sends them.

The file survives both processes: after kill -9 it holds what they wrote last. A power cut may tear it, see
`NodeStore.rebooted`.
"""

from __future__ import annotations

import mmap
import os
import shlex
import shutil
from pathlib import Path

import torch

ELEMENT = 4  # bytes of a float32
ZEROS = 2**20  # bytes written at a time where the system cannot reserve space


class StoreError(OSError):
    """The node's files cannot be used. The message says why and what to do."""


def no_room(path: Path, doing: str, reason: str) -> StoreError:
    """The words for a disk that does not take what should be written to `path`."""
    free = shutil.disk_usage(path.parent).free / 1e6
    return StoreError(
        f"The disk refused {doing} {path}: {reason}; {free:,.1f} MB are free.\n"
        f"1. Make room: df -h {shlex.quote(str(path.parent))}\n"
        "2. Or name a folder on another disk: --home FOLDER, or join_swarm(..., home=FOLDER)"
    )


class Slots:
    """A file of slots, each with `elements` float32 numbers, page-aligned. It is made if it is not there.

    One of the processes calls `ensure`; both call `view`. Each slot is a mapping of its own, so views stay valid when
    the file grows.

    :param elements: of one slot
    :raises StoreError: if the file cannot be made or opened
    """

    def __init__(self, path: str | Path, elements: int):
        self.path, self.elements = Path(path), elements
        page = mmap.ALLOCATIONGRANULARITY
        self.slot_bytes = max(1, -(-ELEMENT * elements // page)) * page
        self._views: dict[int, torch.Tensor] = {}
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be opened: {error.strerror}.\n"
                f"1. Look at its owner and rights: ls -la {shlex.quote(str(self.path.parent))}"
            ) from error

    def __len__(self) -> int:
        """Whole slots that the file has now; the other process may have added some."""
        return os.fstat(self._descriptor).st_size // self.slot_bytes

    def ensure(self, slots: int) -> None:
        """Let the file have at least so many slots; new ones are zero. Their place on the disk is taken at once, for a
        page without one ends the process that writes to it (SIGBUS).

        :raises StoreError: if the disk is full; the file is as it was before
        """
        before, size = os.fstat(self._descriptor).st_size, slots * self.slot_bytes
        if size <= before:
            return
        try:
            self._reserve(before, size - before)
        except OSError as error:
            os.ftruncate(self._descriptor, before)
            reason = error.strerror or str(error)
            raise no_room(self.path, f"{size / 1e6:,.1f} MB for the gradients in", reason) from error

    def _reserve(self, start: int, size: int) -> None:
        """Only what is new: where a file system has no fallocate, the C library writes into what is there.

        Raises OSError.
        """
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self._descriptor, start, size)
            return
        for place in range(start, start + size, ZEROS):  # macOS
            os.pwrite(self._descriptor, bytes(min(ZEROS, start + size - place)), place)

    def view(self, slot: int) -> torch.Tensor:
        """The slot's numbers, (elements,) float32, shared with the other process and the file.

        :raises IndexError: if the file does not have that slot
        """
        if slot not in self._views:
            if not 0 <= slot < len(self):
                raise IndexError(f"{self.path} has {len(self)} slots, none with the number {slot}")
            mapped = mmap.mmap(self._descriptor, self.slot_bytes, offset=slot * self.slot_bytes)
            self._views[slot] = torch.frombuffer(mapped, dtype=torch.float32, count=self.elements)  # (elements,)
        return self._views[slot]

    def zero(self, slot: int) -> None:
        """Fill a slot with zeros."""
        self.view(slot).zero_()

    def close(self) -> None:
        """Views that somebody still has stay valid. May be called again and again."""
        self._views.clear()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
