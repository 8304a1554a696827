"""One member of a fine-tune from a run file: settings as JSON in argv, events as JSON on stdout."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial

import torch
from safetensors.torch import save_file

from benchmarks.trainer_parts.material import Sentences, pad
from volunteer_kit.auth.identity import LoginError
from volunteer_kit.finetune import swarm_trainer
from volunteer_kit.training.hf_trainer import SwarmCallback, TrainingArguments


def say(event: str, **fields) -> None:
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def move(buffer: torch.Tensor, amount: float, model: torch.nn.Module, inputs) -> None:
    if model.training:
        buffer.add_(amount)


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    SwarmCallback.on_report = lambda self, report: say(
        "step", epoch=report.epoch, group_size=report.group_size, samples=report.samples, cause=report.cause
    )
    trainer = swarm_trainer(
        settings["run"],
        train_dataset=Sentences(range(settings["first"], settings["first"] + 400)),
        args=TrainingArguments(
            settings["out"], per_device_train_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="no", logging_steps=5, max_steps=settings["max_steps"],
        ),
        data_collator=pad,
        dht={"initial_peers": settings["initial_peers"], "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]},
        name=settings["name"],
        hf_token=settings.get("hf_token"),
    )  # fmt: skip
    callback = next(one for one in trainer.callback_handler.callbacks if isinstance(one, SwarmCallback))
    callback.config = replace(callback.config, wait_for_peers=settings.get("wait_for", 1))
    for name, amount in settings.get("moves", {}).items():  # as a BatchNorm moves its own in each batch
        trainer.model.register_forward_pre_hook(partial(move, trainer.model.get_buffer(name), amount))
    try:
        trainer.train()
    except LoginError as error:
        say("refused", why=str(error))
        return
    trained = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trained |= {name: b.clone() for name, b in trainer.model.named_buffers() if name in trainer.model.state_dict()}
    save_file(trained, settings["out"] + "/trained.safetensors")
    say("done", step=trainer.state.global_step, log=trainer.state.log_history)


if __name__ == "__main__":
    main()
