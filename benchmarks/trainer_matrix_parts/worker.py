"""Trains cases one after another in one process: importing the libraries takes longer than most of them.

Reads a line of JSON for each: {"case", "folder", "mode": "alone"} -> {"event": "done", "equal", ...}; with mode "one"
or "other" it is one of two, {"event": "invitation"} comes first, and the model is in `folder`/trained.safetensors.
"""

from __future__ import annotations

import ast
import builtins
import json
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Trainer, TrainerCallback

from benchmarks.trainer_matrix_parts.cases import ROWS, Case, all_cases
from volunteer_kit.training.hf_trainer import SwarmCallback

HERE = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
CLOSE = 0.05  # relative, of what is not equal for a stated reason
LOGGED = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")

plain = builtins.print


def say(event: str, **fields: Any) -> None:
    plain(json.dumps({"event": event, **fields}), flush=True)


class Told(SwarmCallback):
    """Keeps what each of the swarm's steps held."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reports: list[dict[str, Any]] = []

    def on_report(self, report):
        self.reports.append(
            {"epoch": report.epoch, "samples": report.samples, "group": report.group_size, "received": report.received}
        )


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step >= self.step


def in_swarm(trainer: Trainer, target: int, dht: dict[str, Any], **opt: Any) -> Told:
    config = {
        "dht": {**HERE, **dht},
        "opt": {
            "run_id": "matrix", "target_batch_size": target, "matchmaking_time": 2.0, "averaging_timeout": 30.0, **opt,
        },
    }  # fmt: skip
    told = Told(trainer, config)
    trainer.add_callback(told)
    return told


def truth_of(case: Case, trainer: Trainer) -> list[int]:
    """Examples of each loss that the Trainer computes from now on while it trains."""
    found: list[int] = []
    original = trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        if model.training:
            found.append(case.truth(inputs))
        return original(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    return found


def train(trainer: Trainer, **kwargs: Any) -> None:
    torch.manual_seed(7)  # of dropout and of what is generated
    random.seed(7)
    np.random.seed(7)
    trainer.train(**kwargs)


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    found, seen = {}, set()
    for name, parameter in trainer.model.named_parameters():
        if parameter.data_ptr() not in seen:
            seen.add(parameter.data_ptr())
            found[name] = parameter.detach().clone()
    return found


def trained(case: Case, folder: Path, in_a_swarm: bool) -> tuple[Trainer, list[dict[str, Any]], list[int]]:
    target, reports, truth = case.own if case.target is None else case.target, [], []
    for part in range(1 + case.resume):
        trainer = case.make(folder)
        told = in_swarm(trainer, target, {}) if in_a_swarm else None
        if case.resume and part == 0:
            trainer.add_callback(StopAt(2))
        found = truth_of(case, trainer)
        train(trainer, **({"resume_from_checkpoint": True} if part else {}))
        reports += told.reports if told is not None else []
        truth += found
    return trainer, reports, truth


def alone(case: Case, folder: Path) -> dict[str, Any]:
    one, _, expected = trained(case, folder / "plain", False)
    other, reports, truth = trained(case, folder / "swarm", True)
    ours, theirs = parameters(one), parameters(other)
    differing = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    distance = max((norm(ours[name] - theirs[name]) / max(norm(ours[name]), 1e-9) for name in ours), default=0.0)
    logs = [
        [{name: entry[name] for name in LOGGED if name in entry} for entry in trainer.state.log_history]
        for trainer in (one, other)
    ]
    log_differs = [[entry for entry in log if entry] for log in logs]
    counted = sum(report["samples"] for report in reports)
    return {
        "equal": not differing and log_differs[0] == log_differs[1],
        "differing": len(differing),
        "of": len(ours),
        "distance": distance,
        "close": distance < CLOSE,
        "log_equal": log_differs[0] == log_differs[1],
        "steps": [one.state.global_step, other.state.global_step],
        "counted": counted,
        "held": sum(truth),
        "counted_right": counted == sum(truth) == sum(expected),
    }


def norm(tensor: torch.Tensor) -> float:
    return tensor.float().norm().item()


def in_twos(case: Case, folder: Path, is_other: bool, initial_peers: list[str]) -> dict[str, Any]:
    trainer = case.make(folder, first=ROWS * is_other, max_steps=6, num_train_epochs=3)
    told = in_swarm(trainer, case.pair_target, {"initial_peers": initial_peers}, wait_for_peers=2)
    train(trainer)
    save_file(parameters(trainer), folder / "trained.safetensors")
    return {"reports": told.reports, "steps": trainer.state.global_step}


def main() -> None:
    torch.set_num_threads(1)
    cases = all_cases()

    def printed(*words: Any, **kwargs: Any) -> None:
        for word in words:
            if "initial_peers = " in str(word):
                say("invitation", maddrs=ast.literal_eval(str(word).split(" = ", 1)[1]))
        plain(*words, file=sys.stderr)

    builtins.print = printed
    for line in sys.stdin:
        order = json.loads(line)
        case, folder = cases[order["case"]], Path(order["folder"])
        folder.mkdir(parents=True)
        began = time.monotonic()
        try:
            if order["mode"] == "alone":
                found = alone(case, folder)
            else:
                found = in_twos(case, folder, order["mode"] == "other", order["initial_peers"])
        except Exception as e:
            traceback.print_exc()
            found = {"failed": f"{type(e).__name__}: {e}"[:400]}
        say("done", seconds=round(time.monotonic() - began, 2), **found)


if __name__ == "__main__":
    main()
