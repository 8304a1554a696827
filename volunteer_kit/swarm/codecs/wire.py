"""Write and read a tensor's message: the fields around a codec's bytes, within bounds for strangers.

All bounds are checked before anything is computed or allocated from the message: `math.prod` over a million sizes, or
`numpy.dtype` of a megabyte of text, holds the interpreter lock for minutes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from google.protobuf.message import Message
from hivemind.proto import runtime_pb2

MAX_PART_ELEMENTS = 2**28  # 1 GiB of float32; the bound where no shape is expected
MAX_PLAIN_ELEMENTS = 2**40  # where each has its bytes in the message
MAX_DIMENSIONS = 16  # of a tensor; a model's have up to 5
MAX_AROUND = 512  # bytes of a message beside its buffer: 16 sizes, a type's name and four numbers need under 250
FLOATS = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
# of what is made here and goes round: a script may have set another default type, or device
FLOAT32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
INTEGERS = {name: getattr(torch, name) for name in ("bool", "uint8", "int8", "int16", "int32", "int64")}


def header(tensor: torch.Tensor, compression: int, buffer: bytes) -> runtime_pb2.Tensor:
    return runtime_pb2.Tensor(
        compression=compression,
        buffer=buffer,
        size=tensor.shape,
        dtype=str(tensor.dtype).removeprefix("torch."),
        requires_grad=tensor.requires_grad,
    )


def check_around(message: Message, values: int, most: int = MAX_AROUND) -> None:
    """Raises ValueError for a message with more than `most` bytes beside its values: fields of other kits among them,
    and all of it stays in memory for as long as a part of it does."""
    if (around := message.ByteSize() - values) > most:
        raise ValueError(f"{around} bytes around {values} of values")


def check_header(
    message: runtime_pb2.Tensor, shape: Sequence[int] | None = None, most: int = MAX_PART_ELEMENTS
) -> None:
    """Raises ValueError unless what surrounds the buffer is short, and the declared shape is possible.

    :param shape: that is expected; None: any of `most` elements at most
    """
    if len(message.size) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(message.size)} dimensions")
    check_around(message, len(message.buffer))
    if shape is not None:
        if tuple(message.size) != tuple(shape):
            raise ValueError(f"shape {tuple(message.size)} instead of {tuple(shape)}")
    # no size may be hidden behind a zero: the strides of such a shape overflow
    elif math.prod(size for size in message.size if size) > most:
        raise ValueError(f"a tensor of shape {tuple(message.size)} is out of bounds")


def shape_and_dtype(
    message: runtime_pb2.Tensor, known: dict[str, torch.dtype] = FLOATS, most: int = MAX_PART_ELEMENTS
) -> tuple[tuple[int, ...], torch.dtype]:
    """The declared shape and type of a stranger's tensor. Raises ValueError when they make no sense.

    :param known: the types that may be named
    :param most: elements
    """
    check_header(message, most=most)
    if message.dtype not in known:
        raise ValueError(f"values of type {message.dtype[:32]!r}")
    return tuple(message.size), known[message.dtype]


def expect_bytes(message: runtime_pb2.Tensor, expected: int) -> None:
    if len(message.buffer) != expected:
        raise ValueError(f"{len(message.buffer)} bytes where {expected} were announced")


def from_buffer(buffer: bytes, dtype: torch.dtype, count: int, offset: int = 0) -> torch.Tensor:
    if count == 0:
        return torch.empty(0, dtype=dtype)
    part = bytearray(memoryview(buffer)[offset : offset + count * dtype.itemsize])
    return torch.frombuffer(part, dtype=dtype, count=count)


def to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
