"""Error feedback: what lossy rounding leaves of a contribution is added to the next one, cell by cell.

Values are whole numbers, so that the sums are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from volunteer_kit.swarm.sync.contributions import Answer, Share

GRAIN = 64  # what is sent is a multiple of this


def value(number: int, cell: int, samples: int) -> int:
    """The gradient sum of a contribution's cell, as a number."""
    return samples * (17 + (number * 31 + cell * 7) % 89)


class Round:
    """What was sent in one round, and what would be left if it counts."""

    __slots__ = ("numbers", "values", "sent", "left")

    def __init__(self, cells: int):
        self.numbers: list[list[int]] = [[] for _ in range(cells)]  # contributions, by cell
        self.values = [0] * cells
        self.sent = [0] * cells
        self.left = [0] * cells


class Residuals:
    """One sender's remainders per cell; those of a round are tentative until its entry is on the branch."""

    def __init__(self, cells: int):
        self.cells = cells
        self.settled = [0] * cells
        self._rounds: dict[bytes, Round] = {}
        self._values = [0] * cells  # of everything that entered an entry
        self._sent = [0] * cells

    def send(self, fingerprint: bytes, shares: Iterable[tuple[Share, int]]) -> None:
        """A round begins: round down what is sent, and keep the rest aside."""
        made = self._rounds[fingerprint] = Round(self.cells)
        for share, cells in shares:
            for cell in range(self.cells):
                if cells >> cell & 1:
                    made.numbers[cell].append(share.number)
                    made.values[cell] += value(share.number, cell, share.samples)
        for cell in range(self.cells):
            if made.numbers[cell]:
                whole = made.values[cell] + self.settled[cell]
                made.sent[cell] = whole // GRAIN * GRAIN
                made.left[cell] = whole - made.sent[cell]

    def settle(self, fingerprint: bytes, answers: Sequence[Answer], peer: str) -> int:
        """The round's entry counts.

        :returns: cells of this peer's contributions that entered
        """
        made = self._rounds.pop(fingerprint, None)
        count = 0
        for answer in answers:
            mine = [share for share in answer.shares if share.peer == peer]
            if not mine:
                continue
            for cell in range(self.cells):
                if answer.cells >> cell & 1:
                    count += len(mine)
                    if made is not None:  # else it was sent from a branch that lost
                        self._values[cell] += sum(value(share.number, cell, share.samples) for share in mine)
                        self._sent[cell] += made.sent[cell]
                        self.settled[cell] = made.left[cell]
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
