"""Late gradients: is the protocol's rule for them, a weight of 1/(1+k), the best use? Held-out loss of emulated swarms.

    python benchmarks/staleness.py            all of it, within 30 minutes on two cores
    python benchmarks/staleness.py --quick    a look at the tables; the trainings are too short to judge
    python benchmarks/staleness.py --emoji FOLDER    where the emoji shards are; without them, scenes alone
    python benchmarks/staleness.py --store    its result goes under benchmarks/results/, with the commit

Eight workers, 16x apart in speed, train one model in one process; the model, LAMB, the learning rate and its schedule,
and the sparse codec with its error feedback are the kit's own, as the demo's and the emoji run's files say. 30 % of the
contributions are late by `k` = 2 to 4 epochs: computed on the parameters of epoch `e`, they enter the step of `e + k`.
All trainings of one cell (data, codec, rate, seed) have equal initial weights, samples, and late contributions, and
compute equally many samples, those that are thrown away too.

The target batch is smaller than the run files' 256 samples: these data sets are learned within some thousand samples,
which would be 25 epochs, and ages of 2 to 4 would be most of a warm-up. A training ends where the swarm without
lateness has learned plainly but still learns: losses near zero would make ratios extreme, and on emoji the held-out
loss rises later, as 780 pictures are learned by heart. `sparse` has a first beta of 0.5, as the run file's notes say.

Losses are means over the last eighth of the computed samples. Ratios are geometric means over cells. The other
tables have the first seed only; the bounds have ages of 2 to 8, and the run's rate only. "Counted on arrival" (dense,
the run's rate): a late sample counts towards the target batch of the epoch that it enters, not of the one that computed
it. The last table has the demo's own target batch, 256 samples, in 50 epochs of scenes: its gradients have less noise,
so that there is less to win with late ones.

No rule can be expected to beat a swarm in which nothing is late: `none_vs_waiting` is the bound of `used_vs_waiting`.

Ends with 1, naming the bound, when one is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.staleness_parts.figures import (
    ALL_RULES,
    BOUNDED,
    OF_DISCOUNTS,
    ON_ARRIVAL,
    RATES,
    RULES,
    RUN_BATCH,
    RUN_SIZE,
    Job,
    Outcomes,
    best,
    common_cells,
    geometric_mean,
    list_jobs,
    ratio,
    summary,
)
from benchmarks.staleness_parts.samples import EMOJI, Data, Samples, read_data
from benchmarks.staleness_parts.training import CODECS, Outcome, Size, train

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks/results/staleness.json"
SIZES = {"scenes": Size(64, 100), "emoji": Size(32, 60)}
QUICK = {"scenes": Size(32, 8), "emoji": Size(32, 8)}
SEEDS, PROCESSES = 3, 2
BOUNDS = {"used_vs_waiting": 0.6, "used_vs_thrown": 1.02}  # at most


def run_job(job: Job, size: Size, folder: Path, emoji: Path) -> Outcome:
    """One training, in a process of the pool. `folder` holds the encoded samples of each data set."""
    torch.set_num_threads(1)
    parts = torch.load(folder / f"{job.setting.data}.pt", weights_only=True)
    data = Data(*(Samples(**parts[name]) for name in Data._fields))
    return train(job.setting, ALL_RULES[job.rule], size, data, emoji)


def size_of(job: Job, sizes: dict[str, Size]) -> Size:
    """How long a training is."""
    return RUN_SIZE if job.rule in RUN_BATCH else sizes[job.setting.data]


def measure(jobs: list[Job], sizes: dict[str, Size], emoji: Path, processes: int) -> Outcomes:
    """Every training, some at a time; a line for each cell that is done."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[Job, Outcome] = {}
    waiting = {
        cell: {job for job in jobs if job.setting == cell} for cell in dict.fromkeys(job.setting for job in jobs)
    }
    with tempfile.TemporaryDirectory(prefix="staleness-") as name:
        folder = Path(name)
        for data in dict.fromkeys(job.setting.data for job in jobs):
            parts = read_data(data, emoji)._asdict()
            torch.save({part: samples._asdict() for part, samples in parts.items()}, folder / f"{data}.pt")
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            begun = {pool.submit(run_job, job, size_of(job, sizes), folder, emoji): job for job in jobs}
            for future in as_completed(begun):
                job = begun[future]
                found[job] = future.result()
                waiting[job.setting].discard(job)
                if not waiting[job.setting]:
                    cell = job.setting
                    seconds = sum(outcome.seconds for other, outcome in found.items() if other.setting == cell)
                    named = f"{cell.data}, {cell.codec}, rate {cell.rate:.2g}, seed {cell.seed}"
                    print(f"done: {named}: {seconds:.0f} s of a core", flush=True)
    return found


