"""One peer of a run that verifies, with a node: processes of its own, a small model on named samples.

argv[1]: JSON settings. stdin and stdout: see tests/orders.py; "go" lets one begin that `waits`, "cheat" an attacker.
A sample is its name: "peer/number".
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import torch

from tests.orders import Orders, say
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.robust.standing import Settings
from volunteer_kit.swarm.net.connectivity import Reach
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer
from volunteer_kit.swarm.node.discovery import Discovery
from volunteer_kit.swarm.node.link import Link, start_node
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.node.process import layout_of
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.talk import NodeSpec
from volunteer_kit.swarm.rounds.reducer import decode_answer

DIM_IN, DIM_OUT, BATCH = 32, 24, 16
TRUTH = torch.randn(DIM_IN, DIM_OUT, generator=torch.Generator().manual_seed(5))


def sample(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    peer, number = map(int, name.split("/"))
    generator = torch.Generator().manual_seed(peer * 2**20 + number)
    x = torch.randn(DIM_IN, generator=generator)
    return x, x @ TRUTH + 0.5 * torch.randn(DIM_OUT, generator=generator)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(DIM_IN, 48), torch.nn.Tanh(), torch.nn.Linear(48, DIM_OUT))


def gradients_of(model, names) -> None:
    """Mean over the samples -> .grad"""
    x, y = (torch.stack(column) for column in zip(*map(sample, names), strict=True))
    model.zero_grad()
    (model(x) - y).pow(2).mean().backward()


def recompute_on(other):
    def recompute(names, parameters):
        with torch.no_grad():
            for own, theirs in zip(other.parameters(), parameters, strict=True):
                own.copy_(theirs)
        for first in range(0, len(names), 64):
            some = names[first : first + 64]
            gradients_of(other, some)
            yield [p.grad * len(some) for p in other.parameters()]

    return recompute


def start_cheating(flag: Path, spec: NodeSpec) -> Link:
    ours, its = socket.socketpair()
    sentinel, held = os.pipe()
    with its:
        command = [sys.executable, "-m", "tests.cheating_node", str(its.fileno()), str(flag)]
        process = subprocess.Popen(command, pass_fds=(its.fileno(), held), stdin=subprocess.DEVNULL, stdout=2)
    os.close(held)
    link = Link(process, ours, sentinel)
    link.send(spec)
    return link


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    cheats = threading.Event()
    orders = Orders(cheat=cheats)
    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as scratch:
        run(settings, orders, cheats, Path(scratch))


def run(settings: dict, orders: Orders, cheats: threading.Event, scratch: Path) -> None:
    attack, flag = settings.get("attack"), scratch / "cheats"
    ensure_identity(str(scratch / "key"), print)
    known = settings.get("initial_peers", [])
    peer = start_peer(
        PeerConfig(
            initial_peers=known, host_maddrs=["/ip4/127.0.0.1/tcp/0"], identity_path=str(scratch / "key"),
            client_mode=settings.get("client_mode", False),
        )
    )  # fmt: skip
    orders.follow()
    say("connected", maddrs=peer.visible_maddrs(), peer_id=str(peer.peer_id))
    model = make_model()
    spec = NodeSpec(
        daemon=peer.daemon_address(), identity_path=str(scratch / "key"),
        client_mode=peer.client_mode, initial_peers=tuple(known), folder=scratch / "node", run_key="test",
        sync={"target_batch_size": settings["target_batch_size"], "overlap": True, "exchange_ceiling": 20.0},
        shapes=tuple(tuple(p.shape) for p in model.parameters()), codec=("float16", "blockwise8", 512, 1.0),
        rule="centered_clip", verification=Settings(**settings["verification"]),
    )  # fmt: skip
    spec.folder.mkdir()
    layout = layout_of(spec)
    optimizer = NodeOptimizer(
        spec=spec,
        start=partial(start_cheating, flag) if attack == "reducer" else start_node,
        params=list(model.parameters()),
        optimizer=lambda params: Lamb(params, lr=2e-2),
        names=[name for name, _ in model.named_parameters()],
        slots=Slots(spec.folder / "gradients.bin", layout.elements),
        layout=layout,
        decode=partial(decode_answer, layout),
        reach=Reach(peer.dht),
        discover=partial(Discovery, peer.dht, run_key="test", public=not peer.client_mode, is_first=not known),
    )
    optimizer.recompute = recompute_on(make_model())

    def tell(verdicts) -> None:
        events = [[event.kind, str(event.peer), event.epoch, event.text] for event in verdicts.events]
        bans = [str(who) for who, _ in verdicts.bans]
        say("verdicts", epoch=optimizer.local_epoch, events=events, measured=verdicts.measured, bans=bans)

    optimizer.on_verdicts = tell
    optimizer.on_told = lambda topic, about: print(topic, about, file=sys.stderr)
    say("joined", taken=optimizer.join(patience=120.0), epoch=optimizer.local_epoch)
    orders.go.wait()
    train(model, optimizer, settings, orders, cheats, flag)
    say("finished", epoch=optimizer.local_epoch, digest=optimizer.settle(patience=30.0))
    orders.leave.wait()
    optimizer.shutdown()
    peer.shutdown()
    say("left")


def train(model, optimizer, settings, orders, cheats: threading.Event, flag: Path) -> None:
    pause, own, made, flipped = threading.Event(), settings.get("seed", 0), 0, 0
    x, y = (torch.stack(column) for column in zip(*(sample(f"1000/{n}") for n in range(256)), strict=True))
    while not orders.are_done(optimizer):
        names = [f"{own}/{number}" for number in range(made, made + BATCH)]
        made += BATCH
        gradients_of(model, names)
        if cheats.is_set() and settings.get("attack") == "flip":
            flipped += 1
            for parameter in model.parameters():
                parameter.grad.neg_()
        elif cheats.is_set() and settings.get("attack") == "reducer":
            flag.touch()
        pause.wait(settings.get("pause", 0.1))  # a device's speed, not a wait for something
        optimizer.step(BATCH, names=names)
        while optimizer.reports:
            report = optimizer.reports.popleft()
            with torch.no_grad():
                loss = (model(x) - y).pow(2).mean().item()
            cheated = flipped + (flag.stat().st_size if flag.exists() else 0)
            say("epoch", epoch=report.epoch, samples=report.samples, group_size=report.group_size,
                received=report.received, loss=loss, seconds=report.seconds, cheated=cheated)  # fmt: skip


if __name__ == "__main__":
    main()
