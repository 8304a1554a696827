"""What members of a verified round tell each other. Places are positions in the group's list, which all have alike."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from volunteer_kit.robust.standing import Cause

MAX_SAMPLES = 2**20  # of one member in one round
DIGEST_SIZE = 8  # bytes; of what was heard


def digest_of(message: Any) -> bytes:
    """Equal where the same was said, whoever passed it on."""
    said: list[bytes] = []
    _tell(message, said)
    return hashlib.blake2b(b"".join(said), digest_size=DIGEST_SIZE, person=b"heard").digest()


def _tell(value: Any, said: list[bytes]) -> None:
    """Each value with its kind and length before it, so that no two messages are the same bytes."""
    if isinstance(value, bytes):
        said += (b"b%d:" % len(value), value)
    elif isinstance(value, tuple):
        said.append(b"(%d" % len(value))
        for one in value:
            _tell(one, said)
    elif isinstance(value, frozenset):
        _tell(tuple(sorted(value)), said)
    elif isinstance(value, np.ndarray):
        _tell(value.tobytes(), said)
    elif hasattr(value, "__dataclass_fields__"):
        _tell(tuple(getattr(value, field.name) for field in fields(value)), said)
    else:
        told = repr(value).encode()
        said.append(b"%s%d:%s" % (type(value).__name__[:1].encode(), len(told), told))


class Load(NamedTuple):
    """Samples of a contribution that count alike, where a member brings several sums of different ages.

    :param birth: epoch of the model that they were computed on
    :param factor: on their weight
    :param parts: a bit for each part of the vector that they are in
    """

    birth: int
    samples: int
    factor: float
    parts: int


@dataclass(frozen=True)
class Samples:
    """What a contribution was computed from.

    :param names: of the samples, in the order in which they were read; each hashable, and anybody can read it by that
    :param stale: the first so many were computed on the model of the epoch before, which is one step old
    :param microbatches: that they came in
    """

    names: tuple[Hashable, ...]
    stale: int = 0
    microbatches: int = 1

    def digest(self) -> bytes:
        """What is committed to."""
        names = [tuple(name) if isinstance(name, tuple) else name for name in self.names]
        text = repr((names, self.stale, self.microbatches))
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"samples").digest()

    def fault(self, weight: float) -> str | None:
        """Why this cannot be a contribution of `weight` samples, or None."""
        if len(self.names) != weight or len(self.names) > MAX_SAMPLES:
            return f"{len(self.names)} samples are named for a weight of {weight:g}"
        if len(set(self.names)) < len(self.names):
            return "a sample is named twice"
        if not 0 <= self.stale <= len(self.names) or not 1 <= self.microbatches <= max(1, len(self.names)):
            return "the list of samples contradicts itself"
        return None


@dataclass(frozen=True)
class Report:
    """A validator's: the sketches of the sum of the gradients of its range of a target's samples."""

    round_id: bytes
    target: int
    part: int  # which of the target's ranges
    total: np.ndarray  # float64 (slices, sums): of each reducer's slice of the vector


@dataclass(frozen=True)
class Accusation:
    """A reducer's: what `sender` said of part `part` is not what it sent. It can show the bytes."""

    round_id: bytes
    sender: int
    part: int


@dataclass(frozen=True)
class Vote:
    """An elector's, of one accused in one round.

    :param liars: validators whose reports it found wrong on the way
    :param accuser: the reducer whose accusation this is about, -1 where nobody accuses
    """

    round_id: bytes
    accused: int
    cause: Cause
    guilty: bool
    measure: float = 0.0
    liars: frozenset[int] = frozenset()
    accuser: int = -1


News = Report | Accusation | Vote


@dataclass(frozen=True)
class Commit:
    """Before anything is sent.

    :param weight: samples of the contribution
    :param samples: digest of their list
    :param parts: digest of the bytes that will be sent
    :param nonce: commitment to the number that will be shown
    :param distrusts: members whose work this one would not let in; None: it has just come, and does not know
    :param bans: of them, those that it has seen convicted
    :param due: those whose last check came to nothing
    :param news: what has been found since the last round
    :param of: the last round that this member went through; :param stated: digest of each member's Statement there, as
        this one heard it, b"" for none
    :param loads: of the samples, in their order; none: all were computed on the round's model, and count in full
    """

    weight: float
    samples: bytes
    parts: bytes
    nonce: bytes
    distrusts: frozenset[int] | None = frozenset()
    bans: frozenset[int] = frozenset()
    due: frozenset[int] = frozenset()
    news: tuple[News, ...] = ()
    of: bytes = b""
    stated: tuple[bytes, ...] = ()
    loads: tuple[Load, ...] = ()

    def weight_of(self, part: int) -> float:
        """Return the weight of one part of the vector."""
        if not self.loads:
            return self.weight
        return sum(load.factor * load.samples for load in self.loads if load.parts >> part & 1)


@dataclass(frozen=True)
class Reveal:
    """After all that was to be sent is sent.

    :param nonce: the number
    :param answers: digest of each reducer's answers as this member got them, b"" for none
    :param counted: of each member, how many of this reducer's own parts it is in, from the first on
    :param heard: digest of each member's commitment as this member heard it, b"" for none
    """

    nonce: bytes
    answers: tuple[bytes, ...]
    counted: tuple[int, ...]
    heard: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Statement:
    """Along the direction that was drawn.

    :param seed: the direction, as this member understood it
    :param numbers: float32 (parts, 2 + sums): of each part of the vector, as it was sent: its length, its distance from
        the answer, its sketch
    :param heard: digest of each member's Reveal as this member heard it, b"" for none
    :param opening: the list of samples, of who is looked at
    """

    seed: bytes
    numbers: np.ndarray
    heard: tuple[bytes, ...] = ()
    opening: Samples | None = None


@dataclass(frozen=True)
class Duty:
    """Work for the training process.

    :param kind: "check": report the sum of the gradients of samples [first, last); "judge": of each of `ranges`
    :param epoch: of the model, before the round's step
    :param samples: the target's whole list
    :param slices: values in each reducer's slice, in the vector's order
    :param loads: of the samples; see Commit. Slices are parts then
    """

    kind: str
    round_id: bytes
    epoch: int
    target: int
    samples: Samples
    ranges: tuple[tuple[int, int], ...]
    seed: bytes
    slices: tuple[int, ...]
    part: int = 0
    loads: tuple[Load, ...] = ()


@dataclass(frozen=True)
class Event:
    """Something to be told. kind: "mismatch", "strike", "ban", "trusted", "suspended", "void"."""

    kind: str
    peer: Any
    epoch: int
    text: str
    samples: float = 0.0
