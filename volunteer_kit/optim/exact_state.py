"""Optimizers whose statistics exist from the start and keep their types when a state is loaded."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch


class ExactStateOptimizer(torch.optim.Optimizer):
    """Base of the kit's optimizers: state_dict() has one structure for life, and loading it changes no type.

    A subclass says in `new_state` which statistics one parameter has; they are created as soon as the parameter is
    added. So no trial step is needed to learn the structure of the state; loading copies into the tensors, it never
    replaces them.
    """

    non_negative: frozenset[str] = frozenset()  # statistics whose values below zero are refused: their root is NaN

    def new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The statistics of a parameter that has made no step: tensors and plain numbers, by name."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, and creates the zero statistics of the new parameters."""
        # what torch has wrapped it in loads torch's compiler, a second of each worker's start
        inspect.unwrap(torch.optim.Optimizer.add_param_group)(self, param_group)
        group = self.param_groups[-1]
        for param in group["params"]:
            self.state[param] = self.new_state(param, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy statistics and learning rates into this optimizer; every tensor keeps its own type and memory.

        torch's own version casts integer statistics to float32. The other settings (betas, weight decay, ...) stay
        this optimizer's: they belong to the run, and a state may come from a stranger.
        Raises ValueError, with nothing changed, if the state does not fit.
        """
        groups = state_dict["param_groups"]
        own_sizes, sizes = ([len(group["params"]) for group in some] for some in (self.param_groups, groups))
        if own_sizes != sizes:
            raise ValueError(f"this state is of another model: parameter groups of {sizes}, here {own_sizes}")
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in groups for key in group["params"]]
        states = [state_dict["state"].get(key, {}) for key in keys]
        rates = [float(group["lr"]) for group in groups]
        for position, (param, state) in enumerate(zip(params, states, strict=True)):
            _check_fits(self.state[param], state, position, self.non_negative)
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(f"this state has an impossible learning rate: {rates}")

        for param, state in zip(params, states, strict=True):
            own = self.state[param]
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    own[name].copy_(value)
                else:
                    own[name] = value
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


def _check_fits(own: dict[str, Any], state: dict[str, Any], position: int, non_negative: frozenset[str]) -> None:
    if own.keys() != state.keys():
        raise ValueError(f"parameter {position}: statistics {sorted(state)} given, {sorted(own)} expected")
    for name, value in state.items():
        mine = own[name]
        where = f"statistic {name!r} of parameter {position}"
        if not isinstance(mine, torch.Tensor):
            if type(value) is not type(mine) or value < 0:
                raise ValueError(f"{where} is {value!r}, expected {type(mine).__name__} >= 0")
            continue
        if not isinstance(value, torch.Tensor) or value.shape != mine.shape:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ValueError(f"{where} has shape {found}, expected {tuple(mine.shape)}")
        both_floating = value.dtype.is_floating_point and mine.dtype.is_floating_point
        if value.dtype != mine.dtype and not both_floating:
            raise ValueError(f"{where} is {value.dtype}, expected {mine.dtype}")
        if both_floating and value.numel():
            low, high = (float(bound) for bound in torch.aminmax(value))  # NaN goes through both
            if not (math.isfinite(low) and math.isfinite(high)) or (low < 0 and name in non_negative):
                raise ValueError(f"{where} holds values from {low} to {high}")
