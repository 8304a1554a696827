"""How much of their time do devices compute for the swarm, behind home lines? The kit at three kinds of lines, and at
20/10 Mbit/s beside plain hivemind and DDP; there with smaller batches and with local steps as well.

    python benchmarks/home_links.py                                    some 55 minutes
    python benchmarks/home_links.py --only kit --seconds 40            the kit's rows alone
    python benchmarks/home_links.py --swarm grad_compression=sparse
    python benchmarks/home_links.py --full                             longer; stored under benchmarks/results/

Eight workers, real processes of real swarms, each in a network namespace behind its own shaped line, with devices whose
speeds are 1 to 16 apart. Devices are emulated by a pause around a small real backward pass (home_parts/device.py), time
is dilated (home_parts/material.py). A trial is measured for some twelve epochs, from the slowest worker's third step
on: before it the first rounds have all answers come from one founder, which the row tells as its warm-up. It takes root
and iproute2.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.home_parts import ledger
from benchmarks.home_parts.material import MODELS, SPARSE, line_scale, stepping
from benchmarks.home_parts.trial import HEAD, REFRESH, WORDS, Outcome, Trial, perform
from benchmarks.netlab import Line
from benchmarks.netlab_parts.telling import end_with

LINES = {"20_10": (20, 10), "5_1": (5, 1), "1000": (1000, 1000)}  # Mbit/s down, up
# what a host would write for such lines: at 10 Mbit/s up an epoch of 141 s is long enough for 4 bits of each gradient,
# and at 1 Mbit/s for the largest 64th
CHOSEN: dict[str, dict] = {
    "20_10": {"grad_compression": "blockwise4"},
    "5_1": SPARSE,
    "1000": {"grad_compression": "blockwise8"},
}
# with sparse gradients rounds at 20/10 are so short that a host can let the swarm step four times as often
SMALL, SMALL_BATCH = "20_10_small", 1 / 4  # of the samples of an epoch
# or let each peer step by itself meanwhile, and of what all have moved a fourth travel: budget.py's, that learnt best
STEPPING = "20_10_local"
LOCAL_BATCH = 64
AT_20_10 = ("20_10", SMALL, STEPPING)
# Messages and DHT send as many bytes for a small model: behind lines narrowed for 4 M parameters from 1 Mbit/s little
# else has room, so that line is measured as it is
MODEL, MODEL_OF = "4m", {"5_1": "12.5m"}
OTHERS_SHARE = 3 / 4  # of a trial's seconds, for one of another system
STOCK = {"float16": {}, "uniform8": {}, "powersgd": {"rank": 4}}
PATIENCE, MATCHMAKING = 0.5, 3.0  # of plain hivemind's timeouts, times the run's
RESULTS = Path(__file__).with_name("results")
FULL = 300.0  # s of a trial
LOSS_WINDOW = 32  # losses that are averaged before they are compared


def trials(options: argparse.Namespace) -> Iterator[Trial]:
    """Without those of the sweep after the first."""
    swarm = settings(options.swarm)
    given = {
        "seconds": options.seconds, "model": options.model or MODEL, "ratio": options.ratio, "epoch": options.epoch,
        "dilation": options.dilation, "refresh_period": options.refresh, "target_batch_size": options.target,
        "real_every": options.real_every,
    }  # fmt: skip

    def lines(name: str) -> list[Line]:
        down, up = LINES[name]
        return [Line(down, up, rtt=options.rtt, loss=options.loss)] * options.peers

    for name in LINES:
        chosen, model = CHOSEN[name] | swarm, options.model or MODEL_OF.get(name, MODEL)
        words = f"kit, {chosen['grad_compression']}, {name}"
        yield Trial(words, "kit", lines(name), swarm=chosen, **{**given, "model": model})
    sparse = Trial(f"kit, sparse, {SMALL}", "kit", lines("20_10"), swarm=CHOSEN["5_1"] | swarm, **given)
    yield with_small_batches(sparse)
    yield replace(sparse, name=f"kit, local steps, {STEPPING}", swarm=stepping(LOCAL_BATCH) | swarm)
    given["seconds"] *= OTHERS_SHARE
    for codec, more in STOCK.items():
        yield Trial(f"hivemind, {codec}", "stock", lines("20_10"), stock={"codec": codec, **more}, **given)
    yield Trial("DDP, fp32", "ddp", lines("20_10"), **given)


def with_small_batches(trial: Trial) -> Trial:
    batch = round(SMALL_BATCH * trial.target_batch_size)
    return replace(trial, target_batch_size=batch, epoch=SMALL_BATCH * trial.epoch_seconds)


def sweep(best: Trial) -> Iterator[Trial]:
    """Plain hivemind's best codec with other timeouts, and with as small batches as the kit's."""
    swarm = best.run()["swarm"]
    shorter = {name: PATIENCE * swarm[name] for name in ("averaging_timeout", "allreduce_timeout")}
    shorter["next_chunk_timeout"] = shorter["allreduce_timeout"] / 3
    yield replace(best, name=f"{best.name}, timeouts x {PATIENCE:g}", stock={**best.stock, **shorter})
    longer = {"matchmaking_time": MATCHMAKING * swarm["matchmaking_time"]}
    yield replace(best, name=f"{best.name}, matchmaking x {MATCHMAKING:g}", stock={**best.stock, **longer})
    yield with_small_batches(replace(best, name=f"{best.name}, small batches"))


def settings(given: list[str]) -> dict:
    """["grad_compression=sparse", "local_steps=8"] -> fields, as YAML would read them."""
    return {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in given)}


def measure(trial: Trial, found: list[Outcome], keep: Path | None) -> Outcome:
    outcome = perform(trial, keep)
    print(outcome.row(), flush=True)
    for failure, times in outcome.failures.items():
        print(f"{'':>8}{times} x {failure[:100]}", flush=True)
    found.append(outcome)
    return outcome


def speedup(ours: Outcome, theirs: Outcome) -> float | None:
    """Times faster to the loss that they had at their end, in wall time since the start; 0: ours never came to it."""
    level = ledger.last_loss(theirs.curve, LOSS_WINDOW)
    took, takes = (ledger.time_to_loss(one.curve, level, LOSS_WINDOW) for one in (ours, theirs))
    if not takes:
        return None
    return takes / took if took else 0.0


def figures(found: list[Outcome]) -> dict:
    def those(system: str) -> list[Outcome]:
        return [outcome for outcome in found if outcome.trial.system == system]

    told: dict = {}
    for outcome in those("kit"):
        line = outcome.trial.name.rpartition(", ")[2]
        told[f"goodput_{line}"] = outcome.goodput
        told[f"complete_groups_{line}"] = outcome.total.complete / max(1, outcome.total.steps)
        told[f"kilobytes_per_sample_{line}"] = outcome.bytes_per_sample() / 1e3
        told[f"warm_up_s_{line}"] = outcome.warm_up
    ours = {end: one for one in those("kit") for end in AT_20_10 if one.trial.name.endswith(f", {end}")}
    for name, system in (("hivemind", "stock"), ("ddp", "ddp")):
        if not those(system):
            continue
        best = max(those(system), key=lambda outcome: outcome.goodput)
        told[f"goodput_{name}"], told[f"best_of_{name}"] = best.goodput, best.trial.name
        most = max(each.samples_per_second for each in those(system))
        speedups = {}
        for line, own in ours.items():
            quickest = [speedup(own, each) for each in those(system)]
            speedups[line] = min((s for s in quickest if s is not None), default=0.0)
            told[f"speedup_vs_{name}_{line}_alone"] = speedups[line]
            told[f"samples_x_{name}_{line}"] = own.samples_per_second / most if most else None
        told[f"speedup_vs_{name}_20_10"] = max(speedups.values(), default=None)  # of each its best
    told["contention"] = max(o.total.contention / max(1e-9, o.total.wall) for o in found)
    told["pressure"] = max(o.pressure for o in found)
    return told


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180, help="of each trial, measured")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--model", choices=MODELS, help=f"of all trials; {MODEL}, and by line {MODEL_OF}")
    parser.add_argument("--dilation", type=float, default=10, help="s of the original that 1 s stands for")
    parser.add_argument("--ratio", type=float, default=16, help="between the fastest and the slowest device")
    parser.add_argument("--target", type=int, default=4096, help="samples of an epoch")
    parser.add_argument("--epoch", type=float, help="s that all devices need for them; the original's, dilated")
    parser.add_argument("--rtt", type=float, default=0, help="ms of each line; costs some of a core")
    parser.add_argument("--loss", type=float, default=0, help="share of packets that each line loses")
    parser.add_argument("--refresh", type=float, default=REFRESH, help="s between plain hivemind's looks at progress")
    parser.add_argument("--real-every", type=int, default=8, help="microbatches with one real backward pass")
    parser.add_argument("--swarm", action="append", default=[], metavar="FIELD=VALUE", help="of the kit's run files")
    parser.add_argument("--only", action="append", metavar="WORDS", help="trials whose names contain them; again: or")
    parser.add_argument("--no-sweep", action="store_true", help="plain hivemind with the run's timeouts alone")
    parser.add_argument("--keep", type=Path, help="folder for all events and logs")
    parser.add_argument("--full", action="store_true", help=f"{FULL:g} s a trial; stored in benchmarks/results/")
    options = parser.parse_args()
    options.seconds = FULL if options.full else options.seconds
    return options


def main() -> int:
    options, found = arguments(), []
    known = list(trials(options))
    chosen = [trial for trial in known if any(words in trial.name for words in options.only or [""])]
    if not chosen:
        names = "\n".join(f"  {trial.name}" for trial in known)
        raise SystemExit(f"No trial's name contains {' or '.join(map(repr, options.only))}. There are:\n{names}")
    first = chosen[0]
    waits = {name: s for name, s in first.run()["swarm"].items() if "time" in name or "expiration" in name}
    scale = line_scale(first.run(), options.dilation)
    print(
        f"{options.peers} workers, {first.model} parameters; 1 s stands for {options.dilation:g} s of the original, "
        f"{scale:.3f} Mbit/s for 1.\nAn epoch's {options.target} samples take all devices {first.epoch_seconds:.2f} s. "
        "Fixed waits, s: " + ", ".join(f"{name} {s:.3g}" for name, s in waits.items())
    )
    print(HEAD, flush=True)
    for trial in chosen:
        measure(trial, found, options.keep)
    stock = [outcome for outcome in found if outcome.trial.system == "stock"]
    if stock and not options.no_sweep:
        for trial in sweep(max(stock, key=lambda outcome: outcome.goodput).trial):
            measure(trial, found, options.keep)
    print(WORDS)
    told = {key: float(f"{v:.4g}") if isinstance(v, float) else v for key, v in figures(found).items()}
    if options.full:
        store(options, found, told)
    print(json.dumps(told))
    return 0


def store(options: argparse.Namespace, found: list[Outcome], told: dict) -> None:
    RESULTS.mkdir(exist_ok=True)
    rows = [
        {"name": o.trial.name, "goodput": o.goodput, "pressure": o.pressure, "loss": o.curve[::10], **asdict(o.total)}
        for o in found
    ]
    path = RESULTS / "home_links.json"
    path.write_text(
        json.dumps({"options": {**vars(options), "keep": None}, "figures": told, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    end_with(main)
