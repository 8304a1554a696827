"""Attack live runs as strangers, members, run files and faults of the machine would, and count the harm.

    python benchmarks/hostile.py                     all attacks; ten minutes on two cores where nothing breaks
    python benchmarks/hostile.py --quick             one of each kind, two to three minutes
    python benchmarks/hostile.py --only dht-nested   those whose names begin so; --list shows them
    python benchmarks/hostile.py --full              all of them, stored under benchmarks/results/

Two runs are attacked, one after the other: one with an authority (a real `volunteer-kit host`: first peer, authority,
monitor and dashboard, at a stand-in for the Hub) and one without, each with three volunteers who train. Attackers are
bare hivemind, a fresh identity for each attack, and know what the kit's sources say. A prober asks every process of
every honest peer four times a second whether it is there, and both servers from another address. After each attack all
volunteers must make another step. Whatever was stopped is counted, and the run begins anew, for the attacks to come.
Run files and models with code are tried by the real command line, in processes of their own.

peers_stopped: honest peers of which a process ended, or that trained no more, by a message. worst_pause_s: the longest
time in which a living process gave no answer, less what the same was in the quiet time before the attacks
(quiet_pause_s). memory_growth_mb: of the worst peer, from the quiet time until an attack was over (memory_peak_mb:
while it lasted). worst_recovery_s: from a kill until all processes are there again, answer, and the peer's samples
count. authority_503_s: the longest time in which an honest browser got nothing from the authority or the dashboard.

Exit code 0: the bounds are kept. Everything is on loopback and in one temporary folder. An honest process may have
2,048 files open, as on some systems; training is niced, for in life each device has cores of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.hostile_parts.attack import Outcome
from benchmarks.hostile_parts.report import BOUNDS, as_row, figures, harm, line
from benchmarks.hostile_parts.table import ATTACKS, rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ("link", "hosted", "open")
LEAST_ATTACKS = 25
LINKS_AT_ONCE = 2


def main(options: argparse.Namespace) -> int:
    console = Console(width=190)
    if options.list:
        return show_list(console)
    from tests.hub import Hub

    outcomes: list[Outcome] = []
    quiet: dict[str, float] = {}
    untried: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-hostile-") as name, Hub() as hub:
        folder = Path(name)
        environment = hub.environment(folder / "hf") | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        os.environ.clear()
        os.environ.update(environment, VOLUNTEER_KIT_HOME=str(folder / "kit"))
        for run in RUNS:
            wanted = list(rows(run, options.only, options.quick))
            if not wanted:
                continue
            if run == "link":
                outcomes += try_links(console, wanted, folder, environment)
            else:
                from benchmarks.hostile_parts.siege import Siege

                siege = Siege(run, folder, hub, console, keep=options.keep)
                outcomes += siege.perform(wanted)
                untried += [f"{attack.name} ({case.run}, {case.who})" for attack, case in siege.untried]
                quiet = {key: max(value, quiet.get(key, 0.0)) for key, value in siege.quiet.items()}
    show(console, outcomes)
    told = figures(outcomes, quiet) | {"untried": len(untried), "seconds": round(time.monotonic() - began)}
    missed = [key for key, bound in BOUNDS.items() if told[key] > bound]
    is_all = not options.only and not options.quick
    if is_all and told["attacks"] < LEAST_ATTACKS:
        missed.append("attacks")
    for name in untried:
        console.print(f"[red]{name} was not tried")
    for key in missed:
        console.print(f"[red]{key} is {told[key]}; the bound is {BOUNDS.get(key, LEAST_ATTACKS)}")
    if options.full:
        RESULTS.mkdir(exist_ok=True)
        stored = {"figures": told, "attacks": [as_row(outcome) for outcome in outcomes]}
        RESULTS.joinpath("hostile.json").write_text(json.dumps(stored, indent=1) + "\n")
    print(json.dumps(told))
    return 1 if missed else 0


def show_list(console: Console) -> int:
    table = Table("attack", "surface", "point", "by whom")
    for attack in ATTACKS:
        who = ", ".join(f"{case.who} ({case.run})" for case in attack.cases)
        table.add_row(attack.name, attack.surface, str(attack.point), who)
    console.print(table)
    return 0


def try_links(console: Console, wanted: list, folder: Path, environment: dict[str, str]) -> list[Outcome]:
    from benchmarks.hostile_parts.links import try_link

    stop = threading.Event()

    def attempt(row: tuple) -> Outcome:
        outcome = try_link(*row, folder / row[0].name, environment, stop)
        console.print(line(outcome), markup=False, highlight=False)
        return outcome

    with ThreadPoolExecutor(LINKS_AT_ONCE) as pool:
        try:
            return list(pool.map(attempt, wanted))
        finally:  # at Ctrl-C
            stop.set()


def show(console: Console, outcomes: list[Outcome]) -> None:
    names = ("attack", "surface", "by whom", "answer", "pause s", "memory MB (peak)", "harm", "recovery s")
    table = Table(*names, title="What was tried, and what it did")
    for outcome in outcomes:
        memory = f"{outcome.memory:.0f} ({outcome.peak:.0f})"
        pause = f"{outcome.pause:.1f}" + (f" {outcome.paused}" if outcome.pause > BOUNDS["worst_pause_s"] else "")
        table.add_row(
            outcome.attack.name, outcome.attack.surface, f"{outcome.case.who}, {outcome.case.run}",
            escape(outcome.answer[:60]), pause, memory, escape(harm(outcome)) or "none",
            "" if outcome.recovery is None else f"{outcome.recovery:.1f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the table of attacks; nothing is tried")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of attacks, or how they begin")
    parser.add_argument("--quick", action="store_true", help="one or two of each kind")
    parser.add_argument("--full", action="store_true", help="stored under benchmarks/results/")
    parser.add_argument("--keep", type=Path, help="folder for the logs of runs that were stopped")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
    sys.exit(main(parser.parse_args()))
