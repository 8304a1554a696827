"""Learn deadlines from how long rounds take, up to the ceiling of the run.

A timeout that fits every line is too long for most: a dead member costs its group a minute where a round takes five
seconds. Each peer learns from its own measurements. If members must agree on a time, each reports its own and the
median counts, so that one stranger's report moves it no further than its neighbour's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median, median_low

KEPT, LEAST = 16, 4  # durations that are remembered, and how many it takes before they count for anything
DEVIATIONS = 5.0  # above the median
SIGMA = 1.4826  # median absolute deviations in a standard deviation of normally distributed durations
EVEN = 0.1  # of the median: a deviation at least; four rounds that were alike do not promise the fifth
# Of the last durations, times as long as the longest but one: what comes too late sets a member apart, and behind
# narrow lines that costs more than any waiting. One that a dead member held up is no sign that lines got slow; after
# the third such, each of twice the usual length, everybody waited a minute for the fourth
RECENT, MARGIN = 4, 2.0
FLOOR_SHARE = 1 / 20  # of the run's own timeout
LEAST_SECONDS = 2.0  # a lost packet, or a machine that is busy, costs one or two
WIDER, WIDER_BY_FEW = 2.0, 1.5  # after a failure: times as long; and if it cost no more than half of the members
NEWCOMERS = 1.5  # times as long with members whose line nobody has seen yet
USUAL_ROUNDS = 5  # rounds by whose median it is judged whether devices wait for the network
HEADROOM = 1.1  # an epoch should last so many rounds
SLOW_SLACK = 1.5  # times a microbatch: it has to travel as well


def usual_limit(durations: Sequence[float]) -> float:
    """s that nearly all of these would have been within, and the last few but one certainly: median + DEVIATIONS
    deviations. The deviation is the median absolute one: one duration of ten times the usual does not move it."""
    usual = median(durations)
    deviation = max(SIGMA * median(abs(duration - usual) for duration in durations), EVEN * usual)
    return max(usual + DEVIATIONS * deviation, MARGIN * sorted(list(durations)[-RECENT:])[-2])


class Deadline:
    """Of one thing that is done again and again.

    :param ceiling: s, the run's own timeout: what counts until enough is known, and never exceeded
    :param floor: s; None: a FLOOR_SHARE of the ceiling, LEAST_SECONDS at least
    :param least: durations that it takes before they count for anything
    """

    def __init__(self, ceiling: float, floor: float | None = None, least: int = LEAST):
        self.ceiling = ceiling
        self._least = least
        self.floor = min(ceiling, max(FLOOR_SHARE * ceiling, LEAST_SECONDS) if floor is None else floor)
        self._durations: deque[float] = deque(maxlen=KEPT)
        self._wider = 1.0

    def succeeded(self, seconds: float) -> None:
        self._durations.append(min(max(0.0, seconds), self.ceiling))
        self._wider = max(1.0, self._wider / WIDER)

    def failed(self, share: float = 1.0) -> None:
        """:param share: of the members, for whom there was not enough time; a few may be dead, most are not"""
        if len(self._durations) >= self._least:  # before, it is the ceiling already
            most = self.ceiling / max(self.floor, usual_limit(self._durations))
            self._wider = max(1.0, min(self._wider * (WIDER if share > 0.5 else WIDER_BY_FEW), most))

    @property
    def learnt(self) -> float | None:
        """s, as we have seen it; None: not enough yet."""
        if len(self._durations) < self._least:
            return None
        return min(self.ceiling, self._wider * max(self.floor, usual_limit(self._durations)))

    @property
    def seconds(self) -> float:
        learnt = self.learnt
        return self.ceiling if learnt is None else learnt


def agreed(told: Sequence[float | None], floor: float, ceiling: float) -> float:
    """What a group takes for its deadline, equal on all who were told the same: the median of what its members have
    learnt, and more for those who have learnt nothing yet.

    Members of a minority that tell tiny or huge numbers move it to their neighbours' at most; where most know nothing
    it is the ceiling. A round grows with its newcomers: n peers over the same reducers wait n times as long.

    :param told: by each member; None: it knows nothing yet, or nothing that could be true
    """
    known = [seconds for seconds in told if seconds is not None and math.isfinite(seconds) and seconds > 0]
    if 2 * len(known) <= len(told):
        return ceiling
    new = len(told) - len(known)
    more = max(NEWCOMERS, len(told) / len(known)) if new else 1.0
    return min(ceiling, max(floor, more * median_low(known)))


def enough_samples(round_seconds: float, epoch_seconds: float, target_batch_size: int) -> int | None:
    """The target batch with which rounds would be over before the next one is due; None: they are.

    :param round_seconds: from meeting to the last answer
    :param epoch_seconds: that the swarm's devices compute for one epoch, without what they wait
    """
    if not (0 < epoch_seconds < math.inf and 0 < round_seconds < math.inf) or round_seconds <= epoch_seconds:
        return None
    needed = HEADROOM * target_batch_size * round_seconds / epoch_seconds
    return 1 << math.ceil(math.log2(needed))  # a number that somebody would write into a run file


def comes_too_late(microbatch_seconds: float, epoch_seconds: float, max_staleness: int) -> bool:
    """Return whether what a device computes is older than `max_staleness` epochs when it can enter a step."""
    return 0 < max(max_staleness, 1) * epoch_seconds < SLOW_SLACK * microbatch_seconds


def too_slow_network(rounds: Sequence[float], epoch_seconds: float, target_batch_size: int) -> str | None:
    """What the host should know, in words; None: the network keeps up, or too few `rounds` (s) were seen."""
    if len(rounds) < USUAL_ROUNDS:
        return None
    seconds = median(list(rounds)[-USUAL_ROUNDS:])
    enough = enough_samples(seconds, epoch_seconds, target_batch_size)
    if enough is None:
        return None
    return (
        f"A round takes {seconds:.2g} s and an epoch {epoch_seconds:.2g} s: devices wait for the network. "
        f"With target_batch_size: {enough} they would not."
    )
