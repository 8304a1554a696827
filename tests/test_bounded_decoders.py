"""Messages that are heavy to read, as a stranger or a member would make them: each is refused in few words, and before
the work that it asks for. Time is the processor's, with room: the faults took from ten seconds to hours of it."""

from __future__ import annotations

import math
import struct
import time
import tracemalloc
from contextlib import contextmanager

import msgpack
import numpy as np
import pytest
import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.streaming import split_for_streaming

from tests.allreduce_group import SIZES, average, flat, honest_mean, make_group, make_tensors
from volunteer_kit.robust.messages import Commit
from volunteer_kit.swarm.agreement import Told, prevailing, rank_donors
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.bounded_names import bound_names
from volunteer_kit.swarm.checked_state import CheckedState
from volunteer_kit.swarm.codec import CODECS, decode, install_codecs, make_codec
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.sparse_codec import SPARSE, SparseCodec
from volunteer_kit.swarm.told_group import MAX_GATHERED_BYTES, check_group, read_entry
from volunteer_kit.swarm.transfer import IncomingState, StateRefused
from volunteer_kit.swarm.verified_allreduce import EncodedParts, VerifiedAllReduce

SIZE = 2**31 - 1
PEERS = [PeerID(b"\x12\x20" + i.to_bytes(4, "big") + bytes(28)) for i in range(1024)]


@pytest.fixture(autouse=True, scope="module")
def in_every_process():
    install_codecs()
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


def test_hivemind_itself_reads_by_our_bounds():
    """Whatever of it may still call its own deserializer."""
    from hivemind.compression import deserialize_torch_tensor

    for heavy in ("1 MB of sizes", "3 MB of a type", "fields of a type"):
        message = HEAVY[heavy]()
        message.compression = runtime_pb2.NONE
        with quick(), small(8), pytest.raises(ValueError):
            deserialize_torch_tensor(message)


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


# --- in a round ---


class Heavy(SwarmAllReduce):
    """A member whose messages to all others are what `change` makes of them."""

    change = staticmethod(lambda message: [message])

    async def _generate_input_for_peer(self, peer_index):
        async for message in super()._generate_input_for_peer(peer_index):
            for changed in self.change(message):
                yield changed


def heavy_part(make):
    def change(message):
        message.tensor_part.CopyFrom(make())
        return [message]

    return change


def around(message):
    message.ParseFromString(message.SerializeToString() + bytes([15 << 3 | 2, 128, 128, 64]) + bytes(2**20))
    return [message]


