"""Engines of one swarm in one process: they train, die at any moment, come back and leave."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from contextlib import suppress

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.memory_network import Wire
from tests.node_world import CELLS, ELEMENTS, RUN, key, play
from volunteer_kit.swarm.node import engine, signatures, states, store
from volunteer_kit.swarm.node.credentials import peer_id_of, public_der
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.store import StoreError
from volunteer_kit.swarm.node.talk import Delivered, Expired, Found, Left, Progress, Step, Told
from volunteer_kit.swarm.node.transfers import ANSWERS, CHUNKS, OFFER, WITNESS, AnswersWanted
from volunteer_kit.swarm.rounds import blobs
from volunteer_kit.swarm.rounds.exchange import PART
from volunteer_kit.swarm.rounds.reducer import SliceReducer
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Cause, LedgerRecord
from volunteer_kit.swarm.sync.entries import Entry, Member
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    BallotRecord,
    Begin,
    HeadRecord,
    Held,
    Items,
    Message,
    Propose,
    Report,
    Topic,
    Vote,
)
from volunteer_kit.swarm.wire import WireError, decode

WAITS = ("leader_timeout", "suspect_after", "exchange_ceiling", "exchange_floor", "vote_ceiling", "vote_floor")


async def trio(world, epoch: int = 3):
    """Three peers that train."""
    peers = [world.peer("a", founds=True), world.peer("b"), world.peer("c")]
    await world.all_at(epoch)
    return peers


# --- all goes well ---


def test_one_peer_alone(tmp_path):
    async def story(world):
        a = world.peer("a", founds=True)
        await world.all_at(10)
        await world.quiet()
        world.check_books()
        assert a.ledger.committed == CELLS * a.delivered > 0

    play(tmp_path, story)


@pytest.mark.parametrize("public", [True, False])
def test_three_peers_have_equal_parameters(tmp_path, public):
    async def story(world):
        peers = [world.peer("a", founds=True), world.peer("b"), world.peer("c", public=public)]
        await world.all_at(20)
        await world.quiet()
        world.check_books()
        assert all(peer.ledger.committed > 0 for peer in peers)
        assert len({peer.parameters.numpy().tobytes() for peer in peers}) == 1

    play(tmp_path, story)


def test_a_device_that_delivers_more_often_than_rounds_are_adds_up(tmp_path):
    async def story(world):
        a, b = world.peer("a", founds=True, samples=1, pause=0.002), world.peer("b", samples=1, pause=0.002)
        await world.all_at(5)
        await world.quiet()
        world.check_books()
        assert max(len(a.granted), len(b.granted)) > 50  # slots go round

    play(tmp_path, story, epoch_deadline=5.0)  # else a round on a busy machine begins with few


def test_a_joiner_takes_a_snapshot_and_catches_up(tmp_path):
    async def story(world):
        a = world.peer("a", founds=True)
        world.peer("b")
        await world.all_at(12)
        d = world.peer("d")
        await world.until(lambda: d.ledger.committed > 0)
        assert d.loads[0].reason == "joined"
        await world.quiet()
        world.check_books()
        assert d.lineage == a.lineage

    play(tmp_path, story)


def test_a_state_whose_log_is_older_than_ours_can_be_proven(tmp_path):
    async def story(world):
        a, b = world.peer("a", founds=True), world.peer("b")
        await world.all_at(20)
        d = world.peer("d")
        await world.until(lambda: d.head is not None)
        assert not [each for each in d.told if isinstance(each, Told) and "signed" in each.about]
        await world.all_at(a.epoch + 3)
        await world.quiet()
        world.check_books()
        assert a.lineage == b.lineage == d.lineage

    play(tmp_path, story, kept_entries=12)


def test_who_comes_at_the_beginning_has_the_parameters_already(tmp_path):
    async def story(world):
        a, b = world.peer("a", founds=True, trains=False), world.peer("b", trains=False)
        await world.until(lambda: b.lineage is not None)
        assert a.lineage == b.lineage and a.epoch == b.epoch == 0
        assert not b.loads, "nothing was downloaded"
        a.trains = b.trains = True
        await world.all_at(5)
        await world.quiet()
        world.check_books()
        assert a.lineage == b.lineage

    play(tmp_path, story)


@pytest.mark.slow
def test_a_peer_that_was_away_for_long_takes_a_snapshot(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        c.kill()
        gone_at = c.head.epoch
        await world.all_at(gone_at + world.times["kept_entries"] + 4, a, b)
        await c.restart()
        await world.until(lambda: c.head is not None and c.lineage in (a.lineage, b.lineage) and c.loads)
        before = c.ledger.committed
        await world.until(lambda: c.ledger.committed > before)
        await world.quiet()
        world.check_books(a, b)
        c.check_ledger()  # its log and the snapshot's have nothing in common, so what it had committed is unknown to it
        first, *later = [load.reason for load in c.loads]
        assert first == "restart" and set(later) == {"behind"}  # on a slow machine it falls behind once more

    play(tmp_path, story)


def test_a_peer_that_was_away_for_a_while_replays_what_it_missed(tmp_path, monkeypatch):
    """All answers come at once, and stay until their entries are taken; also where there is little room for them."""
    monkeypatch.setattr(engine, "ANSWERS_KEPT", 0)

    async def story(world):
        a, b, c = await trio(world)
        c.kill()
        gone_at = c.head.epoch
        await world.all_at(gone_at + 8, a, b)
        await c.restart()
        await world.until(lambda: c.lineage is not None and c.epoch >= gone_at + 8)
        await world.quiet()
        world.check_books()
        first, *later = [load.reason for load in c.loads]
        assert first == "restart" and set(later) <= {"behind"}  # on a slow machine

    play(tmp_path, story)


def test_a_state_that_takes_longer_than_a_peers_patience_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "FEW_STEPS", 0)  # the state travels
    monkeypatch.setattr(blobs, "FRAME", 2000)  # bytes

    async def story(world):
        world.peer("a", founds=True)
        world.peer("b")
        await world.all_at(3)
        began = []

        async def slowly(stream, data):
            if len(data) == 2000:
                began.append(stream.head)
                for peer in world.peers.values():
                    peer.trains = False
                await asyncio.sleep(0.05)
            return data

        def tamper(stream, data):
            if not stream.opened and stream.peer == world.peers["d"].id:
                return slowly(stream, data)
            return data

        world.hub.tamper = tamper
        d = world.peer("d", trains=False)
        await world.until(lambda: d.lineage is not None)
        assert len(d.loads) == 1 and began and len(began) * 2000 < 4 * ELEMENTS + 20_000, "it came once"

    play(tmp_path, story, snapshot_patience=0.5)


def test_an_answer_that_the_disk_refuses_is_not_held(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        refused = []

        def put_answer(digest, data):
            refused.append(digest)
            raise StoreError("the disk is full")

        b.store.put_answer = put_answer
        await world.until(lambda: len(refused) > 2)
        assert not any(isinstance(each, Told) and each.topic == "banned" for each in a.told + c.told)
        del b.store.put_answer
        await world.all_at(max(a.epoch, c.epoch) + 3)
        await world.quiet()
        world.check_books()

    play(tmp_path, story)


def test_what_is_no_answer_enters_no_step(tmp_path, monkeypatch):
    """A reducer gives other bytes than an answer, by their right hash and with its signature, also when it leads."""
    liars, lies = set(), []
    reduce = SliceReducer.reduce

    def lie(reducer):
        found = reduce(reducer)
        if found is None or found[0].reducer not in liars:
            return found
        data = b"no answer %d" % len(lies)
        lies.append(hashlib.sha256(data).digest())
        return found[0]._replace(digest=lies[-1]), data

    monkeypatch.setattr(SliceReducer, "reduce", lie)

    async def story(world):
        a, b, c = await trio(world)
        liars.add(b.id)
        await world.until(lambda: len(lies) > 3)
        liars.clear()
        await world.all_at(max(a.epoch, c.epoch) + 3)
        await world.quiet()
        world.check_books()
        steps = [item.step for item in a.engine.core.log.items if isinstance(item.step, Entry)]
        assert not {answer.digest for step in steps for answer in step.answers} & {*lies}
        assert not any(peer.store.has_answer(digest) for peer in (a, c) for digest in lies)

    play(tmp_path, story)


def test_who_is_told_of_what_became_of_samples(tmp_path):
    async def story(world):
        a = world.peer("a", founds=True, trains=False)
        await world.until(lambda: a.lineage is not None and len(a.free) == 2)
        a.say(Delivered(a.free.pop(), 5, b"of no branch that anybody knows", ("x", "y")))
        await world.until(lambda: a.expired)
        assert a.expired == {Cause.LOST_BRANCH.value: 5.0}
        assert [each.names for each in a.told if isinstance(each, Expired) and each.names] == [("x", "y")]
        await world.until(lambda: len(a.free) == 2)

    play(tmp_path, story)


# --- a peer dies ---

MOMENTS = {
    "after a delivery": ("written", lambda record: isinstance(record, LedgerRecord)),
    "when a round begins": ("written", lambda r: isinstance(r, LedgerRecord) and any(e.in_flight for e in r.live)),
    "before it writes its vote": ("before write", lambda r: isinstance(r, BallotRecord) and r.accepted is not None),
    "before it says its vote": ("written", lambda r: isinstance(r, BallotRecord) and r.accepted is not None),
    "behind its vote": ("said", lambda body: isinstance(body, Vote)),
    "behind the exchange": ("said", lambda body: isinstance(body, Held)),
    "when it begins a round": ("said", lambda body: isinstance(body, Begin)),
    "when it has told one of a proposal": ("said", lambda body: isinstance(body, Propose)),
    "when it has told one of the certificate": (
        "said", lambda body: isinstance(body, Items) and len(body.items) == 1 and body.items[0].certificate is not None
    ),
    "before it writes its head": ("before write", lambda record: isinstance(record, HeadRecord)),
    "behind its head": ("written", lambda record: isinstance(record, HeadRecord)),
}  # fmt: skip


@pytest.mark.slow
def test_a_peer_that_is_killed_goes_on_from_its_folder_whatever_it_was_doing(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        for moment in MOMENTS.values():
            lost = b.lost
            await b.dies_when(*moment)
            a.trains = c.trains = False  # else what it has grows stale meanwhile
            assert b.lost - lost <= 2 * b.samples
            await b.restart()
            assert b.ledger.computed == CELLS * (b.delivered - b.lost), moment
            await world.until(lambda: b.lineage is not None)
            assert b.loads[0].reason == "restart", moment
            a.trains = c.trains = True
            epoch = b.epoch
            await world.all_at(epoch + 2)
        await world.quiet()
        world.check_books()
        for peer in (a, b, c):
            assert peer.ledger.expired.keys() <= {Cause.STALE}, world.story()  # on a slow machine

    play(tmp_path, story)


@pytest.mark.slow
def test_all_die_at_once_and_come_back(tmp_path):
    async def story(world):
        peers = await trio(world)
        await peers[1].dies_when(*MOMENTS["behind its vote"])
        for peer in peers:
            peer.kill()
        for peer in peers:
            await peer.restart()
        await world.all_at(peers[0].head.epoch + 5)
        await world.quiet()
        world.check_books()
        for peer in peers:
            assert peer.ledger.expired.keys() <= {Cause.STALE}, world.story()

    play(tmp_path, story)


def test_what_expired_in_an_earlier_life_is_not_told_again(tmp_path):
    async def story(world):
        a = world.peer("a", founds=True)
        await world.all_at(3)
        a.trains = False
        await world.until(lambda: len(a.free) == 2)
        a.say(Delivered(a.free.pop(), 5, b"of no branch that anybody knows"))
        await world.until(lambda: a.expired)
        a.trains = True
        before = a.ledger.expired
        a.kill()
        await a.restart()
        await world.all_at(a.head.epoch + 2)
        assert a.ledger.expired == before and a.expired == {}

    play(tmp_path, story)


def test_after_a_power_cut_unflushed_gradients_are_not_used(tmp_path, monkeypatch):
    """Slots may be torn, and the ledger may have forgotten numbers that others have seen."""

    async def story(world):
        a, b, c = await trio(world)
        await b.dies_when(*MOMENTS["when a round begins"])
        record = b.store.durable().ledger
        monkeypatch.setattr(store, "boot_id", lambda: b"another start")
        await b.restart()
        assert b.store.rebooted and not b.ledger.live and b.ledger.record().next_number > record.next_number + 1000
        assert b.ledger.expired[Cause.UNKNOWN] > 0
        before = b.ledger.committed
        await world.until(lambda: b.ledger.committed > before)
        assert b.loads[0].reason == "restart"
        await world.quiet()
        world.check_books(a, c)
        b.check_ledger()

    play(tmp_path, story)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["states", "an answer", "the bytes of an answer"])
def test_a_killed_peer_that_lost_its_parameters_joins_anew(tmp_path, what):
    async def story(world):
        a, b, c = await trio(world, epoch=4)
        when, begins = MOMENTS["when a round begins"]
        await b.dies_when(when, lambda what: begins(what) and b.head.epoch % 4 >= 2)  # some steps behind its state
        live = b.store.durable().ledger.live
        state, _ = b.store._newest  # the log behind it needs answers
        items = b.store.durable().head.snapshot.items
        if what == "states":
            shutil.rmtree(b.folder / "states")
        else:
            behind = items[[item.head.lineage for item in items].index(state) + 1 :]
            path = b.store.answer_path(behind[0].step.answers[0].digest)
            if what == "an answer":
                path.unlink()
            else:
                path.write_bytes(bytes(path.stat().st_size))
        pending = sum(each.samples * (each.pending | each.in_flight).bit_count() for each in live)
        assert pending > 0
        await b.restart()
        assert b.ledger.expired.get(Cause.UNKNOWN) == pending and not b.ledger.live
        await world.until(lambda: b.expired)
        assert b.expired == {Cause.UNKNOWN.value: pending / CELLS}
        before = b.ledger.committed
        await world.until(lambda: b.ledger.committed > before)
        assert b.loads[0].reason == "joined"
        await world.quiet()
        world.check_books(a, c)
        b.check_ledger()

    play(tmp_path, story)


def test_a_peer_that_missed_rounds_gets_their_answers_from_several_peers_each_once(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "STUCK", 60.0)  # s without an answer, then it asks again

    async def story(world):
        a, b, c = await trio(world)
        late = world.peer("d")
        await world.all_at(a.head.epoch + 2)
        world.hub.cut([late.id])
        missed = a.head.epoch
        await world.until(lambda: a.head.epoch >= missed + 3)
        before = len(world.hub.streams)
        world.hub.cut([])
        await world.until(lambda: late.head.epoch >= missed + 3)
        asked = {}
        for stream in world.hub.streams[before:]:
            if stream.owner == late.id and stream.opened:
                with suppress(WireError):
                    asked.setdefault(stream.peer, set()).update(decode(AnswersWanted, stream.head).digests)
        assert len(asked) > 1 and sum(map(len, asked.values())) == len(set().union(*asked.values())), asked
        await world.quiet()
        world.check_books()

    play(tmp_path, story, fetch_patience=60.0)  # else it takes a snapshot on a busy machine


def test_a_reducer_that_dies_in_a_round_is_done_without(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        await b.dies_when(*MOMENTS["when a round begins"])
        died_at = b.head.epoch
        await world.all_at(died_at + 6, a, c)
        await b.restart()
        await world.until(lambda: b.lineage is not None and b.epoch > died_at)
        await world.quiet()
        world.check_books()

    play(tmp_path, story)


def test_a_member_whose_part_is_stuck_keeps_its_slots(tmp_path):
    """The round ends without its part; meanwhile the slots that its encoder reads are nobody else's."""

    async def story(world):
        a, b, c = await trio(world)
        stuck, let_go = world.hold_parts(b)
        await world.until(lambda: stuck)
        epoch = a.epoch
        await world.all_at(epoch + 3, a, c)
        let_go.set()
        await world.all_at(epoch + 6)
        await world.quiet()
        world.check_books()

    play(tmp_path, story, exchange_ceiling=1.0, exchange_floor=0.5)


