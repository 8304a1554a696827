"""A node admits a peer by an access token of the peer's own, while it holds, under the account that it proves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.p2p import PeerID

from tests.monitored import monitored
from tests.test_node_signatures import name as name_of
from tests.test_node_signatures import new_book
from tests.test_node_transport import HOLDS, Node, Nodes, all_of, echo, ends, insist, run, say, until
from tests.trust import RunKeys, make_identity
from volunteer_kit.runs import build_model, build_param_groups, load_run
from volunteer_kit.session.trust import judge_of_states
from volunteer_kit.swarm.node.access import Access
from volunteer_kit.swarm.node.discovery import NodeRecord, seen_of
from volunteer_kit.swarm.node.links import Hello
from volunteer_kit.swarm.node.talk import Admit
from volunteer_kit.swarm.node.transport import Closed
from volunteer_kit.swarm.records.device_speeds import Limits
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.entries import Entry, Member, Opening
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import AskOpening, Begin, Lead, Message, Propose, Report, Round

HASH = bytes(32)
SKEW = 6.0  # s; more than an expired token is believed for


@dataclass
class Clock:
    """A node's own, s since 1970."""

    ahead: float = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@dataclass
class Guarded:
    """Nodes of a run with an authority."""

    nodes: Nodes
    keys: RunKeys
    clocks: dict[str, Clock] = field(default_factory=dict)
    accesses: dict[str, Access] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)

    async def node(self, username: str, *, token: bytes | None = None, client: bool = False) -> Node:
        """:param token: in place of its own good one; empty: none"""
        clock = Clock()
        access = Access(self.keys.trust, clock)
        made = await self.any_node(client, access=access)
        self.clocks[made.id], self.accesses[made.id] = clock, access
        made.transport.answer("echo", echo)
        self.admit(made, self.token(made, username) if token is None else token)
        return made

    async def any_node(self, client: bool = False, **options: Any) -> Node:
        """With a key as peers have them."""
        path = self.keys.folder / f"{len(self.paths)}.key"
        self.paths.append(path)
        make_identity(path)
        unseen: dict[str, Any] = {"host_maddrs": None, "no_listen": True, "dht_mode": "client"}
        p2p = await self.nodes.daemon(
            identity_path=str(path), check_if_identity_free=False, **(unseen if client else {})
        )
        return await self.nodes.attach(p2p, **options)

    def token(self, node: Node, username: str, seconds: float = 600.0) -> bytes:
        return self.keys.token(PeerID.from_base58(node.id), username, seconds)

    def admit(self, node: Node, token: bytes = b"") -> None:
        """As the node's process does when its training process has news."""
        self.accesses[node.id].take(Admit(token, self.keys.bans))
        node.transport.check_again()


@pytest.fixture
def keys(tmp_path) -> RunKeys:
    return RunKeys(tmp_path)


def tell(keys: RunKeys, story: Any) -> None:
    run(lambda nodes: story(Guarded(nodes, keys)))


async def echoes(a: Node, b: Node) -> bool:
    """Whether a request of `a` is answered by `b`."""
    try:
        channel = await a.transport.ask(b.id, "echo", b"head", HOLDS)
    except Closed:
        return False
    await channel.end()
    assert await all_of(channel) == [b"head"]
    return True


async def is_shut_out(stranger: Node, a: Node) -> None:
    """Nothing passes between the two."""
    heard, told = len(a.told), len(stranger.told)
    for one, other in ((stranger, a), (a, stranger)):
        one.transport.send(other.id, b"?")
        assert not await echoes(one, other)
    assert len(a.told) == heard and len(stranger.told) == told
    await until(lambda: stranger.id not in a.transport.connected)


# --- streams ---


