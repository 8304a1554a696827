"""The same training by a plain Trainer and by one that is alone in a swarm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.trainer_parts.material import Sentences, pad, tiny_llama
from volunteer_kit.training.hf_trainer import SwarmCallback, SwarmTrainer, SwarmTrainingArguments

ARGUMENTS = {
    "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": [],
    "use_cpu": True, "disable_tqdm": True,
}  # fmt: skip
HERE = {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
# what a Trainer logs that has to be as a plain one's; train_loss is of one train(), wherever it began
LOGGED = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "total_flos")


def make(
    folder: Path,
    target: int | None = None,
    *,
    model: Callable[[], torch.nn.Module] = tiny_llama,
    rows: int = 96,
    kind: type[Trainer] | None = None,
    optimizers: Callable[[torch.nn.Module], tuple] | None = None,
    callbacks: Iterable[TrainerCallback] = (),
    dht: dict[str, Any] | None = None,
    opt: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trainer:
    """:param target: target_batch_size; None: a plain Trainer
    :param kind: a class of one's own; in a swarm it gets the callback
    :param more: for the Trainer; `arguments`: for its arguments
    """
    folder.mkdir(exist_ok=True)
    made = model()
    more = {"train_dataset": Sentences(range(rows)), "data_collator": pad, "callbacks": [*callbacks], **(more or {})}
    if optimizers is not None:
        more["optimizers"] = optimizers(made)
    arguments = {**ARGUMENTS, **arguments}
    if target is None:
        return (kind or Trainer)(model=made, args=TrainingArguments(str(folder), **arguments), **more)
    config = {
        "dht": {**HERE, **(dht or {})},
        "opt": {"run_id": "ours", "target_batch_size": target, "matchmaking_time": 2.0, **(opt or {})},
    }
    if kind is None:
        args = SwarmTrainingArguments(str(folder), hivemind_config=config, **arguments)
        return SwarmTrainer(model=made, args=args, **more)
    trainer = kind(model=made, args=TrainingArguments(str(folder), **arguments), **more)
    trainer.add_callback(SwarmCallback(trainer, config))
    return trainer


def both(folder: Path, target: int, **settings: Any) -> tuple[Trainer, Trainer]:
    """A plain one and one in a swarm of its own; `callbacks` and `more` are made for each."""
    made = []
    for name, goal in (("plain", None), ("swarm", target)):
        own = {key: settings[key]() for key in ("callbacks", "more") if key in settings}
        made.append(make(folder / name, goal, **{**settings, **own}))
    return tuple(made)


def callback_of(trainer: Trainer) -> SwarmCallback:
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, SwarmCallback))


def differing(one: Trainer, other: Trainer) -> list[str]:
    """Names of parameters and buffers that are not equal to the last bit."""
    ours, theirs = (
        dict([*trainer.model.named_parameters(), *trainer.model.named_buffers()]) for trainer in (one, other)
    )
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def logged(trainer: Trainer, *names: str) -> list[dict[str, Any]]:
    """Of each entry what is named, else all that has to be as a plain Trainer's."""
    found = [
        {name: rounded(name, entry[name]) for name in names or LOGGED if name in entry}
        for entry in trainer.state.log_history
    ]
    return [entry for entry in found if entry]


def rounded(name: str, value: Any) -> Any:
    """A plain Trainer of transformers 4 logs its loss with four digits; one in a swarm as it is."""
    return round(value, 4) if name == "loss" and transformers.__version__.startswith("4.") else value


def saved(trainer: Trainer) -> list[str]:
    return sorted(name for name in os.listdir(trainer.args.output_dir) if name.startswith("checkpoint-"))


class At(TrainerCallback):
    """Does something when the run has come to a step."""

    def __init__(self, step: int, act: Callable[..., None]):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            self.act(control)
