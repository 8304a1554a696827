"""Is the model still good, and to which state does the run go back if it is not? Pure decisions on what was measured.

A look is one state of the run, as the monitor holds it after a step. Three things ruin a run: numbers that are no
numbers; a jump that no step of the optimizer makes; and steps that are steps, in a direction that harms. The first two
are certain at once. The third is a question of how far honest noise takes this run's loss, which its own past answers.

What stays possible: harm below MIN_RISE nats in ten steps, done again and again, as long as it stays below SLOW in a
hundred; and harm that the public samples do not show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

MIN_HISTORY = 8  # looks, before a loss means anything
RECENT, LONG = 10, 100  # looks in which the best is looked for
MIN_RISE = 0.3  # nats above the best of RECENT that is worth a doubt at all
SLOW = 1.0  # nats above the best of LONG
GROSS = 1.5  # nats; no honest step does this to a run that has settled
FAST_NOISE, SLOW_NOISE, GROSS_NOISE = 4.0, 6.0, 10.0  # times the run's own noise
STREAK, OF = 3, 4  # looks: one bad epoch may be a bad batch
SLACK = 2  # epochs before the rise: what harmed was there before it showed
PROBATION = 3  # epochs that must be good after a state until it is signed
COOL_DOWN = 4  # epochs after an order in which no other is given: it has to be obeyed first
AT_MOST = 3  # orders in a row to the same state


@dataclass(frozen=True)
class Look:
    """One state.

    :param moved: the largest share of its bound that a tensor has moved since the look before; None: no bound known
    :param public_loss: on the run's public samples; None: they cannot be read here
    :param swarm_loss: median of what the peers report
    """

    epoch: int
    finite: bool = True
    moved: float | None = None
    public_loss: float | None = None
    swarm_loss: float | None = None


def should_roll_back(history: Sequence[Look], now: Look) -> str | None:
    """The reason in words, None while all is well. `history`: the looks before, oldest first."""
    if not now.finite:
        return "the model has values that are not finite"
    if now.moved is not None and not now.moved <= 1.0:
        return f"a step moved the model {_times(now.moved)} as far as the optimizer can"
    losses = losses_of([*history, now])
    past = [loss for loss in losses[:-1] if math.isfinite(loss)]
    if past and not math.isfinite(losses[-1]):
        return "the loss is not finite"
    if len(past) < MIN_HISTORY:
        return None
    return _reason_of_rise(past, losses[-1])


def _reason_of_rise(past: Sequence[float], now: float) -> str | None:
    best = min(past[-LONG:])
    if now > best + max(GROSS, GROSS_NOISE * noise_of(past)):
        return f"the loss is {now:.2f}, and was {best:.2f}"
    calm, lately = past[: 1 - OF], [*past[1 - OF :], now]
    noise = noise_of(calm)
    for window, least, times in ((RECENT, MIN_RISE, FAST_NOISE), (LONG, SLOW, SLOW_NOISE)):
        before = min(calm[-window:])
        limit = before + max(least, times * noise)
        if now > limit and sum(loss > limit for loss in lately) >= STREAK:
            return f"the loss has risen from {before:.2f} to {now:.2f} and stays there"
    return None


def is_good(history: Sequence[Look], now: Look) -> bool:
    """Good enough to be everybody's ground: far from what would be a doubt."""
    if should_roll_back(history, now) is not None:
        return False
    losses = losses_of([*history, now])
    past = [loss for loss in losses[:-1] if math.isfinite(loss)]
    if len(past) < MIN_HISTORY:
        return True
    return losses[-1] <= min(past[-RECENT:]) + max(MIN_RISE, FAST_NOISE * noise_of(past)) / 2


def losses_of(looks: Sequence[Look]) -> list[float]:
    """The run's losses: on public samples; where there are none, what the peers report."""
    public = [look.public_loss for look in looks if look.public_loss is not None]
    if public and looks[-1].public_loss is not None:
        return public
    return [look.swarm_loss for look in looks if look.swarm_loss is not None] if not public else []


def noise_of(losses: Sequence[float]) -> float:
    """How far this run's loss goes above the best of the looks before, nine times in ten."""
    rises = [
        max(0.0, loss - min(losses[max(0, place - RECENT) : place]))
        for place, loss in enumerate(losses)
        if place and math.isfinite(loss)
    ][-LONG:]
    return sorted(rises)[int(0.9 * (len(rises) - 1))] if rises else 0.0


def began(history: Sequence[Look], now: Look) -> int:
    """The epoch from which on no state is to be trusted, given that something is wrong now."""
    looks = [*history, now]
    field = "public_loss" if any(look.public_loss is not None for look in looks) else "swarm_loss"
    known = [(look.epoch, getattr(look, field)) for look in looks if getattr(look, field) is not None]
    calm = [loss for _, loss in known[: 1 - OF] if math.isfinite(loss)]
    suspect = now.epoch
    if calm:
        limit = min(calm[-RECENT:]) + max(MIN_RISE, FAST_NOISE * noise_of(calm)) / 3
        for epoch, loss in reversed(known):
            if loss <= limit:
                break
            suspect = epoch
    return suspect


def choose(epochs: Iterable[int], suspect: int) -> int | None:
    """Of the epochs of states that were good, the one to go back to: the newest with SLACK before the rise; else the
    oldest that there is, if it is before it at all."""
    before = sorted(epoch for epoch in epochs if epoch < suspect)
    if not before:
        return None
    return next((epoch for epoch in reversed(before) if epoch <= suspect - SLACK), before[0])


@dataclass
class Restraint:
    """Not again and again: what was ordered, and whether more of the same would help."""

    ordered: list[tuple[int, str]] = field(default_factory=list)  # (epoch it was resumed as, state)

    def note(self, resume_epoch: int, state: str) -> None:
        self.ordered = [*self.ordered, (resume_epoch, state)][-2 * AT_MOST :]

    def is_cooling(self, epoch: int) -> bool:
        """Too soon after the last order to judge what came of it."""
        return bool(self.ordered) and epoch < self.ordered[-1][0] + COOL_DOWN

    def has_given_up(self, state: str) -> bool:
        last = [one for _, one in self.ordered[-AT_MOST:]]
        return len(last) == AT_MOST and set(last) == {state}

    def forget(self) -> None:
        """A person has decided."""
        self.ordered = []


def _times(share: float) -> str:
    return f"{share:.3g} times" if math.isfinite(share) else "far more than"
