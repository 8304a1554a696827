"""The plain weighted mean, which every robust rule is compared with and falls back to."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def weighted_mean(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Mean of `parts` (each of one shape) weighted by samples; the plain mean when nobody has any.

    The sum runs in float32 in the order given, so that one reducer's answer does not depend on who was first.
    Raises ValueError without parts.
    """
    if not parts or len(parts) != len(weights):
        raise ValueError(f"{len(parts)} parts and {len(weights)} weights: one weight a part, and one part at least")
    total = float(sum(weights))
    if total <= 0:
        weights, total = [1.0] * len(parts), float(len(parts))
    result = torch.zeros_like(parts[0], dtype=torch.float32)
    for part, weight in zip(parts, weights, strict=True):
        result.add_(part, alpha=weight / total)
    return result
