"""Hold the commitments of a round's members, which come before any part, in a run that verifies (node/verification.py).

The round's leader tells all members the same list, and the entry names it. So all know whose work enters, which bytes
each part has, and how long an average of them can be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Final

import torch

from volunteer_kit.robust.bounds import FEWEST, NORM_BOUND
from volunteer_kit.robust.reducing import LONGEST
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import shares_within
from volunteer_kit.swarm.sync.contributions import Share

DIGEST: Final = 8  # bytes; who shows a part later is its reducer, so a sender gains nothing by two of one digest
NOTHING: Final = bytes(DIGEST)  # of a cell that a member brings nothing for
NOT_COMMITTED: Final = "it had not committed to that"
NOT_YET: Final = "its work does not count before it was checked, or its commitment came late"


def part_digest(data: bytes) -> bytes:
    """Return the digest that a member commits to for one encoded cell."""
    return hashlib.blake2b(data, digest_size=DIGEST, person=b"part").digest()


@dataclass(frozen=True)
class Commitments:
    """:param digest: of the whole list
    :param shares: of each member that committed in time
    :param parts: digests of its encoded cells, one after another
    :param enters: members whose work enters
    :param longest: L2 that an answer's cell may have, by cell
    :param own: our encoded cells
    """

    digest: bytes
    shares: Mapping[str, tuple[Share, ...]]
    parts: Mapping[str, bytes]
    enters: frozenset[str]
    longest: Sequence[float]
    own: Mapping[int, bytes] = field(default_factory=dict)

    def shares_of(self, peer: str, cells: int) -> tuple[Share, ...]:
        """Return the shares of this member that may enter a slice.

        :param cells: of the slice, a bit per cell
        """
        return shares_within(self.shares.get(peer, ()), cells) if peer in self.enters else ()

    def is_committed(self, peer: str, cell: int, data: bytes) -> bool:
        """Return whether the peer committed to these bytes for this cell."""
        return part_digest(data) == self.parts.get(peer, b"")[cell * DIGEST : (cell + 1) * DIGEST]

    @property
    def may_enter(self) -> tuple[Share, ...]:
        """Return the shares of all members whose work enters."""
        return tuple(share for peer in sorted(self.enters) for share in self.shares.get(peer, ()))

    @property
    def disregarded(self) -> int:
        """Sample-cells of the members whose work does not enter."""
        waiting = (share for peer in self.shares.keys() - self.enters for share in self.shares[peer])
        return sum(share.samples * share.cells.bit_count() for share in waiting)

    def is_too_long(self, averages: Mapping[int, torch.Tensor]) -> bool:
        """Return whether an answer is longer than any average of what was committed to.

        :param averages: (n,) of each cell
        """
        return any(
            float(torch.linalg.vector_norm(average, dtype=torch.float64)) > self.longest[cell]
            for cell, average in averages.items()
        )


def longest_answers(lengths: Sequence[Sequence[float]], cells: int, clips: bool) -> list[float]:
    """L2 that an answer may have, by cell: more than half of the members would have to lie to raise it.

    :param lengths: L2 of each cell, of each member that enters
    :param clips: the rule is CenteredClip
    """
    found = []
    for cell in range(cells):
        given = [own[cell] for own in lengths if own[cell] > 0]
        bound = LONGEST if clips else NORM_BOUND
        found.append(bound * median_low(given) if len(given) >= FEWEST else float("inf"))
    return found


def cells_of_part(layout: Layout, shares: Sequence[Share]) -> list[int]:
    """The cells that a member's shares are in, in order."""
    mask = 0
    for share in shares:
        mask |= share.cells
    return layout.cells_of(mask)
