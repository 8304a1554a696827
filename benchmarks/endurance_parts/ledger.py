"""Which counted samples are in the model that the swarm ended with.

Each worker writes down the name of each step that its model took, with the name of the step before, and the samples
that it counted. From the newest step the line is followed back; counted samples are lost if their step is not on it.
The kit's own rule of when a step counts has no part in this.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volunteer_kit.session.tally import Tally
from volunteer_kit.swarm.node.member import NodeOptimizer

WHERE = "VOLUNTEER_KIT_ENDURANCE_LEDGER"  # file


# --- in the worker ---


def keep() -> None:
    """Write down, from now on."""
    ledger = open(os.environ[WHERE], "a", buffering=1)  # noqa: SIM115  as long as the worker lives
    apply, count = NodeOptimizer._apply, Tally.count

    def write(**what: Any) -> None:
        ledger.write(json.dumps({"pid": os.getpid(), **what}) + "\n")

    def apply_and_write(optimizer, step) -> None:
        write(epoch=step.epoch, lineage=step.lineage.hex(), parent=step.parent.hex())
        apply(optimizer, step)

    def count_and_write(tally, report) -> int:
        told = {"unconfirmed": report.is_unconfirmed, "openings": report.openings}
        write(step=report.epoch, samples=report.samples, **told)
        return count(tally, report)

    NodeOptimizer._apply, Tally.count = apply_and_write, count_and_write


# --- afterwards ---


@dataclass(frozen=True)
class Verdict:
    """Samples of one volunteer. `unknown`: of steps older than the line can be followed, or that no process took."""

    counted: int
    lost: dict[int, int]  # epoch -> samples
    unknown: int


def judge(ledgers: Iterable[Path]) -> list[Verdict]:
    """One verdict a ledger, in their order."""
    lines = [[json.loads(line) for line in ledger.read_text().splitlines()] for ledger in ledgers]
    line = follow_back([each for one in lines for each in one if "lineage" in each])
    return [verdict(one, line) for one in lines]


def follow_back(steps: list[dict]) -> dict[int, str]:
    """The line of steps that ended in the last one: epoch -> lineage, as far as it can be followed."""
    parents = {step["lineage"]: (step["epoch"], step["parent"]) for step in steps}
    if not steps:
        return {}
    name, line = max(steps, key=lambda step: step["epoch"])["lineage"], {}
    while name in parents:
        epoch, parent = parents[name]
        line.setdefault(epoch, name)
        name = parent
    return line


def counted_steps(lines: list[dict]) -> Iterator[tuple[int, str | None, int]]:
    """(epoch, lineage, samples) of each step that was counted; None: that process had not taken it.

    Steps behind an opening that is not confirmed were shown as waiting. They count when a later one names the opening
    as confirmed.
    """
    taken: dict[tuple[int, int], str] = {}
    waiting: dict[str, list[tuple[int, str | None, int]]] = {}
    for line in lines:
        if "lineage" in line:
            taken[line["pid"], line["epoch"]] = line["lineage"]
            continue
        openings, is_unconfirmed = line["openings"], line["unconfirmed"]
        for over in waiting.keys() - set(openings if is_unconfirmed else ()):
            steps = waiting.pop(over)
            if over in openings:
                yield from steps
        if line["samples"]:
            step = line["step"], taken.get((line["pid"], line["step"])), line["samples"]
            if is_unconfirmed:
                waiting.setdefault(openings[-1], []).append(step)
            else:
                yield step


def verdict(lines: list[dict], line: dict[int, str]) -> Verdict:
    counted, unknown, lost = 0, 0, {}
    for epoch, lineage, samples in counted_steps(lines):
        counted += samples
        if epoch not in line or lineage is None:
            unknown += samples
        elif lineage != line[epoch]:
            lost[epoch] = lost.get(epoch, 0) + samples
    return Verdict(counted, lost, unknown)
