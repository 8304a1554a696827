"""Configure the inner optimizer, which steps on one peer's own samples between two steps of the swarm.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105): an inner optimizer steps on each peer's own samples, and an outer one
steps on the mean of what these have moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LocalStepsConfig:
    """:param batch_size: samples of one step of this peer
    :param optimizer: parameters or groups -> the inner optimizer; its statistics are this peer's own
    :param scheduler: inner optimizer -> its schedule, of the swarm's epochs
    """

    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None


class InnerSteps:
    """The inner optimizer, and the mean gradient of its next step.

    :param groups: the model's parameters, or groups of them, on the training device
    :param epoch: -> the swarm's, which the schedule follows
    :ivar parameters: in the order of the groups
    :ivar samples: that the mean gradient is of
    :ivar taken: steps
    """

    def __init__(self, config: LocalStepsConfig, groups: Sequence[Any], epoch: Callable[[], int]):
        self.batch_size, self.taken = config.batch_size, 0
        self._config, self._epoch = config, epoch
        self._groups = [dict(group) if isinstance(group, dict) else group for group in groups]
        self.renew()
        self.parameters: list[torch.Tensor] = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._means = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self.parameters]
        self.samples = 0.0
        self._used = [False] * len(self.parameters)  # which of them had a gradient

    def renew(self) -> None:
        """Make the optimizer anew: its statistics led to a model that is not ours any more."""
        groups = [dict(group) if isinstance(group, dict) else group for group in self._groups]  # it writes into its own
        self._optimizer = self._config.optimizer(groups)
        self._scheduler = self._config.scheduler(self._optimizer) if self._config.scheduler else None

    @torch.no_grad()
    def add(self, gradients: Sequence[torch.Tensor | None], samples: float, grad_scale: float = 1.0) -> None:
        """Take a microbatch's mean gradients, times `grad_scale`, over so many samples, into the mean.

        :param gradients: of each parameter; None: it had none. One that had none since the last step is left alone
        """
        self.samples += samples
        part = samples / self.samples
        there = [place for place, gradient in enumerate(gradients) if gradient is not None]
        own = [gradient.to(mean) for gradient, mean in zip(gradients, self._means, strict=True) if gradient is not None]
        if own and grad_scale != 1.0:
            own = list(torch._foreach_div(own, grad_scale))
        if own:
            torch._foreach_lerp_([self._means[place] for place in there], own, part)
        for place in set(range(len(self._means))) - set(there):
            self._means[place].mul_(1 - part)
        for place in there:
            self._used[place] = True

    @property
    def is_full(self) -> bool:
        """Return whether the mean gradient is of at least `batch_size` samples."""
        return self.samples >= self.batch_size

    @torch.no_grad()
    def step(self) -> None:
        """One step by the mean gradient, which is forgotten then."""
        while self._scheduler is not None and self._scheduler.last_epoch < self._epoch():
            self._scheduler.step()
        for parameter, gradient, is_used in zip(self.parameters, self._means, self._used, strict=True):
            parameter.grad = gradient.to(parameter.dtype) if is_used else None
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.forget()
        self.taken += 1

    def forget(self) -> None:
        """Drop the mean gradient."""
        torch._foreach_zero_(self._means)
        self.samples, self._used = 0.0, [False] * len(self._used)

    def copy(self) -> list[torch.Tensor]:
        """The parameters, float32 on the CPU."""
        return [parameter.detach().to("cpu", torch.float32, copy=True) for parameter in self.parameters]
