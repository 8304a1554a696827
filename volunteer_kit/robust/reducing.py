"""Was a reducer's answer the rule's average of what it was sent? Told along a drawn direction, by those it served.

At CenteredClip's fixed point the clipped differences of all parts to the answer sum to zero, along every direction.
Source: Gorbunov et al. 2021, "Secure Distributed Training at Scale", Alg. 2, verification 2. With the plain mean the
differences sum to zero unclipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from volunteer_kit.robust.bounds import scales
from volunteer_kit.robust.centered_clip import factor, radius_of

NORM, DISTANCE, SUMS = 0, 1, 2  # columns of a statement's numbers; from SUMS on, the sketch
UNKNOWN = 1e30  # distance from an answer that did not come
SAME = 1e-3  # relative: two processors' sums of the same float32 values differ by less
ACCUSED = 2.0  # times that: who accuses must not be wrong because a juror's processor rounds otherwise
LONGEST = 10.0  # times the median length of what was sent; no answer of CenteredClip is longer, see centered_clip.py
# what the answer's own codec and the digits of the statements leave, as a share of answer and radius: 0.023 is
# measured, and the sketch of a difference is more than three times as long once in 1e16
ROUNDING = 0.08
NEAREST = 0.5  # of the distance along the direction; the true one is shorter once in ten thousand times


def residual(numbers: np.ndarray, weights: Sequence[float], answer: np.ndarray, clips: bool) -> float:
    """How far an answer is from the fixed point, as a share of the lengths that there are.

    :param numbers: (senders, 2 + sums), each sender's of this part
    :param weights: of these senders, in samples
    :param answer: (1 + sums,), the answer's length and its sketch
    :param clips: CenteredClip, whose radius is the weighted median of the distances; else the mean
    """
    total, numbers = float(sum(weights)), _as_bounded(np.asarray(numbers, np.float64), weights, float(answer[0]))
    distances = [float(distance) for distance in numbers[:, DISTANCE]]
    radius = radius_of(distances, weights) if clips else 0.0
    sums = np.asarray(numbers[:, SUMS:], np.float64) - answer[1:]
    # a false statement of a short distance would else let its sums outweigh everybody's
    farther = np.maximum(distances, NEAREST * np.linalg.norm(sums, axis=1))
    shares = [w / total * (factor(d, radius) if clips else 1.0) for w, d in zip(weights, farther, strict=True)]
    scale = float(answer[0]) + (radius or float(np.average(distances, weights=weights)))
    off = float(np.linalg.norm(np.asarray(shares) @ sums))
    return off / scale if scale > 0 else (0.0 if off == 0 else float("inf"))


def _as_bounded(numbers: np.ndarray, weights: Sequence[float], answer: float) -> np.ndarray:
    """The numbers of the parts that the reducer averaged: those far longer than the others' it had scaled down."""
    kept = np.asarray(scales(numbers[:, NORM].tolist(), weights))
    along = (numbers[:, NORM] ** 2 + answer**2 - numbers[:, DISTANCE] ** 2) / 2  # inner products with the answer
    bounded = numbers * kept[:, None]
    scaled = np.maximum(0.0, (kept * numbers[:, NORM]) ** 2 - 2 * kept * along + answer**2)
    bounded[:, DISTANCE] = np.where(kept < 1, np.sqrt(scaled), numbers[:, DISTANCE])
    return bounded


def differs(said: np.ndarray, true: np.ndarray, times: float = 1.0) -> bool:
    """Is what a sender says of one of its parts, (2 + sums,), not true of the bytes, by so many times what two
    processors' roundings explain?"""
    said, true = np.array(said, np.float64), np.array(true, np.float64)
    if said[DISTANCE] >= UNKNOWN or not np.isfinite(true[DISTANCE]):  # of an answer of 1e38 it is too long for float32
        said[DISTANCE] = true[DISTANCE] = 0.0
    slack = times * SAME * (true[NORM] + true[DISTANCE]) + 1e-30
    return not bool(np.all(np.abs(said - true) <= slack))  # NaN is a difference
