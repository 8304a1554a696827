"""The phases of a peer, and the moves between them.

One table says which move is allowed. `SyncCore` changes its phase through `PhaseClock.move` alone, so a move that is
not in the table is an error of the program and never a silent state.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Phase(Enum):
    """What a peer is doing; `docs/protocol.md` has the table with the reasons."""

    JOINING = "joining"  # it has no parameters of the run yet
    COLLECTING = "collecting"  # it computes and reports its samples to the leader
    EXCHANGING = "exchanging"  # its parts travel
    VOTING = "voting"  # it has the answers, or waits for the proposal
    CATCHING_UP = "catching up"  # entries are ahead of it
    ISOLATED = "isolated"  # no quorum is in touch
    LEAVING = "leaving"  # it has said goodbye


TRANSITIONS: Final[dict[Phase, frozenset[Phase]]] = {
    Phase.JOINING: frozenset({Phase.COLLECTING, Phase.LEAVING}),
    Phase.COLLECTING: frozenset(
        {Phase.EXCHANGING, Phase.VOTING, Phase.CATCHING_UP, Phase.ISOLATED, Phase.LEAVING}
    ),
    Phase.EXCHANGING: frozenset({Phase.VOTING, Phase.COLLECTING, Phase.CATCHING_UP, Phase.LEAVING}),
    Phase.VOTING: frozenset({Phase.COLLECTING, Phase.CATCHING_UP, Phase.LEAVING}),
    Phase.CATCHING_UP: frozenset({Phase.COLLECTING, Phase.LEAVING}),
    Phase.ISOLATED: frozenset(
        {Phase.COLLECTING, Phase.EXCHANGING, Phase.VOTING, Phase.CATCHING_UP, Phase.LEAVING}
    ),
    Phase.LEAVING: frozenset(),
}

COMPUTING: Final = frozenset(set(Phase) - {Phase.JOINING, Phase.LEAVING})


class ForbiddenMove(Exception):
    """A move that `TRANSITIONS` does not have: an error of the program."""


class PhaseClock:
    """The phase, when it was entered, and by when it must be left.

    The bound counts from the entry into the phase. A message that comes again does not prolong it.
    """

    def __init__(self, phase: Phase, now: float):
        self.phase = phase
        self.entered = now  # s
        self.until: float | None = None  # s; None: this phase waits for nothing

    def move(self, phase: Phase, now: float, bound: float | None = None) -> None:
        """Enter `phase`, to be left within `bound` s.

        :raises ForbiddenMove: if the table does not have this move
        """
        if phase not in TRANSITIONS[self.phase]:
            raise ForbiddenMove(f"from {self.phase.value} to {phase.value}")
        self.phase, self.entered = phase, now
        self.until = None if bound is None else now + bound

    def extend(self, now: float, bound: float) -> None:
        """What is awaited makes progress: from now on it has so many seconds again."""
        self.until = now + bound
