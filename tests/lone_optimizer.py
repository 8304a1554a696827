"""A real optimizer without a swarm, for tests of what it makes of rounds that went one way or another."""

from __future__ import annotations

import time
import types

import torch

from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.swarm.optimizer import SwarmOptimizer, SwarmOptions

GIVEN_UP = types.SimpleNamespace(cancelled=lambda: True, began_allreduce=False)  # a round's control
BROKEN_OFF = types.SimpleNamespace(cancelled=lambda: False, began_allreduce=True)


def make_optimizer(peer, run_key: str) -> SwarmOptimizer:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    options = SwarmOptions(run_key=run_key, target_batch_size=16, matchmaking_time=1.0, delay_optimizer_step=False)
    return SwarmOptimizer(
        peer=peer,
        options=options,
        params=list(model.parameters()),
        optimizer=lambda params: Lamb(params, lr=0.02),
    )


def train(optimizer: SwarmOptimizer, epochs: int) -> None:
    last = optimizer.local_epoch + epochs
    deadline = time.monotonic() + 30
    while optimizer.local_epoch < last:
        optimizer.zero_grad()
        for parameter in optimizer.state_averager.main_parameters:
            parameter.grad = torch.randn_like(parameter)
        assert optimizer.step(batch_size=8) is True
        assert time.monotonic() < deadline
