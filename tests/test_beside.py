"""Which parameters had a gradient, and the model's buffers, averaged beside the gradients."""

from __future__ import annotations

import pytest
import torch

from volunteer_kit.robust.rules import rule
from volunteer_kit.swarm.rounds.beside import (
    BUFFERS,
    BesideGradients,
    HeldBuffers,
    SharedBuffers,
    buffer_shapes,
    initial_buffers,
    put_buffers,
    shared_buffers,
)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("level", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("cache", torch.ones(4), persistent=False)
        self.register_buffer("table", torch.arange(5))
        self.register_buffer("mask", torch.tensor(True))
        self.register_buffer("shade", torch.triu(torch.full((3, 3), float("-inf")), 1))
        self.quantized = torch.nn.Module()
        self.quantized.register_buffer("qweight", torch.ones(6, dtype=torch.int32))
        self.quantized.register_buffer("scales", torch.ones(6))


def test_what_is_shared():
    names = [name for name, _, _ in shared_buffers(Model())]
    assert names == ["level", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_a_buffer_that_is_no_number_is_not_given():
    """One that came to NaN on one peer would have the whole of its part refused."""
    model = Model()
    beside = BesideGradients(4, SharedBuffers(model))
    model.norm.running_mean[0] = float("nan")
    tensor = beside.make_tensor()
    beside.fill(tensor)
    assert tensor.isfinite().all() and (tensor.sum(1) == 0).sum() == 1


def test_members_agree_on_what_nobody_used_and_average_buffers():
    """One of the three members has no samples."""
    models = [Model() for _ in range(3)]
    used = [[True, False, False, False], [False, False, True, False], [False, False, False, False]]
    tensors, beside = [], []
    for place, model in enumerate(models):
        model.norm.running_mean.fill_(float(place))
        model.norm.running_var.fill_(0.0 if place == 1 else 2.0)
        model.norm.num_batches_tracked.fill_(10 * place)
        one = BesideGradients(4, SharedBuffers(model))
        one.note(used[place])
        tensor = one.make_tensor()
        one.fill(tensor)
        tensors.append(tensor)
        beside.append(one)
    mean = rule("mean")(tensors, [1.0, 3.0, 0.0]).view_as(tensors[0])
    for one, model in zip(beside, models, strict=True):
        came = one.read(mean)
        assert came.unused == (False, True, False, True)
        one._buffers.take(came.buffers)
        one._buffers.arrive()
        assert torch.equal(model.norm.running_mean, torch.full((3,), 0.75))
        assert torch.equal(model.norm.running_var, torch.full((3,), 0.5))
        assert model.norm.num_batches_tracked == 8, "the whole number next to 7.5"


@pytest.mark.parametrize("lost", [slice(0, 4), slice(5, 9), slice(4, 40), slice(13, 20), slice(0, None)])
def test_what_a_lost_reducer_had_is_unknown_and_leaves_buffers_as_they_were(lost):
    buffers = SharedBuffers(Model())
    beside = BesideGradients(3, buffers)
    tensor = beside.make_tensor()
    beside.fill(tensor)
    tensor[3:, 1] += 1.0
    new = tensor[3:, 1].clone()
    is_lost = torch.zeros(tensor.numel(), dtype=torch.bool)
    is_lost[lost] = True
    tensor.view(-1)[is_lost] = 0.0
    touched = is_lost.view(-1, 3).any(dim=1)
    came = beside.read(tensor)
    assert came.unused == tuple(None if is_touched else True for is_touched in touched[:3].tolist())
    assert torch.equal(came.buffers, torch.where(touched[3:], buffers.shared, new))


def test_nobody_makes_a_variance_negative_or_a_buffer_no_number():
    model = Model()
    beside = BesideGradients(0, SharedBuffers(model))
    tensor = beside.make_tensor()
    beside.fill(tensor)
    tensor[2, 1], tensor[5:8, 1] = torch.inf, -9.0
    beside._buffers.take(beside.read(tensor).buffers)
    beside._buffers.arrive()
    assert torch.equal(model.norm.running_mean, torch.zeros(3)) and torch.equal(model.norm.running_var, torch.zeros(3))
    beside._buffers.shared[5:8] = -1.0  # a donor's
    beside._buffers.arrive()
    assert torch.equal(model.norm.running_var, torch.zeros(3))


def test_what_was_seen_while_a_round_was_on_its_way_stays_on_top():
    model = Model()
    buffers = SharedBuffers(model)
    model.norm.running_mean.fill_(1.0)
    sent = buffers.send().clone()
    model.norm.running_mean.add_(0.5)
    buffers.take(sent)
    buffers.arrive()
    assert torch.equal(model.norm.running_mean, torch.full((3,), 1.5)), "alone nothing changes"
    buffers.send()
    model.norm.running_mean.add_(0.25)
    sent[2:5] = 3.0
    buffers.take(sent)
    buffers.arrive()
    assert torch.equal(model.norm.running_mean, torch.full((3,), 3.25))
    buffers.shared[2:5] = 7.0  # a state is taken
    buffers.arrive()
    assert torch.equal(model.norm.running_mean, torch.full((3,), 7.0))


@pytest.mark.parametrize("name", ["mean", "centered_clip", "median", "trimmed_mean", "krum"])
def test_a_run_may_have_any_rule(name):
    """All of them learn which parameters nobody used. A peer without samples counts for nothing."""
    used, tensors, beside = [[False, True], [False, True], [False, True], [False, False]], [], []
    for place, each in enumerate(used):
        model = Model()
        model.norm.running_mean.fill_(3.0 if each[1] else 99.0)
        beside.append(BesideGradients(2, SharedBuffers(model)))
        beside[place].note(each)
        tensors.append(beside[place].make_tensor())
        beside[place].fill(tensors[place])
    came = beside[0].read(rule(name)(tensors, [1.0, 2.0, 1.0, 0.0]).view_as(tensors[0]))
    assert came.unused == (True, False) and torch.equal(came.buffers[2:5], torch.full((3,), 3.0))


class Gate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("bias", torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))


def test_one_without_a_model_has_a_runs_buffers_too():
    """The monitor knows shapes only: what goes round is how far they have moved, and a joiner takes its zeros."""
    with torch.device("meta"):
        held = HeldBuffers.of_run(Gate())
    model = Gate()
    model.norm.running_mean.fill_(5.0)  # of a base that has learnt
    began = initial_buffers(model)
    own = SharedBuffers(model, began)
    assert [name for name, _ in own.shapes] == list(buffer_shapes(model)) and "mask" in buffer_shapes(model)
    assert len(held) == len(own) and torch.equal(held.shared, own.shared)
    own.take(held.shared)
    own.arrive()
    assert torch.equal(model.norm.running_mean, torch.full((2,), 5.0))
    model.norm.running_mean.add_(2.0)
    model.norm.num_batches_tracked.fill_(4)
    tensors, beside = [], [BesideGradients(1, own), BesideGradients(1, held)]
    for one in beside:
        tensors.append(one.make_tensor())
        one.fill(tensors[-1])
    mean = rule("mean")(tensors, [2.0, 0.0]).view_as(tensors[0])
    for one, buffers in zip(beside, (own, held), strict=True):
        buffers.take(one.read(mean).buffers)
        buffers.arrive()
    assert torch.equal(own.shared, held.shared) and held.shared.sum() == 2 * 2.0 + 4
    assert torch.equal(model.norm.running_mean, torch.full((2,), 7.0)) and model.norm.num_batches_tracked == 4

    joiner = Gate()
    joiner.norm.running_mean.fill_(5.0)
    theirs = SharedBuffers(joiner, initial_buffers(joiner))
    theirs.shared.copy_(held.shared)  # it takes the monitor's state
    theirs.arrive()
    for name, buffer in model.state_dict().items():
        assert torch.equal(joiner.state_dict()[name], buffer), name
    assert torch.equal(joiner.mask, torch.tensor([0.0, float("-inf")])), "nobody moves an infinity"


def test_who_goes_on_from_a_checkpoint_has_moved_since_the_run_began():
    began = initial_buffers(Gate())
    resumed = Gate()
    resumed.norm.running_var.fill_(0.25)
    assert SharedBuffers(resumed, began).shared.sum() == 2 * (0.25 - 1.0)


def test_a_runs_buffers_are_put_into_its_model_and_a_variance_is_not_negative():
    model = Gate()
    values = torch.cat([values.view(-1) for values in initial_buffers(model).values()])
    put_buffers({BUFFERS: torch.where(values.isfinite(), -3.0, 0.0)}, model)
    assert torch.equal(model.norm.running_mean, torch.full((2,), -3.0))
    assert torch.equal(model.norm.running_var, torch.zeros(2)) and torch.equal(model.mask, Gate().mask - 3.0)
    before = {name: buffer.clone() for name, buffer in model.state_dict().items()}
    put_buffers({}, model)
    assert all(torch.equal(before[name], buffer) for name, buffer in model.state_dict().items())
