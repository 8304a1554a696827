"""A peer whose rounds are traced: the kit's Peer, optimizer and Trainer over the run's model, whose gradients are made
up, so that neither the model nor its data are among the functions that run.

stdin: settings, one line of JSON, then "go"; its end is "leave". stdout: one JSON event a line: "connected", "ready",
and "step" (each global step, with the number of its window). Settings: run (as load_run takes it), address,
initial_peers, batch (samples of a microbatch), seconds (of one), folder (the peer's own files).
"""

from __future__ import annotations

import json
import os
import time
import traceback
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.home_parts import kit
from benchmarks.home_parts.device import Words
from benchmarks.round_trace_parts.tracer import FOLDER, open_window
from tests.orders import say
from volunteer_kit.runs import build_model, load_run
from volunteer_kit.session.options import compute_loss
from volunteer_kit.training.trainer import Callback, Trainer
from volunteer_kit.worker import own_stdin


class Microbatch(NamedTuple):
    """As the Trainer takes it."""

    text: Tensor  # (B, 1); a row for each sample
    names: tuple[int, ...]


class Device:
    """Trainer's `next_batch` and `compute_gradients`. The first backward pass behind a step opens the next window.

    :param seconds: of a microbatch
    """

    def __init__(self, model: torch.nn.Module, batch: int, seconds: float):
        self._batch, self._seconds, self._made = batch, seconds, 0
        self._gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
        self._window = open_window(os.environ[FOLDER])
        self.number = 0  # of the newest window

    def next_batch(self, _: int) -> Microbatch:
        first = self._made * self._batch
        self._made += 1
        return Microbatch(torch.zeros(self._batch, 1), tuple(range(first, first + self._batch)))

    def __call__(self, model: torch.nn.Module, _: Microbatch, scale: float = 1.0) -> Tensor:
        for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient * scale
        time.sleep(self._seconds)
        if not self._window[0]:
            self.number += 1
            self._window[0] = self.number
        return torch.tensor(1.0)

    def close_window(self) -> None:
        """A step is taken."""
        self._window[0] = 0


class TellSteps(Callback):
    """Closes the window, and says of which step it was."""

    def __init__(self, device: Device):
        self.device = device

    def on_epoch(self, trainer: Trainer, report, loss: float | None) -> None:
        self.device.close_window()
        say(
            "step", epoch=report.epoch, window=self.device.number, samples=report.samples,
            group_size=report.group_size, received=report.received,
        )  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    stdin = own_stdin()
    line = b""
    while not line.endswith(b"\n"):
        line += stdin.readline()
    settings = json.loads(line)
    words = Words(stdin)
    run = load_run(settings["run"])
    model = build_model(run)
    peer, optimizer = kit.build(settings, run, model)
    optimizer.join(patience=run.swarm.load_state_timeout)
    say("ready", epoch=optimizer.local_epoch)
    words.go.wait()
    device = Device(model, settings["batch"], settings["seconds"])
    trainer = Trainer(
        model, optimizer, device.next_batch, compute_loss,
        batch_size=settings["batch"], callbacks=[TellSteps(device)], compute_gradients=device,
    )  # fmt: skip
    trainer.train(words.leave.is_set)
    optimizer.shutdown()
    peer.shutdown()


if __name__ == "__main__":
    try:
        main()
    except BaseException:  # hivemind's threads and processes would keep this one alive for ever
        traceback.print_exc()
        os._exit(1)
