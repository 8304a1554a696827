"""Reduce a slice: check each part, hold it until all are here, then reduce cell by cell to one answer.

A member's part enters whole or not at all, so nothing is summed before the last of its cells is here. The reducer holds
parts encoded: a byte for each value in 8 bits. The plain mean then decodes one part after another; other rules need all
parts of a cell at once.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from volunteer_kit.robust.bounds import scales
from volunteer_kit.robust.rules import rule as rule_of
from volunteer_kit.swarm.codecs.wire import FLOAT32
from volunteer_kit.swarm.rounds.error_feedback import ErrorFeedback
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import weights_of, why_not_taken
from volunteer_kit.swarm.rounds.weighed import reduce_weighed
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Share

MEAN: Final = "mean"
TRIES: Final = 6  # that a member has to bring its part
_LENGTH: Final = 4  # bytes before each cell of an answer


class RefusedPart(Exception):
    """A part does not enter, with the reason. The other members lose nothing by it."""


@dataclass
class Part:
    """One member's part on its way."""

    peer: str
    shares: tuple[Share, ...]
    weights: dict[int, float]  # cell -> samples; its cells, in the order in which they come
    data: dict[int, bytes] = field(default_factory=dict)  # encoded cells
    norms: dict[int, float] = field(default_factory=dict)  # L2, of each cell


