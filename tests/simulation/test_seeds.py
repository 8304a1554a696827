"""A few seeds of each mode, and all that ever failed; .ci/run runs two thousand."""

from __future__ import annotations

import pytest

from tests.simulation.__main__ import failed_seeds, run_seed

SEEDS = {"broad": 40, "nasty": 60, "liar": 20}
AT_A_TIME = 10


@pytest.mark.parametrize(("mode", "seed"), failed_seeds())
def test_a_seed_that_failed_once(mode, seed):
    assert run_seed(mode, seed)[1] is None


@pytest.mark.parametrize(
    ("mode", "first"), [(mode, first) for mode, seeds in SEEDS.items() for first in range(0, seeds, AT_A_TIME)]
)
def test_seeds(mode, first):
    violations = {seed: run_seed(mode, seed)[1] for seed in range(first, first + AT_A_TIME)}
    assert {seed: violation for seed, violation in violations.items() if violation is not None} == {}
