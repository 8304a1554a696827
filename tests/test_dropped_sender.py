"""A sender that is dropped in the middle of its parts: what it gave in full before stays, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from tests.allreduce_group import assert_equal_bytes, average, flat, make_group, make_tensors
from volunteer_kit.swarm.allreduce import SwarmAllReduce

WHOLE = 1  # parts that the dropped one gives of each slice
DROPPED = PeerID(b"\x12\x20" + bytes([2]) * 32)


class Breaking(SwarmAllReduce):
    """Sends WHOLE parts to each reducer; of the rest `instead` makes what it will."""

    instead: Callable

    async def _generate_input_for_peer(self, peer_index):
        sent = 0
        async for message in super()._generate_input_for_peer(peer_index):
            if sent == WHOLE:
                async for other in self.instead(message):
                    yield other
                return
            sent += 1
            yield message


async def hang_up(message):
    raise ConnectionError("its line is cut")
    yield


async def fall_silent(message):
    await asyncio.sleep(60)
    yield


async def end_early(message):
    return
    yield


async def send_half_a_part(message):
    values = torch.ones(max(1, message.tensor_part.size[0] // 2))
    message.tensor_part.CopyFrom(NoCompression().compress(values, CompressionInfo.from_tensor(values)))
    yield message


async def send_nan(message):
    values = torch.full(tuple(message.tensor_part.size), float("nan"))
    message.tensor_part.CopyFrom(NoCompression().compress(values, CompressionInfo.from_tensor(values)))
    yield message


async def change_its_weight(message):
    yield averaging_pb2.AveragingData(tensor_part=message.tensor_part, weight=2 * message.weight)


LOST = {hang_up: {DROPPED: "peer_lost"}, fall_silent: {DROPPED: "timeout"}, end_early: {DROPPED: "peer_lost"}}
HOW = [hang_up, fall_silent, end_early, send_half_a_part, send_nan, change_its_weight]


@pytest.mark.parametrize("how", HOW, ids=lambda how: how.__name__)
def test_a_sender_that_is_dropped_in_the_middle(how):
    tensors, weights = [make_tensors(seed) for seed in range(3)], [8.0, 4.0, 2.0]
    kind = type("ThisOne", (Breaking,), {"instead": staticmethod(how)})
    runners, results = average(lambda: make_group(tensors, weights=weights, kinds={2: kind}, timeout=0.5))
    for i in (0, 1):
        assert not isinstance(results[i], BaseException), results[i]
    parts = runners[0].tensor_part_container.num_parts_by_peer
    assert min(parts[:2]) > WHOLE, "the two others reduce parts that it never sent"
    with_it = sum(w * flat(t) for w, t in zip(weights, tensors, strict=True)) / sum(weights)
    without = sum(w * flat(t) for w, t in zip(weights[:2], tensors[:2], strict=True)) / sum(weights[:2])
    for i in (0, 1):
        result = flat(results[i])
        whole, rest = (result - with_it).abs() < 1e-5, (result - without).abs() < 1e-5
        own = result == flat(tensors[i])  # of a slice that the dropped one should have reduced
        assert (whole | rest | own).all(), "half a part, or a weight that was never given"
        assert whole.any() and rest.any()
        assert DROPPED not in runners[i].weights, "a giver is who gave all"
        assert runners[i].weights.keys() >= {runners[0].peer_id, runners[1].peer_id}
        assert runners[i].lost == LOST.get(how, {}), "whoever gave all, or was refused, is not lost"
    if how is send_nan:
        assert_equal_bytes(results[:2])

