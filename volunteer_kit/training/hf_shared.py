"""What all peers of a fine-tune have to share for their gradients to fit, and one fingerprint of it."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from typing import Any

import torch

from volunteer_kit.swarm.codecs.registry import identity_of
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.options import SwarmOptions
from volunteer_kit.training.hf_optimizer import parameters_of, require_travelling_state

LAYERWISE = "LayerWiseDummyOptimizer"  # what transformers shows of galore_*_layerwise
IN_BACKWARD = {LAYERWISE, "Lomo", "AdaLomo"}


def require_sharable(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    """Raises SwarmError where there is nothing to average, or where each peer would go its own way."""
    name, why = type(optimizer).__name__, None
    if name in IN_BACKWARD:  # of the parameters that it shows none is the model's
        why = "steps while gradients are computed, and keeps none that could be averaged"
        if name == LAYERWISE:
            name = 'of a layerwise kind (optim="..._layerwise")'
    elif callable(getattr(optimizer, "eval", None)):
        why = "keeps two models, one to train and one to evaluate, and the swarm has one"
    if why is not None:
        raise SwarmError(f"The optimizer {name} {why}.\n1. Choose another, such as adamw_torch.", kind="bad_config")
    if not any(parameter.requires_grad for parameter in parameters_of(optimizer)):
        raise SwarmError(
            "The model has no parameters to train: there is nothing to average.\n"
            "1. With PEFT, call get_peft_model before the trainer is made.\n"
            "2. Else set requires_grad_(True) on what is to be trained.",
            kind="bad_config",
        )
    require_travelling_state(optimizer)
    if "metrics" in inspect.signature(scheduler.step).parameters:  # reduce_lr_on_plateau, greedy
        raise SwarmError(
            f"The schedule {type(scheduler).__name__} goes by each peer's own evaluation: their learning rates "
            "would differ, and so would their models.\n1. Choose another lr_scheduler_type.",
            kind="bad_config",
        )


def fingerprint_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: SwarmOptions,
    *,
    schedule: str,
    max_steps: int,
    max_grad_norm: float | None,
    buffers: Sequence[tuple[str, Sequence[int]]] = (),
    max_staleness: int,
) -> str:
    """32 hex digits of parameters (names and shapes of what is trained), optimizer, schedule and averaging.

    :param schedule: lr_scheduler_type; one that is not constant depends on `max_steps`, in the swarm's steps
    :param buffers: names and shapes of those that are averaged
    :param max_staleness: epochs that a gradient may be late
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shared = {
        "parameters": [(names.get(id(p), ""), list(p.shape)) for p in parameters_of(optimizer) if p.requires_grad],
        "optimizer": type(optimizer).__name__,
        "settings": [_plain(group) for group in optimizer.param_groups],
        "schedule": [schedule, 0 if schedule.startswith("constant") else max_steps],
        "max_grad_norm": max_grad_norm or 0,
        "target_batch_size": options.target_batch_size,
        "codec": identity_of(options.grad_codec),
        "buffers": list(buffers),
        "delay": [options.delay_optimizer_step, options.delay_grad_averaging],
        "max_staleness": max_staleness,
    }
    if options.grad_rank is not None:
        shared["rank"] = options.grad_rank
    text = json.dumps(shared, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """What of a parameter group's settings has to be equal; the learning rate as it was at first."""
    return {
        name: group.get("initial_lr", value) if name == "lr" else value
        for name, value in group.items()
        if name not in ("params", "initial_lr", "foreach", "fused", "capturable", "differentiable")
    }
