"""How tensors become bytes on the wire: fp16 and two 8-bit codecs that work on every numpy.

hivemind 1.1.12 calls `int()` on a one-element array, which numpy >= 2.4 refuses, and then reports "Averaged gradients
with 2 peers" although nothing was exchanged. A notebook cannot choose its platform's numpy, so `install_codecs()` puts
these codecs into hivemind's registry and `check_codecs()` refuses to start when a round trip fails.
"""

from __future__ import annotations

import math
import struct

import hivemind.compression.serialization as hivemind_serialization
import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.proto import runtime_pb2

from volunteer_kit.swarm.errors import SwarmError

MAX_PART_ELEMENTS = 2**28  # a stranger's header cannot make us allocate more than 1 GiB of float32
BLOCK_SIZE = 1024  # values that share one scale; 4 bytes in 1,024 is 0.4 % of overhead
RANGE_IN_SIGMAS = 6.0  # the uniform codec's 256 buckets span +-3 standard deviations, as in the original run


def _header(tensor: torch.Tensor, compression: int, buffer: bytes) -> runtime_pb2.Tensor:
    return runtime_pb2.Tensor(
        compression=compression,
        buffer=buffer,
        size=tensor.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
    )


def _shape_and_dtype(message: runtime_pb2.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """The declared shape and float type of a stranger's tensor. Raises ValueError when they make no sense."""
    shape = tuple(message.size)
    dtype = getattr(torch, message.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"not a floating point type: {message.dtype[:32]!r}")
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_PART_ELEMENTS:
        raise ValueError(f"tensor of shape {shape} is out of bounds")
    return shape, dtype


def _expect_bytes(message: runtime_pb2.Tensor, expected: int) -> None:
    if len(message.buffer) != expected:
        raise ValueError(f"{len(message.buffer)} bytes where {expected} were announced")


def _from_buffer(buffer: bytes, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(buffer[offset : offset + count * dtype.itemsize]), dtype=dtype, count=count)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


class Float16Codec(CompressionBase):
    """Two bytes a value, saturating at +-65,504. Tensors that are not floating point travel as they are."""

    compression_type = runtime_pb2.FLOAT16

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info, allow_inplace)
        limit = torch.finfo(torch.float16).max
        half = tensor.detach().float().clamp(-limit, limit).half()
        return _header(tensor, self.compression_type, _to_bytes(half))

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        shape, dtype = _shape_and_dtype(serialized_tensor)
        count = math.prod(shape)
        _expect_bytes(serialized_tensor, 2 * count)
        return _from_buffer(serialized_tensor.buffer, torch.float16, count).to(dtype).reshape(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return 2.0 / info.descriptor.dtype.itemsize if info.descriptor.dtype.is_floating_point else 1.0


class Uniform8BitCodec(CompressionBase):
    """One byte a value: 256 equal buckets over +-3 standard deviations, each decoded to the mean of what fell into it.

    Layout: 256 float32 bucket means, then one uint8 a value. Source of the idea: the run described in
    "Training Transformers Together" (Borzunov et al. 2022, section 3), which sent its large tensors so.
    """

    compression_type = runtime_pb2.UNIFORM_8BIT

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info, allow_inplace)
        values = tensor.detach().float().reshape(-1)  # (N,)
        if values.numel() == 0:
            return _header(tensor, self.compression_type, b"\0" * 1024)
        shift = values.mean()
        centred = values - shift
        sigma = centred.norm() / math.sqrt(max(1, values.numel() - 1))
        scale = (RANGE_IN_SIGMAS * sigma / 256).clamp_min(torch.finfo(torch.float32).tiny)
        buckets = (centred / scale).round_().clamp_(-128, 127).add_(128).to(torch.uint8)  # (N,)
        index = buckets.long()
        sums = torch.zeros(256, dtype=torch.float64).scatter_add_(0, index, values.double())
        means = (sums / torch.bincount(index, minlength=256).clamp_min(1)).float()  # (256,)
        return _header(tensor, self.compression_type, _to_bytes(means) + _to_bytes(buckets))

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        shape, dtype = _shape_and_dtype(serialized_tensor)
        count = math.prod(shape)
        _expect_bytes(serialized_tensor, 1024 + count)
        means = _from_buffer(serialized_tensor.buffer, torch.float32, 256)
        buckets = _from_buffer(serialized_tensor.buffer, torch.uint8, count, offset=1024)
        return means[buckets.long()].to(dtype).reshape(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return 1.0 / info.descriptor.dtype.itemsize if info.descriptor.dtype.is_floating_point else 1.0


class Blockwise8BitCodec(CompressionBase):
    """One byte a value, scaled by the largest of each block of 1,024: an outlier spoils its own block only.

    Layout: uint32 block size, one float32 scale a block, one int8 a value.
    """

    compression_type = runtime_pb2.BLOCKWISE_8BIT

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        if not tensor.is_floating_point():
            return NoCompression().compress(tensor, info, allow_inplace)
        values = tensor.detach().float().reshape(-1)  # (N,)
        blocks = math.ceil(values.numel() / BLOCK_SIZE)
        padded = torch.nn.functional.pad(values, (0, blocks * BLOCK_SIZE - values.numel()))
        padded = padded.view(blocks, BLOCK_SIZE)  # (blocks, BLOCK_SIZE)
        scales = padded.abs().amax(dim=1) / 127 if blocks else torch.empty(0)  # (blocks,)
        steps = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round_().to(torch.int8)
        buffer = struct.pack("<I", BLOCK_SIZE) + _to_bytes(scales) + _to_bytes(steps.view(-1)[: values.numel()])
        return _header(tensor, self.compression_type, buffer)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        shape, dtype = _shape_and_dtype(serialized_tensor)
        count = math.prod(shape)
        blocks = math.ceil(count / BLOCK_SIZE)
        _expect_bytes(serialized_tensor, 4 + 4 * blocks + count)
        if struct.unpack_from("<I", serialized_tensor.buffer)[0] != BLOCK_SIZE:
            raise ValueError("unknown block size")
        scales = _from_buffer(serialized_tensor.buffer, torch.float32, blocks, offset=4)
        steps = _from_buffer(serialized_tensor.buffer, torch.int8, count, offset=4 + 4 * blocks)
        values = steps.float() * scales.repeat_interleave(BLOCK_SIZE)[:count]
        return values.to(dtype).reshape(shape)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return (1 + 4 / BLOCK_SIZE) / info.descriptor.dtype.itemsize if info.descriptor.dtype.is_floating_point else 1.0


class SizeAdaptiveCodec(CompressionBase):
    """`small` for tensors of up to `threshold` elements, `large` above it; integers travel as they are.

    Small tensors (norms, LayerScale, biases) are few bytes and much influence; large ones bear 8 bits well.
    """

    def __init__(self, threshold: int, small: CompressionBase, large: CompressionBase):
        self.threshold, self.small, self.large = threshold, small, large

    def choose(self, info: CompressionInfo) -> CompressionBase:
        if not info.descriptor.dtype.is_floating_point:
            return NoCompression()
        return self.large if info.descriptor.numel() > self.threshold else self.small

    def compress(self, tensor: torch.Tensor, info: CompressionInfo, allow_inplace: bool = False) -> runtime_pb2.Tensor:
        return self.choose(info).compress(tensor, info, allow_inplace)

    def extract(self, serialized_tensor: runtime_pb2.Tensor) -> torch.Tensor:
        return hivemind_serialization.deserialize_torch_tensor(serialized_tensor)

    def estimate_compression_ratio(self, info: CompressionInfo) -> float:
        return self.choose(info).estimate_compression_ratio(info)


CODECS: dict[str, CompressionBase] = {
    "none": NoCompression(),
    "float16": Float16Codec(),
    "uniform8": Uniform8BitCodec(),
    "blockwise8": Blockwise8BitCodec(),
}
_WORST_ERROR = {"none": 0.0, "float16": 1e-3, "uniform8": 0.6, "blockwise8": 0.02}  # largest, in standard deviations


def make_codec(small: str, large: str, threshold: int) -> CompressionBase:
    """The codec a run file names: `small` up to `threshold` elements, `large` above. Raises SwarmError for a name."""
    for name in (small, large):
        if name not in CODECS:
            raise SwarmError(f"There is no codec {name!r}. Choose one of: {', '.join(CODECS)}.")
    return CODECS[small] if small == large else SizeAdaptiveCodec(threshold, CODECS[small], CODECS[large])


def install_codecs() -> None:
    """Replace hivemind's codecs in its registry, in this process and those it forks; then check every one."""
    registry = hivemind_serialization._BASE_COMPRESSION_TYPES
    for codec in CODECS.values():
        registry[runtime_pb2.CompressionType.Name(codec.compression_type)] = codec
    check_codecs()


def check_codecs() -> None:
    """Send numbers through every codec and back. Raises SwarmError when one loses more than it may."""
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)).clamp(-2.9, 2.9)
    for name, codec in CODECS.items():
        try:
            info = CompressionInfo.from_tensor(values)
            message = runtime_pb2.Tensor.FromString(codec.compress(values, info).SerializeToString())
            error = (hivemind_serialization.deserialize_torch_tensor(message) - values).abs().max().item()
        except Exception as e:
            raise SwarmError(_broken_codec(name, repr(e))) from e
        if not error <= _WORST_ERROR[name]:
            raise SwarmError(_broken_codec(name, f"values come back wrong by {error:.3g}"))


def _broken_codec(name: str, cause: str) -> str:
    return (
        f"The codec {name!r} does not work on this machine ({cause}), and averaging with it would do nothing.\n"
        "1. Restart the notebook or process: it may mix two versions of a library.\n"
        "2. If it happens again, report it with the output of: python -m pip list"
    )
