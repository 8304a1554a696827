"""Encode every value of a tensor in 16, 8 or 4 bits."""

from __future__ import annotations

import math
import struct

import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.proto import runtime_pb2

from volunteer_kit.swarm.codecs.wire import (
    FLOATS,
    INTEGERS,
    MAX_PLAIN_ELEMENTS,
    expect_bytes,
    from_buffer,
    header,
    shape_and_dtype,
    to_bytes,
)

# values that share one scale: 4 bytes of 1,024 in 8 bits, or of 256 in 4, are 0.4 % and 3 % of overhead
BLOCK_SIZES = {8: 1024, 4: 256}
RANGE_IN_SIGMAS = 6.0  # the uniform codec's buckets span +-3 standard deviations, as in the original run
UNIFORM_4BIT, BLOCKWISE_4BIT = 16, 17  # in the message's `compression`, beyond hivemind's own


class PlainCodec(NoCompression):
    """hivemind's NoCompression, whose `extract` calls `numpy.dtype` with a stranger's text and believes any shape.

    Layout: the values as they lie in memory; bfloat16 as float32, or (newer hivemind, by a setting) in two bytes each.
    """

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        shape, dtype = shape_and_dtype(serialized_tensor, FLOATS | INTEGERS, MAX_PLAIN_ELEMENTS)
        count, wire = math.prod(shape), dtype
        if dtype == torch.bfloat16 and len(serialized_tensor.buffer) == 4 * count:
            wire = torch.float32
        expect_bytes(serialized_tensor, count * wire.itemsize)
        if dtype == torch.bool:  # a byte that is neither 0 nor 1 is no bool
            return (from_buffer(serialized_tensor.buffer, torch.uint8, count) != 0).reshape(shape)
        return from_buffer(serialized_tensor.buffer, wire, count).to(dtype).reshape(shape)


