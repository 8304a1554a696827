"""One round of averaging in whole groups: what members get, and what a liar among them can do."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import pytest
import torch
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2

from tests.allreduce_group import assert_equal_bytes, average, flat, honest_mean, make_group, make_tensors, run
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.codec import CODECS, install_codecs, make_codec

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True, scope="module")
def codecs():
    install_codecs()


@pytest.mark.parametrize("codec", ["none", "float16", "uniform8", "blockwise8", "adaptive"])
@pytest.mark.parametrize("fractions", [None, [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], ids=["nodes", "client", "one reducer"])
def test_members_of_a_group_end_equal_to_the_last_bit(codec, fractions):
    """hivemind answers each sender with a difference of its own: 4.9 % apart after an 8-bit round (FACTS, trap 15)."""
    tensors = [make_tensors(seed) for seed in range(3)]
    chosen = make_codec("float16", "uniform8", 100) if codec == "adaptive" else CODECS[codec]
    runners, results = average(lambda: make_group(tensors, weights=[8.0, 4.0, 0.5], fractions=fractions, codec=chosen))
    assert_equal_bytes(results)
    expected = [
        sum(w * t for w, t in zip((8.0, 4.0, 0.5), group, strict=True)) / 12.5 for group in zip(*tensors, strict=True)
    ]
    worst = {"none": 1e-6, "float16": 2e-3, "uniform8": 0.03, "blockwise8": 0.02, "adaptive": 0.03}[codec]
    for tensor, mean in zip(results[0], expected, strict=True):
        assert tensor.shape == mean.shape and (tensor - mean).abs().mean() <= worst
    for runner in runners:
        assert runner.received == 1.0 and not runner.refused and not runner.failed_reducers
        assert runner.bytes_sent > 0 and runner.bytes_received > 0


@pytest.mark.parametrize(
    "value, weight, words",
    [
        (NAN, 1.0, "not finite"),
        (INF, 1.0, "not finite"),
        (100.0, 1e6, "weight 1e+06"),
        (100.0, -1.0, "weight -1"),
        (100.0, NAN, "weight nan"),
    ],
)
@pytest.mark.parametrize("liar", [0, 2])
def test_a_liar_loses_its_own_part_only(liar, value, weight, words):
    tensors = [make_tensors(seed) for seed in range(3)]
    tensors[liar] = [torch.full_like(tensor, value) for tensor in tensors[liar]]
    weights = [weight if i == liar else 1.0 for i in range(3)]
    honest = [i for i in range(3) if i != liar]
    runners, results = average(lambda: make_group(tensors, weights=weights))
    assert_equal_bytes([results[i] for i in honest])
    assert (flat(results[honest[0]]) - honest_mean(tensors, honest)).abs().max() < 1e-6
    for i in honest:
        assert words in runners[i].refused[runners[liar].peer_id]
        assert runners[i].received == 1.0, "even the slice that the liar reduces: it refuses itself"


def test_a_member_of_another_epoch_gets_the_average_and_adds_nothing():
    tensors = [make_tensors(seed) for seed in range(3)]
    stale = PeerID(b"\x12\x20" + bytes([1]) * 32)
    runners, results = average(lambda: make_group(tensors, out_of_step={stale: "at epoch 2, the others at 3"}))
    assert_equal_bytes(results)
    assert (flat(results[0]) - honest_mean(tensors, [0, 2])).abs().max() < 1e-6
    assert all(runner.refused == {stale: "at epoch 2, the others at 3"} for runner in runners)


class Liar(SwarmAllReduce):
    """Answers senders with what `self.lie` makes of the true answer."""

    lie: Callable
    shows_answers = False

    async def rpc_aggregate_part(self, stream, context):
        async for message in super().rpc_aggregate_part(stream, context):
            for lie in self.lie(message):
                yield lie


def with_tensor(message, tensor) -> averaging_pb2.AveragingData:
    part = NoCompression().compress(tensor, CompressionInfo.from_tensor(tensor))
    return averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=part)


def shape_of(message) -> tuple[int, ...]:
    return tuple(message.tensor_part.size)


LIES = {
    "NaN": lambda m: [with_tensor(m, torch.full(shape_of(m), NAN))],
    "another shape": lambda m: [with_tensor(m, torch.ones(3))],
    "nothing": lambda m: [],
    "an error": lambda m: [averaging_pb2.AveragingData(code=averaging_pb2.INTERNAL_ERROR)],
    "infinite in float32": lambda m: [with_tensor(m, torch.full(shape_of(m), 1e300, dtype=torch.float64))],
    "integers": lambda m: [with_tensor(m, torch.ones(shape_of(m), dtype=torch.int64))],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reducer_that_answers_nonsense_costs_its_slice_only(lie):
    tensors = [make_tensors(seed) for seed in range(3)]
    kind = type("ThisLiar", (Liar,), {"lie": staticmethod(LIES[lie])})
    runners, results = average(lambda: make_group(tensors, kinds={1: kind}))
    mean = honest_mean(tensors, [0, 1, 2])
    for i in (0, 2):
        own, result = flat(tensors[i]), flat(results[i])
        assert torch.isfinite(result.float()).all() and result.dtype == torch.float32
        right, kept = (result - mean).abs() < 1e-6, result == own
        assert (right | kept).all(), "what did not arrive keeps our own value"
        assert 0.1 < kept.float().mean() < 0.6
        assert runners[i].received == pytest.approx(1 - kept.float().mean().item(), abs=0.35)
        assert runners[i].received < 1.0, "a round with a missing slice is not a complete one"
        assert runners[i].failed_reducers == [runners[1].peer_id]


class Talkative(SwarmAllReduce):
    async def rpc_aggregate_part(self, stream, context):
        async for message in super().rpc_aggregate_part(stream, context):
            yield message
        yield message


def test_answers_that_nobody_asked_for_do_no_harm():
    tensors = [make_tensors(seed) for seed in range(3)]
    runners, results = average(lambda: make_group(tensors, kinds={1: Talkative}))
    assert_equal_bytes(results)
    assert (flat(results[0]) - honest_mean(tensors, [0, 1, 2])).abs().max() < 1e-6
    assert all(runner.received == 1.0 for runner in runners)


class Silent(SwarmAllReduce):
    """A member that was killed: it neither sends nor answers."""

    async def run(self):
        await asyncio.sleep(0)
        return
        yield

    async def rpc_aggregate_part(self, stream, context):
        await asyncio.sleep(60)
        yield


def test_a_member_that_vanishes_is_given_up_after_its_time():
    tensors = [make_tensors(seed) for seed in range(3)]
    runners, results = average(lambda: make_group(tensors, kinds={2: Silent}, timeout=0.3))
    mean = honest_mean(tensors, [0, 1])
    for i in (0, 1):
        own, result = flat(tensors[i]), flat(results[i])
        assert (((result - mean).abs() < 1e-6) | (result == own)).all()
        assert 0.4 < runners[i].received < 1.0
        assert runners[i].failed_reducers == [runners[2].peer_id]


class TakesNothingIn(SwarmAllReduce):
    """It sends its parts, and answers all that others send with an error: hivemind's tests call it FAIL_REDUCING."""

    async def rpc_aggregate_part(self, stream, context):
        yield averaging_pb2.AveragingData(code=averaging_pb2.INTERNAL_ERROR)


