"""Take a peer's own steps between two steps of the swarm, and keep the model that they lead to.

The trained model is the swarm's newest one plus the way of our own steps that are in no step of the swarm yet. If all
peers take equally many steps and none is late, this is DiLoCo (Douillard et al. 2023, arXiv:2311.08105);
`rounds/normalised.py` says how far a step of the swarm goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from volunteer_kit.swarm.local_sgd import InnerSteps, LocalStepsConfig

QUOTA: Final = 0.75  # of the samples of a usual epoch: a step by these is made before the round begins


@dataclass(frozen=True)
class Way:
    """The change that one step has made to the model.

    :param tensors: before minus after, of each parameter, float32 on the CPU; none: it is not finite
    :param lineage: of the swarm's model that the first of its gradients was computed on
    :param names: of the samples, as the node knows them
    """

    tensors: tuple[torch.Tensor, ...]
    samples: int
    lineage: bytes
    names: tuple[str, ...]


class LocalTraining:
    """The inner optimizer of one peer, and the way that its model is ahead of the swarm's.

    The loop's thread calls it; `settle` may come from another one.

    :param groups: the model's parameters, or groups of them, on the training device
    :param epoch: -> of the swarm's model that is trained; the inner schedule follows it
    :param unit: of ways in slots, see `normalised.unit_of`
    :ivar life: grows when the model begins anew: of the ways before nothing is on top of it
    """

    def __init__(self, config: LocalStepsConfig, groups: Sequence[Any], epoch: Callable[[], int], unit: float):
        self._inner, self._epoch, self.unit, self.life = InnerSteps(config, groups, epoch), epoch, unit, 0
        parameters = self._inner.parameters
        self._ahead = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float32, device="cpu")  # (N,)
        parts = torch.split(self._ahead, [parameter.numel() for parameter in parameters])
        self._ahead_of = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        self._lock = threading.Lock()  # held while the way ahead is written or read
        self._gathered, self._lineage = 0, b""  # samples of the step to come, and where the first one was computed
        self._names: tuple[str, ...] = ()
        self._computed, self._since = 0, 0  # samples since the model of this epoch came
        self._usual: float | None = None  # samples of this peer in an epoch

    @property
    def gathered(self) -> int:
        """Samples that no step has yet."""
        return self._gathered

    @property
    def taken(self) -> int:
        """Steps that were taken."""
        return self._inner.taken

    @property
    def is_due(self) -> bool:
        """Return whether to step now. A peer that is too slow for a whole step in an epoch steps with fewer samples, as
        many as it has before the round begins."""
        quota = float(self._inner.batch_size)
        if self._usual is not None:
            quota = min(quota, QUOTA * self._usual)
        return self._gathered >= max(1.0, quota)

    def gather(
        self,
        gradients: Sequence[torch.Tensor | None],
        samples: int,
        grad_scale: float,
        lineage: bytes,
        names: Iterable[str],
    ) -> None:
        """Take a microbatch's mean gradients, times `grad_scale`, for the next step.

        :param lineage: of the swarm's model below the trained one
        """
        if not self._gathered:
            self._lineage = lineage
        self._inner.add(gradients, samples, grad_scale)
        self._gathered += samples
        self._computed += samples
        self._names = (*self._names, *names)

    @torch.no_grad()
    def step(self) -> Way:
        """Step by what is gathered. A step of fewer samples than a whole one goes a part of its way. After one that is
        not finite the model is to begin anew."""
        samples, lineage, names = self._gathered, self._lineage, self._names
        self._gathered, self._names = 0, ()
        before = self._inner.copy()
        self._inner.step()
        part = min(1.0, samples / self._inner.batch_size)
        ways = [(start - end) * part for start, end in zip(before, self._inner.copy(), strict=True)]
        if not all(bool(torch.isfinite(way).all()) for way in ways):
            return Way((), samples, lineage, names)
        if part < 1:
            for parameter, start, way in zip(self._inner.parameters, before, ways, strict=True):
                parameter.copy_(start - way)
        with self._lock:
            torch._foreach_add_(self._ahead_of, ways)
        return Way(tuple(ways), samples, lineage, names)

    @torch.no_grad()
    def settle(self, life: int, parts: Iterable[tuple[slice, torch.Tensor]]) -> None:
        """These ways are in a step of the swarm, or in none to come: the model is ahead by them no more.

        :param life: of the model that went them
        :param parts: places in the flat vector (N,), and the ways there times the unit
        """
        with self._lock:
            if life == self.life:
                for place, way in parts:
                    self._ahead[place].sub_(way, alpha=1 / self.unit)

    @torch.no_grad()
    def put(self, shared: Sequence[torch.Tensor]) -> None:
        """The swarm has a new model: go there, and as far on as our way ahead.

        :param shared: its parameters, float32 on the CPU
        """
        with self._lock:
            for parameter, new, ahead in zip(self._inner.parameters, shared, self._ahead_of, strict=True):
                parameter.copy_(new - ahead)
        if self._computed and self._epoch() > self._since:
            self._usual = self._computed / (self._epoch() - self._since)
            self._computed = 0
        if not self._computed:
            self._since = self._epoch()

    def begin_anew(self) -> None:
        """Nothing of our way, nor of the inner statistics, is of use to the model that is put next."""
        self._inner.renew()
        self._inner.forget()
        self._gathered, self._names = 0, ()
        with self._lock:
            self.life += 1
            self._ahead.zero_()
