"""Encode the largest values of a part in two bits each, and their places in as few bits as possible.

rounds/error_feedback.py keeps the other values and adds them to the next round's: without that, this codec loses most
of a gradient. Error feedback: Karimireddy et al. 2019, arXiv:1901.09847; top-k in two bits for training over the
internet: Sarfi et al. 2025, arXiv:2508.15706, who spend 12 bits on each place. The gaps between places of a random
share p of all values are geometric, of H(p) / p bits: 7.8 at p = 1/80. Golomb's code for them (1966) with a power of
two (Rice 1979) comes within 2 % of it.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.proto import runtime_pb2

from volunteer_kit.swarm.codecs.wire import FLOAT32, expect_bytes, header, shape_and_dtype

SPARSE = 18  # in the message's `compression`, beyond hivemind's own
DENSITY = 1 / 80  # share of the values that travel
_HEAD = struct.Struct("<IIBff")  # values, bits of the unary stream, Rice parameter, two magnitudes
MAX_VALUES = 2**20  # of a part; a few bytes may stand for as many zeros as their header says


class SparseCodec(CompressionBase):
    """Sign and one of two magnitudes of the `density` * N largest of N values; the others are 0.

    Layout: number of values k (uint32), bits of the unary stream (uint32), Rice parameter r (uint8), the magnitudes
    (2 float32); then bits, each stream filled up to whole bytes: of each gap between places, gap >> r zeros and a one;
    its r low bits; sign and magnitude of each value. The magnitudes are the means of the values below and above the
    mean: Lloyd's two-level quantizer after one step.

    :param density: above 0, at most 1. Lower it for slower lines; what is left out comes some rounds later
    """

    compression_type = SPARSE

    def __init__(self, density: float = DENSITY):
        self.density = density

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info, allow_inplace)
        values = tensor.detach().float().reshape(-1)  # (N,)
        if not torch.isfinite(values).all():
            raise ValueError("values that are not finite")
        count = min(values.numel(), math.ceil(self.density * values.numel()))
        places = values.abs().topk(count, sorted=False).indices.sort().values  # (k,)
        kept = values[places]
        places = places[kept != 0]
        kept = kept[kept != 0]
        large, levels = _two_levels(kept.abs())
        code = 2 * (kept < 0).to(torch.uint8) + large.to(torch.uint8)  # (k,) of 0 to 3
        gaps = np.diff(places.numpy(), prepend=-1) - 1  # (k,)
        rice = _rice_parameter(gaps)
        unary = _unary(gaps >> rice)
        head = _HEAD.pack(len(gaps), len(unary), rice, *levels)
        buffer = head + _pack(unary) + _pack(_low_bits(gaps, rice)) + _pack(_low_bits(code.numpy(), 2))
        return header(tensor, self.compression_type, buffer)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        """Raises ValueError unless it is exactly what `compress` makes of some part, at this density or a lower one."""
        shape, dtype = shape_and_dtype(serialized_tensor)
        numel, buffer = math.prod(shape), serialized_tensor.buffer
        if numel > MAX_VALUES:
            raise ValueError(f"a sparse part of shape {shape} is out of bounds")
        if len(buffer) < _HEAD.size:
            raise ValueError(f"{len(buffer)} bytes are no sparse part")
        count, unary_bits, rice, low, high = _HEAD.unpack_from(buffer)
        # more bits than these are no shortest code; the low bits of all gaps are bounded by 3 * numel with that
        longest_rice = int(2 + math.log2(numel / count)) if 0 < count <= numel else 0
        if count > math.ceil(self.density * numel) or rice > longest_rice or unary_bits > numel + count:
            raise ValueError(f"{count} values of {numel}, in {unary_bits} bits and {rice} each")
        if not 0 <= low <= high < math.inf:
            raise ValueError(f"magnitudes {low} and {high}")
        sizes = [math.ceil(bits / 8) for bits in (unary_bits, count * rice, 2 * count)]
        expect_bytes(serialized_tensor, _HEAD.size + sum(sizes))
        unary, lows, codes = (
            np.unpackbits(np.frombuffer(buffer, np.uint8, size, offset), count=bits)
            for size, bits, offset in zip(
                sizes, (unary_bits, count * rice, 2 * count), _HEAD.size + np.cumsum([0, *sizes[:-1]]), strict=True
            )
        )
        ends = np.flatnonzero(unary)
        if len(ends) != count or (count and ends[-1] != unary_bits - 1):
            raise ValueError(f"{len(ends)} places for {count} values")
        gaps = (np.diff(ends, prepend=-1) - 1 << rice) + _from_low_bits(lows, rice, count)
        places = np.cumsum(gaps + 1) - 1
        if count and places[-1] >= numel:
            raise ValueError(f"a value at {places[-1]} of {numel}")
        codes = _from_low_bits(codes, 2, count)
        magnitudes = np.where(codes & 1, np.float32(high), np.float32(low))
        values = torch.zeros(numel, **FLOAT32)
        values[torch.from_numpy(places)] = torch.from_numpy(np.where(codes & 2, -magnitudes, magnitudes))
        return values.to(dtype).reshape(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        """Of parts that hold as many values as an 8-bit codec's: what hivemind takes it for is where to cut."""
        return 1.0 / info.descriptor.dtype.itemsize if info.descriptor.dtype.is_floating_point else 1.0


def bits_per_value(density: float) -> float:
    """Of a part, by what information theory allows for the places, and 2 bits for each that travels."""
    if density >= 1:
        return 2.0
    return 2 * density - density * math.log2(density) - (1 - density) * math.log2(1 - density)


def _two_levels(magnitudes: torch.Tensor) -> tuple[torch.Tensor, tuple[float, float]]:
    """Which are large, and the mean of those that are not and of those that are."""
    if not magnitudes.numel():
        return magnitudes.bool(), (0.0, 0.0)
    # in double: the float32 mean of equal values may be a digit below each of them, and then none would be small
    large = magnitudes > magnitudes.mean(dtype=torch.float64)
    high = magnitudes[large].mean().item() if large.any() else magnitudes.max().item()
    low = magnitudes[~large].mean().item() if not large.all() else high
    return large, (min(low, high), high)


def _rice_parameter(gaps: np.ndarray) -> int:
    """The r of the shortest code: a gap takes (gap >> r) + 1 + r bits."""
    if not len(gaps):
        return 0
    near = int(math.log2(gaps.mean() + 1))
    return min(range(max(0, near - 2), near + 2), key=lambda r: int((gaps >> r).sum()) + r * len(gaps))


def _unary(numbers: np.ndarray) -> np.ndarray:
    """So many zeros before a one, for each; bits (sum + k,)."""
    ends = np.cumsum(numbers + 1)
    bits = np.zeros(ends[-1] if len(ends) else 0, np.uint8)
    bits[ends - 1] = 1
    return bits


def _low_bits(numbers: np.ndarray, width: int) -> np.ndarray:
    """The lowest `width` of each, highest first; bits (k * width,)."""
    shifts = np.arange(width - 1, -1, -1)
    return (numbers[:, None] >> shifts & 1).astype(np.uint8).reshape(-1)


def _from_low_bits(bits: np.ndarray, width: int, count: int) -> np.ndarray:
    """(count,) int64; bit by bit, for a table of all bits as int64 has 8 bytes for each."""
    numbers, table = np.zeros(count, np.int64), bits.reshape(count, width)
    for place in range(width):
        numbers = numbers << 1 | table[:, place]
    return numbers


def _pack(bits: np.ndarray) -> bytes:
    return np.packbits(bits).tobytes()
