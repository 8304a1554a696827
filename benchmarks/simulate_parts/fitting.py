"""The constants that fit measurements best, and how far predictions are from measurements that were not used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from benchmarks.home_parts.wire import layout_of
from benchmarks.simulate_parts.measured import Scenario
from benchmarks.simulate_parts.model import CODECS, Constants, Prediction, Swarm, predict
from volunteer_kit.runs import load_run

CORES = 2  # of the machine that all members of a measured swarm share
COMPLETE = "complete_"  # measurements of this name are without rounds that failed, of which the model knows nothing
WEIGHTS = {"round_s": 1.0, "goodput": 2.0, "bytes_per_sample": 0.5}  # of a relative error, squared
LOOSE = 0.15  # of an error of 1: how much it costs that a constant is e times what it was thought to be
RANGE = 30.0  # times, either way, that a constant may be off


def swarm_of(scenario: Scenario) -> Swarm:
    """What the model is told of a measured scenario: nothing that was measured."""
    trial = scenario.trial(1.0)
    parts, sizes = parts_of(scenario)
    down, up = np.array(scenario.lines, dtype=float).T
    return Swarm(
        down=down, up=up, speed=np.array(trial.speeds), target_batch_size=trial.target_batch_size,
        codec=CODECS[scenario.codec], parts=parts, part_bytes=sizes,
        client=np.arange(len(up)) >= len(up) - scenario.clients, delayed=scenario.delayed,
        cores=CORES,
    )  # fmt: skip


@lru_cache
def parts_of(scenario: Scenario) -> tuple[np.ndarray, np.ndarray]:
    """Values and bytes of each cell of this run's model. Small tensors travel in another codec than large ones."""
    run = load_run(scenario.trial(1.0).run())
    layout = layout_of(run)
    noise = torch.randn(layout.elements, generator=torch.Generator().manual_seed(0))
    cells = [(layout.cell(cell), cell) for cell in range(layout.num_cells)]
    values = np.array([place.stop - place.start for place, _ in cells])
    return values, np.array([len(layout.encode_cell(cell, noise[place])) for place, cell in cells])


def fit(scenarios: Sequence[Scenario], measured: Mapping[str, Mapping[str, Any]]) -> Constants:
    """Least squares of relative errors; a constant that the measurements say little of stays near where it was."""
    names = [f.name for f in fields(Constants)]
    before = np.array([getattr(Constants(), name) for name in names])
    swarms = [swarm_of(scenario) for scenario in scenarios]

    def errors(logs: np.ndarray) -> list[float]:
        constants = Constants(*(before * np.exp(logs)))
        found = list(LOOSE * logs)
        for scenario, swarm in zip(scenarios, swarms, strict=True):
            for name, value in compared(predict(swarm, constants)).items():
                real = measured[scenario.name][COMPLETE + name]
                if math.isfinite(real) and real > 0:
                    found.append(math.sqrt(WEIGHTS[name]) * math.log(max(value, 1e-9) / real))
        return found

    limit = math.log(RANGE)
    found = least_squares(errors, np.zeros(len(names)), bounds=(-limit, limit), loss="soft_l1", f_scale=0.3)
    return Constants(*(before * np.exp(found.x)).tolist())


def compared(prediction: Prediction) -> dict[str, float]:
    return {
        "round_s": prediction.round, "goodput": prediction.goodput, "bytes_per_sample": prediction.bytes_per_sample,
    }  # fmt: skip


@dataclass(frozen=True)
class Check:
    """Of one scenario: what was measured, and what was predicted."""

    scenario: Scenario
    measured: Mapping[str, Any]
    prediction: Prediction

    def error(self, name: str, of: str = "") -> float:
        """Relative; infinite if nothing was measured. `of`: COMPLETE, or all."""
        real = self.measured[of + name]
        return abs(compared(self.prediction)[name] / real - 1) if math.isfinite(real) and real > 0 else math.inf

    def row(self) -> str:
        told = "".join(
            f"{self.measured[name] / by:>9.3f}{self.measured[COMPLETE + name] / by:>8.3f}{value / by:>8.3f}"
            for (name, value), by in zip(compared(self.prediction).items(), (1, 1, 1000), strict=True)
        )
        measured = self.measured
        use = "fitted" if self.scenario.to_fit else "check"
        return (
            f"{self.scenario.name:<40}{use:>7}{told}{measured['complete']:>7.2f}{measured['failed']:>4}/"
            f"{measured['steps']:<4}{measured['pressure']:>6.2f}"
        )


HEAD = (
    f"{'':<47}{'round s':>9}{'(whole)':>8}{'model':>8}{'goodput':>9}{'(whole)':>8}{'model':>8}{'kB/smpl':>9}"
    f"{'(whole)':>8}{'model':>8}{'compl.':>7}{'failed':>9}{'press.':>6}"
)
WORDS = """(whole): of steps that all workers took together, after another such: the constants are fitted on these;
compl.: share of steps in a group of all; press.: of the time, somebody on this machine wanted a core and had none"""


def check(
    scenarios: Sequence[Scenario], measured: Mapping[str, Mapping[str, Any]], constants: Constants
) -> list[Check]:
    return [Check(s, measured[s.name], predict(swarm_of(s), constants)) for s in scenarios if s.name in measured]


def summary(checks: Sequence[Check]) -> dict[str, float]:
    """Over the scenarios that were not used to fit."""
    held = [one for one in checks if not one.scenario.to_fit]
    if not held:
        return {"prediction_error": math.nan}
    errors = {
        (of, name): [one.error(name, of) for one in held]
        for of in ("", COMPLETE)
        for name in compared(held[0].prediction)
    }
    whole = errors[COMPLETE, "round_s"] + errors[COMPLETE, "goodput"]
    both = errors["", "round_s"] + errors["", "goodput"]
    return {
        "prediction_error": mean(both),
        "prediction_error_median": median(both),
        "prediction_error_round_s": mean(errors["", "round_s"]),
        "prediction_error_goodput": mean(errors["", "goodput"]),
        "prediction_error_bytes": mean(errors["", "bytes_per_sample"]),
        "prediction_error_whole": mean(whole),
        "prediction_error_whole_round_s": mean(errors[COMPLETE, "round_s"]),
        "prediction_error_whole_goodput": mean(errors[COMPLETE, "goodput"]),
        "prediction_error_whole_bytes": mean(errors[COMPLETE, "bytes_per_sample"]),
        "scenarios_checked": len(held),
    }
