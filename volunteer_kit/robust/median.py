"""The weighted median: of numbers, and of every coordinate of many parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
import torch

from volunteer_kit.robust.weights import normalised, shares

BLOCK = 2**12  # coordinates at a time: 16 parts of a block in float64 stay in a core's cache
_NUMBER = 2**29 - 1
_SLACK = 1e-12  # of all weight: six shares of 1/12 are half, whatever their float sum is


def columns(parts: Sequence[torch.Tensor]) -> Iterator[tuple[slice, np.ndarray]]:
    """The parts side by side, some coordinates at a time: where they stand, and (n parts, coordinates) float32."""
    flat = [part.detach().to("cpu", torch.float32).reshape(-1).numpy() for part in parts]
    for begin in range(0, flat[0].size, BLOCK):
        yield slice(begin, begin + BLOCK), np.stack([part[begin : begin + BLOCK] for part in flat])


def lower_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The smallest of `values` that at least half of all weight does not exceed. Raises ValueError without values."""
    if not values or len(values) != len(weights):
        raise ValueError(f"a median of {len(values)} values and {len(weights)} weights")
    reached = 0.0
    for value, weight in sorted(zip(values, normalised(weights), strict=True)):
        reached += weight
        if reached >= 0.5 - _SLACK:
            return float(value)
    return float(max(values))


def median_of(values: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Each column's weighted median, float64: midway between the lower and the upper one where they differ.

    values: (n, coordinates); weights: shares of one. Midway, because the lower median of two parts is the smaller in
    every coordinate: a sum of gradients that has nothing to do with either of them.
    """
    share = np.asarray(weights)
    if np.all(share == share[0]):
        ordered, n = sorted_rows(values), len(share)
        return _between(ordered[(n - 1) // 2], ordered[n // 2])
    reached, lower, upper = np.zeros(values.shape[1]), None, None
    for row in sorted_rows(_numbered(values)):
        before, reached = reached, reached + share[row.view(np.int64) & _NUMBER]
        lower = row if lower is None else np.where(before < 0.5 - _SLACK, row, lower)
        upper = row if upper is None else np.where(before <= 0.5 + _SLACK, row, upper)
    return _between(lower.astype(np.float32), upper.astype(np.float32))


def _numbered(values: np.ndarray) -> np.ndarray:
    """(n, coordinates) float64 with each part's number in the 29 bits that a float32 leaves free: sorted, they still
    say whose they are, without argsort; rounded to float32 they are what they were."""
    bits = values.astype(np.float64).view(np.int64)
    return (bits | np.arange(len(values))[:, None]).view(np.float64)


def sorted_rows(values: np.ndarray) -> list[np.ndarray]:
    """Every column in order, as rows from the smallest to the largest: np.sort(axis=0) in a third of its time, for
    whole rows are compared at once. Batcher 1968, "Sorting networks and their applications" (odd-even merge sort)."""
    rows, n = list(values), len(values)
    for low, high in _network(n):
        rows[low], rows[high] = np.minimum(rows[low], rows[high]), np.maximum(rows[low], rows[high])
    return rows


@lru_cache(maxsize=64)
def _network(n: int) -> tuple[tuple[int, int], ...]:
    """Pairs to put in order, one after another, that sort any n."""
    pairs, run = [], 1
    while run < n:
        step = run
        while step:
            for first in range(step % run, n - step, 2 * step):
                for low in range(first, min(first + step, n - step)):
                    if low // (2 * run) == (low + step) // (2 * run):
                        pairs.append((low, low + step))
            step //= 2
        run *= 2
    return tuple(pairs)


def _between(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    return 0.5 * lower.astype(np.float64) + 0.5 * upper.astype(np.float64)


def coordinate_median(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The weighted median of every coordinate, float32 (Yin et al. 2018, "Byzantine-Robust Distributed Learning").

    Bounded by the honest parts in every coordinate while attackers hold less than half of the weight; but far from the
    mean where gradients are skewed. Raises ValueError without parts.
    """
    share = shares(parts, weights)
    result = np.empty(parts[0].numel(), np.float32)
    for place, values in columns(parts):
        result[place] = median_of(values, share)
    return torch.from_numpy(result).reshape(parts[0].shape)
