"""Sketches: a few numbers along random directions that nobody knew when the vector was fixed.

Each value goes, with a random sign, into one of `size` sums. The map is linear, so sketches of ranges of samples add up
to the sketch of all of them, and the length of a difference of sketches estimates the length of the difference.

Source: Charikar et al. 2002, "Finding frequent items in data streams"; the joint direction z of Gorbunov et al. 2021,
"Secure Distributed Training at Scale", section 3.1, has `size` rows here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import torch

CHUNK = 2**20  # values at once: 8 MB of drawn numbers
DRAWS = 4  # 16-bit draws in one of the generator's numbers
SIGN = 15  # which bit of a draw


def sketch(values: torch.Tensor, seed: bytes, offset: int = 0, size: int = 8) -> np.ndarray:
    """Sums of a part of a vector, float64 (size,). PCG64's raw bits are the same on all versions of numpy.

    :param values: the part, any shape, floating point
    :param seed: 16 bytes or more, drawn after the vector was fixed
    :param offset: of the part's first value in the vector, so that parts' sketches sum to the vector's
    :param size: a power of two up to 2^15; a length is estimated with a relative error of sqrt(1 / (2 size))
    """
    flat = values.detach().reshape(-1)
    total = np.zeros(size)
    bits = np.random.PCG64(int.from_bytes(seed[:16], "little")).advance(offset // DRAWS)
    skipped = offset % DRAWS
    for part in flat.split(CHUNK):
        numbers = part.to("cpu", torch.float64).numpy()
        raw = bits.random_raw(-(-(skipped + len(numbers)) // DRAWS))
        drawn = np.atleast_1d(raw).astype("<u8", copy=False).view("<u2")[skipped : skipped + len(numbers)]
        place = (drawn & (size - 1)) | (drawn >> SIGN) * np.uint16(size)  # negative ones have sums of their own:
        sums = np.bincount(place.astype(np.intp), weights=numbers, minlength=2 * size)
        total += sums[:size] - sums[size:]  # turning each value's sign takes four times as long
        skipped = 0  # a chunk is a whole number of draws: only the first begins in the middle of one
        if (used := (offset % DRAWS + len(numbers)) % DRAWS) and len(numbers) == CHUNK:
            bits, skipped = bits.advance(-1), used  # the last number's other draws belong to the next chunk
    return total


def sketch_slices(tensors: Iterable[torch.Tensor], seed: bytes, slices: Sequence[int], size: int = 8) -> np.ndarray:
    """The sketches of a vector's slices, float64 (slices, size).

    :param tensors: the vector, in its order; :param slices: values in each slice
    Raises ValueError if there are more values than slices have room for.
    """
    totals, offset = np.zeros((len(slices), size)), 0
    ends = list(accumulate(slices))
    for tensor in tensors:
        flat, first = tensor.detach().reshape(-1), offset
        while offset < first + len(flat):
            place = bisect_right(ends, offset)
            if place == len(ends):
                raise ValueError(f"a vector of more than {offset} values")
            until = min(ends[place], first + len(flat))
            totals[place] += sketch(flat[offset - first : until - first], seed, offset, size)
            offset = until
    return totals


def mismatch(sent: np.ndarray, recomputed: np.ndarray) -> float:
    """How far what was sent is from what its samples give, as a share of the longer one's length.

    Both are sketches of slices, (slices, sums). What is stated of a slice may be false where its reducer is in league
    with the sender: so slices are compared one by one, that no lie about one makes up for another, and lengths are
    taken from the same numbers, that no length is stated which makes any distance small.
    """
    sent, recomputed = np.asarray(sent, np.float64), np.asarray(recomputed, np.float64)
    scale = max(float(np.linalg.norm(sent)), float(np.linalg.norm(recomputed)), 1e-30)
    distance = float(np.linalg.norm(sent - recomputed)) / scale
    return distance if np.isfinite(distance) else float("inf")
