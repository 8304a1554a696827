"""Steps of which is not known whether anybody else took them: the swarm's, if the others go on from them, and lost, if
we take another's state.

Two volunteers who begin at the same moment each take the first step alone; one whose line is cut in the middle of a
round has heard from nobody; and who outlives a dead group is the swarm from then on. Only what comes later tells which
it was, and until then nobody is told that the samples of such a step have counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class UncertainSteps:
    """What becomes of them, all at once.

    :param certain_after: s without anybody in sight after which the swarm is we
    :param after_meeting: the same, once somebody was here: who comes back from an outage sees the others late
    """

    def __init__(self, certain_after: float, after_meeting: float, clock: Callable[[], float] = time.monotonic):
        self._certain_after, self._after_meeting, self._clock = certain_after, after_meeting, clock
        self._undecided = self._has_met = False  # there are some; somebody was here
        self._alone_since: float | None = None
        self._fate: bool | None = None

    def taken(self, in_sight: bool) -> bool:
        """One more, while others were `in_sight` or not. :returns: whether it is the swarm's for certain after all, and
        those before it with it."""
        now = self._clock()
        if in_sight:
            self._met()
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= (self._after_meeting if self._has_met else self._certain_after):
            self._decide(True)
            return True
        self._undecided = True
        return False

    def shared(self) -> None:
        """The members of a round hold what we hold."""
        self._decide(True)
        self._met()

    def given_up(self) -> None:
        """Another's state took the place of ours."""
        self._decide(False)
        self._met()

    def fate(self) -> bool | None:
        """Of all that were undecided: True: the swarm has them, False: lost, None: nothing new. Told once."""
        fate, self._fate = self._fate, None
        return fate

    def _met(self) -> None:
        self._has_met, self._alone_since = True, None

    def _decide(self, fate: bool) -> None:
        if self._undecided:
            self._undecided, self._fate = False, fate
