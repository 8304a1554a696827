"""The bound holds for every step that real LAMB takes, whatever the gradients, and is not much wider than need be."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from volunteer_kit.optim import LambStepBound, OptimizerConfig, build_optimizer_factory

SIZE_8BIT = 65_536


def run_lamb(config: OptimizerConfig, tensors, gradients, epoch0: int, epochs: int, spared: int):
    """Real steps at the schedule's rates. :returns: distance of each tensor from where it began."""
    make, schedule = build_optimizer_factory(config)
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in tensors]
    groups = [
        {"params": parameters[spared:], "weight_decay": config.weight_decay},
        {"params": parameters[:spared], "weight_decay": 0.0},
    ]
    optimizer = make([group for group in groups if group["params"]])
    scheduler = schedule(optimizer)
    for _ in range(epoch0):
        scheduler.step()
    for number in range(epochs):
        for parameter in parameters:
            parameter.grad = gradients(number, parameter)
        optimizer.step()
        scheduler.step()
    return [(p.detach().double() - t.double()).norm().item() for p, t in zip(parameters, tensors, strict=True)]


@st.composite
def cases(draw):
    warmup = draw(st.integers(0, 20))
    return {
        "config": OptimizerConfig(
            lr=draw(st.sampled_from([1e-4, 2.5e-3, 0.05, 0.5])),
            betas=draw(st.sampled_from([(0.9, 0.96), (0.0, 0.0), (0.99, 0.5), (0.9, 0.999)])),
            eps=draw(st.sampled_from([1e-12, 1e-6, 1e-2])),
            weight_decay=draw(st.sampled_from([0.0, 0.045, 1.0])),
            max_grad_norm=draw(st.sampled_from([None, 4.0])),
            clamp_value=draw(st.sampled_from([1e-3, 1.0, 1e4])),
            debias=draw(st.booleans()),
            statistics_bits=draw(st.sampled_from([8, 32])),
            warmup_epochs=warmup,
            total_epochs=warmup + draw(st.integers(1, 40)),
        ),
        "epoch0": draw(st.integers(0, 50)),
        "epochs": draw(st.integers(0, 12)),
        "spared": draw(st.integers(0, 3)),
        "norms": draw(st.lists(st.sampled_from([0.0, 1e-6, 0.1, 1.0, 1e3]), min_size=3, max_size=3)),
        "scale": draw(st.sampled_from([0.0, 1e-12, 1.0, 1e12])),
        "kind": draw(st.sampled_from(["normal", "constant", "one", "spike", "alternating"])),
        "large": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=120, deadline=None)
@given(cases())
def test_no_step_of_lamb_is_outside(case):
    generator = torch.Generator().manual_seed(case["seed"])
    shapes = [(7, 5), (SIZE_8BIT,) if case["large"] else (33,), (1,)]
    tensors = []
    for shape, norm in zip(shapes, case["norms"], strict=True):
        tensor = torch.randn(shape, generator=generator)
        tensors.append(tensor / tensor.norm() * norm)

    def gradients(number: int, parameter: torch.Tensor) -> torch.Tensor:
        if case["kind"] == "normal":
            made = torch.randn(parameter.shape, generator=generator)
        elif case["kind"] == "one":
            made = torch.zeros(parameter.shape)
            made.view(-1)[0] = 1
        elif case["kind"] == "spike":
            made = torch.full(parameter.shape, 1e6 if number % 4 == 3 else 1e-3)
        else:
            made = torch.full(parameter.shape, -1.0 if case["kind"] == "alternating" and number % 2 else 1.0)
        return made * case["scale"]

    moved = run_lamb(case["config"], tensors, gradients, case["epoch0"], case["epochs"], case["spared"])
    bound = LambStepBound(case["config"])
    bounds = bound(tensors, case["epoch0"], case["epoch0"] + case["epochs"])
    for index, (distance, most) in enumerate(zip(moved, bounds, strict=True)):
        assert distance <= most, f"tensor {index}"


def test_steps_of_one_direction_reach_it():
    """A bound that nobody could reach would let through what nobody could have done."""
    config = OptimizerConfig(lr=2.5e-3, weight_decay=0.0, warmup_epochs=0, total_epochs=10_000)
    tensors = [torch.ones(64)]
    [moved] = run_lamb(config, tensors, lambda number, p: -torch.ones_like(p), 0, 20, 0)
    [bound] = LambStepBound(config)(tensors, 0, 20)
    assert 0.95 * bound < moved <= bound
    assert bound == pytest.approx(8 * (1.0025**20 - 1), rel=0.01)


def test_it_follows_the_schedule_and_ends_with_it():
    config = OptimizerConfig(warmup_epochs=3125, total_epochs=31250)
    bound, tensors = LambStepBound(config), [torch.ones(64)]
    assert bound(tensors, 5, 5) == [0.0]
    assert bound(tensors, 0, 10)[0] < bound(tensors, 3000, 3010)[0]
    assert bound(tensors, 31251, 31300)[0] < 0.01, "rounding only"
    [ten], [twenty] = bound(tensors, 100, 110), bound(tensors, 100, 120)
    assert 0 < ten < twenty
    assert bound([torch.zeros(4)], 0, 1)[0] > 0, "a first step from zero"


def test_after_the_clamp_it_grows_in_a_line():
    config = OptimizerConfig(lr=0.5, clamp_value=1.0, warmup_epochs=0, total_epochs=10**6)
    [bound] = LambStepBound(config)([torch.full((4,), 50.0)], 0, 100)
    assert bound == pytest.approx(50, rel=0.01)
