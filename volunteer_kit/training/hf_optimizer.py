"""Any torch optimizer, moved to where the swarm's gradients arrive; and what a Trainer holds in its place."""

from __future__ import annotations

import copy
import math
import time
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from volunteer_kit.swarm.codecs.wire import FLOATS, INTEGERS
from volunteer_kit.swarm.errors import SwarmError

TRIED = 3  # steps of a trial
LATELY = 10  # steps of a device that its speed is measured over
Count = Callable[[], tuple[int, float, Sequence[Hashable]]]


class Stepping(Protocol):
    """Takes a Trainer's gradients, as NodeSwarm does."""

    def step(
        self,
        batch_size: int,
        *,
        names: Sequence[Hashable] = (),
        weight: float | None = None,
        ends_pass: bool = False,
    ) -> bool: ...

    def await_turn(self, batch: int, last_epoch: int | None = None) -> None: ...


class Clip:
    """Clips the swarm's gradient, as a Trainer clips its own.

    :param max_norm: 0 or None: it is measured, and left as it is
    :param order: places of the parameters in the model's own order. The norm is a sum, and a Trainer's goes over the
        model in that order: another one ends in other last bits
    """

    def __init__(self, max_norm: float | None, order: Sequence[int]):
        self.max_norm, self._order = max_norm or math.inf, order
        self.norm: float | None = None  # of the last global step, before it was clipped
        self.rate = 0.0  # learning rate of that step

    def __call__(self, optimizer: torch.optim.Optimizer) -> bool:
        """:returns: whether the gradient is finite"""
        parameters = parameters_of(optimizer)
        norm = torch.nn.utils.clip_grad_norm_([parameters[place] for place in self._order], self.max_norm)
        self.norm, self.rate = norm.item(), float(optimizer.param_groups[0]["lr"] or 0.0)
        return math.isfinite(self.norm)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def moved(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], clip: Clip) -> torch.optim.Optimizer:
    """The same optimizer over the parameters of `groups` (on the CPU), with its statistics if it has any, else with
    those of no step. It clips, and takes no step by a gradient that is not finite.

    It is copied, not made anew: nobody knows how an optimizer that was passed in had been made.
    """
    own = {id(old): p for old, p in zip(parameters_of(optimizer), _all(groups), strict=True)}
    new = _copy_over(optimizer, [[own[id(p)] for p in group["params"]] for group in optimizer.param_groups])
    new._opt_called = True  # a joiner's schedule is stepped to its place first, and schedulers warn of it
    for parameter, state in optimizer.state.items():
        new.state[own[id(parameter)]] = {name: _copied(value) for name, value in state.items()}
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(new, name, copy.copy(value))
    if problem := _complete(new):
        raise SwarmError(_cannot_travel(new, problem), kind="bad_config")

    plain = type(optimizer).step

    def step(self, closure=None):
        if clip(self):
            plain(self)

    step._wrapped_by_lr_sched = True
    new.step = types.MethodType(step, new)
    return new


def _copy_over(optimizer: torch.optim.Optimizer, parameters: Sequence[list[torch.Tensor]]) -> torch.optim.Optimizer:
    """The same over other parameters, so many for each group, without statistics."""
    new = object.__new__(type(optimizer))
    new.__dict__.update(optimizer.__dict__)
    new.param_groups = [
        {**group, "params": own, **_on_the_cpu(group)}
        for group, own in zip(optimizer.param_groups, parameters, strict=True)
    ]
    new.defaults, new.state = dict(optimizer.defaults), defaultdict(dict)
    return new


def require_travelling_state(optimizer: torch.optim.Optimizer) -> None:
    """Raises SwarmError (bad_config) if a step makes what no peer could take that joins later. Tried on copies of a few
    parameters, before anybody is met; `moved` looks at all of them."""
    chosen = []
    for group in optimizer.param_groups:
        by_shape = {p.ndim: p for p in sorted(group["params"], key=torch.Tensor.numel, reverse=True)}
        few = [torch.zeros(p.shape, dtype=torch.float32, device="cpu") for p in by_shape.values()]
        chosen.append([p.requires_grad_() for p in few])
    trial = _copy_over(optimizer, chosen)
    for name in vars(optimizer):
        if name.endswith("_hooks"):
            setattr(trial, name, OrderedDict())
    try:
        problem = _complete(trial) or _what_steps_change(trial)
    except SwarmError:  # it may want all of them
        return
    if problem:
        raise SwarmError(_cannot_travel(optimizer, problem), kind="bad_config")