@pytest.mark.parametrize(
    ("fractions", "with_zeros"),
    [(None, True), ([0.25, 0, 0.25, 0.25, 0.25], False), ([0.5, 0.5], True), ([0.3, 0.3, 0.4], False)],
)
def test_a_reducer_that_takes_nothing_in_is_not_asked_for_its_own_values(fractions, with_zeros):
    """Two of them in a group, where it has room. Each would give its own values for the average of its slice, late and
    to all, and the round would count as complete."""
    count = len(fractions or range(5))
    broken = [0, 1] if count == 5 else [0]
    tensors = [make_tensors(seed) for seed in range(count)]
    kinds = dict.fromkeys(broken, TakesNothingIn)
    options = dict(kinds=kinds, fractions=fractions, lost_parts_are_zero=with_zeros, timeout=5.0)
    runners, results = average(lambda: make_group(tensors, **options))
    mean = honest_mean(tensors, range(count))
    for i, (runner, result) in enumerate(zip(runners, results, strict=True)):
        averaged = (flat(result) - mean).abs() < 1e-6
        kept = flat(result) == (torch.zeros(()) if with_zeros and (count > 2 or i > 0) else flat(tensors[i]))
        assert (averaged | kept).all() and 0.1 < kept.float().mean() < 0.7
        assert runner.lost or runner.missing, "it is told"
        if count > 2 or i > 0:
            assert runner.received < 1 and runners[0].peer_id in runner.missing
            assert set(runner.missing) == set(runners[-1].missing)
    if with_zeros and count > 2:
        assert_equal_bytes(results)


