"""What a dishonest or broken member does, put into its own process before its averagers start."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.progress import SwarmProgressTracker
from volunteer_kit.swarm.state import SwarmStateAverager


def send_nan() -> None:
    """Gradients of NaN, past this peer's own checks: a broken GPU behind a patched client."""
    honest = SwarmGradientAverager.load_accumulators_into_averager_

    def load(self) -> None:
        honest(self)
        with self.get_tensors() as tensors:
            for tensor in tensors:
                tensor.fill_(float("nan"))

    SwarmGradientAverager.load_accumulators_into_averager_ = torch.no_grad()(load)


def claim_weight() -> None:
    """A huge vector at the weight of a million samples."""
    honest_load, honest_step = SwarmGradientAverager.load_accumulators_into_averager_, SwarmGradientAverager.step

    def load(self) -> None:
        honest_load(self)
        with self.get_tensors() as tensors:
            for tensor in tensors:
                tensor.fill_(100.0)

    def step(self, weight=None, **kwargs):
        return honest_step(self, weight=1e6, **kwargs)

    SwarmGradientAverager.load_accumulators_into_averager_ = torch.no_grad()(load)
    SwarmGradientAverager.step = step


def average_large_parameters(when: Path | None = None) -> None:
    """At each round of state averaging parameters thirty times as large as ours, from when the file `when` is there; it
    trains on with its own when the round is over, so that its gradients are honest."""
    honest_average, honest_apply = (
        SwarmStateAverager._average_parameters,
        SwarmStateAverager._apply_optimizer_parameters_,
    )
    lies = threading.Lock()

    def average(self, timeout) -> None:
        if when is not None and not when.exists():
            return honest_average(self, timeout)
        with lies:
            with self.get_tensors() as tensors:
                own = [tensor.clone() for tensor in tensors]
                for tensor in tensors:
                    tensor.mul_(30.0)
            self.describe()  # where all say that they hold the same, nothing is averaged
            honest_average(self, timeout)
            with self.get_tensors() as tensors:
                for tensor, kept in zip(tensors, own, strict=True):
                    tensor.copy_(kept)
            self.describe()

    def apply(self) -> None:
        with lies:  # it would compute on them
            honest_apply(self)

    SwarmStateAverager._average_parameters = torch.no_grad()(average)
    SwarmStateAverager._apply_optimizer_parameters_ = torch.no_grad()(apply)


def claim_progress() -> None:
    """Having accumulated a whole batch, at every moment of every epoch."""
    honest = SwarmProgressTracker.report_local_progress

    def report(self, local_epoch, samples_accumulated, update_global_samples=True):
        honest(self, local_epoch, samples_accumulated, update_global_samples)
        self.local_progress = self.local_progress.copy(
            update={"samples_accumulated": self.target_batch_size, "samples_per_second": 5000.0}
        )

    SwarmProgressTracker.report_local_progress = report


def send_large_numbers(when: Path) -> None:
    """Honest until the file `when` is there; then its gradients turned round, a thousand times as long as they are,
    which the plain mean follows uphill; and large parameters at each round of state averaging."""
    honest_load = SwarmGradientAverager.load_accumulators_into_averager_

    def load(self) -> None:
        honest_load(self)
        if when.exists():
            with self.get_tensors() as tensors:
                for tensor in tensors:
                    tensor.mul_(-1e3)

    SwarmGradientAverager.load_accumulators_into_averager_ = torch.no_grad()(load)
    average_large_parameters(when)


def _in_the_middle(number: int) -> Callable[[], None]:
    """In the exchange of its second round, with one message sent: a signal to all that it is, p2pd as well."""

    def attack() -> None:
        honest, rounds = SwarmAllReduce._count_sent, []  # in the averager's process

        async def count_sent(self, messages):
            if self.group_id not in rounds:
                rounds.append(self.group_id)
            async for message in honest(self, messages):
                yield message
                if len(rounds) > 1:
                    os.killpg(0, number)

        SwarmAllReduce._count_sent = count_sent

    return attack


ATTACKS = {"nan": send_nan, "weight": claim_weight, "state": average_large_parameters, "progress": claim_progress}
ATTACKS |= {"die": _in_the_middle(signal.SIGKILL), "stall": _in_the_middle(signal.SIGSTOP)}
