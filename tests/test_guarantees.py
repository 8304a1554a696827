"""What goes with verification, and what a run file that asks for more is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from tests.run_text import DEMO
from volunteer_kit.optim import Lamb, Lamb8bit, OuterNesterov
from volunteer_kit.run_guarantees import GUARANTEES, as_markdown
from volunteer_kit.run_optimizers import build_local_steps, build_step_bound
from volunteer_kit.run_reader import RunError
from volunteer_kit.run_sizes import step_bytes
from volunteer_kit.runs import build_optimizer, load_run
from volunteer_kit.session.node_parts import codec_of


def run_with(**changes):
    values = yaml.safe_load(DEMO)
    swarm = {**values["swarm"], **changes.pop("swarm", {})}
    return load_run({**values, "swarm": swarm, **changes})


def test_the_settings_are_the_runs():
    run = run_with(verification={"share": 0.5, "strikes": 2}, swarm={"aggregation": "centered_clip"})
    assert run.verification.share == 0.5 and run.verification.strikes == 2
    assert run.fingerprint != run_with().fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swarm": {"aggregation": "krum"}}, "cannot be told from a wrong one"),
        ({"swarm": {"grad_compression": "uniform8"}}, "grad_compression: blockwise8"),
        ({"swarm": {"grad_compression": "blockwise4"}}, "more than the tolerance"),
        ({"swarm": {"grad_compression": "sparse", "aggregation": "mean"}}, "nobody can compute it again"),
        ({"swarm": {"local_steps": {"batch_size": 8}}}, "taken again one by one"),
        ({"verification": {"share": 0.0}}, "share"),
        ({"verification": {"tolerance": 2.0}}, "tolerance"),
        ({"verification": {"strikes": 0}}, "strikes"),
        ({"verification": {"shares": 1}}, "shares"),
    ],
)
def test_what_means_nothing_is_refused_with_the_reason(changes, words):
    with pytest.raises(RunError, match=words):
        run_with(**{"verification": {}, **changes})


@pytest.mark.parametrize("rule", ["centered_clip", "median", "trimmed_mean", "krum"])
def test_sparse_parts_have_no_median(rule):
    with pytest.raises(RunError, match="median"):
        run_with(swarm={"grad_compression": "sparse", "aggregation": rule})


@pytest.mark.parametrize("codec, words", [("sparse", "top-k"), ("blockwise4", "4 bit"), ("uniform4", "4 bit")])
def test_a_lossy_codec_of_small_tensors_is_refused_as_one_of_large_ones(codec, words):
    with pytest.raises(RunError, match=words):
        run_with(verification={}, swarm={"small_compression": codec, "aggregation": "mean"})


def test_small_sparse_parts_have_no_median_either():
    with pytest.raises(RunError, match="median"):
        run_with(swarm={"small_compression": "sparse", "aggregation": "centered_clip"})


@pytest.mark.parametrize(
    "change",
    [{"grad_density": 0.5}, {"grad_compression": "sparse", "aggregation": "mean"}, {"local_steps": {"batch_size": 8}}],
)
def test_peers_with_other_codecs_or_steps_do_not_average(change):
    assert run_with(swarm=change).fingerprint != run_with().fingerprint


def test_lossy_codecs_and_local_steps_reach_the_swarm():
    run = run_with(
        swarm={
            "grad_compression": "sparse", "small_compression": "sparse", "grad_density": 0.01, "aggregation": "mean",
            "local_steps": {"batch_size": 8, "outer_lr": 0.5},
        }
    )  # fmt: skip
    assert codec_of(run) == ("sparse", "sparse", run.swarm.compress_above, 0.01)
    assert step_bytes(run) < 0.03 * step_bytes(run_with(swarm={"grad_compression": "none"}))
    parameters = [torch.nn.Parameter(torch.ones(4))]
    outer = build_optimizer(run)[0](parameters)
    assert isinstance(outer, OuterNesterov) and outer.param_groups[0]["lr"] == 0.5
    local = build_local_steps(run)
    assert local.batch_size == 8 and isinstance(local.optimizer(parameters), Lamb)
    assert build_step_bound(run) is None and build_step_bound(run_with()) is not None


@pytest.mark.parametrize("device, kind", [("cpu", Lamb8bit), ("meta", Lamb)])
def test_local_steps_on_a_gpu_have_statistics_of_32_bits(device, kind):
    """Large parameters elsewhere than on the CPU have no 8-bit ones: a worker with a GPU would not even begin."""
    run = run_with(swarm={"local_steps": {"batch_size": 8}})
    assert run.optimizer.statistics_bits == 8
    parameters = [torch.nn.Parameter(torch.empty(2**17, device=device))]
    for groups in (parameters, [{"params": parameters, "weight_decay": 0.0}]):
        assert type(build_local_steps(run).optimizer(groups)) is kind


def test_the_docs_have_the_table_as_it_is():
    page = (Path(__file__).parent.parent / "docs" / "cheating.md").read_text()
    assert as_markdown() in page
    assert len({row.technique for row in GUARANTEES}) == len(GUARANTEES)
