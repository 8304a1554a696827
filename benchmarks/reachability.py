"""Do volunteers' machines find out whether others can call them, and do they meet? In network namespaces, for the lines
that volunteers have: dual-stack homes, homes behind NAT, names of a local network, IPv6 only, a carrier-grade NAT.

    python benchmarks/reachability.py            some five minutes; a real swarm trains in each cell
    python benchmarks/reachability.py --dial     two minutes: without training
    python benchmarks/reachability.py --store    its result goes under benchmarks/results/, with the commit

Each machine decides as a joining peer does, by its addresses and by peers that call it back (net/reachability.py).
Then each calls all those that took themselves for callable: `meets` if it reaches them. `rounds` are those of all
members; `failed` ones lacked something, once all had met. It takes root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.netlab import NoNetlab
from benchmarks.reachability_parts.cells import CELLS, Cell
from benchmarks.reachability_parts.dialling import look
from volunteer_kit.swarm.records.failures import CAUSES

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks/results/reachability.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dial", action="store_true", help="without training")
    parser.add_argument("--only", choices=[cell.name for cell in CELLS], nargs="*")
    parser.add_argument("--store", action="store_true", help=f"in {STORED.relative_to(ROOT)}")
    options = parser.parse_args()
    figures: dict[str, float | bool] = {"cells": 0, "meets": 0, "right": 0, "slowest_s": 0.0}
    if not options.dial:
        figures |= {"with_rounds": 0, "rounds_whole": 0, "rounds_failed": 0, "failed_while_joining": 0}
    print(f"{'cell':<18} {'right':<6} {'meets':<6} {'s':>5} {'rounds':>7} {'failed':>7}  found out")
    rows = [_try(cell, figures, options.dial) for cell in CELLS if not options.only or cell.name in options.only]
    print(json.dumps(figures))
    if options.store:
        STORED.write_text(json.dumps({"figures": figures, "commit": _commit(), "cells": rows}, indent=1) + "\n")
    return 0 if figures["meets"] == figures["right"] == figures.get("with_rounds", len(rows)) == len(rows) else 1


def _try(cell: Cell, figures: dict[str, float | bool], dial: bool) -> dict[str, Any]:
    found = look(cell)
    is_right = found.client_modes == tuple(house.client_mode for house in cell.houses)
    figures["cells"] += 1
    figures["right"] += is_right
    figures["meets"] += found.meets
    figures["slowest_s"] = max(figures["slowest_s"], round(found.seconds, 1))
    figures[f"{cell.name}_meets"] = found.meets
    row: dict[str, Any] = {"cell": cell.name, "right": is_right, "meets": found.meets, "s": round(found.seconds, 1)}
    if not dial:
        row |= _train(cell, figures)
    whys = "; ".join("calls only" if mode else "callable" for mode in found.client_modes)
    rounds, failed = row.get("rounds", ""), sum(row.get("failed", {}).values()) if not dial else ""
    start = f"{cell.name:<18} {_yes(is_right):<6} {_yes(found.meets):<6} {found.seconds:>5.1f} "
    print(start + f"{rounds:>7} {failed:>7}  {whys}", flush=True)
    print(f"{'':<18} {cell.words}: {found.whys[1]}", flush=True)
    for when, causes in (("", row.get("failed", {})), (" while somebody joined", row.get("failed_while_joining", {}))):
        for cause, number in causes.items():
            print(f"{'':<18} {number} rounds{when} {CAUSES[cause]}", flush=True)
    if row.get("why_not"):
        print(f"{'':<18} {row['why_not']}", flush=True)
    return row


def _train(cell: Cell, figures: dict[str, float | bool]) -> dict[str, Any]:
    from benchmarks.reachability_parts.rounds import WHOLE, train

    with tempfile.TemporaryDirectory() as folder:
        trained = train(cell, Path(folder))
    figures["with_rounds"] += trained.whole >= WHOLE
    figures["rounds_whole"] += trained.whole
    figures["rounds_failed"] += sum(trained.failed.values())
    figures["failed_while_joining"] += sum(trained.joining.values())
    return {
        "rounds": trained.whole, "failed": trained.failed, "failed_while_joining": trained.joining,
        "why_not": trained.why_not, "seconds": round(trained.seconds),
    }  # fmt: skip


def _commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoNetlab as e:
        sys.exit(str(e))
