"""Messages that are heavy to read, as a stranger or a member would make them: each is refused in few words, and before
the work that it asks for. Time is the processor's, with room: the faults took from ten seconds to hours of it."""

from __future__ import annotations

import math
import struct
import time
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import runtime_pb2

from volunteer_kit.swarm.codecs.registry import CODECS, decode, make_codec
from volunteer_kit.swarm.codecs.topk import SPARSE, SparseCodec
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.net.bounded_names import bound_names

SIZE = 2**31 - 1
PEERS = [PeerID(b"\x12\x20" + i.to_bytes(4, "big") + bytes(28)) for i in range(1024)]


@pytest.fixture(autouse=True, scope="module")
def in_every_process():
    bound_names()


@contextmanager
def quick(seconds: float = 2.0):
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


@contextmanager
def small(megabytes: float):
    """In Python's and numpy's memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
    finally:
        tracemalloc.stop()


def in_codec(name: str, tensor: torch.Tensor) -> runtime_pb2.Tensor:
    return CODECS[name].compress(tensor, CompressionInfo.from_tensor(tensor))


def tensor_message(**changes) -> runtime_pb2.Tensor:
    message = in_codec("uniform8", torch.ones(8))
    for name, value in changes.items():
        if name == "size":
            del message.size[:]
            message.size.extend(value)
        else:
            setattr(message, name, value)
    return message


def with_unknown_field(num_bytes: int) -> runtime_pb2.Tensor:
    """As a newer kit's, or nobody's: protobuf keeps what it does not know."""
    length = b""
    left = num_bytes
    while left > 127:
        length, left = length + bytes([left & 127 | 128]), left >> 7
    field = bytes([15 << 3 | 2]) + length + bytes([left]) + bytes(num_bytes)
    return runtime_pb2.Tensor.FromString(tensor_message().SerializeToString() + field)


HEAVY = {
    "50,000 sizes": lambda: tensor_message(size=[SIZE] * 50_000),
    "1 MB of sizes": lambda: tensor_message(size=[SIZE] * 200_000),
    "a million ones": lambda: tensor_message(size=[1] * 1_000_000),
    "large sizes behind a zero": lambda: tensor_message(size=[SIZE, SIZE, SIZE, SIZE, 0], buffer=b""),
    "3 MB of a type": lambda: tensor_message(compression=runtime_pb2.NONE, dtype="f4," * 1_000_000),
    "numpy's word for a type": lambda: tensor_message(compression=runtime_pb2.NONE, dtype="<f4"),
    "fields of a type": lambda: tensor_message(compression=runtime_pb2.NONE, dtype="f4,f4,f4"),
    "objects": lambda: tensor_message(compression=runtime_pb2.NONE, dtype="object", buffer=bytes(64)),
    "a name of torch": lambda: tensor_message(dtype="load"),
    "1 MB that nobody knows": lambda: with_unknown_field(2**20),
    "hivemind's quantiles": lambda: tensor_message(compression=runtime_pb2.QUANTILE_8BIT),
    "hivemind's scaled halves": lambda: tensor_message(compression=runtime_pb2.MEANSTD_16BIT),
    "a codec that nobody has": lambda: tensor_message(compression=77),
}


@pytest.mark.parametrize("heavy", HEAVY)
def test_a_heavy_tensor_is_refused_before_it_is_read(heavy):
    message = HEAVY[heavy]()
    with quick(), small(8), pytest.raises(ValueError) as refused:
        decode(message)
    assert len(str(refused.value)) < 300


def test_nothing_but_the_codec_in_use_is_read():
    values = torch.randn(100)
    sent = {name: in_codec(name, values) for name in CODECS}
    in_use = make_codec("float16", "sparse", 10)
    for name, message in sent.items():
        if name in ("float16", "sparse"):
            assert decode(message, (100,), in_use).shape == (100,)
        else:
            with pytest.raises(ValueError, match="not in use"):
                decode(message, (100,), in_use)
    steps = torch.arange(5)
    assert torch.equal(decode(NoCompression().compress(steps, None), (5,), in_use), steps), "integers as they are"


# --- sparse parts ---

HEAD = struct.Struct("<IIBff")


def sparse_message(numel: int, count: int, rice: int, unary_bits: int) -> runtime_pb2.Tensor:
    """That is whole: its streams are as long as its head says, and its last gap ends with them."""
    unary = np.zeros(unary_bits, np.uint8)
    unary[:: max(1, unary_bits // max(1, count))][:count] = 1
    unary[-1:] = 1
    streams = [np.packbits(unary).tobytes(), bytes(math.ceil(count * rice / 8)), bytes(math.ceil(2 * count / 8))]
    buffer = HEAD.pack(count, unary_bits, rice, 1.0, 1.0) + b"".join(streams)
    return runtime_pb2.Tensor(compression=SPARSE, buffer=buffer, size=[numel], dtype="float32")


def test_a_sparse_part_does_not_grow():
    heavy = sparse_message(2**20, count=2**20, rice=25, unary_bits=2**20)
    assert len(heavy.buffer) > 3_500_000
    with small(8), pytest.raises(ValueError):
        decode(heavy)  # no shortest code has so many low bits
    longest = sparse_message(2**20, count=2**20, rice=2, unary_bits=2**20)
    with small(60):  # of all that may be whole the largest, 4 MB of values
        assert decode(longest).shape == (2**20,)
    with small(8), pytest.raises(ValueError, match="shape"):
        decode(longest, (1000,))
    with small(8), pytest.raises(ValueError, match="values of"):
        decode(longest, (2**20,), SparseCodec(1 / 80))  # more of them than the run's density lets travel


@pytest.mark.parametrize("numel", [1, 2, 3, 7, 80, 1000, 2**16])
@pytest.mark.parametrize("density", [1 / 1000, 1 / 80, 0.3, 1.0])
def test_no_honest_part_is_out_of_bounds(numel, density):
    """Values in one clump, at the ends, everywhere."""
    codec, places = SparseCodec(density), torch.arange(numel)
    for values in (torch.randn(numel), (places < numel / 80).float(), (places == numel - 1).float()):
        message = codec.compress(values, CompressionInfo.from_tensor(values))
        assert decode(message, (numel,), codec).shape == (numel,)

    """An embedding of a language model has 311 million values."""
    message = tensor_message(compression=runtime_pb2.NONE, size=[151_936, 2048], buffer=bytes(8))
    with pytest.raises(ValueError, match="8 bytes where 1244659712"):
        decode(message, (151_936, 2048), NoCompression())
    with pytest.raises(ValueError, match="out of bounds"):
        decode(message)


def test_few_words():
    for value in (ValueError("x" * 2**20), [["y" * 2**20] * 1000] * 1000, {"z": bytes(2**20)}, 10**4000):
        assert len(brief(value)) <= 200
    assert brief(ValueError("short")) == "ValueError('short')"


# --- hivemind's own reading ---


def test_a_peer_id_has_few_bytes():
    for num_bytes in (65, 2**16, 2**22):
        with quick(), pytest.raises(ValueError, match=f"{num_bytes} bytes"):
            PeerID(bytes(num_bytes))
    assert PeerID(PEERS[3].to_bytes()) == PEERS[3] and PeerID(b"") is not None


def test_what_a_peer_answers_in_place_of_an_answer_is_cut():
    assert len(str(P2PHandlerError("x" * 2**22))) <= 200
    assert str(P2PHandlerError("it is banned")) == "it is banned"
