"""What every rule does first: parts and weights checked, weights made shares of one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def shares(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> list[float]:
    """Each part's share of all weights, in [0, 1]; equal shares when nobody has any weight.

    Raises ValueError without parts, for parts of two shapes, and for a weight that is negative or not finite.
    """
    if not parts or len(parts) != len(weights):
        raise ValueError(f"{len(parts)} parts and {len(weights)} weights: one weight a part, and one part at least")
    if any(part.shape != parts[0].shape for part in parts):
        raise ValueError("the parts of a tensor have one shape")
    return normalised(weights)


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights as shares of their sum; equal ones when the sum is zero. Raises ValueError for one that is no weight."""
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights):
        raise ValueError("a weight is finite and not negative")
    largest = max(weights, default=0.0)
    if largest <= 0:
        return [1.0 / len(weights)] * len(weights)
    total = math.fsum(weight / largest for weight in weights)  # by the largest: 1e308 twice does not overflow
    return [weight / largest / total for weight in weights]
