"""How long a moderator's ban takes until nobody in a running swarm lets the banned one in any more."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from benchmarks.admission_parts.cells import id_of
from benchmarks.admission_parts.swarm import Run
from tests.local_swarm import LocalPeer

PATIENCE = 180.0  # s
LOOK_EVERY = 0.2  # s
PAUSE = 10.0  # s; bans come at any moment between two looks of the peers at the list


@dataclass
class Ban:
    first: float  # s from the moderator's answer until the first peer refused
    last: float  # until all did


def measure(run: Run, times: int) -> list[Ban]:
    """One after another, each of a new account that all peers have admitted."""
    return [ban_once(run, f"guest{number}") for number in range(times)]


def ban_once(run: Run, name: str) -> Ban:
    guest = run.add_stranger(name)
    guest.ask(do="show", token=run.join(name).hex())
    for peer in run.ids:
        got = call(guest, peer)
        assert got is None, f"{name} is not admitted: {got}"
    time.sleep(random.uniform(0.0, PAUSE))
    since, refused = run.ban(name), {}
    while len(refused) < len(run.peers):
        assert time.monotonic() < since + PATIENCE, f"not all refuse {name} after {PATIENCE} s: {refused}"
        for peer, process in zip(run.ids, run.peers, strict=True):
            verdict = process.ask(ask="verdicts", peers=[id_of(guest)])["verdicts"][id_of(guest)]
            if peer not in refused and verdict == "banned":
                refused[peer] = time.monotonic() - since
        time.sleep(LOOK_EVERY)
    for peer in run.ids:
        got = call(guest, peer)
        assert got is not None and "banned" in got, f"{name} is banned and was answered: {got}"
    guest.kill()
    return Ban(min(refused.values()), max(refused.values()))


def call(guest: LocalPeer, peer: str) -> str | None:
    """:returns: the refusal, in words"""
    for servicer, kind in (("dht", "rpc_ping"), ("node", "control")):
        got = guest.ask(do="call", servicer=servicer, kind=kind, peer=peer)
        if got["got"] is None:
            return got["why"]
    return None
