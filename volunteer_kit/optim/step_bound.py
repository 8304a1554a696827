"""How far LAMB can move a tensor in so many epochs: what a state that claims to be newer must stay inside."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from .recipe import LinearSchedule, OptimizerConfig

ROUNDING = 1e-5  # of the norm, a step: float32 (6e-8) and what it does to a trust ratio, with room
FACTOR = 1.001  # of the whole, for the norms that are known to float32


class LambStepBound:
    """(parameters, epoch0, epoch1) -> for each the L2 distance that it can be moved between these epochs.

    LAMB (lamb.py, and fused.py in the same words) adds -lr * trust * u to a tensor w, where
    trust = min(|w|, clamp) / |u|. So whatever the gradients were, whoever sent them, and however u came about (decayed
    or spared, corrected for its start or not, statistics in 8 bits or 32):

    - |w| > 0 and |u| > 0: it moves by lr * min(|w|, clamp), exactly;
    - |u| = 0: it does not move;
    - |w| = 0: trust is 1, and it moves by lr * |u|. A tensor that is all zero has only ever had zero gradients, or has
      made no step: its statistics are the zero state, exactly so in 8 bits too. Its first step has
      u = (1 - beta1) g / (sqrt(1 - beta2) |g| + eps), or g / (|g| + eps) with the correction: each element is at most
      s = max(1, (1 - beta1) / sqrt(1 - beta2)), so |u| <= s * sqrt(n). With weights of zero the decay adds nothing.

    With N(t) the largest norm that w can have at epoch t, N(t+1) = N(t) + lr(t) * min(N(t), clamp), and the distance is
    at most the sum of the lr(t) * min(N(t), clamp): it grows like exp(sum of lr), no faster than in a line once N is
    past the clamp. A step is taken once an epoch or, when its gradient is not finite, not at all. lr(t) is the larger
    of the schedule's at t and t + 1, for peers that step the schedule a moment later.
    """

    def __init__(self, config: OptimizerConfig):
        self.config = config
        self._schedule = LinearSchedule(config.warmup_epochs, config.total_epochs)
        self._first = max(1.0, (1 - config.betas[0]) / math.sqrt(1 - config.betas[1]))

    def rate(self, epoch: int) -> float:
        """Of the step from `epoch` to the next."""
        return self.config.lr * max(self._schedule(epoch), self._schedule(epoch + 1))

    def __call__(self, parameters: Sequence[torch.Tensor], epoch0: int, epoch1: int) -> list[float]:
        norms = [torch.linalg.vector_norm(p.detach(), dtype=torch.float64).item() for p in parameters]
        start, moved = np.array(norms), np.zeros(len(norms))
        # all zero: it may take its first step at any of these epochs, or have grown since an earlier one
        first = np.where(start == 0, self._first * np.sqrt([parameter.numel() for parameter in parameters]), 0.0)
        with np.errstate(over="ignore"):  # past all numbers everything is inside
            for epoch in range(epoch0, epoch1):
                largest = start + moved
                steps = np.maximum(np.minimum(largest, self.config.clamp_value), first)
                moved += self.rate(epoch) * steps + ROUNDING * largest
        return (FACTOR * moved).tolist()
