"""One peer of a test swarm, a process of its own: a small linear model over the real SwarmOptimizer.

argv[1]: JSON settings; with an authority those of tests/peer_questions.py:membership as well. stdin and stdout: see
tests/orders.py; "damage" makes the next step a wrong one, "alone" makes one before the others' and without them.
"""

import json
import sys
import threading
from functools import partial
from pathlib import Path

import torch

from benchmarks.netlab import enter
from tests.attacks import ATTACKS
from tests.orders import Orders, say
from tests.peer_questions import Questions, membership
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.optim.outer import OuterNesterov
from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.swarm.codec import make_codec
from volunteer_kit.swarm.failures import RoundCounts
from volunteer_kit.swarm.local_steps import LocalStepsConfig
from volunteer_kit.swarm.optimizer import SwarmOptimizer, SwarmOptions
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.state import digest

DIM_IN, DIM_OUT = 32, 24


class FaultyLamb(Lamb):
    """Relative noise after each step, as on a processor that rounds differently (`rounding`); a larger one after the
    next step when `damage` is set."""

    def __init__(self, params, *, rounding: float, damage: threading.Event, **settings):
        super().__init__(params, **settings)
        self.rounding, self.damage = rounding, damage

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        noise = 1e-2 if self.damage.is_set() else self.rounding
        self.damage.clear()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.mul_(1 + noise * torch.randn_like(parameter))
        return loss


def main() -> None:
    settings = json.loads(sys.argv[1])
    if "network" in settings:
        enter(settings["network"])
    torch.set_num_threads(1)
    damage, alone = threading.Event(), threading.Event()
    orders = Orders(damage=damage, alone=alone)
    member = membership(settings)
    peer = start_peer(
        PeerConfig(
            initial_peers=settings.get("initial_peers", []),
            host_maddrs=settings.get("host_maddrs", ["/ip4/127.0.0.1/tcp/0"]),
            identity_path=settings.get("identity"),
            client_mode=settings.get("client_mode", False),
        ),
        member.admission,
    )
    member.keep(peer)
    questions = Questions(peer)
    orders.follow(questions.answer)
    how = {"client_mode": peer.client_mode, "why": peer.why_client_mode}
    say("connected", maddrs=peer.visible_maddrs(), peer_id=str(peer.peer_id), **how)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(DIM_IN, 48), torch.nn.Tanh(), torch.nn.Linear(48, DIM_OUT))
    truth = torch.randn(DIM_IN, DIM_OUT)
    spare = torch.nn.Parameter(torch.ones(2))  # that nobody uses
    attack = ATTACKS.get(settings.get("attack"))
    if attack:
        attack()
    optimizer = SwarmOptimizer(
        peer=peer,
        options=SwarmOptions(
            run_key="test",
            target_batch_size=settings.get("target_batch_size", 256),
            matchmaking_time=settings.get("matchmaking_time", 1.5),
            averaging_timeout=settings.get("averaging_timeout", 20.0),
            allreduce_timeout=settings.get("allreduce_timeout", 10.0),
            next_chunk_timeout=settings.get("next_chunk_timeout", 3.0),
            load_state_timeout=20.0,
            delay_optimizer_step=settings.get("delay_optimizer_step", False),
            delay_grad_averaging=settings.get("delay_grad_averaging", False),
            grad_codec=make_codec("float16", settings.get("grad_codec", "uniform8"), 512, settings.get("density")),
            state_codec=make_codec("float16", "uniform8", 512),
            average_state_every=settings.get("average_state_every", 0),
            refresh_period=0.3,
            metadata_expiration=settings.get("metadata_expiration", 20.0),
            max_mbps=settings.get("max_mbps"),
            grad_rank=settings.get("grad_rank"),
            left_over=Path(settings["left_over"]) if "left_over" in settings else None,
            marks_unused=settings.get("marks_unused", False),
        ),
        params=[*model.parameters(), *([spare] if "marks_unused" in settings else [])],
        **({"state_reduce": weighted_mean} if settings.get("trusts_means") else {}),
        optimizer=OuterNesterov
        if "local_batch" in settings
        else lambda params: FaultyLamb(params, lr=5e-2, rounding=settings.get("rounding", 0.0), damage=damage),
        local_steps=LocalStepsConfig(settings["local_batch"], partial(Lamb, lr=1e-2))
        if "local_batch" in settings
        else None,
    )
    questions.optimizer = optimizer
    optimizer.reach.ask_cause = getattr(member, "why_no_token", optimizer.reach.ask_cause)  # a volunteer's
    step_when_told(optimizer, alone)
    say("joined", taken=optimizer.join(), epoch=optimizer.local_epoch, complete=optimizer.complete)
    train(model, truth, optimizer, settings, orders)
    state = optimizer.settle(patience=30.0)
    say("finished", epoch=optimizer.local_epoch, digest=state, model=digest(model.parameters()), spare=spare.tolist())
    orders.leave.wait()
    optimizer.shutdown()
    member.close()
    peer.shutdown()
    say("left")


def step_when_told(optimizer, alone: threading.Event) -> None:
    """A step for which the batch is not full, and no group is found."""
    tracker, await_round = type(optimizer.tracker), optimizer._await_round
    is_ready = tracker.ready_to_update_epoch.fget

    def await_nobody(control):
        if not alone.is_set():
            return await_round(control)
        alone.clear()
        control.cancel()
        raise TimeoutError

    tracker.ready_to_update_epoch = property(lambda self: alone.is_set() or is_ready(self))
    optimizer._await_round = await_nobody


def train(model, truth, optimizer, settings, orders) -> None:
    generator = torch.Generator().manual_seed(settings.get("seed", 0))
    pause = threading.Event()
    probe = torch.randn(256, DIM_IN, generator=torch.Generator().manual_seed(0))  # the same on all peers
    made, stepped, cut_off, known, complete, counts = 0, set(), None, [], False, RoundCounts()
    while not orders.are_done(optimizer):
        if optimizer.complete and not complete:
            complete = True
            say("complete", epoch=optimizer.local_epoch, made=made, traffic=optimizer.traffic())
        if optimizer.reach.known_peers() != known:
            known = optimizer.reach.known_peers()
            say("known", maddrs=known)
        if optimizer.cut_off != cut_off:
            cut_off = optimizer.cut_off
            say("cut_off" if cut_off else "back", why=cut_off, epoch=optimizer.local_epoch)
        x = torch.randn(16, DIM_IN, generator=generator)  # (B, in)
        loss = (model(x) - x @ truth).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        pause.wait(settings.get("pause", 0.1))  # a device's speed, not a wait for something
        optimizer.step(16, names=range(made, made + 16))
        made += 16
        while optimizer.reports:
            report = optimizer.reports.popleft()
            counts.count(report)
            say(
                "postponed" if report.is_postponed else "epoch",
                epoch=report.epoch,
                samples=report.counted,
                named=len(report.names) == len(set(report.names) - stepped) == report.samples,
                group_size=report.group_size,
                received=report.received,
                seconds=report.seconds,
                sent=report.bytes_sent,
                refused=report.refused,
                failure=report.failure,
                apart=report.apart,
                remarks=report.remarks,
                uncertain=report.uncertain,
                cause=report.cause,
                expected=report.expected,
                made_up_for=report.made_up_for,
                counts=counts.as_dict(),
                kept_until=report.kept_until,
                loss=(model(probe) - probe @ truth).pow(2).mean().item(),
            )
            stepped |= set(report.names)


if __name__ == "__main__":
    main()