# --- peers go and come ---


def test_nobody_waits_for_a_peer_that_left(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        await c.leave()
        at = max(a.head.epoch, b.head.epoch)
        told = len(a.told), len(b.told)
        await world.all_at(at + 2, a, b)
        for peer, before in zip((a, b), told, strict=True):
            assert c.id not in peer.engine.core.log.last.membership.view
            news = [each.topic for each in peer.told[before:] if isinstance(each, Told)]
            assert not {*news} - {Topic.CAUGHT_UP.value}, "a busy machine may be behind for a moment"
        await world.quiet(a, b)
        world.check_books(a, b)
        assert c.store.goodbye is not None
        c.check_ledger()

    # only a wait for the peer that left can take this long, and its round would fail
    play(tmp_path, story, **{name: 60.0 for name in WAITS})


def test_all_leave(tmp_path):
    async def story(world):
        for peer in await trio(world):
            await peer.leave()
            peer.check_ledger()

    play(tmp_path, story)


def test_two_founders_end_on_one_branch(tmp_path):
    async def story(world):
        a, b = world.peer("a", trains=False), world.peer("b", trains=False)
        for peer in (a, b):
            peer.say(Found())
        await world.until(lambda: a.lineage is not None and b.lineage is not None)
        assert a.lineage != b.lineage
        a.trains = b.trains = True
        await world.until(lambda: a.epoch > 3 and b.epoch > 3 and b.head.lineage in a.engine.core.log)
        await world.quiet()
        assert a.lineage == b.lineage
        for peer in (a, b):
            peer.check_ledger()
        assert world.entered(a.head).max() <= 1

    play(tmp_path, story)


def test_a_founder_alone_comes_to_the_run_of_others(tmp_path):
    """The state that it fetches is one to which others of that run attest."""

    async def story(world):
        a, b = world.peer("a", trains=False), world.peer("b", trains=False)
        world.hub.cut([a.id])
        for peer in (a, b):
            peer.say(Found())
        await world.until(lambda: a.lineage is not None and b.lineage is not None)
        a.trains = b.trains = True
        c = world.peer("c")
        await world.all_at(10)
        assert not {a.head.lineage} & {item.head.lineage for item in b.engine.core.log.items}
        world.hub.cut([])
        world.met()
        await world.until(lambda: b.head.lineage in a.engine.core.log and c.head.lineage in a.engine.core.log)
        await world.quiet()
        for peer in (a, b, c):
            peer.check_ledger()
        assert world.entered(a.head).max() <= 1

    play(tmp_path, story)


def test_steps_of_a_branch_are_unconfirmed_until_a_quorum_is_on_it(tmp_path):
    async def story(world):
        a, b, c = (world.peer(name, founds=name == "a") for name in "abc")
        await world.all_at(3)
        b.kill()
        c.kill()
        await world.all_at(a.epoch + 2, a)
        alone = [told for told in a.told if isinstance(told, Step) and told.own and told.is_unconfirmed]
        assert alone and alone[-1].openings
        await b.restart()
        await world.until(lambda: b.lineage == a.lineage)
        await world.all_at(a.epoch + 3, a, b)
        for peer in (a, b):
            last = [told for told in peer.told if isinstance(told, Step)][-1]
            assert not last.is_unconfirmed and alone[-1].openings[-1] in last.openings

    play(tmp_path, story, alone_after=6.0, isolated_after=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("kept, cause", [(8, Cause.UNKNOWN), (300, Cause.LOST_BRANCH)])
def test_two_branches_of_several_members_meet(tmp_path, kept, cause):
    """Where the fork is forgotten; and where members wrote no state on the grid since: one is written for those that
    ask, and the others attest to it."""

    async def story(world):
        peers = [world.peer(name, founds=name == "a", pause=0.05 if kept == 8 else 0.3) for name in "abcde"]
        few, many = peers[:2], peers[2:]
        for epoch in (11, 22, 33):
            await world.all_at(epoch)
        world.hub.cut([peer.id for peer in few])
        fork = max(peer.epoch for peer in peers)
        await world.all_at(fork + (2 * kept if kept == 8 else 3), *many)
        await world.all_at(fork + 3, *few)  # once they have been alone for long enough
        gone = few[0].head.lineage
        assert gone not in many[0].engine.core.log
        world.hub.cut([])
        world.met()
        await world.until(lambda: len({peer.head.lineage for peer in peers}) == 1)
        lost = few if gone not in few[0].engine.core.log else many
        await world.all_at(peers[0].epoch + 3)
        await world.quiet()
        for peer in peers:
            peer.check_ledger()
        assert world.entered(few[0].head).max() <= 1
        assert sum(peer.ledger.expired.get(cause, 0) for peer in lost) > 0

    play(tmp_path, story, alone_after=6.0, isolated_after=1.0, kept_entries=kept)


def test_a_peer_whose_parameters_are_damaged_takes_others(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        b.sketch = 1.0
        await world.until(lambda: b.loads and b.loads[-1].reason == "damaged")
        epoch = b.epoch
        await world.all_at(epoch + 3)
        await world.quiet()
        world.check_books()

    play(tmp_path, story, fetch_patience=60.0)  # another load would mend the damage


# --- strangers, and what is damaged ---


def test_garbage_from_strangers(tmp_path):
    async def story(world):
        peers = await trio(world)
        stranger = Wire(world.hub, "a stranger")
        other = peer_id_of(public_der(key(9)))
        known = Wire(world.hub, other)  # it has a key, and no place in the swarm
        book = Signatures(key(9), other, RUN)
        head = LogItem.genesis([peers[0].engine.me]).head
        for peer in peers:
            for data in (b"", b"\xff", bytes(1000), bytes(range(256)) * 100):
                stranger.send(peer.id, data)
                known.send(peer.id, data)
                for name in (PART, ANSWERS, CHUNKS, OFFER, WITNESS):
                    stream = await stranger.ask(peer.id, name, data, 1.0)
                    stream.close()
            for body in (
                Report(peers[0].engine.core.ballot.promised, peers[0].engine.me, 10**9, 1e9, None, None, 1e9),
                Items(None, ()),
                Items(bytes(32), (LogItem.genesis([Member(other, other, True)]),)),
            ):
                data = book.seal(Message(head, body), peer.id)
                for bad in (data, data[:-1], data[: len(data) // 2], data + b"x"):
                    known.send(peer.id, bad)
                for place in range(0, len(data), 7):
                    known.send(peer.id, data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        epoch = peers[0].epoch
        await world.all_at(epoch + 5)
        await world.quiet()
        world.check_books()

    play(tmp_path, story)


def test_a_peer_with_two_node_keys_is_banned(tmp_path, monkeypatch):
    async def story(world):
        a, b, c = await trio(world)
        with monkeypatch.context() as patch:
            patch.setattr(signatures, "node_key_of", lambda *args: Ed25519PrivateKey.generate())
            book = Signatures(key(2), c.id, RUN)
        vote = Vote(Ballot(0, a.id), bytes(32), None)
        c.line.send(a.id, book.seal(Message(a.engine.core.head, vote), a.id))
        await world.until(lambda: all(c.id in each.engine.core.log.items[-1].membership.banned for each in (a, b)))
        await world.until(lambda epoch=a.epoch: min(a.epoch, b.epoch) >= epoch + 2)

    play(tmp_path, story)


def test_a_state_that_is_no_state_is_taken_from_somebody_else(tmp_path):
    async def story(world):
        await trio(world, 8)
        lied = []

        def tamper(stream, data):
            if not stream.opened and stream.peer == world.peers["d"].id and len(data) > 4096 and len(lied) < 1:
                lied.append(stream.owner)
                return bytes(len(data))
            return data

        world.hub.tamper = tamper
        d = world.peer("d")
        await world.until(lambda: d.ledger.committed > 0)
        assert len(lied) == 1
        assert [each.topic for each in d.told if isinstance(each, Told)][:1] == ["warning"]
        await world.quiet()
        world.check_books()

    play(tmp_path, story)


def test_who_leaves_is_told_exactly_what_became_of_its_work(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        c.trains = False
        await world.until(lambda: not c.on_its_way and c.free)
        c.deliver()
        await world.until(lambda: not c.on_its_way)  # as a training process waits for it
        await c.leave()
        place = next(at for at, each in enumerate(c.told) if isinstance(each, Left))
        [*_, last] = [each for each in c.told[:place] if isinstance(each, Progress)]
        assert last.totals["computed"] == c.delivered > 0 and last.totals["pending"] == 0
        others = {"computed", "committed", "pending"}
        expired = {cause: amount for cause, amount in last.totals.items() if cause not in others}
        assert last.totals["computed"] == last.totals["committed"] + sum(expired.values())
        told = [each for each in c.told[:place] if isinstance(each, Expired)]
        assert sum(each.samples for each in told) == sum(expired.values())

    play(tmp_path, story)
