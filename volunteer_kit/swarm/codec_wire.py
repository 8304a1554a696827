"""A tensor's message on the wire: what is written around a codec's bytes, and what a stranger's must be to be read."""

from __future__ import annotations

import math

import torch
from hivemind.proto import runtime_pb2

MAX_PART_ELEMENTS = 2**28  # a stranger's header cannot make us allocate more than 1 GiB of float32


def header(tensor: torch.Tensor, compression: int, buffer: bytes) -> runtime_pb2.Tensor:
    return runtime_pb2.Tensor(
        compression=compression,
        buffer=buffer,
        size=tensor.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
    )


def shape_and_dtype(message: runtime_pb2.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """The declared shape and float type of a stranger's tensor. Raises ValueError when they make no sense."""
    shape = tuple(message.size)
    dtype = getattr(torch, message.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"not a floating point type: {message.dtype[:32]!r}")
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_PART_ELEMENTS:
        raise ValueError(f"tensor of shape {shape} is out of bounds")
    return shape, dtype


def expect_bytes(message: runtime_pb2.Tensor, expected: int) -> None:
    if len(message.buffer) != expected:
        raise ValueError(f"{len(message.buffer)} bytes where {expected} were announced")


def from_buffer(buffer: bytes, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(buffer[offset : offset + count * dtype.itemsize]), dtype=dtype, count=count)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