def test_two_that_show_their_tokens_speak_with_each_other(keys):
    async def story(run: Guarded):
        a, b, behind_nat = await run.node("ada"), await run.node("bob"), await run.node("eve", client=True)
        for one, other in ((a, b), (b, a), (behind_nat, a)):
            await insist(one, other.id, lambda other=other, one=one: other.words(one))
            assert await echoes(one, other)
        assert await echoes(a, behind_nat), "over the connection that the other side has opened"
        assert run.accesses[a.id].account_of(behind_nat.id) == "eve"

    tell(keys, story)


@pytest.mark.parametrize("shows", ["nothing", "another run's token", "an old token", "another peer's token", "junk"])
def test_who_shows_no_token_that_holds_is_not_heard(keys, tmp_path, shows):
    async def story(run: Guarded):
        a, b = await run.node("ada"), await run.node("bob")
        stranger = await run.any_node()  # whose own door is open
        stranger.transport.answer("echo", echo)
        shown = {
            "nothing": b"",
            "another run's token": RunKeys(tmp_path, "other").token(PeerID.from_base58(stranger.id)),
            "an old token": run.token(stranger, "eve", -60.0),
            "another peer's token": run.token(b, "bob"),
            "junk": b"\x93junk",
        }[shows]
        for kind, first in (
            ("control", Hello(b"stranger", 1, token=shown).encode()),
            ("bulk", len(shown).to_bytes(2, "big") + shown + b"\0\0\0\x05\x04echo"),
        ):
            framed = len(first).to_bytes(4, "big") + b"\0" + first if kind == "control" else first
            daemon = stranger.transport._daemon
            reader, _ = await say(daemon, a, kind, framed)
            assert await asyncio.wait_for(reader.read(), HOLDS) == b"", "it is not even answered"
        await is_shut_out(stranger, a)
        assert await echoes(b, a), "whose token somebody else has shown"

    tell(keys, story)


def test_a_token_has_so_many_bytes_and_no_more(keys):
    async def story(run: Guarded):
        a, stranger = await run.node("ada"), await run.nodes.stranger()
        hello = Hello(b"stranger", 1, token=bytes(1025)).encode()
        for kind, data in (("control", len(hello).to_bytes(4, "big") + b"\0"), ("bulk", b"\x04\x01")):
            reader, _ = await say(stranger, a, kind, data)
            assert await ends(reader), "without waiting for it"

    tell(keys, story)


def test_who_has_no_token_yet_is_let_in_with_its_first_one(keys):
    async def story(run: Guarded):
        a, b = await run.node("ada"), await run.node("bob", token=b"")
        await is_shut_out(b, a)
        run.admit(b, run.token(b, "bob"))
        await insist(b, a.id, lambda: a.words(b))
        assert await echoes(a, b)

    tell(keys, story)


def test_streams_end_with_the_token_and_come_back_with_a_new_one(keys):
    async def story(run: Guarded):
        a, b = await run.node("ada"), await run.node("bob")
        await insist(b, a.id, lambda: a.words(b))
        held = await b.transport.ask(a.id, "echo", b"head", HOLDS)
        # the clocks of both go on; the token of a is renewed in time
        run.admit(a, run.token(a, "ada", 900.0))
        await until(lambda: run.accesses[b.id].token_of(a.id) == run.accesses[a.id].token)
        run.clocks[a.id].ahead = 600.0 + SKEW
        await until(lambda: not a.transport.connected)
        with pytest.raises(Closed):
            await all_of(held)
        await is_shut_out(b, a)
        run.admit(b, run.token(b, "bob", 900.0))
        await insist(b, a.id, lambda: a.words(b)[-1:] == [b"!"], b"!")
        assert await echoes(b, a)

    tell(keys, story)


