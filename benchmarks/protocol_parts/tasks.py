"""Runs of scenarios, on some processes at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from benchmarks.protocol_parts import scenarios
from benchmarks.protocol_parts.scenarios import Result, Silence
from benchmarks.protocol_parts.swarm import Home
from tests.simulation.invariants import Violation


class Task(NamedTuple):
    """One run."""

    scenario: str  # a key of SCENARIOS
    home: Home
    seed: int
    minutes: float = 0.0


class Broken(NamedTuple):
    """A run that broke an invariant: nothing else about it is worth a word."""

    task: Task
    text: str


SCENARIOS: Final[dict[str, Callable[[Task], Result | Silence]]] = {
    "chaos": lambda task: scenarios.chaos(task.home, task.seed, task.minutes),
    "no faults": lambda task: scenarios.chaos(task.home, task.seed, task.minutes, ()),
    "crowd": lambda task: scenarios.crowd(task.home, task.seed, task.minutes),
    "six leave": lambda task: scenarios.six_leave(task.home, task.seed),
    "six die": lambda task: scenarios.six_die(task.home, task.seed),
    "public returns": lambda task: scenarios.public_dies(task.home, task.seed, True),
    "public replaced": lambda task: scenarios.public_dies(task.home, task.seed, False),
}


def perform(task: Task) -> Result | Silence | Broken:
    """Run it."""
    try:
        return SCENARIOS[task.scenario](task)
    except Violation as violation:
        return Broken(task, f"{task.scenario}, seed {task.seed}, {task.home}: {violation}")


def perform_all(tasks: Sequence[Task], processes: int) -> Iterator[Result | Silence | Broken]:
    """In their order. The result of a task does not depend on the process that runs it."""
    if processes < 2:
        yield from map(perform, tasks)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(perform, tasks)
