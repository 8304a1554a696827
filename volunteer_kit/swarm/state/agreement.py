"""Sketch a model in a few numbers, so that peers can tell whether they hold the same model up to rounding."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

MAX_EPOCH = 2**31
SKETCH_SIZE = 16  # numbers: a distance is estimated within a factor of two, which is enough to tell 1e-7 from 1e-3
FRESH_SIZE = 256  # numbers, a power of two: a distance is estimated within 15 %
CHUNK = 2**22  # elements sketched at once, 16 MB
LINEAGE_SIZE = 8  # bytes, in a manifest


def sketch(tensors: Iterable[torch.Tensor], seed: int) -> bytes:
    """A few numbers whose distance estimates the distance of all values: sums with random signs.

    Source: Achlioptas 2003, "Database-friendly random projections". The signs are numpy's raw PCG64 bits, the same on
    all versions.

    :param seed: the epoch, so that no difference stays unseen for long
    :returns: SKETCH_SIZE little-endian float32
    """
    total = torch.zeros(SKETCH_SIZE, dtype=torch.float64)
    bits = np.random.PCG64(seed)
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        for part in flat.split(CHUNK):
            part = part.to("cpu", torch.float32)
            rows = torch.nn.functional.pad(part, (0, -len(part) % SKETCH_SIZE)).view(-1, SKETCH_SIZE)
            total += (_signs(bits, len(rows)) @ rows).double()
    return total.numpy().astype("<f4").tobytes()


def fresh_sketch(tensors: Iterable[torch.Tensor], seed: int) -> bytes:
    """The same for one question, with a seed that nobody knew before, and more exact: each value goes with a random
    sign into one of FRESH_SIZE sums, so that no pattern of a difference can hide or stand out.

    Source: Charikar et al. 2002, "Finding frequent items in data streams".

    :returns: FRESH_SIZE little-endian float32
    """
    total, bits = np.zeros(FRESH_SIZE), np.random.PCG64(seed)
    for tensor in tensors:
        for part in tensor.detach().reshape(-1).split(CHUNK):
            values = part.to("cpu", torch.float32).numpy()
            drawn = bits.random_raw(-(-len(values) // 4)).astype("<u8").view("<u2")[: len(values)]
            signed = np.where(drawn & FRESH_SIZE, -values, values)
            total += np.bincount(drawn % FRESH_SIZE, weights=signed, minlength=FRESH_SIZE)
    return total.astype("<f4").tobytes()


def _signs(bits: np.random.PCG64, count: int) -> torch.Tensor:
    raw = bits.random_raw(-(-count // 64)).astype("<u8").view(np.uint8)
    return torch.from_numpy(np.unpackbits(raw)[:count].astype(np.float32) * 2 - 1)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Relative distance of two sketches of one seed."""
    size = max(float(np.linalg.norm(one)), float(np.linalg.norm(other)))
    return float(np.linalg.norm(one - other)) / size if size > 0 else 0.0
