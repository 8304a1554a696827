"""It counts the bytes that a peer sends beside gradients and answers, on home lines and on narrow ones.

    python benchmarks/chatter.py                       some 4 minutes
    python benchmarks/chatter.py --seconds 20 --peers 4 --only after       a short look

Eight workers behind 5/1 Mbit/s with an epoch of 3 s, real processes in a network namespace each, as in home_links.py,
but the lines are not scaled; then the same behind 0.35 Mbit/s up. It takes root and iproute2.

ratio: BEFORE, which the kit sent while it averaged through hivemind.Optimizer, / chatter. Its sizes are the default.

chatter: bytes on the line, headers and acknowledgements included, less those of gradients and answers with theirs
(home_parts/wire.py); sent, of a peer on average. Gradients are so sparse that what is taken off hardly matters.
goodput_narrow: as of home_links.py. together_narrow: at the end all are at one epoch, or the last one's step is on its
way; complete_narrow: of all steps of all workers, those in a group of all.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.home_links import settings
from benchmarks.home_parts.material import MODELS, ORIGINAL, SPARSE
from benchmarks.home_parts.swarm import HomeSwarm, pressure
from benchmarks.home_parts.trial import WARM_UP, WARM_UP_PATIENCE, Trial, settle
from benchmarks.home_parts.wire import HEADERS, encoded_bytes, sent_by_all
from benchmarks.netlab import Line
from benchmarks.netlab_parts.telling import as_told, end_with
from volunteer_kit.run_sizes import parameters_of
from volunteer_kit.runs import load_run

LINE: Final = (5.0, 1.0)  # Mbit/s down, up
NARROW: Final = (5.0, 0.35)
DENSITY: Final = 1 / 640  # of a gradient's values that travel
EPOCH: Final = 3.0  # s; "fast steps"
TARGET: Final = 512  # samples
MICROBATCHES: Final = 8  # of each device in an epoch
REAL_EVERY: Final = 64  # microbatches with one real backward pass: all of the cores is for the swarm
NAMES: Final = ("after", "narrow")  # trials
BEFORE: Final = 0.71  # Mbit/s; measured on 2026-11-29 at commit fda20c7, through hivemind.Optimizer


@dataclass(frozen=True)
class Chatter:
    """The bytes that the workers of a trial sent.

    :ivar mbps: Mbit/s beside gradients and answers, of a peer on average
    :ivar tensors: Mbit/s of gradients and answers, with their headers
    :ivar said: Mbit/s of the chatter that the nodes themselves hand to p2pd: the rest is headers, DHT and p2pd
    """

    mbps: float
    tensors: float
    goodput: float
    together: bool
    complete: float  # share of steps in a group of all
    epochs: int
    pressure: float
    said: float


def mbps(of_bytes: float, seconds: float) -> float:
    """Bytes in some time -> Mbit/s."""
    return 8e-6 * of_bytes / seconds


def inside(events: Sequence[dict], begin: float, end: float) -> list[dict]:
    """A worker's steps within these times."""
    return [event for event in events if event["event"] == "step" and begin <= event["at"] <= end]


def on_lines(workers: Sequence[Sequence[dict]], begin: float, end: float) -> tuple[float, float]:
    """(bytes that all have sent, s of all), each between the first and the last of its "beat" events in this time."""
    sent = seconds = 0.0
    for events in workers:
        beats = [event for event in events if event["event"] == "beat" and begin <= event["at"] <= end]
        if len(beats) > 1:
            sent += beats[-1]["wire_sent"] - beats[0]["wire_sent"]
            seconds += beats[-1]["at"] - beats[0]["at"]
    return sent, seconds


def tensors_sent(workers: Sequence[Sequence[dict]], begin: float, end: float, size: float) -> float:
    """Bytes of gradients and answers that all have sent.

    :param size: bytes of one member's gradients
    """
    groups = {step["epoch"]: step["group_size"] for events in workers for step in inside(events, begin, end)}
    return sum(sent_by_all(members, size) for members in groups.values())


def said_by_nodes(workers: Sequence[Sequence[dict]], begin: float, end: float, size: float) -> float:
    """Mbit/s of what a node sends beside tensors, on average: between the first and the last of its steps."""
    sent = seconds = 0.0
    for steps in (inside(events, begin, end) for events in workers):
        if len(steps) > 1:
            tensors = sum(sent_by_all(step["group_size"], size) / step["group_size"] for step in steps[1:])
            sent += sum(step["bytes_sent"] for step in steps[1:]) - tensors
            seconds += steps[-1]["at"] - steps[0]["at"]
    return mbps(sent, seconds) if seconds else float("nan")


def are_together(workers: Sequence[Sequence[dict]]) -> bool:
    """Whether all workers' newest steps are of one epoch or of two in a row."""
    newest = [max((e["epoch"] for e in events if e["event"] == "step"), default=-1) for events in workers]
    return max(newest) - min(newest) <= 1 and min(newest) >= 0


