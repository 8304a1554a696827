"""Who averages with whom, what a microbatch counts, and who may call: the averager without a network around it."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
import pytest
import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PContext, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings

from tests.trust import RunKeys
from volunteer_kit.swarm.admission import NotAdmitted
from volunteer_kit.swarm.admitted_averager import MAX_GATHERED_BYTES, AdmittedAverager
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.round import Round

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))


# --- what a microbatch counts ---


def make_averager(peer, params, **options) -> SwarmGradientAverager:
    return SwarmGradientAverager(params, dht=peer.dht, prefix="gradients", start=False, client_mode=False, **options)


@pytest.fixture
def averager(peer):
    return make_averager(peer, [torch.nn.Parameter(torch.zeros(4, 3)), torch.nn.Parameter(torch.zeros(2))])


def put_mean_gradient(averager, samples: list[torch.Tensor], scale: float = 1.0) -> None:
    """What backward() of a mean loss over `samples` (each a flat gradient) leaves in .grad."""
    mean = sum(samples) / len(samples) * scale
    for parameter, values in zip(
        averager.parameters, mean.split([p.numel() for p in averager.parameters]), strict=True
    ):
        parameter.grad = values.reshape(parameter.shape).clone()


def averaged(averager) -> torch.Tensor:
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as tensors:
        return torch.cat([tensor.flatten() for tensor in tensors])


def draw_samples(count: int, seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randn(count, 14, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("sizes", [[8, 4], [4, 8, 8], [1], [8, 8, 8], [16, 1, 1], [1, 2, 3, 5, 8]], ids=str)
def test_microbatches_are_weighted_by_their_true_size(averager, sizes):
    """hivemind: 0.75 times the mean for 8 then 4, 1.67 times for 4, 8, 8 (FACTS, trap 16)."""
    samples = draw_samples(sum(sizes))
    first = 0
    for size in sizes:
        put_mean_gradient(averager, samples[first : first + size])
        assert averager.accumulate_grads_(size) is True
        first += size
    assert averager.local_samples_accumulated == sum(sizes) and averager.local_times_accumulated == len(sizes)
    assert torch.allclose(averaged(averager), sum(samples) / len(samples), rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 32), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_any_sizes_give_the_mean_over_samples(peer, sizes, seed):
    averager = make_averager(peer, [torch.nn.Parameter(torch.zeros(14))])
    samples = draw_samples(sum(sizes), seed)
    for i, size in enumerate(sizes):
        put_mean_gradient(averager, samples[sum(sizes[:i]) :][:size])
        averager.accumulate_grads_(size)
    assert torch.allclose(averaged(averager), sum(samples) / len(samples), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_microbatch_that_is_not_finite_loses_itself_only(averager, broken, when):
    samples = draw_samples(8)
    for i in range(3):
        if i == when:
            put_mean_gradient(averager, [torch.full((14,), 1.0)])
            averager.parameters[1].grad[1] = broken  # one value of one parameter
            assert averager.accumulate_grads_(4) is False
        put_mean_gradient(averager, samples[4 * (i % 2) : 4 * (i % 2) + 4])
        if i < 2:
            assert averager.accumulate_grads_(4) is True
    assert averager.microbatches_lost == 1
    assert averager.local_samples_accumulated == 8 and averager.local_times_accumulated == 2
    assert torch.allclose(averaged(averager), sum(samples) / 8, rtol=1e-5, atol=1e-6)


def test_the_loss_scale_of_each_microbatch_is_undone(averager):
    samples = draw_samples(12)
    for first, size, scale in [(0, 4, 1024.0), (4, 8, 512.0)]:  # it was halved in between
        put_mean_gradient(averager, samples[first : first + size], scale)
        averager.accumulate_grads_(size, grad_scale=scale)
    assert torch.allclose(averaged(averager), sum(samples) / 12, rtol=1e-5, atol=1e-6)


def test_a_mean_over_other_things_than_samples_weighs_by_these(averager):
    """Words that a loss counts, for instance: two samples may have three of them, or three hundred."""
    words = draw_samples(30)
    for first, count in [(0, 3), (3, 26), (29, 1)]:
        put_mean_gradient(averager, words[first : first + count])
        assert averager.accumulate_grads_(2, weight=count) is True
    assert averager.local_samples_accumulated == 6 and averager.local_weight_accumulated == 30
    assert torch.allclose(averaged(averager), sum(words) / 30, rtol=1e-5, atol=1e-6)
    assert averager.accumulate_grads_(2, weight=0.0) is False, "a mean over nothing"
    averager.reset_accumulated_grads_()
    assert averager.local_weight_accumulated == 0


def test_one_microbatch_alone_is_its_own_gradient_to_the_last_bit(averager):
    [sample] = draw_samples(1)
    put_mean_gradient(averager, [sample])
    averager.accumulate_grads_(3, weight=7.0)
    assert torch.equal(averaged(averager), sample)


def test_16_bit_gradients_are_summed_in_32_bits(peer):
    """In 16 bits the later ones of a long row would change nothing: 256 + 1 is 256."""
    averager = make_averager(peer, [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))])
    for number in range(600):
        averager.parameters[0].grad = torch.tensor([1.0, float(number % 2)], dtype=torch.bfloat16)
        averager.accumulate_grads_(1)
    assert averaged(averager).dtype == torch.float32
    assert torch.allclose(averaged(averager), torch.tensor([1.0, 0.5]), rtol=1e-5)


def test_nothing_accumulated_is_nothing_averaged(averager):
    assert averaged(averager).abs().max() == 0.0
    put_mean_gradient(averager, draw_samples(4))
    averager.accumulate_grads_(4)
    averager.reset_accumulated_grads_()
    assert averager.local_samples_accumulated == 0 and averaged(averager).abs().max() == 0.0


def test_a_parameter_without_a_gradient_counts_as_zero(averager):
    samples = draw_samples(4)
    put_mean_gradient(averager, samples)
    averager.parameters[1].grad = None
    assert averager.accumulate_grads_(4) is True
    mean = averaged(averager)
    assert torch.allclose(mean[:12], (sum(samples) / 4)[:12], atol=1e-6) and mean[12:].abs().max() == 0.0


def test_the_averager_waits_for_a_leader_less_than_for_the_group(peer):
    """hivemind's request timeout of 3 s deadlocks a swarm whose matchmaking takes less."""
    quick = make_averager(peer, [torch.nn.Parameter(torch.zeros(2))], min_matchmaking_time=1.5)
    assert quick.matchmaking_kwargs["request_timeout"] < 1.5
    slow = make_averager(peer, [torch.nn.Parameter(torch.zeros(2))], min_matchmaking_time=30.0)
    assert slow.matchmaking_kwargs["request_timeout"] == 3.0


