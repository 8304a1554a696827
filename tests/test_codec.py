"""Codecs: what goes in comes out, within bounds; what strangers send is refused."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
import torch
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.proto import runtime_pb2
from hypothesis import given, settings

from volunteer_kit.swarm.codecs.dense import BlockwiseCodec, Float16Codec, UniformCodec
from volunteer_kit.swarm.codecs.registry import (
    _READERS,
    CODECS,
    SizeAdaptiveCodec,
    check_codecs,
    decode,
    make_codec,
)
from volunteer_kit.swarm.codecs.wire import MAX_PART_ELEMENTS
from volunteer_kit.swarm.errors import SwarmError

LOSSY = ["float16", "uniform8", "blockwise8", "uniform4", "blockwise4"]
SHAPES = [(), (0,), (1,), (2,), (1023,), (1024,), (1025,), (3, 5, 7), (0, 4), (2, 1024)]


def send(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Through the codec and the wire's bytes."""
    message = CODECS[name].compress(tensor, CompressionInfo.from_tensor(tensor))
    return decode(runtime_pb2.Tensor.FromString(message.SerializeToString()))


def random_tensor(shape, scale: float, offset: float, seed: int, dtype=torch.float32) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * scale + offset).to(dtype)


def allowed_error(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a codec may lose on each value of `tensor`, from its description. Float64, flat."""
    values = tensor.double().flatten()
    rounding = 4 * values.abs().max() * torch.finfo(tensor.dtype).eps + 1e-5 * values.abs().max() + 1e-37
    if name == "float16":
        return (values.abs() * 2.0**-11).clamp_min(2.0**-24) + rounding
    if name.startswith("blockwise"):
        largest = {"blockwise8": 127, "blockwise4": 7}[name]
        return torch.full_like(values, 0.51 * values.abs().max().item() / largest) + rounding
    # uniform: a bucket within 3 sigma; what lies beyond it shares the last bucket
    buckets = {"uniform8": 256, "uniform4": 16}[name]
    sigma = values.std() if values.numel() > 1 else torch.zeros((), dtype=torch.float64)
    distance = (values - values.mean()).abs()
    beyond, width = (distance - 2.9 * sigma).clamp_min(0), 6 / buckets * sigma
    in_last = distance > 2.9 * sigma - width
    return torch.where(in_last, 0.2 * sigma + width + beyond.max(), width) + rounding


# --- round trips ---


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(LOSSY),
    shape=st.sampled_from(SHAPES),
    scale=st.sampled_from([0.0, 1e-30, 1e-4, 1.0, 300.0]),
    offset=st.sampled_from([0.0, 1.0, -2e4]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_what_comes_out_is_what_went_in_within_the_codecs_error(name, shape, scale, offset, dtype, seed):
    tensor = random_tensor(shape, scale, offset, seed, dtype)
    result = send(name, tensor)
    assert result.shape == tensor.shape and result.dtype == tensor.dtype
    if tensor.numel():
        error = (result.double() - tensor.double()).abs().flatten()
        assert (error <= allowed_error(name, tensor)).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=64),
    name=st.sampled_from(LOSSY),
)
def test_any_finite_values_stay_finite_and_within_their_range(values, name):
    tensor = torch.tensor(values, dtype=torch.float32)
    result = send(name, tensor)
    assert torch.isfinite(result).all()
    largest = tensor.abs().max().item()
    assert result.abs().max().item() <= largest * (1 + 1e-3) + 1e-7


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [0.0, 1.0, -0.125, 2.0**-14, 1024.0])
@pytest.mark.parametrize("shape", [(), (1,), (5000,)])
def test_constants_come_back_as_they_are(name, value, shape):
    result = send(name, torch.full(shape, value))
    assert (result - value).abs().max().item() <= abs(value) * 1e-6


def test_the_uniform_codec_keeps_the_mean():
    tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(3)).exp()  # skewed
    assert send("uniform8", tensor).double().mean().item() == pytest.approx(tensor.double().mean().item(), rel=1e-6)


def test_an_outlier_spoils_its_own_block_only():
    tensor = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    tensor[5] = 1e6
    result = send("blockwise8", tensor)
    assert (result[1024:] - tensor[1024:]).abs().max() < 0.02  # half of a 127th of the largest in the second block
    assert (result[:1024] - tensor[:1024]).abs().max() > 0.5


def test_float16_saturates_instead_of_becoming_infinite():
    result = send("float16", torch.tensor([1e30, -1e30, 65504.0, 1e-30]))
    assert result.tolist() == [65504.0, -65504.0, 65504.0, 0.0]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_never_hidden(name, broken):
    """The reducer refuses what is not finite: a codec that turned NaN into a number would let it through."""
    tensor = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    tensor[1500] = broken
    result = send(name, tensor)
    if name == "float16" and math.isinf(broken):
        assert result[1500].abs().item() == 65504.0  # saturated, as every large value
    else:
        assert not torch.isfinite(result).all()


@pytest.mark.parametrize("name", list(CODECS))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.int32, torch.bool])
def test_integers_travel_as_they_are(name, dtype):
    tensor = torch.tensor([[0, 1, 255], [7, 100, 3]]).to(dtype)
    result = send(name, tensor)
    assert result.dtype == dtype and torch.equal(result, tensor)


def test_parts_and_views_are_encoded_by_value():
    whole = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    for name in LOSSY:
        assert torch.equal(send(name, whole.t()), send(name, whole.t().contiguous()))
    before = whole.clone()
    send("uniform8", whole)
    assert torch.equal(whole, before), "encoding must not change what it encodes"


# --- sizes on the wire ---


@pytest.mark.parametrize(
    "name, bytes_a_value",
    [
        ("none", 4.0),
        ("float16", 2.0),
        ("uniform8", 1.0),
        ("blockwise8", 1.004),
        ("uniform4", 0.5),
        ("blockwise4", 0.5156),
    ],
)
def test_bytes_on_the_wire(name, bytes_a_value):
    tensor = torch.randn(100_000)
    info = CompressionInfo.from_tensor(tensor)
    size = len(CODECS[name].compress(tensor, info).SerializeToString())
    assert bytes_a_value <= size / tensor.numel() + 1e-4
    assert size <= bytes_a_value * tensor.numel() + 1200  # 1 KiB of bucket means and a header
    assert CODECS[name].estimate_compression_ratio(info) == pytest.approx(bytes_a_value / 4, rel=1e-3)


# --- strangers ---


def wire(codec=None, **changes) -> runtime_pb2.Tensor:
    tensor = torch.linspace(-1, 1, 100)
    message = (codec or Float16Codec()).compress(tensor, CompressionInfo.from_tensor(tensor))
    for name, value in changes.items():
        if name == "size":
            del message.size[:]
            message.size.extend(value)
        else:
            setattr(message, name, value)
    return message


@pytest.mark.parametrize(
    "codec", [Float16Codec(), UniformCodec(8), BlockwiseCodec(8), UniformCodec(4), BlockwiseCodec(4)], ids=LOSSY
)
@pytest.mark.parametrize(
    "changes",
    [
        {"buffer": b""},
        {"buffer": b"\0" * 10},
        {"buffer": b"\0" * 100_000},
        {"size": [101]},
        {"size": [97]},
        {"size": [2**40]},
        {"size": [2**20, 2**20]},
        {"size": [MAX_PART_ELEMENTS + 1]},
        {"size": [-100]},
        {"size": [-10, -10]},
        {"dtype": "int64"},
        {"dtype": "uint8"},
        {"dtype": "complex64"},
        {"dtype": "load"},
        {"dtype": "nn"},
        {"dtype": ""},
        {"dtype": "__doc__"},
    ],
    ids=str,
)
def test_a_strangers_message_that_makes_no_sense_is_refused(codec, changes):
    decode(wire(codec))  # unchanged, it is fine
    with pytest.raises(ValueError):
        decode(wire(codec, **changes))


def test_an_unknown_block_size_is_refused():
    message = wire(BlockwiseCodec())
    message.buffer = b"\1\0\0\0" + message.buffer[4:]
    with pytest.raises(ValueError, match="block size"):
        decode(message)


# --- the check at the start ---


class Raises(UniformCodec):
    def extract(self, serialized_tensor):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")  # numpy 2.4's words


class Wrong(UniformCodec):
    def extract(self, serialized_tensor):
        return super().extract(serialized_tensor) + 1.0


class NotANumber(UniformCodec):
    def extract(self, serialized_tensor):
        return super().extract(serialized_tensor) * float("nan")


@pytest.mark.parametrize(
    "broken, words", [(Raises(), "0-dimensional"), (Wrong(), "wrong by"), (NotANumber(), "wrong by")]
)
def test_a_codec_that_fails_its_round_trip_stops_the_start(monkeypatch, broken, words):
    monkeypatch.setitem(_READERS, broken.compression_type, broken)
    with pytest.raises(SwarmError, match=words) as told:
        check_codecs()
    assert "'uniform8'" in str(told.value) and "1." in str(told.value)


# --- a run file's choice ---


def test_the_choice_is_by_the_size_of_the_whole_tensor():
    codec = make_codec("float16", "uniform8", threshold=1000)
    assert isinstance(codec, SizeAdaptiveCodec)
    for numel, kind in [(1, "FLOAT16"), (1000, "FLOAT16"), (1001, "UNIFORM_8BIT"), (50_000, "UNIFORM_8BIT")]:
        whole = torch.randn(numel)
        info = CompressionInfo.from_tensor(whole)
        part = whole[: min(10, numel)]  # a part of a large tensor is small, and must travel as its tensor does
        message = codec.compress(part, info.get_part(0, 10))
        assert runtime_pb2.CompressionType.Name(message.compression) == kind, numel
        assert torch.equal(codec.extract(message), decode(message))
        ratio = {"FLOAT16": 0.5, "UNIFORM_8BIT": 0.25}[kind]
        assert codec.estimate_compression_ratio(info) == ratio
    steps = torch.arange(5000)
    assert torch.equal(codec.extract(codec.compress(steps, CompressionInfo.from_tensor(steps))), steps)


def test_a_codecs_name_in_a_run_file():
    assert isinstance(make_codec("none", "none", 10), NoCompression)
    assert make_codec("blockwise8", "blockwise8", 10) is CODECS["blockwise8"]
    with pytest.raises(SwarmError, match="zip.*Choose one of.*uniform8"):
        make_codec("float16", "zip", 10)
