"""A reducer's answers that came to some members only: the others get them from these, and all end equal."""

from __future__ import annotations

import asyncio

import msgpack
import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2

from tests.allreduce_group import assert_equal_bytes, average, flat, honest_mean, make_group, make_tensors
from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.codec import CODECS, install_codecs
from volunteer_kit.swarm.left_over import LeftOver
from volunteer_kit.swarm.lost_answers import AnswersKept, GivenAnswers
from volunteer_kit.swarm.traffic import Traffic

MEMBERS = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(4)]


@pytest.fixture(autouse=True, scope="module")
def codecs():
    install_codecs()


class BreaksOff(SwarmAllReduce):
    """Takes all parts in, answers each member so many, and hangs up on it."""

    answers_to: dict[PeerID, int]
    shows_answers = False  # it is dead

    async def rpc_aggregate_part(self, stream, context):
        left = self.answers_to.get(context.remote_id, 99)
        async for message in super().rpc_aggregate_part(stream, context):
            left -= 1
            if left >= 0:
                yield message
        if left < 0:
            raise ConnectionError("gone")


def breaking_off(answers_to: dict[int, int], **more) -> type:
    return type("Dying", (BreaksOff,), {"answers_to": {MEMBERS[i]: n for i, n in answers_to.items()}, **more})


def group_of_four(kind: type, **options):
    tensors = [make_tensors(seed) for seed in range(4)]
    return tensors, average(lambda: make_group(tensors, kinds={1: kind}, lost_parts_are_zero=True, **options))


@pytest.mark.parametrize("codec, got", [("none", 0), ("none", 1), ("blockwise8", 0)])
def test_what_one_member_has_all_get(codec, got):
    tensors, (runners, results) = group_of_four(breaking_off({0: got, 2: got}), codec=CODECS[codec])
    others = [0, 2, 3]
    assert_equal_bytes([results[i] for i in others])
    assert (flat(results[0]) - honest_mean(tensors, range(4))).abs().max() < (1e-6 if codec == "none" else 0.03)
    for i in others:
        assert runners[i].received == 1.0 and runners[i].missing == []
    assert [bool(runners[i].failed_reducers) for i in others] == [True, True, False], "it is told all the same"


def test_a_living_reducer_gives_what_its_stream_did_not():
    _, (runners, results) = group_of_four(breaking_off({0: 0, 2: 0, 3: 0}, shows_answers=True))
    assert_equal_bytes(results)
    assert all(runner.received == 1.0 for runner in runners)


def test_what_nobody_has_all_go_without():
    tensors, (runners, results) = group_of_four(breaking_off({0: 0, 2: 1, 3: 0}))
    others = [0, 2, 3]
    assert_equal_bytes([results[i] for i in others])
    lost = flat(results[0]) == 0
    assert 0 < lost.float().mean() < 0.25, "of a quarter the first part has come"
    assert ((flat(results[0]) - honest_mean(tensors, range(4)))[~lost].abs() < 1e-6).all()
    assert len({runners[i].received for i in others}) == 1 and runners[0].received < 1
    assert all(runners[i].missing == [MEMBERS[1]] for i in others), "so they name the round alike"


class Junk(SwarmAllReduce):
    """Says that it has all answers, and gives others."""

    class Answers(GivenAnswers):
        async def count(self, asker, reducer, patience):
            return 99, None

        def show(self, asker, reducer, part):
            return CODECS["none"].compress(torch.full((3,), 7.0), None)

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.answers = self.Answers(self.ordered_peer_ids, 0, (), 1.0)


def test_junk_is_not_taken():
    tensors = [make_tensors(seed) for seed in range(4)]
    kinds = {1: breaking_off({0: 0, 2: 0, 3: 0}), 0: Junk}
    runners, results = average(lambda: make_group(tensors, kinds=kinds, lost_parts_are_zero=True))
    assert_equal_bytes([results[2], results[3]])
    assert runners[2].received < 1 and not (flat(results[2]) == 7.0).any()


def test_what_was_dropped_is_not_lost_to_the_sender():
    """The reducer has given member 0 up before its parts entered: it gets the averages, and keeps what is not in."""
    tensors = [make_tensors(seed) for seed in range(4)]
    kept = LeftOver(sum(t.numel() for t in tensors[0]))

    class GivesUp(SwarmAllReduce):
        async def rpc_aggregate_part(self, stream, context):
            if context.remote_id == MEMBERS[0]:
                await self._ban_sender(MEMBERS[0])
                self.active_senders.add(MEMBERS[0])
                raise ConnectionError("too slow")
            async for message in super().rpc_aggregate_part(stream, context):
                yield message

    shares = []

    def make():
        share = kept.begin(tensors[0], weight=1.0)
        shares.append(share)
        given = [share.tensors, *tensors[1:]]
        group = make_group(given, kinds={1: GivesUp, 0: WithShare}, lost_parts_are_zero=True)
        return group

    class WithShare(SwarmAllReduce):
        def __init__(self, **kwargs):
            super().__init__(share=shares[-1], **kwargs)

    runners, results = average(make)
    assert_equal_bytes(results)
    assert runners[0].received == 1.0
    slice_of_1 = runners[0]._places[1]
    shares[0].settle(runners[0].lost_places, 4.0, True)
    own = flat(tensors[0])[slice_of_1[0] : slice_of_1[-1]]
    assert torch.equal(kept.unsent[slice_of_1[0] : slice_of_1[-1]], own)
    assert not kept.unsent[slice_of_1[-1] :].any() and not kept.unsent[: slice_of_1[0]].any()


