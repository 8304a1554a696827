"""One peer of a swarm whose credit is judged: `python -m credit_parts.peer SETTINGS`. stdin: any line: leave.

The model is a mark: each machine's gradient is one in the columns that are its own. So the average tells by itself who
is in it, in every slice, and what entered a step is known without a word of those whose receipts are judged.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import torch
from endurance_parts import ledger
from hivemind.p2p import PeerID

from credit_parts.attacks import ATTACKS
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.swarm.credit_bounds import Bounds
from volunteer_kit.swarm.optimizer import SwarmOptimizer, SwarmOptions
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.receipts import ReceiptBoard, ReceiptWriter
from volunteer_kit.swarm.records import PeerBoard, PeerRecord
from volunteer_kit.worker import own_stdin

TENSORS, ROWS, SLOTS = 24, 32, 12  # of the mark: a tensor goes to one reducer as long as it is small
MICROBATCH = 16
SECONDS = 2.0  # between two records of ours
RUN = "credit"


class Book:
    """What this machine gave and what it saw entering, line by line; a line that is written survives SIGKILL."""

    def __init__(self, path: str):
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  as long as the process lives

    def write(self, **what) -> None:
        self._file.write(json.dumps({"pid": os.getpid(), **what}) + "\n")


class ReadingLamb(Lamb):
    """Writes down whose marks the averaged gradient bears, and the share of the rows that bear them."""

    book: Book

    @torch.no_grad()
    def step(self, closure=None):
        average = torch.cat([parameter.grad for parameter in self.param_groups[0]["params"]])  # (TENSORS * ROWS, SLOTS)
        entered = (average > 0).float().mean(0).tolist()
        self.book.write(entered={slot: share for slot, share in enumerate(entered) if share > 0})
        return super().step(closure)


class BookedOptimizer(SwarmOptimizer):
    """Writes down what it brings into each round."""

    book: Book

    def _update_global_epoch(self, grad_scaler) -> None:
        self.book.write(gave=self.local_epoch + 1, samples=self.grad_averager.local_samples_accumulated)
        super()._update_global_epoch(grad_scaler)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    leave, stdin = threading.Event(), own_stdin()
    threading.Thread(target=lambda: (stdin.readline(), leave.set()), daemon=True).start()
    os.environ[ledger.WHERE] = settings["book"]
    ledger.keep()
    ReadingLamb.book = BookedOptimizer.book = Book(settings["book"])
    peer = start_peer(
        PeerConfig(
            initial_peers=settings["initial_peers"],
            host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            identity_path=settings["identity"],
            client_mode=False,
            check_identity=False,
        )
    )
    mark = [torch.nn.Parameter(torch.ones(ROWS, SLOTS)) for _ in range(TENSORS)]
    options = SwarmOptions(
        run_key=RUN,
        target_batch_size=settings["target_batch_size"],
        matchmaking_time=2.0,
        averaging_timeout=20.0,
        allreduce_timeout=10.0,
        next_chunk_timeout=4.0,
        load_state_timeout=20.0,
        refresh_period=0.4,
        metadata_expiration=15.0,
        delay_optimizer_step=False,
    )
    attack = ATTACKS.get(settings.get("attack"), ATTACKS["none"])(settings)
    optimizer = BookedOptimizer(
        peer=peer, options=options, params=mark, optimizer=lambda params: ReadingLamb(params, lr=1e-2)
    )
    records = PeerBoard(peer.dht, RUN)
    accounts = {PeerID.from_base58(peer_id): name.encode() for peer_id, name in settings["accounts"].items()}
    bounds = Bounds(options.target_batch_size, microbatch=MICROBATCH)
    writer = ReceiptWriter(ReceiptBoard(peer.dht, RUN), bounds, records.fetch, accounts.get)
    attack.begin(writer, accounts)
    optimizer.on_reduced = writer
    optimizer.join()
    print(json.dumps({"joined": optimizer.local_epoch}), flush=True)
    train(mark, optimizer, records, attack, settings, leave)
    optimizer.settle(patience=10.0)
    writer.close()
    optimizer.shutdown()
    peer.shutdown()


def train(mark, optimizer, records, attack, settings, leave) -> None:
    slot, told, made = settings["slot"], 0.0, 0
    while not leave.is_set():
        began = time.perf_counter()
        time.sleep(settings["pause"])  # the device
        for parameter in mark:
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[:, slot] = 1e-3
        speed = MICROBATCH / (time.perf_counter() - began)
        if time.monotonic() - told > SECONDS:
            told = time.monotonic()
            about = {"device": "a laptop", "samples_per_second": speed, **attack.about()}
            records.publish(
                PeerRecord(
                    peer_id=optimizer.dht.peer_id.to_bytes(), fingerprint="0123456789abcdef", name="x",
                    epoch=optimizer.local_epoch, total_samples=made, loss=None, client_mode=False, **about,
                )
            )  # fmt: skip
        made += MICROBATCH
        optimizer.step(MICROBATCH, names=[(os.getpid(), made)])
        while optimizer.reports:
            report = optimizer.reports.popleft()
            line = {"epoch": report.epoch, "samples": report.samples, "group": report.group_size}
            print(json.dumps({**line, "failure": report.failure, "received": report.received}), flush=True)


if __name__ == "__main__":
    main()
