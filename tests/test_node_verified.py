"""Nodes of a run that verifies, in one process: cheats are caught, the honest are left in peace."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.local_swarm import LocalPeer, local_swarm
from tests.node_world import CELLS, Peer, World, play
from volunteer_kit.robust.standing import Settings
from volunteer_kit.swarm.node.talk import Verdicts
from volunteer_kit.swarm.node.verification import Verification
from volunteer_kit.swarm.node.verified_words import (
    MARK,
    Listed,
    Sealed,
    Stage,
    Word,
    packed,
    unpacked,
)
from volunteer_kit.swarm.rounds.reducer import SliceReducer
from volunteer_kit.swarm.sync.contributions import Cause, LedgerRecord
from volunteer_kit.swarm.sync.messages import BallotRecord, HeadRecord

ALWAYS = Settings(share=1.0, strikes=2, probation=4)
CALM = {  # on a machine under load nobody falls behind
    "target_batch_size": 256, "leader_timeout": 4.0, "suspect_after": 8.0, "isolated_after": 20.0,
    "epoch_deadline": 2.0, "exchange_ceiling": 8.0, "exchange_floor": 4.0, "vote_ceiling": 8.0, "vote_floor": 4.0,
    "gather": 1.0, "fetch_patience": 4.0,
}  # fmt: skip


def found(peer: Peer, *kinds: str) -> list[Any]:
    """Return the events of these kinds in a peer's verdicts."""
    return [event for each in peer.told if isinstance(each, Verdicts) for event in each.events if event.kind in kinds]


def measured(peer: Peer) -> list[float]:
    return [measure for each in peer.told if isinstance(each, Verdicts) for measure in each.measured]


def credits_of(peer: Peer, other: Peer) -> float:
    """Samples of a probation that this peer saw end."""
    told = [each for each in peer.told if isinstance(each, Verdicts)]
    return sum(credit.samples for each in told for credit in each.credits if credit.peer == other.id)


def banned_by(peer: Peer) -> set[str]:
    return {event.peer for event in found(peer, "ban")}


def at_once(world: World, *names: str, **about: dict) -> list[Peer]:
    """Peers that begin the run together."""
    return [world.peer(name, founds=name == names[0], **{"pause": 0.05, **about.get(name, {})}) for name in names]


def tamper_with_words(monkeypatch, tampered: Callable[[Verification, str, Any], Any]) -> None:
    """Pass all words of a verified round that any peer hears through `tampered`; None: the word is lost."""
    honest = Verification.on_message

    def on_message(self: Verification, peer: str, data: bytes) -> None:
        said = tampered(self, peer, unpacked(data))
        if said is not None:
            honest(self, peer, packed(said)[1:])

    monkeypatch.setattr(Verification, "on_message", on_message)


def none_is_struck(*honest: Peer) -> bool:
    ids = {peer.id for peer in honest}
    return not [event for peer in honest for event in found(peer, "strike", "ban") if event.peer in ids]


# --- all goes well ---


@pytest.mark.parametrize("rule", ["mean", "centered_clip"])
def test_honest_peers_find_each_other_right(tmp_path, rule):
    async def story(world):
        peers = at_once(world, "a", "b", "c", "d")
        await world.until(lambda: all(len(measured(peer)) >= 20 for peer in peers))
        assert max(measure for peer in peers for measure in measured(peer)) < 1e-3
        assert not [event for peer in peers for event in found(peer, "strike", "ban", "mismatch")]
        await world.quiet()
        world.check_books()

    play(tmp_path, story, verification=ALWAYS, rule=rule, **CALM)


def test_members_that_cannot_be_called_look_at_each_other(tmp_path):
    """They hear each other's words through those that can be called."""

    async def story(world):
        hidden = {"public": False}
        peers = at_once(world, "a", "b", "c", "bad", c=hidden, bad={**hidden, "sends": -1.0})
        bad = peers[3]
        await world.until(lambda: all(banned_by(peer) == {bad.id} for peer in peers[:3]))
        assert none_is_struck(*peers[:3])

    play(tmp_path, story, verification=ALWAYS, **CALM)


# --- cheats ---


