"""A few seeds of this mode; .ci/run runs two thousand of all modes."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import failed_seeds, run_seed

MODE = "liar"
SEEDS, AT_A_TIME = 20, 10


@pytest.mark.parametrize("seed", [seed for mode, seed in failed_seeds() if mode == MODE])
def test_a_seed_that_failed_once(seed):
    assert run_seed(MODE, seed)[1] is None


@pytest.mark.parametrize("first", range(0, SEEDS, AT_A_TIME))
def test_seeds(first):
    violations = {seed: run_seed(MODE, seed)[1] for seed in range(first, first + AT_A_TIME)}
    assert {seed: violation for seed, violation in violations.items() if violation is not None} == {}
