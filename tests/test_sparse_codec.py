"""The sparse codec: which values travel, in how many bytes, and what becomes of a stranger's bytes."""

from __future__ import annotations

import math
import struct

import hypothesis.strategies as st
import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.proto import runtime_pb2
from hypothesis import given, settings

from volunteer_kit.swarm.codecs.registry import decode, make_codec
from volunteer_kit.swarm.codecs.topk import DENSITY, SPARSE, SparseCodec, bits_per_value

HEAD = struct.Struct("<IIBff")


def message_of(tensor: torch.Tensor, density: float = 1 / 64) -> runtime_pb2.Tensor:
    message = SparseCodec(density).compress(tensor, CompressionInfo.from_tensor(tensor))
    return runtime_pb2.Tensor.FromString(message.SerializeToString())


def send(tensor: torch.Tensor, density: float = 1 / 64) -> torch.Tensor:
    return decode(message_of(tensor, density))


@given(
    numel=st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 1000, 20_000]),
    density=st.sampled_from([1e-4, 1 / 256, 1 / 64, 0.1, 0.5, 1.0]),
    zeros=st.sampled_from([0.0, 0.5, 0.999, 1.0]),
    clumped=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_the_largest_values_arrive_where_they_were(numel, density, zeros, clumped, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randn(numel, generator=generator)
    tensor[torch.rand(numel, generator=generator) < zeros] = 0.0
    if clumped:
        tensor[: numel // 2] *= 100.0
    arrived = send(tensor, density)
    expected = min(int((tensor != 0).sum()), math.ceil(density * numel))
    kept = arrived != 0
    assert int(kept.sum()) == expected
    assert torch.equal(arrived[kept].sign(), tensor[kept].sign())
    assert len(arrived.abs().unique()) <= 3  # 0 and two magnitudes
    if expected:
        left_out = tensor[~kept].abs().max() if expected < numel else torch.tensor(0.0)
        assert tensor[kept].abs().min() >= left_out
        assert arrived.abs().max() <= tensor.abs().max()
        assert (tensor - arrived).norm() < tensor.norm()  # what is left for the next round is always less


@pytest.mark.parametrize("density", [1 / 16, DENSITY, 1 / 100, 1 / 256])
def test_its_size_is_what_information_theory_allows(density):
    tensor = torch.randn(2**19, generator=torch.Generator().manual_seed(0))
    bits = 8 * len(message_of(tensor, density).SerializeToString()) / tensor.numel()
    assert bits_per_value(density) * 0.99 < bits < bits_per_value(density) * 1.03


def test_one_value_in_64_is_200_times_less_than_float32():
    tensor = torch.randn(2**19, generator=torch.Generator().manual_seed(1))
    assert 4 * tensor.numel() / len(message_of(tensor).SerializeToString()) > 200


def test_values_of_one_magnitude_lose_nothing():
    tensor = torch.zeros(1000)
    tensor[::97] = -0.25
    assert torch.equal(send(tensor), tensor)


@pytest.mark.parametrize("value", [0.1, 2.5e-3, 0.3, 0.7, 1e-30, 3e38])
@pytest.mark.parametrize("numel", [1, 7, 100, 640, 2**19])
def test_equal_magnitudes_have_a_mean_whatever_its_last_digit(value, numel):
    """As an optimizer's first steps, which move all parameters by its rate."""
    arrived = send(torch.full((numel,), -value))
    kept = arrived[arrived != 0]
    assert len(kept) and torch.allclose(kept, torch.tensor(-value), rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (0,), (3, 5, 7), (2, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_shape_and_type_arrive(shape, dtype):
    arrived = send(torch.randn(shape).to(dtype))
    assert arrived.shape == shape and arrived.dtype == dtype


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_never_hidden(broken):
    tensor = torch.randn(100)
    tensor[17] = broken
    with pytest.raises(ValueError, match="not finite"):
        message_of(tensor)


# --- strangers ---


def forged(numel=1000, **changes) -> runtime_pb2.Tensor:
    message = message_of(torch.randn(numel, generator=torch.Generator().manual_seed(3)))
    fields = dict(zip(("count", "unary", "rice", "low", "high"), HEAD.unpack_from(message.buffer), strict=True))
    message.buffer = HEAD.pack(*{**fields, **changes}.values()) + message.buffer[HEAD.size :]
    return message


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 2**32 - 1}, {"count": 0}, {"count": 15}, {"count": 17}, {"unary": 2**32 - 1}, {"unary": 0},
        {"rice": 32}, {"rice": 255}, {"rice": 0}, {"low": math.nan}, {"high": math.nan}, {"high": math.inf},
        {"low": -1.0}, {"low": 1e30, "high": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_head_that_does_not_fit_is_refused(changes):
    decode(forged())  # unchanged, it is fine
    with pytest.raises(ValueError):
        decode(forged(**changes))


def test_values_outside_of_the_part_are_refused():
    message = message_of(torch.cat([torch.zeros(999), torch.ones(1)]))
    decode(message)
    del message.size[:]
    message.size.extend([998])
    with pytest.raises(ValueError):
        decode(message)


@given(buffer=st.binary(max_size=200), numel=st.integers(0, 5000))
@settings(max_examples=300, deadline=None)
def test_whatever_a_stranger_sends_is_read_or_refused(buffer, numel):
    try:
        tensor = decode(runtime_pb2.Tensor(compression=SPARSE, buffer=buffer, size=[numel], dtype="float32"))
    except ValueError:
        return
    assert tensor.shape == (numel,) and torch.isfinite(tensor).all()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_message_with_a_byte_changed_is_read_or_refused(data):
    message = forged()
    place = data.draw(st.integers(0, len(message.buffer) - 1))
    byte = data.draw(st.integers(0, 255))
    message.buffer = message.buffer[:place] + bytes([byte]) + message.buffer[place + 1 :]
    try:
        tensor = decode(message)
    except ValueError:
        return
    assert tensor.shape == (1000,) and torch.isfinite(tensor).all()


def test_a_huge_part_of_a_small_message_costs_no_more_than_its_values():
    """Allocation is bounded by the header's bound on elements, not by what the streams say."""
    with pytest.raises(ValueError, match="out of bounds"):
        decode(runtime_pb2.Tensor(compression=SPARSE, buffer=bytes(17), size=[2**30], dtype="float32"))


@pytest.mark.parametrize("numel", [2**26, 2**28])
def test_zeros_that_take_no_bytes_take_little_memory(numel):
    """36 bytes of a stranger's would else be a gigabyte of float32, before anybody compares shapes."""
    with pytest.raises(ValueError, match="out of bounds"):
        decode(runtime_pb2.Tensor(compression=SPARSE, buffer=bytes(17), size=[numel], dtype="float64"))


# --- a run file's choice ---


def test_the_density_of_a_run_file():
    codec = make_codec("float16", "sparse", 10, density=1 / 8)
    tensor = torch.randn(800)
    assert int((decode(codec.compress(tensor, CompressionInfo.from_tensor(tensor))) != 0).sum()) == 100
    assert make_codec("sparse", "sparse", 10).density == DENSITY
