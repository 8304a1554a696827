"""Branches: let survivors without a quorum go on, and choose a branch when two meet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from volunteer_kit.swarm.sync.ballots import leader_order
from volunteer_kit.swarm.sync.beliefs import Beliefs
from volunteer_kit.swarm.sync.contributions import Answer
from volunteer_kit.swarm.sync.entries import Entry, Head, Member, Opening, RollbackOrder
from volunteer_kit.swarm.sync.log import Log, LogItem, is_chain

ALONE_SLACK: Final = 5.0  # s; peers do not miss a quorum at the same moment


@dataclass
class OpeningAttempt:
    """An opening that this peer asked others to sign."""

    opening: Opening
    asked: float  # s
    above: int = -1  # an attempt that a member has signed already
    signers: set[str] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether every member has signed."""
        return {each.peer for each in self.opening.members} <= self.signers


def opener(slot: bytes, members: Iterable[Member]) -> str | None:
    """The member that asks the others to sign; None: nobody of them can be called, so there is no branch."""
    order = leader_order(slot, (each.peer for each in members if each.public))
    return order[0] if order else None


def opening_members(item: LogItem, alone: Sequence[Member]) -> tuple[Member, ...]:
    """The members of an opening: those of the view that are alone together.

    Newcomers open a branch only if nobody of the view is there: everybody has left.
    """
    known = tuple(sorted(each for each in alone if item.membership.view.get(each.peer) == each))
    return known or tuple(sorted(alone))


def entries_of(items: Iterable[LogItem]) -> tuple[Entry, ...]:
    """The entries among these items."""
    return tuple(item.step for item in items if isinstance(item.step, Entry))


@dataclass(frozen=True)
class Suffix:
    """What another peer has behind an item of our log, its proofs checked."""

    base: LogItem
    items: tuple[LogItem, ...]

    @property
    def head(self) -> Head:
        """Where it leads."""
        return self.items[-1].head

    @property
    def order_place(self) -> int | None:
        """The place of its last rollback order."""
        places = [place for place, item in enumerate(self.items) if isinstance(item.step, RollbackOrder)]
        return places[-1] if places else None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its entries."""
        return entries_of(self.items)


def checked_suffix(log: Log, after: bytes | None, items: tuple[LogItem, ...]) -> Suffix | None:
    """The items as a suffix of one of ours; None: they do not follow, or a proof does not hold."""
    if after is None or not items or after not in log:
        return None
    base = log.item(after)
    return Suffix(base, items) if is_chain((base, *items)) else None


def entries_behind(items: Sequence[LogItem], base: Head | None) -> list[tuple[bytes, tuple[Answer, ...]]]:
    """Lineage and answers of the entries that count behind `base`: those that a rollback order undid do not."""
    found: list[tuple[bytes, tuple[Answer, ...]]] = []
    for item in items:
        if base is not None and item.head.lineage == base.lineage:
            found = []
        elif isinstance(item.step, RollbackOrder):
            kept = [place for place, (lineage, _) in enumerate(found) if lineage == item.step.parent]
            found = found[: kept[0] + 1] if kept else []
        elif isinstance(item.step, Entry):
            found.append((item.head.lineage, item.step.answers))
    return found


def last_order(items: Sequence[LogItem], base: Head | None) -> RollbackOrder | None:
    """The last rollback order behind `base`."""
    found: RollbackOrder | None = None
    for item in items:
        if base is not None and item.head.lineage == base.lineage:
            found = None
        elif isinstance(item.step, RollbackOrder):
            found = item.step
    return found


@dataclass(frozen=True)
class Fork:
    """Our branch and another one behind the same item, compared by the samples that are believed."""

    log: Log
    suffix: Suffix
    beliefs: Beliefs
    entered: Mapping[bytes, float]  # when this peer came to each head of its log
    epoch_seconds: float
    now: float

    @cached_property
    def seconds(self) -> float:
        """Since the branches parted, about."""
        seconds = 0.0
        for item in (self.suffix.base, *self.log.behind(self.suffix.base.head.lineage)):
            if item.head.lineage in self.entered:
                return seconds + self.now - self.entered[item.head.lineage]
            seconds += self.epoch_seconds  # it was passed before this peer came
        return seconds

    @property
    def ours(self) -> float:
        """Sample-cells of our branch."""
        return self._believed(entries_of(self.log.behind(self.suffix.base.head.lineage)))

    @property
    def theirs(self) -> float:
        """Sample-cells of the other one."""
        return self._believed(self.suffix.entries)

    def _believed(self, entries: Iterable[Entry]) -> float:
        return self.beliefs.believed(entries, self.seconds + self.epoch_seconds)

    @property
    def is_plausible(self) -> bool:
        """Whether the other one's accounts can have computed what it says."""
        return self.beliefs.is_plausible(self.suffix.entries, self.seconds, self.epoch_seconds)

    @property
    def they_win(self) -> bool:
        """Whether the other one wins: more believed samples; of equals the smaller lineage."""
        ours, theirs = self.ours, self.theirs
        wins = theirs > ours or (theirs == ours and self.suffix.head.lineage < self.log.last.head.lineage)
        return wins and self.is_plausible
