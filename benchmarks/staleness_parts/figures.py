"""The rules that are compared, the trainings that this takes, and the ratios that come of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.staleness_parts.lateness import Rule
from benchmarks.staleness_parts.training import CODECS, Outcome, Setting, Size

RATES = (1.0, 1 / 3)  # of the run file's learning rate
FAR = (2, 8)  # epochs: the ages with which the bounds are compared

RULES = {
    "none": Rule("nothing is late", is_late=False),
    "used": Rule("used, weight 1/(1+k)"),
    "undiscounted": Rule("used, undiscounted", discount="1"),
    "waiting": Rule("thrown away, the epoch waits", waits=True),
    "thrown": Rule("thrown away, no waiting", discount="0"),
}
DISCOUNTED = {
    "root": Rule("used, weight 1/sqrt(1+k)", discount="1/sqrt(1+k)"),
    "square": Rule("used, weight 1/(1+k)^2", discount="1/(1+k)^2"),
}
BOUNDED = {
    "bound_2": Rule("ages 2-8, max_staleness 2", ages=FAR, max_staleness=2),
    "bound_4": Rule("ages 2-8, max_staleness 4", ages=FAR, max_staleness=4),
    "bound_8": Rule("ages 2-8, max_staleness 8", ages=FAR, max_staleness=8),
}
ON_ARRIVAL = {
    "arrival_used": Rule("used, counted on arrival", on_arrival=True),
    "arrival_thrown": Rule("thrown, counted on arrival", discount="0", on_arrival=True),
}
RUN_SIZE = Size(256, 50)  # the demo's own target batch; scenes only
RUN_BATCH = {f"run_batch_{rule}": RULES[rule] for rule in ("none", "used", "waiting", "thrown")}
ALL_RULES = {**RULES, **DISCOUNTED, **BOUNDED, **ON_ARRIVAL, **RUN_BATCH}
OF_DISCOUNTS = ("undiscounted", "root", "used", "square")


class Job(NamedTuple):
    """One training."""

    setting: Setting
    rule: str  # a key of ALL_RULES


Outcomes = Mapping[Job, Outcome]


def list_jobs(data: Sequence[str], seeds: int, codecs: Sequence[str] = tuple(CODECS)) -> list[Job]:
    """Every training of a measurement: RULES with each seed, the others with the first seed and in some cells only."""
    cells = [Setting(*cell) for cell in itertools.product(data, codecs, RATES, range(seeds))]
    jobs = [Job(cell, rule) for cell in cells for rule in RULES]
    first = [cell for cell in cells if cell.seed == 0]
    jobs += [Job(cell, rule) for cell in first for rule in DISCOUNTED]
    first = [cell for cell in first if cell.rate == RATES[0]]
    jobs += [Job(cell, rule) for cell in first for rule in BOUNDED]
    jobs += [Job(cell, rule) for cell in first if cell.codec == "dense" for rule in ON_ARRIVAL]
    jobs += [Job(cell, rule) for cell in first if cell[:2] == ("scenes", "dense") for rule in RUN_BATCH]
    return sorted(jobs, key=lambda job: cells.index(job.setting))  # a cell is done before the next one begins


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean, so that a ratio and its inverse weigh the same."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def ratio(outcomes: Outcomes, rule: str, other: str, cells: Iterable[Setting] | None = None) -> float:
    """Loss of one rule over another's: the geometric mean over the cells that have both, or over those of `cells`."""
    chosen = common_cells(outcomes, (rule, other)) if cells is None else list(cells)
    return geometric_mean(outcomes[Job(cell, rule)].loss / outcomes[Job(cell, other)].loss for cell in chosen)


def common_cells(outcomes: Outcomes, rules: Sequence[str]) -> list[Setting]:
    """The settings with which every one of some rules was trained, in order."""
    every = [{job.setting for job in outcomes if job.rule == rule} for rule in rules]
    return sorted(set.intersection(*every))


def best(outcomes: Outcomes, rules: Sequence[str]) -> tuple[str, dict[str, float]]:
    """The rule of the least loss, and each rule's loss ratio to no lateness, over the cells that all of them have."""
    cells = common_cells(outcomes, (*rules, "none"))
    ratios = {rule: ratio(outcomes, rule, "none", cells) for rule in rules}
    return min(ratios, key=ratios.__getitem__), ratios


def summary(outcomes: Outcomes) -> dict[str, float | int | str]:
    """The flat figures of a measurement."""
    cells = common_cells(outcomes, tuple(RULES))
    told: dict[str, float | int | str] = {
        "used_vs_waiting": ratio(outcomes, "used", "waiting", cells),
        "used_vs_thrown": ratio(outcomes, "used", "thrown", cells),
        "none_vs_waiting": ratio(outcomes, "none", "waiting", cells),  # no rule can be expected to do better
        "cells": len(cells),
        "seeds": len({cell.seed for cell in cells}),
    }
    told |= {f"ratio_{rule}": ratio(outcomes, rule, "none", cells) for rule in RULES if rule != "none"}
    for part in ("data", "codec", "rate"):
        for value in sorted({getattr(cell, part) for cell in cells}):
            of_part = [cell for cell in cells if getattr(cell, part) == value]
            name = value if isinstance(value, str) else f"rate_{value:.2g}"
            for other in ("waiting", "thrown"):
                told[f"used_vs_{other}_{name}"] = ratio(outcomes, "used", other, of_part)
    for name, rules in (("discount", OF_DISCOUNTS), ("bound", tuple(BOUNDED))):
        if common_cells(outcomes, (*rules, "none")):
            told[f"best_{name}"], ratios = best(outcomes, rules)
            told |= {f"{name}_ratio_{rule.removeprefix('bound_')}": value for rule, value in ratios.items()}
    if common_cells(outcomes, tuple(ON_ARRIVAL)):
        told["used_vs_thrown_on_arrival"] = ratio(outcomes, "arrival_used", "arrival_thrown")
    if common_cells(outcomes, tuple(RUN_BATCH)):
        for other in ("waiting", "thrown"):
            told[f"used_vs_{other}_run_batch"] = ratio(outcomes, "run_batch_used", f"run_batch_{other}")
    return told
