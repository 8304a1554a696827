"""Why a round of averaging failed, as one of a few causes, and how often each was it.

Found where it is known: by the exception's type, by how far the round's control had come, and by what became of each
member; never from words. Needs nothing but Python when it is imported, for the dashboard counts as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hivemind.averaging.control import StepControl

    from volunteer_kit.swarm.options import StepReport
    from volunteer_kit.swarm.round import Round

NO_GROUP, PEER_LOST, TIMEOUT, LED_APART = "no_group", "peer_lost", "timeout", "led_apart"
OUT_OF_STEP, CUT_OFF, INCOMPLETE, OTHER = "out_of_step", "cut_off", "incomplete", "other"
ALL_CLIENTS = "all_clients"
REFUSED = "refused"
CAUSES: Mapping[str, str] = {
    NO_GROUP: "found nobody to average with in time",
    PEER_LOST: "lost a member in the middle",
    TIMEOUT: "waited in vain for a member that said nothing",
    LED_APART: "were told different groups by their leader",
    ALL_CLIENTS: "had nobody who can be called",
    OUT_OF_STEP: "were held with another model than the others'",
    CUT_OFF: "had no line to anybody",
    REFUSED: "had parts that were refused, and nothing to average",
    INCOMPLETE: "got answers that could not be used, or not all",
    OTHER: "failed for another reason",
}
OF_THE_LINE = (NO_GROUP, PEER_LOST, TIMEOUT)  # what our own line being dead looks like as well
MOST = 2**31 - 1  # rounds that anybody can have been in
TIMEOUTS = (TimeoutError, asyncio.TimeoutError, FutureTimeoutError)  # three classes before Python 3.11


def nobody_can_be_called(others: int) -> str:
    """In words, for a volunteer: this peer and all `others` of the run only call, so none of them can average.

    Two peers in client mode never meet, whatever they do; each trains alone until one comes that can be called.
    """
    them = "the other one" if others == 1 else f"all {others} others"
    return (
        f"Nobody in this run can be called: this machine and {them} only call (client mode), so they cannot average, "
        "and each trains alone. One machine that others can reach is enough: join without --client-mode on it, or open "
        "TCP port 31337 and add --host-maddrs /ip4/0.0.0.0/tcp/31337 --announce-maddrs /ip4/YOUR.PUBLIC.IP/tcp/31337"
    )


def cause_of_loss(error: BaseException) -> str | None:
    """Of a member that did not answer with its average. None: it did answer, but not so that it could be used."""
    from hivemind.averaging.partition import AllreduceException

    if isinstance(error, TIMEOUTS):
        return TIMEOUT
    return None if isinstance(error, AllreduceException) else PEER_LOST


def cause_without_round(control: StepControl, error: BaseException) -> str:
    """Why `control` ended with `error` and without a round."""
    from hivemind.averaging.matchmaking import MatchmakingException
    from hivemind.averaging.partition import AllreduceException
    from hivemind.p2p import P2PDaemonError, P2PHandlerError

    of_the_swarm = (AllreduceException, MatchmakingException, P2PDaemonError, P2PHandlerError, ConnectionError)
    if control.cancelled():  # by us, while it was looking for a group: the first, or one more after a group broke up
        return PEER_LOST if control.began_allreduce else NO_GROUP
    if isinstance(error, TIMEOUTS):
        return TIMEOUT if control.began_allreduce else NO_GROUP
    if isinstance(error, of_the_swarm):
        return PEER_LOST if control.began_allreduce else NO_GROUP
    return OTHER


def cause_within_round(outcome: Round, is_apart: bool) -> str | None:
    """What a round with a group lacked; None: nothing.

    :param is_apart: what we hold is not what its members do
    """
    if is_apart:
        return OUT_OF_STEP
    if outcome.refused and outcome.received <= 0:
        return REFUSED
    for cause in (PEER_LOST, TIMEOUT):
        if cause in outcome.lost.values():
            return cause
    return INCOMPLETE if outcome.received < 1 else None


@dataclass
class RoundCounts:
    """Rounds that this peer went into with others in sight.

    `complete_groups`: in those all met who were expected; `failed`: cause -> rounds, each counted once.
    """

    rounds: int = 0
    complete_groups: int = 0
    failed: dict[str, int] = field(default_factory=dict)

    def count(self, report: StepReport) -> None:
        if report.is_round and self.rounds < MOST:
            self.rounds += 1
            self.complete_groups += report.is_complete
            if report.cause is not None:
                self.failed[report.cause] = self.failed.get(report.cause, 0) + 1

    def add(self, other: RoundCounts) -> None:
        self.rounds += other.rounds
        self.complete_groups += other.complete_groups
        for cause, number in other.failed.items():
            self.failed[cause] = self.failed.get(cause, 0) + number

    def as_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds, "complete_groups": self.complete_groups, "failed": dict(self.failed)}

    @classmethod
    def read(cls, said: Any, causes: Collection[str] = CAUSES) -> RoundCounts:
        """From a file or a stranger: what is no number is 0, and no part is more than the whole."""
        said = said if isinstance(said, Mapping) else {}
        rounds = _number(said.get("rounds"), MOST)
        failed = said.get("failed")
        failed = failed if isinstance(failed, Mapping) else {}
        left, kept = rounds, {}
        for cause in causes:
            kept[cause] = _number(failed.get(cause), left)
            left -= kept[cause]
        return cls(rounds, _number(said.get("complete_groups"), rounds), {c: n for c, n in kept.items() if n})

    def since(self, before: RoundCounts, most: int) -> RoundCounts:
        """What has come since `before`, `most` rounds at most; all, if the counter was begun anew."""
        if self.rounds < before.rounds:
            before = RoundCounts()
        failed = {cause: max(0, number - before.failed.get(cause, 0)) for cause, number in self.failed.items()}
        complete = max(0, self.complete_groups - before.complete_groups)
        rounds = min(self.rounds - before.rounds, max(0, most))
        return RoundCounts.read({"rounds": rounds, "complete_groups": min(complete, rounds), "failed": failed})


def _number(value: Any, most: int) -> int:
    return min(max(value, 0), most) if type(value) is int else 0
