"""One peer of a test swarm, a process of its own with a node: a small model on what a linear one teaches it.

argv[1]: JSON settings; with an authority those of tests/peer_questions.py:membership as well. stdin and stdout: see
tests/orders.py.
"""

import json
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

import torch

from benchmarks.netlab import enter
from tests.orders import Orders, say
from tests.peer_questions import Questions, membership
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.swarm.net.connectivity import Reach
from volunteer_kit.swarm.net.identity import ensure_identity
from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.node.access import account_name
from volunteer_kit.swarm.node.discovery import Discovery
from volunteer_kit.swarm.node.link import start_node
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.node.process import layout_of
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.talk import Admit, NodeSpec
from volunteer_kit.swarm.records.failures import RoundCounts
from volunteer_kit.swarm.rounds.reducer import decode_answer

DIM_IN, DIM_OUT, BATCH = 32, 24, 16


def make_model() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(DIM_IN, 48), torch.nn.Tanh(), torch.nn.Linear(48, DIM_OUT))


def make_node(peer: Peer, model: torch.nn.Module, settings: dict, identity: str, folder: Path) -> NodeOptimizer:
    """The optimizer of a peer that is up; its node starts when it joins."""
    known, admission = settings.get("initial_peers", []), peer.admission
    spec = NodeSpec(
        daemon=peer.daemon_address(),
        identity_path=identity,
        client_mode=peer.client_mode,
        initial_peers=tuple(known),
        folder=folder,
        run_key="test",
        sync={
            "target_batch_size": settings.get("target_batch_size", 256), "exchange_ceiling": 10.0,
            **settings.get("sync", {}),
        },
        shapes=tuple(tuple(parameter.shape) for parameter in model.parameters()),
        codec=("float16", "uniform8", 512, 1.0),
        account=account_name(admission.username_of(peer.peer_id) or ""),
        trust=admission.trust,
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    layout = layout_of(spec)
    return NodeOptimizer(
        spec=spec,
        start=partial(start_node, watched_by=peer.processes),
        params=list(model.parameters()),
        optimizer=lambda params: Lamb(params, lr=5e-2),
        names=[name for name, _ in model.named_parameters()],
        slots=Slots(folder / "gradients.bin", layout.elements),
        layout=layout,
        decode=partial(decode_answer, layout),
        reach=Reach(peer.dht),
        discover=partial(
            Discovery, peer.dht, run_key=spec.run_key, public=not peer.client_mode, is_first=not known,
            username_of=admission.username_of,
        ),
        admission=lambda: Admit(admission.own_token, admission.bans),
        cause_of=peer.processes.cause_of,
    )  # fmt: skip


def main() -> None:
    settings = json.loads(sys.argv[1])
    if "network" in settings:
        enter(settings["network"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="vk-", dir="/tmp") as scratch:
        run(settings, Orders(), Path(scratch))


def run(settings: dict, orders: Orders, scratch: Path) -> None:
    member = membership(settings)
    identity = settings.get("identity") or str(scratch / "identity.key")
    ensure_identity(identity)
    peer = start_peer(
        PeerConfig(
            initial_peers=settings.get("initial_peers", []),
            host_maddrs=settings.get("host_maddrs", ["/ip4/127.0.0.1/tcp/0"]),
            identity_path=identity,
            client_mode=settings.get("client_mode", False),
        ),
        member.admission,
    )
    member.keep(peer)
    orders.follow(Questions(peer).answer)
    how = {"client_mode": peer.client_mode, "why": peer.why_client_mode}
    say("connected", maddrs=peer.visible_maddrs(), peer_id=str(peer.peer_id), **how)
    torch.manual_seed(0)
    model, truth = make_model(), torch.randn(DIM_IN, DIM_OUT)
    optimizer = make_node(peer, model, settings, identity, scratch / "node")
    member.on_news = optimizer.tell_admission
    say("joined", taken=optimizer.join(patience=120.0), epoch=optimizer.local_epoch)
    train(model, truth, optimizer, settings, orders)
    say("finished", epoch=optimizer.local_epoch, digest=optimizer.settle(patience=30.0))
    orders.leave.wait()
    optimizer.shutdown()
    member.close()
    peer.shutdown()
    say("left")


def watch_line(optimizer: NodeOptimizer, end: threading.Event) -> None:
    """Say so when the peer is cut off and when it is back; step() may wait meanwhile."""
    before = None
    while not end.wait(0.2):
        why = optimizer.cut_off
        if why != before:
            say("cut_off" if why else "back", why=why, epoch=optimizer.local_epoch)
        before = why


def train(model, truth, optimizer: NodeOptimizer, settings: dict, orders: Orders) -> None:
    generator = torch.Generator().manual_seed(settings.get("seed", 0))
    pause = threading.Event()
    made, known, counts = 0, [], RoundCounts()
    threading.Thread(target=watch_line, args=(optimizer, orders.leave), daemon=True).start()
    while not orders.are_done(optimizer):
        if optimizer.reach.known_peers() != known:
            known = optimizer.reach.known_peers()
            say("known", maddrs=known)
        x = torch.randn(BATCH, DIM_IN, generator=generator)  # (B, in)
        loss = (model(x) - x @ truth).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        pause.wait(settings.get("pause", 0.1))  # a device's speed, not a wait for something
        optimizer.step(BATCH, names=range(made, made + BATCH))
        made += BATCH
        while optimizer.reports:
            report = optimizer.reports.popleft()
            counts.count(report)
            say(
                "epoch",
                epoch=report.epoch,
                samples=report.samples,
                group_size=report.group_size,
                expected=report.expected,
                received=report.received,
                cause=report.cause,
                seconds=report.seconds,
                counts=counts.as_dict(),
            )


if __name__ == "__main__":
    main()
