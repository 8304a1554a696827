"""A peer of the Trainer's benchmark: settings as JSON on the first line of stdin, then events as JSON on stdout.

{"event": "invitation", "maddrs": [...]}, {"event": "step", ...} after each of the swarm's, {"event": "done", ...} when
train() has returned; its model is then in the file `out`, as safetensors. {"event": "epoch", ...} when the Trainer has
come to the swarm's next step: the seconds between its microbatches since the last.
"""

from __future__ import annotations

import ast
import builtins
import json
import sys
import time
from dataclasses import replace

import torch
from safetensors.torch import save_file

from benchmarks.trainer_parts.material import Sentences, pad, row_of, tiny_llama, with_adapters
from volunteer_kit.training.hf_trainer import SwarmCallback, SwarmTrainer, SwarmTrainingArguments


def say(event: str, **fields) -> None:
    plain(json.dumps({"event": event, **fields}), flush=True)


plain = builtins.print


class Telling(SwarmCallback):
    """Tells each step with the rows that were in it."""

    pause = 0.0  # s that a microbatch takes at least, as on a device of that speed

    def names_of(self, batch):
        return [row_of(words) for words in batch["input_ids"]]

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        self._epoch, self._ended, self._gaps = self.member.epoch, None, []

    def on_step_begin(self, args, state, control, **kwargs):
        self._began = time.monotonic()
        if self._ended is not None:
            self._gaps.append(self._began - self._ended)
        if self.member.epoch > self._epoch:
            self._epoch = self.member.epoch
            say("epoch", epoch=self._epoch, gaps=self._gaps)
            self._gaps = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        time.sleep(max(0.0, self._began + self.pause - time.monotonic()))
        self._ended = time.monotonic()

    def on_report(self, report):
        say(
            "step", epoch=report.epoch, rows=list(report.names), group_size=report.group_size, received=report.received,
            seconds=report.seconds, sent=report.bytes_sent, cause=report.cause,
        )  # fmt: skip


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    first, count = settings["rows"]

    def printed(*words, **kwargs):
        for word in words:
            if "initial_peers = " in str(word):
                say("invitation", maddrs=ast.literal_eval(str(word).split(" = ", 1)[1]))
        plain(*words, **kwargs)

    builtins.print = printed
    torch.set_num_threads(1)
    model = tiny_llama(**settings.get("model", {}))
    if "rank" in settings:
        model = with_adapters(model, settings["rank"])
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = SwarmTrainingArguments(settings["out"] + ".d", **{**quiet, **settings["arguments"]})
    trainer = SwarmTrainer(
        model=model, args=arguments, train_dataset=Sentences(range(first, first + count)), data_collator=pad
    )
    telling = Telling(trainer, {"dht": settings["dht"], "opt": settings["opt"]})
    telling.pause = settings.get("pause", 0.0)
    options = replace(telling.config.options, **settings.get("options", {}))
    telling.config = replace(telling.config, options=options)
    trainer.add_callback(telling)
    began = time.monotonic()
    trainer.train(resume_from_checkpoint=settings.get("resume"))
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, settings["out"])
    say("done", seconds=time.monotonic() - began, steps=trainer.state.global_step, log=trainer.state.log_history)


if __name__ == "__main__":
    main()
