"""A worker of the kit: its own Peer, NodeOptimizer and Trainer, put together as volunteer_kit/session does. A restarted
one goes on from its node's folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.home_parts.accounts import NOT_EXPIRED
from benchmarks.home_parts.device import Device, Words, on_the_wire
from tests.orders import say
from volunteer_kit.runs import RunConfig, build_model, load_run
from volunteer_kit.session.node import make_node, node_spec, renew_key_if_left
from volunteer_kit.session.node_parts import node_parts
from volunteer_kit.session.options import compute_loss
from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.node.link import launch_node
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.records.peer_record import PeerBoard
from volunteer_kit.swarm.sync.contributions import Cause
from volunteer_kit.training.trainer import Callback, Trainer

UNDONE = (Cause.LOST_BRANCH, Cause.ROLLBACK)  # of samples that a step had settled before


def start(settings: dict[str, Any]) -> Peer:
    """A peer in the DHT."""
    peer = start_peer(
        PeerConfig(
            initial_peers=settings.get("initial_peers", []),
            host_maddrs=[f"/ip4/{settings['address']}/tcp/{settings.get('port', 0)}"],
            client_mode=settings.get("client_mode", False),
            identity_path=settings.get("identity_path"),
            check_identity=False,
        )
    )
    say("connected", at=time.monotonic(), peer_id=str(peer.peer_id), maddrs=peer.visible_maddrs())
    return peer


def build(settings: dict[str, Any], run: RunConfig, model: torch.nn.Module) -> tuple[Peer, NodeOptimizer]:
    """The peer and its optimizer, which has not joined yet."""
    folder = Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    identity_path = settings.get("identity_path") or str(folder / "identity.key")
    parts = node_parts(run, model)
    renew_key_if_left(folder / "node", identity_path, parts.elements, lambda text: say("warning", message=text))
    launched = launch_node()
    peer = start({**settings, "identity_path": identity_path})
    spec = node_spec(
        run,
        peer,
        parts,
        identity_path=identity_path,
        folder=folder / "node",
        initial_peers=settings.get("initial_peers", []),
        max_mbps=settings.get("max_mbps"),
    )
    board = PeerBoard(peer.dht, run.run_id)
    return peer, make_node(run, peer, board, parts, spec, launched)


def ledger_of(optimizer: NodeOptimizer) -> dict[str, float]:
    """Return the node's totals of this peer's samples, at most a second old; empty before the node reports any."""
    return optimizer.totals


class Told:
    """The fates of this peer's samples until now: the node's ledger, and the steps that the peer took since.

    :param had: what the ledger had when this process came to it
    """

    def __init__(self, optimizer: NodeOptimizer, device: Device, had: Mapping[str, float]):
        self._optimizer, self._device, self._had = optimizer, device, had
        self.settled = 0  # samples, by steps

    def totals(self) -> dict[str, float]:
        """Samples: computed, committed, pending, and expired by cause."""
        known = {**self._optimizer.expired, **ledger_of(self._optimizer)}
        undone = sum(known.get(cause.value, 0.0) - self._had.get(cause.value, 0.0) for cause in UNDONE)
        known["computed"] = self._had["computed"] + self._device.clock.made
        known["committed"] = self._had["committed"] + self.settled - undone
        expired = sum(samples for name, samples in known.items() if name not in NOT_EXPIRED)
        return known | {"pending": known["computed"] - known["committed"] - expired}


class TellSteps(Callback):
    """Each step of the swarm as an event, with what the clock and the line say of it."""

    def __init__(self, device: Device, told: Told):
        self.device, self.told = device, told

    def on_epoch(self, trainer: Trainer, report, loss: float | None) -> None:
        self.told.settled += report.samples
        totals = self.told.totals()
        say(
            "step",
            at=time.monotonic(),
            epoch=report.epoch,
            samples=report.samples,
            of=report.samples,
            pending=totals["pending"],
            group_size=report.group_size,
            received=report.received,
            seconds=report.seconds,
            failure=report.cause,
            bytes_sent=report.bytes_sent,
            bytes_received=report.bytes_received,
            swarm=trainer.optimizer.progress().num_peers,
            totals=totals,
            **self.device.clock.read(),
            **on_the_wire(),
        )


def train(settings: dict[str, Any], device: Device, words: Words) -> None:
    run = load_run(settings["run"])
    model = build_model(run)
    peer, optimizer = build(settings, run, model)
    threading.Thread(target=lambda: (words.leave.wait(), optimizer.stop_waiting()), daemon=True).start()
    taken = optimizer.join(patience=run.swarm.load_state_timeout)
    while not (had := ledger_of(optimizer)):
        time.sleep(0.05)
    say("ready", at=time.monotonic(), epoch=optimizer.local_epoch, taken=taken, totals=had, **on_the_wire())
    words.go.wait()
    told = Told(optimizer, device, had)
    device.also = lambda: {"totals": told.totals(), "epoch": optimizer.local_epoch}
    trainer = Trainer(
        model, optimizer, device.next_batch, compute_loss,
        batch_size=device.batch, callbacks=[TellSteps(device, told)], compute_gradients=device,
    )  # fmt: skip
    device.clock.start()
    trainer.train(words.leave.is_set)
    optimizer.settle()
    trainer.tell_steps()
    say("finished", at=time.monotonic(), totals=told.totals(), traffic=optimizer.traffic())
    optimizer.shutdown()
    peer.shutdown()
