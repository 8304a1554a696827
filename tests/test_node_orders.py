"""The monitor orders everybody back: peers fetch the checkpoint's state, and go on from it together."""

from __future__ import annotations

import hashlib
from functools import partial

import pytest

from tests import node_world
from tests.node_world import play, read_state, refuse_checkpoints, written_state
from volunteer_kit.auth.keys import KeyFolder, Trust
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.talk import Check, Checked, GiveOrder, OrderToSign, PrepareOrder, Told
from volunteer_kit.swarm.sync.contributions import Cause


class Ordered(node_world.Peer):
    """A peer whose training process may have the monitor's key."""

    signer = None

    def take(self, message):
        if isinstance(message, Check):
            found = read_state(message.path)
            about = (bytes.fromhex(found[0]), found[1]) if found else ()
            self.say(Checked(message.path, "" if found else "no state", *about))
            self.world.note()
        elif isinstance(message, OrderToSign):
            self.order = message.order
            self.say(GiveOrder(message.order, self.signer.sign("order", message.digest)))
        else:
            super().take(message)

    def checkpoint(self):
        """Keep the state of now."""
        path = self.folder / f"kept-{self.epoch}"
        path.write_bytes(written_state(self.lineage, self.epoch, self.parameters))
        return self.lineage, path, hashlib.sha256(path.read_bytes()).digest()

    def is_back(self, lineage) -> bool:
        """Whether it stands on this state, or on steps behind an order to it."""
        return any(load.reason == "rollback" and load.lineage == lineage for load in self.loads)


@pytest.fixture
def keys(tmp_path, monkeypatch):
    folder = KeyFolder(tmp_path / "keys")
    trust = Trust.of("r", folder.create("r"))
    monkeypatch.setattr(node_world, "Signatures", partial(Signatures, trust=trust))
    monkeypatch.setattr(node_world, "Peer", Ordered)
    return folder


def trio(world, keys):
    peers = [world.peer("a", founds=True, trains=False), world.peer("b"), world.peer("c")]
    peers[0].signer = keys.signer("monitor")
    return peers


def test_all_go_back_to_a_checkpoint_and_on_from_it(tmp_path, keys):
    async def story(world):
        a, b, c = trio(world, keys)
        await world.all_at(4)
        kept = a.checkpoint()
        before = a.parameters.clone()
        await world.all_at(a.epoch + 6)
        left_at = a.epoch
        a.say(PrepareOrder(*kept))
        await world.until(lambda: all(peer.is_back(kept[0]) for peer in (a, b, c)))
        assert a.order.epoch > left_at
        await world.all_at(a.order.epoch + 4)
        await world.quiet()
        assert len({peer.parameters.numpy().tobytes() for peer in (a, b, c)}) == 1
        assert {peer.head.generation for peer in (a, b, c)} == {1}
        assert (world.entered(b.head) >= (before != 0).view(world.times["cells"], -1)).all(), "on from the checkpoint"
        for peer in (a, b, c):
            peer.check_ledger()
            assert [load.reason for load in peer.loads].count("rollback") == 1
        assert b.ledger.expired.get(Cause.ROLLBACK) or c.ledger.expired.get(Cause.ROLLBACK)
        assert not [told for told in b.told if isinstance(told, Told) and told.topic == "warning"]

    play(tmp_path, story)


def test_a_peer_that_cannot_get_the_state_waits_and_the_others_go_on(tmp_path, keys, monkeypatch):
    async def story(world):
        a, b, c = trio(world, keys)
        await world.all_at(4)
        kept = a.checkpoint()
        may_fetch = refuse_checkpoints(monkeypatch, c)
        a.say(PrepareOrder(*kept))
        await world.until(lambda: a.is_back(kept[0]) and b.is_back(kept[0]))
        await world.all_at(a.order.epoch + 3, a, b)
        await world.until(lambda: [t for t in c.told if isinstance(t, Told) and "ordered everybody back" in t.about])
        assert not c.is_back(kept[0]) and not c.computes
        may_fetch.append(True)
        await world.until(lambda: c.is_back(kept[0]) and c.computes)
        await world.all_at(a.epoch + 2)
        await world.quiet()
        assert c.lineage == a.lineage

    play(tmp_path, story, fetch_patience=60.0)  # else it takes a snapshot on a busy machine


def test_what_is_not_the_monitors_state_is_not_taken(tmp_path, keys):
    """A stranger gives another file, and a damaged one lies on the own disk; the next source is asked."""

    async def story(world):
        a, b, c = trio(world, keys)
        await world.all_at(4)
        kept = a.checkpoint()
        wrong = c.folder / "wrong"
        wrong.write_bytes(written_state(kept[0], 4, c.parameters + 1))
        c.engine._back.keep(kept[0], kept[2], wrong)
        c.engine._transfers._checkpoint = lambda lineage, digest: wrong
        a.say(PrepareOrder(*kept))
        await world.until(lambda: b.is_back(kept[0]) and c.is_back(kept[0]))
        await world.all_at(a.order.epoch + 2)
        await world.quiet()
        assert len({peer.parameters.numpy().tobytes() for peer in (a, b, c)}) == 1

    play(tmp_path, story)


def test_an_order_that_nobody_signed_is_not_followed(tmp_path, keys):
    async def story(world):
        a, b, c = trio(world, keys)
        await world.all_at(4)
        stranger = KeyFolder(tmp_path / "others")
        stranger.create("r")
        a.signer = stranger.signer("monitor")
        a.say(PrepareOrder(*a.checkpoint()))
        await world.until(lambda: [t for t in a.told if isinstance(t, Told) and "not certified" in t.about])
        await world.all_at(a.epoch + 3)
        assert {peer.head.generation for peer in (a, b, c)} == {0}

    play(tmp_path, story)


def test_a_peer_that_dies_behind_an_order_joins_again(tmp_path, keys):
    async def story(world):
        a, b, c = trio(world, keys)
        await world.all_at(4)
        kept = a.checkpoint()
        a.say(PrepareOrder(*kept))
        await world.until(lambda: c.head.generation == 1)
        c.kill()
        await world.until(lambda: b.is_back(kept[0]))
        await c.restart()
        await world.all_at(a.order.epoch + 4)
        await world.quiet()
        assert c.head == a.head and len({peer.parameters.numpy().tobytes() for peer in (a, b, c)}) == 1

    play(tmp_path, story)


def test_of_two_orders_the_later_one_is_followed(tmp_path, keys):
    async def story(world):
        a, b, c = trio(world, keys)
        await world.all_at(4)
        first = a.checkpoint()
        await world.all_at(8)
        second = a.checkpoint()
        a.say(PrepareOrder(*second))
        await world.until(lambda: a.head.generation == 1)
        a.say(PrepareOrder(*first))
        await world.until(lambda: all(peer.is_back(first[0]) for peer in (a, b, c)))
        await world.all_at(a.order.epoch + 3)
        await world.quiet()
        assert {peer.head.generation for peer in (a, b, c)} == {2} and c.lineage == a.lineage

    play(tmp_path, story)

