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
    :param least: votes that a verdict needs at least
    """

    accused: int
    cause: Cause
    jury: frozenset[int]
    accuser: int = -1
    least: int = 0
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
        return max(self.guilty, self.innocent) >= max(self.least, len(self.jury) // 2 + 1)

    @property
    def measure(self) -> float:
        """The median of what those who found it guilty have measured."""
        found = sorted(vote.measure for vote in self.votes.values() if vote.guilty)
        return found[len(found) // 2] if found else 0.0

    def liars(self) -> dict[int, int]:
        """Validators whose reports more than half of the jury found wrong -> how many did."""
        named = [place for vote in self.votes.values() for place in vote.liars]
        counts = {place: named.count(place) for place in set(named)}
        return {place: count for place, count in counts.items() if count >= max(self.least, len(self.jury) // 2 + 1)}


class Docket:
    """The cases of one round."""

    def __init__(
        self, draw: Callable[[int, Collection[int]], frozenset[int]], electors: Collection[int], least: int = 0
    ):
        """:param draw: (accused, electors) -> jury; :param electors: places of members that trained in the round
        :param least: votes that everybody's verdict needs: a leader that shows members one half of the others only must
            not make a majority of its accomplices"""
        self._draw, self._electors, self._least = draw, frozenset(electors), least
        self.cases: dict[tuple[int, Cause, int], Case] = {}

    def open(self, accused: int, cause: Cause, accuser: int = -1) -> Case:
        key = (accused, cause, accuser)
        if key not in self.cases:
            electors = self._electors - {accused, accuser}
            jury = self._draw(accused, electors)
            self.cases[key] = Case(accused, cause, jury, accuser, self._least if jury == electors else 0)
        return self.cases[key]

    def find(self, accused: int, cause: Cause, accuser: int = -1) -> Case | None:
        return self.cases.get((accused, cause, accuser))