def test_with_zeros_for_what_is_lost_the_others_stay_equal():
    """With each member's own values there, a kill would set all survivors apart from each other."""
    tensors = [make_tensors(seed) for seed in range(3)]
    runners, results = average(lambda: make_group(tensors, kinds={2: Silent}, timeout=0.3, lost_parts_are_zero=True))
    assert_equal_bytes(results[:2])
    mean, result = honest_mean(tensors, [0, 1]), flat(results[0])
    lost = result == 0
    assert ((result - mean)[~lost].abs() < 1e-6).all() and 0.1 < lost.float().mean() < 0.6
    assert runners[0].received == runners[1].received < 1.0


class Stranger(SwarmAllReduce):
    """Sends tensors that its codec does not: of another type, or asking for gradients."""

    change: Callable

    async def _generate_input_for_peer(self, peer_index):
        async for message in super()._generate_input_for_peer(peer_index):
            type(self).change(message)
            yield message


def ask_for_gradients(message) -> None:
    message.tensor_part.requires_grad = True


def send_as(dtype: torch.dtype, value: float) -> Callable:
    def change(message) -> None:
        tensor = torch.full(shape_of(message), value, dtype=torch.float64).to(dtype)
        message.tensor_part.CopyFrom(NoCompression().compress(tensor, CompressionInfo.from_tensor(tensor)))

    return change


@pytest.mark.parametrize(
    "change",
    [send_as(torch.int64, 1), send_as(torch.bool, 1), send_as(torch.complex64, 1), send_as(torch.float64, 1e300)],
    ids=["int64", "bool", "complex64", "1e300"],
)
@pytest.mark.parametrize("codec", ["none", "uniform8"])
def test_a_sender_of_another_type_loses_itself_only(change, codec):
    tensors = [make_tensors(seed) for seed in range(3)]
    kind = type("ThisStranger", (Stranger,), {"change": staticmethod(change)})
    runners, results = average(lambda: make_group(tensors, kinds={1: kind}, codec=CODECS[codec]))
    for i in (0, 2):
        assert not isinstance(results[i], BaseException), results[i]
        assert torch.isfinite(flat(results[i])).all()
        assert runners[i].refused.keys() == {runners[1].peer_id}
        assert runners[i].received == 1.0


def test_a_sender_that_asks_for_gradients_does_not_get_a_graph_into_our_tensors():
    tensors = [make_tensors(seed) for seed in range(3)]
    kind = type("ThisStranger", (Stranger,), {"change": staticmethod(ask_for_gradients)})
    runners, results = average(lambda: make_group(tensors, kinds={1: kind}))
    assert_equal_bytes(results)
    assert not any(tensor.requires_grad for result in results for tensor in result)


def test_a_stranger_outside_the_group_cannot_send():
    async def story():
        tensors = [make_tensors(seed) for seed in range(2)]
        runners = make_group(tensors)
        [first, second] = runners.values()

        async def nothing():
            yield averaging_pb2.AveragingData(code=averaging_pb2.PART_FOR_AVERAGING, group_id=b"g" * 20)

        outsider = P2PContext("test", first.peer_id, PeerID(b"\x12\x20" + b"\x77" * 32))
        with pytest.raises(ValueError):
            async for _ in first.rpc_aggregate_part(nothing(), outsider):
                pass
        first.finalize(cancel=True), second.finalize(cancel=True)

    run(story)


