"""One peer of a verified swarm, a process of its own: a small model on named samples over the real SwarmOptimizer.

argv[1]: JSON settings. stdin and stdout: see tests/orders.py; "go" lets one begin that `waits`, "cheat" an attacker.
A sample is its name: (peer, number).
"""

import json
import multiprocessing
import random
import sys
import threading

import torch
from hivemind.compression import CompressionInfo

from tests.orders import Orders, say
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.robust.rules import rule
from volunteer_kit.robust.standing import Settings
from volunteer_kit.swarm.codec import make_codec
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.held_parts import read_values
from volunteer_kit.swarm.optimizer import SwarmOptimizer, SwarmOptions
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.state import digest
from volunteer_kit.swarm.verified_allreduce import VerifiedAllReduce

DIM_IN, DIM_OUT, BATCH = 32, 24, 16
TRUTH = torch.randn(DIM_IN, DIM_OUT, generator=torch.Generator().manual_seed(5))


def sample(name) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(hash(tuple(name)) % 2**31)  # of integers: the same in all processes
    x = torch.randn(DIM_IN, generator=generator)
    return x, x @ TRUTH + 0.5 * torch.randn(DIM_OUT, generator=generator)


def gradients_of(model, names) -> None:
    """Mean over the samples -> .grad"""
    x, y = (torch.stack(column) for column in zip(*map(sample, names), strict=True))
    model.zero_grad()
    (model(x) - y).pow(2).mean().backward()


def recompute_on(model):
    other = torch.nn.Sequential(*(type(m)(m.in_features, m.out_features) if hasattr(m, "in_features") else type(m)()
                                  for m in model))  # fmt: skip

    def recompute(names, parameters):
        with torch.no_grad():
            for own, theirs in zip(other.parameters(), parameters, strict=True):
                own.copy_(theirs)
        for first in range(0, len(names), 32):
            some = names[first : first + 32]
            gradients_of(other, some)
            yield [p.grad * len(some) for p in other.parameters()]

    return recompute


CHEATS = multiprocessing.Event()  # the averager's process has it too
CHEATED = multiprocessing.Value("i", 0)  # how often it has; a reducer that the others give no part to cannot


def attack_as(kind: str | None) -> None:
    honest = SwarmGradientAverager.load_accumulators_into_averager_

    def flipped(self) -> None:
        honest(self)
        if CHEATS.is_set():
            with self.get_tensors() as tensors:
                for tensor in tensors:
                    tensor.neg_()
            count_cheat()

    if kind == "flip":
        SwarmGradientAverager.load_accumulators_into_averager_ = torch.no_grad()(flipped)
    if kind == "two averages":
        answer_one_otherwise()


def count_cheat() -> None:
    with CHEATED.get_lock():
        CHEATED.value += 1


def negated(reduce):
    """The rule of a reducer that gives the negative of each average, from when it cheats."""

    def rule(parts, weights):
        average = reduce(parts, weights)
        if not CHEATS.is_set():
            return average
        count_cheat()
        return -average

    return rule


def answer_one_otherwise() -> None:
    """A reducer that gives one of its senders another average than the others, from when it cheats."""
    honest = VerifiedAllReduce._accumulate_parts_streaming

    async def to_one(self, stream, sender_index):
        others = [peer for peer in self.sender_peer_ids if peer != self.peer_id]
        async for message in honest(self, stream, sender_index):
            if CHEATS.is_set() and self.sender_peer_ids[sender_index] == max(others):
                part, codec = message.tensor_part, make_codec("float16", "blockwise8", 512)
                part = codec.compress(-read_values(part), CompressionInfo.from_tensor(read_values(part)))
                message = type(message)(code=message.code, tensor_part=part)
            yield message

    VerifiedAllReduce._accumulate_parts_streaming = to_one


