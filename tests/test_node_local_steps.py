"""Local steps of a peer with its node: what it delivers, and what its model is ahead by, whatever fails."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.node_world import CELLS, MARKS, Peer, play
from tests.test_node_member import BORN, ELEMENTS, LATER, NEXT, Scene, written
from volunteer_kit.optim.outer import OuterNesterov
from volunteer_kit.swarm.local_sgd import LocalStepsConfig
from volunteer_kit.swarm.node.talk import Delivered, Granted, Load, Progress, Step, StepOf, Stepped
from volunteer_kit.swarm.sync.contributions import Cause
from volunteer_kit.swarm.sync.messages import Begin

UNIT = 16.0  # of the scene's target_batch_size
RATE = 0.5  # of the inner optimizer
WHOLE = 2**5 - 1  # all cells of the scene


class Training(Scene):
    """A peer whose steps take 8 samples; the swarm goes all the way to their mean."""

    def __init__(self, folder, batch_size: int = 8, **sync):
        super().__init__(folder, **sync)
        self.member = self.new_member(
            spec=replace(self.new_member.keywords["spec"], averages_ways=True),
            optimizer=partial(OuterNesterov, lr=1.0, momentum=0.0),
            scheduler=None,
            local_steps=LocalStepsConfig(batch_size, partial(torch.optim.SGD, lr=RATE)),
        )

    def shared_step(self, lineage=NEXT, parent=BORN, epoch=1, way=0.0, scale=1.0, cells=WHOLE, **about) -> Step:
        """A step of the swarm whose mean is the same everywhere."""
        mean = torch.full((ELEMENTS,), way / scale)
        step = self.step_of(lineage, parent, epoch, mean, cells, missing=WHOLE & ~cells, scales=(scale,) * 5)
        return Step(step, **about)

    def end(self) -> None:
        """The rest that it delivers is taken up."""
        send = self.link.send

        def answered(message) -> None:
            send(message)
            if isinstance(message, Delivered):
                self.link.say(Granted(3))

        self.link.send = answered
        super().end()

    def taken(self, *steps: Step) -> None:
        self.link.say(*steps)
        assert self.link.hear(Stepped).lineage == steps[-1].step.lineage


@pytest.fixture
def make(tmp_path):
    made = []

    def make(name: str = "a", **settings) -> Training:
        made.append(Training(tmp_path / name, **settings))
        return made[-1]

    yield make
    for scene in made:
        scene.end()


@pytest.fixture
def peer(make) -> Training:
    scene = make()
    scene.found()
    return scene


def filled(peer: Training, slot: int) -> torch.Tensor:
    return peer.slots.view(slot) / UNIT


def test_microbatches_become_a_step_and_its_way_a_contribution(peer):
    before = peer.flat()
    assert peer.microbatch(1.0, samples=4, names=["a", "b", "c", "d"])
    assert torch.equal(peer.flat(), before) and peer.member.progress().own_samples == 4
    assert not [each for each in peer.link.has_said() if isinstance(each, Delivered)]
    assert peer.microbatch(3.0 * 8, samples=4, scale=8.0, names=["e", "f", "g", "h"])
    assert peer.link.hear(Delivered) == Delivered(0, 8, BORN, tuple("abcdefgh"))
    torch.testing.assert_close(before - peer.flat(), torch.full((ELEMENTS,), RATE * 2.0))
    torch.testing.assert_close(filled(peer, 0), before - peer.flat())
    assert peer.member.progress().own_samples == 0


def test_the_mean_is_multiplied_with_the_scale_of_each_cell(peer):
    before = peer.flat()
    gradient = torch.arange(10.0)
    step = peer.step_of(gradient=gradient, scales=(1.0, 2.0, 0.5, 0.0, 4.0))
    peer.taken(Step(step))
    peer.member.await_step(60.0)
    scale = torch.tensor([1.0, 2.0, 0.5, 0.0, 4.0]).repeat_interleave(2)
    torch.testing.assert_close(before - peer.flat(), gradient * scale)


def test_the_model_is_the_swarms_with_what_no_step_has_yet_on_top(peer):
    before = peer.flat()
    peer.microbatch(1.0, samples=8)  # enters the step, but for two cells
    first = peer.link.hear(Delivered)
    peer.microbatch(2.0, samples=8)  # does not
    cells = 0b00111
    peer.taken(peer.shared_step(way=0.25, cells=cells, done=((first.slot, cells),)))
    peer.microbatch(4.0, samples=4)  # of a step to come: the model swaps
    expected = before.clone()
    expected[:6] -= 0.25  # the step
    expected[6:] -= RATE * 1.0
    expected -= RATE * 2.0
    torch.testing.assert_close(peer.flat(), expected)
    peer.link.say(Granted(2))
    second = peer.link.hear(Delivered)
    torch.testing.assert_close(filled(peer, second.slot), torch.full((ELEMENTS,), RATE * 2.0))
    peer.taken(
        peer.shared_step(LATER, NEXT, 2, done=((first.slot, WHOLE & ~cells), (second.slot, WHOLE)))
    )
    peer.member.await_step(60.0)
    shared = before.clone()
    shared[:6] -= 0.25
    torch.testing.assert_close(peer.flat(), shared)


def test_a_step_is_of_the_lineage_of_its_first_gradient(peer):
    peer.microbatch(samples=4)
    peer.taken(peer.shared_step())
    peer.microbatch(samples=2)
    assert peer.member.lineage == NEXT
    peer.microbatch(samples=2)
    assert peer.link.hear(Delivered).lineage == BORN, "it counts as late as it is"
    peer.microbatch(samples=8)
    peer.link.say(Granted(2))
    assert peer.link.hear(Delivered).lineage == NEXT


@pytest.mark.parametrize("reason", ["rollback", "behind", "damaged"])
def test_on_a_state_that_is_given_to_it_nothing_stays_on_top(peer, reason):
    state = written(peer)
    shared = peer.flat()
    peer.microbatch(1.0, samples=8)
    first = peer.link.hear(Delivered)
    peer.microbatch(1.0, samples=4, names=["rest"])
    peer.link.say(Granted(2))
    peer.link.say(Load(BORN, 0, state.path, (), reason))
    assert peer.link.hear(Stepped).lineage == BORN
    peer.member.await_step(0.0)
    rest = peer.link.hear(Delivered)
    assert (rest.samples, rest.lineage, rest.names, rest.life) == (4, BORN, ("rest",), 0), "nothing is lost silently"
    assert torch.equal(peer.flat(), shared)
    peer.link.say(Granted(3))
    peer.microbatch(2.0, samples=8)
    new = peer.link.hear(Delivered)
    assert (new.samples, new.life) == (8, 1)
    peer.taken(peer.shared_step(way=0.0, done=((first.slot, WHOLE),), life=0))
    peer.member.await_step(60.0)
    torch.testing.assert_close(peer.flat(), shared - RATE * 2.0)
    peer.taken(peer.shared_step(LATER, NEXT, 2, way=0.0, done=((new.slot, WHOLE),), life=1))
    peer.member.await_step(60.0)
    torch.testing.assert_close(peer.flat(), shared)


def test_a_step_that_is_not_finite_is_lost_and_the_model_begins_anew(peer):
    shared = peer.flat()
    peer.microbatch(1.0, samples=8)
    first = peer.link.hear(Delivered)
    assert peer.microbatch(1e18, samples=4, scale=1e-30, names=["a"]) is True
    assert peer.microbatch(1e18, samples=4, scale=1e-30, names=["b"]) is False
    assert torch.equal(peer.flat(), shared)
    assert peer.member.expired == {"not finite": 8}
    peer.taken(peer.shared_step(done=((first.slot, WHOLE),)))
    peer.member.await_step(60.0)
    assert torch.equal(peer.flat(), shared), "of its way nothing is on top any more"
    peer.link.say(Granted(2))
    peer.microbatch(1.0, samples=8)
    assert peer.link.hear(Delivered).life == 1


def test_who_leaves_steps_with_the_rest(make):
    peer = make()
    peer.found()
    peer.link.say(Progress("collecting", 0, 0, 0, 1, False, 0.0, 0, 0))
    before = peer.flat()
    peer.microbatch(2.0, samples=2)
    peer.member.stop_waiting()
    done = threading.Event()
    threading.Thread(target=lambda: (peer.member.settle(), done.set()), daemon=True).start()
    last = peer.link.hear(Delivered)
    assert last.samples == 2
    torch.testing.assert_close(filled(peer, last.slot), torch.full((ELEMENTS,), RATE * 2.0 * 2 / 8))
    peer.link.say(Granted(2))
    assert done.wait(60.0)
    torch.testing.assert_close(peer.flat(), before - RATE * 2.0 * 2 / 8)


def test_a_node_that_averages_gradients_takes_no_ways(make):
    with pytest.raises(ValueError, match="average ways"):
        peer = make()
        peer.new_member(local_steps=LocalStepsConfig(8, partial(torch.optim.SGD, lr=RATE)))


# --- engines: a model is ahead by exactly what its swarm has not settled ---


class Stepper(Peer):
    """A peer whose deliveries are ways: it keeps account of what its model is ahead by, as the node tells it."""

    def __init__(self, world, name: str, **settings):
        super().__init__(world, name, len(world.peers), **settings)
        self.spec = replace(self.spec, averages_ways=True)
        self.moved: list[tuple[int, int]] = []  # marks and samples of the model's life
        world.peers[name] = self
        self.start()

    def start(self) -> None:
        self.ahead, self.life, self.moved, self.settled = torch.zeros(CELLS * MARKS), 0, [], 0
        self.missed = 0  # cells that a step lacked
        super().start()

    def deliver(self, samples: int | None = None) -> int:
        samples = samples or self.samples
        slot, mark = self.free.pop(0), self.world.mark(self.name, samples)
        for cell in range(CELLS):
            self.slots.view(slot)[cell * MARKS + mark] += samples
            self.ahead[cell * MARKS + mark] += samples
        self.moved.append((mark, samples))
        self.say(Delivered(slot, samples, self.lineage, (str(mark),), self.life))
        return mark

    def take(self, message) -> None:
        if isinstance(message, Step) and message.life == self.life:
            for slot, cells in message.done:
                for cell in self.layout.cells_of(cells):
                    place = self.layout.cell(cell)
                    self.ahead[place] -= self.slots.view(slot)[place]
                    self.settled += 1
        super().take(message)
        if isinstance(message, Step):
            self.check(message.step)

    def load(self, message: Load) -> None:
        super().load(message)
        self.life, self.moved = self.life + 1, []
        self.ahead.zero_()

    def check(self, step: StepOf) -> None:
        """Exactly what is in no step up to this one is on top, in each cell."""
        self.missed |= step.missing
        if step.is_step and (len(step.scales) != CELLS or min(step.scales) < 0 or not any(step.scales)):
            self.world.faults.append(f"{self.name}: scales {step.scales}")
        if self.ledger.expired:
            return  # what expires is off the top before or behind a step
        entered = self.world.entered(SimpleNamespace(lineage=self.lineage))
        expected = torch.zeros(CELLS, MARKS)
        for mark, samples in self.moved:
            expected[:, mark] = samples * (entered[:, mark] == 0)
        if not torch.equal(self.ahead.view(CELLS, MARKS), expected):
            wrong = (self.ahead.view(CELLS, MARKS) != expected).nonzero().tolist()[:4]
            self.world.faults.append(f"{self.name} at {self.epoch}: (cell, mark) {wrong} of {self.moved[-4:]}")


async def trio(world) -> list[Stepper]:
    peers = [Stepper(world, "a", founds=True), Stepper(world, "b"), Stepper(world, "c")]
    await world.all_at(3)
    return peers


async def is_quiet(world, *peers: Stepper) -> None:
    await world.quiet()
    world.check_books()
    for peer in peers:
        assert peer.settled > 0
        assert peer.ledger.expired or not peer.ahead.any(), "all of it is in a step"


def test_ways_are_on_top_until_a_step_has_them(tmp_path):
    async def story(world):
        peers = await trio(world)
        await world.all_at(15)
        await is_quiet(world, *peers)
        await world.until(lambda: not any(peer.engine._gradients._borrowed for peer in peers))  # none is held for ever

    play(tmp_path, story)


def test_also_when_a_slice_is_lost_and_its_reducer_comes_back(tmp_path):
    async def story(world):
        a, b, c = await trio(world)

        def kills(body) -> bool:
            """A round begins in which c reduces a slice: it dies, and nobody has its answer."""
            if c.runs and isinstance(body, Begin) and any(reducer == c.id for reducer, _ in body.round.slices):
                c.kill()
            return False

        a.upon.append(("said", kills))
        b.upon.append(("said", kills))
        while not (a.missed and b.missed):
            await world.until(lambda: not c.runs)
            here = a.epoch
            await world.until(lambda here=here: (a.missed and b.missed) or a.epoch > here + 3)
            if not (a.missed and b.missed):  # the round failed, or nothing was lost with it
                await c.restart()
        a.upon.clear()
        b.upon.clear()
        await c.restart()
        await world.until(lambda: c.lineage is not None and c.epoch >= a.epoch)
        await world.all_at(a.epoch + 4)
        await is_quiet(world, a, b)

    play(tmp_path, story)


def test_also_when_a_part_is_late(tmp_path):
    """The rounds go on without it; the slots that its encoder reads are nobody else's."""

    async def story(world):
        a, b, c = await trio(world)
        stuck, let_go = world.hold_parts(b)
        await world.until(lambda: stuck)
        await world.all_at(a.epoch + 3, a, c)
        let_go.set()
        await world.all_at(a.epoch + 3)
        await is_quiet(world, a, b, c)

    play(tmp_path, story, exchange_ceiling=1.0, exchange_floor=0.5)


def test_a_peer_that_takes_another_state_is_ahead_by_nothing(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        b.sketch = 1.0
        await world.until(lambda: b.loads and b.loads[-1].reason == "damaged")
        await world.all_at(b.epoch + 6)
        assert b.life > 0
        await is_quiet(world, a, b, c)

    play(tmp_path, story, fetch_patience=60.0)  # another load would mend the damage


def test_what_is_too_late_is_taken_off_the_top(tmp_path):
    async def story(world):
        a, b, c = await trio(world)
        await world.until(lambda: b.free)
        old = b.lineage
        slot, mark = b.free.pop(0), world.mark("b", 8)
        await world.all_at(b.epoch + 4)
        for cell in range(CELLS):
            b.slots.view(slot)[cell * MARKS + mark] += 8
            b.ahead[cell * MARKS + mark] += 8
        b.say(Delivered(slot, 8, old, (str(mark),), b.life))
        await world.until(lambda: b.ledger.expired.get(Cause.STALE))
        await world.until(lambda: not b.ahead.view(CELLS, MARKS)[:, mark].any())
        await world.quiet()

    play(tmp_path, story, max_staleness=2)
