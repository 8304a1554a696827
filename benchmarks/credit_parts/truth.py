"""Judge what each machine truly gave, by its own node's ledger; marks in the averages tell whether it was there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

WHOLE = 0.999  # share of the rows of an average that bear a mark


@dataclass
class Truth:
    """Samples by slot. `steps`: that any machine took; `partial`: times that a mark was in some of an average's rows
    only; `unmarked`: machines that were in steps by their own word, and left no mark."""

    samples: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    partial: int = 0
    unmarked: int = 0


def judge(books: Mapping[int, Path]) -> Truth:
    """:param books: slot -> what that machine wrote, over all its lives"""
    truth, epochs, marked = Truth(), set(), set()
    for slot, book in books.items():
        lines = [json.loads(line) for line in book.read_text().splitlines()]
        committed: dict[str, float] = {}  # by key: each has a ledger of its own
        for line in lines:
            if "committed" in line:
                committed[line["key"]] = line["committed"]
            elif "lineage" in line:
                epochs.add(line["epoch"])
            elif "entered" in line:
                marked |= {int(other) for other in line["entered"]}
                truth.partial += sum(share < WHOLE for share in line["entered"].values())
        truth.samples[slot] = round(sum(committed.values()))
    truth.steps = len(epochs)
    truth.unmarked = sum(samples > 0 and slot not in marked for slot, samples in truth.samples.items())
    return truth
