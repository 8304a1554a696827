"""A contribution that is computed again, and what its validators have found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from volunteer_kit.robust.draw import Range
from volunteer_kit.robust.messages import Load, Samples, Statement
from volunteer_kit.robust.reducing import DISTANCE, SUMS
from volunteer_kit.robust.sketch import mismatch


@dataclass
class Check:
    """A target's contribution, and what validators have reported of it.

    :param weights: of each slice, (slices, 1), where its samples do not all count in full; None: they do
    """

    target: int
    ranges: tuple[Range, ...]
    samples: Samples
    slices: tuple[int, ...]
    sent: np.ndarray  # (slices, sums)
    weights: np.ndarray | None = None
    loads: tuple[Load, ...] = ()
    reports: dict[int, np.ndarray] = field(default_factory=dict)
    done: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.reports) == len(self.ranges)

    def mismatch(self, totals: Sequence[np.ndarray]) -> float:
        """:param totals: of all ranges, (slices, sums) of the sum of gradients"""
        weights = len(self.samples.names) if self.weights is None else self.weights
        return mismatch(self.sent, sum(totals) / weights)


@dataclass(frozen=True)
class Part:
    """A piece of the vector, of `size` values: who reduces it, and which of its pieces it is."""

    reducer: int
    index: int
    size: int


def slices_of(parts: Sequence[Part]) -> tuple[int, ...]:
    """Values in each reducer's slice, in the vector's order; a reducer's parts lie side by side."""
    return tuple(sum(part.size for part in parts if part.reducer == reducer) for reducer in _reducers(parts))


def by_slice(parts: Sequence[Part], sums: np.ndarray) -> np.ndarray:
    """:param sums: (parts, sums) :returns: (slices, sums)"""
    places = {reducer: place for place, reducer in enumerate(_reducers(parts))}
    totals = np.zeros((len(places), sums.shape[1]))
    np.add.at(totals, [places[part.reducer] for part in parts], sums)
    return totals


def _reducers(parts: Sequence[Part]) -> list[int]:
    return list(dict.fromkeys(part.reducer for part in parts))


def is_statement(statement: Statement, shape: tuple[int, int], members: int) -> bool:
    """Are its numbers such as a statement of this shape, in a group of so many, can have?"""
    numbers = statement.numbers
    if len(statement.heard) != members or numbers.shape != shape:
        return False
    known = np.delete(numbers, DISTANCE, axis=1)  # the distance to an answer of 1e38 is more than float32 can say
    return bool(np.isfinite(known).all() and (numbers[:, :SUMS] >= 0).all())
