"""Disputes: who may judge them, how votes are counted, and what follows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from volunteer_kit.robust.messages import Vote
from volunteer_kit.robust.standing import Cause


@dataclass
class Case:
    """One member's conduct in one round, before those who have to judge it.

    :param accused: its place in the group
    :param jury: places of those whose votes count
    :param accuser: who is wrong if the accused is not; -1: nobody
    """

    accused: int
    cause: Cause
    jury: frozenset[int]
    accuser: int = -1
    votes: dict[int, Vote] = field(default_factory=dict)
    closed: bool = False

    def take(self, place: int, vote: Vote) -> None:
        """The first vote of each juror counts; whoever votes twice has said nothing new."""
        if place in self.jury and not self.closed:
            self.votes.setdefault(place, vote)

    @property
    def guilty(self) -> int:
        return sum(vote.guilty for vote in self.votes.values())

    @property
    def innocent(self) -> int:
        return len(self.votes) - self.guilty

    @property
    def is_decided(self) -> bool:
        """More than half of all who had to vote say the same; who stays away helps nobody."""
        return 2 * max(self.guilty, self.innocent) > len(self.jury)

    @property
    def measure(self) -> float:
        """The median of what those who found it guilty have measured."""
        found = sorted(vote.measure for vote in self.votes.values() if vote.guilty)
        return found[len(found) // 2] if found else 0.0

    def liars(self) -> dict[int, int]:
        """Validators whose reports more than half of the jury found wrong -> how many did."""
        named = [place for vote in self.votes.values() for place in vote.liars]
        counts = {place: named.count(place) for place in set(named)}
        return {place: count for place, count in counts.items() if 2 * count > len(self.jury)}


class Docket:
    """The cases of one round."""

    def __init__(self, draw: Callable[[int, Collection[int]], frozenset[int]], electors: Collection[int]):
        """:param draw: (accused, electors) -> jury; :param electors: places of members that trained in the round"""
        self._draw, self._electors = draw, frozenset(electors)
        self.cases: dict[tuple[int, Cause, int], Case] = {}

    def open(self, accused: int, cause: Cause, accuser: int = -1) -> Case:
        key = (accused, cause, accuser)
        if key not in self.cases:
            self.cases[key] = Case(accused, cause, self._draw(accused, self._electors - {accused, accuser}), accuser)
        return self.cases[key]

    def find(self, accused: int, cause: Cause, accuser: int = -1) -> Case | None:
        return self.cases.get((accused, cause, accuser))
