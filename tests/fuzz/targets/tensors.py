"""Tensors of strangers: parts of a round, answers, states."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch
from google.protobuf.message import DecodeError
from hivemind.compression import serialize_torch_tensor
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.streaming import split_for_streaming

from tests.fuzz.forms import Protobuf
from tests.fuzz.target import Registry
from volunteer_kit.swarm.codec import CODECS, install_codecs
from volunteer_kit.swarm.held_parts import read_values, reason_to_refuse
from volunteer_kit.swarm.transfer import IncomingState, StateRefused
from volunteer_kit.swarm.verify_wire import part_digest

install_codecs()
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
    values = read_values(message)
    try:
        read_values(message, SHAPE, CODECS["none"] if compression is None else None)
    except ValueError:
        pass  # another shape than is expected, or another codec than is in use
    part_digest(message)
    reason_to_refuse(values, SHAPE, 1.0, None, 10.0, None)
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
    def decode(data: bytes) -> bool:
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
    """A part by the codec that its message names, hivemind's among them."""
    return _decode(data)


def _parts() -> Iterator[bytes]:
    whole = CODECS["none"].compress(torch.ones(300), None)
    for part in split_for_streaming(whole, 1000):
        yield averaging_pb2.DownloadData(tensor_part=part, metadata=b"\x80").SerializeToString()
    yield averaging_pb2.DownloadData(tensor_part=whole).SerializeToString()


@registry.add(
    _parts, StateRefused, ValueError, form=Protobuf(averaging_pb2.DownloadData), max_bytes=16_384
)
def state_part(data: bytes) -> bool:
    """A donor's message of a state, twice: tensors are put together of several."""
    try:
        message = averaging_pb2.DownloadData.FromString(data)
    except DecodeError:
        return False
    state = IncomingState([torch.zeros(300), torch.zeros(300), torch.zeros(10)], CODECS["none"])
    for _ in range(2):
        if state.add(message):
            state.read()
    state.take()
    return bool(len(state))


@registry.add(
    lambda: [
        averaging_pb2.AveragingData(
            code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"g" * 36, weight=3.0,
            tensor_part=runtime_pb2.Tensor.FromString(_message(name)),
        ).SerializeToString()
        for name in ("none", "sparse", "blockwise8")
    ],
    ValueError,
    form=Protobuf(averaging_pb2.AveragingData),
    max_bytes=16_384,
)  # fmt: skip
def averaging_data(data: bytes) -> bool:
    """A sender's message of rpc_aggregate_part, up to the decision whether its part enters."""
    try:
        message = averaging_pb2.AveragingData.FromString(data)
    except DecodeError:
        return False
    values = read_values(message.tensor_part)
    return reason_to_refuse(values, SHAPE, message.weight, None, 10.0, 5.0) is None
