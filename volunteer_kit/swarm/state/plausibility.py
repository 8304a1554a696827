"""Decide whether a newcomer takes a stranger's newer state. The decision is a pure function of measurements.

A newcomer stands on the run's seed, or on its own checkpoint. From there it takes a newer state if all of these hold:

1. It fits and is finite (node/training_state.py).
2. Each tensor is no farther from where the newcomer stands than the run's optimizer can have moved it in so many epochs
   (for LAMB optim/step_bound.py).
3. On samples that everybody can name, the loss has not risen by more than MAX_LOSS_RISE.

A harmful state remains possible inside the bound if it hides its harm from the public samples, which the attacker knows
as well. A bound grows with the gap, about exponentially: after 1,000 epochs it forbids little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# nats. Losses of good states on a few public samples differ by some hundredths from epoch to epoch; a run that learns
# loses 0.15 only when something is broken (the original's loss fell by about as much in its last 2,000 epochs)
MAX_LOSS_RISE = 0.15
# epochs that a veteran may have gone astray before it is told: its own steps of that time, and the others', lie between
ASTRAY = 2
MAX_GAP = 100_000  # epochs; a bound is a loop over them, and the original's run had 7,617 in all

Tensors = Sequence[torch.Tensor]
# (parameters of the ground, its epoch, the newer epoch) -> L2 distance that each can have moved
StepBound = Callable[[Tensors, int, int], Sequence[float]]
PublicLoss = Callable[[Tensors], float]  # nats on the run's public samples, parameters in the optimizer's order


@dataclass(frozen=True)
class Evidence:
    """What was measured of a state.

    :param epoch: its own; `ground`: that of what the newcomer stands on
    :param moved, bounds: L2 distance of each parameter from the ground, and how large it can be; (): no bound known
    :param loss, loss_of_ground: nats on public samples; None: not asked
    """

    epoch: int
    ground: int
    moved: Sequence[float] = ()
    bounds: Sequence[float] = ()
    loss: float | None = None
    loss_of_ground: float | None = None


def reason_to_refuse_state(evidence: Evidence) -> str | None:
    """Return why a state that fits is not taken; None: it is."""
    if len(evidence.bounds) != len(evidence.moved):
        return "the bound is of another model"
    for index, (moved, bound) in enumerate(zip(evidence.moved, evidence.bounds, strict=True)):
        if not moved <= bound:  # nor NaN
            epochs = evidence.epoch - evidence.ground
            return f"tensor {index} is {moved:.3g} from where {epochs} epochs can have moved it {bound:.3g} at most"
    return _reason_of_loss(evidence.loss, evidence.loss_of_ground)


def _reason_of_loss(loss: float | None, ground: float | None) -> str | None:
    if loss is None or ground is None:
        return None
    if not math.isfinite(loss):
        return "its loss on public samples is not finite"
    if math.isfinite(ground) and loss > ground + MAX_LOSS_RISE:
        return f"its loss on public samples is {loss:.3f}, and was {ground:.3f}"
    return None


def distances(ground: Tensors, newer: Tensors) -> list[float]:
    """L2 distance of each pair, in float64, without a copy of a tensor's size."""
    found = []
    for before, after in zip(ground, newer, strict=True):
        total = 0.0
        pairs = zip(before.detach().reshape(-1).split(2**20), after.detach().reshape(-1).split(2**20), strict=True)
        for one, other in pairs:
            total += (one.double() - other.double()).square().sum().item()
        found.append(math.sqrt(total))
    return found


def both_ways(norm: float, ours: float, theirs: float) -> float:
    """How far apart two tensors can be that were one some epochs ago, ours of this norm now.

    :param ours, theirs: how far a tensor of our norm moves in the epochs since; then it was not ours yet: at most
        x = ours / norm smaller or larger, so each bound is off by 1 / (1 - x) at most
    """
    if norm <= 0:
        return ours + theirs
    share = ours / norm
    return float("inf") if share >= 1 else (ours + theirs) / (1 - share)
