"""What a lossy codec leaves out of a round, kept by this peer and added to its next ones: error feedback, both ways.

A sender keeps what it did not send, and a reducer what it did not answer, for the union of many senders' largest values
is dense again (Tang et al. 2019, DoubleSqueeze, arXiv:1905.05957). Nothing is ever lost then, it comes later: a peer's
values times its weight, minus what the others have heard of that, is what it still has to say. Kept in those units it
weighs the same whatever the next round's weight is, with whatever group, and after a restart, for it lies in a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import runtime_pb2
from hivemind.utils.logging import get_logger

from volunteer_kit.storage import DamagedFile, read_json, write_whole
from volunteer_kit.swarm.codec import decode
from volunteer_kit.swarm.codec_wire import FLOAT32

logger = get_logger(__name__)
MAX_AGE = 3600.0  # s; what is left over of a model that others have trained for longer is no help to it

PARTS, LARGEST_PART = 64, 2**19  # of all values; a part's values share two magnitudes, and slices are cut between parts


def part_size(numel: int) -> int:
    """Values of a part, of so many in all: as many parts as slices of up to some tens of reducers need."""
    return min(LARGEST_PART, max(2**12, numel // PARTS))


def _noted(said: dict) -> tuple[dict, float, int, float]:
    """(what it is about, total weight, order, s since 1970) of the note. Raises ValueError, KeyError, TypeError."""
    total, order, at = float(said["total"]), int(said["order"]), float(said["at"])
    if total < 0 or order < 0:
        raise ValueError(f"the weight {total}, the order {order}")
    return {"of": said["of"], "numel": said["numel"]}, total, order, at


class LeftOver:
    """Of one peer, over rounds.

    :param numel: values of all tensors together
    :param path: of a file that outlives this process, with a second beside it; None: in memory
    :param about: what it is left over of; a file about something else is not read
    """

    def __init__(self, numel: int, path: Path | None = None, about: str = ""):
        self._path, self._about = path, {"of": about, "numel": numel}
        self.total_weight = 0.0  # of all members in the last round
        self.order = 0  # the monitor's, under which it came about
        self._at = time.time()  # of the last round
        both = None if path is None else self._map(numel)
        # (N,) values times weight; (N,) means
        self.unsent, self.unanswered = torch.zeros(2, numel, **FLOAT32) if both is None else both

    def _map(self, numel: int) -> torch.Tensor | None:
        """(2, N) in the file; None, and no file from now on, if there can be none. Its place on the disk is taken at
        once: a page for which there is none left, when it is written, ends the process."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._read_note():
                self._path.unlink(missing_ok=True)
            if numel and hasattr(os, "posix_fallocate"):  # macOS has none
                with self._path.open("ab") as file:
                    os.posix_fallocate(file.fileno(), 0, 8 * numel)
            return torch.from_file(str(self._path), shared=True, size=2 * numel, **FLOAT32).view(2, numel)
        except (OSError, RuntimeError) as error:
            logger.warning(f"What is left over of rounds is kept in memory, and lost with this process: {error}")
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._path, self.total_weight, self.order = None, 0.0, 0
            return None

    def _read_note(self) -> bool:
        """Is there a file of ours?"""
        try:
            about, total, order, at = read_json(self._note, _noted)
            if about != self._about or abs(time.time() - at) > MAX_AGE:
                return False
            if self._path.stat().st_size != 8 * about["numel"]:
                return False
        except FileNotFoundError:
            return False
        except (OSError, DamagedFile) as error:
            logger.warning(f"What is left over of rounds cannot be used, and begins anew. {error}")
            return False
        self.total_weight, self.order, self._at = total, order, at
        return True

    @property
    def _note(self) -> Path:
        return self._path.with_suffix(".json")

    def note(self) -> None:
        """Beside the file: what it is about, and when it was written last. A full disk costs no round: then the file
        is out of date when it is read again, or not read."""
        self._at = time.time()
        if self._path is not None:
            told = {**self._about, "total": self.total_weight, "order": self.order, "at": self._at}
            try:
                write_whole(self._note, json.dumps(told), durable=False)  # once a round
            except OSError as error:
                logger.warning(f"What is left over of rounds will be lost with this process: {error}")

    def begin(self, tensors: Sequence[torch.Tensor], weight: float, order: int = 0) -> RoundsShare:
        """What goes into a round. Nothing is changed here before its `settle`.

        :param order: of the monitor: what came before one is forgotten
        """
        is_old = time.time() - self._at > MAX_AGE
        is_finite = torch.isfinite(self.unsent).all() and torch.isfinite(self.unanswered).all()
        if order != self.order or is_old or not is_finite:
            self.order = order
            self.forget()
        return RoundsShare(self, tensors, weight)

    def forget(self) -> None:
        self.unsent.zero_()
        self.unanswered.zero_()