def test_a_cheating_sender_is_banned(tmp_path):
    async def story(world):
        a, b, c, bad = at_once(world, "a", "b", "c", "bad", bad={"sends": -1.0})
        await world.until(lambda: all(banned_by(peer) == {bad.id} for peer in (a, b, c)))
        assert none_is_struck(a, b, c)
        committed = bad.ledger.committed
        await world.all_at(a.epoch + 4, a, b, c)
        assert bad.ledger.committed == committed, "nothing of it enters any more"

    play(tmp_path, story, verification=ALWAYS, **CALM)


@pytest.mark.parametrize("rule", ["mean", "centered_clip"])
def test_a_cheating_reducer_is_banned(tmp_path, monkeypatch, rule):
    honest = SliceReducer._average
    cheats: set[str] = set()

    def average(self, cell, parts):
        found = honest(self, cell, parts)
        return -found if self._reducer in cheats else found

    monkeypatch.setattr(SliceReducer, "_average", average)

    async def story(world):
        a, b, c, bad = at_once(world, "a", "b", "c", "bad")
        await world.all_at(2)
        cheats.add(bad.id)
        await world.until(lambda: all(banned_by(peer) == {bad.id} for peer in (a, b, c)))
        assert none_is_struck(a, b, c)

    play(tmp_path, story, verification=ALWAYS, rule=rule, **CALM)


def test_an_answer_that_is_far_too_long_is_in_no_step(tmp_path, monkeypatch):
    honest = SliceReducer._average
    cheats: set[str] = set()

    def average(self, cell, parts):
        found = honest(self, cell, parts)
        return 1e6 * found if self._reducer in cheats else found

    monkeypatch.setattr(SliceReducer, "_average", average)

    async def story(world):
        a, b, c, bad = at_once(world, "a", "b", "c", "bad")
        await world.all_at(2)
        cheats.add(bad.id)
        await world.all_at(a.epoch + 4, a, b, c)
        assert max(float(gradient.abs().max()) for gradient in world.branch(a.head)) < 1e3

    play(tmp_path, story, verification=ALWAYS, rule="centered_clip", **CALM)


def test_a_member_that_brings_other_bytes_than_it_has_committed_to_brings_nothing(tmp_path, monkeypatch):
    async def story(world):
        a, b, c, bad = at_once(world, "a", "b", "c", "bad")
        honest = bad.engine._verification.commit

        async def commit(*args):
            found = await honest(*args)
            if found is not None:
                for cell, data in list(found.own.items()):
                    values = -bad.layout.decode_cell(cell, data)
                    found.own[cell] = bad.layout.encode_cell(cell, values)
            return found

        bad.engine._verification.commit = commit
        await world.all_at(6, a, b, c)
        for step in world.branch(a.head):
            assert torch.all(step >= 0), "what has entered is what was committed to"
        assert none_is_struck(a, b, c)

    play(tmp_path, story, verification=ALWAYS, **CALM)


def test_a_leader_that_tells_members_different_lists_gets_no_step(tmp_path, monkeypatch):
    async def story(world):
        a, b, c, bad = at_once(world, "a", "b", "c", "bad")
        told = []

        def tampered(self, peer, said):
            """It keeps each member's own commitment from all others."""
            if isinstance(said, Listed) and peer == bad.id:
                told.append(said)
                kept = tuple(each for each in said.sealed if each.author in (bad.id, self._peer))
                return replace(said, sealed=kept)
            return said

        tamper_with_words(monkeypatch, tampered)
        await world.until(lambda: len(told) >= 3)
        await world.all_at(a.epoch + 2, a, b, c)
        entries = [item.step for item in a.engine.core.log.items if item.step is not None]
        assert not [entry for entry in entries if entry.birth.leader == bad.id]
        assert none_is_struck(a, b, c)

    play(tmp_path, story, verification=ALWAYS, **{**CALM, "vote_floor": 1.0, "leader_timeout": 2.0})


# --- silence, lateness, loss ---


