"""A real optimizer without a swarm, for tests of what it makes of rounds that went one way or another."""

from __future__ import annotations

import time
import types
from collections.abc import Iterator

import torch
from hivemind.p2p import PeerID

from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.swarm.making_up import AGAIN_AND_AGAIN
from volunteer_kit.swarm.optimizer import SwarmOptimizer, SwarmOptions
from volunteer_kit.swarm.round import Round

A, B, *LATER = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 7))
NAMES = ["weight", "bias"]  # of its parameters
GIVEN_UP = types.SimpleNamespace(cancelled=lambda: True, began_allreduce=False)  # a round's control
BROKEN_OFF = types.SimpleNamespace(cancelled=lambda: False, began_allreduce=True)


def make_optimizer(peer) -> SwarmOptimizer:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    options = SwarmOptions(run_key="lone", target_batch_size=16, matchmaking_time=1.0, delay_optimizer_step=False)
    return SwarmOptimizer(
        peer=peer,
        options=options,
        params=list(model.parameters()),
        optimizer=lambda params: Lamb(params, lr=0.02),
    )


def train(optimizer: SwarmOptimizer, epochs: int) -> None:
    last = optimizer.local_epoch + epochs
    deadline = time.monotonic() + 120
    while optimizer.local_epoch < last:
        optimizer.zero_grad()
        for parameter in optimizer.state_averager.main_parameters:
            parameter.grad = torch.randn_like(parameter)
        assert optimizer.step(batch_size=8) is True
        assert time.monotonic() < deadline


def after_a_step(optimizer: SwarmOptimizer) -> Iterator[SwarmOptimizer]:
    """With nothing of the last test, and nothing for the next."""
    train(optimizer, 1)
    forget(optimizer)
    optimizer._start_epoch_anew()
    optimizer._times_back = optimizer._times_postponed = 0
    optimizer.state_averager.forget_last_shared()
    optimizer.uncertain_steps.shared()
    optimizer.uncertain_steps.kept_until()
    optimizer.reports.clear()
    yield optimizer
    forget(optimizer)


def forget(optimizer: SwarmOptimizer) -> None:
    optimizer._follow = optimizer._untaken = optimizer._round_under_way = None
    optimizer._stepped_apart = False


def others_answer(optimizer: SwarmOptimizer, monkeypatch) -> list:
    """What they answer, one after another, who are asked for a round; in the end nobody has one."""
    answers: list = []
    monkeypatch.setattr(optimizer.grad_averager, "make_up_for", lambda *_: answers.pop(0) if answers else None)
    return answers


def nobody_comes(optimizer, monkeypatch, swarm_epoch: int | None = None, control=GIVEN_UP, lone: bool = False) -> None:
    """:param lone: once more than we wait for anybody"""

    def nobody(control):
        raise TimeoutError

    monkeypatch.setattr(optimizer, "_await_round", nobody)
    if lone:
        monkeypatch.setattr(optimizer, "_times_postponed", AGAIN_AND_AGAIN)
    come_to(optimizer, monkeypatch, swarm_epoch, control)


def come_to(optimizer, monkeypatch, swarm_epoch: int | None = None, control=GIVEN_UP, num_peers: int = 3) -> None:
    """The end of an epoch."""
    monkeypatch.setattr(optimizer, "_next_comparison", 0.0)
    monkeypatch.setattr(optimizer, "_next_begun_lookup", 0.0)
    monkeypatch.setattr(optimizer.tracker.global_progress, "num_peers", num_peers)
    epoch = optimizer.local_epoch
    optimizer._report = {
        "epoch": epoch + 1,
        "samples": 16,
        "weight": 16.0,
        "names": ("missed",),
        "started": 0.0,
        "triggered": 0.0,
        "averaged": True,
        "num_peers": num_peers,
        "swarm_epoch": epoch if swarm_epoch is None else swarm_epoch,
        "told": optimizer.state_averager.told,
    }
    optimizer._average_gradients_and_load_into_optimizer(control)
    optimizer.state_averager.step(increment_epoch=True, optimizer_step=True)


def meet(optimizer, monkeypatch, holders: int, received: float = 1.0, met: int = 3, num_peers: int = 3) -> None:
    """A round with others, of whom so many hold what we hold, ourselves among them."""
    own_id, told = optimizer.dht.peer_id, optimizer.state_averager.told
    other = [told[0], told[1], b"another."]
    group = (own_id, A, B, *LATER)[:met]
    gathered = {peer: told if place < holders else other for place, peer in enumerate(group)}
    outcome = Round(group=group, received=received, gathered=gathered, round_id=b"round %d" % told[0])
    monkeypatch.setattr(optimizer, "_await_round", lambda control: outcome)
    come_to(optimizer, monkeypatch, num_peers=num_peers)
