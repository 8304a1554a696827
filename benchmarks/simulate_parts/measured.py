"""The netlab's scenarios: some fit the cost model's constants, the others check it; measured, and stored.

Lines are as wide as they are called: the time dilation is that with which home_parts/material.py scales nothing, and
epochs and waits are given here.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.home_parts import ledger
from benchmarks.home_parts.material import ORIGINAL, SPARSE, line_scale, make_run
from benchmarks.home_parts.trial import WARM_UP, Outcome, Trial, perform
from benchmarks.netlab import Line

MODEL, TARGET = "1.5m", 1024  # of home_parts/material.py; samples of an epoch
WAITS = {"allreduce_timeout": 40.0}  # s
REAL_EVERY = 32  # microbatches with one real backward pass: the two cores are the network's here


@dataclass(frozen=True)
class Scenario:
    """:param lines: Mbit/s (down, up) of each member, as they are
    :param codec: of gradients, a name of codec.CODECS
    :param epoch: s in which all devices together compute a target batch
    :param delayed: average in the background
    :param clients: of the members, the last so many are in client mode
    :param ratio: between the fastest and the slowest device
    :param to_fit: the constants are fitted on it; it says nothing of the prediction then
    """

    name: str
    lines: tuple[tuple[float, float], ...]
    codec: str = "blockwise8"
    epoch: float = 6.0
    delayed: bool = True
    clients: int = 0
    ratio: float = 2.0
    to_fit: bool = False

    def trial(self, seconds: float) -> Trial:
        first_client = len(self.lines) - self.clients
        swarm = SPARSE if self.codec == "sparse" else {"grad_compression": self.codec}
        return Trial(
            self.name, "kit", [Line(*line, nat=i >= first_client) for i, line in enumerate(self.lines)],
            seconds=seconds, model=MODEL, dilation=undilated(), ratio=self.ratio, target_batch_size=TARGET,
            epoch=self.epoch, real_every=REAL_EVERY,
            swarm={
                **WAITS, **swarm, "delay_grad_averaging": self.delayed,
            },
        )  # fmt: skip


SCENARIOS = (
    Scenario("4 peers, 16/8", ((16, 8),) * 4, to_fit=True),
    Scenario("3 peers, 6/3, not delayed", ((6, 3),) * 3, delayed=False, to_fit=True),
    Scenario("5 peers, 8/4, uniform4", ((8, 4),) * 5, codec="uniform4", to_fit=True),
    Scenario("4 peers, 6/3, sparse", ((6, 3),) * 4, codec="sparse", to_fit=True),
    Scenario("3 peers, 10/5", ((10, 5),) * 3),
    Scenario("4 peers, 12/6, uniform4, not delayed", ((12, 6),) * 4, codec="uniform4", delayed=False),
    Scenario("5 peers, 5/2.5, sparse", ((5, 2.5),) * 5, codec="sparse"),
    Scenario("1 public, 3 clients, 12/12", ((12, 12),) * 4, clients=3),
    Scenario("4 peers, 20/10 and 8/4", ((20, 10), (20, 10), (8, 4), (8, 4)), epoch=8.0),
)  # fmt: skip


def undilated() -> float:
    """The dilation with which lines keep their width."""
    return 1.0 / line_scale(make_run(MODEL, TARGET, 1.0), 1.0)


def parameters() -> int:
    """Of the model that the scenarios train."""
    return round(ORIGINAL / undilated())


def told(outcome: Outcome, events: Sequence[Sequence[dict]]) -> dict[str, Any]:
    """What is stored of a measurement; s, bytes, Mbit/s.

    :param events: of each worker
    """
    total, walls = outcome.total, [a.wall / a.steps for a in outcome.accounts if a.steps]
    return {
        "round_s": ledger.middle(outcome.rounds),
        "rounds": len(outcome.rounds),
        "goodput": outcome.goodput,
        "epoch_wall_s": mean(walls) if walls else float("nan"),
        "bytes_per_sample": outcome.bytes_per_sample(),
        "mbps": 8e-6 * total.wire_sent / max(1e-9, total.wall),
        "complete": total.complete / max(1, total.steps),
        "failed": total.failed,
        "steps": total.steps,
        "lost": total.share(total.lost),
        "waiting": total.share(total.waiting),
        "own_work": total.share(total.own_work),
        "contention": total.contention / max(1e-9, total.wall),
        "pressure": outcome.pressure,
        **complete_only(events, outcome.trial.speeds),
    }


def complete_only(events: Sequence[Sequence[dict]], speeds: Sequence[float]) -> dict[str, float]:
    """Of all steps after warming up, those that all workers took together, after another such: what a swarm comes to
    without what rounds that failed have cost it."""
    applied = seconds = sent = samples = 0.0
    rounds = []
    for one, speed in zip(events, speeds, strict=True):
        steps = [event for event in one if event["event"] == "step"][WARM_UP:]
        for before, step in pairwise(steps):
            if all(e["group_size"] == len(events) and not e["failure"] for e in (before, step)):
                grown = {name: step[name] - before[name] for name in ("at", "contention", "wire_sent")}
                applied, seconds = applied + step["samples"] / speed, seconds + grown["at"] - grown["contention"]
                samples, sent = samples + step["samples"], sent + grown["wire_sent"]
                rounds.append(step["seconds"])
    return {
        "complete_rounds": len(rounds),
        "complete_round_s": ledger.middle(rounds),
        "complete_goodput": applied / seconds if seconds else math.nan,
        "complete_bytes_per_sample": sent / samples if samples else math.nan,
    }


def kept(folder: Path, scenario: Scenario) -> list[list[dict]]:
    """Events of each worker of a trial whose events were kept in `folder`."""
    place = folder / scenario.name.replace(" ", "-").replace("/", "-")
    files = [place / f"worker-{number}-0.jsonl" for number in range(len(scenario.lines))]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text()) if path is not None and path.exists() else {}


def measure(
    scenarios: Iterable[Scenario], seconds: float, path: Path | None, keep: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Of each scenario that `path` has no measurement of, as it is defined now; stored there as soon as it is made.

    :param seconds: measured, of each
    """
    known = read(path)
    for scenario in scenarios:
        as_defined = json.loads(json.dumps(asdict(scenario)))
        if known.get(scenario.name, {}).get("scenario") == as_defined:
            continue
        with tempfile.TemporaryDirectory(prefix="simulate-") as name:
            folder = keep or Path(name)
            measured = told(perform(scenario.trial(seconds), folder), kept(folder, scenario))
        print(f"measured: {scenario.name:<40}" + "".join(f" {k} {v:.3g}" for k, v in measured.items()), flush=True)
        known[scenario.name] = {"scenario": as_defined, **measured}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(known, indent=1) + "\n")
    return known


def split(scenarios: Sequence[Scenario]) -> tuple[list[Scenario], list[Scenario]]:
    """Those to fit with, and those to check with."""
    return [s for s in scenarios if s.to_fit], [s for s in scenarios if not s.to_fit]
