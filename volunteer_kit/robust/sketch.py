"""Sketches: a few numbers along random directions that nobody knew when the vector was fixed.

Each value goes, with a random sign, into one of `size` sums. The map is linear, so sketches of ranges of samples add up
to the sketch of all of them, and the length of a difference of sketches estimates the length of the difference.

Source: Charikar et al. 2002, "Finding frequent items in data streams"; the joint direction z of Gorbunov et al. 2021,
"Secure Distributed Training at Scale", section 3.1, has `size` rows here.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def sketch_all(tensors: Iterable[torch.Tensor], seed: bytes, size: int = 8) -> np.ndarray:
    """The sketch of tensors as one vector, in their order."""
    total, offset = np.zeros(size), 0
    for tensor in tensors:
        total += sketch(tensor, seed, offset, size)
        offset += tensor.numel()
    return total


def mismatch(sent: np.ndarray, recomputed: np.ndarray, norm: float) -> float:
    """How far what was sent is from what its samples give, as a share of the longer one's length.

    :param norm: length of what was sent, for one that sends little sends its sketch as small
    """
    scale = max(norm, float(np.linalg.norm(recomputed)), 1e-30)
    distance = float(np.linalg.norm(np.asarray(sent, np.float64) - recomputed)) / scale
    return distance if np.isfinite(distance) else float("inf")