def _all(groups: Sequence[dict[str, Any]]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _on_the_cpu(group: dict[str, Any]) -> dict[str, Any]:
    """Settings that a GPU only can have."""
    return {"capturable": False} if group.get("capturable") else {}


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    # the swarm's own parameters have 32 bits, also those of a model of 16
    value = value.detach().cpu().clone()
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


class _First(dict):
    """One parameter's statistics, and what each was when it was made."""

    def __init__(self):
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, name: str, value: Any) -> None:
        self.first.setdefault(name, _copied(value))
        super().__setitem__(name, value)


def _complete(optimizer: torch.optim.Optimizer) -> str | None:
    """Make the statistics of parameters that have none: a joiner has to know its places before it takes a state.

    Optimizers make them in their first step, so one is taken, of zeros with zero gradients, and undone. Not all begin
    with zeros (NAdam, Rprop), and after that step they are no longer what they began with.

    :returns: what of them could not be given to a joiner, in words
    Raises SwarmError (bad_config) if it cannot step.
    """
    parameters = parameters_of(optimizer)
    kept = {p: state for p, state in optimizer.state.items() if state}
    if all(p in kept for p in parameters):
        return _what_cannot_travel(optimizer)
    settings = _settings(optimizer)
    optimizer.state = defaultdict(_First)
    values = [p.detach().clone() for p in parameters]
    for parameter in parameters:
        parameter.detach().zero_()  # weight decay would stand in the statistics
        parameter.grad = torch.zeros_like(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bitsandbytes: paged statistics are not paged on a CPU
        try:
            type(optimizer).step(optimizer)
        except Exception as error:
            raise SwarmError(
                f"The optimizer {type(optimizer).__name__} takes no step by gradients alone on a CPU, as the swarm's "
                f"does: {error!r}.\n1. Choose another, such as adamw_torch.",
                kind="bad_config",
            ) from error
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    begun = {
        p: {name: _in_form_of(value, state.first.get(name, value)) for name, value in state.items()}
        for p, state in optimizer.state.items()
    }
    optimizer.state = defaultdict(dict, {**begun, **kept})
    if changed := sorted(name for name, value in _settings(optimizer).items() if settings.get(name) != value):
        return f"in its parameter groups {', '.join(changed)}, which each step changes"
    return _what_cannot_travel(optimizer)


def _in_form_of(value: Any, first: Any) -> Any:
    """The first value of a statistic, in the form that steps leave it: transformers' Adafactor begins with the number 0
    and goes on with a tensor, and a state whose places change could be given to nobody."""
    if isinstance(value, torch.Tensor):
        begun = torch.as_tensor(first, dtype=value.dtype, device=value.device)
        return begun if begun.shape == value.shape else begun.expand_as(value).clone()
    return first.item() if isinstance(first, torch.Tensor) and first.numel() == 1 else first


def _form(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Names of each parameter's statistics, and what each is."""
    return [
        {name: (tuple(value.shape), value.dtype) if torch.is_tensor(value) else "number" for name, value in own.items()}
        for own in (optimizer.state.get(p, {}) for p in parameters_of(optimizer))
    ]


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, list[float]]:
    """Numbers of the parameter groups by name. A peer that joins has those that its script set."""
    found: dict[str, list[float]] = defaultdict(list)
    for group in optimizer.param_groups:
        for name, value in group.items():
            if isinstance(value, (int, float)) or (torch.is_tensor(value) and value.ndim == 0):
                found[name].append(float(value))
    return found


def _what_steps_change(optimizer: torch.optim.Optimizer) -> str | None:
    """Statistics whose places change with the steps: peers at different steps could not tell which is which."""
    begun = _form(optimizer)
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.ones_like(parameter)
    for _ in range(TRIED):
        type(optimizer).step(optimizer)
        if _form(optimizer) != begun:
            pairs = zip(begun, _form(optimizer), strict=True)
            changed = sorted({name for old, new in pairs for name, _ in old.items() ^ new.items()})
            return f"in its statistics {', '.join(map(repr, changed))}, whose form its steps change"
    return None


def _what_cannot_travel(optimizer: torch.optim.Optimizer) -> str | None:
    """A state travels as plain tensors and as numbers that are finite and not negative."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
                fits = is_plain and str(value.dtype).removeprefix("torch.") in FLOATS | INTEGERS
            else:
                fits = isinstance(value, (int, float)) and math.isfinite(value) and value >= 0
            if not fits:
                kind = f"{type(value).__name__} of {value.dtype}" if torch.is_tensor(value) else type(value).__name__
                return f"in its statistics {name!r}, a {kind}"
    return None


def _cannot_travel(optimizer: torch.optim.Optimizer, what: str) -> str:
    return (
        f"The optimizer {type(optimizer).__name__} keeps {what}: that cannot be given to a peer that joins, whose "
        "steps would differ from everybody's.\n"
        "1. Choose another, such as adamw_torch.\n"
        "2. To need less memory or line, adamw_8bit, or adapters (LoRA)."
    )


class Schedule:
    """A Trainer's schedule over the optimizer that takes the swarm's steps, stepped once for each of these.

    :param epoch: the swarm's. A schedule that is further has been somewhere else, and goes on from there
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer, epoch: int):
        self._scheduler = scheduler
        hand_over(scheduler, optimizer)
        # of the swarm's; not all schedules have it
        self.last_epoch = min(epoch, getattr(scheduler, "last_epoch", epoch))

    def step(self) -> None:
        self._scheduler.step()
        self.last_epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]
        self._scheduler.load_state_dict(state["scheduler"])


