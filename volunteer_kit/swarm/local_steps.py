"""Steps that this peer takes alone between two rounds: what is averaged then is how far they have moved the model.

DiLoCo (Douillard et al. 2023, arXiv:2311.08105): an inner optimizer steps on each peer's own samples, and once in an
epoch an outer one on the mean of what they have moved. While a round is on its way the steps go on; what they have
moved meanwhile is put on top of the round's result, and is part of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.utils.logging import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True)
class LocalStepsConfig:
    """:param batch_size: samples of one step of this peer
    :param optimizer: parameters or groups -> the inner optimizer; its statistics are this peer's own
    :param scheduler: inner optimizer -> its schedule, of the swarm's epochs
    """

    batch_size: int
    optimizer: Callable[..., torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None


class LocalSteps:
    """:param groups: the model's parameters, or groups of them, on the training device
    :param shared: the same parameters as all peers hold them, in the same order; float32 on the CPU
    :param epoch: -> the swarm's, which the schedule follows
    """

    def __init__(
        self, config: LocalStepsConfig, groups: Sequence[Any], shared: Sequence[torch.Tensor], epoch: Callable[[], int]
    ):
        self.batch_size, self.taken = config.batch_size, 0
        self._shared, self._epoch = shared, epoch
        self._config, self._groups = config, [dict(group) if isinstance(group, dict) else group for group in groups]
        self._make_optimizer()
        self._parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        self._means = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self._parameters]
        self._samples = 0.0  # that the means are of
        self._used = [False] * len(self._parameters)  # which of them had a gradient
        self._has_moved = False  # since the last round
        self._origin: list[torch.Tensor] | None = None  # from where on our way counts; None: from wherever we are put
        self._origin = self._on_cpu()

    def _make_optimizer(self) -> None:
        groups = [dict(group) if isinstance(group, dict) else group for group in self._groups]  # it writes into its own
        self._optimizer = self._config.optimizer(groups)
        self._scheduler = self._config.scheduler(self._optimizer) if self._config.scheduler else None

    def _on_cpu(self) -> list[torch.Tensor]:
        return [parameter.detach().to("cpu", torch.float32, copy=True) for parameter in self._parameters]

    @torch.no_grad()
    def add(self, gradients: Sequence[torch.Tensor], samples: float, had: Sequence[bool] | None = None) -> None:
        """A microbatch's mean gradients, over so many samples; with `batch_size` of them, step.

        :param had: which parameters had a gradient; one that had none since the last step is left alone. None: all had
        """
        had = [True] * len(self._used) if had is None else had
        self._used = [any(pair) for pair in zip(self._used, had, strict=True)]
        self._samples += samples
        torch._foreach_lerp_(self._means, list(gradients), samples / self._samples)
        if self._samples >= self.batch_size:
            self._step()

    def _step(self) -> None:
        while self._scheduler is not None and self._scheduler.last_epoch < self._epoch():
            self._scheduler.step()
        for parameter, gradient, is_used in zip(self._parameters, self._means, self._used, strict=True):
            parameter.grad = gradient.to(parameter.dtype) if is_used else None
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._forget_gradients()
        self.taken += 1
        self._has_moved = True

    def _forget_gradients(self) -> None:
        torch._foreach_zero_(self._means)
        self._samples, self._used = 0.0, [False] * len(self._used)

    @torch.no_grad()
    def way(self) -> list[torch.Tensor]:
        """What goes into a round: the model that we set out from, minus ours; float32 on the CPU.

        Who is too slow for a whole step steps with what it has: who gives zeros gives nothing, and is credited and
        believed for nothing, while its samples weigh in everybody's mean.
        """
        if self._samples > 0 and not self._has_moved:
            self._step()
        self._has_moved = False
        before, self._origin = self._origin or self._shared, self._on_cpu()
        way = [start.detach().float() - ours for start, ours in zip(before, self._origin, strict=True)]
        if not _is_finite(way):
            self._begin_anew()
            torch._foreach_zero_(way)
        return way

    def _begin_anew(self) -> None:
        """Our steps have broken our model, though not the others': from theirs, and with statistics of nothing. It
        would stay broken else, for what we are ahead of them would be no number for ever."""
        logger.warning("Our local steps led to values that are not finite; we go on from the others' model.")
        self.restart(with_statistics=True)
        self.arrive()

    @torch.no_grad()
    def arrive(self) -> None:
        """The peers have a new model: go there, and as far on as we have gone since the last round began."""
        shared = [tensor.detach().to(torch.float32, copy=True) for tensor in self._shared]
        since, self._origin = self._origin or [None] * len(shared), shared
        is_finite = True
        for parameter, new, origin in zip(self._parameters, shared, since, strict=True):
            ahead = 0.0 if origin is None else parameter.detach().to("cpu", torch.float32) - origin
            is_finite = is_finite and (origin is None or bool(torch.isfinite(ahead).all()))
            parameter.copy_(new + ahead)
        if not is_finite:
            self._begin_anew()

    def restart(self, with_statistics: bool = False) -> None:
        """The peers' model is not what ours came of: nothing of our way is of use to it.

        :param with_statistics: nor are the inner optimizer's, which led away from it
        """
        if with_statistics:
            self._make_optimizer()
        self._origin = None
        self._forget_gradients()


def _is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