def test_a_renewed_token_is_shown_on_the_streams_that_are_open(keys):
    async def story(run: Guarded):
        a, b = await run.node("ada"), await run.node("bob")
        await insist(b, a.id, lambda: a.words(b))
        before = a.transport._links[b.id]._streams[:]
        for node, name in ((a, "ada"), (b, "bob")):
            run.admit(node, run.token(node, name, 900.0))
        await until(lambda: run.accesses[a.id].token_of(b.id) == run.accesses[b.id].token)
        await until(lambda: run.accesses[b.id].token_of(a.id) == run.accesses[a.id].token)
        run.clocks[a.id].ahead = run.clocks[b.id].ahead = 600.0 + SKEW
        await insist(b, a.id, lambda: a.words(b)[-1:] == [b"!"], b"!")
        assert a.transport._links[b.id]._streams == before

    tell(keys, story)


def test_a_ban_closes_the_streams_of_all_peers_of_the_account_and_of_nobody_else(keys):
    async def story(run: Guarded):
        a, b = await run.node("ada"), await run.node("bob")
        eves = [await run.node("eve"), await run.node("Eve", client=True)]
        for peer in (b, *eves):
            await insist(peer, a.id, lambda peer=peer: a.words(peer))
        held = [await eve.transport.ask(a.id, "echo", b"head", HOLDS) for eve in eves]
        run.keys.ban("eve")
        run.admit(a)
        assert a.transport.connected == {b.id}, "at once"
        for channel in held:
            with pytest.raises(Closed):
                await all_of(channel)
        for eve in eves:
            run.accesses[eve.id].take(Admit(run.token(eve, "eve", 800.0)))  # a new one does not help
            await is_shut_out(eve, a)
        assert await echoes(b, a)

    tell(keys, story)


def test_who_is_shut_out_for_a_proof_stays_out_with_a_good_token(keys):
    async def story(run: Guarded):
        a, b = await run.node("ada"), await run.node("bob")
        await insist(b, a.id, lambda: a.words(b))
        a.transport.ban(b.id)
        await is_shut_out(b, a)

    tell(keys, story)


# --- accounts ---


def test_the_tokens_of_those_whom_a_message_names_go_before_it(keys):
    async def story(run: Guarded):
        leader, b, c = await run.node("ada"), await run.node("bob"), await run.node("carl", client=True)
        for member in (b, c):
            await insist(member, leader.id, lambda member=member: leader.words(member))
        assert run.accesses[b.id].account_of(c.id) is None
        known: list[str | None] = []
        b.transport.on_message = lambda peer, data: known.append(run.accesses[b.id].account_of(c.id))
        while not known:
            leader.transport.send(b.id, b"begin", (leader.id, b.id, c.id))
            await asyncio.sleep(0.05)
        assert known[0] == "carl"

    tell(keys, story)


def test_a_forged_token_of_somebody_else_ends_the_stream(keys, tmp_path):
    async def story(run: Guarded):
        a, b = await run.node("ada"), await run.node("bob")
        await insist(b, a.id, lambda: a.words(b))
        forger = RunKeys(tmp_path / "forged", run.keys.run_id)
        run.accesses[b.id]._tokens["somebody"] = forger.token(PeerID.from_base58(b.id), "carl")
        first = a.transport._links[b.id]._streams[0]
        b.transport.send(a.id, b"begin", ("somebody",))
        await until(lambda: first not in a.transport._links[b.id]._streams)
        assert b"begin" not in a.words(b) and run.accesses[a.id].account_of(b.id) == "bob"

    tell(keys, story)


@dataclass
class Names:
    """Peers with tokens, and one that has shown none."""

    keys: RunKeys
    access: Access
    peers: dict[str, str]

    def member(self, name: str, account: str | None = None) -> Member:
        return Member(self.peers[name], name if account is None else account, True)


@pytest.fixture
def names(keys, tmp_path) -> Names:
    peers = {name: PeerID(b"\x12\x20" + name.encode() * 8) for name in ("anna", "bert", "carl", "eves")}
    access = Access(keys.trust)
    access.take(Admit(keys.token(peers["anna"], "anna")))
    for name in ("bert", "carl"):
        assert access.show(keys.token(peers[name], name), peers[name].to_base58()) is None
    return Names(keys, access, {name: peer.to_base58() for name, peer in peers.items()})


