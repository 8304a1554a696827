"""The training process's part in verified averaging: keeping the last models, and computing others' samples again."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from hivemind.utils.logging import get_logger

from volunteer_kit.robust.messages import Duty
from volunteer_kit.robust.sketch import sketch_slices
from volunteer_kit.swarm.following import FollowingOptimizer
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.verified_exchange import Verdicts

logger = get_logger(__name__)
# of the epoch before the round's, the round's own, and those that begin while validators and then jurors compute
KEPT_MODELS = 4
# of what the group waits for who is expected; of others' samples between two microbatches of our own. Who is away for
# longer misses the round in which its report was due, and the others conclude that it is gone
AT_ONCE = 0.5
MAX_DUTIES = 64


class Recompute(Protocol):
    """Gradients of named samples, on a model that was.

    :param names: as the stream names them
    :param parameters: of the model, in the optimizer's order
    :returns: batches of the work, each the sum of its samples' gradients of their own loss, in that order, float32 on
        the CPU; asked for one after the other, so that the trainer can go on in between. Raises DataError for samples
        that cannot be read
    """

    def __call__(
        self, names: Sequence[Hashable], parameters: Sequence[torch.Tensor]
    ) -> Iterator[Sequence[torch.Tensor]]: ...


class VerifyingOptimizer(FollowingOptimizer):
    """hivemind.Optimizer that looks at others' work when it is drawn to, if the run verifies."""

    # Overrides: only_accumulated

    recompute: Recompute | None = None  # seam: without it, what we are drawn to do stays undone
    on_verdicts: Callable[[Verdicts], None] | None = None  # told after each verified round

    def _begin_verifying(self) -> None:
        self._models: OrderedDict[tuple[int, bytes], list[torch.Tensor]] = OrderedDict()
        self._duties: deque[Duty] = deque(maxlen=MAX_DUTIES)
        self._work: Iterator[None] | None = None

    @property
    def verifies(self) -> bool:
        return self.grad_averager.verification is not None

    def _note_model(self) -> None:
        """After each call of step(): which model is the next microbatch computed on?"""
        averager = self.state_averager
        stale = not averager.is_between_steps or averager.finished_optimizer_step.is_set()
        self.grad_averager.model_is_stale = stale
        key = (self.local_epoch, averager.lineage)
        if stale or key in self._models:
            return
        for known in [known for known in self._models if known[0] == self.local_epoch]:
            del self._models[known]  # another's state was taken meanwhile
        with torch.no_grad():
            parameters = (p for group in averager.optimizer.param_groups for p in group["params"])
            self._models[key] = [parameter.detach().to("cpu", torch.float32, copy=True) for parameter in parameters]
        while len(self._models) > KEPT_MODELS:
            self._models.popitem(last=False)

    def _model_of(self, epoch: int) -> list[torch.Tensor] | None:
        return next((model for (known, _), model in self._models.items() if known == epoch), None)

    def _take_verdicts(self, outcome: Round) -> None:
        """May be called from a background thread."""
        if outcome.verdicts is None:
            return
        self._duties.extend(outcome.verdicts.duties)
        for peer, samples in outcome.verdicts.credits.items():
            outcome.weights[peer] = outcome.weights.get(peer, 0.0) + samples
        if self.on_verdicts is not None:
            self.on_verdicts(outcome.verdicts)

    def _work_off_duties(self) -> None:
        """Compute others' samples, for a while; the gradients at hand have been counted and may go."""
        deadline = time.monotonic() + AT_ONCE * self.grad_averager.patience
        while time.monotonic() < deadline and (self._duties or self._work is not None):
            self.only_accumulated = False  # the time is not what our own microbatch takes
            if self._work is None:
                self._work = self._compute(self._duties.popleft())
            try:
                next(self._work)
            except StopIteration:
                self._work = None
            except Exception as error:  # samples that cannot be read, a model that is gone: another one will be asked
                logger.warning(f"Samples of another member could not be computed again: {error!r}")
                self._work = None

    def _compute(self, duty: Duty) -> Iterator[None]:
        """Report on one duty, a batch at a time."""
        size, totals = self.grad_averager.verification.sums, []
        for first, last in duty.ranges:
            total = np.zeros((len(duty.slices), size))
            for epoch, begin, end in _by_model(duty, first, last):
                model = self._model_of(epoch)
                if model is None:
                    raise LookupError(f"the model of epoch {epoch} is not here")
                for gradients in self.recompute(duty.samples.names[begin:end], model):
                    total += sketch_slices(gradients, duty.seed, duty.slices, size)
                    yield
            totals.append(total)
        self.grad_averager.report(duty, totals)


def _by_model(duty: Duty, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(epoch of the model, first, last): samples [first, last) of the list, by the model that they were computed on."""
    stale = min(max(duty.samples.stale, first), last)
    if stale > first:
        yield duty.epoch - 1, first, stale
    if last > stale:
        yield duty.epoch, stale, last
