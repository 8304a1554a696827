"""Nodes whose gradients travel as low-rank factors: what is fixed in a step follows from the log, on all of them."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import pytest
import torch

from tests import node_world
from tests.node_world import ELEMENTS, play, refuse_checkpoints
from volunteer_kit.auth.keys import KeyFolder, Trust
from volunteer_kit.swarm.codecs.registry import CODECS
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.talk import (
    Check,
    Checked,
    Delivered,
    Founded,
    GiveOrder,
    OrderToSign,
    PrepareOrder,
    StateWritten,
    StepOf,
    WriteState,
)
from volunteer_kit.swarm.node.training_state import TrainingState, UnusableState
from volunteer_kit.swarm.rounds.error_feedback import ErrorFeedback
from volunteer_kit.swarm.rounds.exchange import Exchange
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.reducer import decode_answer
from volunteer_kit.swarm.sync.contributions import LedgerRecord
from volunteer_kit.swarm.sync.messages import HeadRecord, Vote

SHAPES = [(50, 60), (40,), (49, 60), (40,), (50, 60), (35,), (49, 60), (5,)]  # a matrix in each cell
PAUSE = 0.05  # s between deliveries: on a busy machine those who encode are behind others
assert sum(torch.Size(shape).numel() for shape in SHAPES) == ELEMENTS


def layout() -> Layout:
    return Layout([torch.Size(shape) for shape in SHAPES], node_world.CELLS, CODECS["float16"], rank=2)


def state() -> TrainingState:
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    return TrainingState([parameter], partial(torch.optim.SGD, lr=0.1), None, ["vector"], layout())


class Peer(node_world.Peer):
    """A peer with a real training state."""

    signer: Any = None

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **{"pause": PAUSE, **settings})

    def start(self) -> None:
        self.state = state()
        self.missing = 0  # cells of the steps that it has taken
        super().start()

    def take(self, message: Any) -> None:
        if isinstance(message, Check):
            try:
                found = self.state.check(message.path)
                self.say(Checked(message.path, "", found.lineage, found.epoch))
            except UnusableState as error:
                self.say(Checked(message.path, str(error)))
        elif isinstance(message, WriteState):
            self.say(StateWritten(self.lineage, message.path, self.state.save(message.path)))
        elif isinstance(message, Founded):
            self.state.move_to(message.lineage, message.epoch)
            super().take(message)
        elif isinstance(message, OrderToSign):
            self.order = message.order
            self.say(GiveOrder(message.order, self.signer.sign("order", message.digest)))
        else:
            super().take(message)
            return
        self.world.note()

    def load(self, message: Any) -> None:
        self.loads.append(message)
        self.sketch = 0.0
        self.state.load(message.path, message.lineage, message.epoch)
        self.parameters = self.state.parameters[0].detach().clone()
        self.lineage, self.epoch = message.lineage, message.epoch
        for step in message.steps:
            self.step(step)
        self.at(self.lineage, self.epoch)

    def step(self, step: StepOf) -> None:
        if step.parent != self.lineage:
            self.world.faults.append(f"{self.name}: step {step.epoch} does not follow epoch {self.epoch}")
        gradient = torch.zeros(ELEMENTS)
        answers = [(cells, path.read_bytes()) for cells, path in step.answers]
        for cells, data in answers:
            for cell, values in decode_answer(self.state.codec, cells, data).items():
                gradient[self.layout.cell(cell)] = values
        if step.is_step:
            self.state.step([(slice(None), gradient)])
            before, self.state.codec = self.state.codec, self.state.codec.after(answers)
            self.missing += bool(step.missing)
            turned = before.state_tensors()["sides"] != self.state.codec.state_tensors()["sides"]
            if any(turned[cell] and step.missing >> cell & 1 for cell in range(node_world.CELLS)):
                self.world.faults.append("a cell that the step has not was turned")
        self.state.move_to(step.lineage, step.epoch)
        self.parameters = self.state.parameters[0].detach().clone()
        self.lineage, self.epoch = step.lineage, step.epoch
        self.world.check_step(step, gradient, self.parameters)
        self.check_whole_state()

    def check_whole_state(self) -> None:
        """Equal lineages are equal states, with what the codec goes by."""
        digest = self.state.digest()
        if self.world.digests.setdefault(self.lineage, digest) != digest:
            self.world.faults.append("equal lineages, and other bases")

    def deliver(self, samples: int | None = None) -> int:
        samples = samples or self.samples
        slot, mark = self.free.pop(0), self.world.mark(self.name, samples)
        numbers = torch.Generator().manual_seed(mark)
        self.slots.view(slot).add_(torch.randn(ELEMENTS, generator=numbers), alpha=samples)
        self.say(Delivered(slot, samples, self.lineage, (str(mark),)))
        return mark

    def checkpoint(self) -> tuple[bytes, Any, bytes]:
        """Keep the state of now."""
        path = self.folder / f"kept-{self.epoch}"
        digest = self.state.save(path)
        return self.lineage, path, digest

    def is_back(self, lineage: bytes) -> bool:
        return any(load.reason == "rollback" and load.lineage == lineage for load in self.loads)


@pytest.fixture(autouse=True)
def world_of_low_rank(tmp_path, monkeypatch):
    """The monitor's keys; all peers are as here."""

    def exchange(peer, line, layout, **settings):
        return Exchange(peer, line, layout, **settings, sent=ErrorFeedback(tmp_path / "sent" / peer, layout))

    folder = KeyFolder(tmp_path / "keys")
    monkeypatch.setattr(node_world, "Signatures", partial(Signatures, trust=Trust.of("r", folder.create("r"))))
    monkeypatch.setattr(node_world, "Peer", Peer)
    monkeypatch.setattr(node_world, "layout", layout)
    monkeypatch.setattr(node_world, "Exchange", exchange)
    monkeypatch.setattr(node_world.World, "digests", {}, raising=False)
    return folder


