"""Test the parts of a node of a run from a file, at members that train and at peers that only hold the state."""

from __future__ import annotations

import pytest
import torch

from tests.test_finetune import BIAS, BIASED, RUN, UNUSED
from volunteer_kit.model.transformers_model import build_transformers
from volunteer_kit.runs import build_optimizer, build_param_groups, load_run
from volunteer_kit.session.node_parts import layout_of, node_parts, sync_settings, units_per_sample
from volunteer_kit.swarm.node.beside import BESIDE, StepBeside, beside_of, buffers_in
from volunteer_kit.swarm.node.training_state import TrainingState, UnusableState
from volunteer_kit.swarm.rounds.beside import BUFFERS, BesideGradients, SharedBuffers, initial_buffers
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.training.hf_optimizer import Clip, moved, parameters_of

CELLS = SyncConfig.cells


def run_of(config, **swarm):
    swarm = {"commits": True, "grad_compression": "blockwise8", "compress_above": 500, **swarm}
    optimizer = {**RUN["optimizer"], "weight_decay": 0.1}
    return load_run(
        {**RUN, "model": {"config": config, "max_length": 48}, "swarm": swarm, "optimizer": optimizer}
    )


class Trainer:
    """A member that has the run's whole model."""

    def __init__(self, run, moved_by: float = 0.0):
        self.model = build_transformers(run.model, run.seed)
        self.buffers = SharedBuffers(self.model, initial_buffers(self.model))
        make, schedule = build_optimizer(run)
        shown = make(build_param_groups(run, self.model))
        beside = beside_of(len(parameters_of(shown)), self.buffers)
        self.parameters = parameters_of(shown)
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}

        def optimizer(groups):
            *own, last = groups
            return StepBeside(moved(shown, own, Clip(None, range(len(self.parameters)))), last["params"][0])

        groups = [*({**group} for group in shown.param_groups), {"params": [beside]}]
        named = [*(names[id(parameter)] for parameter in self.parameters), BESIDE]
        codec = codec_at_first(run)
        self.state = TrainingState(groups, optimizer, lambda keeper: schedule(keeper.behind), named, codec)
        self.moved_by = moved_by

    def compute(self, seed: int) -> list[torch.Tensor | None]:
        """Gradients of a batch, and what goes beside them."""
        words = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(seed))
        self.model(input_ids=words, labels=words).loss.backward()
        if BIAS in dict(self.model.named_buffers()):
            self.model.get_buffer(BIAS).add_(self.moved_by)
        given = BesideGradients(len(self.parameters), self.buffers)
        given.note([parameter.grad is not None for parameter in self.parameters])
        tensor = given.make_tensor()
        given.fill(tensor)
        return [*(parameter.grad for parameter in self.parameters), tensor]


def codec_at_first(run):
    layout = layout_of(run, node_parts(run))
    return layout if layout.goes_by_steps else None


def averages_of(run, given, weights, codec=None):
    """Make the averages as a round of members that bring as many samples does, through the run's codec.

    :param codec: of the step; None: it is the same at all steps
    :returns: places in the vector with values, and the codec of the next step
    """
    parts = node_parts(run)
    layout = codec or layout_of(run, parts)
    slots, answers = [], []
    for gradients, weight in zip(given, weights, strict=True):
        slots.append(torch.zeros(parts.elements))
        parts.vector.fill(slots[-1], gradients, weight)
    found = {}
    for cell in range(CELLS):
        mean = torch.stack([slot[layout.cell(cell)] for slot in slots]).mean(0)
        data = layout.encode_cell(cell, mean)
        answers.append((1 << cell, len(data).to_bytes(4, "little") + data))
        found[cell] = layout.decode_cell(cell, data)
    averages = [(parts.vector.cell(cell), values) for cell, values in parts.vector.means(found).items()]
    return averages, codec.after(answers) if codec else None