class RoundsShare:
    """One round's values and what is left over of them.

    `tensors`: what goes in: ours, and what was left over; each a view of one vector, as hivemind's parts are then, so
    that a part's storage_offset tells its place.
    """

    def __init__(self, kept: LeftOver, tensors: Sequence[torch.Tensor], weight: float):
        self._kept, self._weight = kept, weight
        self._vector = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])  # (N,)
        if weight > 0:
            self._vector.add_(kept.unsent, alpha=1 / weight)
        ends = torch.tensor([tensor.numel() for tensor in tensors]).cumsum(0).tolist()
        self.tensors = [
            self._vector[end - tensor.numel() : end].view(tensor.shape)
            for end, tensor in zip(ends, tensors, strict=True)
        ]
        self._sent: dict[int, runtime_pb2.Tensor] = {}  # by place
        self._answered = self._vector[:0]  # of our slice
        self._first = self._last = 0  # our slice

    def take_slice(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Our own slice's parts -> what is to be added to each one's average, and then to hold what is left over of it.

        What we have not answered of other slices, which were ours in another group, we send to those who reduce them.
        """
        kept = self._kept
        self._first = parts[0].storage_offset() if parts else 0
        self._last = self._first + sum(part.numel() for part in parts)
        self._answered = kept.unanswered[self._first : self._last].clone()
        if self._weight > 0 and kept.total_weight > 0:
            for others in (slice(0, self._first), slice(self._last, None)):
                self._vector[others].add_(kept.unanswered[others], alpha=kept.total_weight / self._weight)
        return list(self._answered.split([part.numel() for part in parts])) if parts else []

    def sending(self, codec: CompressionBase) -> CompressionBase:
        """`codec`, which takes from each part what it sends of it."""
        return _Taking(codec, self._sent)

    def settle(self, lost: Sequence[range], total_weight: float, is_counted: bool) -> None:
        """The round is over, and its answers are applied.

        :param lost: places of which no answer came: it counts as if we had sent nothing of them
        :param total_weight: of all members; 0 if we cannot know
        :param is_counted: what we sent has entered; else it was in vain
        """
        kept, own = self._kept, slice(self._first, self._last)
        for place, message in self._sent.items():
            if any(place in places for places in lost):
                self._vector[place : place + math.prod(message.size)] += decode(message).reshape(-1).float()
        if self._weight > 0 and is_counted:
            torch.mul(self._vector, self._weight, out=kept.unsent)
            kept.unsent[own] = 0.0
            if kept.total_weight > 0:
                kept.unanswered[: self._first] = 0.0
                kept.unanswered[self._last :] = 0.0
        kept.unanswered[own] = self._answered
        if total_weight > 0:
            kept.total_weight = total_weight
        kept.note()


class _Taking(CompressionBase):
    def __init__(self, codec: CompressionBase, sent: dict[int, runtime_pb2.Tensor]):
        self._codec, self._sent = codec, sent

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        message = self._codec.compress(tensor, info)
        tensor.sub_(decode(message))
        self._sent[tensor.storage_offset()] = message
        return message

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        return self._codec.extract(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return self._codec.estimate_compression_ratio(info)
