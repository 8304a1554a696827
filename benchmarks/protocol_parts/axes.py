"""Which values of SyncConfig's settings are the best: one at a time, the others at their defaults."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import mean, stdev
from typing import Any, Final, NamedTuple

from benchmarks.protocol_parts.lines import Speed
from benchmarks.protocol_parts.scenarios import Result, Silence
from benchmarks.protocol_parts.swarm import DENSE, EPOCH, Home
from benchmarks.protocol_parts.tasks import Broken, Task
from volunteer_kit.swarm.sync.config import SyncConfig

HOMES: Final = tuple(
    home._replace(microbatches=8)  # fewer events; all that is compared has as many
    for home in (Home(), Home(line=Speed(5.0, 1.0)), Home(size=DENSE, epoch=2 * EPOCH))
)
GOODPUT_AXES: Final[dict[str, tuple[float, ...]]] = {
    "max_staleness": (0, 1, 2, 4, 8),
    "heartbeat": (0.5, 1.0, 2.0),
    "leader_timeout": (1.5, 3.0, 6.0),
    "suspect_after": (3.0, 5.0, 10.0),
    "isolated_after": (5.0, 10.0, 20.0),
    "exchange_floor": (1.0, 2.0, 4.0),
    "exchange_ceiling": (30.0, 60.0, 120.0),
    "vote_floor": (1.0, 2.0, 4.0),
    "vote_ceiling": (10.0, 20.0, 40.0),
    "gather": (0.3, 1.0, 3.0),
    "fetch_patience": (4.0, 8.0, 16.0),
    "catching_up_patience": (10.0, 40.0, 80.0),
    "alone_after": (30.0, 60.0, 120.0),
}
"""Measured by goodput under the chaos schedule, at 20/10, at 5/1 Mbit/s, and with rounds of 12 MB."""
SILENCE_AXES: Final[dict[str, tuple[str, tuple[float, ...]]]] = {
    "alone_after": ("six die", (30.0, 60.0, 120.0)),
    "epoch_deadline": ("six leave", (60.0, 120.0, 240.0)),
}
"""Measured by the longest time without a commit, which says nothing of what a shorter one costs: a branch that need not
have been opened, a step of few samples."""
AXES: Final = (*GOODPUT_AXES, *(f"{name}, {scenario}" for name, (scenario, _) in SILENCE_AXES.items()))
NOISE: Final = 2.0  # standard errors
CLEARLY: Final = {"goodput": 0.003, "seconds": 3.0}  # a smaller difference is of no use


class Cell(NamedTuple):
    """One value of one setting."""

    value: float
    is_default: bool
    measure: float  # goodput, or seconds
    difference: float  # from the default's, of the same seeds
    error: float  # standard error of that


class Axis(NamedTuple):
    """A row of the table."""

    name: str
    unit: str  # goodput or seconds
    cells: tuple[Cell, ...]

    @property
    def better(self) -> Cell | None:
        """A value that is clearly better than the default; None: there is none."""
        sign = 1 if self.unit == "goodput" else -1
        found = [
            cell for cell in self.cells
            if sign * cell.difference > max(NOISE * cell.error, CLEARLY[self.unit])
        ]  # fmt: skip
        return max(found, key=lambda cell: sign * cell.difference, default=None)

    @property
    def verdict(self) -> str:
        """In words."""
        better = self.better
        if better is not None:
            sooner = f"{better.value:g} is {-better.difference:.0f} s sooner"
            return sooner if self.unit == "seconds" else f"{better.value:g} is better"
        sign = 1 if self.unit == "goodput" else -1
        best = max(self.cells, key=lambda cell: sign * cell.measure)
        return "the default is the best" if best.is_default else "the default is within the noise of the best"


def default(name: str) -> float:
    """What SyncConfig has."""
    return float(getattr(SyncConfig(target_batch_size=1), name))


def with_setting(home: Home, name: str, value: float) -> Home:
    """A home with another value; whole numbers stay whole."""
    given: Any = int(value) if name == "max_staleness" else value
    return home._replace(settings={**home.settings, name: given})


def tasks(rows: Sequence[str], seeds: int, minutes: float) -> dict[tuple[str, float], list[Task]]:
    """By row and value; ("", 0) is the defaults under chaos.

    :param rows: of `AXES`
    """
    found = {("", 0.0): [Task("chaos", home, seed, minutes) for home in HOMES for seed in range(seeds)]}
    for row in rows:
        name, _, scenario = row.partition(", ")
        if scenario:
            for value in SILENCE_AXES[name][1]:
                home = with_setting(Home(), name, value)
                found[row, value] = [Task(scenario, home, seed) for seed in range(2 * seeds)]
            continue
        for value in GOODPUT_AXES[name]:
            if value != default(name):
                others = [with_setting(home, name, value) for home in HOMES]
                found[row, value] = [Task("chaos", home, seed, minutes) for home in others for seed in range(seeds)]
    return found


def measure(result: Result | Silence | Broken) -> float:
    """What a run is judged by."""
    if isinstance(result, Broken):
        return float("nan")
    return result.shares.goodput if isinstance(result, Result) else result.longest_gap


def axes(rows: Sequence[str], found: dict[tuple[str, float], Sequence[float]]) -> list[Axis]:
    """The table, from the measures of all runs."""
    table = []
    for row in rows:
        name, _, scenario = row.partition(", ")
        unit, values = ("seconds", SILENCE_AXES[name][1]) if scenario else ("goodput", GOODPUT_AXES[name])
        usual = default(name)
        base = found[row, usual] if scenario else found["", 0.0]
        cells = [_cell(value, value == usual, base if value == usual else found[row, value], base) for value in values]
        table.append(Axis(row, unit, tuple(cells)))
    return table


def _cell(value: float, is_default: bool, measures: Sequence[float], base: Sequence[float]) -> Cell:
    differences = [mine - other for mine, other in zip(measures, base, strict=True)]
    error = stdev(differences) / sqrt(len(differences)) if len(differences) > 1 else 0.0
    return Cell(value, is_default, mean(measures), mean(differences), error)