def test_not_a_number_never_enters_an_average():
    """Whatever a stranger's part holds, the others' average is finite."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(5):
        tensors = [make_tensors(seed) for seed in range(3)]
        for tensor in tensors[0]:
            mask = torch.rand(tensor.shape, generator=generator) < 0.01
            tensor[mask] = [NAN, INF, -INF][trial % 3]
        _, results = average(lambda tensors=tensors: make_group(tensors, codec=CODECS["uniform8"]))
        assert all(math.isfinite(flat(results[i]).abs().max()) for i in (1, 2))


# --- who is slow ---

ROUND = 3.0  # s
PARTS = 6  # of each slice


class SlowSender(SwarmAllReduce):
    """Takes `pause` s for each of its parts."""

    pause: float

    async def _generate_input_for_peer(self, peer_index):
        async for message in super()._generate_input_for_peer(peer_index):
            await asyncio.sleep(self.pause)
            yield message


class SlowReducer(SwarmAllReduce):
    """Takes `pause` s for each of its answers."""

    pause: float

    async def rpc_aggregate_part(self, stream, context):
        async for message in super().rpc_aggregate_part(stream, context):
            await asyncio.sleep(self.pause)
            yield message


def slow_group(slow: type, share: float, members: int = 3) -> tuple[list, list, float, list]:
    """A round in which the last one takes that share of the round's time for each part, which is less than the timeout
    of one part. :returns: runners, results, s that the first took, tensors"""
    tensors = [[torch.randn(250 * PARTS * members)] for _ in range(members)]
    kind, took = type("Slow", (slow,), {"pause": share * ROUND}), []

    class Timed(SwarmAllReduce):
        async def run(self):
            began = time.monotonic()
            async for tensor in super().run():
                yield tensor
            took.append(time.monotonic() - began)

    runners, results = average(
        lambda: make_group(tensors, kinds={0: Timed, members - 1: kind}, timeout=ROUND / 3, round_timeout=ROUND)
    )
    assert all(parts == PARTS for parts in runners[0].tensor_part_container.num_parts_by_peer)
    return runners, results, took[0], tensors


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_sender_that_is_slow_with_each_part_costs_itself_only(members):
    """0.9 of a part's timeout before each of them would be 1.8 rounds."""
    runners, results, took, tensors = slow_group(SlowSender, 0.9 / 3, members)
    slow, honest = runners[-1], range(members - 1)
    assert took < ROUND
    for i in honest:
        assert not isinstance(results[i], BaseException), results[i]
        assert slow.peer_id in runners[i].refused and slow.peer_id not in runners[i].weights
        assert len(runners[i].weights) == members - 1 and len(runners[i].refused) == 1
        assert runners[i].received == 1.0
    without = (flat(results[0]) - honest_mean(tensors, honest)).view(-1, 250)  # (part, value)
    alone = without.abs().amax(dim=1) < 1e-6
    assert sum(alone) >= (members - 1) * PARTS // 2, "what came late is not in it"


def test_a_slow_line_has_nearly_the_whole_round():
    runners, results, took, tensors = slow_group(SlowSender, 0.1)
    assert 0.5 * ROUND < took < ROUND
    assert_equal_bytes(results)
    assert (flat(results[0]) - honest_mean(tensors, range(3))).abs().max() < 1e-6
    assert not any(runner.refused for runner in runners)


def test_a_reducer_that_is_slow_with_each_answer_costs_its_slice_only():
    runners, results, took, tensors = slow_group(SlowReducer, 0.9 * 2 / 3)
    assert took < ROUND
    mean = honest_mean(tensors, range(3))
    for i in (0, 1):
        right = ((flat(results[i]) - mean).abs() < 1e-6).float().mean()
        assert right >= 2 / 3 and 2 / 3 <= runners[i].received < 1.0
        assert runners[i].failed_reducers == [runners[2].peer_id] and not runners[i].refused


def test_a_round_whose_parts_are_all_refused_ends_and_tells_why():
    """It was awaited to its end, and taken for one in which nobody was met."""
    runners, _ = average(lambda: make_group([make_tensors(seed) for seed in range(2)], weights=[1e6, 1e6]))
    for runner in runners:
        assert runner.received == 0.0 and runner.refused.keys() == {one.peer_id for one in runners}
        assert all("weight 1e+06, more than" in why for why in runner.refused.values())