class SliceReducer:
    """One slice of one round.

    :param cells: of the slice, a bit per cell
    :param reducer: this peer
    :param epoch: of the round
    :param limits: samples that are believed of each member
    :param spent: what is committed already
    :param rule: a name of `robust.rules`
    :param feedback: what answers left out; None: the codec leaves out nothing to speak of
    :param keeps: the encoded parts stay in `kept`, by member and cell, for who has to show them
    """

    def __init__(
        self,
        layout: Layout,
        cells: int,
        reducer: str,
        *,
        epoch: int,
        max_staleness: int,
        limits: Mapping[str, float],
        spent: Accounts,
        rule: str = MEAN,
        feedback: ErrorFeedback | None = None,
        keeps: bool = False,
    ):
        self._layout, self.cells, self._reducer = layout, cells, reducer
        self._keeps = keeps
        self.kept: dict[str, dict[int, bytes]] = {}
        self._epoch, self._max_staleness = epoch, max_staleness
        self._limits, self._spent = limits, spent
        self._rule, self._reduce = rule, rule_of(rule)
        self._feedback = feedback
        self._coming: dict[str, Part] = {}
        self._tries: dict[str, int] = {}
        self._taken: dict[str, Part] = {}
        self._closed = False
        self.refused: dict[str, str] = {}  # member -> why its part did not enter
        self.too_long: set[str] = set()  # members whose values were scaled down

    @property
    def done(self) -> frozenset[str]:
        """Members of which nothing more is to come: their part is here, or was refused."""
        return frozenset(self._taken) | frozenset(self.refused)

    def begin(self, peer: str, shares: tuple[Share, ...]) -> Part:
        """A member of the group begins to send. A part that is not whole yet is replaced: its stream may have broken.

        :raises RefusedPart: if the part does not count
        """
        if self._closed:
            raise RefusedPart("it came too late")
        if peer in self._taken or (not shares and peer in self._coming):
            raise RefusedPart("a part of this member is here already")
        why = why_not_taken(
            shares, peer, self.cells, self._epoch, self._max_staleness, self._limits.get(peer, 0.0), self._spent
        )
        self._tries[peer] = self._tries.get(peer, 0) + 1
        if why is None and self._tries[peer] > TRIES:
            why = "it was begun too often"
        if why is not None:
            self.refuse(peer, why)
        if peer in self.refused:
            raise RefusedPart(self.refused[peer])
        part = self._coming[peer] = Part(peer, shares, weights_of(self._layout, shares, self._epoch))
        return part

    def read(self, part: Part, cell: int, data: bytes) -> None:
        """Check the next cell of a part, and hold it. Any thread may call it, one at a time for each part.

        :raises ValueError: for bytes that make no sense
        """
        if cell not in part.weights or cell in part.data:
            raise ValueError(f"cell {cell} out of turn")
        values = self._layout.decode_cell(cell, data)
        if self._layout.most_weight and not 0 <= float(values[0]) <= self._layout.most_weight:
            raise ValueError(f"cell {cell} weighs {float(values[0]):g}, of {self._layout.most_weight:g} at most")
        part.norms[cell] = self._norm(cell, values)
        part.data[cell] = data

    def take(self, part: Part) -> None:
        """A part is here.

        :raises RefusedPart: if it is not whole, came too late, or was begun anew meanwhile
        """
        if self._closed or self._coming.get(part.peer) is not part:
            raise RefusedPart("it came too late")
        if part.data.keys() != part.weights.keys():
            raise RefusedPart("it is not whole")
        self._taken[part.peer] = self._coming.pop(part.peer)

    def drop(self, part: Part) -> None:
        """The stream of a part broke; its sender may begin anew. A part that was taken stays."""
        if self._coming.get(part.peer) is part:
            del self._coming[part.peer]

    def refuse(self, peer: str, why: str) -> None:
        """Nothing of this member enters, unless its part was taken before."""
        if peer not in self._taken:
            self._coming.pop(peer, None)
            self.refused.setdefault(peer, why)

    def close(self) -> None:
        """Take no more parts."""
        self._closed = True
        self._coming.clear()

    def reduce(self) -> tuple[Answer, bytes] | None:
        """The answer and its bytes; None: no part came that counts. Call it once, after `close`; any thread may.

        :raises ValueError: if the average cannot be told
        """
        parts = [part for _, part in sorted(self._taken.items()) if part.weights]
        self._taken = {peer: Part(peer, (), {}) for peer in self._taken}
        if self._keeps:
            self.kept = {part.peer: dict(part.data) for part in parts}
        if not parts:
            return None
        encoded: list[bytes] = []
        left: dict[int, tuple[torch.Tensor, float]] = {}
        for cell in self._layout.cells_of(self.cells):
            here = [part for part in parts if cell in part.weights]
            data = b""  # zeros
            if here:
                average = self._average(cell, here)
                if self._feedback is not None:
                    average = average + self._feedback.residual(cell)
                data = self._layout.encode_cell(cell, average)
                if self._feedback is not None:
                    rest = average - self._layout.decode_cell(cell, data)
                    left[cell] = (rest, sum(part.weights[cell] for part in here))
            for part in here:
                del part.data[cell]
            encoded += [len(data).to_bytes(_LENGTH, "little"), data]
        whole = b"".join(encoded)
        shares = tuple(sorted(share for part in parts for share in part.shares))
        answer = Answer(self.cells, self._reducer, hashlib.sha256(whole).digest(), shares)
        if self._feedback is not None:
            for cell, (rest, weight) in left.items():
                self._feedback.keep(answer.digest, cell, rest, weight)
        return answer, whole

    def _average(self, cell: int, parts: Sequence[Part]) -> torch.Tensor:
        """(n,) float32"""
        weights = [part.weights[cell] for part in parts]
        bounds = bounds_of([part.norms[cell] for part in parts], weights, owes=self._layout.leaves_out)
        self.too_long.update(part.peer for part, scale in zip(parts, bounds, strict=True) if scale < 1)
        if self._rule == MEAN:
            place = self._layout.cell(cell)
            mean, total = torch.zeros(place.stop - place.start, **FLOAT32), sum(weights)
            for part, weight, scale in zip(parts, weights, bounds, strict=True):
                mean.add_(self._bounded(cell, part, scale), alpha=weight / total)
            return mean
        decoded = [self._bounded(cell, part, scale) for part, scale in zip(parts, bounds, strict=True)]
        if self._layout.most_weight:
            return reduce_weighed(self._reduce, decoded, weights, self._layout.learnt(cell))
        return self._reduce(decoded, weights)

    def _norm(self, cell: int, values: torch.Tensor) -> float:
        """L2 of the gradients."""
        places = self._layout.learnt(cell) if self._layout.most_weight else [slice(None)]
        return math.hypot(*(torch.linalg.vector_norm(values[p], dtype=torch.float64).item() for p in places))

    def _bounded(self, cell: int, part: Part, scale: float) -> torch.Tensor:
        """(n,) of a part, its gradients times `scale`."""
        values = self._layout.decode_cell(cell, part.data[cell])
        if scale == 1:
            return values
        for place in self._layout.learnt(cell) if self._layout.most_weight else [slice(None)]:
            values[place] *= scale
        return values


def bounds_of(norms: Sequence[float], weights: Sequence[float], owes: bool) -> list[float]:
    """What each part is multiplied with, as in `robust.bounds.bound_norms`, by their norms alone."""
    kept = scales(norms, weights)
    if owes:
        moved = [norm * weight for norm, weight in zip(norms, weights, strict=True)]
        kept = [max(pair) for pair in zip(kept, scales(moved, weights), strict=True)]
    return kept


def decode_answer(layout: Layout, cells: int, data: bytes) -> dict[int, torch.Tensor]:
    """The average of each cell of an answer, (n,) float32; zeros where no member had anything.

    :param cells: of the slice, a bit per cell
    :raises ValueError: if these are not the bytes of such an answer
    """
    averages = {}
    for cell, encoded in layout.split_answer(cells, data).items():
        place = layout.cell(cell)
        if encoded:
            averages[cell] = layout.decode_cell(cell, encoded)
        else:
            averages[cell] = torch.zeros(place.stop - place.start, **FLOAT32)
    return averages
