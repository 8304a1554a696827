"""Exact accounts of the seconds that a swarm's devices spend: whatever is killed and stopped.

A node's ledger says of each sample what became of it, and goes on from the disk after a kill; the worker's clock says
where its seconds went. Both are told in "beat" and "step" events, and what the ledger holds at the beginning of a life
in its "ready". Between two points in time of which the account is known it is a straight line.

    committed             samples that are in an entry, as far as this peer has heard by then
    dead                  from a kill to the restarted process's first microbatch
    stopped               from SIGSTOP to SIGCONT, less what was computed of a microbatch meanwhile
    microbatch lost       between a kill and the last samples before it that the restarted process still has
    idle                  between two microbatches: the device may not compute, or waits for a slot or new parameters
    own work              of the time between two microbatches, what the thread itself computed
    expired: CAUSE        samples that the ledger gave up
    pending               computed, and in no entry yet; over a window what is more at its end than at its beginning
    contention            this machine's cores were others'; it is no device's time, and taken off the sum
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.home_parts.faults import Fault

Seconds = dict[str, float]
COMMITTED, CONTENTION = "committed", "contention"
NOT_EXPIRED = ("computed", "committed", "pending")  # of a ledger's totals; the others are causes


@dataclass
class Life:
    """One process of a worker, from its clock's start to its end.

    :param events: its "beat" and "step" events with `totals`, in their order; at least one, and a beat first
    :param had: samples that its ledger had from earlier lives
    :param stops: times between which it was stopped
    :param killed: when; None: it was not
    """

    events: Sequence[dict]
    had: float = 0.0
    stops: Sequence[tuple[float, float]] = ()
    killed: float | None = None

    @property
    def began(self) -> float:
        """When its clock was started: time.monotonic()."""
        first = self.events[0]
        return first["at"] - first["computed"] - first["contention"] - first["between"]


@dataclass
class Account:
    """Cumulated seconds of one device, by where they went: points in time, and straight lines between them."""

    times: list[float] = field(default_factory=list)
    points: list[Seconds] = field(default_factory=list)

    def add(self, at: float, seconds: Seconds) -> None:
        """The next point."""
        self.times.append(at)
        self.points.append(seconds)

    def at(self, time: float) -> Seconds:
        """Return the value at this time; times outside of all points have the nearest point's."""
        place = bisect_right(self.times, time)
        if place in (0, len(self.times)):
            return self.points[max(0, place - 1)]
        before, after = self.points[place - 1], self.points[place]
        share = (time - self.times[place - 1]) / (self.times[place] - self.times[place - 1])
        names = {*before, *after}
        return {name: (1 - share) * before.get(name, 0.0) + share * after.get(name, 0.0) for name in names}

    def between(self, begin: float, end: float) -> Seconds:
        """Return the increase between two times."""
        return sum_of((self.at(end), {name: -seconds for name, seconds in self.at(begin).items()}))


def lives_of(processes: Sequence[Sequence[dict]], faults: Sequence[Fault]) -> list[Life]:
    """The events of all processes on one worker's machine.

    :param processes: their events, one after the other
    :param faults: those that struck this worker
    """
    kills = [fault.at for fault in faults if fault.kind == "kill"]
    stops = [(fault.at, fault.until) for fault in faults if fault.kind == "stop" and fault.until is not None]
    found = []
    for events, after in zip(processes, [*processes[1:], None], strict=True):
        told = [event for event in events if event["event"] in ("beat", "step")]
        if not told:
            continue  # it never came to compute: its worker is dead from the last kill to the next life
        killed = None
        if after is not None:
            begin = after[0]["at"] if after else float("inf")
            killed = next((at for at in kills if told[-1]["at"] <= at <= begin), told[-1]["at"])  # or it crashed
        had = next((event["totals"]["computed"] for event in events if event["event"] == "ready"), 0.0)
        found.append(Life(told, had, stops, killed))
    return found


