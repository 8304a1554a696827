"""A trainer of a real small model whose swarm is a stand-in in this process."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.trainer import Callback, Trainer


class AloneOptimizer:
    """The attributes of NodeOptimizer that the trainer and callbacks use, with plain SGD and a swarm of one."""

    def __init__(self, parameters, target: int = 16, lr: float = 0.1):
        self.parameters, self.target, self.lr = list(parameters), target, lr
        self.num_parameters = len(self.parameters)
        self.local_epoch, self.samples = 0, 0
        self.reports: deque[StepReport] = deque()
        self.story: list = []
        self.statistic = torch.zeros(3)
        self.only_accumulated = True

    def zero_grad(self) -> None:
        self.story.append("zero_grad")
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, batch_size: int, grad_scale: float = 1.0, names=()) -> bool:
        assert len(names) == batch_size
        self.story.append(("step", batch_size, grad_scale))
        grads = [parameter.grad / grad_scale for parameter in self.parameters]
        if not all(torch.isfinite(grad).all() for grad in grads):
            return False
        self.samples += batch_size
        self.only_accumulated = self.samples < self.target
        with torch.no_grad():
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.sub_(self.lr * grad)
        if self.samples >= self.target:
            self.local_epoch += 1
            self.reports.append(StepReport(self.local_epoch, self.samples, 3, 1.0, 0.5, 100, 200))
            self.samples = 0
        return True

    def training_state(self) -> list[torch.Tensor]:
        return [*(parameter.detach() for parameter in self.parameters), self.statistic]

    def named_state(self, names):
        tensors = dict(zip([*names, "optimizer/weight/m"], self.training_state(), strict=True))
        return {name: tensor.clone() for name, tensor in tensors.items()}, {"epoch": self.local_epoch, "numbers": []}


@dataclass
class Samples:
    text: torch.Tensor  # (B, 4); a microbatch is anything that has texts and their names
    y: torch.Tensor  # (B, 2)

    @property
    def names(self) -> range:
        return range(len(self.text))


TRUTH = torch.arange(8.0).reshape(4, 2) / 8


def make_stream(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def next_batch(size: int) -> Samples:
        x = torch.randn(size, 4, generator=generator)
        return Samples(x, x @ TRUTH)

    return next_batch


def squared_error(model, batch: Samples) -> torch.Tensor:
    return (model(batch.text) - batch.y).pow(2).mean()


class Witness(Callback):
    def __init__(self, story: list | None = None):
        self.story = [] if story is None else story

    def on_microbatch(self, trainer, loss, samples):
        self.story.append(("microbatch", samples))

    def on_epoch(self, trainer, report, loss):
        self.story.append(("epoch", report.epoch, loss))


def make_trainer(compute_loss=squared_error, *, callbacks=(), batch_size=8, target=16, precision="fp32", **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2, bias=False)
    optimizer = AloneOptimizer(model.parameters(), target)
    trainer = Trainer(
        model,
        optimizer,
        make_stream(),
        compute_loss,
        batch_size=batch_size,
        precision=precision,
        callbacks=callbacks,
        **options,
    )
    return trainer, optimizer


def until(trainer: Trainer, epochs: int):
    return lambda: trainer.epoch >= epochs


def hungry(limit: int, in_backward: bool = False):
    """A device that bears `limit` samples."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss, size):
            ctx.size = size
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.size > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return grad, None

    def compute_loss(model, batch):
        if in_backward:
            return Backward.apply(squared_error(model, batch), len(batch.text))
        if len(batch.text) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squared_error(model, batch)

    return compute_loss
