"""`python -m tests.simulation`: run seeds, find violations, show and shrink them, and find planted faults."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.simulation.history import History, shrink
from tests.simulation.invariants import Violation
from tests.simulation.modes import MODES, make_schedule, mode_of
from tests.simulation.schedule import Schedule
from tests.simulation.simulation import Simulation

FAILED_SEEDS = Path(__file__).with_name("failed_seeds.txt")
AT_A_TIME = 50  # seeds of one job
PLANTED_CAP = 3000  # seeds within which each planted fault is to be found


def failed_seeds() -> list[tuple[str, int]]:
    """Every seed that ever failed, in its mode."""
    lines = [line.split() for line in FAILED_SEEDS.read_text().splitlines() if line and not line.startswith("#")]
    return [(mode, int(seed)) for mode, seed, *_ in lines]


def run_seed(mode: str, seed: int) -> tuple[int, str | None]:
    """
    :returns: commits, and what was violated
    """
    simulation = Simulation(make_schedule(mode, seed))
    try:
        return simulation.run().commits, None
    except Violation as violation:
        return simulation.invariants.commits, str(violation)


def run_seeds(seeds: list[tuple[str, int]]) -> list[tuple[str, int, int, str | None]]:
    """Some of them, one after another."""
    return [(mode, seed, *run_seed(mode, seed)) for mode, seed in seeds]


def find_planted(name: str) -> tuple[str, int | None, str]:
    """Run seeds with a planted fault until it is found.

    :returns: its name, how many seeds it took (None: not found), and the violation
    """
    from tests.simulation.planted import PLANTED, patched

    mode = PLANTED[name].mode
    with patched(name):
        for seed in range(PLANTED_CAP):
            violation = run_seed(mode, seed)[1]
            if violation is not None:
                return name, seed + 1, violation
    return name, None, ""


def run_many(seeds: list[tuple[str, int]], processes: int) -> tuple[int, Counter[str], list[str]]:
    """
    :returns: commits, seeds by mode, and the violations in words
    """
    jobs = [seeds[place : place + AT_A_TIME] for place in range(0, len(seeds), AT_A_TIME)]
    commits, modes, violations = 0, Counter[str](), []
    with ProcessPoolExecutor(processes) as pool:
        for results in pool.map(run_seeds, jobs) if processes > 1 else map(run_seeds, jobs):
            for mode, seed, found, violation in results:
                commits += found
                modes[mode] += 1
                if violation is not None:
                    violations.append(f"{mode} {seed}: {violation}")
                    print(violations[-1], flush=True)
    return commits, modes, violations


def show(mode: str, seed: int, everything: bool, whole: bool) -> None:
    """Print the history of a seed; of the shrunk schedule if it fails."""

    def run(schedule: Schedule) -> None:
        Simulation(schedule).run()

    schedule = make_schedule(mode, seed)
    if not whole:
        schedule = shrink(schedule, run)
    history = History(everything)
    result = "no violation"
    try:
        result = str(Simulation(schedule, history=history).run())
    except Violation as violation:
        result = str(violation)
    for peer in schedule.peers:
        member = peer.member
        print(
            f"{member.peer}: {'public' if member.public else 'client'}{', founder' if peer.founder else ''}, "
            f"{peer.speed:.1f} samples/s in {peer.microbatch}, clock {peer.ahead:+.1f} s x{peer.rate:.3f}"
            f"{', liar: ' + peer.liar if peer.liar else ''}"
        )
    print(schedule.settings, f"{schedule.size / 1e6:g} MB, quiet from {schedule.quiet_from:.1f} s")
    print("\n".join(fault.describe() + f" at {fault.at:.2f}" for fault in schedule.faults))
    print("\n".join(history.lines))
    print(result)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many, beside those that ever failed")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--mode", choices=sorted(MODES), help="default: a mix")
    parser.add_argument("--show", type=int, metavar="SEED", help="the history of this seed, shrunk if it fails")
    parser.add_argument("--whole", action="store_true", help="with --show: do not shrink")
    parser.add_argument("--everything", action="store_true", help="with --show: heartbeats and timers too")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--plant", metavar="NAME", help="with --show: this fault in the core; see planted.py")
    parser.add_argument("--planted", action="store_true", help="the planted faults only")
    parser.add_argument("--clean", action="store_true", help="no planted faults")
    options = parser.parse_args(arguments)
    if options.show is not None:
        from tests.simulation.planted import PLANTED, patched

        mode = options.mode or (PLANTED[options.plant].mode if options.plant else mode_of(options.show))
        with patched(options.plant) if options.plant else nullcontext():
            show(mode, options.show, options.everything, options.whole)
        return 0
    began = time.monotonic()
    summary: dict[str, Any] = {"violations": 0, "seeds": 0, "commits": 0}
    if not options.planted:
        seeds = [each for each in failed_seeds() if options.mode in (None, each[0])]
        chosen = range(options.first, options.first + options.seeds)
        seeds += [(options.mode or mode_of(seed), seed) for seed in chosen]
        commits, modes, violations = run_many(seeds, options.processes)
        for mode, count in sorted(modes.items()):
            print(f"{mode:8} {count:6} seeds")
        summary |= {"violations": len(violations), "seeds": len(seeds), "commits": commits}
    if not options.clean:
        summary |= plant(options.processes)
    summary["minutes"] = round((time.monotonic() - began) / 60, 1)
    print(json.dumps(summary))
    missed = summary.get("planted", 0) != summary.get("planted_found", 0)
    return 1 if summary["violations"] or missed else 0


def plant(processes: int) -> dict[str, int]:
    """Find each planted fault; a table for people."""
    from tests.simulation.planted import PLANTED

    needed: list[int] = []
    with ProcessPoolExecutor(processes) as pool:
        for name, seeds, violation in pool.map(find_planted, PLANTED):
            print(f"{name:48} {seeds if seeds is not None else 'not found':>9}  {violation[:120]}", flush=True)
            needed += [seeds] if seeds is not None else []
    return {"planted": len(PLANTED), "planted_found": len(needed), "worst_seeds_to_find": max(needed, default=0)}


if __name__ == "__main__":
    sys.exit(main())
