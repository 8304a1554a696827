"""What a dishonest or broken member does, put into its own process before its averagers start."""

from __future__ import annotations

import torch

from volunteer_kit.swarm.averager import SwarmGradientAverager


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


ATTACKS = {"nan": send_nan, "weight": claim_weight}
