"""hivemind's averager of gradients, made a SwarmAverager: what this peer accumulates, and what its rounds are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.optim.grad_averager import GradientAverager

from volunteer_kit.swarm.averager import SwarmAverager


class SwarmGradientAverager(SwarmAverager, GradientAverager):
    """Accumulates this peer's gradients and averages them with others', weighted by samples.

    A microbatch counts by its true size, whatever it was before (after an out-of-memory error it shrinks), and one
    that is not finite loses itself only, not what was accumulated before.
    """

    microbatches_lost: int = 0  # not finite, left out
    names: tuple = ()  # of the samples accumulated
    told: Any = None  # what the group is told of our state; the optimizer sets it
    # when a reducer dies, everybody loses its slice: with zeros there all still take the same step, with their own
    # gradients each would go its own way
    lost_parts_are_zero = True

    def schedule_step(self, scheduled_time: float | None = None, **kwargs) -> StepControl:
        return super().schedule_step(scheduled_time, gather=self.to_tell(self.told), **kwargs)

    @torch.no_grad()
    def accumulate_grads_(self, batch_size: int, grad_scale: float = 1.0, names: Sequence = ()) -> bool:
        """Add the parameters' .grad, the mean over `batch_size` samples times `grad_scale`. False: not finite."""
        grads = list(self._grads_from_parameters())
        norms = torch.stack([norm.to(grads[0].device) for norm in torch._foreach_norm(grads)])
        if not torch.isfinite(norms).all():
            self.microbatches_lost += 1
            return False
        accumulators = list(self._grad_accumulators())
        if accumulators[0].device != grads[0].device:
            grads = [grad.to(accumulators[0].device) for grad in grads]
        torch._foreach_add_(accumulators, grads, alpha=batch_size / grad_scale)
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += 1
        self.names += tuple(names)
        return True

    def reset_accumulated_grads_(self) -> None:
        super().reset_accumulated_grads_()
        self.names = ()

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Mean gradient over the samples accumulated -> the buffers that are averaged."""
        samples = max(1, self.local_samples_accumulated)
        with self.get_tensors() as averaged_grads:
            for accumulator, averaged in zip(self._grad_accumulators(), averaged_grads, strict=True):
                averaged.copy_(accumulator).div_(samples)

    def load_state_from_peers(self, **kwargs) -> None:
        """Nothing: gradients are nobody's state, though hivemind would download them (500 MB for 125.9 M)."""
