"""Test an observer, which only asks nodes for the newest state, over streams in memory."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.memory_network import Wire
from tests.node_world import ELEMENTS, RUN, key, play, read_state
from volunteer_kit.swarm.node import observer, states
from volunteer_kit.swarm.node.access import Access
from volunteer_kit.swarm.node.credentials import peer_id_of, public_der
from volunteer_kit.swarm.node.observer import Observer
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.talk import WriteState
from volunteer_kit.swarm.node.training_state import UnusableState
from volunteer_kit.swarm.sync.entries import Head


class Asking:
    """An observer, and what it took."""

    def __init__(self, world, place: int = 5, run_key: str = RUN, refuses_first: bool = False):
        self.parameters: torch.Tensor | None = None
        self.refuses = refuses_first
        own = key(place)
        self.id = peer_id_of(public_der(own))
        self.observer = Observer(
            Wire(world.hub, self.id), Signatures(own, self.id, run_key), Access(), ELEMENTS, self.take
        )

    def take(self, path: Path, head: Head) -> None:
        found = read_state(path)
        if self.refuses:
            self.refuses = False
            raise UnusableState("it is not finite")
        if found is None or found[:2] != (head.lineage.hex(), head.epoch):
            raise UnusableState("it is not what its log says")
        self.parameters = found[2]

    async def fetch(self, peers, folder: Path, patience: float = 60.0) -> Head | None:
        return await self.observer.fetch(lambda: [peer.id for peer in peers], folder / "state", patience)


def test_it_takes_the_newest_state_and_has_no_vote(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "NEWEST_EVERY", 0.0)

    async def story(world):
        a, b = world.peer("a", founds=True), world.peer("b")
        asking = Asking(world)
        await world.all_at(8)
        await world.quiet()
        head = await asking.fetch([a, b], tmp_path)
        assert head == a.head and torch.equal(asking.parameters, a.parameters)
        a.trains = b.trains = True
        await world.all_at(head.epoch + 5)
        assert asking.id not in a.engine.core.log.last.membership.view
        await world.quiet()
        world.check_books()

    play(tmp_path, story)


def test_a_state_is_not_written_anew_for_each_who_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "NEWEST_EVERY", 1e9)

    async def story(world):
        a = world.peer("a", founds=True)
        await world.all_at(3)
        heads = []
        for place in (5, 6, 7):
            heads.append(await Asking(world, place).fetch([a], tmp_path))
            await world.all_at(a.epoch + 1)
        assert heads[0] == heads[1] == heads[2] and a.epoch > heads[0].epoch
        assert sum(isinstance(each, WriteState) for each in a.told) == 2  # one at the run's beginning, for all

    play(tmp_path, story, kept_entries=1000)


def test_who_asks_keeps_nobody_from_joining(tmp_path, monkeypatch):
    """A state that is written for it has no witnesses, so a newcomer is offered another one."""
    monkeypatch.setattr(states, "NEWEST_EVERY", 0.0)

    async def story(world):
        a, b = world.peer("a", founds=True), world.peer("b")
        await world.all_at(6)
        for place in (5, 6, 7):
            await Asking(world, place).fetch([a, b], tmp_path)
            await world.all_at(a.epoch + 1)
        for peer in (a, b):
            snapshot, _ = peer.store.newest_state()
            assert snapshot.head.epoch % 4 == 0
        world.peer("c")
        await world.all_at(a.epoch + 3)
        await world.quiet()
        world.check_books()

    play(tmp_path, story)


def test_what_cannot_be_used_is_taken_from_somebody_else(tmp_path, monkeypatch):
    """One gives bytes that are no state of the run, one breaks off, and one is not there."""
    monkeypatch.setattr(states, "NEWEST_EVERY", 0.0)

    async def story(world):
        peers = [world.peer("a", founds=True), world.peer("b"), world.peer("c")]
        await world.all_at(6)
        await world.quiet()
        liar, broken, _ = peers
        asking = Asking(world, refuses_first=True)
        broke = []

        def tamper(stream, data):
            if stream.owner == broken.id and stream.peer == asking.id and len(data) > 4096 and not broke:
                broke.append(data)
                return bytes(len(data))
            return data

        world.hub.tamper = tamper
        head = await asking.fetch(peers, tmp_path)
        assert head == peers[2].head and broke
        assert asking.observer.refused == {liar.id: "it is not finite"}

    play(tmp_path, story)


def test_a_log_of_another_run_is_not_believed_and_nobody_may_have_one(tmp_path, monkeypatch):
    monkeypatch.setattr(observer, "LOOK_AGAIN", 1e9)

    async def story(world):
        a = world.peer("a", founds=True)
        await world.all_at(4)
        await world.quiet()
        foreign = Asking(world, run_key="another run")
        assert await foreign.fetch([a], tmp_path) is None
        assert foreign.observer.refused.keys() == {a.id} and foreign.parameters is None
        assert await Asking(world, place=6).fetch([], tmp_path, patience=0.0) is None

    play(tmp_path, story)
