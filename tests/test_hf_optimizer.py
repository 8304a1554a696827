"""An optimizer that a Trainer was given, moved to the swarm's side."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.training.hf_optimizer import Clip, Schedule, hand_over, moved, parameters_of
from volunteer_kit.training.hf_shared import require_sharable

NAMES = (
    "AdamW", "SGD", "momentum", "RMSprop", "Adagrad", "NAdam", "Rprop", "RAdam", "Adadelta", "Adafactor", "AdamW8bit",
    "PagedAdamW8bit", "AdEMAMix8bit", "Lion8bit",
)  # fmt: skip


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((96, 64), (64,), (5, 3))]


def make(name: str, own: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    groups = [{"params": own[:1], "weight_decay": 0.1}, {"params": own[1:], "weight_decay": 0.0}]
    if name == "Rprop":
        groups = [{"params": own[:1]}, {"params": own[1:]}]
    if name == "momentum":
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)
    if name.endswith("8bit"):
        bitsandbytes = pytest.importorskip("bitsandbytes")
        return getattr(bitsandbytes.optim, name)(groups, lr=1e-2)
    if name == "Adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=1e-2, relative_step=False, scale_parameter=False)
    return getattr(torch.optim, name)(groups, lr=1e-2)


def groups_like(optimizer: torch.optim.Optimizer) -> list[dict]:
    return [{"params": [p.detach().clone().requires_grad_() for p in g["params"]]} for g in optimizer.param_groups]


def give_gradients(own: list[torch.Tensor], step: int) -> None:
    for number, parameter in enumerate(own):
        generator = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", NAMES)
def test_it_goes_the_way_of_the_one_it_was_made_of(name):
    """From the first step on, and from its third."""
    own = parameters()
    plain = make(name, own)
    first = moved(plain, groups_like(plain), Clip(None, range(3)))
    assert all(len(first.state[p]) for p in parameters_of(first)) or name == "SGD", "a joiner knows its places"
    second, begun = None, form(first)
    for step in range(6):
        if step == 3:
            second = moved(plain, groups_like(plain), Clip(None, range(3)))
        for optimizer in filter(None, (plain, first, second)):
            give_gradients(parameters_of(optimizer), step)
            optimizer.step()
        for other in filter(None, (first, second)):
            for a, b in zip(own, parameters_of(other), strict=True):
                assert torch.equal(a, b), (step, (a - b).abs().max())
        assert form(first) == begun, "who has taken another number of steps has other places"


def form(optimizer: torch.optim.Optimizer) -> list:
    """Name and kind of each statistic, in the order in which they travel."""
    states = [optimizer.state.get(p, {}) for p in parameters_of(optimizer)]
    return [
        (name, tuple(state[name].shape) if torch.is_tensor(state[name]) else None) for state in states
        for name in sorted(state)
    ]  # fmt: skip


def test_nothing_is_shared_with_the_one_it_was_made_of():
    own = parameters()
    plain = make("AdamW", own)
    give_gradients(own, 0)
    plain.step()
    before, states = [p.detach().clone() for p in own], [plain.state[p]["exp_avg"].clone() for p in own]
    other = moved(plain, groups_like(plain), Clip(None, range(3)))
    other.param_groups[0]["lr"] = 5.0
    give_gradients(parameters_of(other), 1)
    other.step()
    assert plain.param_groups[0]["lr"] == 1e-2
    assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
    assert all(torch.equal(plain.state[p]["exp_avg"], s) for p, s in zip(own, states, strict=True))


def test_the_gradient_is_clipped_in_the_models_order_and_measured():
    own = parameters()
    plain = make("SGD", own)
    give_gradients(own, 0)
    clip = Clip(1.0, [2, 0, 1])
    other = moved(plain, groups_like(plain), clip)
    give_gradients(parameters_of(other), 0)
    norm = torch.nn.utils.clip_grad_norm_([own[2], own[0], own[1]], 1.0)
    plain.step()
    other.step()
    assert clip.norm == norm.item() and clip.rate == 1e-2
    assert all(torch.equal(a, b) for a, b in zip(own, parameters_of(other), strict=True))


@pytest.mark.parametrize(
    ("name", "methods", "word"),
    [
        ("AdaLomo", (), "computed"),
        ("ScheduleFree", ("eval",), "two models"),
    ],
)
def test_an_optimizer_that_cannot_wait_for_the_swarm_is_refused(name, methods, word):
    schedule = torch.optim.lr_scheduler.ConstantLR(make("SGD", parameters()))
    kind = type(name, (torch.optim.SGD,), {method: lambda self: None for method in methods})
    with pytest.raises(SwarmError, match=word) as caught:
        require_sharable(kind(parameters(), lr=0.1), schedule)
    assert caught.value.kind == "bad_config" and name in str(caught.value)
    require_sharable(make("AdamW", parameters()), schedule)


def test_a_layerwise_optimizer_is_refused_by_the_name_that_its_user_knows():
    """It shows a tensor of its own in place of the model's parameters."""
    optimizer = LayerWiseDummyOptimizer({}, lr=0.1)
    with pytest.raises(SwarmError, match="layerwise.* steps while gradients are computed"):
        require_sharable(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


class Keeping(torch.optim.SGD):
    """With a state as others have."""

    kept: dict = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] |= {"step": 1, **self.kept}


class Projector:
    pass


class Grouped(torch.optim.SGD):
    """Its groups count, as Prodigy's and schedule-free ones do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Growing(torch.optim.SGD):
    """A mean is kept from the second step on, as where one waits until a warm-up is over."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            if state["step"] > 1:
                state["mean"] = torch.zeros_like(parameter)


class Closing(torch.optim.SGD):
    def step(self, closure):
        closure()