def test_gradients_are_nobodys_state(averager):
    assert averager.load_state_from_peers(timeout=1.0) is None


# --- admission ---


@pytest.fixture
def only_friends(monkeypatch, tmp_path):
    """A, B and C may take part, D is banned."""
    run = RunKeys(tmp_path)
    admission = run.admission(own=A, username="ada", bob=B, cleo=C, dan=D)
    admission.ban(run.ban("dan")[0])
    monkeypatch.setattr(AdmittedAverager, "doorkeeper", admission)
    return admission


async def first_message(stream):
    async for message in stream:
        return message


@pytest.mark.parametrize("call", ["join_group", "aggregate_part"])
def test_who_is_not_admitted_is_not_answered(averager, only_friends, call):
    async def nothing():
        return
        yield

    context = P2PContext("handle", A, D)
    request = averaging_pb2.JoinRequest() if call == "join_group" else nothing()
    with pytest.raises(NotAdmitted, match=call):
        asyncio.run(first_message(getattr(averager, f"rpc_{call}")(request, context)))
    assert only_friends.refused == {(call, "banned"): 1}


def test_who_is_not_admitted_is_not_called(only_friends):
    class Address:
        peer_id = A

    with pytest.raises(P2PHandlerError):  # hivemind takes it as that peer's failure and goes on with the others
        SwarmGradientAverager.get_stub(Address(), D, namespace="x")
    assert SwarmGradientAverager.get_stub(Address(), B, namespace="x") is not None
    assert only_friends.refused == {("outgoing", "banned"): 1}


