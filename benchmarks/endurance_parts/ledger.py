"""Which counted samples are in the model that the swarm ended with.

Each worker writes down every model that it holds (as a sketch), whether it came by a step or was taken from another,
and every step whose samples it counted. From the last model the line of steps is followed back; a counted step is lost
if it is not on that line. The kit's own rule of when a step counts has no part in this.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volunteer_kit.session.tally import Tally
from volunteer_kit.swarm.agreement import BEGINNING, Told, distance, read_told
from volunteer_kit.swarm.state import SwarmStateAverager

EXACT = 1e-6  # relative distance of sketches; one machine, where nothing rounds differently
WHERE = "VOLUNTEER_KIT_ENDURANCE_LEDGER"  # file


# --- in the worker ---


def keep() -> None:
    """Write down, from now on."""
    ledger = open(os.environ[WHERE], "a", buffering=1)  # noqa: SIM115  as long as the worker lives
    describe, follow, count, end = (
        SwarmStateAverager.describe, SwarmStateAverager._follow_parameters, Tally.count, Tally.end,
    )  # fmt: skip

    def write(**what) -> None:
        ledger.write(json.dumps({"pid": os.getpid(), **what}) + "\n")

    def describe_and_write(averager) -> None:
        describe(averager)
        epoch, values, _ = averager.told
        write(epoch=epoch, held=values.hex())

    def follow_and_write(averager, metadata) -> None:
        write(took=metadata["epoch"])
        follow(averager, metadata)

    def count_and_write(tally, report) -> int:
        write(step=report.epoch, samples=report.counted, sure=not report.uncertain, kept_until=report.kept_until)
        return count(tally, report)

    def end_and_write(tally, kept_until) -> None:
        write(kept_until=kept_until)
        end(tally, kept_until)

    SwarmStateAverager.describe, SwarmStateAverager._follow_parameters = describe_and_write, follow_and_write
    Tally.count, Tally.end = count_and_write, end_and_write


# --- afterwards ---


@dataclass(frozen=True)
class Model:
    """One that a process held, and the one that it was made of, by a step; None: it was begun with, or taken."""

    told: Told
    before: Told | None


@dataclass(frozen=True)
class Verdict:
    """Samples of one volunteer. `unknown`: of steps whose model is not known, or older than the line of models can be
    followed."""

    counted: int
    lost: dict[int, int]  # epoch -> samples
    unknown: int


def judge(ledgers: Iterable[Path]) -> list[Verdict]:
    """One verdict a ledger, in their order."""
    lines = [[json.loads(line) for line in ledger.read_text().splitlines()] for ledger in ledgers]
    held = [dict(models(one)) for one in lines]
    line = follow_back([model for one in held for those in one.values() for model in those])
    return [verdict(counted_steps(one), those, line) for one, those in zip(lines, held, strict=True)]


def models(lines: list[dict]) -> Iterator[tuple[int, list[Model]]]:
    """(process, what it held), in its order."""
    found, last = defaultdict(list), {}
    for line in lines:
        pid = line["pid"]
        if "took" in line:
            last.pop(pid, None)
        elif "held" in line:
            told, before = read_told([line["epoch"], bytes.fromhex(line["held"]), BEGINNING]), last.get(pid)
            found[pid].append(Model(told, before if before and before.epoch == told.epoch - 1 else None))
            last[pid] = told
    yield from found.items()


def follow_back(held: list[Model]) -> dict[int, np.ndarray]:
    """The line of models that ended in the last one: epoch -> sketch, as far as it can be followed."""
    by_epoch = defaultdict(list)
    for model in held:
        by_epoch[model.told.epoch].append(model)
    epoch = max(by_epoch, default=0)
    line = {epoch: by_epoch[epoch][-1].told.sketch} if by_epoch else {}
    while epoch in line and epoch > 0:
        made = [m.before for m in by_epoch[epoch] if m.before and is_same(m.told.sketch, line[epoch])]
        epoch -= 1
        if made:
            line[epoch] = made[0].sketch
    return line


def counted_steps(lines: list[dict]) -> Iterator[tuple[int, int, int]]:
    """(process, epoch, samples) of each step that was counted, by what the worker was told of its steps."""
    waiting = defaultdict(list)
    for line in lines:
        if "kept_until" not in line:
            continue
        pid, kept_until = line["pid"], line["kept_until"]
        if kept_until is not None:
            yield from ((pid, epoch, samples) for epoch, samples in waiting.pop(pid, []) if epoch <= kept_until)
        if line.get("samples"):
            if line["sure"]:
                yield pid, line["step"], line["samples"]
            else:
                waiting[pid].append((line["step"], line["samples"]))


def verdict(
    steps: Iterable[tuple[int, int, int]], held: dict[int, list[Model]], line: dict[int, np.ndarray]
) -> Verdict:
    counted, unknown, lost = 0, 0, {}
    for pid, epoch, samples in steps:
        counted += samples
        made = [m.told.sketch for m in held.get(pid, []) if m.before and m.told.epoch == epoch]
        if epoch not in line or not made:
            unknown += samples
        elif not any(is_same(sketch, line[epoch]) for sketch in made):
            lost[epoch] = lost.get(epoch, 0) + samples
    return Verdict(counted, lost, unknown)


def is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return distance(one, other) <= EXACT
