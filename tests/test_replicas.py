"""The model on several devices beside the model on one: equal gradients. Two "devices" are the CPU twice."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import pytest
import torch

from volunteer_kit.model.dalle import PRESETS, Dalle
from volunteer_kit.training.replicas import Replicas, parameter_version, parts_of


class Microbatch(NamedTuple):
    text: torch.Tensor
    codes: torch.Tensor
    names: Any = ()


def microbatch(samples: int, seed: int = 0) -> Microbatch:
    """Captions of different lengths, as they come."""
    c, generator = PRESETS["tiny"], torch.Generator().manual_seed(seed)
    text = torch.randint(1, c.num_text_tokens, (samples, c.text_seq_len), generator=generator)
    lengths = torch.randint(1, c.text_seq_len + 1, (samples, 1), generator=generator)
    text[torch.arange(c.text_seq_len)[None] >= lengths] = 0
    codes = torch.randint(c.num_image_tokens, (samples, c.image_seq_len), generator=generator)
    return Microbatch(text, codes, tuple(range(samples)))


def compute_loss(model: torch.nn.Module, batch: Microbatch) -> torch.Tensor:
    return model(batch.text, batch.codes).loss


def tiny(**changes) -> Dalle:
    torch.manual_seed(0)
    return Dalle(PRESETS["tiny"].model_copy(update=changes))


def alone(model: torch.nn.Module, batch: Microbatch, scale: float = 1.0) -> tuple[float, list[torch.Tensor]]:
    model.zero_grad()
    loss = compute_loss(model, batch)
    (loss * scale).backward()
    return loss.item(), gradients(model)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def gap(expected: list[torch.Tensor], found: list[torch.Tensor]) -> float:
    """The largest difference, relative to the gradient of all parameters together."""
    norm = torch.stack([grad.norm() for grad in expected]).norm()
    return (torch.stack([(a - b).norm() for a, b in zip(expected, found, strict=True)]).norm() / norm).item()


@pytest.fixture
def replicas():
    made = []

    def make(count: int = 2, **options) -> Replicas:
        made.append(Replicas(("cpu",) * count, compute_loss, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(("devices", "samples"), [(2, 8), (2, 7), (3, 8), (4, 3), (2, 1), (1, 4)])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_are_those_of_one_device(replicas, devices, samples, scale):
    model, batch = tiny(), microbatch(samples)
    loss, expected = alone(model, batch, scale)
    model.zero_grad()
    found = replicas(devices)(model, batch, scale)
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert gap(expected, gradients(model)) < 1e-6


@pytest.mark.parametrize("changes", [{"reversible": True}, {"shared_attn_ids": (0,), "shared_ff_ids": (0,)}], ids=str)
def test_weights_that_are_shared_and_layers_that_go_back(replicas, changes):
    model, batch = tiny(**changes), microbatch(5)
    model.checkpointing = True
    _, expected = alone(model, batch)
    model.zero_grad()
    replicas()(model, batch)
    assert gap(expected, gradients(model)) < 1e-6


def test_copies_follow_the_model_whoever_changes_it(replicas):
    model, compute = tiny(), replicas()
    for seed in range(4):
        batch = microbatch(6, seed)
        _, expected = alone(model, batch)
        model.zero_grad()
        compute(model, batch)
        assert gap(expected, gradients(model)) < 1e-6
        with torch.no_grad():
            for parameter in model.parameters():  # as hivemind writes the step's result
                parameter.copy_(parameter - 0.5 * parameter.grad)


def test_between_steps_nothing_is_copied(replicas, monkeypatch):
    model, compute = tiny(), replicas()
    compute(model, microbatch(4))
    before = [parameter._version for parameter in compute._copies[0].parameters()]
    model.zero_grad()
    compute(model, microbatch(4, seed=1))
    assert before == [parameter._version for parameter in compute._copies[0].parameters()]


def test_a_version_is_of_every_parameter():
    model = tiny()
    versions = [parameter_version(model)]
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(1)
        versions.append(parameter_version(model))
    assert versions == sorted(set(versions))


def test_recomputing_is_the_models_choice_of_the_moment(replicas):
    seen = []

    def loss_that_looks(model, batch):
        seen.append(model.checkpointing)
        return compute_loss(model, batch)

    model, compute = tiny(), replicas()
    compute._compute_loss = loss_that_looks
    for choice in (False, True, False):
        model.checkpointing = choice
        compute(model, microbatch(4))
    assert seen == [False, False, True, True, False, False]


def test_precision_holds_in_every_thread(replicas):
    seen = {}

    def loss_that_looks(model, batch):
        seen[threading.get_ident()] = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return compute_loss(model, batch)

    model, compute = tiny(), replicas(3, precision="bf16")
    compute._compute_loss = loss_that_looks
    compute(model, microbatch(6))
    assert len(seen) >= 2 and set(seen.values()) == {(True, torch.bfloat16)}


@pytest.mark.parametrize("broken", [0, 1], ids=["here", "in a thread"])
def test_a_device_that_is_full_is_told_and_leaves_nothing(replicas, broken):
    class Full:
        at = broken

    def hungry(model, batch):
        loss = compute_loss(model, batch)
        if Full.at is not None and (batch.names[0], int(batch.text[0, 0])) == (0, first_words[Full.at]):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    model, batch, compute = tiny(), microbatch(6), replicas()
    first_words = [int(part.text[0, 0]) for part, _ in parts_of(batch, 2)]
    _, expected = alone(model, batch)
    compute._compute_loss = hungry
    model.zero_grad()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        compute(model, batch)
    held = [frame.f_locals for frame in _frames(caught.value.__traceback__) if frame.f_code.co_name == "hungry"]
    assert not any("loss" in names for names in held), "the error holds no activations"
    Full.at = None
    model.zero_grad()
    compute(model, batch)
    assert gap(expected, gradients(model)) < 1e-6, "nothing of the failed microbatch is left in the copies"


def _frames(trace):
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def test_a_parameter_without_gradient_has_none(replicas):
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)

    model, compute = Two(), replicas()
    compute._compute_loss = lambda model, batch: model.used(batch.text).mean()
    compute(model, Microbatch(torch.ones(4, 3), torch.ones(4, 1)))
    assert model.unused.weight.grad is None and model.used.weight.grad is not None


def test_parts():
    batch = microbatch(7)
    parts = parts_of(batch, 3)
    assert [size for _, size in parts] == [2, 2, 3] and all(len(part.text) == size for part, size in parts)
    assert torch.equal(torch.cat([part.codes for part, _ in parts]), batch.codes)
    assert [size for _, size in parts_of(microbatch(2), 4)] == [1, 1]
