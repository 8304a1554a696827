"""Steps of which is not known whether anybody else took them: the swarm's, if the others go on from them, and lost, if
we take another's state.

No step is certain by its own round. When a line is cut in the middle of one, this survivor may have the vanished
reducer's slice and the next one not, and neither can tell: their models differ, and one of them is given up. Two
volunteers who begin at the same moment each take the first step alone, and who outlives a dead group is the swarm from
then on. Only what comes later tells which it was, and until then nobody is told that the step's samples have counted.
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
        self._undecided = self.has_met = False  # there are some; somebody was here
        self._likely_until, self._is_doubtful = -1, False  # the last of those that all were whole; one was not
        self._alone_since: float | None = None
        self._last, self._kept_until = -1, None

    def taken(self, epoch: int, in_sight: bool, whole: bool = False) -> bool:
        """One more, while others were `in_sight` or not, in a round that was `whole` (all who were in sight, all parts)
        or not. :returns: whether it is the swarm's for certain already, and those before it with it."""
        now = self._clock()
        self._last = epoch
        if in_sight:
            self._met()
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since >= (self._after_meeting if self.has_met else self._certain_after):
            self._decide(epoch)
            return True
        self._undecided, self._is_doubtful = True, self._is_doubtful or not whole
        if not self._is_doubtful:
            self._likely_until = epoch
        return False

    def shared(self) -> None:
        """The members of a round hold what we hold."""
        self._decide(self._last)
        self._met()

    def given_up(self, kept_until: int = -1) -> None:
        """Another's state took the place of ours; the two were one up to the end of epoch `kept_until`."""
        self._decide(kept_until)
        self._met()

    def leaving(self) -> None:
        """No later round will tell: steps whose rounds were whole are taken for the swarm's, up to the first that was
        not."""
        self._decide(self._likely_until)

    def kept_until(self) -> int | None:
        """All are decided: the swarm has those up to this epoch, the later ones are lost. None: nothing new. Told
        once."""
        kept_until, self._kept_until = self._kept_until, None
        return kept_until

    def _met(self) -> None:
        self.has_met, self._alone_since = True, None

    def _decide(self, kept_until: int) -> None:
        if self._undecided:
            self._undecided, self._kept_until = False, kept_until
        self._likely_until, self._is_doubtful = -1, False
