"""Error feedback: what lossy rounding leaves of a contribution is added to the next one, cell by cell.

Values are whole numbers, so that the sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from volunteer_kit.swarm.sync.contributions import Answer, Share

GRAIN = 64  # what is sent is a multiple of this


def value(number: int, cell: int, samples: int) -> int:
    """The gradient sum of a contribution's cell, as a number."""
    return samples * (17 + (number * 31 + cell * 7) % 89)


class Part(NamedTuple):
    """One contribution's cell, as it was sent."""

    number: int
    value: int
    sent: int
    left: int  # of the value and of the residual that was added to it


class Residuals:
    """One sender's remainders per cell; those of a round are tentative until its entry is on the branch.

    Each contribution is rounded by itself, as a reducer may take some of them only. The residual is added to the oldest.
    """

    def __init__(self, cells: int):
        self.cells = cells
        self.settled = [0] * cells
        self._rounds: dict[bytes, list[list[Part]]] = {}
        self._values = [0] * cells  # of everything that entered an entry
        self._sent = [0] * cells

    def send(self, fingerprint: bytes, shares: Iterable[tuple[Share, int]]) -> None:
        """A round begins: round down what is sent, and keep the rest aside."""
        made: list[list[Part]] = [[] for _ in range(self.cells)]
        for share, cells in sorted(shares, key=lambda each: (each[0].birth, each[0].number)):
            for cell in range(self.cells):
                if cells >> cell & 1:
                    worth = value(share.number, cell, share.samples)
                    whole = worth if made[cell] else worth + self.settled[cell]
                    sent = whole // GRAIN * GRAIN
                    made[cell].append(Part(share.number, worth, sent, whole - sent))
        self._rounds[fingerprint] = made

    def settle(self, fingerprint: bytes, answers: Sequence[Answer], peer: str) -> int:
        """The round's entry counts.

        :returns: cells of this peer's contributions that entered
        """
        made = self._rounds.get(fingerprint)
        count = 0
        for answer in answers:
            numbers = {share.number for share in answer.shares if share.peer == peer}
            if not numbers:
                continue
            count += len(numbers) * answer.cells.bit_count()
            if made is None:
                continue  # it was sent from a branch that lost
            for cell in range(self.cells):
                if answer.cells >> cell & 1 and made[cell]:
                    entered = [part for part in made[cell] if part.number in numbers]
                    self._values[cell] += sum(part.value for part in entered)
                    self._sent[cell] += sum(part.sent for part in entered)
                    before = self.settled[cell] if made[cell][0].number not in numbers else 0
                    self.settled[cell] = before + sum(part.left for part in entered)
        return count

    def drop_rounds(self) -> None:
        """Rounds of the slot are over."""
        self._rounds.clear()

    def fault(self) -> str | None:
        """Why something is lost; None: every sum is exact."""
        for cell in range(self.cells):
            if self._values[cell] != self._sent[cell] + self.settled[cell]:
                return (
                    f"cell {cell}: contributions of {self._values[cell]} entered, {self._sent[cell]} were sent"
                    f" and {self.settled[cell]} are left"
                )
        return None
