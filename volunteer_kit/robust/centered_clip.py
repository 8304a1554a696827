"""CenteredClip: a mean that lets no part pull further than a radius around the result itself.

Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization" (2020), section 4; iterated to its
fixed point and weighted as in Gorbunov et al., "Secure Distributed Training at Scale" (2021), algorithm 1:

    v <- v + sum_i w_i (x_i - v) min(1, tau / |x_i - v|) / sum_i w_i

At the fixed point that sum is zero, which whoever knows the x_i can check along any direction: verification uses
`factor` and `radius_of` of this file, so that a reducer and those who check it have one definition. Here the sum is
divided by sum_i w_i min(1, tau / |x_i - v|) instead: the same fixed point in half the steps, and with a small tau in
tens of steps instead of thousands (it is then Weiszfeld's way to the geometric median).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from volunteer_kit.robust.median import columns, lower_median, median_of
from volunteer_kit.robust.weights import shares

TOLERANCE = 1e-10  # of the radius: a last step so short is a fixed point in float32
MOST_STEPS = 2000  # 16 parts need about 16; one case in a hundred, 250
_REBASE = 1e-3  # a result so much nearer to a part than the base was: squared distances have lost six digits
_MOST_BASES = 8
_FLOOR = 1e-13  # of the spread around the median: near to many equal parts the radius goes to zero with the steps


@dataclass(frozen=True)
class Clipped:
    """What CenteredClip found."""

    average: torch.Tensor  # float32, of the parts' shape
    n_clipped: int  # parts of some weight that lie beyond the radius
    step_norm: float  # length of the last step as the paper has it; well above 1e-10 of the radius: no fixed point
    tau: float  # radius per square root of an element, given or estimated


def radius_of(distances: Sequence[float], weights: Sequence[float]) -> float:
    """The clipping radius for parts at these distances from the result: their lower weighted median.

    Any multiple of it must stay below 9/7 if 7 of 16 may attack. From far away (D) the nine honest parts are all about
    D off, so the median is: with a radius of k D they pull back by 9 min(1, k) D and the seven push on by 7 k D, which
    wins from k = 9/7 on and carries the result away without end. Raises ValueError without distances.
    """
    return lower_median(distances, weights)


def factor(distance: float, radius: float) -> float:
    """What remains of a part at `distance` from the result: min(1, radius / distance)."""
    return 1.0 if distance <= radius else radius / distance


def centered_clip(
    parts: Sequence[torch.Tensor],
    weights: Sequence[float],
    tau: float | None = None,
    most_steps: int = MOST_STEPS,
) -> Clipped:
    """The fixed point of CenteredClip, from the coordinate-wise weighted median on.

    parts: finite, of one shape, float32 or narrower; weights: samples. tau: radius per square root of an element, so
    that parts of any size are cut alike; None (the default) takes `radius_of` at every step, which needs no knowledge
    of the gradients' size and follows them down. Arithmetic is float64, where the square of any float32 is in range.
    Raises ValueError without parts, for parts of two shapes, for a weight that is none, and for a tau <= 0.
    """
    share = np.asarray(shares(parts, weights))
    if tau is not None and not (math.isfinite(tau) and tau > 0):
        raise ValueError(f"tau is a positive number, not {tau!r}")
    root = math.sqrt(max(1, parts[0].numel()))
    radius = None if tau is None else tau * root
    base = _start(parts, share)
    gram, steps = _gram(parts, base), 0
    floor = _FLOOR * radius_of(_distances(gram, np.zeros(len(parts))), share)
    for rebased in range(_MOST_BASES):
        walk = _walk(gram, share, radius, floor, most_steps - steps, rebased + 1 < _MOST_BASES)
        steps += walk.steps
        base = _combined(parts, base, walk.coefficients)
        if not walk.is_blurred or steps >= most_steps:
            break
        gram = _gram(parts, base)
    average = torch.from_numpy(base.astype(np.float32)).reshape(parts[0].shape)
    return Clipped(average, walk.n_clipped, walk.step_norm, walk.radius / root)


@dataclass(frozen=True)
class _Walk:
    coefficients: np.ndarray  # (n,): the result is base + sum_i coefficients_i (x_i - base)
    radius: float
    n_clipped: int
    step_norm: float
    steps: int
    is_blurred: bool  # stopped because it came too near to a part for the matrix's digits


def _walk(
    gram: np.ndarray, share: np.ndarray, radius: float | None, floor: float, most_steps: int, minds_blur: bool
) -> _Walk:
    """Steps of the paper in the span of {base, x_i}, where each costs n^2 whatever the parts' size."""
    place = np.zeros(len(share))
    lengths, counts = gram.diagonal(), share > 0
    steps = 0
    while True:
        steps += 1
        distances = _distances(gram, place)
        here = radius_of(distances, share) if radius is None else radius
        kept = np.array([factor(distance, here) for distance in distances])
        pull = share * kept
        move = pull - pull.sum() * place
        place = place + move / pull.sum()
        step_norm = math.sqrt(max(0.0, move @ gram @ move))
        is_blurred = minds_blur and bool(np.any(counts & (np.square(distances) < _REBASE**2 * lengths)))
        if is_blurred or step_norm <= max(TOLERANCE * here, floor) or steps >= most_steps:
            break
    beyond = counts & (np.asarray(distances) > here * (1 + 1e-9))
    return _Walk(place, here, int(beyond.sum()), step_norm, steps, is_blurred)


def _distances(gram: np.ndarray, place: np.ndarray) -> list[float]:
    """From base + sum_i place_i (x_i - base) to every part."""
    across = gram @ place
    return np.sqrt(np.maximum(0.0, gram.diagonal() - 2 * across + place @ across)).tolist()


def _start(parts: Sequence[torch.Tensor], share: np.ndarray) -> np.ndarray:
    base = np.empty(parts[0].numel())
    for place, values in columns(parts):
        base[place] = median_of(values, share)
    return base


def _gram(parts: Sequence[torch.Tensor], base: np.ndarray) -> np.ndarray:
    """(n, n) inner products of the parts' differences to `base`. To the base, not to zero: where most parts are near
    it, a single part 1e30 away costs their distances no digit."""
    gram = np.zeros((len(parts), len(parts)))
    for place, values in columns(parts):
        apart = values - base[place]  # float64
        gram += apart @ apart.T
    return gram


def _combined(parts: Sequence[torch.Tensor], base: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    result = (1 - coefficients.sum()) * base
    for place, values in columns(parts):
        result[place] += coefficients @ values.astype(np.float64)
    return result
