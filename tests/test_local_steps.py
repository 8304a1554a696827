"""The step that the swarm takes by the mean way of its peers."""

from __future__ import annotations

import pytest
import torch

from volunteer_kit.optim.outer import OuterNesterov

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
