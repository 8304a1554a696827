"""What steps in a run with local steps, and how far a run's steps can go."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from volunteer_kit.optim import LambStepBound, OuterNesterov, build_optimizer_factory
from volunteer_kit.swarm.local_steps import LocalStepsConfig

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
    return LocalStepsConfig(config.swarm.local_steps.batch_size, *build_optimizer_factory(config.optimizer))


def build_step_bound(config: RunConfig, rounding: float = 0.0) -> LambStepBound | None:
    """How far epochs can move the model; None: nobody can say, as with local steps, of which a peer takes as many as
    it can. Newcomers take the monitor's signed checkpoints alone then."""
    return None if config.swarm.local_steps is not None else LambStepBound(config.optimizer, rounding)