@pytest.mark.parametrize("swarm", [{}, {"grad_compression": "powersgd", "grad_rank": 2}], ids=["dense", "low rank"])
@pytest.mark.parametrize("config", [UNUSED, BIASED], ids=["unused parameters", "buffers"])
def test_who_only_holds_the_state_takes_the_steps_of_those_that_train(tmp_path, config, swarm):
    run = run_of(config, **swarm)
    members = [Trainer(run, 1.0), Trainer(run, 4.0)]
    parts = node_parts(run)
    held = TrainingState(parts.groups, parts.optimizer, parts.scheduler, parts.names, codec_at_first(run))
    assert (held.codec is not None) is bool(swarm)
    states = [*(member.state for member in members), held]
    assert len({state.digest() for state in states}) == 1, "all begin alike, with or without a base"
    first = {name: tensor.clone() for name, tensor in held.named().items()}
    for epoch in (1, 2):
        given = [member.compute(10 * epoch + place) for place, member in enumerate(members)]
        averages, codec = averages_of(run, given, [1.0, 3.0], held.codec)
        for state in states:
            state.step(averages)
            state.codec = codec
            state.move_to(b"%d" % epoch, epoch)
    assert len({state.digest() for state in states}) == 1
    assert len({state.sketch() for state in states}) == 1
    now = held.named()
    for name in parts.names[:-1]:
        is_unused = "crossattention" in name or "ln_cross_attn" in name
        assert torch.equal(now[name], first[name]) is is_unused, name
    shown = parts.for_checkpoint(now)
    assert BESIDE not in shown and (BUFFERS in shown) is (config is BIASED)
    if config is BIASED:
        assert torch.allclose(shown[BUFFERS], torch.full_like(shown[BUFFERS], 2 * (0.25 * 1.0 + 0.75 * 4.0)))
    else:
        assert [*shown][: len(parts.names) - 1] == parts.names[:-1]


@pytest.mark.parametrize("swarm", [{}, {"grad_compression": "powersgd", "grad_rank": 2}], ids=["dense", "low rank"])
def test_a_state_goes_into_a_checkpoint_and_back_to_the_last_bit(tmp_path, swarm):
    run = run_of(BIASED, **swarm)
    member, parts = Trainer(run, 3.0), node_parts(run)
    averages, codec = averages_of(run, [member.compute(1)], [1.0], member.state.codec)
    member.state.step(averages)
    member.state.codec = codec
    member.state.move_to(b"1", 1)
    kept = parts.for_checkpoint({name: tensor.clone() for name, tensor in member.state.named(parts.names).items()})
    resumed = TrainingState(parts.groups, parts.optimizer, parts.scheduler, parts.names, codec_at_first(run))
    resumed.take(parts.names, parts.from_checkpoint(kept), member.state.about())
    resumed.codec = codec  # it had begun anew
    assert resumed.digest() == member.state.digest()
    with pytest.raises(UnusableState, match="beside is"):
        resumed.take(parts.names, parts.from_checkpoint({**kept, BUFFERS: torch.zeros(1)}), member.state.about())
    fetched = node_parts(run)
    asking = TrainingState(
        fetched.groups, fetched.optimizer, fetched.scheduler, fetched.names, codec_at_first(run)
    )
    member.state.save(tmp_path / "state")
    asking.load(tmp_path / "state", b"1", 1)
    assert asking.digest() == member.state.digest()
    joiner = Trainer(run)
    joiner.buffers.shared.copy_(buffers_in(asking.parameters[-1], parts.num_trained))
    joiner.buffers.arrive()
    assert torch.equal(joiner.model.get_buffer(BIAS), torch.full((4,), 3.0)), "a late member takes them"


def test_nodes_of_a_run_share_their_settings_and_count_in_units():
    run = load_run({**RUN, "swarm": {"delay_optimizer_step": False, "max_staleness": 7}})
    sync = SyncConfig(**sync_settings(run))
    assert sync.target_batch_size == units_per_sample(run) * run.target_batch_size
    assert not sync.overlap and sync.max_staleness == 7
    pictures = load_run("demo")
    assert units_per_sample(pictures) == 1.0
    assert SyncConfig(**sync_settings(pictures)).target_batch_size == pictures.target_batch_size
    parts = node_parts(pictures)
    assert parts.vector is None and parts.num_trained == len(parts.names) and parts.origins is None
    named = {"a": torch.ones(1)}
    assert parts.for_checkpoint(named) == named == parts.from_checkpoint(named)
