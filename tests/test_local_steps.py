"""Steps between rounds: what is sent of them, and what becomes of those taken while a round is on its way."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from volunteer_kit.optim.outer import OuterNesterov
from volunteer_kit.swarm.local_steps import LocalSteps, LocalStepsConfig

SGD = partial(torch.optim.SGD, lr=0.5)


def make(batch_size=2, optimizer=SGD, scheduler=None, epoch=lambda: 0):
    own = [torch.nn.Parameter(torch.full((3,), 1.0)), torch.nn.Parameter(torch.zeros(2, 2))]
    shared = [parameter.detach().clone() for parameter in own]
    return LocalSteps(LocalStepsConfig(batch_size, optimizer, scheduler), own, shared, epoch), own, shared


def ones(own, factor=1.0):
    return [factor * torch.ones_like(parameter) for parameter in own]


def test_a_step_is_of_the_mean_over_its_batch():
    steps, own, _ = make(batch_size=4)
    steps.add(ones(own, 1.0), 1)
    steps.add(ones(own, 5.0), 1)
    assert steps.taken == 0 and torch.equal(own[0], torch.full((3,), 1.0))
    steps.add(ones(own, 3.0), 2)  # (1 + 5 + 2 * 3) / 4 = 3
    assert steps.taken == 1
    assert torch.allclose(own[0], torch.full((3,), 1.0 - 0.5 * 3.0))
    steps.add(ones(own, 1.0), 4)  # nothing of the last batch is left in this one
    assert torch.allclose(own[0], torch.full((3,), -1.0))


def test_the_way_is_from_where_all_set_out_to_where_we_are():
    steps, own, shared = make()
    for _ in range(3):
        steps.add(ones(own), 2)
    way = steps.way()
    assert torch.allclose(way[0], torch.full((3,), 1.5)) and torch.allclose(way[1], torch.full((2, 2), 1.5))
    for tensor, moved in zip(shared, way, strict=True):
        tensor.sub_(moved)  # the outer step: all the way
    steps.arrive()
    assert all(torch.equal(a, b) for a, b in zip(own, shared, strict=True))
    assert not any(moved.any() for moved in steps.way())


def test_steps_taken_during_a_round_are_on_top_of_it_and_in_the_next():
    steps, own, shared = make()
    steps.add(ones(own), 2)
    steps.way()
    steps.add(ones(own, 2.0), 2)  # the round is on its way
    for tensor in shared:
        tensor.add_(10.0)
    steps.arrive()
    assert torch.allclose(own[0], torch.full((3,), 11.0 - 1.0))
    steps.add(ones(own), 2)
    assert torch.allclose(steps.way()[0], torch.full((3,), 1.5))  # 1.0 of then, 0.5 since; not what was sent before


def test_what_arrives_between_rounds_costs_no_step():
    """A round of state averaging, say."""
    steps, own, shared = make()
    steps.add(ones(own), 2)
    for tensor in shared:
        tensor.add_(10.0)
    steps.arrive()
    assert torch.allclose(own[0], torch.full((3,), 10.5))
    assert torch.allclose(steps.way()[0], torch.full((3,), 0.5))


def test_of_a_model_that_was_given_up_nothing_is_kept():
    steps, own, shared = make()
    steps.add(ones(own), 2)
    steps.add(ones(own, 100.0), 1)
    shared[0].fill_(7.0)
    steps.restart()
    steps.arrive()
    assert torch.equal(own[0], torch.full((3,), 7.0)) and not steps.way()[0].any()
    steps.add(ones(own), 2)
    assert torch.equal(own[0], torch.full((3,), 6.5))


@pytest.mark.parametrize("breaks", ["before a round", "during a round"])
def test_steps_that_break_our_model_are_given_up_and_nobody_hears_of_them(breaks):
    adam = partial(torch.optim.Adam, lr=0.5)
    steps, own, shared = make(optimizer=adam)
    steps.add(ones(own), 2)
    if breaks == "during a round":
        assert all(moved.any() for moved in steps.way())
    steps.add(ones(own, math.inf), 2)
    assert not torch.isfinite(own[0]).all()
    if breaks == "before a round":
        assert not any(moved.any() for moved in steps.way())
    for tensor in shared:
        tensor.add_(10.0)
    steps.arrive()
    assert all(torch.equal(a, b) for a, b in zip(own, shared, strict=True))
    steps.add(ones(own), 2)  # nor is anything of it left in the statistics
    assert torch.allclose(steps.way()[0], torch.full((3,), 0.5))


def test_who_is_too_slow_for_a_whole_step_gives_what_it_has():
    steps, own, _ = make(batch_size=32)
    steps.add(ones(own, 2.0), 3)
    assert steps.taken == 0
    assert torch.allclose(steps.way()[0], torch.full((3,), 1.0)) and steps.taken == 1
    assert not steps.way()[0].any()  # with nothing new there is nothing to give
    steps.add(ones(own), 32)
    steps.add(ones(own), 3)
    steps.way()
    assert steps.taken == 2  # these three are of the next step, as ever


def test_who_goes_back_begins_with_statistics_of_nothing():
    momentum = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    steps, own, _ = make(optimizer=momentum)
    steps.add(ones(own), 2)
    steps.restart(with_statistics=True)
    steps.arrive()
    steps.add(ones(own), 2)
    assert torch.allclose(own[0], torch.full((3,), 0.5))  # with momentum it would be 0.05


def test_the_inner_rate_follows_the_swarms_epochs():
    now = [0]
    schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 1 / (1 + epoch))
    steps, own, _ = make(scheduler=schedule, epoch=lambda: now[0])
    steps.add(ones(own), 2)
    assert torch.equal(own[0], torch.full((3,), 0.5))
    now[0] = 4
    steps.add(ones(own), 2)
    assert torch.allclose(own[0], torch.full((3,), 0.5 - 0.1))


# --- the outer optimizer ---


@pytest.mark.parametrize("lr, momentum", [(0.7, 0.9), (1.0, 0.0)])
def test_the_outer_step_is_torchs_nesterov(lr, momentum):
    ours, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    outer = OuterNesterov([ours], lr=lr, momentum=momentum)
    reference = torch.optim.SGD([theirs], lr=lr, momentum=momentum, nesterov=momentum > 0)
    for number in range(5):
        gradient = torch.sin(torch.arange(6.0) + number)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        outer.step()
        reference.step()
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_outer_statistics_are_there_from_the_start_and_come_back_exactly():
    first, second = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    one, other = OuterNesterov([first]), OuterNesterov([second])
    assert torch.equal(one.state[first]["momentum"], torch.zeros(4))
    first.grad = torch.arange(4.0)
    one.step()
    other.load_state_dict(one.state_dict())
    assert torch.equal(other.state[second]["momentum"], torch.arange(4.0))


def test_a_mean_way_that_is_not_finite_is_not_taken():
    parameter = torch.nn.Parameter(torch.ones(2))
    outer = OuterNesterov([parameter])
    parameter.grad = torch.tensor([1.0, float("nan")])
    outer.step()
    assert torch.equal(parameter, torch.ones(2)) and not outer.state[parameter]["momentum"].any()


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"momentum": 1.0}, {"momentum": -0.1}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError):
        OuterNesterov([torch.nn.Parameter(torch.ones(1))], **settings)