def begin(names: Names, *group: Member) -> Message:
    ballot = Ballot(0, names.peers["bert"])
    samples = tuple(8 for _ in group)
    return Message(None, Begin(Round(HASH, ballot, 0, group, samples, (), 1.0, 1.0, HASH)))


def report(member: Member) -> Message:
    return Message(None, Report(Ballot(0, member.peer), member, 8, 10.0, None, None, 0.0))


def propose(names: Names, *group: Member, born: int = 0) -> Message:
    ballot = Ballot(0, names.peers["bert"])
    birth = Ballot(born, names.peers["carl"]) if born else ballot
    entry = Entry(0, 0, 0, HASH, birth, HASH, group, (), 0)
    return Message(None, Propose(ballot, entry, ()))


def test_who_is_named_under_another_account_than_its_own_does_not_count(names):
    anna, bert, carl = (names.member(name) for name in ("anna", "bert", "carl"))
    stolen, unknown = names.member("carl", "anna"), names.member("eves")
    spelled = Member(names.peers["carl"] + " ", "carl", True)
    why = names.access.why_misnamed
    assert why(report(bert)) is None
    assert "not of the account" in why(report(stolen))
    assert why(begin(names, anna, bert, carl)) is None is why(propose(names, anna, bert, carl))
    for message in (begin, propose):
        assert "not of the account" in why(message(names, anna, bert, stolen))
        assert "was not seen" in why(message(names, anna, bert, unknown))
        assert "is no peer" in why(message(names, anna, bert, spelled))
    assert why(propose(names, bert, unknown, born=1)) is None, "it was judged when it was born"
    opening = Opening(0, 0, 0, HASH, 0, (anna, unknown))
    assert "was not seen" in why(Message(None, AskOpening(opening)))
    assert why(Message(None, Lead(Ballot(0, bert.peer), True))) is None


def test_without_an_authority_each_peer_is_an_account_of_its_own(names):
    access, bert = Access(), names.peers["bert"]
    assert access.admits(bert) and access.token == access.token_of(bert) == b""
    assert access.why_misnamed(report(Member(bert, bert, True))) is None
    assert access.why_misnamed(report(Member(bert, "anna", True)))


def test_nobody_but_a_monitor_observes(names):
    """Members that compute nothing have places of their own."""
    bert, carl = (names.member(name)._replace(observes=True) for name in ("bert", "carl"))
    assert "is no monitor" in names.access.why_misnamed(report(bert))
    assert "is no monitor" in names.access.why_misnamed(begin(names, names.member("anna"), carl))
    token = names.keys.token(PeerID.from_base58(carl.peer), "carl", role="monitor")
    assert names.access.show(token, carl.peer) is None
    assert names.access.why_misnamed(report(carl)) is None
    assert Access().why_misnamed(report(Member(bert.peer, bert.peer, True, observes=True))) is None


# --- the run's beginning ---


def test_a_beginning_is_believed_of_somebody_who_was_admitted_then(names, tmp_path):
    keys, bert = names.keys, names.member("bert")
    genesis = LogItem.genesis([bert])
    peer = PeerID.from_base58(bert.peer)
    why = names.access.why_not_begun
    assert why(genesis, keys.token(peer, "Bert", -10_000.0)) is None, "which may be long ago"
    assert "no access token" in why(genesis, b"")
    assert "no access token" in why(genesis, RunKeys(tmp_path / "forged", keys.run_id).token(peer, "bert"))
    assert "somebody else's" in why(genesis, keys.token(peer, "carl"))
    assert "somebody else's" in why(genesis, keys.token(PeerID.from_base58(names.peers["carl"]), "bert"))
    assert why(LogItem.genesis([bert, names.member("carl")]), keys.token(peer, "bert")), "the second did not sign it"


