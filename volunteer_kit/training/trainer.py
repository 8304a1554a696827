"""The loop: forward, loss, backward, step; together with strangers.

What happens around a step (backup, checkpoints, what is shown) are callbacks, called in the order given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.tuning import Halving, Tuning, is_out_of_memory

if TYPE_CHECKING:
    from volunteer_kit.swarm.node.member import NodeOptimizer


class Batch(Protocol):
    """A microbatch: a row of `text` (B, T) is a sample, and has a name."""

    text: torch.Tensor
    names: Sequence[Hashable]


class ComputeGradients(Protocol):
    """Forward, loss and backward of a microbatch somewhere else than on the model's own device.

    Sets `.grad` of the model's parameters to the gradient of the microbatch's mean loss times `scale` (what was there
    is None). Parameters that have changed since the last call, at any time and by anybody, are for it to notice
    (replicas.parameter_version); so is `model.checkpointing`. An out-of-memory error leaves nothing behind.

    :returns: the mean loss, a scalar, not scaled; it is read after the optimizer's step
    """

    def __call__(self, model: torch.nn.Module, batch: Any, scale: float = 1.0) -> torch.Tensor: ...


@dataclass
class LossScale:
    """Dynamic loss scaling for fp16: halve after gradients that are not finite, double after many that are.

    Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
    """

    value: float = 1.0
    growth_interval: int = 1000  # finite microbatches between doublings
    dynamic: bool = False
    _finite_in_a_row: int = field(default=0, repr=False)

    def update(self, finite: bool) -> None:
        if not self.dynamic:
            return
        self._finite_in_a_row = self._finite_in_a_row + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self._finite_in_a_row % self.growth_interval == 0:
            self.value = min(2.0**24, self.value * 2)


@dataclass
class EpochMean:
    """Mean loss over the samples since the last global step."""

    total: float = 0.0
    samples: int = 0

    def add(self, loss: float, samples: int) -> None:
        self.total, self.samples = self.total + loss * samples, self.samples + samples

    def take(self) -> float | None:
        mean = self.total / self.samples if self.samples else None
        self.total, self.samples = 0.0, 0
        return mean


class Callback:
    """Acts around a step. `on_epoch` follows each global step, with its report and this peer's mean loss."""

    def on_microbatch(self, trainer: Trainer, loss: float, samples: int) -> None: ...

    def on_epoch(self, trainer: Trainer, report: StepReport, loss: float | None) -> None: ...


class Trainer:
    """Trains `model` in the swarm that `optimizer` belongs to.

    :param next_batch: microbatch size -> batch (on the CPU)
    :param compute_loss: (model, batch) -> scalar mean loss over the batch; moves the batch to the model's device
    :param batch_size: samples a microbatch, to start with; halved for good when memory runs out. If one is still too
        many, the model's `checkpointing` is turned on, if it has that choice
    :param precision: "fp32", "bf16" or "fp16" (with loss scaling), the plan's
    :param compute_gradients: in place of compute_loss and backward: several GPUs (replicas.py), TPU cores (tpu.py)
    :param tuning: finds the batch size and checkpointing while it trains; None: `batch_size`, as above
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: NodeOptimizer,
        next_batch: Callable[[int], Batch],
        compute_loss: Callable[[torch.nn.Module, Any], torch.Tensor],
        *,
        batch_size: int,
        precision: str = "fp32",
        callbacks: Sequence[Callback] = (),
        compute_gradients: ComputeGradients | None = None,
        tuning: Tuning | None = None,
    ):
        self.model, self.optimizer = model, optimizer
        self.next_batch, self.compute_loss, self.compute_gradients = next_batch, compute_loss, compute_gradients
        self.precision, self.callbacks = precision, tuple(callbacks)
        self.tuning = tuning or Tuning(Halving(batch_size, getattr(model, "checkpointing", True)))
        self.loss_scale = LossScale(value=2.0**15, dynamic=True) if precision == "fp16" else LossScale()
        self.epoch_loss = EpochMean()
        self.samples_per_second = 0.0
        self.microbatches_not_finite = self.microbatches_too_large = 0  # those that were lost, by cause

    @property
    def epoch(self) -> int:
        return self.optimizer.local_epoch

    @property
    def batch_size(self) -> int:
        """Samples of the next microbatch."""
        return self.tuning.setting.batch_size

    def train(self, should_stop: Callable[[], bool]) -> None:
        """Train until `should_stop()`, asked between microbatches. Raises whatever the stream raises."""
        for batch in self._batches(should_stop):
            started, samples = time.perf_counter(), batch.text.shape[0]
            self.optimizer.zero_grad()
            try:
                if self.compute_gradients is None:
                    with self.autocast():
                        loss = self.compute_loss(self.model, batch)
                    (loss * self.loss_scale.value).backward()
                else:
                    loss = self.compute_gradients(self.model, batch, self.loss_scale.value)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                loss = None  # and, outside of this block, the error's traceback no longer holds the activations
            if loss is None:
                self._drop_microbatch()
                continue
            taken = self.optimizer.step(batch_size=samples, grad_scale=self.loss_scale.value, names=batch.names)
            self._after_step(loss.item(), samples, taken, time.perf_counter() - started)

    def _batches(self, should_stop: Callable[[], bool]) -> Iterator[Any]:
        while not should_stop():
            yield self.next_batch(self.tuning.prepare(self.model).batch_size)

    def autocast(self):
        """Of forward and loss, in this machine's precision."""
        if self.precision == "fp32":
            return nullcontext()
        device = next(self.model.parameters()).device
        return torch.autocast(device.type, dtype=torch.float16 if self.precision == "fp16" else torch.bfloat16)

    def _after_step(self, loss: float, samples: int, taken: bool, seconds: float) -> None:
        self.loss_scale.update(taken)
        if taken and math.isfinite(loss):
            self.epoch_loss.add(loss, samples)
            for callback in self.callbacks:
                callback.on_microbatch(self, loss, samples)
        else:
            self.microbatches_not_finite += 1
        if self.optimizer.only_accumulated:  # averaging, downloads and outages say nothing about this device
            self.tuning.measured(samples, seconds)
            speed = samples / seconds
            self.samples_per_second = 0.9 * self.samples_per_second + 0.1 * speed if self.samples_per_second else speed
        self.tell_steps()

    def tell_steps(self) -> None:
        """Call back for the global steps since the last time. To be called once more when the optimizer has settled:
        the last one may have been taken in the background."""
        while self.optimizer.reports:
            report = self.optimizer.reports.popleft()
            mean_loss = self.epoch_loss.take()
            for callback in self.callbacks:
                callback.on_epoch(self, report, mean_loss)

    def _drop_microbatch(self) -> None:
        """Out of memory: this microbatch is lost, the next is smaller. What was accumulated before keeps its weight."""
        self.microbatches_too_large += 1
        self.optimizer.zero_grad()
        self.tuning.out_of_memory()
