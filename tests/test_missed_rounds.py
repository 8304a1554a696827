"""Rounds that a peer has missed: it takes their averages from others, and their steps by itself."""

from __future__ import annotations

import asyncio
import os
import signal
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import torch
from hivemind.compression import CompressionInfo
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from tests.local_swarm import local_swarm
from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.agreement import SKETCH_SIZE, Told, read_told
from volunteer_kit.swarm.codec import CODECS, install_codecs
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.lost_answers import GivenAnswers
from volunteer_kit.swarm.missed_rounds import MAX_BYTES, MAX_ROUNDS, PATIENCE, UNDER_WAY, RoundsLogged
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.traffic import Traffic

MEMBERS = [PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(3)]
STRANGER = PeerID(b"\x12\x20" + bytes([9]) * 32)
SHAPES = [(3, 2), (5,)]


@pytest.fixture(autouse=True, scope="module")
def codecs():
    install_codecs()


def held(epoch: int, lineage: int = 1, order: int = 0, value: float = 1.0) -> list:
    return Told(epoch, np.full(SKETCH_SIZE, value), bytes([lineage]) * 8, order).words()


class Averager(RoundsLogged):
    """What a real one is beside: tensors, a line, a door."""

    prefix, peer_id = "gradients", MEMBERS[0]

    def __init__(self):
        self.traffic, self.doorkeeper, self._p2p = Traffic(), Admission(), None
        self.tensors = [torch.zeros(shape) for shape in SHAPES]
        self.total_size = sum(tensor.numel() for tensor in self.tensors)
        self.allreduce_kwargs, self.tensor_infos = {"compression": CODECS["none"], "part_size_bytes": 8}, None
        self._begin_to_keep()

    def get_tensors(self):
        class Locked:
            def __enter__(inner):
                return self.tensors

            def __exit__(inner, *_):
                pass

        return Locked()

    def log(self, before: list, values: torch.Tensor, splits=(4, 4, 3), name: bytes = b"round", lost: int = -1) -> None:
        answers = GivenAnswers(MEMBERS, own=0, sizes=splits, patience=0.1)
        for place, slice_ in enumerate(values.split(list(splits))):
            parts = slice_.split(max(2, len(slice_) // 2))
            for part in parts[:1] if place == lost else parts:
                answers.note(place, CODECS["none"].compress(part, None))
        self._log_round(b"x" + name, answers, before, name)

    async def ask(self, call: str, *wanted, asker: PeerID = STRANGER) -> averaging_pb2.DownloadData:
        request = averaging_pb2.DownloadData(metadata=msgpack.packb(wanted[0] if len(wanted) == 1 else wanted))
        return await getattr(self, call)(request, SimpleNamespace(remote_id=asker))


class Stub:
    def __init__(self, averager: Averager):
        self.averager = averager

    async def rpc_show_round(self, request):
        return await self.averager.rpc_show_round(request, SimpleNamespace(remote_id=STRANGER))

    async def rpc_show_answer(self, request):
        return await self.averager.rpc_show_answer(request, SimpleNamespace(remote_id=STRANGER))


def has_begun(ours: Averager, before: list, *theirs: Averager | None) -> bool:
    """:param theirs: None: one that does not answer"""
    peers = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(len(theirs)))
    return asyncio.run(ours._look_for_round(before, dict(zip(peers, map(Stub, theirs), strict=True))))


def fetch(ours: Averager, before: list, *theirs: Averager) -> bytes | None:
    return asyncio.run(ours._fetch_round(before, dict(zip(MEMBERS, map(Stub, theirs), strict=False))))


VALUES = torch.arange(11.0)


def test_the_average_of_the_round_that_began_with_what_we_hold():
    ours, theirs = Averager(), Averager()
    theirs.log(held(3), torch.ones(11), name=b"third")
    theirs.log(held(4), VALUES, name=b"fourth")
    theirs.log(held(5), -torch.ones(11), name=b"fifth")
    assert fetch(ours, held(4), theirs) == b"fourth"
    assert torch.equal(torch.cat([tensor.flatten() for tensor in ours.tensors]), VALUES)


@pytest.mark.parametrize("lost", [-1, 1])
def test_who_made_up_for_a_round_gives_it_on(lost):
    """Those who met may be gone by then: of eight, two that were parted from the rest, and killed."""
    first, second, third = Averager(), Averager(), Averager()
    first.log(held(4), VALUES, lost=lost)
    assert fetch(second, held(4), first) == fetch(third, held(4), second) == b"round"
    assert all(torch.equal(a, b) for a, b in zip(second.tensors, third.tensors, strict=True))
    assert any(bool(tensor.any()) for tensor in third.tensors)


@pytest.mark.parametrize(
    "under_way, lack, over, answer",
    [(1, 0, 0, UNDER_WAY), (2, 1, 0, UNDER_WAY), (1, 2, 0, None), (1, 0, 2, b"round"), (0, 2, 0, None)],
)
def test_a_round_that_is_under_way_is_told_from_one_that_nobody_knows(under_way, lack, over, answer):
    ours, theirs = Averager(), [Averager() for _ in range(under_way + lack + over)]
    for averager in theirs[:under_way]:
        averager._under_way = read_told(held(4))
    for averager in theirs[under_way + lack :]:
        averager.log(held(4), VALUES)
    assert has_begun(ours, held(4), *theirs, None, None) is (answer is not None), "two that are cut off say nothing"
    assert not has_begun(ours, held(5), *theirs) and not any(tensor.any() for tensor in ours.tensors), "only asked"
    assert fetch(ours, held(4), *theirs) == answer
    assert fetch(ours, held(5), *theirs) is None


@pytest.mark.parametrize("words", [b"", b"\xc1", b"lack", msgpack.packb([b"", b"", [1], [], b""]), msgpack.packb({})])
def test_what_a_stranger_says_that_is_no_answer_calls_nobody_away(words):
    """One waits for a group meanwhile, and would leave it."""
    theirs = [Averager() for _ in range(3)]
    for averager in theirs[1:]:
        averager.rpc_show_round = lambda request, context: asyncio.sleep(0, SimpleNamespace(metadata=words))
    assert not has_begun(Averager(), held(4), *theirs)


def test_peers_of_one_account_do_not_break_off_the_asking():
    """They answer first; two honest accounts come later."""
    ours, liar, honest = Averager(), Averager(), Averager()
    liar._under_way = read_told(held(4))
    honest.log(held(4), VALUES)

    class Slow(Stub):
        async def rpc_show_round(self, request):
            await asyncio.sleep(0.05)
            return await super().rpc_show_round(request)

    stubs = {PeerID(b"\x12\x20" + bytes([i]) * 32): Stub(liar) if i < 5 else Slow(honest) for i in range(2, 7)}
    accounts = {peer: b"liar" if type(stub) is Stub else peer.to_bytes() for peer, stub in stubs.items()}
    ours.doorkeeper = SimpleNamespace(is_open=False, account_of=accounts.get)
    assert asyncio.run(ours._fetch_round(held(4), stubs)) == b"round"


class Silent:
    async def rpc_show_round(self, request):
        await asyncio.Event().wait()


def test_the_dead_are_not_waited_for_when_most_say_the_same():
    ours, theirs = Averager(), Averager()
    theirs.log(held(4), VALUES)
    stubs = dict(zip(MEMBERS, [Silent(), Stub(theirs), Stub(theirs)], strict=True))
    assert asyncio.run(asyncio.wait_for(ours._fetch_round(held(4), stubs), PATIENCE / 2)) == b"round"


@pytest.mark.parametrize("lost", range(3))
def test_what_nobody_got_is_zero_for_who_makes_up_for_it_too(lost):
    ours, theirs = Averager(), Averager()
    theirs.log(held(4), VALUES, lost=lost)
    assert fetch(ours, held(4), theirs) == b"round"
    expected = VALUES.clone()
    expected[4 * lost + 2 : 4 * lost + 4] = 0.0
    assert torch.equal(torch.cat([tensor.flatten() for tensor in ours.tensors]), expected)


@pytest.mark.parametrize(
    "other", [held(6), held(4, lineage=2), held(4, order=1), held(4, value=2.0), [4], [], None, 7, [4, b"", b""]]
)
def test_of_another_state_nothing_is_given(other):
    ours, theirs = Averager(), Averager()
    theirs.log(held(4), VALUES)
    if other is None or not isinstance(other, list):
        assert asyncio.run(theirs.ask("rpc_show_round", other)).metadata == b"lacks"
    else:
        assert fetch(ours, other, theirs) is None
        assert not any(tensor.any() for tensor in ours.tensors)


def test_what_most_say_counts():
    ours, liar, *honest = Averager(), Averager(), Averager(), Averager()
    liar.log(held(4), torch.full((11,), 9.0), name=b"made up")
    for averager in honest:
        averager.log(held(4), VALUES)
    assert fetch(ours, held(4), liar, *honest) == b"round"
    assert torch.equal(torch.cat([tensor.flatten() for tensor in ours.tensors]), VALUES)


def test_in_a_run_that_knows_accounts_two_must_agree():
    ours, first, second = Averager(), Averager(), Averager()
    for averager in (first, second):
        averager.log(held(4), VALUES)
    accounts = {MEMBERS[0]: b"ann", MEMBERS[1]: b"ann"}
    ours.doorkeeper = SimpleNamespace(is_open=False, account_of=accounts.get)
    assert fetch(ours, held(4), first) is None
    assert fetch(ours, held(4), first, second) is None, "two peers of one account"
    assert not has_begun(ours, held(4), first, second), "nor does one account call us away from a group"
    accounts[MEMBERS[1]] = None
    assert fetch(ours, held(4), first, second) is None, "nobody knows whose it is"
    accounts[MEMBERS[1]] = b"bob"
    assert has_begun(ours, held(4), first, second)
    assert fetch(ours, held(4), first, second) == b"round"


def test_other_bytes_than_were_told_are_not_taken():
    ours, theirs = Averager(), Averager()
    theirs.log(held(4), VALUES)
    parts = theirs._kept_answers[b"xround"]._parts
    parts[1][0] = CODECS["none"].compress(torch.full((2,), 9.0), None)
    with pytest.raises(ValueError):
        fetch(ours, held(4), theirs)
    assert not any(tensor.any() for tensor in ours.tensors)


@pytest.mark.parametrize(
    "values", [torch.ones(12), torch.ones(10), torch.full((11,), float("nan")), torch.ones(11, dtype=torch.int64)]
)
def test_what_cannot_be_a_round_of_ours_is_not_taken(values):
    ours, theirs = Averager(), Averager()
    theirs.log(held(4), values, splits=(4, 4, len(values) - 8))
    with pytest.raises(ValueError):
        fetch(ours, held(4), theirs)
    assert not any(tensor.any() for tensor in ours.tensors)


def test_no_more_is_kept_than_there_is_room_for_and_nothing_across_an_order():
    theirs = Averager()
    for epoch in range(2 * MAX_ROUNDS):
        theirs.log(held(epoch), VALUES, name=b"%d" % epoch)
    assert len(theirs._log) == len(theirs._kept_answers) == MAX_ROUNDS
    theirs.log(held(500, order=3), VALUES, name=b"ordered")
    assert [logged.name for logged in theirs._log] == [b"ordered"]
    large = torch.zeros(MAX_BYTES // 8 + 1)  # half of it, twice
    for epoch in range(501, 504):
        theirs.log(held(epoch, order=3), large, splits=(len(large),), name=b"%d" % epoch)
        assert len(theirs._kept_answers) == len(theirs._log)
    assert [logged.name for logged in theirs._log] == [b"503"], "one, however large"
    asyncio.run(theirs._forget_rounds())
    assert not theirs._log and not theirs._kept_answers


@pytest.mark.parametrize("received, is_logged", [(1.0, True), (0.6, True), (0.5, False)])
def test_a_round_whose_step_nobody_can_have_taken_is_given_to_nobody(received, is_logged):
    logged = []
    ours = SimpleNamespace(verification=None, peer_id=MEMBERS[0], _log_round=lambda *about: logged.append(about))
    outcome = Round(group=tuple(MEMBERS), received=received, gathered={peer: held(4) for peer in MEMBERS})
    SwarmGradientAverager._note_answers(ours, b"x", None, outcome)
    assert bool(logged) is is_logged


def test_rounds_are_for_all_who_are_admitted_and_answers_of_others_for_members():
    theirs = Averager()
    theirs.log(held(4), VALUES)
    assert asyncio.run(theirs.ask("rpc_show_answer", b"xround", 0, 0)).tensor_part.buffer
    theirs._kept_answers[b"xround"].is_logged = False
    assert asyncio.run(theirs.ask("rpc_show_answer", b"xround", 0, 0)).metadata == b"lacks"


# --- in a swarm ---

STEADY = {"target_batch_size": 512, "grad_codec": "sparse"}


def met(peer, after: int = 0):
    return peer.wait_for(lambda e: e["event"] == "epoch" and e["epoch"] > after and e["group_size"] == 3)


def made_up(peer, after: int):
    return peer.wait_for(lambda e: e["event"] == "epoch" and e["epoch"] > after and e["made_up_for"] > 0)


@pytest.mark.slow
def test_a_peer_that_slept_makes_up_for_the_rounds_that_it_missed(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add(**STEADY) for _ in range(3)]
        last = max(met(peer)["epoch"] for peer in peers)
        last = max(met(peer, after=last)["epoch"] for peer in peers)
        sleeper, *others = reversed(peers)
        os.killpg(sleeper.process.pid, signal.SIGSTOP)
        for other in others:
            other.wait_epoch(last + 3, group_size=2)
        os.killpg(sleeper.process.pid, signal.SIGCONT)
        back = made_up(sleeper, after=last)
        assert back["made_up_for"] >= 2, sleeper.story()
        met(sleeper, after=back["epoch"])
        finished = swarm.finish(*peers)
        assert len({event["digest"] for event in finished}) == 1


def step_alone(peer, after: int) -> dict:
    """Again and again, until it waits for nobody any longer."""
    while True:
        seen = {id(e) for e in peer.said()}
        peer.order("alone")
        missed = peer.wait_for(
            lambda e, seen=seen: e["event"] in ("postponed", "epoch") and e["group_size"] == 1 and id(e) not in seen
        )
        if missed["event"] == "epoch" and missed["epoch"] > after:
            return missed


def miss_a_round(peer) -> tuple[dict, dict]:
    """:returns: the round that nobody came to, and the peer's next step"""
    before = {id(e) for e in peer.said()}
    peer.order("alone")
    missed = peer.wait_for(lambda e: e["event"] == "postponed" and id(e) not in before)
    return missed, peer.wait_for(lambda e: e["event"] == "epoch" and e["epoch"] >= missed["epoch"])


def test_a_round_that_nobody_came_to_is_tried_again_with_its_samples(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add(**STEADY) for _ in range(3)]
        last = max(met(peer)["epoch"] for peer in peers)
        early = peers[-1]
        met(early, after=last)
        for _ in range(4):  # on a busy machine the others may have gone on without it
            missed, after = miss_a_round(early)
            if after["epoch"] == missed["epoch"] and after["group_size"] == 3:
                break
        assert after["epoch"] == missed["epoch"] and after["group_size"] == 3, "it was in time for the others"
        assert after["samples"] > 100 and after["named"], "with all that it had computed for that epoch"
        finished = swarm.finish(*peers)
        assert len({event["digest"] for event in finished}) == 1
        since = [e for peer in peers for e in peer.said() if e["event"] == "epoch" and e["epoch"] > last]
        assert not any(e["apart"] for e in since)


@pytest.mark.slow
def test_a_step_that_was_taken_alone_is_taken_back(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add(**STEADY) for _ in range(3)]
        last = max(met(peer)["epoch"] for peer in peers)
        loner = peers[-1]
        last = met(loner, after=last)["epoch"]
        alone = step_alone(loner, after=last)
        seen = {id(e) for e in loner.events}
        back = loner.wait_for(
            lambda e: e["event"] == "epoch" and e["group_size"] == 3 and not e["failure"] and id(e) not in seen
        )
        # by the rounds that it missed; or it was back before theirs; a state has neither
        assert back["made_up_for"] > 0 or back["epoch"] <= alone["epoch"], loner.story()
        finished = swarm.finish(*peers)
        assert len({event["digest"] for event in finished}) == 1


class Endless(Averager):
    """Tells of as many parts as `counts`, and each of them is `part`."""

    def __init__(self, counts, part, sizes=(4, 4, 3)):
        super().__init__()
        self.told, self.part, self.shown = [b"xround", b"round", list(counts), list(sizes), b"digest"], part, 0

    async def rpc_show_round(self, request, context):
        return averaging_pb2.DownloadData(metadata=msgpack.packb(self.told))

    async def rpc_show_answer(self, request, context):
        self.shown += 1
        return averaging_pb2.DownloadData(tensor_part=self.part)


def sized(*size: int, buffer: bytes = b"x") -> runtime_pb2.Tensor:
    return runtime_pb2.Tensor(size=size, dtype="float32", buffer=buffer)


@pytest.mark.parametrize(
    "counts, part",
    [
        ((2**39, 1, 1), sized(0)),
        ((2, 2, 2), sized(0)),
        ((2, 2, 2), sized(100, buffer=bytes(400))),
        ((2, 2, 2), sized(*[1] * 200_000)),
        ((2, 2, 2), CODECS["uniform8"].compress(torch.ones(2), CompressionInfo.from_tensor(torch.ones(2)))),
        ((2, 2, 2), sized(2, buffer=bytes(2**20))),
    ],
    ids=["parts without end", "parts of nothing", "more values", "sizes", "another codec", "more bytes"],
)
def test_a_donor_whose_round_has_no_end_is_left_soon(counts, part):
    ours, donor = Averager(), Endless(counts, part)
    with pytest.raises(ValueError) as refused:
        fetch(ours, held(4), donor)
    assert donor.shown <= 16 and len(str(refused.value)) < 300
    assert not any(tensor.any() for tensor in ours.tensors)


@pytest.mark.parametrize("question", [b"", b"\xc1", b"\x91" * 900, bytes(2**20), msgpack.packb({}), msgpack.packb(7)])
def test_a_question_that_is_none_is_about_no_round(question):
    ours = Averager()
    ours.log(held(4), VALUES)
    request = averaging_pb2.DownloadData(metadata=question)
    assert asyncio.run(ours.rpc_show_round(request, SimpleNamespace(remote_id=STRANGER))).metadata == b"lacks"
