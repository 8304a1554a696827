"""Test which states a joining node believes, and where their bytes come from."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
import torch

from tests.node_world import ELEMENTS, play, read_state, written_state
from volunteer_kit.swarm.node import states, transfers, witnesses
from volunteer_kit.swarm.node.talk import Told
from volunteer_kit.swarm.node.witnesses import Attestation, Held, attest, most_held, one_for_each, sketch_of
from volunteer_kit.swarm.state.agreement import FRESH_SIZE

HELD, OTHER = Held(10, b"r" * 32), b"o" * 32


def sketch(*spoilt: float) -> bytes:
    numbers = np.random.RandomState(0).randn(FRESH_SIZE)
    numbers[: len(spoilt)] += spoilt
    return numbers.astype("<f4").tobytes()


def said(epoch=12, settled=True, knows=True, root=b"", sketch=b""):
    return witnesses.Testimony(epoch, settled, knows, root, 0, sketch)


@pytest.mark.parametrize(
    "witness, found",
    [
        (said(root=HELD.root), "confirmed"),
        (said(root=OTHER, sketch=sketch()), "confirmed"),
        (said(root=OTHER, sketch=sketch(1e-5)), "confirmed"),
        (said(root=OTHER, sketch=sketch(1.0)), "denied"),
        (said(root=OTHER), "silent"),
        (said(root=OTHER, sketch=b"junk"), "silent"),
        (said(root=OTHER, sketch=np.full(FRESH_SIZE, np.nan, "<f4").tobytes()), "silent"),
        (said(), "silent"),
        (said(knows=False), "denied"),
        (said(knows=False, epoch=9), "silent"),
        (said(knows=False, settled=False), None),
        (said(root=HELD.root, settled=False), None),
        (said(epoch=-1, knows=False), None),
    ],
)
def test_what_a_witness_counts_for(witness, found):
    counted = attest(HELD._replace(sketch=sketch()), {"account": witness}, 1e-3)
    assert counted == Attestation(*(int(found == each) for each in ("confirmed", "denied", "silent")))


def test_the_runs_beginning_needs_no_bytes():
    beginning = Held(0, b"")
    assert attest(beginning, {"a": said(), "b": said(knows=False)}, 1e-3) == Attestation(1, 1, 0)


@pytest.mark.parametrize(
    "confirmed, denied, silent, is_taken",
    [
        (0, 0, 0, True),  # a run of two
        (1, 0, 0, True), (0, 1, 0, False), (0, 0, 1, False),
        (1, 1, 0, True), (1, 0, 1, True), (0, 0, 2, False), (0, 2, 0, False),
        (1, 2, 0, False), (2, 2, 0, True), (1, 1, 1, False), (4, 4, 0, True), (3, 4, 1, False), (8, 0, 0, True),
    ],
)  # fmt: skip
def test_more_than_half_of_the_accounts_decide(confirmed, denied, silent, is_taken):
    assert (Attestation(confirmed, denied, silent).why_refused is None) == is_taken


def test_of_two_files_the_one_that_most_have():
    assert most_held("a", {"a": b"1", "b": b"2", "c": b"2"}) == (b"2", {"b", "c"})
    assert most_held("a", {"a": b"1", "b": b"2"}) == (b"1", {"a"})
    assert most_held("a", {"a": b"1"}) == (b"1", {"a"})


def test_one_peer_speaks_for_an_account():
    assert one_for_each({"a": "x", "b": "x", "c": "y", "d": "z"}, {"z"}) == {"x": "a", "y": "c"}


def test_sketches_of_files(tmp_path):
    numbers = torch.randn(ELEMENTS)
    here, there = tmp_path / "a", tmp_path / "b"
    here.write_bytes(written_state(b"x", 3, numbers))
    there.write_bytes(written_state(b"x", 3, numbers * (1 + 1e-7)))
    assert len(sketch_of(here, 7)) == 4 * FRESH_SIZE
    held = Held(3, b"r" * 32, sketch_of(here, 7))
    assert attest(held, {"a": said(root=OTHER, sketch=sketch_of(there, 7))}, 1e-3).confirmed
    assert attest(held, {"a": said(root=OTHER, sketch=sketch_of(here, 8))}, 1e-3).denied
    there.write_bytes(b"junk")
    assert sketch_of(there, 7) == sketch_of(tmp_path / "none", 7) == b""


# --- nodes ---


@pytest.fixture
def travels(monkeypatch):
    """A state travels, in small chunks."""
    monkeypatch.setattr(states, "FEW_STEPS", 0)
    monkeypatch.setattr(transfers, "CHUNK_SIZE", 4096)
    monkeypatch.setattr(transfers.ChunkStore.__init__, "__defaults__", (4096,))
    begun = transfers.ChunkStore.begun.__func__
    monkeypatch.setattr(begun, "__defaults__", (4096,))


async def still(world, epoch=9, count=3):
    """Some peers at one head, which have written the state of the same epoch; nobody trains any more."""
    peers = [world.peer("abcdefgh"[place], founds=not place) for place in range(count)]
    await world.all_at(epoch)
    await world.quiet()
    await world.until(lambda: all(peer.store.newest_state() is not None for peer in peers))
    lineages = {peer.store.newest_state()[0].head.lineage for peer in peers}
    await world.until(lambda: len({p.store.newest_state()[0].head.lineage for p in peers}) == 1)
    assert lineages
    return peers


def lies(peer, change):
    """Its file of its newest state holds something else from now on, in good form."""
    snapshot, path = peer.store.newest_state()
    lineage, epoch, parameters = read_state(path)
    path.write_bytes(written_state(bytes.fromhex(lineage), epoch, change(parameters)))
    peer.store.note_state(snapshot.head.lineage, snapshot, hashlib.sha256(path.read_bytes()).digest())
    peer.engine._states._files.clear()


def news_of(peer):
    return [each.about for each in peer.told if isinstance(each, Told)]


def test_members_write_their_states_at_the_same_epochs(tmp_path):
    async def story(world):
        peers = await still(world)
        digests = {peer.store.state_digest(peer.store.newest_state()[0].head.lineage) for peer in peers}
        assert len(digests) == 1 and peers[0].store.newest_state()[0].head.epoch % 4 == 0

    play(tmp_path, story)


@pytest.mark.parametrize("change", [lambda it: it * 1.01, lambda it: it + torch.randn(len(it)), torch.zeros_like])
def test_a_state_that_other_members_deny_is_not_taken(tmp_path, travels, change):
    async def story(world):
        a, b, c = await still(world)
        lies(a, change)
        d = world.peer("d", trains=False)
        await world.until(lambda: d.lineage is not None)
        assert world.states[d.lineage].equal(d.parameters), "it is the state of the honest"
        refused = [each for each in news_of(d) if "No model came" in each]
        assert all(a.id in each and "hold another one" in each or "the others do not" in each for each in refused)

    play(tmp_path, story)


def test_of_two_members_both_have_to_stand_by_a_state(tmp_path, travels):
    async def story(world):
        a, b = await still(world, count=2)
        lies(a, lambda it: it * 1.01)
        d = world.peer("d", trains=False)
        await world.until(lambda: any("No model came" in each for each in news_of(d)))
        assert d.lineage is None

    play(tmp_path, story)


def test_a_donor_that_lies_alone_gives_less_than_those_that_agree(tmp_path, travels):
    """Its log is taken, and the bytes come from the others."""

    async def story(world):
        a, b, c = await still(world)
        lies(a, lambda it: it + 1.0)
        d = world.peer("d", trains=False)
        await world.until(lambda: d.lineage is not None)
        assert not [each for each in news_of(d) if "No model came" in each]
        assert world.states[d.lineage].equal(d.parameters)

    play(tmp_path, story)


def test_a_transfer_goes_on_when_donors_die_and_nothing_comes_twice(tmp_path, travels):
    async def story(world):
        peers = await still(world)
        chunks, sent = [], []

        async def after_a_while(stream, data):
            sent.append(len(data))
            if len(sent) == 4:
                for peer in peers[1:]:
                    peer.kill()
                raise OSError("it is dead")
            await asyncio.sleep(0)
            return data

        def tamper(stream, data):
            if not stream.opened and stream.peer == world.peers["d"].id and len(data) == 4096:
                chunks.append(stream.owner)
                return after_a_while(stream, data)
            return data

        world.hub.tamper = tamper
        d = world.peer("d", trains=False)
        await world.until(lambda: d.lineage is not None)
        assert world.states[d.lineage].equal(d.parameters)
        most = 4 * ELEMENTS // 4096
        assert len(sent) <= most + 8, "what was on its way when they died came again"

    play(tmp_path, story, snapshot_patience=30.0)
