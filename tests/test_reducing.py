"""Checking a reducer by what its senders state: the honest one is right, by either rule, whatever it was sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from volunteer_kit.robust.bounds import bound_norms
from volunteer_kit.robust.reducing import residual
from volunteer_kit.robust.rules import rule
from volunteer_kit.robust.sketch import sketch

SEED, WEIGHTS = bytes(range(16)), [8.0, 4.0, 6.0, 8.0, 2.0]


@pytest.mark.parametrize("name", ["mean", "centered_clip"])
@pytest.mark.parametrize("length", [1.0, 50.0, 1e4, 1e8])
def test_an_honest_reducer_is_right_however_long_a_part_was(name, length):
    generator = torch.Generator().manual_seed(3)
    parts = [1 + torch.randn(500, generator=generator) for _ in WEIGHTS]
    parts[2] = parts[2] * -length
    average = rule(name)(bound_norms(parts, WEIGHTS)[0], WEIGHTS)

    def row(part):
        return [float(part.double().norm()), float((part.double() - average).norm()), *sketch(part, SEED)]

    numbers = np.array([row(part) for part in parts])
    right = np.array([float(average.norm()), *sketch(average, SEED)])
    assert residual(numbers, WEIGHTS, right, name == "centered_clip") < 0.01
    wrong = np.array([float(average.norm()), *sketch(-average, SEED)])
    assert residual(numbers, WEIGHTS, wrong, name == "centered_clip") > 0.2
