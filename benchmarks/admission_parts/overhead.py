"""What admission costs a round: two swarms that do nothing but average, one with it and one without, in turn."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.admission_parts.swarm import Run
from tests.local_swarm import LocalPeer

MODULE = "benchmarks.admission_parts.rounds_peer"
MEMBERS = 4
VALUES = 2 * 2**20  # 8 MB in float32; 2 MB on the line
WARM_UP = 6  # rounds of each side that do not count
DRAWS = 2000


@dataclass
class Compared:
    """Medians; `percent` of the differences between two rounds that follow one another, with what 90 % of resamples
    lie between."""

    what: str
    open: float
    admitted: float
    percent: float
    low: float
    high: float


@dataclass
class Side:
    peers: list[LocalPeer]

    def round(self) -> dict[str, float] | None:
        """All members begin at once; it ends when the last has the average. None: somebody was missing."""
        started = time.perf_counter()
        number = sum(event["event"] == "answer" for event in self.peers[0].events)
        for peer in self.peers:
            peer.order('{"ask": "round"}')
        ends = [peer.wait_for(lambda e: e["event"] == "answer" and e["number"] == number) for peer in self.peers]
        seconds = time.perf_counter() - started
        if any(end.get("members") != len(self.peers) or end.get("received") != 1.0 for end in ends):
            return None
        return {
            "in all": seconds,
            "without matchmaking": max(end["without_matchmaking"] for end in ends),
            "CPU, all members": sum(end["cpu"] for end in ends),
        }


def measure(run: Run, pairs: int, folder: Path) -> tuple[list[Compared], int]:
    """:returns: the comparison, and how many pairs were left out, because a round of theirs was not whole"""
    sides = {"open": Side(open_peers(run, folder)), "admitted": Side(admitted_peers(run))}
    for side in sides.values():
        for peer in side.peers:
            peer.wait_event("ready", timeout=120.0)
    for _ in range(WARM_UP):
        for side in sides.values():
            side.round()
    found: list[tuple[dict, dict]] = []
    for number in range(pairs):
        order = ("open", "admitted") if number % 2 else ("admitted", "open")  # neither is always the first
        pair = {name: sides[name].round() for name in order}
        if all(pair.values()):
            found.append((pair["open"], pair["admitted"]))
    return [compare(what, found) for what in found[0][0]], pairs - len(found)


def compare(what: str, pairs: list[tuple[dict, dict]]) -> Compared:
    plain = statistics.median(one[what] for one, _ in pairs)
    admitted = statistics.median(other[what] for _, other in pairs)
    differences = [other[what] - one[what] for one, other in pairs]
    chance = random.Random(0)
    draws = sorted(statistics.median(chance.choices(differences, k=len(differences))) for _ in range(DRAWS))
    share = [100 * one / plain for one in (statistics.median(differences), draws[DRAWS // 20], draws[-DRAWS // 20])]
    return Compared(what, plain, admitted, *share)


def admitted_peers(run: Run) -> list[LocalPeer]:
    return [run.add_peer(module=MODULE, values=VALUES, group=MEMBERS) for _ in range(MEMBERS)]


def open_peers(run: Run, folder: Path) -> list[LocalPeer]:
    peers: list[LocalPeer] = []
    for number in range(MEMBERS):
        first = {"initial_peers": peers[0].wait_event("connected")["maddrs"]} if peers else {}
        log = folder / f"open-{number}.log"
        peers.append(LocalPeer(log, module=MODULE, values=VALUES, group=MEMBERS, **first))
        run.started.append(peers[-1])
    return peers
