"""Who is let in: each call that a stranger can make or answer, with each kind of token that is none; how soon a banned
one is out everywhere; and what all of that costs a round of averaging.

    python benchmarks/admission.py

The victim is a peer of a swarm that trains, with a real authority over HTTP. The attackers are processes of bare
hivemind. A cell counts as refused if no data came back, nothing was stored and the victim's DHT counted it under its
reason; the same call with a good token must succeed, or nothing was shown. A node's streams are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.admission_parts.cells import Cell
    from benchmarks.admission_parts.swarm import Run

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

PARTS = ("cells", "bans", "overhead")
PEERS, PAUSE = 5, 0.3  # s between microbatches: an epoch a second, and something of two cores is left
MOST_BAN_S, MOST_OVERHEAD = 60.0, 2.0


def main(parts: list[str], bans: int, pairs: int) -> int:
    from benchmarks.admission_parts.swarm import run

    console, figures = Console(width=140), {}
    if "cells" in parts or "bans" in parts:
        with scratch_folder() as scratch, run(scratch, PEERS, pause=PAUSE) as swarm:
            figures |= try_cells(console, swarm) if "cells" in parts else {}
            figures |= measure_bans(console, swarm, bans) if "bans" in parts else {}
    if "overhead" in parts:
        with scratch_folder() as scratch, run(scratch, 0) as nobody:
            figures |= measure_overhead(console, nobody, pairs, scratch)
    print(json.dumps(figures))
    is_good = figures.get("refused_all", True) and figures.get("ban_latency_s", 0.0) <= MOST_BAN_S
    return 0 if is_good and figures.get("overhead_pct", 0.0) <= MOST_OVERHEAD else 1


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-admission-") as scratch:
        yield Path(scratch)


def try_cells(console: Console, swarm: Run) -> dict[str, Any]:
    from benchmarks.admission_parts.cells import all_cells, attackers

    cells = all_cells(swarm, attackers(swarm))
    show_cells(console, cells)
    attacked = sum(cell.attack != "good" for cell in cells)
    return {"refused_all": all(cell.as_it_should for cell in cells), "cells": attacked}


def show_cells(console: Console, cells: list[Cell]) -> None:
    from benchmarks.admission_parts.cells import ATTACKS, IMPOSSIBLE

    table = Table("call", *ATTACKS, "good token", title="Refused? (yes; the last column: and the good token let in?)")
    for kind in dict.fromkeys(cell.kind for cell in cells):
        row = {cell.attack: cell for cell in cells if cell.kind == kind}
        words = ["yes" if row[attack].as_it_should else "[red]NO" for attack in ATTACKS]
        table.add_row(kind, *words, "let in" if row["good"].as_it_should else "[red]NO")
    console.print(table)
    for cell, reason in IMPOSSIBLE.items():
        console.print(f"impossible: {cell}: {reason}")
    for cell in cells:
        if not cell.as_it_should:
            console.print(f"{cell.kind}, {cell.attack}: {cell.why}", markup=False, style="red")


def measure_bans(console: Console, swarm: Run, times: int) -> dict[str, float]:
    from benchmarks.admission_parts.bans import measure

    bans = measure(swarm, times)
    table = Table("ban", "first peer refuses", "all refuse", title="From the moderator's 200 on")
    for number, ban in enumerate(bans, start=1):
        table.add_row(str(number), f"{ban.first:.1f} s", f"{ban.last:.1f} s")
    console.print(table)
    return {"ban_latency_s": round(max(ban.last for ban in bans), 1)}


def measure_overhead(console: Console, run: Run, pairs: int, scratch: Path) -> dict[str, float]:
    from benchmarks.admission_parts import overhead

    compared, left_out = overhead.measure(run, pairs, scratch)
    title = f"A round of {overhead.MEMBERS} peers, medians of {pairs - left_out} pairs ({left_out} missing)"
    table = Table("", "open", "admitted", "more", "90 % of resamples", title=title)
    for one in compared:
        span = f"{one.low:+.1f} to {one.high:+.1f} %"
        table.add_row(one.what, f"{one.open:.3f} s", f"{one.admitted:.3f} s", f"{one.percent:+.2f} %", span)
    console.print(table)
    names = ("overhead_pct", "overhead_cpu_pct")
    return {name: round(one.percent, 2) for name, one in zip(names, compared, strict=True)}


if __name__ == "__main__":
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts of it")
    parser.add_argument("--bans", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=150, help="of rounds, with admission and without")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
    options = parser.parse_args()
    sys.exit(main(options.only, options.bans, options.pairs))
