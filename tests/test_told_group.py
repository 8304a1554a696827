"""What a leader told the members of a group: an id of all of it, and what follows for who was told otherwise."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import as_aiter

from tests.allreduce_group import average, make_group, make_tensors
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.told_group import (
    OTHER_GROUP,
    LedApart,
    as_exchanged,
    exchange_id,
    is_split,
    leaders_id,
)

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))
GROUP = GroupInfo(b"g" * 20, (A, B, C), (b"a", b"b", b"c"))


@pytest.mark.parametrize(
    "other, why",
    [
        (GroupInfo(b"h" * 20, GROUP.peer_ids, GROUP.gathered), "another round"),
        (GroupInfo(GROUP.group_id, (A, B, D), GROUP.gathered), "another member"),
        (GroupInfo(GROUP.group_id, (B, A, C), GROUP.gathered), "another order, and so another share for each"),
        (GroupInfo(GROUP.group_id, GROUP.peer_ids[:2], GROUP.gathered[:2]), "a shorter list"),
        (GroupInfo(GROUP.group_id, GROUP.peer_ids, (b"a", b"b", b"x")), "another bandwidth"),
        (GroupInfo(GROUP.group_id, GROUP.peer_ids, (b"ab", b"", b"c")), "the same bytes, cut elsewhere"),
    ],
)
def test_an_id_is_of_all_that_was_told(other, why):
    assert exchange_id(other) != exchange_id(GROUP), why
    assert exchange_id(GROUP) == exchange_id(replace(GROUP))
    assert leaders_id(exchange_id(other)) == other.group_id
    assert as_exchanged(GROUP).peer_ids == GROUP.peer_ids


@pytest.mark.parametrize(
    "size, otherwise, split",
    [
        (2, 0, False),
        (2, 1, True),
        (3, 0, False),
        (3, 1, True),  # of the two who were told something, nobody knows who is right
        (4, 1, False),  # it costs its slice, and sees itself that two were told otherwise
        (4, 2, True),
        (16, 7, False),
        (16, 8, True),
        (16, 15, True),
    ],
)
def test_who_takes_nothing_of_a_round(size, otherwise, split):
    assert is_split(size, otherwise) is split


class Odd(SwarmAllReduce):
    """A member that runs another group."""

    async def rpc_aggregate_part(self, stream, context):
        yield averaging_pb2.AveragingData(code=OTHER_GROUP)

    async def run(self):
        return
        yield


def test_one_of_many_that_was_told_otherwise_costs_its_own_slice_and_samples():
    tensors = [make_tensors(seed) for seed in range(4)]
    # nobody waits for its parts: `average` gives up after 20 s
    runners, results = average(lambda: make_group(tensors, kinds={3: Odd}, timeout=30.0))
    for i in range(3):
        assert not isinstance(results[i], BaseException), results[i]
        assert runners[i].otherwise == {runners[3].peer_id} and not runners[i].is_split
        assert runners[i].failed_reducers == [runners[3].peer_id] and len(runners[i].weights) == 3


def test_who_has_left_a_split_round_tells_those_who_come_late():
    """Whichever of the lists they were told: who hears of no other group would wait for the parts of who has left."""

    async def answer(group_id: bytes, next_round_is_on: bool) -> int:
        member = object.__new__(SwarmAverager)
        member._parent_pid = None  # it has no process to end
        member._running_groups, member._pending_groups_registered = {}, asyncio.Event()
        member._awaited, member._split_groups = set(), deque()
        member._led_apart, member._remarks = SimpleNamespace(value=0), {}
        member._matchmaking = Mock(leader=A, groups=())
        if next_round_is_on:
            member._pending_groups_registered.set()
        member._read_group = Mock(side_effect=LedApart)
        with pytest.raises(LedApart):
            await member._aggregate_with_group(GROUP, 0)
        stream = member.rpc_aggregate_part(as_aiter(averaging_pb2.AveragingData(group_id=group_id)), Mock(remote_id=B))
        return (await asyncio.wait_for(anext(stream), timeout=20)).code

    told = as_exchanged(GROUP), as_exchanged(replace(GROUP, gathered=(b"a", b"b", b"x")))
    for group in told:
        for next_round_is_on in (False, True):  # who has to wait for it misses it
            assert asyncio.run(answer(group.group_id, next_round_is_on)) == OTHER_GROUP
    another = as_exchanged(replace(GROUP, group_id=b"h" * 20))
    assert asyncio.run(answer(another.group_id, True)) == averaging_pb2.BAD_GROUP_ID
