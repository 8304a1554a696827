"""A machine of a swarm whose credit is judged: `python -m credit_parts.peer SETTINGS`. stdin: any line: leave.

The model is a mark: each machine's gradient is one in the columns that are its own. So the average tells by itself who
is in it, and what entered a step is known without a word of those whose entries are judged.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
from hivemind.p2p import PeerID

from credit_parts.attacks import ATTACKS, Honest
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.runs import RunConfig, load_run
from volunteer_kit.session.node import make_node, node_spec
from volunteer_kit.session.node_parts import NodeParts
from volunteer_kit.swarm.net.peer import Peer, PeerConfig, start_peer
from volunteer_kit.swarm.node.link import launch_node
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.records.peer_record import PeerBoard, PeerRecord
from volunteer_kit.worker import own_stdin

TENSORS, ROWS, SLOTS = 24, 32, 12  # of the mark
MICROBATCH = 16
SECONDS = 2.0  # between two records of ours


class Book:
    """Records what this machine computed and saw entering, line by line; a line that is written survives SIGKILL."""

    def __init__(self, path: str):
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  as long as the process lives

    def write(self, **what) -> None:
        self._file.write(json.dumps({"pid": os.getpid(), **what}) + "\n")


class ReadingLamb(Lamb):
    """Writes down whose marks the averaged gradient bears, and the share of the rows that bear them."""

    book: Book | None = None  # the monitor's has none

    @torch.no_grad()
    def step(self, closure=None):
        average = torch.cat([parameter.grad for parameter in self.param_groups[0]["params"]])  # (TENSORS * ROWS, SLOTS)
        entered = (average > 0).float().mean(0).tolist()
        if self.book is not None:
            self.book.write(entered={slot: share for slot, share in enumerate(entered) if share > 0})
        return super().step(closure)


def run_of(target_batch_size: int) -> RunConfig:
    """The run that all these machines are in."""
    values = load_run("demo").model_dump(mode="json")
    swarm = {**values["swarm"], "grad_compression": "none", "small_compression": "none", "aggregation": "mean"}
    return load_run({**values, "run_id": "credit", "target_batch_size": target_batch_size, "swarm": swarm})


def mark_parts() -> NodeParts:
    """Return the parts of a node whose model is a mark."""
    mark = [torch.nn.Parameter(torch.ones(ROWS, SLOTS)) for _ in range(TENSORS)]
    names = [f"mark.{number}" for number in range(TENSORS)]

    def optimizer(groups) -> Lamb:
        return ReadingLamb(groups, lr=1e-2)

    def scheduler(optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    return NodeParts([{"params": mark}], names, optimizer, scheduler)


def node(settings: dict, run: RunConfig, identity: str, folder: str, observes: bool = False) -> tuple:
    """:returns: the peer, its board and its optimizer, and the mark"""
    launched = launch_node()
    peer: Peer = start_peer(
        PeerConfig(
            initial_peers=settings["initial_peers"], host_maddrs=["/ip4/127.0.0.1/tcp/0"], identity_path=identity,
            client_mode=False, check_identity=False,
        )
    )  # fmt: skip
    parts, board = mark_parts(), PeerBoard(peer.dht, run.run_id)
    spec = node_spec(
        run, peer, parts, identity_path=identity, folder=Path(folder), initial_peers=settings["initial_peers"],
        observes=observes,
    )  # fmt: skip
    return peer, board, make_node(run, peer, board, parts, spec, launched), parts.parameters


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    leave, stdin = threading.Event(), own_stdin()
    ReadingLamb.book = book = Book(settings["book"])
    attack: Honest = ATTACKS.get(settings.get("attack"), ATTACKS["none"])(settings)
    attack.begin()
    run = run_of(settings["target_batch_size"])
    peer, records, optimizer, mark = node(settings, run, settings["identity"], settings["folder"])
    threading.Thread(target=lambda: (stdin.readline(), leave.set(), optimizer.stop_waiting()), daemon=True).start()
    optimizer.on_steps = lambda steps: [book.write(epoch=step.epoch, lineage=step.lineage.hex()) for step in steps]
    optimizer.join(patience=60.0)
    print(json.dumps({"joined": optimizer.local_epoch}), flush=True)
    train(mark, optimizer, records, attack, settings, book, leave)
    optimizer.settle(patience=10.0)
    time.sleep(2.0)  # totals are a second old
    tell(optimizer, attack, book, settings["identity"])
    optimizer.shutdown()
    peer.shutdown()


def tell(optimizer: NodeOptimizer, attack: Honest, book: Book, key: str) -> None:
    """Write down how many of its samples in steps this machine computed, by its own node; print the node's reports."""
    if "committed" in (totals := optimizer.totals):
        book.write(key=key, committed=totals["committed"] / attack.times if attack.works else 0)
    while optimizer.reports:
        report = optimizer.reports.popleft()
        print(json.dumps({"epoch": report.epoch, "samples": report.samples, "group": report.group_size}), flush=True)


def train(mark, optimizer, records, attack, settings, book, leave) -> None:
    slot, told, made = settings["slot"], 0.0, 0
    me = PeerID.from_identity(Path(settings["identity"]).read_bytes()).to_bytes()
    while not leave.is_set():
        began = time.perf_counter()
        time.sleep(settings["pause"])  # the device
        for parameter in mark:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[:, slot] = 1e-3
            attack.change(parameter.grad)
        speed = MICROBATCH / (time.perf_counter() - began)
        if time.monotonic() - told > SECONDS:
            told = time.monotonic()
            about = {"device": "a laptop", "samples_per_second": speed, **attack.about()}
            records.publish(
                PeerRecord(
                    peer_id=me, fingerprint="0123456789abcdef", name="x",
                    epoch=optimizer.local_epoch, total_samples=made, loss=None, client_mode=False, **about,
                )
            )  # fmt: skip
        made += MICROBATCH
        optimizer.step(int(MICROBATCH * attack.times), names=[(os.getpid(), made)])
        tell(optimizer, attack, book, settings["identity"])


if __name__ == "__main__":
    main()
