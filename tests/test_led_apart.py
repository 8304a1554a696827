"""Real averagers whose leader tells the members of its group different things: noticed soon, told in words, and nothing
applied; and honest ones, whom nobody takes for such a leader."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

import pytest
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PContext
from hivemind.proto import averaging_pb2
from hivemind.utils import MSGPackSerializer, get_dht_time

from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.failures import NO_GROUP, cause_without_round
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.told_group import LED_APART, MISQUOTED

WITHIN = 180.0  # s; some 5, but on a busy machine


class LyingLeader(SwarmAverager):
    """Tells the first of its followers what `lie` makes of the truth."""

    lies = True
    lie: Callable

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        async for message in super().rpc_join_group(request, context):
            if message.code == averaging_pb2.BEGIN_ALLREDUCE and self.lies:
                self.lies = False
                self.lie(message, {self.peer_id.to_bytes(), context.remote_id.to_bytes()})
            yield message


def place_of_another(message, known) -> int:
    """Who hears a lie of itself knows it by that alone."""
    return next(i for i, peer in enumerate(message.ordered_peer_ids) if peer not in known)


def tell_another_bandwidth(message, known) -> None:
    """The follower is to cut the tensors elsewhere."""
    third = place_of_another(message, known)
    bandwidth, *more = MSGPackSerializer.loads(message.gathered[third])
    message.gathered[third] = MSGPackSerializer.dumps([bandwidth * 7, *more])


def tell_another_order(message, known) -> None:
    for listed in (message.ordered_peer_ids, message.gathered):
        turned = list(reversed(listed))
        del listed[:]
        listed.extend(turned)


def leave_one_out(message, known) -> None:
    """The follower is to know nothing of the other one."""
    gone = place_of_another(message, known)
    del message.ordered_peer_ids[gone], message.gathered[gone]


class MisquotingLeader(SwarmAverager):
    """Tells everybody the same of one follower, and acts by it: nobody else can see that it is a lie."""

    lies = True

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        if self.lies:
            self.lies = False
            _, *more = MSGPackSerializer.loads(request.gather)
            request.gather = MSGPackSerializer.dumps([1.0, *more])
        async for message in super().rpc_join_group(request, context):
            yield message


class SlowToSend(SwarmAverager):
    """Its parts come when the others' round is over; `may_send` is awaited."""

    may_send: Any  # a multiprocessing.Event

    async def _aggregate_with_group(self, *args, **kwargs):
        await asyncio.to_thread(self.may_send.wait, WITHIN)
        return await super()._aggregate_with_group(*args, **kwargs)


class SlowToRead(SwarmAverager):
    """What the others send of its group is here before it has looked at what the group was told."""

    async def _aggregate_with_group(self, *args, **kwargs):
        await asyncio.sleep(1.0)
        return await super()._aggregate_with_group(*args, **kwargs)


@pytest.fixture(scope="module")
def peers(peer):
    others = []
    for _ in range(2):
        config = PeerConfig(
            initial_peers=peer.visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=120
        )
        others.append(start_peer(config))
    yield [peer, *others]
    for other in others:
        other.shutdown()


@contextlib.contextmanager
def averagers(
    peers,
    prefix: str,
    lie: Callable | None,
    last_is_client: bool = False,
    kind: type = LyingLeader,
    other: type = SwarmAverager,
    kinds: Sequence[type] = (),
    **patience: float,
) -> Iterator[list[SwarmAverager]]:
    """The first one leads, and lies."""
    liar = type("SwarmAverager", (kind,), {"lie": staticmethod(lie)}) if lie else SwarmAverager
    other = type("SwarmAverager", (other,), {})
    kinds = kinds or (liar, other, other)
    patience = {"sender_timeout": 240.0, "reducer_timeout": 280.0, **patience}  # whoever waits for these fails the test
    started: list[SwarmAverager] = []
    try:
        for i, peer in enumerate(peers):
            started.append(
                kinds[i](
                    [torch.full((4000,), float(i))],
                    dht=peer.dht,
                    prefix=prefix,
                    client_mode=last_is_client and i == len(peers) - 1,
                    target_group_size=3,
                    min_matchmaking_time=2.0,
                    bandwidth=100.0,
                    part_size_bytes=1000,  # each of them reduces something
                    **patience,
                    allreduce_timeout=290.0,
                    start=True,
                )
            )
        yield started
    finally:
        for averager in started:
            averager.shutdown()


