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


class Sent:
    """One round's parts, cell by cell."""

    __slots__ = ("values", "sent", "left", "numbers")

    def __init__(self, cells: int):
        self.values = [0] * cells
        self.sent = [0] * cells
        self.left = [0] * cells
        self.numbers: list[set[int]] = [set() for _ in range(cells)]  # contributions in the part


class Residuals:
    """One sender's remainders per cell; those of a round are tentative until its entry is on the branch.

    A part is one tensor: all contributions of a cell enter, or none.
    """

    def __init__(self, cells: int):
        self.cells = cells
        self.settled = [0] * cells
        self._rounds: dict[bytes, Sent] = {}
        self._values = [0] * cells  # of everything that entered an entry
        self._sent = [0] * cells

    def send(self, fingerprint: bytes, shares: Iterable[Share]) -> None:
        """A round begins: round down what is sent, and keep the rest aside.

        A process that starts again within a round finds it here, and sends nothing else than before.
        """
        if fingerprint in self._rounds:
            return
        made = self._rounds[fingerprint] = Sent(self.cells)
        for share in shares:
            for cell in range(self.cells):
                if share.cells >> cell & 1:
                    made.values[cell] += value(share.number, cell, share.samples)
                    made.numbers[cell].add(share.number)
        for cell in range(self.cells):
            if made.numbers[cell]:
                whole = made.values[cell] + self.settled[cell]
                made.sent[cell] = whole // GRAIN * GRAIN
                made.left[cell] = whole - made.sent[cell]

    def settle(self, fingerprint: bytes, answers: Sequence[Answer], peer: str) -> tuple[int, str | None]:
        """The round's entry counts.

        :returns: cells of this peer's contributions that entered, and why they are not what was sent
        """
        made = self._rounds.get(fingerprint)
        count, why = 0, None
        for answer in answers:
            mine = [share for share in answer.shares if share.peer == peer]
            count += sum(share.cells.bit_count() for share in mine)
            if made is None or not mine:
                continue  # without a round it was sent from a branch that lost
            for cell in range(self.cells):
                if answer.cells >> cell & 1 and made.numbers[cell]:
                    entered = {share.number for share in mine if share.cells >> cell & 1}
                    if entered != made.numbers[cell]:
                        why = f"of cell {cell} {sorted(made.numbers[cell])} were sent and {sorted(entered)} entered"
                    self._values[cell] += made.values[cell]
                    self._sent[cell] += made.sent[cell]
                    self.settled[cell] = made.left[cell]
        return count, why

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
