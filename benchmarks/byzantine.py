"""Sixteen peers, seven of which attack: what each defence makes of each attack.

    python benchmarks/byzantine.py
    python benchmarks/byzantine.py --only digits --attacks "label flip" "NaN"

The network is simulated; rules, first line, 8-bit codec and the state machine of verified averaging are the kit's own,
peers are 32-bit and 16-bit by turns, of different speed. `mean` is stock hivemind's: a weighted mean that believes
everybody. `median`, `Krum` and `CenteredClip` stand behind the kit's first line (byzantine_parts/first_line.py: refused
are parts that are not finite, weights and progress beyond what a device is believed to do; parts far longer than the
others' are scaled down; a step needs the votes of more than half), and ban nobody. `ours` is CenteredClip behind it,
verified, with bans. Gaps are to the run without attack, with the mean and the same seeds. A dash: not computed.

Stand-ins: the network and its clock; votes, which are counted by who was told the same; that admission shuts out at
once whom most others have convicted; that nobody takes it amiss if the group is small. Digests of parts are not looked
at: nobody here sends other bytes than it has promised.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from benchmarks.byzantine_parts.swarm import Result

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

PARTS = ("digits", "demo", "hiding", "cost")
COLUMNS = ("mean", "median", "Krum", "CenteredClip", "ours")
DEMO_COLUMNS = ("mean", "CenteredClip", "ours")
DEMO_ATTACKS = ("sign flip of honest norm", "inner product 0.6", "a little is enough")
WORST = ("honest_mismatch_max", "honest_residual_max")  # of all parts
WORST_GAP, MOST_OVERHEAD, MOST_BYTES, HONEST_EPOCHS = 0.02, 10.0, 3.0, 1000


def main(parts: Sequence[str], attacks: Sequence[str], seed: int, workers: int) -> int:
    from benchmarks.byzantine_parts.attacks import ATTACKS

    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started from here
    console, figures, begun = Console(width=150), {}, time.monotonic()
    chosen = [attack.name for attack in ATTACKS if not attacks or attack.name in attacks]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        if "digits" in parts:
            figures |= play(console, pool, "digits", chosen, COLUMNS, seed)
        if "demo" in parts:
            found = play(console, pool, "demo", DEMO_ATTACKS, DEMO_COLUMNS, seed)
            figures |= {key: max(found.pop(key), figures.get(key, 0.0)) for key in WORST}
            figures |= {f"demo_{key}": value for key, value in found.items()}
    if "hiding" in parts:
        from benchmarks.byzantine_parts.hiding import measure as measure_hiding

        found = measure_hiding(console)
        figures |= found | {key: max(value, figures.get(key, 0.0)) for key, value in found.items() if key in WORST}
    if "cost" in parts:
        from benchmarks.byzantine_parts.cost import measure

        figures |= measure(console)
    console.print(f"{(time.monotonic() - begun) / 60:.1f} min")
    print(json.dumps(figures))
    return 0 if is_good(figures) else 1


def is_good(figures: dict[str, Any]) -> bool:
    return (
        figures.get("worst_final_gap", 0.0) <= WORST_GAP
        and figures.get("false_bans", 0) == figures.get("demo_false_bans", 0) == 0
        and figures.get("honest_peer_epochs", HONEST_EPOCHS) >= HONEST_EPOCHS
        and figures.get("overhead_pct", 0.0) <= MOST_OVERHEAD
        and figures.get("extra_bytes_pct", 0.0) <= MOST_BYTES
    )


def run(task: str, attack: str, column: str, seed: int) -> Result:
    """One cell, in a process of its own."""
    import torch

    from benchmarks.byzantine_parts import tasks
    from benchmarks.byzantine_parts.attack import Attack
    from benchmarks.byzantine_parts.attacks import ATTACKS
    from benchmarks.byzantine_parts.defences import rules
    from benchmarks.byzantine_parts.swarm import Plan, Swarm
    from benchmarks.byzantine_parts.verified import Verified

    torch.set_num_threads(1)
    defence = next(one for one in [*rules(), Verified()] if one.name == column)
    conduct = next((one for one in ATTACKS if one.name == attack), Attack())
    subject = tasks.make(task)
    return Swarm(subject, defence, Plan(replace(conduct), subject.epochs, subject.attack_from, seed)).run()


def play(
    console: Console, pool: ProcessPoolExecutor, task: str, attacks: Sequence[str], columns: Sequence[str], seed: int
) -> dict[str, Any]:
    """All cells of a table, printed row by row."""
    from benchmarks.byzantine_parts import tasks

    rows = ["none", *attacks]
    shown = {row: of_row(row, columns) for row in rows}
    futures = {(row, c): pool.submit(run, task, row, c, seed) for row in rows for c in shown[row]}
    results: dict[tuple[str, str], Result] = {}
    is_done = tasks.is_done(task)
    more = () if is_done else ("ours is behind by",)
    table = Table("attack", *columns, "banned by ours", "honest ones struck, suspended", *more, title=tasks.title(task))
    for row in rows:
        results |= {(row, column): futures[row, column].result() for column in shown[row]}
        base, last = results["none", "mean"], results[row, shown[row][-1]]
        cells = (cell(results[row, c].score, base.score, tasks.lost(task)) if c in shown[row] else "-" for c in columns)
        is_ours = shown[row][-1] == columns[-1]
        about = (banned(last), f"{last.honest_strikes}, {last.honest_suspensions}") if is_ours else ("-", "-")
        table.add_row(row, *cells, *about, *(() if is_done else (f"{behind(base, last.score)} epochs",)))
        said = ", ".join(f"{c} {results[row, c].score:.3f}" for c in shown[row])
        console.print(f"{task}: {row}: {said}; banned: {about[0]}, honest ones: {about[1]}", style="dim")
    console.print(table)
    return summary({row: results[row, shown[row][-1]] for row in rows}, results["none", "mean"], is_done)


def of_row(row: str, columns: Sequence[str]) -> list[str]:
    """The columns that this row is computed for."""
    from benchmarks.byzantine_parts.attacks import ATTACKS

    only = next((attack.columns for attack in ATTACKS if attack.name == row), ())
    return [column for column in columns if not only or column in only]


def summary(last: dict[str, Result], base: Result, is_done: bool) -> dict[str, Any]:
    """:param last: of each row, the result of its last column"""
    ours = {row: result for row, result in last.items() if result.honest_epochs}
    bans = [result.ban_all for result in ours.values() if result.ban_all is not None]
    honest_epochs = sum(result.honest_epochs for result in ours.values())
    suspensions = sum(result.honest_suspensions for result in ours.values())
    return {
        **({} if is_done else {"worst_epochs_behind": max(behind(base, result.score) for result in last.values())}),
        "attacks": len(last) - 1,
        "worst_final_gap": round(max(base.score - result.score for result in last.values()), 4),
        "epochs_to_ban_all": max(bans, default=0),
        "attacks_banned_for": len(bans),
        "not_banned": [row for row, result in ours.items() if row != "none" and result.ban_all is None],
        "false_bans": sum(result.false_bans for result in ours.values()),
        "honest_strikes": sum(result.honest_strikes for result in ours.values()),
        "honest_suspensions": round(1000 * suspensions / max(1, honest_epochs), 2),
        "honest_peer_epochs": honest_epochs,
        "honest_mismatch_max": round(max(result.mismatch_max for result in last.values()), 4),
        "honest_residual_max": round(max(result.residual_max for result in last.values()), 4),
    }


def behind(honest: Result, score: float) -> int:
    """How many epochs before its end the run without attack was where this one has ended."""
    there = next((epoch for epoch, reached in enumerate(honest.curve) if reached >= score), len(honest.curve) - 1)
    return len(honest.curve) - 1 - there


def cell(score: float, base: float, lost: float) -> str:
    """Red if the defence has lost."""
    return f"{score:.3f}" if score >= base - lost else f"[red]{score:.3f}"


def banned(result: Result) -> str:
    if result.ban_all is not None:
        return f"all in {result.ban_all} epochs"
    return f"{result.banned}" if result.banned else "nobody"


if __name__ == "__main__":
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--attacks", nargs="+", default=(), help="names from the table; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    sys.exit(main(args.only, args.attacks, args.seed, args.workers))
