"""Define entries and their parts: one entry is one optimizer step of the whole swarm.

Its lineage is the hash of its content and its parent's lineage, so equal lineages mean equal histories and equal
parameters. The ballot at which an entry is certified is no part of it: a later leader proposes it again unchanged.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Final, NamedTuple

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Answer

LATER: Final = ("commitments",)  # fields


class Member(NamedTuple):
    """A peer in a group."""

    peer: str
    account: str  # who answers for it: a user name in a run with access control, else the peer id itself
    public: bool  # whether others can call it
    observes: bool = False  # it computes nothing: a monitor


class Verdict(NamedTuple):
    """A ban with its proof, as verified averaging or an equivocation brings it."""

    peer: str
    proof: bytes


class _Hashed:
    """Compute a lineage from every field, in order, behind the name of the kind. Fields that were added later count
    where they are set."""

    parent: bytes

    @cached_property
    def lineage(self) -> bytes:
        """SHA-256 of the content and the parent's lineage."""
        names = [each.name for each in fields(self)]  # type: ignore[arg-type]
        content = [getattr(self, name) for name in names if name not in LATER or getattr(self, name)]
        text = json.dumps([type(self).__name__, content], default=bytes.hex, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Entry(_Hashed):
    """One step. `epoch` is the parent's; the step leads to `epoch + 1`."""

    generation: int
    sequence: int
    epoch: int
    parent: bytes
    birth: Ballot
    fingerprint: bytes  # of the round
    group: tuple[Member, ...]
    answers: tuple[Answer, ...]
    missing: int  # cells whose reducer died before anybody had its answer: zero in this step
    gone: tuple[str, ...] = ()  # members that said goodbye
    verdicts: tuple[Verdict, ...] = ()
    commitments: bytes = b""  # digest of the members' commitments, in a run that verifies

    @cached_property
    def sample_cells(self) -> int:
        """Samples of each cell, summed over the cells."""
        return sum(share.samples * share.cells.bit_count() for answer in self.answers for share in answer.shares)


@dataclass(frozen=True)
class Opening(_Hashed):
    """Survivors without a quorum go on by themselves; every member signs it."""

    generation: int
    sequence: int
    epoch: int
    parent: bytes
    attempt: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class RollbackOrder(_Hashed):
    """The monitor restores an older checkpoint. The epoch goes on, the generation rises; it names its own view.

    Of two orders with one generation the one with the higher sequence wins.
    """

    generation: int
    sequence: int
    epoch: int
    parent: bytes  # lineage of the checkpoint
    members: tuple[Member, ...]
    banned: tuple[str, ...] = ()
    state: bytes = b""  # SHA-256 of the checkpoint's file: who fetches it from anybody knows that it is the monitor's


class Head(NamedTuple):
    """Where a peer is. `sample_cells` is what its branch committed in this generation."""

    generation: int
    sequence: int
    epoch: int
    lineage: bytes
    sample_cells: int

    @property
    def seed(self) -> bytes:
        """What the order of leaders follows from: nobody can choose it by what an entry holds."""
        return f"{self.generation}.{self.sequence}.{self.epoch}".encode()

    @property
    def order(self) -> tuple[int, int]:
        """Rank of the rollback order behind it: the higher one wins whatever the branches hold."""
        return (self.generation, self.sequence)

    def beats(self, other: Head) -> bool:
        """Whether this branch wins against the other one, if neither continues the other."""
        mine = (*self.order, self.sample_cells)
        theirs = (*other.order, other.sample_cells)
        return mine > theirs or (mine == theirs and self.lineage < other.lineage)
