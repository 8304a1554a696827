"""Local steps of nodes: what rounds of them come to, beside DiLoCo's own formula."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from volunteer_kit.optim.outer import OuterNesterov
from volunteer_kit.swarm.codecs.registry import CODECS
from volunteer_kit.swarm.local_sgd import LocalStepsConfig
from volunteer_kit.swarm.node.local_training import LocalTraining
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.normalised import scales_of, unit_of
from volunteer_kit.swarm.rounds.parts import mean_of, weights_of
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.entries import Entry

CELLS, ALL, ELEMENTS = 4, 0b1111, 12
LAYOUT = Layout([torch.Size([2, 4]), torch.Size([4])], CELLS, CODECS["none"])
SGD = partial(torch.optim.SGD, lr=0.5)


def start() -> list[torch.nn.Parameter]:
    values = torch.linspace(-1.0, 1.0, ELEMENTS)
    return [torch.nn.Parameter(values[:8].view(2, 4).clone()), torch.nn.Parameter(values[8:].clone())]


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


class Peer:
    """A member: its model, and contributions that no step has yet. Its loss is 1/2 |curvature (w - optimum)|^2."""

    def __init__(self, name: str, swarm: Swarm, optimum: torch.Tensor, optimizer=SGD, batch_size: int = 8):
        self.name, self.swarm, self.optimum = name, swarm, optimum
        self.own = start()
        config = LocalStepsConfig(batch_size, optimizer)
        self.local = LocalTraining(config, self.own, lambda: swarm.epoch, unit_of(swarm.target))
        self.live: dict[int, tuple[Share, torch.Tensor]] = {}  # contribution -> what is pending of it, and its slot
        self.numbers = 0

    def gather(self, samples: int, gradients=None) -> None:
        """A microbatch."""
        if gradients is None:
            gradients = [g.view_as(p) for p, g in zip(self.own, self.gradient().split((8, 4)), strict=True)]
        self.local.gather(gradients, samples, 1.0, self.swarm.lineage, ())

    def gradient(self) -> torch.Tensor:
        return flat(self.own) - self.optimum

    def step(self) -> None:
        way = self.local.step()
        self.numbers += 1
        share = Share(self.name, self.numbers, self.swarm.epoch, way.samples, ALL)
        self.live[self.numbers] = (share, flat(way.tensors) * self.local.unit)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.gather(8)
            assert self.local.is_due
            self.step()


class Swarm:
    def __init__(self, target: int = 64, **outer: float):
        self.target, self.epoch = target, 0
        self.shared = start()
        self.optimizer = OuterNesterov(self.shared, **outer)
        self.peers: list[Peer] = []

    @property
    def lineage(self) -> bytes:
        return str(self.epoch).encode()

    def add(self, optimum, **settings) -> Peer:
        self.peers.append(Peer(str(len(self.peers)), self, torch.as_tensor(optimum).expand(ELEMENTS), **settings))
        return self.peers[-1]

    def cut(self) -> list[tuple[Peer, Share]]:
        """A round begins: what enters it."""
        return [(peer, share) for peer in self.peers for share, _ in peer.live.values()]

    def commit(self, entered: list[tuple[Peer, Share]], cells: int = ALL) -> None:
        """The step of these, but for the cells that no answer has."""
        shares = tuple(share._replace(cells=share.cells & cells) for _, share in entered if share.cells & cells)
        entry = Entry(
            0, 0, self.epoch, self.lineage, Ballot(0, "0"), b"", (), (Answer(cells, "0", b"", shares),), ALL & ~cells
        )
        scales, mean = scales_of(entry, CELLS, unit_of(self.target)), torch.zeros(ELEMENTS)
        for cell in LAYOUT.cells_of(cells):
            total = 0.0
            for peer in self.peers:
                own = [each for each in shares if each.peer == peer.name and each.cells >> cell & 1]
                if own:
                    weight = weights_of(LAYOUT, own, self.epoch)[cell]
                    slots = {number: slot for number, (_, slot) in peer.live.items()}
                    part = mean_of(LAYOUT, own, self.epoch, cell, slots.__getitem__)
                    mean[LAYOUT.cell(cell)] += weight * part
                    total += weight
            mean[LAYOUT.cell(cell)] *= scales[cell] / total if total else 0.0
        for parameter, gradient in zip(self.shared, mean.split((8, 4)), strict=True):
            parameter.grad = gradient.view_as(parameter)
        self.optimizer.step()
        self.epoch += 1
        for peer, share in entered:
            pending, slot = peer.live[share.number]
            done = share.cells & cells
            peer.local.settle(0, [(LAYOUT.cell(cell), slot[LAYOUT.cell(cell)]) for cell in LAYOUT.cells_of(done)])
            peer.live[share.number] = (pending._replace(cells=pending.cells & ~done), slot)
            if not pending.cells & ~done:
                del peer.live[share.number]
        for peer in self.peers:
            peer.local.put([parameter.detach() for parameter in self.shared])

    def ahead_of(self, peer: Peer) -> torch.Tensor:
        return flat(self.shared) - flat(peer.own)


def diloco(optima, optimizer, steps: int, epochs: int, **outer: float) -> torch.Tensor:
    """Algorithm 1 of arXiv:2311.08105, as it stands there."""
    shared = start()
    outer_optimizer = OuterNesterov(shared, **outer)
    models = [start() for _ in optima]
    inner = [optimizer(model) for model in models]
    for _ in range(epochs):
        ways = []
        for model, own, optimum in zip(models, inner, optima, strict=True):
            for mine, theirs in zip(model, shared, strict=True):
                mine.data.copy_(theirs.data)
            for _ in range(steps):
                gradient = flat(model) - optimum
                for parameter, part in zip(model, gradient.split((8, 4)), strict=True):
                    parameter.grad = part.view_as(parameter).clone()
                own.step()
            ways.append(flat(shared) - flat(model))
        for parameter, way in zip(shared, (sum(ways) / len(ways)).split((8, 4)), strict=True):
            parameter.grad = way.view_as(parameter)
        outer_optimizer.step()
    return flat(shared)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, lr=0.05), partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)],
    ids=["sgd", "adamw"],
)
def test_where_all_take_as_many_steps_it_is_diloco(optimizer):
    optima = [torch.full((ELEMENTS,), value) for value in (-2.0, 0.5, 4.0)]
    swarm = Swarm(target=8 * 5 * 3, lr=0.7, momentum=0.9)
    for optimum in optima:
        swarm.add(optimum, optimizer=optimizer)
    for _ in range(12):
        for peer in swarm.peers:
            peer.train(5)
        swarm.commit(swarm.cut())
        assert all(swarm.ahead_of(peer).abs().max() < 1e-5 for peer in swarm.peers)
    expected = diloco(optima, optimizer, 5, 12, lr=0.7, momentum=0.9)
    torch.testing.assert_close(flat(swarm.shared), expected, rtol=1e-4, atol=1e-5)


def test_a_peer_that_takes_more_steps_does_not_draw_the_others_to_its_optimum():
    """Ways that are averaged by samples end where a peer counts by the square of its speed: at 64/65 here."""
    swarm = Swarm(target=72, lr=1.0, momentum=0.0)
    fast = swarm.add(1.0, optimizer=partial(torch.optim.SGD, lr=0.01))
    slow = swarm.add(0.0, optimizer=partial(torch.optim.SGD, lr=0.01))
    for _ in range(400):
        fast.train(8)
        slow.train(1)
        swarm.commit(swarm.cut())
    assert flat(swarm.shared).sub(8 / 9).abs().max() < 0.01


def test_what_is_computed_during_a_round_stays_on_top():
    swarm = Swarm(lr=1.0, momentum=0.0)
    one, other = swarm.add(3.0), swarm.add(-3.0)
    one.train(1)
    other.train(1)
    entered = swarm.cut()
    before = flat(one.own)
    one.train(1)
    moved = before - flat(one.own)
    swarm.commit(entered)
    torch.testing.assert_close(swarm.ahead_of(one), moved)
    assert swarm.ahead_of(other).abs().max() < 1e-6
    swarm.commit(swarm.cut())
    assert swarm.ahead_of(one).abs().max() < 1e-6


def test_cells_of_a_lost_slice_stay_on_top_and_come_with_the_next_step():
    whole, lossy = (Swarm(lr=1.0, momentum=0.0) for _ in range(2))
    for swarm in (whole, lossy):
        for optimum in (3.0, -1.0):
            swarm.add(optimum)
        for peer in swarm.peers:
            peer.train(2)
    lossy.commit(lossy.cut(), cells=0b1101)
    lost = torch.zeros(ELEMENTS, dtype=torch.bool)
    lost[LAYOUT.cell(1)] = True
    for peer in lossy.peers:
        assert (lossy.ahead_of(peer)[lost].abs() > 0.1).all()
        assert lossy.ahead_of(peer)[~lost].abs().max() < 1e-6
    lossy.commit(lossy.cut())
    whole.commit(whole.cut())
    torch.testing.assert_close(flat(lossy.shared), flat(whole.shared))  # all are as late, so it goes as far
    assert all(lossy.ahead_of(peer).abs().max() < 1e-6 for peer in lossy.peers)


def test_a_late_way_weighs_less_and_is_counted_once():
    swarm = Swarm(lr=1.0, momentum=0.0)
    one, late = swarm.add(3.0), swarm.add(-1.0)
    late.train(1)
    for _ in range(2):
        one.train(1)
        swarm.commit([each for each in swarm.cut() if each[0] is one])
    way = swarm.ahead_of(late)
    assert way.abs().max() > 0
    one.train(1)
    fresh, before = swarm.ahead_of(one), flat(swarm.shared)
    swarm.commit(swarm.cut())
    torch.testing.assert_close(before - flat(swarm.shared), (fresh + way / 3) / (1 + 1 / 3))
    assert swarm.ahead_of(late).abs().max() < 1e-6 and not late.live


# --- one peer's steps ---


def test_a_step_is_of_the_mean_over_its_batch():
    peer = Swarm().add(0.0, batch_size=4)
    before = flat(peer.own)
    for value, samples in ((1.0, 1), (5.0, 1), (3.0, 2)):  # (1 + 5 + 2 * 3) / 4 = 3
        assert not peer.local.is_due
        peer.gather(samples, [torch.full_like(p, value) for p in peer.own])
    assert peer.local.is_due and peer.local.gathered == 4
    peer.step()
    torch.testing.assert_close(flat(peer.own), before - 0.5 * 3.0)
    assert peer.local.gathered == 0 and peer.local.taken == 1


def test_a_step_of_fewer_samples_goes_a_part_of_its_way():
    peer = Swarm().add(0.0, batch_size=8)
    before = flat(peer.own)
    peer.gather(2, [torch.ones_like(p) for p in peer.own])
    way = peer.local.step()
    assert way.samples == 2
    torch.testing.assert_close(flat(peer.own), before - 0.5 / 4)
    torch.testing.assert_close(flat(way.tensors), torch.full((ELEMENTS,), 0.5 / 4))


def test_a_peer_too_slow_for_a_step_in_an_epoch_steps_with_what_it_has():
    swarm = Swarm(lr=1.0, momentum=0.0)
    fast, slow = swarm.add(1.0), swarm.add(0.0, batch_size=64)
    steps = []
    for _ in range(6):
        fast.train(1)
        for _ in range(4):  # of 4 samples
            slow.gather(4)
            if slow.local.is_due:
                steps.append((swarm.epoch, slow.local.gathered))
                slow.step()
        swarm.commit(swarm.cut())
    assert steps[0][1] > 16, "what it had in the first epoch is not lost"
    assert {epoch for epoch, _ in steps} >= {2, 3, 4, 5}, "each round has something of it"
    assert sum(samples for _, samples in steps) + slow.local.gathered == 6 * 16


def test_a_microbatch_longer_than_an_epoch_is_a_step():
    swarm = Swarm(lr=1.0, momentum=0.0)
    fast, slow = swarm.add(1.0), swarm.add(0.0, batch_size=64)
    for epoch in range(9):
        fast.train(1)
        if epoch % 3 == 2:
            slow.gather(4)
            assert slow.local.is_due == (epoch > 2)
            if slow.local.is_due:
                slow.step()
        swarm.commit(swarm.cut())
    assert slow.local.gathered == 0


def test_the_schedule_follows_the_swarms_epochs():
    swarm = Swarm()
    local = LocalStepsConfig(
        8, SGD, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    )
    peer = swarm.add(0.0)
    peer.local = LocalTraining(local, peer.own, lambda: swarm.epoch, 64.0)
    swarm.epoch = 4
    before = flat(peer.own)
    peer.gather(8, [torch.ones_like(p) for p in peer.own])
    peer.step()
    torch.testing.assert_close(flat(peer.own), before - 0.5 / 5)


def test_what_had_no_gradient_is_left_alone():
    peer = Swarm().add(0.0, optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5), batch_size=4)
    untouched = peer.own[1].detach().clone()
    for _ in range(2):
        peer.gather(2, [torch.ones(2, 4), None])
    way = peer.local.step()
    assert torch.equal(peer.own[1], untouched) and not way.tensors[1].any() and way.tensors[0].all()


def test_gradients_are_taken_without_their_scale():
    peer = Swarm().add(0.0, batch_size=2)
    before = flat(peer.own)
    peer.local.gather([torch.full_like(p, 512.0) for p in peer.own], 2, 512.0, b"", ())
    peer.local.step()
    torch.testing.assert_close(flat(peer.own), before - 0.5)


def test_a_step_that_is_not_finite_has_no_way_and_a_new_life_nothing_of_the_old_one():
    swarm = Swarm()
    peer = swarm.add(0.0, optimizer=partial(torch.optim.Adam, lr=0.5))
    peer.train(1)
    share, slot = peer.live[1]
    peer.gather(8, [torch.full_like(p, math.inf) for p in peer.own])
    assert peer.local.step().tensors == ()
    peer.local.begin_anew()
    peer.local.put([parameter.detach() for parameter in swarm.shared])
    assert torch.equal(flat(peer.own), flat(swarm.shared)) and peer.local.life == 1
    peer.local.settle(0, [(slice(0, ELEMENTS), slot)])  # what was on its way then
    peer.local.put([parameter.detach() for parameter in swarm.shared])
    assert torch.equal(flat(peer.own), flat(swarm.shared))
    peer.train(1)
    assert torch.isfinite(flat(peer.own)).all()
