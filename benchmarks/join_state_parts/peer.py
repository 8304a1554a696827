"""One peer of benchmarks/join_state.py: a donor, honest or not, a monitor, or a joiner; a process of its own.

argv[1]: JSON settings. stdin: "go" and "leave" lines. stdout: one JSON event a line. Donors make the same steps without
meeting, from gradients that follow from the epoch: all that is measured here is how a state gets from them to others.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
from hivemind.utils import get_dht_time

from tests.orders import say
from volunteer_kit.auth.keys import KeyFolder, Trust
from volunteer_kit.optim import LambStepBound, OptimizerConfig, build_optimizer_factory
from volunteer_kit.swarm.acceptance import StateTrust
from volunteer_kit.swarm.chunk_transfer import ChunkTransfer
from volunteer_kit.swarm.optimizer import SwarmOptimizer, SwarmOptions
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.state import SwarmStateAverager, digest
from volunteer_kit.swarm.stored_state import manifest_of
from volunteer_kit.worker import own_stdin

RUN_KEY = "bench"
CONFIG = OptimizerConfig(lr=0.02, warmup_epochs=0, total_epochs=1000, statistics_bits=32)
CHECKPOINT, NEWEST = 20, 25  # epochs
WEIGHT = 20.0  # nats per relative square distance: five steps in the wrong direction are dear, as in a real model


def make_model(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width))


def make_targets(model: torch.nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [p.detach() + p.std() * torch.randn(p.shape, generator=generator) for p in model.parameters()]


class Run:
    """What all peers of the run share: a model that is pulled towards a target."""

    def __init__(self, width: int):
        self.model = make_model(width)
        self.targets = make_targets(self.model)
        self.size = sum(target.square().sum().item() for target in self.targets)

    def loss(self, parameters) -> float:
        """On samples that everybody can name."""
        pairs = zip(parameters, self.targets, strict=True)
        return 1.0 + WEIGHT * sum((p.detach() - t).square().sum().item() for p, t in pairs) / self.size

    def step(self, averager: SwarmStateAverager) -> None:
        """A step that all donors take alike."""
        for group in averager.optimizer.param_groups:
            for parameter in group["params"]:
                [target] = [t for t in self.targets if t.shape == parameter.shape]
                parameter.grad = parameter.detach() - target
        averager.round_name = b"round %d" % averager.local_epoch
        averager.step(increment_epoch=True, optimizer_step=True)


def make_false(kind: str, run: Run, averager: SwarmStateAverager) -> None:
    """Spoil a donor's state after its honest steps."""
    parameters = [p for group in averager.optimizer.param_groups for p in group["params"]]
    with torch.no_grad():
        if kind == "outside":
            for parameter in parameters:
                parameter.mul_(3.0)
        elif kind == "flipped":  # bits of a line that nothing protects: exponents among them
            generator = torch.Generator().manual_seed(7)
            for parameter in parameters:
                raw = parameter.detach().view(-1).view(torch.uint8)
                places = torch.randint(0, len(raw), (64,), generator=generator)
                raw[places] ^= 0x40
        elif kind in ("inside", "league"):  # as far from the target as honest steps could have gone
            bounds = LambStepBound(CONFIG)(parameters, CHECKPOINT, averager.local_epoch)
            for parameter, bound in zip(parameters, bounds, strict=True):
                [target] = [t for t in run.targets if t.shape == parameter.shape]
                away = parameter - target
                parameter.add_(away * (0.4 * bound / away.norm()))
    averager.describe()


