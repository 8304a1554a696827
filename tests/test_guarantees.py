"""What goes with verification, and what a run file that asks for more is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.run_text import DEMO
from volunteer_kit.run_guarantees import GUARANTEES, as_markdown
from volunteer_kit.run_reader import RunError
from volunteer_kit.runs import load_run
from volunteer_kit.session.options import swarm_options


def run_with(**changes):
    values = yaml.safe_load(DEMO)
    swarm = {**values["swarm"], **changes.pop("swarm", {})}
    return load_run({**values, "swarm": swarm, **changes})


def test_the_settings_reach_the_swarm():
    run = run_with(verification={"share": 0.5, "strikes": 2}, swarm={"aggregation": "centered_clip"})
    options = swarm_options(run)
    assert options.verification.share == 0.5 and options.verification.strikes == 2 and options.clips
    assert not swarm_options(run_with()).clips
    assert run.fingerprint != run_with().fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swarm": {"average_state_every": 2}}, "members hold different models"),
        ({"swarm": {"aggregation": "krum"}}, "cannot be told from a wrong one"),
        ({"swarm": {"grad_compression": "uniform8"}}, "grad_compression: blockwise8"),
        ({"verification": {"share": 0.0}}, "share"),
        ({"verification": {"tolerance": 2.0}}, "tolerance"),
        ({"verification": {"strikes": 0}}, "strikes"),
        ({"verification": {"shares": 1}}, "shares"),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(changes, words):
    with pytest.raises(RunError, match=words):
        run_with(**{"verification": {}, **changes})


def test_the_readme_has_the_table_as_it_is():
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    assert as_markdown() in readme
    assert len({row.technique for row in GUARANTEES}) == len(GUARANTEES)
