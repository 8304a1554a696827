"""What the workers' events come to: goodput, where the rest of the seconds went, bytes, rounds, and time to a loss.

goodput = seconds of devices whose samples entered an applied global step / (wall seconds of devices - contention).
A worker's window is from one of its steps to another. Samples belong to the window in which they were computed, as far
as a step took them: the next one, or in the kit any later one. The kit's peers tell what became of all samples, and the
oldest expire first. A worker that has made no step for longer than OVERDUE of its usual ones is stuck, and its window
goes on to the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from statistics import mean, median

OVERDUE = 2.5  # times as long as usually between two steps, and some more
COUNTERS = ("computed", "contention", "between", "own_work", "wire_sent", "wire_received")


@dataclass
class Account:
    """Seconds of devices, of one or more."""

    wall: float = 0.0
    applied: float = 0.0  # computing whose samples entered an applied step
    lost: float = 0.0  # computing whose samples did not
    waiting: float = 0.0  # between microbatches: rounds, downloads, outages
    own_work: float = 0.0  # of that: what the optimizer itself computed
    contention: float = 0.0
    steps: int = 0
    complete: int = 0  # steps in a group of all workers
    failed: int = 0
    wire_sent: int = 0
    wire_received: int = 0
    samples: int = 0  # applied
    parts_sent: int = 0  # bytes of gradients and averages, of wire_sent; nothing of matchmaking, DHT and states

    @property
    def control_sent(self) -> int:
        """Bytes of all else on the wire: matchmaking, DHT, states, headers, retransmissions."""
        return self.wire_sent - self.parts_sent

    def __add__(self, other: Account) -> Account:
        return Account(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def goodput(self) -> float:
        return self.applied / max(1e-9, self.wall - self.contention)

    def share(self, seconds: float) -> float:
        return seconds / max(1e-9, self.wall - self.contention)


def account(events: Sequence[dict], speed: float, workers: int, begin: float, end: float) -> Account:
    """Settle one worker's account, from its first step after `begin` to the last before `end` (time.monotonic()) that
    another one followed, or to `end` if it is stuck. Each step says how many samples are `pending`, and of the kit what
    became of all (`totals`)."""
    steps = [event for event in events if event["event"] == "step" and begin <= event["at"] <= end]
    if not steps:
        return Account()
    first, last = steps[0], steps[-1]
    after: list[dict] = []
    is_stuck = end - last["at"] > OVERDUE * usual_interval(events, end - begin)
    if is_stuck:
        last = max((e for e in events if e["event"] in ("beat", "step") and e["at"] <= end), key=lambda e: e["at"])
        last = {**last, "between": last["between"] + end - last["at"], "at": end}
    elif len(steps) < 2:
        return Account()
    else:
        after = [e for e in events if e["event"] == "step" and e["at"] > last["at"]]
        if not after and len(steps) > 2:
            after, steps = steps[-1:], steps[:-1]
            last = steps[-1]
    grown = {name: last[name] - first[name] for name in COUNTERS}
    applied = _applied_of_the_kit(first, last, after) if "totals" in first else _applied(steps, after, is_stuck)
    return Account(
        wall=last["at"] - first["at"],
        applied=applied / speed,
        lost=max(0.0, grown["computed"] - applied / speed),
        waiting=grown["between"],
        own_work=grown["own_work"],
        contention=grown["contention"],
        steps=len(steps) - 1,
        complete=sum(step["group_size"] >= workers for step in steps[1:]),
        failed=sum(bool(step["failure"]) for step in steps[1:]),
        wire_sent=grown["wire_sent"],
        wire_received=grown["wire_received"],
        samples=applied,
        parts_sent=sum(step.get("bytes_sent", 0) for step in steps[1:]),
    )


def _applied(steps: Sequence[dict], after: Sequence[dict], is_stuck: bool) -> float:
    """Samples of the window that were applied, where only the next step takes what is pending."""
    brought = min(steps[0]["pending"], steps[1]["samples"]) if steps[1:] else 0
    if is_stuck:
        under_way = 0
    elif after:
        under_way = min(steps[-1]["pending"], after[0]["samples"])
    else:
        under_way = brought  # where nothing is known of it, as much at the end as at the beginning
    return sum(step["samples"] for step in steps[1:]) + under_way - brought


def _applied_of_the_kit(first: dict, last: dict, after: Sequence[dict]) -> float:
    """Samples of the window that were applied, by their totals: all that was computed, less what expired beyond the
    backlog that the window began with, and less what is pending at its end and no later step took."""

    def expired(event: dict) -> float:
        totals = event["totals"]
        return totals["computed"] - totals["committed"] - totals["pending"]

    computed = last["totals"]["computed"] - first["totals"]["computed"]
    lost = max(0.0, expired(last) - expired(first) - first["totals"]["pending"])
    left = max(0.0, last["totals"]["pending"] - sum(step["samples"] for step in after))
    return max(0.0, computed - lost - left)


def usual_interval(events: Sequence[dict], otherwise: float) -> float:
    """s between two steps of one worker."""
    times = [event["at"] for event in events if event["event"] == "step"]
    return median(later - earlier for earlier, later in zip(times, times[1:], strict=False)) if times[1:] else otherwise


def losses(workers: Iterable[Sequence[dict]], begin: float) -> list[tuple[float, float]]:
    """(s since begin, loss of a real microbatch) of all workers, in their order."""
    found = [
        (beat["at"] - begin, loss)
        for events in workers for beat in events if beat["event"] == "beat" for loss in beat["losses"]
    ]  # fmt: skip
    return sorted(found)


def time_to_loss(curve: Sequence[tuple[float, float]], level: float, width: int = 32) -> float | None:
    """s until the mean of `width` losses in a row is at `level` or below; None: it never was."""
    for end in range(width, len(curve) + 1):
        if mean(loss for _, loss in curve[end - width : end]) <= level:
            return curve[end - 1][0]
    return None


def last_loss(curve: Sequence[tuple[float, float]], width: int = 32) -> float:
    return mean(loss for _, loss in curve[-width:]) if curve else float("nan")


def round_seconds(workers: Iterable[Sequence[dict]], begin: float, end: float) -> list[float]:
    """s of every round that had a group, of all workers."""
    return [
        e["seconds"] for events in workers for e in events
        if e["event"] == "step" and e["group_size"] > 1 and begin <= e["at"] <= end
    ]  # fmt: skip


def middle(values: Sequence[float]) -> float:
    return median(values) if values else float("nan")