def begin(averagers, **options) -> list:
    """A round in which the first one leads: hivemind lets the earlier expiration lead, so the others begin when the
    first one's is in the DHT."""
    first, *others = averagers
    before = expiration_of(first)
    controls = [first.step(gather=first.to_tell(0), wait=False, timeout=WITHIN, **options)]
    deadline = time.monotonic() + WITHIN
    while expiration_of(first) <= before:
        assert time.monotonic() < deadline and not controls[0].done(), controls
        time.sleep(0.01)
    for i, other in enumerate(others, 1):
        controls.append(other.step(gather=other.to_tell(i), wait=False, timeout=WITHIN, **options))
    return controls


def expiration_of(averager) -> float:
    """DHT time of the last group that this peer declared; 0.0: none yet."""
    found = averager.dht.get(f"{averager.matchmaking_kwargs['prefix']}.0b", latest=True)
    records = found.value if found is not None else {}
    own = averager.peer_id.to_bytes()
    return records[own].expiration_time if own in records else 0.0


def test_who_is_late_for_a_round_accuses_nobody(peers):
    """Its leader was in the next one by then, and to be told so was taken for another group under the same leader."""
    kinds = [type("SwarmAverager", (SlowToSend,), {"may_send": multiprocessing.Event()}) for _ in peers]
    kinds[0].may_send.set()
    patience = {"sender_timeout": 12.0, "reducer_timeout": 18.0}
    with averagers(peers, "late", None, kinds=kinds, **patience) as members:
        leader, late, third = members
        first = begin([leader, late], allow_retries=False)
        assert str(late.peer_id) in first[0].result(WITHIN).lost, "the leader went on without it"
        again = begin([leader, third], allow_retries=False)
        await_stage(again, AveragingStage.RUNNING_ALLREDUCE)
        kinds[1].may_send.set()
        assert len(first[1].result(WITHIN).group) == 2, "it has what is left of its round"
        kinds[2].may_send.set()
        assert all(control.result(WITHIN).received == 1 for control in again)
        assert [member.led_apart for member in members] == [0, 0, 0]
        [_, follower] = begin([leader, late], allow_retries=False)
        assert len(follower.result(WITHIN).group) == 2, "it follows the same leader"


def test_who_was_led_apart_by_all_that_lead_follows_them_again(peers):
    """A client that knew one leader, and had been told a lie of it, met nobody for five minutes."""
    with averagers(peers[:2], "avoided", lambda: None, True, MisquotingLeader, sender_timeout=3.0) as members:
        for failure, seconds in (MatchmakingException, WITHIN), (TimeoutError, 5):
            leader, client = begin(members, allow_retries=False)
            with pytest.raises(failure):
                client.result(seconds)
            client.cancel()
            leader.cancel()
        for control in begin(members, allow_retries=False):
            assert len(control.result(WITHIN).group) == 2


def await_stage(controls, stage: AveragingStage) -> None:
    deadline = time.monotonic() + WITHIN
    while any(control.stage != stage for control in controls):
        assert time.monotonic() < deadline and not any(control.done() for control in controls), controls
        time.sleep(0.01)


def values(averager) -> torch.Tensor:
    with averager.get_tensors() as [tensor]:
        return tensor.clone()


@pytest.mark.parametrize(
    "lie, last_is_client",
    [(tell_another_bandwidth, False), (tell_another_order, False), (tell_another_bandwidth, True)],
    ids=["bandwidth", "order", "bandwidth, one in client mode"],
)
def test_a_leader_that_tells_members_different_things(peers, lie, last_is_client):
    with averagers(peers, f"lie_{lie.__name__}_{last_is_client}", lie, last_is_client) as members:
        for control in begin(members, allow_retries=False):
            with pytest.raises(MatchmakingException, match=LED_APART):
                control.result(WITHIN)  # it is found out, and not waited for
        for i, member in enumerate(members):
            assert member.led_apart == 1
            assert torch.equal(values(member), torch.full((4000,), float(i))), "nothing of the round is applied"


def test_who_was_left_out_of_a_list_takes_nothing(peers):
    """The one from whom another was hidden cannot know: for it the group is smaller."""
    with averagers(peers, "left_out", leave_one_out) as members:
        controls = begin(members, allow_retries=False)
        failed = []
        for i, control in enumerate(controls):
            try:
                assert len(control.result(WITHIN).group) == 2
            except MatchmakingException as e:
                assert LED_APART in str(e)
                assert torch.equal(values(members[i]), torch.full((4000,), float(i)))
                failed.append(i)
        assert len(failed) >= 1


def test_the_next_attempt_has_another_leader_and_tells(peers):
    with averagers(peers, "again", tell_another_bandwidth) as members:
        controls = begin(members)
        liar = str(peers[0].peer_id)
        for control, member in list(zip(controls, members, strict=True))[1:]:
            outcome = control.result(WITHIN)
            assert outcome.remarks == {liar: LED_APART} and outcome.received == 1.0
            assert outcome.group and member.led_apart == 1
        controls[0].cancel()