def test_a_member_that_tells_its_leader_a_novel_is_refused(averager, only_friends):
    request = averaging_pb2.JoinRequest(gather=b"x" * (MAX_GATHERED_BYTES + 1))
    answer = asyncio.run(first_message(averager.rpc_join_group(request, P2PContext("handle", A, B))))
    assert answer.code == averaging_pb2.PROTOCOL_VIOLATION


# --- what a leader says of its group ---


def say(told, bandwidth=None, mode=0, token=b"") -> bytes:
    return MSGPackSerializer.dumps([bandwidth, mode, MSGPackSerializer.dumps([told, token])])


def group_of(members: dict[PeerID, bytes]) -> GroupInfo:
    return GroupInfo(b"g" * 20, tuple(members), tuple(members.values()))


def test_what_the_members_told_each_other(averager, only_friends, peer):
    group = group_of({peer.peer_id: say(5, 10.0), B: say([5, "digest"], 20.0), C: say(None, 30.0, mode=1)})
    modes, bandwidths, gathered = averager._read_group(group)
    assert gathered == {peer.peer_id: 5, B: [5, "digest"], C: None}
    assert bandwidths == [10.0, 20.0, 0.0], "a client reduces for nobody"
    assert [mode.value for mode in modes] == [0, 0, 1]


def test_a_round_has_one_name_for_those_who_got_the_same_of_it():
    whole = Round(group=(A, B), round_id=b"r")
    part = {"received": 0.5, "failed_reducers": ("B", "C")}
    assert Round(group=(A, B), round_id=b"r", seconds=2.0).name == whole.name != Round(group=(A, B), round_id=b"s").name
    assert Round(group=(A, B), round_id=b"r", **part).name != whole.name
    turned = {**part, "failed_reducers": ("C", "B")}
    assert Round(group=(A, B), round_id=b"r", **part).name == Round(group=(A, B), round_id=b"r", **turned).name
    assert Round(group=(A, B), round_id=b"r", failed_reducers=("B",)).name == whole.name, "after its last answer"
    assert Round().name is None, "a step that was taken alone"


def test_a_group_that_cannot_be_is_refused(averager, only_friends, peer):
    me = peer.peer_id
    with pytest.raises(AllreduceException, match="group"):
        averager._read_group(group_of({me: say(5)}))
    with pytest.raises(AllreduceException, match="twice"):
        averager._read_group(GroupInfo(b"g", (me, B, B), (say(5),) * 3))
    with pytest.raises(AllreduceException, match="bytes"):
        averager._read_group(group_of({me: say(5), B: b"x" * (MAX_GATHERED_BYTES + 1)}))
    with pytest.raises(NotAdmitted):
        averager._read_group(group_of({me: say(5), D: say(5)}))


@pytest.mark.parametrize(
    "members",
    [{B: b"no msgpack \xc1"}, {B: MSGPackSerializer.dumps("words")}, {B: say(5, mode=77)}, {}],
    ids=["garbage", "words", "mode", "alone"],
)
def test_garbage_from_a_leader_fails_the_round_and_nothing_else(averager, only_friends, peer, members):
    group = group_of({peer.peer_id: say(5), **members})
    with pytest.raises(MatchmakingException):
        asyncio.run(averager._aggregate_with_group(group, min_vector_size=0))


def test_a_member_that_hangs_up_while_the_round_is_prepared_does_not_end_it(averager, monkeypatch):
    """hivemind awaits the group's future bare: the member's going would cancel it for all."""

    async def story() -> bool:
        group = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(averager, "_running_groups", {b"group": group})

        async def one_part():
            yield averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"group")

        answers = averager.rpc_aggregate_part(one_part(), P2PContext("handle", A, B))
        member = asyncio.create_task(first_message(answers))
        await asyncio.sleep(0.05)  # it waits for the round
        member.cancel()
        await asyncio.wait({member})
        return group.cancelled()

    assert asyncio.run(story()) is False