CHANGES = {
    "sizes": heavy_part(HEAVY["1 MB of sizes"]),
    "type": heavy_part(HEAVY["3 MB of a type"]),
    "codec": heavy_part(lambda: in_codec("float16", torch.ones(50))),
    "sparse": heavy_part(lambda: sparse_message(2**20, count=2**20, rice=2, unary_bits=2**20)),
    "around": around,
    "more parts": lambda message: [message] * 40,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_sender_of_heavy_parts_loses_itself_only(change):
    tensors = [make_tensors(seed) for seed in range(3)]
    kind = type("ThisHeavy", (Heavy,), {"change": staticmethod(CHANGES[change])})
    with quick(10.0):
        runners, results = average(lambda: make_group(tensors, kinds={1: kind}))
    for i in (0, 2):
        assert not isinstance(results[i], BaseException), results[i]
        assert torch.isfinite(flat(results[i])).all() and runners[i].received == 1.0
        assert all(len(why) < 300 for why in runners[i].refused.values())
        if change != "more parts":  # of these the first were fine
            assert runners[i].refused.keys() == {runners[1].peer_id}
            all_but_it, all_three = honest_mean(tensors, [0, 2]), honest_mean(tensors, range(3))  # in its own slice
            right = ((flat(results[i]) - mean).abs() < 1e-6 for mean in (all_but_it, all_three))
            assert torch.logical_or(*right).all()


@pytest.mark.parametrize("change", ["sizes", "type", "codec", "sparse", "around"])
def test_a_reducer_with_heavy_answers_costs_its_slice_only(change):
    class Answers(SwarmAllReduce):
        shows_answers = False

        async def rpc_aggregate_part(self, stream, context):
            async for message in super().rpc_aggregate_part(stream, context):
                for changed in CHANGES[change](message):
                    yield changed

    tensors = [make_tensors(seed) for seed in range(3)]
    with quick(10.0):
        runners, results = average(lambda: make_group(tensors, kinds={1: Answers}))
    for i in (0, 2):
        assert not isinstance(results[i], BaseException), results[i]
        assert runners[i].failed_reducers == [runners[1].peer_id] and 0.3 < runners[i].received < 1.0
        assert ((flat(results[i]) - honest_mean(tensors, range(3))).abs() < 1e-6).float().mean() > 0.3


def test_a_member_gives_no_more_than_it_promised():
    """Nor what it promised to the next reducer: the numbers of what came are those of our own slice."""
    commits = {}

    class Verified(VerifiedAllReduce):
        def __init__(self, **kwargs):
            options = {name: kwargs[name] for name in ("compression", "part_size_bytes")}
            encoded = EncodedParts(kwargs["tensors"], **options)
            commits[kwargs["p2p"].peer_id] = Commit(kwargs["weight"], b"", encoded.digests(), b"")
            super().__init__(encoded=encoded, commits=commits, **kwargs)

    class Generous(Verified):
        async def _generate_input_for_peer(self, peer_index):
            async for message in super()._generate_input_for_peer(peer_index):
                yield message
            end = self.first_part(peer_index) + self.tensor_part_container.num_parts_by_peer[peer_index]
            for part in self._encoded.messages[end:]:
                yield averaging_pb2.AveragingData(tensor_part=part, weight=self.weight)

    class ManySizes(Verified):
        async def _generate_input_for_peer(self, peer_index):
            async for message in super()._generate_input_for_peer(peer_index):
                yield CHANGES["sizes"](message)[0]

    tensors = [make_tensors(seed) for seed in range(4)]
    kinds = {0: Verified, 1: Verified, 2: Generous, 3: ManySizes}
    with quick(10.0):
        runners, results = average(lambda: make_group(tensors, kinds=kinds))
    for i in (0, 1):
        assert not isinstance(results[i], BaseException), results[i]
        parts = runners[i].tensor_part_container.num_parts_by_peer[i]
        assert len(runners[i].kept[runners[2].peer_id]) == parts
        assert len(runners[i].kept[runners[3].peer_id]) == 0 and runners[3].peer_id in runners[i].refused


# --- a group ---


def a_group(**changes) -> averaging_pb2.MessageFromLeader:
    peers = [peer.to_bytes() for peer in PEERS[:3]]
    fields = {"group_id": b"g" * 20, "ordered_peer_ids": peers, "gathered": [b"x"] * 3}
    return averaging_pb2.MessageFromLeader(code=averaging_pb2.BEGIN_ALLREDUCE, **{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"group_id": b""},
        {"group_id": bytes(1000)},
        {"ordered_peer_ids": [PEERS[0].to_bytes(), PEERS[1].to_bytes(), bytes(2**20)]},
        {"ordered_peer_ids": [PEERS[0].to_bytes(), b"", b"x"]},
        {"ordered_peer_ids": [PEERS[0].to_bytes()] * 60_000, "gathered": [b""] * 60_000},
        {"ordered_peer_ids": [PEERS[0].to_bytes()], "gathered": [b""]},
        {"gathered": [b""]},
        {"gathered": [b"", b"", bytes(MAX_GATHERED_BYTES + 1)]},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_a_leaders_list_that_cannot_be_a_group_is_not_read(changes):
    check_group(a_group())
    with quick(), pytest.raises(ValueError) as refused:
        check_group(a_group(**changes))
    assert len(str(refused.value)) < 200


def test_a_novel_of_a_member_is_not_read():
    assert read_entry(msgpack.packb(["x" * MAX_GATHERED_BYTES]), DecentralizedAverager.serializer) is None


def test_a_thousand_members_that_a_leader_invents_are_compared_quickly():
    told = {peer: Told(3, np.random.default_rng(i).normal(size=16), b"a" * 8) for i, peer in enumerate(PEERS)}
    told |= {peer: Told(3, np.ones(16), b"a" * 8) for peer in PEERS[5:8]}
    with quick():
        assert prevailing(told, 3, PEERS) == frozenset(PEERS[5:8])
    with quick():
        assert set(rank_donors({peer: one.words() for peer, one in told.items()}, PEERS)[:3]) == set(PEERS[5:8])


# --- a state ---

LIKE = [torch.randn(40, 40), torch.arange(10), torch.zeros((), dtype=torch.bfloat16), torch.zeros(0)]


def parts_of(tensors) -> list[averaging_pb2.DownloadData]:
    messages = (NoCompression().compress(tensor, CompressionInfo.from_tensor(tensor)) for tensor in tensors)
    parts = (part for message in messages for part in split_for_streaming(message, 2**11))
    return [averaging_pb2.DownloadData(tensor_part=part) for part in parts]


def read_state(messages) -> list[torch.Tensor]:
    state = IncomingState(LIKE, NoCompression())
    for message in messages:
        if state.add(message):
            state.read()
    return state.take()


def test_a_state_that_is_expected_is_read():
    for came, sent in zip(read_state(parts_of(LIKE)), LIKE, strict=True):
        assert torch.equal(came, sent) and came.dtype == sent.dtype


def test_a_large_tensor_is_no_fault_where_it_is_expected():
    """An embedding of a language model has 311 million values."""
    message = tensor_message(compression=runtime_pb2.NONE, size=[151_936, 2048], buffer=bytes(8))
    with pytest.raises(ValueError, match="8 bytes where 1244659712"):
        decode(message, (151_936, 2048), NoCompression())
    with pytest.raises(ValueError, match="out of bounds"):
        decode(message)


def first_with(**changes) -> list[averaging_pb2.DownloadData]:
    messages = parts_of(LIKE)
    messages[0].tensor_part.CopyFrom(tensor_message(**changes))
    return messages


STATES = {
    "sizes": lambda: first_with(size=[SIZE] * 200_000),
    "sizes in a later part": lambda: [
        *parts_of(LIKE)[:1],
        averaging_pb2.DownloadData(tensor_part=tensor_message(size=[1] * 200_000)),
    ],
    "another codec": lambda: [averaging_pb2.DownloadData(tensor_part=in_codec("uniform8", LIKE[0]))],
    "another shape": lambda: parts_of([torch.randn(1600)]),
    "another type": lambda: parts_of([torch.randn(40, 40).double()]),
    "a type of numpy's": lambda: first_with(size=[40, 40], compression=0, dtype="f4,f4", buffer=bytes(6400), chunks=1),
    "chunks without end": lambda: first_with(size=[40, 40], chunks=2**31 - 1, buffer=b"") * 50,
    "too many bytes": lambda: first_with(size=[40, 40], chunks=2, buffer=bytes(2**20)),
    "words in each part": lambda: [
        averaging_pb2.DownloadData(tensor_part=one.tensor_part, metadata=bytes(2**20)) for one in parts_of(LIKE)
    ],
}


@pytest.mark.parametrize("state", STATES)
def test_a_state_that_is_not_expected_is_refused_as_it_comes(state):
    messages = STATES[state]()
    with quick(), small(2), pytest.raises(StateRefused) as refused:
        read_state(messages)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", ["epoch", "lineage", "order"])
def test_deep_and_long_words_of_a_state_are_refused_in_few(name):
    deep = []
    for _ in range(900):
        deep = [deep]
    for value in (deep, "x" * 2**20, list(range(10_000)), 2**63):
        with pytest.raises(StateRefused) as refused:
            CheckedState().check_metadata({"epoch": 3, "numbers": [], name: value})
        assert len(str(refused.value)) < 300


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


def test_what_is_tested_here_is_what_a_round_sends():
    assert max(math.prod(size) for size in SIZES) > 50, "or the parts above would fit by chance"
