"""What each machine truly gave, by the marks in the averages that the swarm's model was made of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from endurance_parts.ledger import follow_back, is_same, models

from volunteer_kit.swarm.agreement import BEGINNING, read_told

WHOLE = 0.999  # share of the rows of an average that bear a mark
FEW = 3  # accounts: with fewer nobody has two others
MOST = 0.5  # of the rows that arrived: a machine killed while it sends is in some reducers' slices only


@dataclass
class Truth:
    """Samples by slot, of steps most of whose average bears its mark. `steps`: on the swarm's line, of three accounts
    at least; `few`: those of fewer, whose samples can only be provisional; `partial`: times that a mark was in some of
    an average's rows only; `unknown`: epochs of which no machine that made the step has told."""

    samples: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    few: int = 0
    partial: int = 0
    unknown: int = 0


def judge(books: Mapping[int, Path], accounts: Sequence[str]) -> Truth:
    """:param books: slot -> what that machine wrote, over all its lives
    :param accounts: of the slots"""
    lines = {slot: [json.loads(line) for line in book.read_text().splitlines()] for slot, book in books.items()}
    held = [model for one in lines.values() for _, those in models(one) for model in those]
    line = follow_back(held)
    entered = entered_by_epoch(lines, line)
    truth = Truth()
    for epoch in sorted(line):
        marks = entered.get(epoch)
        if epoch == 0 or marks is None:
            truth.unknown += epoch > 0
            continue
        if len({accounts[slot] for slot in marks}) < FEW:
            truth.few += 1
            continue
        truth.steps += 1
        for slot, share in marks.items():
            truth.partial += share < WHOLE
            if share > MOST * max(marks.values()):
                truth.samples[slot] += last_given(lines[slot], epoch)
    return truth


def entered_by_epoch(lines: Mapping[int, list[dict]], line: Mapping[int, object]) -> dict[int, dict[int, float]]:
    """Epoch on the line -> slots whose mark the step bears, by a machine that made that step."""
    found = {}
    for one in lines.values():
        told: dict[int, dict] = {}
        for entry in one:
            if "entered" in entry:
                told[entry["pid"]] = entry["entered"]
            elif "took" in entry:
                told.pop(entry["pid"], None)
            elif "held" in entry and entry["pid"] in told:
                marks = told.pop(entry["pid"])
                if is_on(line, entry):
                    of_somebody = {int(slot): share for slot, share in marks.items() if int(slot) in lines}
                    found.setdefault(entry["epoch"], of_somebody)  # noise bears nobody's marks as well
    return found


def is_on(line: Mapping[int, object], entry: dict) -> bool:
    told = read_told([entry["epoch"], bytes.fromhex(entry["held"]), BEGINNING])
    return entry["epoch"] in line and is_same(told.sketch, line[entry["epoch"]])


def last_given(lines: list[dict], epoch: int) -> int:
    """Samples that a machine brought into the round of `epoch`: what it wrote last, if it came to it more than once."""
    return next((entry["samples"] for entry in reversed(lines) if entry.get("gave") == epoch), 0)