@pytest.mark.parametrize("follower", [SwarmAverager, SlowToRead])
def test_who_is_misquoted_to_everybody_leaves_and_follows_another(peers, follower):
    prefix = f"misquoted {follower.__name__}"
    with averagers(peers[:2], prefix, lambda: None, kind=MisquotingLeader, other=follower) as members:
        controls = begin(members, allow_retries=False)
        for control, words in zip(controls, (LED_APART, MISQUOTED), strict=True):
            with pytest.raises(MatchmakingException, match=words):
                control.result(WITHIN)
        for i, member in enumerate(members):
            assert member.led_apart == 1
            assert torch.equal(values(member), torch.full((4000,), float(i))), "nothing of the round is applied"


@pytest.mark.parametrize("least, is_left", [((3, 3), True), ((3, 2), False), ((0, 1024), False)])
def test_a_group_of_fewer_than_half_of_it_ask_for_is_left_by_all(peers, least, is_left):
    """Three that are cut off from five would come to what is nobody else's. One stranger keeps nobody from a round."""
    with averagers(peers[:2], f"few {least}", None) as members:
        for member, number in zip(members, least, strict=True):
            member.least_group_size, member.expected_group_size = number, 2 if is_left else 3
        for i, (control, member) in enumerate(zip(begin(members, allow_retries=False), members, strict=True)):
            if is_left:
                with pytest.raises(MatchmakingException, match="a group of 2") as failed:
                    control.result(WITHIN)
                assert cause_without_round(control, failed.value) == NO_GROUP, "nobody has got anything of ours"
                assert torch.equal(values(member), torch.full((4000,), float(i)))
            else:
                assert len(control.result(WITHIN).group) == 2


def test_a_leader_of_too_few_waits_for_more(peers):
    """Eight that had come into groups of three and four left them all, looked again, and came into as small ones."""
    with averagers(peers, "more", None) as members:
        for member in members:
            member.least_group_size = member.expected_group_size = 3
        early = begin(members[:2], allow_retries=False)
        with pytest.raises(TimeoutError):
            early[0].result(4.5)  # longer than what a leader says it waits
        late = members[2].step(gather=members[2].to_tell(2), wait=False, timeout=WITHIN)
        assert [len(control.result(WITHIN).group) for control in (*early, late)] == [3, 3, 3]


def name_a_peer_of_300_kb(message, known) -> None:
    """hivemind would compute its base58 for minutes, and the follower's process do nothing else."""
    message.ordered_peer_ids[0] = bytes(300_000)


def name_50_000_peers(message, known) -> None:
    message.ordered_peer_ids.extend(message.ordered_peer_ids[:1] * 50_000)
    message.gathered.extend([b""] * 50_000)


@pytest.mark.parametrize("lie", [name_a_peer_of_300_kb, name_50_000_peers])
def test_a_leader_whose_list_cannot_be_a_group_is_not_followed(peers, lie):
    with averagers(peers[:2], lie.__name__, lie, sender_timeout=1.0, reducer_timeout=2.0) as members:
        leader, follower = begin(members, allow_retries=False)
        with contextlib.suppress(MatchmakingException):  # nobody came to the group that it told of
            leader.result(WITHIN)
        # the leader's expirations are a moment before the follower's now, which alone would never come to follow
        time.sleep(max(0.0, expiration_of(members[1]) - get_dht_time() - 0.02))
        again = members[0].step(gather=members[0].to_tell(0), wait=False, timeout=WITHIN)
        for control in (again, follower):
            assert len(control.result(WITHIN).group) == 2, "the follower is still there"


def test_junk_that_is_stored_where_leaders_are_looked_for_is_left_out(peers):
    """As a group's key is nobody's own, anybody may try to store there; hivemind makes a peer id of whatever it finds.
    Others do not keep it, but it stands in the node that it came from, which answers with it."""
    leader, other = peers[:2]
    for subkey in (bytes(10_000), b"", b"\x12\x20" + bytes(9)):
        assert not leader.dht.store("junk.0b", subkey=subkey, value=True, expiration_time=get_dht_time() + 120)
    began = time.process_time()
    with averagers([leader, other], "junk", None) as members:
        for control in begin(members):
            assert len(control.result(WITHIN).group) == 2
    assert time.process_time() - began < 30


def test_honest_leaders_are_not_accused(peers):
    with averagers(peers, "honest", None) as members:
        for outcome in [control.result(WITHIN) for control in begin(members)]:
            assert len(outcome.group) == 3 and outcome.received == 1.0 and not outcome.remarks
        for member in members:
            assert torch.equal(values(member), torch.ones(4000)) and member.led_apart == 0