def print_tables(outcomes: Outcomes) -> None:
    """The tables for people."""
    cells = common_cells(outcomes, tuple(RULES))
    shown = [rule for rule in RULES if rule != "none"]
    print(f"\nHeld-out loss, over that of a swarm in which nothing is late; {len({c.seed for c in cells})} seeds")
    print(f"{'':28}{'loss':>8}" + "".join(f"{rule:>14}" for rule in shown) + f"{'used/waiting':>14}{'used/thrown':>13}")
    for data, codec, rate in dict.fromkeys(cell[:3] for cell in cells):
        some = [cell for cell in cells if cell[:3] == (data, codec, rate)]
        loss = geometric_mean(outcomes[Job(cell, "none")].loss for cell in some)
        row = "".join(f"{ratio(outcomes, rule, 'none', some):>14.3f}" for rule in shown)
        row += "".join(f"{ratio(outcomes, 'used', o, some):>{w}.3f}" for o, w in (("waiting", 14), ("thrown", 13)))
        print(f"{f'{data}, {codec}, rate {rate:.2g}':28}{loss:>8.3f}{row}")
    row = "".join(f"{ratio(outcomes, rule, 'none', cells):>14.3f}" for rule in shown)
    row += "".join(f"{ratio(outcomes, 'used', o, cells):>{w}.3f}" for o, w in (("waiting", 14), ("thrown", 13)))
    print(f"{'all':28}{'':>8}{row}")
    tables = {"weights of late samples": OF_DISCOUNTS, "bounds": tuple(BOUNDED), "counting": tuple(ON_ARRIVAL)}
    for about, rules in tables.items():
        if some := common_cells(outcomes, (*rules, "none")):
            least, ratios = best(outcomes, rules)
            print(f"\nThe same, of other {about}; {len(some)} cells")
            for rule, value in ratios.items():
                print(f"{ALL_RULES[rule].words:36}{value:>8.3f}{'  the least' if rule == least else ''}")
    if common_cells(outcomes, tuple(RUN_BATCH)):
        print(f"\nThe same, with a target batch of {RUN_SIZE.target_batch_size}; 1 cell")
        for rule in RUN_BATCH:
            print(f"{ALL_RULES[rule].words:36}{ratio(outcomes, rule, 'run_batch_none'):>8.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds: too short to judge")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--data", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--codec", nargs="+", choices=tuple(CODECS), default=list(CODECS))
    parser.add_argument("--emoji", type=Path, default=EMOJI, help="folder of the emoji shards")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="trainings at a time, one core each")
    parser.add_argument("--store", action="store_true", help=f"in {STORED.relative_to(ROOT)}")
    options = parser.parse_args()
    began = time.monotonic()
    data = [name for name in options.data if name != "emoji" or options.emoji.is_dir()]
    if data != options.data:
        print(f"There are no emoji shards in {options.emoji}, so only scenes are measured. Name them: --emoji FOLDER")
    if not data:
        return 1
    jobs = list_jobs(data, 1 if options.quick else options.seeds, options.codec)
    if options.quick:
        jobs = [job for job in jobs if job.rule in RULES and job.setting.rate == RATES[0]]
    outcomes = measure(jobs, QUICK if options.quick else SIZES, options.emoji, options.processes)
    print_tables(outcomes)
    told = summary(outcomes) | {
        "data": ", ".join(data),
        "core_minutes": sum(outcome.seconds for outcome in outcomes.values()) / 60,
        "minutes": (time.monotonic() - began) / 60,
    }
    told = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in told.items()}
    if options.store:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        rows = [{**job.setting._asdict(), "rule": job.rule, **found._asdict()} for job, found in outcomes.items()]
        STORED.write_text(json.dumps({"figures": told, "commit": commit, "trainings": rows}, indent=1) + "\n")
    missed = [f"{name} is {told[name]}, the bound is {most}" for name, most in BOUNDS.items() if told[name] > most]
    for line in missed:
        print(f"Not met: {line}")
    print(json.dumps(told))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