class OwnTensor(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("kind", "kept", "words"),
    [
        (Keeping, {"projector": Projector()}, "'projector', a Projector"),  # GaLore, APOLLO
        (Keeping, {"Q": [torch.ones(2)]}, "'Q', a list"),  # SOAP, Shampoo
        (Keeping, {"buffer": None}, "'buffer', a NoneType"),
        (Keeping, {"shift": -1.0}, "'shift', a float"),
        (Keeping, {"codes": torch.ones(2).as_subclass(OwnTensor)}, "'codes', a OwnTensor"),  # torchao
        (Keeping, {"codes": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        (Grouped, {}, "parameter groups k, which each step changes"),
    ],
)
def test_a_state_that_no_joiner_could_take_is_refused_at_the_start(kind, kept, words, monkeypatch):
    monkeypatch.setattr(Keeping, "kept", kept)
    optimizer = kind(parameters(), lr=0.1)
    before = [p.detach().clone() for p in parameters_of(optimizer)]
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(SwarmError) as caught:
        require_sharable(optimizer, schedule)
    assert caught.value.kind == "bad_config" and words in str(caught.value), caught.value
    assert kind.__name__ in str(caught.value) and "adamw_8bit" in str(caught.value)
    assert not optimizer.state and all(map(torch.equal, before, parameters_of(optimizer)))
    with pytest.raises(SwarmError, match=kind.__name__):
        moved(optimizer, groups_like(optimizer), Clip(None, range(3)))


def test_statistics_that_later_steps_begin_are_refused():
    optimizer = Growing(parameters(), lr=0.1)
    with pytest.raises(SwarmError, match="Growing keeps in its statistics 'mean', whose form its steps change"):
        require_sharable(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    assert not optimizer.state


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", NAMES)
def test_all_others_are_not_refused(name):
    optimizer = make(name, parameters())
    require_sharable(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))


def test_one_that_asks_for_more_than_gradients_is_refused():
    optimizer = Closing(parameters(), lr=0.1)
    with pytest.raises(SwarmError, match="Closing takes no step by gradients alone"):
        moved(optimizer, groups_like(optimizer), Clip(None, range(3)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_step_is_taken_by_what_is_no_number(value):
    plain = make("AdamW", parameters())
    other = moved(plain, groups_like(plain), Clip(1.0, range(3)))
    held = [p.detach().clone() for p in parameters_of(other)]
    give_gradients(parameters_of(other), 0)
    parameters_of(other)[1].grad[3] = value
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(held, parameters_of(other), strict=True))
    assert other.state[parameters_of(other)[0]]["step"] == 0


def test_a_schedule_made_for_the_one_serves_the_other(recwarn):
    plain = make("AdamW", parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
    other = moved(plain, groups_like(plain), Clip(None, range(3)))
    Schedule(schedule, other, epoch=0).step()
    assert other.param_groups[0]["lr"] == 5e-3 and plain.param_groups[0]["lr"] == 1e-2
    hand_over(schedule, plain)
    schedule.step()
    assert other.param_groups[0]["lr"] == 5e-3 and plain.param_groups[0]["lr"] == pytest.approx(1e-2 / 3)
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def go(schedule: Schedule, epoch: int) -> None:
    """Move a schedule to an epoch, as a node does."""
    while schedule.last_epoch < epoch:
        schedule.step()


@pytest.mark.filterwarnings("ignore:Detected call")
def test_a_schedule_of_schedules_moves_as_a_whole():
    rates = []
    for is_moved in (False, True):
        plain = make("AdamW", parameters())
        kinds = torch.optim.lr_scheduler
        both = kinds.SequentialLR(
            plain, [kinds.LinearLR(plain, 0.1, total_iters=3), kinds.ExponentialLR(plain, 0.5)], milestones=[3]
        )
        other = moved(plain, groups_like(plain), Clip(None, range(3))) if is_moved else plain
        schedule = Schedule(both, other, epoch=0)
        rates.append([go(schedule, epoch) or other.param_groups[0]["lr"] for epoch in range(7)])
    assert rates[0] == rates[1] and len(set(rates[0])) == 7


@pytest.mark.filterwarnings("ignore:Detected call")
@pytest.mark.parametrize(
    ("taken", "epoch", "then"),
    [(0, 0, 10), (4, 4, 10), (0, 4, 10), (20, 0, 30)],
    ids=["new", "resumed", "resumed without its file", "passed in, and trained with before"],
)
def test_a_schedule_goes_on_where_the_run_is(taken, epoch, then):
    plain = make("AdamW", parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
    for _ in range(taken):
        schedule.step()
    go(Schedule(schedule, plain, epoch), 10)
    assert schedule.last_epoch == then


@pytest.mark.filterwarnings("ignore:Detected call")
def test_a_schedule_can_be_put_back_to_where_the_run_took_it_over():
    plain = make("AdamW", parameters())
    inner = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 1 / (1 + step))
    go(schedule := Schedule(inner, plain, epoch=0), 2)
    kept = schedule.state_dict()
    go(schedule, 5)
    schedule.load_state_dict(kept)
    go(schedule, 4)
    assert inner.last_epoch == 4 and plain.param_groups[0]["lr"] == pytest.approx(1e-2 / 5)


def test_statistics_of_16_bits_become_those_of_32():
    own = [torch.nn.Parameter(p.detach().bfloat16()) for p in parameters()]
    plain = make("AdamW", own)
    give_gradients(own, 0)
    plain.step()
    groups = [{"params": [p.detach().float().requires_grad_() for p in g["params"]]} for g in plain.param_groups]
    other = moved(plain, groups, Clip(None, range(3)))
    give_gradients(parameters_of(other), 1)
    other.step()
    assert other.state[parameters_of(other)[0]]["exp_avg"].dtype == torch.float32
