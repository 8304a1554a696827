"""The simulator runs the real SyncCore under a trial's faults, in the virtual time of protocol_goodput.py.

The same devices, lines, epochs, bytes of a round, and faults at the same times; a killed worker is away as long as the
real one was. There is neither encoding nor anything else that costs a processor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from benchmarks.home_parts.faults import Fault
from benchmarks.protocol_parts import swarm as virtual
from benchmarks.protocol_parts.account import Shares
from benchmarks.protocol_parts.scenarios import LAST_COMMIT, WARM_UP
from benchmarks.protocol_parts.swarm import Home, Swarm
from tests.simulation import schedule

LATENCY = 0.001  # s of each line; a netlab's have none of their own
KINDS = {"kill": "away", "stop": "stop", "cut": "partition", "partition": "partition"}  # as the simulator calls them
SEEDS = 3


class Kept(NamedTuple):
    """Medians over the seeds."""

    quiet: float  # goodput without faults
    loud: float  # under them
    kept: float  # under them, dead time taken off, beside that without


def name_of(number: int) -> str:
    """A worker's number, from 0."""
    return f"p{number:02d}"


def virtual_faults(faults: Sequence[Fault], begin: float, end: float) -> list[schedule.Fault]:
    """The same faults, the measurement's begin at WARM_UP.

    :param begin: time.monotonic(), as is `end`, when a fault that was never lifted is taken to be over
    """
    return [
        schedule.Fault(
            WARM_UP + fault.at - begin,
            KINDS[fault.kind],
            tuple(map(name_of, fault.numbers)),
            (fault.until or end) - fault.at,
        )
        for fault in faults
    ]


def shares(home: Home, speeds: Sequence[float], faults: Sequence[schedule.Fault], seconds: float, seed: int) -> Shares:
    """Return the devices' time by use, from the first commit behind WARM_UP to the first one `seconds` later."""
    rng = random.Random(f"home-{seed}")
    peers = [
        virtual.peer(home, name_of(number), speed, number < home.public, True, rng)._replace(latency=LATENCY)
        for number, speed in enumerate(speeds)
    ]
    end = WARM_UP + seconds
    swarm = Swarm(home, "home", seed, peers, faults, end + LAST_COMMIT)
    swarm.measure(WARM_UP, end)
    swarm.run()
    return swarm.shares()


def simulate(
    home: Home, speeds: Sequence[float], faults: Sequence[schedule.Fault], seconds: float, seeds: int = SEEDS
) -> Kept:
    """:param faults: of virtual_faults()"""
    quiet = [shares(home, speeds, (), seconds / 3, seed).goodput for seed in range(seeds)]
    found = [shares(home, speeds, faults, seconds, seed) for seed in range(seeds)]
    loud = [each.goodput for each in found]
    kept = [
        each.goodput / (1 - float(each["dead"])) / before for each, before in zip(found, quiet, strict=True)
    ]  # fmt: skip
    return Kept(median(quiet), median(loud), median(kept))
