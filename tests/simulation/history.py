"""A readable history of a seed, and the shortest schedule that still breaks it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from tests.simulation.invariants import Violation
from tests.simulation.schedule import Schedule
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.entries import Entry, Head, Member, Opening, RollbackOrder
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    BallotRecord,
    HeadRecord,
    LeaveRequested,
    Persist,
    Received,
    Round,
    Send,
    SetTimer,
    Snapshot,
    Started,
    StartExchange,
    TimerFired,
)

QUIET = ("Report", "Lead", "PeerSeen")  # messages and events that a history leaves out unless all is wanted


def words(value: Any) -> str:
    """A value in few words; lineages as six hexadecimal digits."""
    if isinstance(value, bytes):
        return value.hex()[:6]
    if isinstance(value, Ballot):
        return f"{value.turn}/{value.leader}"
    if isinstance(value, Member):
        return value.peer
    if isinstance(value, Head):
        return f"{value.generation}.{value.sequence} e{value.epoch} {words(value.lineage)}"
    if isinstance(value, Answer):
        return f"{value.cells:b} by {value.reducer} ({', '.join(words(share) for share in value.shares)})"
    if isinstance(value, Share):
        return f"{value.peer}#{value.number} e{value.birth} x{value.samples} {value.cells:x}"
    if isinstance(value, Entry):
        group = " ".join(member.peer for member in value.group)
        gone = f" gone {' '.join(value.gone)}" if value.gone else ""
        return f"entry {words(value.lineage)} behind {words(value.parent)} [{group}]{gone}"
    if isinstance(value, Opening):
        members = " ".join(member.peer for member in value.members)
        return f"opening {words(value.lineage)} behind {words(value.parent)} [{members}]"
    if isinstance(value, RollbackOrder):
        return f"order {value.generation}.{value.sequence} to {words(value.parent)} as e{value.epoch}"
    if isinstance(value, Certificate):
        return f"{words(value.entry)} at {words(value.ballot)} by {' '.join(sorted(value.voters))}"
    if isinstance(value, LogItem):
        return f"{words(value.step)} certified {words(value.certificate)}" if value.step is not None else "genesis"
    if isinstance(value, Round):
        group = " ".join(f"{m.peer}:{n}" for m, n in zip(value.group, value.samples, strict=False))
        return f"round {words(value.fingerprint)} at {words(value.ballot)} [{group}]"
    if isinstance(value, Snapshot):
        return f"snapshot to {words(value.head)}"
    if isinstance(value, HeadRecord):
        return f"head {words(value.snapshot.head)}"
    if isinstance(value, BallotRecord):
        accepted = f", accepted {words(value.accepted.lineage)} at {words(value.accepted_at)}" if value.accepted else ""
        proposed = f", proposed at {words(value.proposed_at)}" if value.proposed_at else ""
        return f"promised {words(value.promised)} in {words(value.slot)}{accepted}{proposed}"
    if isinstance(value, Goodbye):
        return f"goodbye of {value.peer} in {words(value.slot)}, accepted {words(value.accepted)}"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, (frozenset, set)):
        return "{" + " ".join(sorted(words(each) for each in value)) + "}"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return "(" + ", ".join(words(each) for each in value) + ")"
    names = getattr(value, "_fields", None) or getattr(value, "__slots__", None) or getattr(
        value, "__dataclass_fields__", None
    )
    if names and not isinstance(value, (str, int)):
        return type(value).__name__ + " " + " ".join(words(getattr(value, name)) for name in names)
    return str(value)


class History:
    """Lines of what happened, oldest first.

    :param everything: heartbeats and timers too
    """

    def __init__(self, everything: bool = False):
        self.lines: list[str] = []
        self._everything = everything

    def add(self, now: float, peer: str, text: str) -> None:
        """Write a line."""
        self.lines.append(f"{now:9.3f} {peer:>4} {text}")

    def event(self, now: float, peer: str, event: Any) -> None:
        """A core is told something."""
        if isinstance(event, Received):
            body = event.message.body
            if self._everything or type(body).__name__ not in QUIET:
                self.add(now, peer, f"<- {event.sender}: {words(body)} (at {words(event.message.head)})")
        elif self._everything or not isinstance(event, (TimerFired, Started, LeaveRequested)):
            if self._everything or type(event).__name__ not in QUIET:
                self.add(now, peer, f"<  {words(event)}")

    def action(self, now: float, peer: str, action: Any) -> None:
        """A core wants something done."""
        if isinstance(action, Send):
            if self._everything or type(action.message.body).__name__ not in QUIET:
                self.add(now, peer, f"-> {action.to}: {words(action.message.body)}")
        elif isinstance(action, Persist):
            records = [each for each in action.records if self._everything or type(each).__name__ != "LedgerRecord"]
            if records:
                self.add(now, peer, f"writes {'; '.join(words(each) for each in records)}")
        elif isinstance(action, StartExchange):
            self.add(now, peer, f"sends parts for {words(action.round)}")
        elif self._everything or not isinstance(action, SetTimer):
            self.add(now, peer, f"does {words(action)}")


def shrink(schedule: Schedule, run: Callable[[Schedule], None], tries: int = 300) -> Schedule:
    """Drop faults, and peers that join, one by one, while the same invariant breaks.

    :param run: raises the violation
    """

    def fails(candidate: Schedule) -> Violation | None:
        try:
            run(candidate)
        except Violation as violation:
            return violation
        return None

    def same(one: Violation | None, other: Violation) -> bool:
        return one is not None and (one.name, one.text.split()[:2]) == (other.name, other.text.split()[:2])

    first = fails(schedule)
    if first is None:
        return schedule
    schedule = schedule._replace(faults=tuple(fault for fault in schedule.faults if fault.at <= first.time))
    dropped = True
    while dropped and tries > 0:
        dropped = False
        for place in range(len(schedule.faults) - 1, -1, -1):
            faults = schedule.faults[:place] + schedule.faults[place + 1 :]
            candidate = schedule._replace(faults=faults)
            tries -= 1
            if same(fails(candidate), first):
                schedule, dropped = candidate, True
            if tries <= 0:
                break
    return schedule