async def trio(world, epoch: int = 3):
    peers = [world.peer("a", founds=True), world.peer("b"), world.peer("c")]
    await world.all_at(epoch)
    return peers


async def ends_equal(world, *peers) -> None:
    """All come to one state, and their nodes encode by it."""
    await world.quiet(*peers)
    peers = peers or tuple(world.alive)
    assert len({peer.state.digest() for peer in peers}) == 1
    for peer in peers:
        assert peer.parameters.any()
        own = peer.engine._layout.here.result(60).state_tensors()
        assert all(torch.equal(own[name], tensor) for name, tensor in peer.state.codec.state_tensors().items())
        peer.check_ledger()


def test_all_have_equal_bases_also_where_cells_are_missing(tmp_path):
    """A reducer dies in a round: the cells of its slice keep their bases, and come later."""

    async def story(world):
        a, b, c = await trio(world)
        began = ("written", lambda r: isinstance(r, LedgerRecord) and any(each.in_flight for each in r.live))
        while True:
            await c.dies_when(*began)
            here = a.epoch
            await world.until(lambda here=here: (a.missing and b.missing) or a.epoch > here + 3)
            if a.missing and b.missing:
                break
            await c.restart()  # the others heard of its death before the round began
            await world.all_at(a.epoch + 2)
        await c.restart()
        await world.until(lambda: c.lineage is not None)
        await world.all_at(a.epoch + 4)
        await ends_equal(world)

    play(tmp_path, story)


def test_a_joiner_takes_the_bases_with_the_state_and_goes_on_with_the_log(tmp_path):
    async def story(world):
        await trio(world, 6)
        d = world.peer("d")
        await world.until(lambda: d.ledger.committed > 0)
        assert d.loads[0].reason == "joined"
        await ends_equal(world)

    play(tmp_path, story)


def test_who_comes_at_the_beginning_makes_the_bases_itself(tmp_path):
    async def story(world):
        a, b = world.peer("a", founds=True, trains=False), world.peer("b", trains=False)
        await world.until(lambda: b.lineage is not None)
        assert not b.loads, "nothing was downloaded"
        a.trains = b.trains = True
        await world.all_at(4)
        await ends_equal(world)

    play(tmp_path, story)


@pytest.mark.parametrize(
    "moment",
    [
        ("written", lambda record: isinstance(record, HeadRecord)),  # and before its step
        ("said", lambda body: isinstance(body, Vote)),
    ],
)
def test_a_peer_that_is_killed_goes_on_with_the_bases_of_its_log(tmp_path, moment):
    async def story(world):
        a, b, c = await trio(world, 5)
        await b.dies_when(*moment)
        at = max(a.epoch, c.epoch)
        await b.restart()
        await world.until(lambda: b.lineage is not None)
        assert b.loads[0].reason == "restart"
        await world.all_at(at + 3)
        await ends_equal(world)

    play(tmp_path, story)


