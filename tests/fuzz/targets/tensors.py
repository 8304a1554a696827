"""Tensors of strangers, as hivemind writes them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch
from google.protobuf.message import DecodeError
from hivemind.compression import serialize_torch_tensor
from hivemind.proto import runtime_pb2

from tests.fuzz.forms import Protobuf
from tests.fuzz.target import Registry
from volunteer_kit.swarm.codecs.registry import CODECS, decode

registry = Registry()
TENSOR = Protobuf(runtime_pb2.Tensor)
VALUES = torch.randn(300, generator=torch.Generator().manual_seed(1))
SHAPE = torch.Size([300])


def _message(codec: str, values: torch.Tensor = VALUES) -> bytes:
    return CODECS[codec].compress(values, None).SerializeToString()


def _decode(data: bytes, compression: int | None = None) -> bool:
    try:
        message = runtime_pb2.Tensor.FromString(data)
    except DecodeError:
        return False
    if compression is not None:
        message.compression = compression
    values = decode(message)
    try:
        decode(message, SHAPE, CODECS["none"] if compression is None else None)
    except ValueError:
        pass  # another shape than is expected, or another codec than is in use
    return values.numel() > 0


def _add(name: str) -> None:
    """A target for one codec: whatever the message says, this codec reads it."""

    @registry.add(
        lambda: [_message(name), _message(name, torch.ones(2, 3)), _message(name, torch.zeros(0))],
        ValueError,
        name=f"tensor_{name}",
        form=TENSOR,
        max_bytes=16_384,
    )
    def decode_one(data: bytes) -> bool:
        return _decode(data, CODECS[name].compression_type)


for _name in CODECS:
    _add(_name)


def _of_all() -> Iterator[bytes]:
    for kind in (runtime_pb2.NONE, runtime_pb2.FLOAT16, runtime_pb2.MEANSTD_16BIT):
        yield serialize_torch_tensor(VALUES, kind).SerializeToString()
    buffer = struct.pack("<q", 256) + bytes(4 * 256) + bytes(300)  # it makes its own by 128 threads
    quantile = runtime_pb2.Tensor(compression=runtime_pb2.QUANTILE_8BIT, buffer=buffer, size=[300], dtype="float32")
    yield quantile.SerializeToString()
    yield serialize_torch_tensor(torch.arange(5), runtime_pb2.NONE).SerializeToString()
    yield serialize_torch_tensor(VALUES.bfloat16(), runtime_pb2.NONE).SerializeToString()


@registry.add(_of_all, ValueError, form=TENSOR, max_bytes=16_384)
def tensor(data: bytes) -> bool:
    """One by the codec that its message names, hivemind's among them."""
    return _decode(data)