def test_members_of_a_state_are_checked_as_far_as_their_tokens_were_seen(names):
    why = names.access.why_not_theirs
    assert why([names.member("bert"), names.member("eves")]) is None
    assert "not of the account" in why([names.member("bert"), names.member("carl", "anna")])


def test_a_beginning_is_signed_by_its_founder():
    ada, bob = new_book(0), new_book(1)
    genesis = LogItem.genesis([Member(name_of(0), "ada", True)])
    assert "the genesis of" in ada.check_items([genesis])
    stolen = bob.export([genesis])
    assert bob.load(stolen) is None and "is not signed" in bob.check_items([genesis])
    assert bob.load(ada.export([genesis])) is None and bob.check_items([genesis]) is None


# --- speeds ---


def test_peers_are_seen_under_the_accounts_of_their_tokens_and_with_believed_speeds():
    ada, bob, eve, new = (PeerID(b"\x12\x20" + each * 32) for each in (b"a", b"b", b"e", b"n"))
    others = {
        peer: NodeRecord(peer_id=peer.to_bytes(), epoch=epoch, public=peer != eve)
        for peer, epoch in ((bob, 3), (eve, 2), (new, -1))
    }
    names = {bob: "Bob", eve: "eve"}
    seen = seen_of(others, names.get, Limits({ada: 30.0, bob: 60.0}, 9.0), ada)
    assert sorted(seen.peers) == sorted([(str(bob), "bob", True, 60.0), (str(eve), "eve", False, 9.0)])
    assert seen.own_speed == 30.0
    nothing_known = seen_of(others, lambda peer: None, Limits(), ada)
    assert {each[1:] for each in nothing_known.peers} == {("", True, inf), ("", False, inf)}
    assert nothing_known.own_speed == inf


# --- a stranger's state ---


def test_a_newcomer_takes_what_honest_steps_can_have_become_and_nothing_worse():
    demo = load_run("demo")
    judge = judge_of_states(SimpleNamespace(run=demo, stream=None))
    groups = build_param_groups(demo, build_model(demo))
    own = [parameter.detach() for group in groups for parameter in group["params"]]
    stepped = [tensor + 1e-3 * torch.randn_like(tensor) * tensor.std().nan_to_num() for tensor in own]
    ruined = [torch.randn_like(tensor) for tensor in own]
    assert judge(own, 0, stepped, 1) is None
    assert "can have moved it" in judge(own, 0, ruined, 1)
    assert "its loss on public samples" in judge(own, 0, ruined, 100_000)
    assert "ahead" in judge(own, 0, stepped, 100_001)
    assert judge(own, 7, stepped, 3) is None, "the monitor has ordered everybody back"


# --- a run ---


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_volunteers_vote_on_steps_until_one_is_banned(tmp_path):
    with monitored(tmp_path, target_batch_size=256) as run:
        ada = run.volunteer("ada")
        run.maddrs = ada.wait_event("connected")["maddrs"]
        assert ada.wait_event("state_loaded")["source"] == "new"
        ada.wait_epoch(1)
        bob = run.volunteer("bob")
        assert bob.wait_event("state_loaded")["source"] == "peers"
        for peer in (ada, bob):
            together = peer.wait_epoch(2, group_size=2)["epoch"]
        assert run.authority is not None
        run.authority.app.state.moderators.ban("mona", "bob", "two machines in a cupboard", "api")
        error = bob.wait_event("error")
        assert error["kind"] == "refused" and "two machines in a cupboard" in error["message"]
        last = max(event["epoch"] for event in ada.said() if event["event"] == "epoch")
        assert last >= together
        alone = ada.wait_for(lambda e: e["event"] == "epoch" and e["epoch"] > last + 2 and e["group_size"] == 1)
        assert ada.wait_epoch(alone["epoch"] + 3)["group_size"] == 1, "and alone it stays"