def measure(trial: Trial, seconds: float, keep: Path | None) -> Chatter:
    """Raises SystemExit, NoNetlab."""
    run = load_run(trial.run())
    with tempfile.TemporaryDirectory(prefix="chatter-") as name:
        folder = Path(name)
        with HomeSwarm(folder, trial.scaled_lines(), trial.settings(folder), trial.each(), trial.joins_fast) as swarm:
            swarm.go()
            swarm.wait_until(lambda: swarm.slowest() > WARM_UP, WARM_UP_PATIENCE)
            begin, pressed = time.monotonic(), pressure()
            swarm.wait_until(lambda: False, seconds)
            end, pressed = time.monotonic(), pressure() - pressed
            swarm.leave()
            events = [worker.events[:] for worker in swarm.now()]
            if keep is not None:
                swarm.keep(keep / trial.name)
            outcome = settle(trial, events, swarm.began, begin, end, pressed / (end - begin))
    sent, of_time = on_lines(events, begin, end)
    tensors = (1 + HEADERS) * tensors_sent(events, begin, end, encoded_bytes(run))
    steps = [step for some in events for step in inside(some, begin, end)]
    if not of_time or not steps:
        raise SystemExit(f"The workers of {trial.name!r} made no steps in {seconds:g} s.")
    return Chatter(
        mbps(sent - tensors, of_time),
        mbps(tensors, of_time),
        outcome.goodput,
        are_together([[e for e in some if e["at"] <= end] for some in events]),
        sum(step["group_size"] == len(events) for step in steps) / len(steps),
        len({step["epoch"] for step in steps}),
        outcome.pressure,
        said_by_nodes(events, begin, end, encoded_bytes(run)),
    )


def trials(options: argparse.Namespace) -> list[Trial]:
    """Those that were asked for. Lines are not scaled: 1 s stands for as much as the model is smaller."""
    found = []
    for name in NAMES:
        swarm = SPARSE | {"grad_density": options.density} | settings(options.swarm)
        line = Line(*(NARROW if name == "narrow" else LINE))
        trial = Trial(
            name, "kit", [line] * options.peers, model=options.model, ratio=options.ratio, epoch=options.epoch,
            target_batch_size=options.target, real_every=REAL_EVERY, swarm=swarm,
            microbatches=MICROBATCHES,
        )  # fmt: skip
        dilation = ORIGINAL / parameters_of(load_run(trial.run()))
        found.append(replace(trial, dilation=dilation))
    return [trial for trial in found if trial.name in (options.only or NAMES)]


def main() -> int:
    """Print a table, and as the last line the figures as flat JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of each trial, measured")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--model", choices=MODELS, default="1.5m")
    parser.add_argument("--epoch", type=float, default=EPOCH, help="s that all devices need for one")
    parser.add_argument("--target", type=int, default=TARGET, help="samples of an epoch")
    parser.add_argument("--ratio", type=float, default=4, help="between the fastest and the slowest device")
    parser.add_argument("--density", type=float, default=DENSITY, help="of gradients")
    parser.add_argument("--swarm", action="append", default=[], metavar="FIELD=VALUE", help="of the run files")
    parser.add_argument("--only", action="append", choices=NAMES, help="a trial; again: or")
    parser.add_argument("--keep", type=Path, help="folder for all events and logs")
    options = parser.parse_args()
    head = f"{'':<10}{'chatter':>9}{'tensors':>9}  Mbit/s{'goodput':>10}{'complete':>10}{'epochs':>8}{'pressure':>10}"
    print(f"{head}{'said':>9}")
    found: dict[str, Chatter] = {}
    for trial in trials(options):
        one = found[trial.name] = measure(trial, options.seconds, options.keep)
        words = f"{one.mbps:>9.4f}{one.tensors:>9.4f}{'':>8}{one.goodput:>10.3f}{one.complete:>10.2f}{one.epochs:>8}"
        print(f"{trial.name:<10}{words}{one.pressure:>10.2f}{one.said:>9.4f}", flush=True)
    print(as_told(figures(found)))
    return 0


def figures(found: dict[str, Chatter]) -> dict[str, Any]:
    """The last line's."""
    told: dict[str, Any] = {"chatter_mbps_before": BEFORE}
    if "after" in found:
        told |= {"chatter_mbps_after": found["after"].mbps, "ratio": BEFORE / found["after"].mbps}
    if "narrow" in found:
        narrow = found["narrow"]
        told |= {"goodput_narrow": narrow.goodput, "together_narrow": narrow.together}
        told |= {"complete_narrow": narrow.complete, "chatter_mbps_narrow": narrow.mbps}
    told |= {f"said_mbps_{name}": one.said for name, one in found.items()}
    return told | {"pressure": max(one.pressure for one in found.values())}


if __name__ == "__main__":
    end_with(main)
