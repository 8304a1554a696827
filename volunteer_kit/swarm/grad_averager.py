"""hivemind's averager of gradients, made a SwarmAverager: what this peer accumulates, and what its rounds are of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from hivemind.averaging.control import StepControl
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.optim.grad_averager import GradientAverager
from hivemind.utils import get_dht_time

from volunteer_kit.robust.messages import Samples
from volunteer_kit.swarm.beside import BesideGradients, CameBeside
from volunteer_kit.swarm.codec import BESIDE, ExactBeside, leaves_out
from volunteer_kit.swarm.codec_wire import FLOAT32
from volunteer_kit.swarm.left_over import LeftOver, RoundsShare, part_size
from volunteer_kit.swarm.local_steps import LocalSteps
from volunteer_kit.swarm.lost_answers import GivenAnswers
from volunteer_kit.swarm.missed_rounds import RoundsLogged
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.verified_averager import VerifiedAverager

NO_COMPRESSION = NoCompression()


class SwarmGradientAverager(RoundsLogged, VerifiedAverager, GradientAverager):
    """Accumulates this peer's gradients and averages them with others', weighted by samples, or by what the loss is a
    mean over.

    A microbatch counts by its true size, whatever it was before (after an out-of-memory error it shrinks), and one
    that is not finite loses itself only, not what was accumulated before.
    """

    # Overrides: keeps_left_over, lost_parts_are_zero, role

    local_weight_accumulated: float = 0.0
    _left_over: LeftOver | None = None  # in the averager's process

    microbatches_lost: int = 0  # not finite, left out
    names: tuple = ()  # of the samples accumulated
    stale: int = 0  # of them, the first so many were computed on the model before the last step
    model_is_stale: bool = False  # that step is still on its way; the optimizer sets it
    local_steps: LocalSteps | None = None  # the optimizer sets it, if the run takes any
    beside: BesideGradients | None = None  # what is averaged with the gradients, as their last tensor
    due: float = math.inf  # DHT time at which the epoch should end; the optimizer sets it
    told: Any = None  # what the group is told of our state; the optimizer sets it
    sought: int = 0  # members that were expected when we began to look for the group
    # when a reducer dies, everybody loses its slice: with zeros there all still take the same step, with their own
    # gradients each would go its own way
    lost_parts_are_zero = True
    role = "The process that averages the gradients"

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        left_over_path: Path | None = None,
        compression: CompressionBase = NO_COMPRESSION,
        beside: BesideGradients | None = None,
        **kwargs,
    ):
        """:param left_over_path: of a file for what the codec leaves out; None: it is kept in memory
        :param beside: what is averaged with the gradients, as their last tensor; None: nothing is
        """
        parameters = tuple(parameters)
        had_gradient = [parameter.grad is not None for parameter in parameters]
        self.keeps_left_over, self._left_over_path = leaves_out(compression), left_over_path
        if self.keeps_left_over:
            kwargs["part_size_bytes"] = part_size(sum(p.numel() for p in parameters))
        # 16-bit gradients are summed and averaged in 32 bits, which the optimizer's own parameters have as well
        shared = [torch.zeros(p.shape, **FLOAT32).share_memory_() for p in parameters]
        self.beside = beside
        if beside is not None:
            shared.append(beside.make_tensor())
            keys = [*range(len(parameters)), BESIDE]
            infos = (CompressionInfo.from_tensor(tensor, key=key) for key, tensor in zip(keys, shared, strict=True))
            kwargs["tensor_infos"], compression = tuple(infos), ExactBeside(compression)
        super().__init__(parameters=parameters, averaged_grads=tuple(shared), compression=compression, **kwargs)
        _take_away_zeros(parameters, had_gradient)
        self._local_accumulators = tuple(accumulator.float() for accumulator in self._local_accumulators)

    def _share_of_round(self, tensors: Sequence[torch.Tensor], weight: float) -> RoundsShare | None:
        if not self.keeps_left_over:
            return None
        if self._left_over is None:
            self._left_over = LeftOver(self.total_size, self._left_over_path, self.prefix)
        return self._left_over.begin(tensors, weight, self.order)

    def _note_answers(self, exchange_id: bytes, answers: GivenAnswers, outcome: Round) -> None:
        if self.verification is None and not outcome.is_lost and self.peer_id not in outcome.out_of_step():
            self._log_round(exchange_id, answers, outcome.gathered.get(self.peer_id), outcome.name)

    def forget_left_over(self) -> None:
        """What was left over led to a model that is given up; and so did the rounds."""
        self._outer_pipe.send(("_forget_rounds", [], {}))
        if self.keeps_left_over:
            self._outer_pipe.send(("_forget_left_over", [], {}))

    async def _forget_left_over(self) -> None:
        if self._left_over is not None:
            self._left_over.forget()

    def schedule_step(self, scheduled_time: float | None = None, **kwargs) -> StepControl:
        """A group that is looked for early waits for who is expected until the epoch is due, at least."""
        self.sought = self.expected_group_size
        if scheduled_time is None:
            now = get_dht_time()
            scheduled_time = max(now, min(self.due, now + self.matchmaking_kwargs["min_matchmaking_time"]))
        return super().schedule_step(scheduled_time, gather=self.to_tell(self.told), **kwargs)

    def step(self, weight: float | None = None, **kwargs):
        return super().step(weight=self.local_weight_accumulated if weight is None else weight, **kwargs)

    @torch.no_grad()
    def accumulate_grads_(
        self, batch_size: int, grad_scale: float = 1.0, names: Sequence = (), weight: float | None = None
    ) -> bool:
        """Take the parameters' .grad, times 1 / `grad_scale`, into the mean. False: not finite.

        :param batch_size: samples that they are of
        :param weight: what they are the mean over; None: these samples
        """
        weight = float(batch_size if weight is None else weight)
        had_gradient = [parameter.grad is not None for parameter in self.parameters]
        grads = list(self._grads_from_parameters())
        _take_away_zeros(self.parameters, had_gradient)
        norms = torch.stack([norm.to(grads[0].device) for norm in torch._foreach_norm(grads)])
        if not (weight > 0 and torch.isfinite(norms).all()):
            self.microbatches_lost += 1
            return False
        self.local_samples_accumulated += batch_size
        self.local_times_accumulated += 1
        self.names += tuple(names)
        self.stale += len(names) if self.model_is_stale else 0
        accumulators = list(self._grad_accumulators())
        grads = [grad.to(accumulator) for grad, accumulator in zip(grads, accumulators, strict=True)]
        if grad_scale != 1.0:
            grads = torch._foreach_div(grads, grad_scale)
        self.local_weight_accumulated += weight
        if self.beside is not None:
            self.beside.note(had_gradient)
        if self.local_steps is not None:
            self.local_steps.add(grads, weight, had_gradient)
        else:  # a running mean: one microbatch alone is then its own gradient, to the last bit
            torch._foreach_lerp_(accumulators, grads, weight / self.local_weight_accumulated)
        return True

    @torch.no_grad()
    def take_back(self, samples: int, weight: float, names: Sequence) -> None:
        """What a step that nobody shared was made of, and is in the buffers still, is accumulated again.

        :param samples: that it was of, as the averager counted them then; likewise `weight` and `names`
        """
        self.local_samples_accumulated += samples
        self.local_times_accumulated += 1
        self.local_weight_accumulated += weight
        self.names = (*names, *self.names)
        with self.get_tensors() as tensors:
            accumulators, ours = list(self._grad_accumulators()), tensors[: len(self.parameters)]
            if self.beside is not None:
                self.beside.take_back(tensors[-1])
            ours = [tensor.to(accumulator) for tensor, accumulator in zip(ours, accumulators, strict=True)]
            torch._foreach_lerp_(accumulators, ours, weight / self.local_weight_accumulated)

    def reset_accumulated_grads_(self) -> None:
        super().reset_accumulated_grads_()
        self.names, self.stale, self.local_weight_accumulated = (), 0, 0.0
        if self.beside is not None:
            self.beside.forget()

    @torch.no_grad()
    def load_accumulators_into_averager_(self) -> None:
        """Mean gradient over the samples accumulated, or our local steps' way -> the buffers that are averaged."""
        if self.verification is not None:
            self.contribute(Samples(self.names, self.stale, max(1, self.local_times_accumulated)))
        with self.get_tensors() as averaged_grads:
            ours = self._grad_accumulators() if self.local_steps is None else self.local_steps.way()
            for accumulator, averaged in zip(ours, averaged_grads[: len(self.parameters)], strict=True):
                averaged.copy_(accumulator)
            if self.beside is not None:
                self.beside.fill(averaged_grads[-1])

    def something_came(self) -> bool:
        """A round averages to zeros when nobody's samples count, as those of newcomers with the monitor alone."""
        with self.get_tensors() as tensors:
            gradients, beside = tensors[: len(self.parameters)], self.beside
            is_any_used = beside is not None and beside.is_any_used(tensors[-1])
            return is_any_used or any(bool(gradient.any()) for gradient in gradients)

    def lend_to(self, parameters: Sequence[torch.Tensor]) -> None:
        """The buffers of the averages become .grad of those that the optimizer steps."""
        with self.get_tensors() as tensors:
            for parameter, gradient in zip(parameters, tensors[: len(self.parameters)], strict=True):
                parameter.grad = gradient

    def came_beside(self) -> CameBeside:
        """What came of the last round beside the gradients."""
        if self.beside is None:
            return CameBeside()
        with self.get_tensors() as tensors:
            return self.beside.read(tensors[-1])

    def load_state_from_peers(self, **kwargs) -> None:
        """Nothing: gradients are nobody's state, though hivemind would download them (500 MB for 125.9 M)."""


def _take_away_zeros(parameters: Sequence[torch.nn.Parameter], had_gradient: Sequence[bool]) -> None:
    """hivemind puts zeros where there was no gradient."""
    for parameter, had in zip(parameters, had_gradient, strict=True):
        if not had:
            parameter.grad = None
