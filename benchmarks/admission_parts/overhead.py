"""Measure what admission costs a round: compare two swarms that train side by side, one with it and one without."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.admission_parts.swarm import Run
from tests.local_swarm import LocalPeer

MEMBERS = 4
PAUSE = 0.2  # s of a microbatch
WARM_UP = 6  # rounds of each side that do not count
DRAWS = 2000
PATIENCE = 20.0  # s for one round


@dataclass
class Compared:
    """Medians, s; `percent` of the differences between two rounds of the same number, with what 90 % of resamples lie
    between."""

    what: str
    open: float
    admitted: float
    percent: float
    low: float
    high: float


class Side:
    """One of the two swarms."""

    def __init__(self, peers: list[LocalPeer]):
        self.peers = peers
        self._before = 0.0

    def rounds(self) -> list[float]:
        """s of each whole round, as the first peer saw it."""
        told = [event for event in self.peers[0].said() if event["event"] == "epoch"]
        return [event["seconds"] for event in told if event["group_size"] == len(self.peers)]

    def begin(self) -> None:
        """Count the processors' time from here on."""
        self._before, self._rounds = self._cpu(), len(self.rounds())

    def cpu_each(self) -> float:
        """s of all members' processors for each round since."""
        return (self._cpu() - self._before) / max(1, len(self.rounds()) - self._rounds)

    def _cpu(self) -> float:
        total = 0.0
        for peer in self.peers:
            own = psutil.Process(peer.process.pid)
            for process in (own, *own.children(recursive=True)):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def measure(run: Run, pairs: int, folder: Path) -> tuple[list[Compared], int]:
    """:returns: the comparison, and how many pairs are missing, because rounds were not whole"""
    sides = {"open": Side(open_peers(run, folder)), "admitted": Side(admitted_peers(run))}
    for side in sides.values():
        for peer in side.peers:
            peer.wait_epoch(WARM_UP, group_size=MEMBERS, timeout=240.0)
    for side in sides.values():
        side.begin()
    begun = {name: len(side.rounds()) for name, side in sides.items()}
    wait(lambda: all(len(side.rounds()) >= begun[name] + pairs for name, side in sides.items()), pairs * PATIENCE)
    rounds = {name: side.rounds()[begun[name] :][:pairs] for name, side in sides.items()}
    seconds = compare("round", list(zip(rounds["open"], rounds["admitted"], strict=False)))
    cpu = {name: side.cpu_each() for name, side in sides.items()}
    percent = 100 * (cpu["admitted"] / cpu["open"] - 1)
    spent = Compared("CPU of a round, all members", cpu["open"], cpu["admitted"], percent, percent, percent)
    return [seconds, spent], pairs - min(map(len, rounds.values()))


def wait(found: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    while not found() and time.monotonic() < deadline:
        time.sleep(0.5)


def compare(what: str, pairs: list[tuple[float, float]]) -> Compared:
    """Raises SystemExit where there is nothing to compare."""
    if not pairs:
        raise SystemExit("No round was whole on both sides.")
    plain = statistics.median(one for one, _ in pairs)
    admitted = statistics.median(other for _, other in pairs)
    differences = [other - one for one, other in pairs]
    chance = random.Random(0)
    draws = sorted(statistics.median(chance.choices(differences, k=len(differences))) for _ in range(DRAWS))
    share = [100 * one / plain for one in (statistics.median(differences), draws[DRAWS // 20], draws[-DRAWS // 20])]
    return Compared(what, plain, admitted, *share)


def admitted_peers(run: Run) -> list[LocalPeer]:
    return [run.add_peer(pause=PAUSE) for _ in range(MEMBERS)]


def open_peers(run: Run, folder: Path) -> list[LocalPeer]:
    peers: list[LocalPeer] = []
    for number in range(MEMBERS):
        first = {"initial_peers": peers[0].wait_event("connected")["maddrs"]} if peers else {}
        peers.append(LocalPeer(folder / f"open-{number}.log", seed=number + 1, pause=PAUSE, **first))
        run.started.append(peers[-1])
    return peers
