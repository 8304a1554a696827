"""One round of averaging: what a reducer refuses, holds and answers; then whole groups in one process, liars too."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import CompressionInfo, NoCompression, deserialize_torch_tensor
from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import averaging_pb2, runtime_pb2

from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.codec import CODECS, install_codecs, make_codec
from volunteer_kit.swarm.held_parts import HeldPartReducer, reason_to_refuse

SHAPE = torch.Size([4])


@pytest.fixture(autouse=True, scope="module")
def codecs():
    install_codecs()


# --- what is refused ---

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    "part, weight, first_weight, words",
    [
        (torch.ones(4), 1.0, None, None),
        (torch.ones(4), 0.0, None, None),  # a peer that just joined has no samples and still gets the average
        (torch.ones(4), 64.0, 64.0, None),
        (torch.full((4,), 1e30), 64.0, None, None),
        (torch.zeros(4, dtype=torch.float16), 1.0, None, None),
        (torch.ones(5), 1.0, None, "shape"),
        (torch.ones(2, 2), 1.0, None, "shape"),
        (torch.empty(0), 1.0, None, "shape"),
        (torch.ones(4), 64.5, None, "more than the 64"),
        (torch.ones(4), 1e6, None, "more than the 64"),
        (torch.ones(4), -1.0, None, "weight -1"),
        (torch.ones(4), INF, None, "weight inf"),
        (torch.ones(4), -INF, None, "weight"),
        (torch.ones(4), NAN, None, "weight nan"),
        (torch.ones(4), 2.0, 1.0, "changes"),
        (torch.tensor([1.0, NAN, 1.0, 1.0]), 1.0, None, "not finite"),
        (torch.tensor([1.0, INF, 1.0, 1.0]), 1.0, None, "not finite"),
        (torch.full((4,), -INF), 1.0, None, "not finite"),
        # what the codec "none" may carry: not what float32 averages
        (torch.full((4,), 1e300, dtype=torch.float64), 1.0, None, "not finite"),
        (torch.ones(4, dtype=torch.int64), 1.0, None, "int64"),
        (torch.ones(4, dtype=torch.bool), 1.0, None, "bool"),
        (torch.ones(4, dtype=torch.complex64), 1.0, None, "complex64"),
    ],
    ids=lambda value: str(tuple(value.shape)) + str(value.dtype) if isinstance(value, torch.Tensor) else str(value),
)
def test_reason_to_refuse(part, weight, first_weight, words):
    reason = reason_to_refuse(part, SHAPE, weight, first_weight, max_weight=64.0)
    assert reason is None if words is None else words in reason


# --- the mean ---


def test_the_weighted_mean():
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
    assert weighted_mean(parts, [1.0, 1.0]).tolist() == [2.0, 4.0]
    assert weighted_mean(parts, [3.0, 1.0]).tolist() == [1.5, 3.0]
    assert weighted_mean(parts, [0.0, 0.0]).tolist() == [2.0, 4.0], "nobody has samples: the plain mean"
    assert weighted_mean(parts, [0.0, 5.0]).tolist() == [3.0, 6.0]
    assert weighted_mean([part.half() for part in parts], [1.0, 1.0]).dtype == torch.float32
    assert parts[0].tolist() == [1.0, 2.0], "the parts stay as they are"
    for parts, weights in [([], []), ([torch.ones(1)], []), ([torch.ones(1)], [1.0, 2.0])]:
        with pytest.raises(ValueError, match="weight"):
            weighted_mean(parts, weights)


# --- one reducer ---


def make_reducer(num_senders: int = 3, num_parts: int = 2, reduce=weighted_mean, codec=None) -> HeldPartReducer:
    infos = [CompressionInfo.from_tensor(torch.zeros(SHAPE)) for _ in range(num_parts)]
    return HeldPartReducer([SHAPE] * num_parts, infos, num_senders, reduce, codec or NoCompression())


def run(story: Callable):
    return asyncio.run(asyncio.wait_for(story(), 20))


def values(sender: int, part: int) -> torch.Tensor:
    return torch.full(SHAPE, 10.0 * sender + part)


async def settled(*tasks: asyncio.Task) -> None:
    """Let the tasks run until none of them can go on."""
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("codec", ["none", "float16", "uniform8", "blockwise8"])
def test_everybody_gets_the_same_bytes_and_the_reducer_what_they_decode_to(codec):
    async def story():
        reducer = make_reducer(codec=CODECS[codec])
        generator = torch.Generator().manual_seed(0)
        parts = [torch.randn(SHAPE, generator=generator) for _ in range(3)]

        async def send(sender):
            return [await reducer.accumulate_part(sender, part, parts[sender] * (1 + part), 1.0) for part in range(2)]

        answers = await asyncio.gather(*map(send, range(3)))
        assert reducer.finished.is_set()
        for part in range(2):
            messages = {answers[sender][part][1].SerializeToString() for sender in range(3)}
            assert len(messages) == 1
            decoded = deserialize_torch_tensor(runtime_pb2.Tensor.FromString(messages.pop()))
            mean = sum(parts) / 3 * (1 + part)
            assert (decoded - mean).abs().max() < 0.05
            for sender in range(3):
                assert torch.equal(answers[sender][part][0], decoded)

    run(story)


def test_parts_are_weighted_and_the_order_of_arrival_does_not_matter():
    async def story():
        reducer = make_reducer(num_parts=1)
        tasks = [
            reducer.accumulate_part(s, 0, torch.full(SHAPE, v), w) for s, v, w in [(0, 0.1, 8), (1, 0.7, 4), (2, 9, 0)]
        ]
        for average, _ in await asyncio.gather(*tasks):
            assert average.tolist() == pytest.approx([(0.1 * 8 + 0.7 * 4) / 12] * 4)

        results, parts = [], [torch.full(SHAPE, v) for v in (1e8, 1.0, -1e8)]  # whose sum depends on the order
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
            reducer = make_reducer(num_parts=1)
            tasks = [asyncio.create_task(reducer.accumulate_part(s, 0, parts[s], 1.0)) for s in order]
            results.append((await tasks[0])[1].SerializeToString())
        assert len(set(results)) == 1

    run(story)


def test_a_sender_that_fails_before_it_sent_is_not_waited_for():
    async def story():
        reducer = make_reducer()
        tasks = [asyncio.create_task(reducer.accumulate_part(s, 0, values(s, 0), 1.0)) for s in (0, 2)]
        await settled()
        assert not any(task.done() for task in tasks), "the third may still come"
        reducer.on_sender_failed(1)
        reducer.on_sender_failed(1)  # told twice, counted once
        for task in tasks:
            assert (await task)[0].tolist() == [10.0] * 4  # mean of 0 and 20
        with pytest.raises(BannedException):
            await reducer.accumulate_part(1, 0, values(1, 0), 1.0)
        averages = await asyncio.gather(*(reducer.accumulate_part(s, 1, values(s, 1), 1.0) for s in (0, 2)))
        assert averages[0][0].tolist() == [11.0] * 4 and reducer.finished.is_set()

    run(story)


def test_what_a_sender_sent_before_it_failed_still_counts():
    async def story():
        reducer = make_reducer()
        first = [asyncio.create_task(reducer.accumulate_part(s, 0, values(s, 0), 1.0)) for s in (0, 1)]
        await settled()
        reducer.on_sender_failed(1)
        first.append(asyncio.create_task(reducer.accumulate_part(2, 0, values(2, 0), 1.0)))
        for task in first:
            assert (await task)[0].tolist() == [10.0] * 4  # of 0, 10 and 20: all three
        second = await asyncio.gather(*(reducer.accumulate_part(s, 1, values(s, 1), 1.0) for s in (0, 2)))
        assert second[0][0].tolist() == [11.0] * 4  # of 1 and 21

    run(story)


def test_a_part_that_does_not_count_gets_the_average_of_the_others():
    async def story():
        reducer = make_reducer(num_parts=1)
        sent = [(0, values(0, 0)), (1, None), (2, values(2, 0))]
        answers = await asyncio.gather(*(reducer.accumulate_part(s, 0, part, 1.0) for s, part in sent))
        assert [answer.tolist() for answer, _ in answers] == [[10.0] * 4] * 3

    run(story)


@pytest.mark.parametrize("how", ["failed", "do not count"])
def test_when_nobody_is_left_everybody_is_told(how):
    async def story():
        reducer = make_reducer(num_senders=2, num_parts=1)
        if how == "failed":
            for sender in range(2):
                reducer.on_sender_failed(sender)
        else:
            tasks = [reducer.accumulate_part(sender, 0, None, 1.0) for sender in range(2)]
            for told in await asyncio.gather(*tasks, return_exceptions=True):
                assert isinstance(told, AllreduceException)
        assert reducer.finished.is_set()

    run(story)


def test_a_rule_or_codec_that_raises_tells_everybody_at_once():
    """Otherwise all wait for a part that never comes, and the member that completed it is blamed."""

    def broken(parts, weights):
        raise RuntimeError("a rule that does not bear this")

    async def story():
        reducer = make_reducer(num_senders=2, num_parts=1, reduce=broken)
        tasks = [reducer.accumulate_part(s, 0, values(s, 0), 1.0) for s in range(2)]
        told = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)
        assert all(isinstance(error, Exception) for error in told)
        assert all("does not bear" in str(error) for error in told)

    run(story)


def test_parts_come_in_turn_and_once():
    async def story():
        reducer = make_reducer(num_senders=2)
        task = asyncio.create_task(reducer.accumulate_part(0, 0, values(0, 0), 1.0))
        await settled()
        for part in (0, 2, -1):
            with pytest.raises(AllreduceException):
                await reducer.accumulate_part(0, part, values(0, 0), 1.0)
        with pytest.raises(AllreduceException):
            await reducer.accumulate_part(1, 1, values(1, 1), 1.0)
        answer, _ = await reducer.accumulate_part(1, 0, values(1, 0), 1.0)
        assert torch.equal((await task)[0], answer)

    run(story)


def test_finalize_wakes_whoever_waits():
    async def story():
        reducer = make_reducer()
        task = asyncio.create_task(reducer.accumulate_part(0, 0, values(0, 0), 1.0))
        await settled()
        reducer.finalize()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert reducer.finished.is_set()

    run(story)


# --- whole groups: real runners, joined by function calls instead of sockets ---

SIZES = [(3, 7), (50,), (1,), (40, 40)]


class Address:
    """What a runner knows of libp2p: its own id."""

    def __init__(self, peer_id: PeerID, runners: dict):
        self.peer_id, self.runners = peer_id, runners


class Wire(ServicerBase):
    """Calls the other runner in the same process; every message passes through its bytes."""

    @classmethod
    def get_stub(cls, p2p: Address, peer: PeerID, *, namespace=None):
        return Stub(p2p, p2p.runners[peer])


class Stub:
    def __init__(self, caller: Address, runner: SwarmAllReduce):
        self.caller, self.runner = caller, runner

    async def rpc_aggregate_part(self, requests):
        context = P2PContext("test", self.runner.peer_id, self.caller.peer_id)
        return pumped(self.runner.rpc_aggregate_part(pumped(requests), context))


def pumped(messages):
    """Sends on what comes, whether or not anybody reads yet, as a socket does."""
    pipe: asyncio.Queue = asyncio.Queue()

    async def pump():
        try:
            async for message in messages:
                pipe.put_nowait(averaging_pb2.AveragingData.FromString(message.SerializeToString()))
        except Exception as e:
            pipe.put_nowait(e)
        finally:
            pipe.put_nowait(None)

    task = asyncio.create_task(pump())

    async def read():
        try:
            while (message := await pipe.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            task.cancel()

    return read()


def make_tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def make_group(
    tensors: list[list[torch.Tensor]],
    *,
    weights=None,
    fractions=None,
    codec=None,
    kinds: dict[int, type] | None = None,
    timeout: float = 1.0,
    **options,
) -> dict[PeerID, SwarmAllReduce]:
    count = len(tensors)
    ids = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(count)]
    fractions = fractions or [1 / count] * count
    modes = [AveragingMode.CLIENT if fraction == 0 else AveragingMode.NODE for fraction in fractions]
    runners: dict[PeerID, SwarmAllReduce] = {}
    for i, own in enumerate(ids):
        runners[own] = (kinds or {}).get(i, SwarmAllReduce)(
            p2p=Address(own, runners),
            servicer_type=Wire,
            prefix="group",
            group_id=b"g" * 20,
            tensors=tensors[i],
            ordered_peer_ids=ids,
            peer_fractions=tuple(fractions),
            modes=modes,
            weight=(weights or [1.0] * count)[i],
            reduce=weighted_mean,
            max_weight=64.0,
            compression=codec or NoCompression(),
            part_size_bytes=1000,
            sender_timeout=timeout,
            reducer_timeout=2 * timeout,
            **options,
        )
    return runners


def average(make: Callable[[], dict]) -> tuple[list[SwarmAllReduce], list]:
    """Run a group. :returns: runners, and each one's averages or the exception that ended it."""

    async def collect(runner):
        return [tensor async for tensor in runner]

    async def story():
        runners = make()
        results = await asyncio.gather(*map(collect, runners.values()), return_exceptions=True)
        return list(runners.values()), results

    return run(story)


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def assert_equal_bytes(results) -> None:
    for result in results:
        for tensor, other in zip(result, results[0], strict=True):
            assert torch.equal(tensor, other)


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


def honest_mean(tensors, members) -> torch.Tensor:
    return sum(flat(tensors[i]) for i in members) / len(members)


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