def spoil_chunks() -> None:
    honest = ChunkTransfer._look_up

    def look_up(self, root: bytes, index: int) -> bytes | None:
        data = honest(self, root, index)
        return data if data is None or index < 0 else data[:-1] + bytes([data[-1] ^ 1])

    ChunkTransfer._look_up = look_up


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    go, leave = threading.Event(), threading.Event()
    stdin = own_stdin()

    def read_orders() -> None:
        for line in stdin:
            if line.strip() == b"go":
                go.set()
        go.set()
        leave.set()

    threading.Thread(target=read_orders, daemon=True).start()
    kind, folder = settings["kind"], Path(settings["folder"])
    if kind == "corrupt":
        spoil_chunks()
    run = Run(settings["width"])
    peer = start_peer(
        PeerConfig(
            initial_peers=settings.get("initial_peers", []),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            client_mode=settings.get("client_mode", False),
        )
    )
    say("connected", maddrs=peer.visible_maddrs(), peer_id=str(peer.peer_id))
    optimizer = make_optimizer(settings, peer, run)
    trust = Trust.of("bench", settings["public_key"])
    optimizer.trust_states(
        StateTrust(
            authority=trust,
            run_key=RUN_KEY,
            folder=folder,
            step_bound=LambStepBound(CONFIG),
            public_loss=run.loss,
            on_refused=lambda peer_id, why: say("refused", peer_id=peer_id, why=why),
        )
    )
    say("built")
    if kind == "joiner":
        join(optimizer, run, go)
    else:
        donate(optimizer, run, kind, settings)
    leave.wait()
    optimizer.shutdown()
    peer.shutdown()


def make_optimizer(settings: dict, peer, run: Run) -> SwarmOptimizer:
    make, schedule = build_optimizer_factory(CONFIG)
    return SwarmOptimizer(
        peer=peer,
        options=SwarmOptions(
            run_key=RUN_KEY,
            target_batch_size=10_000,
            matchmaking_time=1.5,
            load_state_timeout=120.0,
            next_chunk_timeout=10.0,
            delay_optimizer_step=False,
            refresh_period=0.3,
            max_mbps=settings.get("max_mbps"),
        ),
        params=list(run.model.parameters()),
        optimizer=make,
        scheduler=schedule,
    )


def donate(optimizer: SwarmOptimizer, run: Run, kind: str, settings: dict) -> None:
    averager = optimizer.state_averager
    last = NEWEST + (kind in ("outside", "flipped", "inside", "league"))  # they claim to be ahead, and are asked first
    for epoch in range(1, last + 1):
        run.step(averager)
        if epoch == CHECKPOINT:
            if kind == "monitor":
                sign(optimizer, settings)
            averager._writing.join()
    make_false(kind, run, averager)
    optimizer.tracker.report_local_progress(local_epoch=averager.local_epoch, samples_accumulated=1)
    averager._outer_pipe.send(("_declare_once", [], {}))
    say("ready", epoch=averager.local_epoch, digest=digest(averager.state_tensors()))


def sign(optimizer: SwarmOptimizer, settings: dict) -> None:
    statements, now = optimizer.statements, get_dht_time()
    manifest, _ = manifest_of(
        optimizer.state_averager,
        Path(settings["folder"]),
        RUN_KEY,
        statements.next_sequence("manifest"),
        now,
        statements.expiry("manifest", now),
    )
    stored = statements.publish(KeyFolder(settings["keys"]).signer("monitor").sign, manifest)
    say("signed", stored=stored, chunks=manifest.num_chunks, bytes=manifest.total_bytes)


def join(optimizer: SwarmOptimizer, run: Run, go: threading.Event) -> None:
    go.wait()
    averager, told = optimizer.state_averager, -1

    def on_download(done: int, total: int) -> None:
        nonlocal told
        if 10 * done // total > told:
            told = 10 * done // total
            say("downloading", share=done / total)

    optimizer.on_download = on_download
    started = time.monotonic()
    taken = optimizer.join(patience=60.0)
    while not averager.complete and averager.why_incomplete is None:
        time.sleep(0.02)
    fetched = averager.last_fetch
    say(
        "joined",
        taken=taken,
        complete=averager.complete,
        seconds=time.monotonic() - started,
        epoch=averager.local_epoch,
        digest=digest(averager.state_tensors()),
        loss=run.loss(averager.state_tensors()[: averager.num_parameters]),
        chunks=fetched.chunks,
        again=fetched.again,
        fetch_s=fetched.seconds,
        given=fetched.given,
        corrupt=len(fetched.corrupt),
    )


if __name__ == "__main__":
    main()