class Float16Codec(CompressionBase):
    """Two bytes a value, saturating at +-65,504. Tensors that are not floating point travel as they are."""

    compression_type = runtime_pb2.FLOAT16

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info, allow_inplace)
        limit = torch.finfo(torch.float16).max
        half = tensor.detach().float().clamp(-limit, limit).half()
        return header(tensor, self.compression_type, to_bytes(half))

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        shape, dtype = shape_and_dtype(serialized_tensor)
        count = math.prod(shape)
        expect_bytes(serialized_tensor, 2 * count)
        return from_buffer(serialized_tensor.buffer, torch.float16, count).to(dtype).reshape(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return 2.0 / info.descriptor.dtype.itemsize if info.descriptor.dtype.is_floating_point else 1.0


class UniformCodec(CompressionBase):
    """2^bits equal buckets over +-3 standard deviations, each decoded to the mean of what fell into it.

    Layout: float32 bucket means, then one uint8 a value, or one for two. Source of the idea: the run described in
    "Training Transformers Together" (Borzunov et al. 2022, section 3), which sent its large tensors so, in 8 bits.

    :param bits: 8 or 4
    """

    def __init__(self, bits: int = 8):
        self.bits, self.compression_type = bits, {8: runtime_pb2.UNIFORM_8BIT, 4: UNIFORM_4BIT}[bits]

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info, allow_inplace)
        values, buckets = tensor.detach().float().reshape(-1), 2**self.bits  # (N,)
        if values.numel() == 0:
            return header(tensor, self.compression_type, bytes(4 * buckets))
        shift = values.mean()
        centred = values - shift
        sigma = centred.norm() / math.sqrt(max(1, values.numel() - 1))
        scale = (RANGE_IN_SIGMAS * sigma / buckets).clamp_min(torch.finfo(torch.float32).tiny)
        steps = (centred / scale).round_().clamp_(-buckets // 2, buckets // 2 - 1)
        index = steps.add_(buckets // 2).to(torch.uint8)  # (N,)
        sums = torch.zeros(buckets, dtype=torch.float64).scatter_add_(0, index.long(), values.double())
        means = (sums / torch.bincount(index.long(), minlength=buckets).clamp_min(1)).float()  # (buckets,)
        return header(tensor, self.compression_type, to_bytes(means) + to_bytes(_in_bytes(index, self.bits)))

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        shape, dtype = shape_and_dtype(serialized_tensor)
        count, buckets = math.prod(shape), 2**self.bits
        size = math.ceil(count * self.bits / 8)
        expect_bytes(serialized_tensor, 4 * buckets + size)
        means = from_buffer(serialized_tensor.buffer, torch.float32, buckets)
        index = from_buffer(serialized_tensor.buffer, torch.uint8, size, offset=4 * buckets)
        return means[_out_of_bytes(index, self.bits, count).long()].to(dtype).reshape(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return self.bits / 8 / info.descriptor.dtype.itemsize if info.descriptor.dtype.is_floating_point else 1.0


class BlockwiseCodec(CompressionBase):
    """Scaled by the largest of each block: an outlier spoils its own block only.

    Layout: uint32 block size, one float32 scale a block, one int8 a value, or one byte for two.

    :param bits: 8 or 4
    """

    def __init__(self, bits: int = 8):
        self.bits, self.compression_type = bits, {8: runtime_pb2.BLOCKWISE_8BIT, 4: BLOCKWISE_4BIT}[bits]
        self.block_size, self.largest = BLOCK_SIZES[bits], 2 ** (bits - 1) - 1

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info, allow_inplace)
        values = tensor.detach().float().reshape(-1)  # (N,)
        blocks = math.ceil(values.numel() / self.block_size)
        missing = blocks * self.block_size - values.numel()
        padded = torch.nn.functional.pad(values, (0, missing)) if missing else values
        padded = padded.view(blocks, self.block_size)  # (blocks, block_size)
        scales = torch.linalg.vector_norm(padded, torch.inf, dim=1) / self.largest  # (blocks,)
        steps = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
        steps = steps.view(-1)[: values.numel()]
        if self.bits == 4:
            steps = _in_bytes((steps + 8).to(torch.uint8), 4)
        buffer = struct.pack("<I", self.block_size) + to_bytes(scales) + to_bytes(steps)
        return header(tensor, self.compression_type, buffer)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        shape, dtype = shape_and_dtype(serialized_tensor)
        count = math.prod(shape)
        blocks, size = math.ceil(count / self.block_size), math.ceil(count * self.bits / 8)
        expect_bytes(serialized_tensor, 4 + 4 * blocks + size)
        buffer = serialized_tensor.buffer  # a copy of it, each time that it is asked for
        if struct.unpack_from("<I", buffer)[0] != self.block_size:
            raise ValueError("unknown block size")
        scales = from_buffer(buffer, torch.float32, blocks, offset=4)
        kind = torch.int8 if self.bits == 8 else torch.uint8
        steps = from_buffer(buffer, kind, size, offset=4 + 4 * blocks)
        if self.bits == 4:
            steps = _out_of_bytes(steps, 4, count).to(torch.int8) - 8
        values, whole = steps.float(), count // self.block_size
        # a block at a time: to repeat each scale for its values took several times as long
        values[: whole * self.block_size].view(whole, self.block_size).mul_(scales[:whole, None])
        values[whole * self.block_size :].mul_(scales[whole:])
        return values.to(dtype).reshape(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        exact = self.bits / 8 + 4 / self.block_size
        return exact / info.descriptor.dtype.itemsize if info.descriptor.dtype.is_floating_point else 1.0


def _in_bytes(index: torch.Tensor, bits: int) -> torch.Tensor:
    """(N,) uint8 below 2^bits -> whole bytes, two of 4 bits in one."""
    if bits == 8:
        return index
    pairs = torch.nn.functional.pad(index, (0, index.numel() % 2)).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def _out_of_bytes(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    return packed if bits == 8 else torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[:count]