# --- what a stranger may ask ---


def server() -> AnswersKept:
    server = AnswersKept()
    server.traffic, server.doorkeeper = Traffic(), Admission()
    server._begin_to_keep()
    return server


def ask(server: AnswersKept, *wanted, asker=MEMBERS[2], call="rpc_show_answer") -> averaging_pb2.DownloadData:
    class Context:
        remote_id = asker

    request = averaging_pb2.DownloadData(metadata=msgpack.packb(list(wanted)))
    return asyncio.run(getattr(server, call)(request, Context))


def test_who_may_ask_and_how_often():
    kept = server()
    part = CODECS["none"].compress(torch.ones(4), None)

    async def story():
        answers = GivenAnswers(MEMBERS[:3], own=0, sizes=(1, 1, 1), patience=0.01)
        for _ in range(3):
            answers.note(1, part)
        answers.entered = {MEMBERS[2]: 2}
        kept._keep_answers(b"round", answers, seconds=60)

    asyncio.run(story())
    assert ask(kept, b"round", 1, 2).tensor_part == part
    for wanted in ((b"other", 1, 0), (b"round", 1, 3), (b"round", 1, -1), (b"round", 3, 0), (b"round", -1, 0)):
        assert ask(kept, *wanted).metadata == b"lacks"
    assert ask(kept, b"round", 1, 0, asker=MEMBERS[3]).metadata == b"lacks", "it was not in the group"
    count = {"call": "rpc_count_answers"}
    assert msgpack.unpackb(ask(kept, b"round", 1, 60.0, **count).metadata) == [3, None], "it does not wait for ever"
    assert msgpack.unpackb(ask(kept, b"round", 0, 0.0, **count).metadata) == [0, 2], "of our own slice we know"
    for patience in (float("nan"), -1.0):
        assert ask(kept, b"round", 1, patience, **count).metadata == b"lacks"
    assert ask(kept, b"round", 1, 1.0, asker=MEMBERS[3], **count).metadata == b"lacks"
    shown = [bool(ask(kept, b"round", 1, 0).tensor_part.buffer) for _ in range(4)]
    assert shown == [True, True, False, False], "as many as there are, all told"


def test_they_are_kept_no_longer_than_somebody_may_ask():
    async def story():
        kept = server()
        kept._keep_answers(b"round", GivenAnswers(MEMBERS[:2], own=0, sizes=(1, 1), patience=0.01), seconds=0.01)
        assert b"round" in kept._kept_answers
        while kept._kept_answers:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(story(), 10))


@pytest.mark.parametrize("dropped", [False, True], ids=["kept twice", "dropped from the log meanwhile"])
def test_answers_that_are_kept_twice_stay_as_long_as_the_later_ones(dropped):
    """A round that is tried again has the same id: the first timer must not end the second one's answers."""
    first, second = (GivenAnswers(MEMBERS[:2], own=0, sizes=(1, 1), patience=0.01) for _ in range(2))

    async def story():
        broken = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, told: broken.append(told.get("exception")))
        kept = server()
        kept._keep_answers(b"round", first, seconds=0.01)
        if dropped:
            del kept._kept_answers[b"round"]
        else:
            kept._keep_answers(b"round", second, seconds=300.0)
        passed = loop.create_future()
        loop.call_later(0.05, passed.set_result, None)  # the loop runs its timers in order
        await passed
        assert not broken and list(kept._kept_answers.values()) == ([] if dropped else [second])
        kept._keep_answers(b"round", second, seconds=0.01)
        while kept._kept_answers:
            await asyncio.sleep(0.01)
        assert not broken

    asyncio.run(asyncio.wait_for(story(), 60))


QUESTIONS = [
    b"", b"\xc1", b"\x91" * 900, bytes(2**20), msgpack.packb(7), msgpack.packb({}), msgpack.packb([b"round", 1]),
    msgpack.packb([[b"round"], 1, 0]), msgpack.packb([b"round", "1", 0]), msgpack.packb([b"round", True, 0]),
    msgpack.packb([b"round", 1.5, 0]), msgpack.packb([b"round", 1, "0"]), msgpack.packb([b"round", 1, [0]]),
    msgpack.packb([b"round", 2**64 - 1, 0]), msgpack.packb([b"x" * 2000, 1, 0]),
]  # fmt: skip


@pytest.mark.parametrize("call", ["rpc_show_answer", "rpc_count_answers"])
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question[:12].hex())
def test_what_is_no_question_is_answered_as_one_of_a_round_that_is_not_here(call, question):
    class Context:
        remote_id = MEMBERS[2]

    answer = getattr(server(), call)(averaging_pb2.DownloadData(metadata=question), Context)
    assert asyncio.run(answer).metadata == b"lacks"
