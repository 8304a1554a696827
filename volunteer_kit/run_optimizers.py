"""What steps in a run with local steps, and how far a run's steps can go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from volunteer_kit.optim import LambStepBound, OuterNesterov, build_optimizer_factory
from volunteer_kit.swarm.local_sgd import LocalStepsConfig

if TYPE_CHECKING:
    from volunteer_kit.run_sections import LocalStepsSection
    from volunteer_kit.runs import RunConfig


def build_outer_optimizer(local: LocalStepsSection) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(params -> optimizer, optimizer -> schedule) of what all peers hold; its rate stays, the inner one's falls."""
    return partial(OuterNesterov, lr=local.outer_lr, momentum=local.outer_momentum), partial(LambdaLR, lr_lambda=_one)


def _one(epoch: int) -> float:
    return 1.0


def build_local_steps(config: RunConfig) -> LocalStepsConfig | None:
    """Of a peer that trains; None: the run has none."""
    if config.swarm.local_steps is None:
        return None
    make, scheduler = build_optimizer_factory(config.optimizer)
    make_anywhere, _ = build_optimizer_factory(config.optimizer.model_copy(update={"statistics_bits": 32}))

    def make_inner(groups: Any) -> torch.optim.Optimizer:
        """It steps on the training device, and 8-bit statistics are for the CPU; these are nobody else's."""
        groups = list(groups)
        params = [p for group in groups for p in (group["params"] if isinstance(group, dict) else [group])]
        return (make if all(p.device.type == "cpu" for p in params) else make_anywhere)(groups)

    return LocalStepsConfig(config.swarm.local_steps.batch_size, make_inner, scheduler)


def build_step_bound(config: RunConfig) -> LambStepBound | None:
    """How far epochs can move the model; None: nobody can say, as with local steps, of which a peer takes as many as
    it can."""
    return None if config.swarm.local_steps is not None else LambStepBound(config.optimizer)
