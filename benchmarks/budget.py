"""The budget of "Training Transformers Together", measured: how many bytes does a sample cost on the wire?

    python benchmarks/budget.py                 both parts, some 35 minutes
    python benchmarks/budget.py --only wire     bytes and times alone
    python benchmarks/budget.py --only loss     trainings alone
    python benchmarks/budget.py --full          more samples, and 8 peers; stored under benchmarks/results/

The claim: batches 4 to 16 times as large, compression 4 to 32, sharing 4 to 24, overlap 1.5 to 2. Each technique alone
and all together, as bytes that leave the lines of real workers in network namespaces (home_parts/), headers, DHT,
matchmaking and states included, for each sample that entered a step; what one sends another receives. The baseline is
torch.distributed's all-reduce (gloo) in fp32 at every 512 samples, of the model without sharing: it is measured with
the shared one and multiplied by 8.87, the two's parameters (`UNSHARED`). Time is dilated as in home_links.py.

Two cores carry a model of 1.5 M parameters. What the kit sends beside gradients and averages does not grow with the
model, and is most of what it sends for this one; so figures are given as measured (`_as_measured`), and for the
original's 125.9 M: gradients and averages times its parameters, with the headers of their packets, and the rest as it
is. Of the other systems all bytes are multiplied.

Losses are of trainings in one process (budget_parts/training.py), whose rounds are the kit's code without sockets: at
equal samples, in pairs of equal seeds, 3 seeds; beside each gap the spread of its seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.budget_parts.arms import ARMS, BATCH, MODEL, SMALL_BATCH, UNSHARED, Arm
from benchmarks.budget_parts.training import EMOJI
from benchmarks.budget_parts.trainings import GAPS, TRAININGS, Training
from benchmarks.home_parts.material import line_scale, make_run
from benchmarks.home_parts.trial import HEAD, Outcome, Trial, perform
from benchmarks.netlab import Line
from benchmarks.netlab_parts.telling import end_with

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("results")
SEEDS = (0, 1, 2)
SECONDS, PEERS = 45.0, 4  # of a trial on the wire
AT_ONCE = 2  # trials whose bytes alone count; four emulated devices leave two cores idle for most of the time
DDP_SHARE = 1 / 3  # of its seconds, where each step sends the same
LEAST_EPOCHS = 2  # that it measures at least
ATTEMPTS = 3
HEADERS = 1.08  # bytes on the wire for each of a part, rather too many: simulate.py's fits are 1.005 to 1.08
FULL_SECONDS, FULL_PEERS, FULL_SAMPLES = 150.0, 8, 4  # and times as many samples in each training


# --- bytes ---


def measure(arm: Arm, options: argparse.Namespace) -> Outcome:
    """One trial, again if some worker made no two steps: plain hivemind's members miss each other for minutes now and
    then, and neither bytes nor times are of anything then."""
    seconds = options.seconds * (DDP_SHARE if arm.system == "ddp" else 1.0)
    lines, seconds = [Line(*arm.line)] * options.peers, max(seconds, LEAST_EPOCHS * arm.epoch)
    for _ in range(ATTEMPTS):
        outcome = perform(
            Trial(
                arm.words, arm.system, lines, seconds=seconds, swarm=arm.swarm, stock=arm.stock, ratio=1,
                target_batch_size=arm.batch, epoch=arm.epoch, model=MODEL,
            )
        )  # fmt: skip
        if all(account.steps for account in outcome.accounts):
            break
    return outcome


def measure_all(options: argparse.Namespace) -> Iterator[tuple[Arm, Outcome]]:
    timed, others = [arm for arm in ARMS if arm.is_timed], [arm for arm in ARMS if not arm.is_timed]
    for arm in timed:
        yield arm, measure(arm, options)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(others, pool.map(lambda arm: measure(arm, options), others), strict=True)


def bytes_at_size(outcome: Outcome, times: float) -> float:
    """For each sample, of a model with `times` as many parameters."""
    total = outcome.total
    parts = HEADERS * total.parts_sent if outcome.trial.system == "kit" else float(total.wire_sent)
    return (times * parts + max(0.0, total.wire_sent - parts)) / max(1, total.samples)


def wire(options: argparse.Namespace) -> dict[str, float]:
    print(HEAD, flush=True)
    bytes_each, at_size, outcomes = {}, {}, {}
    times = 1 / line_scale(make_run(MODEL, BATCH, 1.0), 1.0)
    for arm, outcome in measure_all(options):
        outcomes[arm.key] = outcome
        print(outcome.row(), flush=True)
        for failure, count in outcome.failures.items():
            print(f"{'':>8}{count} x {failure[:100]}", flush=True)
    for arm in ARMS:
        if not outcomes[arm.key].total.samples:
            raise SystemExit(f"{arm.words}: no sample entered a step.")
        more = 1.0 if arm.is_shared else UNSHARED
        bytes_each[arm.key] = more * outcomes[arm.key].bytes_per_sample()
        at_size[arm.key] = more * bytes_at_size(outcomes[arm.key], times)
    print(f"\n{'':<44}{'claimed':>10}{'by count':>10}{'1.5 M':>10}{'125.9 M':>10}{'bytes/sample':>15}")
    told: dict[str, float] = {}
    for arm in ARMS:
        told[f"{arm.key}_x_as_measured"] = as_is = bytes_each["baseline"] / bytes_each[arm.key]
        told[f"{arm.key}_x"] = x = at_size["baseline"] / at_size[arm.key]
        print(f"{arm.words:<44}{arm.claimed:>10}{arm.by_count:>10}{as_is:>10.1f}{x:>10.1f}{at_size[arm.key]:>15,.0f}")
    shared = {name: found["large_batch"] / UNSHARED for name, found in (("", at_size), ("_as_measured", bytes_each))}
    return told | {
        "original_overlap_x": overlap(outcomes["original_at_once"], outcomes["original_recipe"]),
        "codec_x": shared[""] / at_size["sparse"],  # the same model and batch
        "codec_x_as_measured": shared["_as_measured"] / bytes_each["sparse"],
        "contention": max(o.total.contention / max(1e-9, o.total.wall) for o in outcomes.values()),
    }  # fmt: skip


def overlap(at_once: Outcome, delayed: Outcome) -> float:
    """Samples a second with rounds in the background, over those of devices that wait for theirs."""
    return delayed.samples_per_second / max(1e-9, at_once.samples_per_second)


# --- losses ---


def train(training: Training, data: str, seed: int, samples: float, folder: Path) -> dict[str, Any]:
    asked = {**training.settings(data, samples), "data": data, "seed": seed, "folder": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.budget_parts.training", json.dumps(asked)],
        cwd=ROOT, capture_output=True, text=True, env=None,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"A training ended badly:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{data:<8}{training.words:<44}seed {seed}{found['epochs']:>7} epochs  loss {found['loss']:.5f}"
        f"  {found['bytes'] / 1e3:>9.1f} kB a round{found['seconds']:>7.0f} s",
        flush=True,
    )
    return found


def losses(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="budget-") as name, ThreadPoolExecutor(2) as pool:
        folder, found = Path(name), {}
        asked = [(data, t, seed) for data in options.data for seed in SEEDS for t in TRAININGS]
        begun = {
            (data, t.key, seed): pool.submit(train, t, data, seed, options.samples, folder) for data, t, seed in asked
        }
        found = {key: future.result()["loss"] for key, future in begun.items()}
    told = {}
    print(f"\n{'loss, relative to':<44}" + "".join(f"{data:>22}" for data in options.data))
    for name, (ours, theirs) in GAPS.items():
        row = []
        for data in options.data:
            gaps = [found[data, ours, seed] / found[data, theirs, seed] - 1 for seed in SEEDS]
            told[f"{name}_{data}"], told[f"{name}_{data}_spread"] = mean(gaps), stdev(gaps)
            row.append(f"{mean(gaps):>+14.4f} +-{stdev(gaps):.4f}")
        told[name] = max(told[f"{name}_{data}"] for data in options.data)
        print(f"{name:<44}" + "".join(row))
    for data in options.data:
        base = [found[data, "baseline", seed] for seed in SEEDS]
        told[f"seeds_spread_{data}"] = stdev(base) / mean(base)
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("wire", "loss"))
    parser.add_argument("--data", nargs="+", choices=("scenes", "emoji"), default=["scenes", "emoji"])
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each trial on the wire, measured")
    parser.add_argument("--samples", type=float, default=1.0, help="times the samples of a training")
    parser.add_argument("--full", action="store_true", help="stored under benchmarks/results/")
    options = parser.parse_args()
    if options.full:
        options.peers, options.seconds, options.samples = FULL_PEERS, FULL_SECONDS, FULL_SAMPLES
    if options.only != "wire" and "emoji" in options.data and not EMOJI.is_dir():
        raise SystemExit(
            f"There are no emoji shards in {EMOJI}.\n1. Name their folder: VOLUNTEER_KIT_EMOJI=FOLDER\n"
            "2. Or train on scenes alone: python benchmarks/budget.py --data scenes"
        )
    told: dict[str, float] = {"unshared_x": UNSHARED, "small_batch": SMALL_BATCH}
    if options.only != "loss":
        told |= wire(options)
    if options.only != "wire":
        told |= losses(options)
    told = {key: float(f"{value:.4g}") for key, value in told.items()}
    if options.full:
        RESULTS.mkdir(exist_ok=True)
        RESULTS.joinpath("budget.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    end_with(main)