@dataclass(frozen=True)
class FirstRates:
    """A schedule as it is when a training begins, before a checkpoint is loaded: who goes back in the swarm's steps has
    to know it."""

    schedule: dict[str, Any]
    groups: tuple[dict[str, Any], ...]  # learning rates of each

    @classmethod
    def of(cls, scheduler: Any, optimizer: torch.optim.Optimizer) -> FirstRates:
        rates = ("lr", "initial_lr")
        groups = [{name: group[name] for name in rates if name in group} for group in optimizer.param_groups]
        return cls(copy.deepcopy(scheduler.state_dict()), tuple(copy.deepcopy(groups)))

    def give(self, scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Set a schedule, and an optimizer with the same groups, back to it."""
        scheduler.load_state_dict(copy.deepcopy(self.schedule))
        for group, first in zip(optimizer.param_groups, copy.deepcopy(self.groups), strict=True):
            group |= first


def hand_over(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a schedule, and those that it is made of, set another optimizer's learning rates."""
    scheduler.optimizer = optimizer
    for part in getattr(scheduler, "_schedulers", ()):
        hand_over(part, optimizer)


class SwarmStep(torch.optim.Optimizer):
    """What a Trainer calls its optimizer: its parameters are those of the device, its step gives their gradients to the
    swarm, its state is the swarm's.

    :param shown: the Trainer's own, whose groups these are
    :param behind: -> the one that steps, on the CPU
    :param count: -> (samples, weight, names of the samples) of the gradients at hand
    :param ends_pass: -> are these samples the last of a pass over this peer's data?
    :param last_epoch: of the swarm's, after which no more samples are wanted
    """

    def __init__(
        self,
        shown: torch.optim.Optimizer,
        swarm: Stepping,
        behind: Callable[[], torch.optim.Optimizer],
        count: Count,
        ends_pass: Callable[[], bool] = lambda: False,
        last_epoch: int | None = None,
    ):
        self.shown, self.swarm, self._behind, self._count = shown, swarm, behind, count
        self._ends_pass, self._last_epoch = ends_pass, last_epoch
        self._lately: deque[tuple[int, float]] = deque(maxlen=LATELY)  # samples, s of the device
        self._left_at: float | None = None
        super().__init__([{"params": group["params"]} for group in shown.param_groups], dict(shown.defaults))
        self.param_groups = shown.param_groups

    def step(self, closure=None) -> None:
        samples, weight, names = self._count()
        if self._left_at is not None:
            self._lately.append((samples, time.monotonic() - self._left_at))
        self.swarm.step(batch_size=samples, weight=weight, names=names, ends_pass=self._ends_pass())
        self.await_turn(samples)
        self._left_at = time.monotonic()

    def await_turn(self, samples: int) -> None:
        """Return when a batch of so many samples is wanted by the swarm."""
        self.swarm.await_turn(samples, self._last_epoch)

    @property
    def samples_per_second(self) -> float:
        """Of this device, over its last steps; averaging not counted."""
        seconds = sum(seconds for _, seconds in self._lately)
        return sum(samples for samples, _ in self._lately) / seconds if seconds else 0.0

    def state_dict(self) -> dict[str, Any]:
        return self._behind().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("A state is loaded before the training begins.")
