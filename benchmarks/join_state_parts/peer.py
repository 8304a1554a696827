"""One peer of benchmarks/join_state.py: a donor, honest or not, or a joiner; a process of its own, with a node.

argv[1]: JSON settings. stdin: "go", "spoil" and "leave" lines. stdout: one JSON event a line. The founder brings the
state of some epochs along and nobody computes: all that is measured here is how a state gets from members to others.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.orders import say
from volunteer_kit.optim import LambStepBound, OptimizerConfig, build_optimizer_factory
from volunteer_kit.session.trust import judge_by
from volunteer_kit.swarm.net.connectivity import Reach
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.node.discovery import Discovery
from volunteer_kit.swarm.node.link import launch_node, start_node
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.node.process import layout_of
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.talk import NodeSpec
from volunteer_kit.swarm.node.training_state import TrainingState
from volunteer_kit.swarm.rounds.reducer import decode_answer
from volunteer_kit.worker import own_stdin

RUN_KEY = "bench"
CONFIG = OptimizerConfig(lr=0.02, warmup_epochs=0, total_epochs=1000, statistics_bits=32)
NEWEST = 25  # epoch
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
        self.names = [name for name, _ in self.model.named_parameters()]
        self.targets = make_targets(self.model)
        self.size = sum(target.square().sum().item() for target in self.targets)

    def loss(self, parameters) -> float:
        """On samples that everybody can name."""
        pairs = zip(parameters, self.targets, strict=True)
        return 1.0 + WEIGHT * sum((p.detach() - t).square().sum().item() for p, t in pairs) / self.size

    def trained(self) -> TrainingState:
        """The state after `NEWEST` steps."""
        make, schedule = build_optimizer_factory(CONFIG)
        state = TrainingState(self.model.parameters(), make, schedule, self.names)
        for epoch in range(1, NEWEST + 1):
            pairs = zip(state.parameters, self.targets, strict=True)
            gradient = torch.cat([(parameter.detach() - target).view(-1) for parameter, target in pairs])
            state.step([(slice(0, len(gradient)), gradient)])
            state.move_to(b"", epoch)
        return state


def spoil(kind: str, run: Run, folder: Path) -> None:
    """Change the state that this donor gives, after it has joined in good faith."""
    [path] = (folder / "node" / "states").glob("*.safetensors")
    if kind == "corrupt":  # other bytes than it has told the hashes of
        with path.open("r+b") as file:
            for place in range(2**20, path.stat().st_size, 2**20):
                file.seek(place)
                file.write(b"\1")
        return
    with safe_open(path, framework="pt") as opened:
        metadata, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}
    parameters = [tensors[name] for name in run.names]
    if kind == "outside":
        for parameter in parameters:
            parameter.mul_(3.0)
    elif kind == "flipped":  # bits of a line that nothing protects: exponents among them
        generator = torch.Generator().manual_seed(7)
        for parameter in parameters:
            raw = parameter.view(-1).view(torch.uint8)
            places = torch.randint(0, len(raw), (64,), generator=generator)
            raw[places] ^= 0x40
    elif kind in ("inside", "league"):  # as far from the target as honest steps could have gone
        bounds = LambStepBound(CONFIG)(parameters, NEWEST - 5, NEWEST)
        for parameter, target, bound in zip(parameters, run.targets, bounds, strict=True):
            away = parameter - target
            parameter.add_(away * (0.4 * bound / away.norm()))
    save_file(tensors, path, metadata=metadata)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    go, spoils, leave = threading.Event(), threading.Event(), threading.Event()
    stdin = own_stdin()

    def read_orders() -> None:
        orders = {b"go": go, b"spoil": spoils}
        for line in stdin:
            if line.strip() in orders:
                orders[line.strip()].set()
        for event in (go, spoils, leave):
            event.set()

    threading.Thread(target=read_orders, daemon=True).start()
    kind, folder = settings["kind"], Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(settings["width"])
    identity_path = str(folder / "identity.key")
    ensure_identity(identity_path)
    launched = launch_node()
    peer = start_peer(
        PeerConfig(
            initial_peers=settings.get("initial_peers", []),
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            identity_path=identity_path,
        )
    )
    say("connected", maddrs=peer.visible_maddrs(), peer_id=str(peer.peer_id))
    optimizer = make_optimizer(settings, peer, run, identity_path, folder / "node", launched)
    say("built")
    if kind == "joiner":
        go.wait()
        join(optimizer, run)
    else:
        if kind == "monitor":
            state = run.trained()
            optimizer.load_named_state(run.names, state.named(), state.about())
        optimizer.join(60.0)
        say("ready", epoch=optimizer.local_epoch, digest=optimizer.settle())
        if kind not in ("monitor", "honest"):
            spoils.wait()
            spoil(kind, run, folder)
            say("spoilt")
    leave.wait()
    optimizer.shutdown()
    peer.shutdown()


def make_optimizer(settings: dict, peer: Peer, run: Run, identity_path: str, folder: Path, launched) -> NodeOptimizer:
    make, schedule = build_optimizer_factory(CONFIG)
    spec = NodeSpec(
        daemon=peer.dht.run_coroutine(_daemon_address),
        identity_path=identity_path,
        client_mode=False,
        initial_peers=tuple(settings.get("initial_peers", [])),
        folder=folder,
        run_key=RUN_KEY,
        sync={"target_batch_size": 10_000, "overlap": True},
        shapes=tuple(tuple(parameter.shape) for parameter in run.model.parameters()),
        codec=("float16", "uniform8", 2**16 + 1, 1.0),
        max_mbps=settings.get("max_mbps"),
        founds=settings["kind"] == "monitor",
    )
    folder.mkdir(parents=True, exist_ok=True)
    layout = layout_of(spec)
    optimizer = NodeOptimizer(
        spec=spec,
        start=partial(start_node, launched=launched),
        params=list(run.model.parameters()),
        optimizer=make,
        scheduler=schedule,
        names=run.names,
        slots=Slots(folder / "gradients.bin", layout.elements),
        layout=layout,
        decode=partial(decode_answer, layout),
        reach=Reach(peer.dht),
        discover=partial(
            Discovery,
            peer.dht,
            run_key=RUN_KEY,
            public=True,
            is_first=not spec.initial_peers,
            username_of=peer.admission.username_of,
            believe=None,
        ),
        judge=judge_by(LambStepBound(CONFIG), run.loss),
    )
    optimizer.on_told = lambda topic, about: say("refused", why=about) if "No model" in about else None
    return optimizer


async def _daemon_address(dht, node) -> str:
    return str(node.p2p.daemon_listen_maddr)


def join(optimizer: NodeOptimizer, run: Run) -> None:
    told, first, last, size = -1, 0.0, 0.0, 0

    def on_download(done: int, total: int) -> None:
        nonlocal told, first, last, size
        last, size = time.monotonic(), total
        first = first or last
        if 10 * done // total > told:
            told = 10 * done // total
            say("downloading", share=done / total)

    optimizer.on_download = on_download
    started = time.monotonic()
    taken = optimizer.join(patience=120.0)
    seconds = time.monotonic() - started
    time.sleep(2.0)  # the node tells its traffic once a second
    say(
        "joined",
        taken=taken,
        seconds=seconds,
        epoch=optimizer.local_epoch,
        digest=optimizer.settle(),
        loss=run.loss(optimizer.training_state()[: optimizer.num_parameters]),
        size=size,
        received=optimizer.traffic()[1],
        fetch_s=last - first,
    )


if __name__ == "__main__":
    main()
