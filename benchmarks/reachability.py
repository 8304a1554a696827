"""Do volunteers' machines find out whether others can call them, and do they meet? In network namespaces, for the lines
that volunteers have: dual-stack homes, homes behind NAT, names of a local network, IPv6 only, a carrier-grade NAT.

    python benchmarks/reachability.py            some five minutes; a real swarm trains in each cell
    python benchmarks/reachability.py --dial     two minutes: without training

Each machine decides as a joining peer does, by its addresses and by peers that call it back (swarm/reachability.py).
Then each calls all those that took themselves for callable: `meets` if it reaches them. It takes root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.netlab import NoNetlab
from benchmarks.reachability_parts.cells import CELLS
from benchmarks.reachability_parts.dialling import look
from volunteer_kit.swarm.failures import CAUSES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dial", action="store_true", help="without training")
    parser.add_argument("--only", choices=[cell.name for cell in CELLS], nargs="*")
    options = parser.parse_args()
    result: dict[str, float | bool] = {"cells": 0, "meets": 0, "right": 0, "slowest_s": 0.0}
    if not options.dial:
        result |= {"with_rounds": 0, "rounds_whole": 0, "rounds_failed": 0}
    print(f"{'cell':<18} {'right':<6} {'meets':<6} {'s':>5} {'rounds':>7} {'failed':>7}  found out")
    for cell in CELLS:
        if options.only and cell.name not in options.only:
            continue
        found = look(cell)
        is_right = found.client_modes == tuple(house.client_mode for house in cell.houses)
        result["cells"] += 1
        result["right"] += is_right
        result["meets"] += found.meets
        result["slowest_s"] = max(result["slowest_s"], round(found.seconds, 1))
        result[f"{cell.name}_meets"] = found.meets
        rounds = ["", ""]
        if not options.dial:
            rounds = _train(cell, result)
        whys = "; ".join("calls only" if mode else "callable" for mode in found.client_modes)
        row = f"{cell.name:<18} {_yes(is_right):<6} {_yes(found.meets):<6} {found.seconds:>5.1f} "
        print(row + f"{rounds[0]:>7} {rounds[1]:>7}  {whys}", flush=True)
        print(f"{'':<18} {cell.words}: {found.whys[1]}", flush=True)
    print(json.dumps(result))
    return 0 if result["meets"] == result["right"] == result["cells"] else 1


def _train(cell, result: dict) -> list[int]:
    from benchmarks.reachability_parts.rounds import WHOLE, train

    with tempfile.TemporaryDirectory() as folder:
        trained = train(cell, Path(folder))
    result["with_rounds"] += trained.whole >= WHOLE
    result["rounds_whole"] += trained.whole
    failed = sum(trained.causes.values())
    result["rounds_failed"] += failed
    for cause, number in trained.causes.items():
        print(f"{'':<18} {number} rounds {CAUSES[cause]}", flush=True)
    if trained.why_not:
        print(f"{'':<18} {trained.why_not}", flush=True)
    return [trained.whole, failed]


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NoNetlab as e:
        sys.exit(str(e))