def sum_of(accounts: Iterable[Mapping[str, float]]) -> Seconds:
    """All of them together."""
    total: Seconds = {}
    for account in accounts:
        for name, seconds in account.items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def account_of(lives: Sequence[Life], speed: float, end: float) -> Account:
    """The account of one worker, until `end` at least.

    :param lives: of its processes that came to compute
    :param speed: samples/s of its device
    """
    account = Account()
    lost: Seconds = {}  # dead, and microbatches lost
    clock: Seconds = {}  # of the lives before
    for life, after in zip(lives, [*lives[1:], None], strict=True):
        kept, last = life.had / speed, life.events[-1]  # s, that lives before have computed
        account.add(life.began, sum_of((lost, clock, fates(life.events[0]["totals"], kept, speed))))
        stopped: Seconds = {}
        earlier: Mapping[str, float] = {}
        for event in life.events:
            if event["event"] == "beat":
                stopped, earlier = sum_of((stopped, stops_within(life.stops, earlier, event))), event
            fate = fates(event["totals"], kept + event["computed"], speed)
            point = sum_of((lost, clock, clock_of(event), stopped, fate))
            point["idle"] += event["at"] - account.times[0] + lives[0].had / speed - sum(point.values())
            account.add(event["at"], point)  # the clock does not know yet of the time since the last microbatch
        clock = sum_of((clock, clock_of(last), stopped))
        kept = after.had / speed if after is not None else kept + last["computed"]
        if life.killed is None:
            if last["at"] < end:  # it waits
                account.add(end, sum_of((account.points[-1], {"idle": end - last["at"]})))
            continue
        fate = fates(last["totals"], kept, speed)
        computed = sum((fate | lost | clock).values())
        since = life.killed - account.times[0] + lives[0].had / speed
        lost = sum_of((lost, {"microbatch lost": since - computed}))
        account.add(life.killed, sum_of((lost, clock, fate)))
        dead_until = after.began if after is not None else max(end, life.killed)
        lost = sum_of((lost, {"dead": dead_until - life.killed}))
        if after is None:
            account.add(dead_until, sum_of((lost, clock, fate)))
    return account


def clock_of(event: Mapping[str, float]) -> Seconds:
    """Return the seconds that computed no sample, by cause."""
    own_work = min(event["own_work"], event["between"])
    return {"idle": event["between"] - own_work, "own work": own_work, CONTENTION: event["contention"]}


def fates(totals: Mapping[str, float], computed: float, speed: float) -> Seconds:
    """Return the samples by their fate.

    :param totals: of the ledger, in samples
    :param computed: s that this device has computed until now
    """
    found = {COMMITTED: totals["committed"] / speed}
    found |= {f"expired: {cause}": n / speed for cause, n in totals.items() if cause not in NOT_EXPIRED and n}
    return found | {"pending": computed - sum(found.values())}


def stops_within(
    stops: Sequence[tuple[float, float]], before: Mapping[str, float], after: Mapping[str, float]
) -> Seconds:
    """Return the s of a stop between two beats: a microbatch took longer, or the next one began later."""
    if not before:
        return {}
    left = sum(max(0.0, min(until, after["at"]) - max(at, before["at"])) for at, until in stops)
    grown = sum_of((clock_of(after), {name: -seconds for name, seconds in clock_of(before).items()}))
    moved: Seconds = {}
    for name in sorted(("idle", CONTENTION), key=lambda name: -grown[name]):  # it fell into one of them
        moved[name] = -min(left, max(0.0, grown[name]))
        left += moved[name]
    return moved | {"stopped": -sum(moved.values())}


def goodput(account: Mapping[str, float], off: float = 0.0) -> float:
    """:param off: s of devices that are taken off"""
    return account[COMMITTED] / (sum(account.values()) - account.get(CONTENTION, 0.0) - off)


def losses(account: Mapping[str, float]) -> Seconds:
    """Shares of the devices' time that are not goodput, by cause."""
    whole = sum(account.values()) - account.get(CONTENTION, 0.0)
    return {name: seconds / whole for name, seconds in sorted(account.items()) if name not in (COMMITTED, CONTENTION)}
