"""A few numbers of a model tell whether another one is the same, but for rounding."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from volunteer_kit.swarm.state.agreement import SKETCH_SIZE, distance, sketch

TOLERANCE = 1e-4  # relative: processors round differently, 1e-7 a step


def model(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in [(64, 48), (48,), (7, 5, 3), (), (0,)]]


def apart(one: list[torch.Tensor], other: list[torch.Tensor], seed: int = 0) -> float:
    return distance(*(np.frombuffer(sketch(tensors, seed), "<f4") for tensors in (one, other)))


def test_equal_models_have_equal_sketches_and_another_seed_has_another():
    assert sketch(model(), 5) == sketch([tensor.clone() for tensor in model()], 5)
    assert sketch(model(), 5) != sketch(model(), 6)
    assert len(sketch(model(), 5)) == 4 * SKETCH_SIZE
    assert sketch([], 5) == bytes(4 * SKETCH_SIZE)


@pytest.mark.parametrize("share", [1.0, 1e-2, 1e-4])
def test_the_distance_of_sketches_estimates_that_of_models(share):
    generator, base = torch.Generator().manual_seed(1), model()
    ratios = []
    for seed in range(60):
        moved = [tensor + share * torch.randn(tensor.shape, generator=generator) for tensor in base]
        flat, other = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (base, moved))
        true = ((flat - other).norm() / max(flat.norm(), other.norm())).item()
        ratios.append(apart(base, moved, seed) / true)
    assert 0.8 < sum(ratios) / len(ratios) < 1.25 and min(ratios) > 0.3 and max(ratios) < 3


def test_one_value_that_differs_is_seen_wherever_it_stands():
    base = model()
    norm = torch.cat([tensor.flatten() for tensor in base]).norm()
    for tensor in range(3):
        for index in (0, -1):
            moved = [tensor.clone() for tensor in base]
            moved[tensor].view(-1)[index] += 0.01 * norm
            assert apart(base, moved) > TOLERANCE


def test_rounding_is_no_difference_and_a_missed_part_is():
    base = model()
    rounded = [tensor * (1 + 1e-6 * torch.randn(tensor.shape)) for tensor in base]
    assert apart(base, rounded) < TOLERANCE
    missed = [base[0] * 1.0025, *base[1:]]  # LAMB moves a tensor by lr 2.5e-3 times its norm
    missed[0][:43] = base[0][:43]  # all but a third of it was received
    assert apart(base, missed) > TOLERANCE


def test_large_and_half_precision_tensors_are_sketched_in_parts(monkeypatch):
    whole = sketch(model(), 0)
    monkeypatch.setattr("volunteer_kit.swarm.state.agreement.CHUNK", 64)  # signs are drawn anew for each part
    assert len(sketch(model(), 0)) == len(whole)
    halves = [tensor.bfloat16() for tensor in model()]
    assert apart(halves, [tensor.float() for tensor in halves]) == 0.0
    assert apart(model(), [tensor + 0.1 for tensor in model()]) > TOLERANCE


def test_another_process_draws_the_same_signs():
    take = "import torch; from volunteer_kit.swarm.state.agreement import sketch"
    code = f"{take}; print(sketch([torch.ones(99)], 7).hex())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert said.stdout.strip() == sketch([torch.ones(99)], 7).hex()