def test_a_silent_member_loses_its_standing_and_keeps_nobody_waiting(tmp_path, monkeypatch):
    async def story(world):
        a, b, c, mute = at_once(world, "a", "b", "c", "mute")

        def tampered(self, peer, said):
            is_mutes = isinstance(said, Word) and said.sealed.author == mute.id
            return None if is_mutes and said.sealed.stage != Stage.COMMIT else said

        tamper_with_words(monkeypatch, tampered)
        await world.until(
            lambda: all(mute.id in {event.peer for event in found(peer, "suspended")} for peer in (a, b, c))
        )
        await world.all_at(a.epoch + 5, a, b, c)
        assert none_is_struck(a, b, c, mute)
        assert not [event for peer in (a, b, c) for event in found(peer, "suspended") if event.peer != mute.id]

    play(tmp_path, story, verification=ALWAYS, **CALM)


def test_who_lost_its_standing_is_checked_and_credited_and_counts_again(tmp_path):
    async def story(world):
        a, b, c, d = at_once(world, "a", "b", "c", "d")
        await world.all_at(2)
        for peer in (a, b, c, d):
            peer.engine._verification.verifier.standing.suspend(d.id)
        await world.until(lambda: d.ledger.expired.get(Cause.PROBATION, 0) > 0)
        await world.until(lambda: all(d.id in {e.peer for e in found(p, "trusted")} for p in (a, b, c)))
        probation = d.ledger.expired[Cause.PROBATION]
        assert all(0 < credits_of(peer, d) <= probation / CELLS for peer in (a, b, c))
        committed = d.ledger.committed
        await world.until(lambda: d.ledger.committed > committed)
        await world.quiet()
        world.check_books()

    play(tmp_path, story, verification=ALWAYS, **CALM)


def test_a_newcomer_is_checked_before_its_work_counts(tmp_path):
    async def story(world):
        a, b = at_once(world, "a", "b")
        await world.all_at(4)
        new = world.peer("new", pause=0.05)
        await world.until(lambda: new.ledger.expired.get(Cause.PROBATION, 0) > 0)
        await world.until(lambda: new.ledger.committed > 0)
        assert all(new.id in {event.peer for event in found(peer, "trusted")} for peer in (a, b))
        await world.quiet()
        world.check_books()

    play(tmp_path, story, verification=ALWAYS, **CALM)


def test_junk_keeps_nobody_from_verifying(tmp_path):
    async def story(world):
        a, b, c = at_once(world, "a", "b", "c")
        dice = random.Random(3)
        await world.all_at(1)
        for _ in range(3000):
            kind = dice.randrange(3)
            if kind == 0:
                data = dice.randbytes(dice.randrange(300))
            elif kind == 1:
                data = packed(Listed(dice.randbytes(32), 0, 2, ()))[1:]
            else:
                sealed = Sealed(dice.randbytes(32), 1, b.id, b"body", b"signature")
                data = packed(Word(sealed))[1:]
            a.engine._on_message(b.id, MARK + data)
        known = len(measured(a))
        await world.until(lambda: len(measured(a)) >= known + 6)
        assert none_is_struck(a, b, c)

    play(tmp_path, story, verification=ALWAYS, **CALM)


def test_newcomers_with_most_of_the_work_keep_nobody_from_taking_steps(tmp_path):
    async def story(world):
        a, b = at_once(world, "a", "b")
        await world.all_at(3)
        new = world.peer("new", pause=0.05, samples=64)
        await world.until(lambda: new.ledger.expired.get(Cause.PROBATION, 0) > 0)
        await world.all_at(a.epoch + 2, a, b)
        await world.until(lambda: new.ledger.committed > 0)

    play(tmp_path, story, verification=ALWAYS, **{**CALM, "epoch_deadline": 1000.0})


def test_a_peer_that_is_killed_and_comes_back_is_nobodys_cheat(tmp_path):
    async def story(world):
        a, b, c, d = at_once(world, "a", "b", "c", "d")
        await world.all_at(2)
        for _ in range(3):
            d.kill()
            await world.all_at(a.epoch + 2, a, b, c)
            await d.restart()
            d.trains = True
            await world.all_at(a.epoch + 2, a, b, c)
        assert none_is_struck(a, b, c, d)
        await world.quiet()
        world.check_books()

    play(tmp_path, story, verification=ALWAYS, **{**CALM, "exchange_floor": 1.0})


