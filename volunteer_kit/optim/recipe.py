"""The run's optimizer settings: which parameters are decayed, and the learning rate over the epochs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from .lamb import Lamb
from .lamb8bit import Lamb8bit

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
SPARED_NAMES = frozenset({"bias", "scale", "gamma", "beta", "g", "temperature"})  # LayerScale's is called `scale`

NamedParameters = Iterable[tuple[str, nn.Parameter]]


class OptimizerConfig(BaseModel):
    """What every peer must share about the optimizer; the defaults are the original run's.

    An epoch is one optimizer step of the whole swarm (target_batch_size samples).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(2.5e-3, gt=0, allow_inf_nan=False)  # learning rate at the top of the schedule
    betas: tuple[float, float] = (0.9, 0.96)  # decay of the first and second moments
    eps: float = Field(1e-6, gt=0, allow_inf_nan=False)  # added to the denominator
    weight_decay: float = Field(0.045, ge=0, allow_inf_nan=False)  # of matrices and embeddings; norms are spared
    max_grad_norm: float | None = Field(4.0, gt=0, allow_inf_nan=False)  # clips the norm of the averaged gradient
    clamp_value: float = Field(1e4, gt=0, allow_inf_nan=False)  # largest weight norm in the trust ratio
    debias: bool = False  # correct the bias of the moments in early steps, as Adam does
    statistics_bits: Literal[8, 32] = 8  # bits of large moments; 32: 6 bytes a parameter more, in downloads too
    warmup_epochs: int = Field(3125, ge=0)  # epochs in which the learning rate rises to `lr`
    total_epochs: int = Field(31250, ge=1)  # the learning rate is 0 from here on

    @model_validator(mode="after")
    def _possible(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        if self.warmup_epochs >= self.total_epochs:
            raise ValueError(
                f"warmup_epochs ({self.warmup_epochs}) must be smaller than total_epochs ({self.total_epochs}): "
                "the rate has to come down again"
            )
        return self


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
    """(parameters or groups -> Lamb or Lamb8bit, optimizer -> scheduler), as hivemind.Optimizer takes them.

    hivemind steps the scheduler once an epoch, catching up after a join, so the schedule counts the swarm's epochs.
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
