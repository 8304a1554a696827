"""What one reducer refuses, holds and answers."""

from __future__ import annotations

import asyncio

import pytest
import torch
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import CompressionInfo, NoCompression, deserialize_torch_tensor
from hivemind.proto import runtime_pb2

from tests.allreduce_group import run
from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.swarm.codec import CODECS, install_codecs
from volunteer_kit.swarm.held_parts import HeldPartReducer, reason_to_refuse

SHAPE = torch.Size([4])
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True, scope="module")
def codecs():
    install_codecs()


# --- what is refused ---



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
