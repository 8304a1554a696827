"""Who averages with whom, and who may call: the averager without a network around it."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PContext, P2PHandlerError, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer

from tests.allreduce_group import make_averager
from tests.trust import RunKeys
from volunteer_kit.robust.standing import Settings
from volunteer_kit.swarm.admission import Admission, NotAdmitted
from volunteer_kit.swarm.admitted_averager import AdmittedAverager
from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.shares import in_proportion
from volunteer_kit.swarm.told_group import MAX_GATHERED_BYTES

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))


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


GARBAGE = {
    "no msgpack": b"no msgpack \xc1",
    "words": MSGPackSerializer.dumps("words"),
    "mode 9": say(5, mode=9),
    "mode true": say(5, mode=True),
    "a list of modes": say(5, mode=[0]),
    "NaN": say(5, float("nan")),
    "infinite": say(5, float("inf")),
    "negative": say(5, -5),
    "too large to calculate with": say(5, 1e30),
    "too small": say(5, 1e-320),
    "a word": say(5, "abc"),
    "words that are none": MSGPackSerializer.dumps([1.0, 0, b"\xc1"]),
    "words that are no bytes": MSGPackSerializer.dumps([1.0, 0, 7]),
}


@pytest.mark.parametrize("is_open", [False, True], ids=["authority", "open"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_member_whose_words_nobody_can_use_is_not_let_in(averager, only_friends, monkeypatch, garbage, is_open):
    """Passed on, they would end the round for all."""
    if is_open:
        monkeypatch.setattr(AdmittedAverager, "doorkeeper", Admission())
    request = averaging_pb2.JoinRequest(gather=GARBAGE[garbage])
    answer = asyncio.run(first_message(averager.rpc_join_group(request, P2PContext("handle", A, B))))
    assert answer.code == averaging_pb2.PROTOCOL_VIOLATION


@pytest.mark.parametrize("token", [b"", b"x", None, 7])
def test_who_tells_its_leader_no_token_is_not_let_in(averager, only_friends, tmp_path, token):
    assert not averager._can_be_told_on(say(5, token=token), PeerID(b"\x12\x20" + b"s" * 32))
    assert averager._can_be_told_on(say(5, token=RunKeys(tmp_path).token(C, "cleo")), C)


@pytest.mark.parametrize("garbage", GARBAGE)
def test_a_member_whose_words_a_leader_passed_on_neither_sends_nor_reduces(averager, only_friends, peer, garbage):
    group = group_of({peer.peer_id: say(5, 10.0), B: GARBAGE[garbage], C: say(6, 20.0)})
    modes, bandwidths, gathered = averager._read_group(group)
    assert modes == (AveragingMode.NODE, AveragingMode.AUX, AveragingMode.NODE)
    assert bandwidths == [10.0, 0.0, 20.0] and gathered == {peer.peer_id: 5, B: None, C: 6}
    fractions = load_balance_peers(1000, in_proportion(bandwidths))
    assert fractions[1] == 0 and sum(fractions) == 1000


@pytest.mark.parametrize("members", [{}, {B: b"x" * (MAX_GATHERED_BYTES + 1)}], ids=["alone", "a novel"])
def test_garbage_from_a_leader_fails_the_round_and_nothing_else(averager, only_friends, peer, members):
    group = group_of({peer.peer_id: say(5), **members})
    with pytest.raises(MatchmakingException):
        asyncio.run(averager._aggregate_with_group(group, min_vector_size=0))


@pytest.mark.parametrize(
    "told, most, why",
    [
        ([10.0] * 6 + [1e12], 0.51, "one takes the whole vector"),
        ([10.0] * 2 + [1e12], 0.75, "likewise, of three"),
        ([10.0] * 8 + [1e12] * 7, 0.15, "seven of fifteen do, each by the others"),
        ([None] * 6 + [1e12], 0.2, "nobody else has said anything"),
        ([None] * 6 + [1e-3], 0.2, "likewise"),
        ([10.0] * 6 + [1e-3], 0.2, "who has next to nothing reduces nothing"),
        ([1e12] * 6 + [0.0], 0.2, "none, which is a client's"),
    ],
)
def test_nobody_reduces_nearly_everything_because_it_says_that_it_can(told, most, why):
    fractions = load_balance_peers(10_000, in_proportion(told))
    assert sum(fractions) == 10_000 and max(fractions) <= most * 10_000, why
    twice = [None if bandwidth is None else 2 * bandwidth for bandwidth in told]
    assert in_proportion(twice) == in_proportion(told), "whatever the unit"


@pytest.mark.parametrize("verification", [None, Settings()], ids=["plain", "verified"])
def test_the_exchange_is_told_how_long_a_round_may_take(peer, verification):
    """Or who is slow would cost everybody the round. A verified one lasts longer, by what is said before and after."""
    averager = make_averager(
        peer, [torch.nn.Parameter(torch.zeros(2))], allreduce_timeout=60.0, verification=verification
    )
    averager._p2p, averager._make_runner = None, Mock(side_effect=KeyError)
    with pytest.raises(KeyError):
        asyncio.run(SwarmAverager._run_allreduce_inplace_(averager, [], group_of({A: say(5)}), outcome=Round()))
    assert averager._make_runner.call_args.kwargs["round_timeout"] == 60.0


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
