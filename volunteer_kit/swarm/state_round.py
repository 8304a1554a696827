"""May what came of a round of state averaging be taken for ours?

Members who are apart average their parameters; with a rule that holds against some of them, and even so the result is a
stranger's. Two honest members that were one some epochs ago have since taken steps of their own, and a step has a size:
farther apart than that nothing honest is, and who would be carried farther keeps what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

ROUNDING = 0.05  # of a tensor's norm; what the 8-bit codec of a round rounds away from it, at most
SPREAD = 4.0  # times our own steps: theirs were in other directions, and may have been longer
REMEMBERED = 100  # steps


def norms(tensors: Sequence[torch.Tensor]) -> list[float]:
    return [torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).item() for tensor in tensors]


class OwnSteps:
    """How far our own last steps have moved each tensor: the measure where the run's optimizer has no known bound."""

    def __init__(self):
        self._steps: deque[list[float]] = deque(maxlen=REMEMBERED)

    def moved(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> None:
        self._steps.append(norms([new - old for old, new in zip(before, after, strict=True)]))

    def bounds(self, own: Sequence[torch.Tensor], epochs: int) -> list[float]:
        """L2 distance from `own` that each tensor can have been set apart in so many epochs."""
        last = list(self._steps)[-epochs:]
        steps = [sum(step) for step in zip(*last, strict=True)] or [0.0] * len(own)
        return [SPREAD * moved + ROUNDING * norm for moved, norm in zip(steps, norms(own), strict=True)]


def reason_to_keep_own(
    own: Sequence[torch.Tensor], averages: Sequence[torch.Tensor], bounds: Sequence[float]
) -> str | None:
    """Why a round's averages must not replace our own tensors, in words, or None if they may.

    :param bounds: L2 distances; further tensors than they have are not looked at
    """
    for index, (ours, average, bound) in enumerate(zip(own, averages, bounds, strict=False)):
        distance = torch.linalg.vector_norm(average.to(ours.dtype) - ours, dtype=torch.float64).item()
        if not distance <= bound:
            return f"tensor {index} would move by {distance:.3g}; honest steps cannot have set us apart by {bound:.3g}"
    return None