@pytest.mark.parametrize("record", [LedgerRecord, BallotRecord, HeadRecord])
def test_a_peer_that_dies_between_two_phases_blocks_no_round(tmp_path, record):
    """Before it commits to a part, before it votes, and before it reveals."""

    async def story(world):
        a, b, c, d = at_once(world, "a", "b", "c", "d")
        await world.all_at(2)
        for when in ("before write", "written"):
            await d.dies_when(when, lambda what: isinstance(what, record))
            await world.all_at(a.epoch + 2, a, b, c)
            await d.restart()
            await world.until(lambda: d.lineage == a.lineage)
        assert none_is_struck(a, b, c, d)
        await world.quiet()
        world.check_books()

    play(tmp_path, story, verification=ALWAYS, **{**CALM, "exchange_floor": 1.0})


def test_nobody_is_struck_where_words_are_lost_or_late(tmp_path, monkeypatch):
    dice = random.Random(7)

    async def story(world):
        peers = at_once(world, *"abcd", **{name: {"samples": 32, "pause": 0.1} for name in "abcd"})
        tamper_with_words(monkeypatch, lambda self, peer, said: said if dice.random() > 0.05 else None)
        for epoch in (10, 20, 30, 40):
            await world.all_at(epoch, peers[0])
        assert none_is_struck(*peers)

    play(tmp_path, story, verification=replace(ALWAYS, share=0.3), **{**CALM, "exchange_floor": 0.6})


# --- real processes ---


@pytest.mark.slow
def test_a_cheating_sender_and_a_cheating_reducer_are_banned_within_five_epochs(tmp_path):
    """Six workers with nodes, of which two cheat; a cheat that is never looked at in five epochs cannot be."""
    rules, epochs = {"share": 1.0, "strikes": 2, "probation": 4}, 5
    with local_swarm(tmp_path) as swarm:
        attacks = [None, "flip", "reducer", None, None, None]
        about = {"module": "tests.verified_node_peer", "verification": rules, "target_batch_size": 1536, "pause": 0.3}
        peers = [swarm.add(attack=attack, **about) for attack in attacks]
        for peer in peers:
            peer.wait_event("joined")
        for peer in peers:
            peer.order("go")
        honest = [peer for peer, attack in zip(peers, attacks, strict=True) if attack is None]
        cheats = {peer.wait_event("connected")["peer_id"]: peer for peer in peers if peer not in honest}
        for peer in peers:
            peer.wait_epoch(2, group_size=6)
        for peer in cheats.values():
            peer.order("cheat")
        for peer in honest:
            banned = epochs_of_bans(peer, set(cheats))
            cheated = {who: cheated_rounds(cheats[who], at) for who, at in banned.items()}
            print("banned in", banned, "rounds in which they cheated", cheated)
            assert all(0 < len(rounds) <= epochs for rounds in cheated.values()), (banned, cheated)
        ends = swarm.finish(*honest)
        assert len({end["digest"] for end in ends}) == 1
        struck = {each[1] for peer in honest for each in told_by(peer) if each[0] == "strike"}
        assert struck == set(cheats)


def told_by(peer: LocalPeer) -> list[list]:
    """Return the events in a real peer's verdicts: [kind, peer id, epoch, words] each."""
    return [each for event in peer.said() if event["event"] == "verdicts" for each in event["events"]]


def epochs_of_bans(peer: LocalPeer, ids: set[str]) -> dict[str, int]:
    """Peer id -> epoch at which this peer knows it banned, once all of `ids` are."""
    banned: dict[str, int] = {}

    def new(event: dict) -> set[str]:
        told = event["events"] if event["event"] == "verdicts" else ()
        return {who for kind, who, *_ in told if kind == "ban"} - banned.keys()

    while set(banned) < ids:
        event = peer.wait_for(new)
        banned |= dict.fromkeys(new(event), event["epoch"])
    return banned


def cheated_rounds(peer: LocalPeer, until: int) -> list[int]:
    """Epochs up to `until` in whose round it cheated."""
    rounds, before = [], 0
    for event in peer.said():
        if event["event"] == "epoch":
            if event["cheated"] > before and event["group_size"] > 1 and event["epoch"] <= until:
                rounds.append(event["epoch"])
            before = event["cheated"]
    return rounds
