"""A contribution that is computed again, and what its validators have found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from volunteer_kit.robust.draw import Range
from volunteer_kit.robust.messages import Samples, Statement
from volunteer_kit.robust.reducing import SUMS
from volunteer_kit.robust.sketch import mismatch


@dataclass
class Check:
    """A target's contribution, and what validators have reported of it."""

    target: int
    ranges: tuple[Range, ...]
    samples: Samples
    sent: np.ndarray  # (sums,)
    norm: float
    reports: dict[int, np.ndarray] = field(default_factory=dict)
    done: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.reports) == len(self.ranges)

    def mismatch(self, totals: Sequence[np.ndarray]) -> float:
        """:param totals: sketches of the sums of gradients of all ranges"""
        return mismatch(self.sent, sum(totals) / len(self.samples.names), self.norm)


@dataclass(frozen=True)
class Part:
    """A piece of the vector: who reduces it, and which of its pieces it is."""

    reducer: int
    index: int


def is_statement(statement: Statement, shape: tuple[int, int]) -> bool:
    """Are its numbers such as a statement of this shape can have?"""
    numbers = statement.numbers
    return numbers.shape == shape and bool(np.isfinite(numbers).all()) and bool((numbers[:, :SUMS] >= 0).all())