class SmallParts(SwarmOptimizer):
    """The model is smaller than six usual parts: only some members of a round would reduce any of it."""

    def _averager_options(self, max_weight: float) -> dict:
        return {**super()._averager_options(max_weight), "part_size_bytes": 1000}


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    orders = Orders(cheat=CHEATS)
    peer = start_peer(
        PeerConfig(
            initial_peers=settings.get("initial_peers", []),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            client_mode=settings.get("client_mode", False),
        )
    )
    orders.follow()
    say("connected", maddrs=peer.visible_maddrs(), peer_id=str(peer.peer_id))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(DIM_IN, 48), torch.nn.Tanh(), torch.nn.Linear(48, DIM_OUT))
    attack_as(settings.get("attack"))
    name = settings.get("rule", "centered_clip")
    honest = rule(name)
    verification = Settings(**settings["verification"]) if "verification" in settings else None
    optimizer = SmallParts(
        peer=peer,
        options=SwarmOptions(
            run_key="test",
            target_batch_size=settings.get("target_batch_size", 256),
            matchmaking_time=2.0,
            averaging_timeout=40.0,
            allreduce_timeout=20.0,
            next_chunk_timeout=6.0,
            load_state_timeout=20.0,
            delay_optimizer_step=settings.get("delay_optimizer_step", False),
            delay_grad_averaging=settings.get("delay_grad_averaging", False),
            grad_codec=make_codec("float16", "blockwise8", 512),
            state_codec=make_codec("float16", "uniform8", 512),
            refresh_period=0.3,
            metadata_expiration=20.0,
            verification=verification,
            clips=name == "centered_clip",
        ),
        params=list(model.parameters()),
        optimizer=lambda params: Lamb(params, lr=2e-2),
        reduce=negated(honest) if settings.get("attack") == "reducer" else honest,
    )
    optimizer.recompute = recompute_on(model)

    def tell(verdicts) -> None:
        events = [[event.kind, str(event.peer), event.epoch, event.text] for event in verdicts.events]
        say("verdicts", epoch=optimizer.local_epoch, trusted=verdicts.trusted, events=events, void=verdicts.void,
            measured=verdicts.measured, bans=[str(peer) for peer, _ in verdicts.bans],
            duties=[duty.kind for duty in verdicts.duties], sent_bytes=verdicts.sent_bytes,
            credits={str(peer): samples for peer, samples in verdicts.credits.items()})  # fmt: skip

    optimizer.on_verdicts = tell
    say("joined", taken=optimizer.join(), epoch=optimizer.local_epoch)
    if settings.get("waits"):
        orders.go.wait()
    train(model, optimizer, settings, orders)
    state = optimizer.settle(patience=30.0)
    say("finished", epoch=optimizer.local_epoch, digest=state, model=digest(model.parameters()))
    orders.leave.wait()
    optimizer.shutdown()
    peer.shutdown()
    say("left")


def train(model, optimizer, settings, orders) -> None:
    pause, own, made = threading.Event(), settings.get("seed", 0), 0
    probe = [sample((1000, number)) for number in range(256)]
    x, y = (torch.stack(column) for column in zip(*probe, strict=True))
    breaks = random.Random(own)
    while settings.get("attends") and not orders.are_done(optimizer):  # as the run's monitor
        optimizer.attend()
        pause.wait(0.2)
        optimizer.reports.clear()
    while not orders.are_done(optimizer):
        names = [(own, number) for number in range(made, made + BATCH)]
        made += BATCH
        gradients_of(model, names)
        if settings.get("attack") == "bits" and breaks.random() < 1 / settings.get("one_in", 50):
            next(model.parameters()).grad.view(-1)[:64] *= -(2.0**8)  # the exponent's upper bits
            say("broke", epoch=optimizer.local_epoch)
        pause.wait(settings.get("pause", 0.1))  # a device's speed, not a wait for something
        optimizer.step(BATCH, names=names)
        while optimizer.reports:
            report = optimizer.reports.popleft()
            with torch.no_grad():
                loss = (model(x) - y).pow(2).mean().item()
            say("epoch", epoch=report.epoch, samples=report.counted, group_size=report.group_size,
                received=report.received, refused=report.refused, failure=report.failure, apart=report.apart,
                loss=loss, seconds=report.seconds, cheated=CHEATED.value)  # fmt: skip


if __name__ == "__main__":
    main()
