"""The reduction rules by name, and those that stand beside CenteredClip for comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from volunteer_kit.robust.centered_clip import centered_clip
from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.robust.median import columns, coordinate_median
from volunteer_kit.robust.weights import shares

Reduce = Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor]


def trimmed_mean(parts: Sequence[torch.Tensor], weights: Sequence[float], trimmed: float = 0.25) -> torch.Tensor:
    """In every coordinate the mean of what is left when the lowest and the highest `trimmed` of all weight are cut off,
    float32 (Yin et al. 2018, "Byzantine-Robust Distributed Learning").

    trimmed: in [0, 0.5), of one side; it bears attackers of that much weight. A part on the border counts with what
    the cut leaves of it. Raises ValueError without parts or for another `trimmed`.
    """
    share = np.asarray(shares(parts, weights))
    if not 0 <= trimmed < 0.5:
        raise ValueError(f"trimmed is a share of one side, from 0 to below 0.5, not {trimmed!r}")
    result = np.empty(parts[0].numel(), np.float32)
    for place, values in columns(parts):
        order = np.argsort(values, axis=0)  # (n, coordinates)
        ends = np.cumsum(share[order], axis=0)
        begins = ends - share[order]
        kept = np.clip(np.minimum(ends, 1 - trimmed) - np.maximum(begins, trimmed), 0, None)
        result[place] = (kept / kept.sum(axis=0) * np.take_along_axis(values, order, 0)).sum(axis=0)
    return torch.from_numpy(result).reshape(parts[0].shape)


def krum(
    parts: Sequence[torch.Tensor], weights: Sequence[float], attackers: int | None = None, chosen: int = 1
) -> torch.Tensor:
    """The part that is nearest to its neighbours, or the weighted mean of the `chosen` nearest ones (Multi-Krum);
    float32. Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent".

    The score of a part is the sum of squared distances to its n - attackers - 2 nearest others. attackers: how many
    are expected; None is the most that the paper proves anything for, 2 attackers + 2 < n: 6 of 16. Parts of no weight
    are neither chosen nor neighbours. Raises ValueError without parts.
    """
    share = np.asarray(shares(parts, weights))
    some = np.flatnonzero(share)
    squared = np.zeros((len(some), len(some)))
    for _, values in columns([parts[i] for i in some]):
        wide = values.astype(np.float64)
        for i, row in enumerate(wide):
            squared[i] += np.square(wide - row).sum(axis=1)
    n = len(some)
    expected = max(0, (n - 3) // 2) if attackers is None else attackers
    neighbours = max(1, n - expected - 2)
    scores = np.sort(squared, axis=1)[:, 1 : 1 + neighbours].sum(axis=1)  # the nearest of all is the part itself
    best = some[np.argsort(scores, kind="stable")[: max(1, chosen)]]
    return weighted_mean([parts[i] for i in best], [share[i] for i in best])


def clipped_mean(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """CenteredClip with the radius that the group's own spread gives."""
    return centered_clip(parts, weights).average


RULES: dict[str, Reduce] = {
    "mean": weighted_mean,
    "centered_clip": clipped_mean,
    "median": coordinate_median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
}


def rule(name: str) -> Reduce:
    """The rule a run file names. Raises ValueError for an unknown name."""
    if name not in RULES:
        raise ValueError(f"There is no reduction rule {name!r}. Choose one of: {', '.join(RULES)}.")
    return RULES[name]
