"""The run's optimizer settings: which parameters are decayed, and the learning rate over the epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .config import OptimizerConfig
from .lamb import Lamb
from .lamb8bit import Lamb8bit

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
SPARED_NAMES = frozenset({"bias", "scale", "gamma", "beta", "g", "temperature"})  # LayerScale's is called `scale`

NamedParameters = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class LinearSchedule:
    """Factor of the learning rate in an epoch: up in a line during warm-up, then down in a line to 0.

    Epoch 0 already learns: (epoch + 1) / warmup_epochs, where the original began with a step of size zero.
    """

    warmup_epochs: int
    total_epochs: int

    def __call__(self, epoch: int) -> float:
        if epoch < self.warmup_epochs:
            return (epoch + 1) / self.warmup_epochs
        return max(0.0, (self.total_epochs - epoch) / (self.total_epochs - self.warmup_epochs))


def is_decayed(name: str, param: torch.Tensor, owner: nn.Module | None = None) -> bool:
    """Whether weight decay acts on this parameter: matrices and embeddings yes; norms, biases, LayerScale no.

    Embeddings are decayed as in the original. `owner` is the module that holds the parameter, if it is known.
    """
    parts = name.split(".")
    if isinstance(owner, NORMS) or parts[-1] in SPARED_NAMES or any("norm" in part.lower() for part in parts[:-1]):
        return False
    return param.ndim > 1


def param_groups(model: nn.Module | NamedParameters, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in one or two groups for an optimizer: decayed ones first, then the spared ones.

    A parameter that has several names (tied weights) appears once. `parameter_names` gives the names in this order.
    """
    decayed, spared = _split(model)
    groups = [(decayed, weight_decay), (spared, 0.0)]
    return [{"params": [p for _, p in named], "weight_decay": decay} for named, decay in groups if named]


def parameter_names(model: nn.Module | NamedParameters) -> list[str]:
    """The names of what param_groups returns, in its order, which is not the model's."""
    return [name for named in _split(model) for name, _ in named]


def build_optimizer_factory(
    config: OptimizerConfig,
) -> tuple[Callable[[Iterable[Any]], Lamb], Callable[[torch.optim.Optimizer], LambdaLR]]:
    """(parameters or groups -> Lamb or Lamb8bit, optimizer -> scheduler), as NodeOptimizer takes them.

    The scheduler is stepped once an epoch, catching up after a join, so the schedule counts the swarm's epochs.
    """
    settings = config.model_dump(exclude={"warmup_epochs", "total_epochs", "statistics_bits"})
    schedule = LinearSchedule(config.warmup_epochs, config.total_epochs)
    return partial(Lamb8bit if config.statistics_bits == 8 else Lamb, **settings), partial(LambdaLR, lr_lambda=schedule)


def _split(model: nn.Module | NamedParameters) -> tuple[list[tuple[str, nn.Parameter]], ...]:
    named = model.named_parameters() if isinstance(model, nn.Module) else model
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    seen: set[int] = set()
    decayed: list[tuple[str, nn.Parameter]] = []
    spared: list[tuple[str, nn.Parameter]] = []
    for name, param in named:
        if id(param) in seen or not param.requires_grad:
            continue
        seen.add(id(param))
        owner = modules.get(name.rpartition(".")[0])
        (decayed if is_decayed(name, param, owner) else spared).append((name, param))
    return decayed, spared
