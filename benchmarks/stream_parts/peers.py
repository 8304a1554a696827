"""Peers that read together, join, leave and are killed: how many samples enter steps twice in one epoch?"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from volunteer_kit.process_group import kill_all

from .material import HERE, shards, stream

RANGE, LIFETIME = 256, 15.0  # records, s
BATCH, PACE = 16, 0.1  # samples, s: a device of 160 samples/s
STEP = 1.0  # s between global steps


def be_peer(url: str, folder: str, name: str, initial_peers: list[str]) -> None:
    """Read, and every second count what was read as one step; a line of names each. Leaves on SIGTERM."""
    from volunteer_kit.data.leases import Lease
    from volunteer_kit.data.ledger import Ledger
    from volunteer_kit.swarm.leases.client import SwarmLeases
    from volunteer_kit.swarm.net.peer import PeerConfig, start_peer

    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))
    settings = PeerConfig(initial_peers=initial_peers, host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=False)
    peer = start_peer(settings)
    print(json.dumps(peer.visible_maddrs()), flush=True)
    where = shards(url, Path(folder), "codes")
    reader, ledger = stream("codes", where, random.randrange(2**31), range_length=RANGE), Ledger()
    leases = SwarmLeases(peer.dht, "benchmark", Lease, lifetime=LIFETIME)
    reader.lease_from(leases)
    reader.read_ahead()
    journal = os.open(Path(folder).parent / f"peer-{name}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    names, stepped = [], time.monotonic()
    while not leaving:
        batch = ledger.given(reader.next_batch(BATCH))
        names += batch.names
        time.sleep(PACE)  # training
        leases.keep()
        if time.monotonic() - stepped > STEP:
            applied = ledger.applied(names)
            line = {"names": names, "epoch": reader.epoch, "counts": dict(leases.counts)}
            os.write(journal, json.dumps(line).encode() + b"\n")  # the step is taken
            reader.applied(applied.after)
            names, stepped = [], time.monotonic()
    reader.close()
    leases.close()
    peer.shutdown()


class Group:
    """Processes that are peers of one swarm."""

    def __init__(self, url: str, folder: Path):
        self.url, self.folder, self.peers, self.started = url, folder, [], 0
        self.known: list[str] = []

    def add(self) -> None:
        arguments = ["--peer", json.dumps([self.url, str(self.folder), str(self.started), self.known])]
        log = (self.folder.parent / f"log-{self.started}").open("w")
        process = subprocess.Popen(
            [sys.executable, HERE / "stream.py", *arguments],
            stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
        )  # fmt: skip
        self.started += 1
        self.peers.append(process)
        if not self.known:
            self.known = json.loads(process.stdout.readline())

    def remove(self, process: subprocess.Popen, kill: bool) -> None:
        self.peers.remove(process)
        if not kill:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                pass
        kill_all(process.pid)
        process.wait(10)


def come_and_go(
    url: str, folder: Path, peers: int, seconds: float, every: float, records: int, seed: int = 0
) -> dict[str, float]:
    """So many peers for so long, of a data set of `records`; every few seconds one is killed or leaves, and a new one
    comes."""
    rng, group, changes = random.Random(seed), Group(url, folder), Counter()
    try:
        for _ in range(peers):
            group.add()
        for process in group.peers[1:]:
            process.stdout.readline()  # connected
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(every)
            kill = changes["killed"] <= changes["left"]
            group.remove(rng.choice(group.peers[1:]), kill)  # the first is where newcomers ask
            changes["killed" if kill else "left"] += 1
            group.add()
    finally:
        for process in list(group.peers):
            group.remove(process, kill=True)
    seen, counts, epochs = Counter(), Counter(), set()
    for journal in folder.parent.glob("peer-*"):
        lines = [json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1]]
        seen.update(tuple(name) for line in lines for name in line["names"])
        epochs |= {line["epoch"] for line in lines}
        counts.update(lines[-1]["counts"] if lines else {})
    samples, last = seen.total(), max(epochs)
    whole = sum(name[0] < last for name in seen) / max(1, last * records)
    return {
        "samples": samples,
        "read_of_finished_epochs": whole,
        "duplicates": samples - len(seen),
        "rate": (samples - len(seen)) / max(1, samples),
        "epochs": len(epochs),
        "peers": group.started,
        **{f"peers_{what}": count for what, count in changes.items()},
        **{f"leases_{what}": count for what, count in counts.items()},
    }
