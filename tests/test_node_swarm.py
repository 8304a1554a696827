"""Real workers whose nodes vote on each step: one is killed and comes back, one joins late, all end at one state."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
import torch

from tests.waiting import wait_until
from volunteer_kit.checkpoint import Checkpoint
from volunteer_kit.demo.state import DemoState
from volunteer_kit.demo.swarm import DemoSwarm
from volunteer_kit.runs import RunConfig, load_run

PATIENCE = 300.0  # s
RUN = """
run_id: commits
description: Peers vote on each step.
model: {{preset: tiny, dim: 64, depth: 2, heads: 2, num_text_tokens: {text}, num_image_tokens: {codes}}}
image_tokenizer: scenes32
text_tokenizer: words
data: {{kind: scenes, level: 1}}
optimizer: {{lr: 5.0e-3, warmup_epochs: 2, total_epochs: 200}}
target_batch_size: 96
swarm:
  commits: true
  max_staleness: 8
  allreduce_timeout: 10.0
  load_state_timeout: 60.0
"""
LOW_RANK = """
  grad_compression: powersgd
  grad_rank: 2
"""
LOCAL_STEPS = """
  grad_compression: sparse
  grad_density: 0.25
  aggregation: mean
  local_steps: {{batch_size: 8, outer_lr: 1.0, outer_momentum: 0.0}}
"""


def make_run(folder: Path, swarm: str = "") -> RunConfig:
    from volunteer_kit.data.tokenizer import load_tokenizer
    from volunteer_kit.model.image_tokenizer import load_image_tokenizer

    text, codes = load_tokenizer("words").vocab_size, load_image_tokenizer("scenes32").config.num_codes
    path = folder / "run.yaml"
    path.write_text((RUN + swarm.lstrip("\n")).format(text=text, codes=codes))
    return load_run(path)


@pytest.fixture
def swarm(tmp_path, request):
    """Not in `tmp_path`: what torch adds to it is a socket's path, which may have 107 characters."""
    logs = tmp_path / "logs"
    logs.mkdir()
    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as scratch:
        run = make_run(tmp_path, getattr(request, "param", ""))
        made = DemoSwarm(run, DemoState(), Path(scratch), logs, batch_size=8, threads=1)
        try:
            yield made
        except BaseException:
            print(story(made))
            raise
        finally:
            made.close()


def story(swarm: DemoSwarm) -> str:
    tails = [f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(swarm.logs.glob("*.log"))]
    return "\n".join([*map(str, swarm.state.volunteers.values()), *swarm.state.news, *tails])


def until(swarm: DemoSwarm, condition) -> None:
    def holds() -> bool:
        swarm.take_events()
        assert not swarm.state.error, swarm.state.error
        return bool(condition())

    try:
        wait_until(holds, PATIENCE)
    except AssertionError:
        raise AssertionError(f"it did not come to that:\n{story(swarm)}") from None


def ends_equal(swarm: DemoSwarm, peers: int) -> Checkpoint:
    found = swarm.final_checkpoints()
    swarm.leave()
    assert len(found) == peers
    assert len({checkpoint.epoch for checkpoint in found.values()}) == 1, story(swarm)
    first, *others = found.values()
    for other in others:
        assert first.tensors.keys() == other.tensors.keys()
        for name, tensor in first.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name
    return first


@pytest.mark.slow
@pytest.mark.parametrize("swarm", [LOW_RANK], indirect=True)
def test_real_workers_send_low_rank_gradients(swarm):
    swarm.start(2)
    until(swarm, lambda: all(each.samples > 0 for each in swarm.state.volunteers.values()))
    swarm.add_late()
    until(swarm, lambda: swarm.is_late_one_in)
    swarm.finish_at(swarm.newest_epoch + 4)
    until(swarm, lambda: all(each.finished_epoch is not None for each in swarm.state.volunteers.values()))
    assert "optimizer/gradient_codec/bases" in ends_equal(swarm, 3).tensors


@pytest.mark.slow
def test_real_workers_commit_each_step(swarm):
    began = time.monotonic()
    swarm.start(3)
    volunteers = swarm.state.volunteers
    until(swarm, lambda: all(each.samples > 0 for each in volunteers.values()))
    swarm.kill()
    until(swarm, lambda: swarm.is_back)
    swarm.add_late()
    until(swarm, lambda: swarm.is_late_one_in)
    swarm.finish_at(swarm.newest_epoch + 4)
    until(swarm, lambda: all(each.finished_epoch is not None for each in volunteers.values()))
    first = ends_equal(swarm, 4)
    assert swarm.state.volunteers[swarm.late].source == "peers"
    print(f"{time.monotonic() - began:.0f} s, epoch {first.epoch}")


@pytest.mark.slow
@pytest.mark.parametrize("swarm", [LOCAL_STEPS], indirect=True)
def test_real_workers_take_local_steps(swarm):
    """They send sparse parts and end at one state, which has learnt."""
    swarm.start(2)
    volunteers = swarm.state.volunteers
    until(swarm, lambda: all(each.samples > 0 for each in volunteers.values()))
    swarm.finish_at(swarm.newest_epoch + 4)
    until(swarm, lambda: all(each.finished_epoch is not None for each in volunteers.values()))
    found = swarm.final_checkpoints()
    swarm.leave()
    one, other = found.values()
    assert one.epoch == other.epoch, story(swarm)
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor, other.tensors[name]), name
    first, *_, last = [point.loss for point in swarm.state.curve]
    assert last < first
