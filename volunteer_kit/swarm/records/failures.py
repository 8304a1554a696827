"""Name the cause of an incomplete round, one of a few, and count each cause.

This module imports nothing but Python, because the dashboard counts too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from volunteer_kit.swarm.options import StepReport

INCOMPLETE = "incomplete"
CAUSES: Mapping[str, str] = {INCOMPLETE: "got answers that could not be used, or not all"}
MOST = 2**31 - 1  # rounds that anybody can have been in


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