def test_a_peer_that_was_away_replays_the_bases_of_what_it_missed(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        c.kill()
        gone_at = c.head.epoch
        await world.all_at(gone_at + 6, a, b)
        await c.restart()
        await world.until(lambda: c.lineage is not None and c.epoch >= gone_at + 6)
        await ends_equal(world)

    play(tmp_path, story)


def test_a_peer_whose_parameters_are_damaged_takes_bases_of_others_too(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        tensors = b.state.codec.state_tensors()
        b.state.codec = b.state.codec.with_state({**tensors, "bases": -tensors["bases"]})
        b.sketch = 1.0
        b.check_whole_state = lambda: None
        b.world.check_step = lambda *about: None
        b.world.check_state = lambda *about: None
        await world.until(lambda: b.loads and b.loads[-1].reason == "damaged")
        await world.all_at(b.epoch + 3)
        await ends_equal(world)

    play(tmp_path, story, fetch_patience=60.0)  # another load would mend the damage


def test_two_branches_end_with_the_bases_of_one(tmp_path):
    async def story(world):
        a, b = world.peer("a", trains=False), world.peer("b", trains=False)
        for peer in (a, b):
            peer.say(node_world.Found())
        await world.until(lambda: a.lineage is not None and b.lineage is not None)
        assert a.lineage != b.lineage
        a.trains = b.trains = True
        await world.until(lambda: a.epoch > 3 and b.epoch > 3 and b.head.lineage in a.engine.core.log)
        await ends_equal(world)

    play(tmp_path, story)


def test_an_order_brings_the_bases_of_its_state_back(tmp_path, world_of_low_rank, monkeypatch):
    """One peer gets the state late: meanwhile it encodes nothing, and the others do not wait for it."""

    async def story(world):
        a, b, c = await trio(world, 4)
        a.signer = world_of_low_rank.signer("monitor")
        kept = a.checkpoint()
        await world.all_at(a.epoch + 5)
        may_fetch = refuse_checkpoints(monkeypatch, c)
        a.say(PrepareOrder(*kept))
        await world.until(lambda: a.is_back(kept[0]) and b.is_back(kept[0]))
        await world.all_at(a.order.epoch + 3, a, b)
        assert not c.is_back(kept[0]) and c.engine._layout.here is None
        may_fetch.append(True)
        await world.until(lambda: c.is_back(kept[0]))
        await world.all_at(a.epoch + 3)
        await ends_equal(world)

    play(tmp_path, story, fetch_patience=60.0)  # else it takes a snapshot on a busy machine


# --- a state's file ---


def moved(steps: int = 2) -> TrainingState:
    """A state behind some steps."""
    made = state()
    for step in range(steps):
        vector = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(step))
        answers = []
        for cell in range(node_world.CELLS):
            data = made.codec.encode_cell(cell, vector[made.codec.cell(cell)])
            answers.append((1 << cell, len(data).to_bytes(4, "little") + data))
        made.step([(slice(None), vector)])
        made.codec = made.codec.after(answers)
        made.move_to(hashlib.sha256(bytes([step])).digest(), step + 1)
    return made


def test_a_states_file_carries_the_bases(tmp_path):
    kept, other = moved(3), state()
    kept.save(tmp_path / "state")
    assert other.digest() != kept.digest()
    other.load(tmp_path / "state", kept.lineage, kept.epoch)
    assert other.digest() == kept.digest()
    assert all(name == "vector" or name.startswith("optimizer/") for name in kept.named()), "no part of the model"


def test_a_checkpoint_that_a_run_begins_with_begins_the_bases_anew():
    """Its peers begin where a newcomer does, that makes what the swarm's first step needs itself."""
    kept, other = moved(), state()
    tensors, about = kept.named(), kept.about()
    other.take(["vector"], tensors, about)
    assert torch.equal(other.parameters[0], kept.parameters[0])
    first = state().codec.state_tensors()
    assert all(torch.equal(first[name], tensor) for name, tensor in other.codec.state_tensors().items())
    state().take(["vector"], {"vector": tensors["vector"]}, about)  # also one of another codec


@pytest.mark.parametrize("name", ["bases", "sides"])
def test_a_strangers_bases_are_looked_at(tmp_path, name):
    kept = moved()
    tensors = {key: tensor.clone() for key, tensor in kept.named().items()}
    found = tensors[f"optimizer/gradient_codec/{name}"]
    found += 1
    kept.write(tmp_path / "bad", tensors, kept.about())
    before = kept.digest()
    with pytest.raises(UnusableState, match="gradients"):
        kept.check(tmp_path / "bad")
    with pytest.raises(UnusableState):
        kept.load(tmp_path / "bad", kept.lineage, kept.epoch)
    assert kept.digest() == before
    del tensors[f"optimizer/gradient_codec/{name}"]
    with pytest.raises(KeyError):
        kept.write(tmp_path / "bad", tensors, kept.about())
