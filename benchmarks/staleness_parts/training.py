"""One training of an emulated swarm: a plan's gradients, on the parameters of their epoch, and the kit's own steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from benchmarks.budget_parts.group import Group
from benchmarks.staleness_parts.lateness import WORKERS, Part, Plan, Rule, draw_ages, draw_workers, make_plan
from benchmarks.staleness_parts.samples import EMOJI, Data, Samples, open_run
from volunteer_kit.runs import RunConfig, build_model, build_optimizer, build_param_groups
from volunteer_kit.swarm.codecs.registry import make_codec

# The kit advises a first beta of 0.5 with `sparse`: what comes late acts as a momentum (run_sections.py, grad_density).
CODECS: dict[str, dict[str, Any]] = {
    "dense": {"swarm": {"grad_compression": "none", "small_compression": "none"}},
    "sparse": {
        "swarm": {"grad_compression": "sparse", "small_compression": "sparse"},
        "optimizer": {"betas": [0.5, 0.96]},
    },
}
LOOKS, LOOKS_AT = 8, 1 / 8  # held-out losses are taken at so many places of the last eighth of the computed samples

UNITS: Final = 2520  # of a sample's weight: a node counts whole samples, and a discount is 1/1 to 1/9 of one


class Size(NamedTuple):
    """How long a training is."""

    target_batch_size: int  # samples
    epochs: int  # of the swarm in which nothing is late; every other swarm computes as many samples


class Setting(NamedTuple):
    """The settings of one training, beside its rule."""

    data: str  # "scenes" or "emoji"
    codec: str  # of CODECS
    rate: float  # of the run file's learning rate
    seed: int


class Outcome(NamedTuple):
    """How one training ended."""

    loss: float  # held out
    epochs: int
    late: float  # share of the contributed weight that came late
    seconds: float  # of a core, so that a busy machine does not lengthen it


class Contribution:
    """The weighted gradients that one worker brings to one step: late parts and fresh ones."""

    def __init__(self) -> None:
        self.weight = 0.0  # samples times their discount
        self._sum: list[torch.Tensor] = []

    def add(self, gradients: Sequence[torch.Tensor], weight: float) -> None:
        """Add a mean gradient. `weight`: its samples times their discount, for the sum and for the total alike."""
        if not self._sum:
            self._sum = [torch.zeros_like(gradient) for gradient in gradients]
        torch._foreach_add_(self._sum, list(gradients), alpha=weight)
        self.weight += weight

    def mean(self) -> list[torch.Tensor]:
        """The weighted mean, which a round takes together with `weight`."""
        return torch._foreach_div(self._sum, self.weight)


class Swarm:
    """The model that all workers share, its optimizer, and the rounds of averaging.

    Without a lossy codec the mean over workers is the mean over samples, so one worker stands for all of them.
    """

    def __init__(self, run: RunConfig):
        self.model = build_model(run)
        groups = build_param_groups(run, self.model)
        self.params = [param for group in groups for param in group["params"]]
        make_optimizer, make_schedule = build_optimizer(run)
        self.optimizer = make_optimizer(groups)
        self.schedule = make_schedule(self.optimizer)
        self.group: Group | None = None
        if run.swarm.grad_compression == "sparse":
            swarm = run.swarm
            codec = make_codec(
                swarm.small_compression, swarm.grad_compression, swarm.compress_above, swarm.grad_density
            )
            self.group = Group(WORKERS, [param.shape for param in self.params], codec)

    def gradients(self, samples: Samples) -> list[torch.Tensor]:
        """The mean gradient of some samples on the parameters of now, in the order of `params`."""
        loss = self.model(*samples).loss
        return list(torch.autograd.grad(loss, self.params))

    def place(self, worker: int) -> int:
        """The contribution that a worker's gradients go into."""
        return 0 if self.group is None else worker

    def step(self, contributions: Mapping[int, Contribution]) -> None:
        """Average what came, by weight, and make the optimizer's step; an epoch of no weight moves the schedule only.

        Sparse: a worker's discounted mean and its discounted weight are what the kit's error feedback is given. So the
        discount comes before the residual, which is kept in units of value times weight (rounds/error_feedback.py).
        """
        brought = {worker: one for worker, one in contributions.items() if one.weight > 0}
        if brought:
            averages = self._average(brought)
            for param, average in zip(self.params, averages, strict=True):
                param.grad = average
            self.optimizer.step()
        else:
            self.optimizer._opt_called = True  # the schedule would warn that it moves before the optimizer
        self.schedule.step()

    def _average(self, brought: Mapping[int, Contribution]) -> list[torch.Tensor]:
        if self.group is None:
            return brought[0].mean()
        weights = [round(UNITS * brought[worker].weight) if worker in brought else 0 for worker in range(WORKERS)]
        sums = [
            weight * torch.cat([value.flatten() for value in brought[worker].mean()]) if weight else torch.empty(0)
            for worker, weight in enumerate(weights)
        ]
        average = self.group.average(sums, weights)  # (elements,)
        sizes = [param.numel() for param in self.params]
        return [part.view_as(param) for part, param in zip(average.split(sizes), self.params, strict=True)]

    @torch.no_grad()
    def loss(self, samples: Samples) -> float:
        """The mean loss of some samples."""
        parts = torch.arange(len(samples.text)).split(128)
        return sum(self.model(*samples.take(part)).loss.item() * len(part) for part in parts) / len(samples.text)


def order_rows(rows: int, samples: int, seed: int) -> torch.Tensor:
    """The row of the training set that each computed sample is, (samples,): every row once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-samples // rows)
    return torch.cat([torch.randperm(rows, generator=generator) for _ in range(rounds)])[:samples]


def follow(plan: Plan, swarm: Swarm, train: Samples, rows: torch.Tensor, held_out: Samples) -> tuple[float, float]:
    """Train as a plan says. -> (held-out loss, share of the weight that came late).

    A part's gradient is taken in the epoch in which it is computed, so on that epoch's parameters, and is kept until
    its step.
    """
    pending: dict[int, dict[int, Contribution]] = defaultdict(lambda: defaultdict(Contribution))
    looks = [len(rows) * (1 - LOOKS_AT * i / LOOKS) for i in range(LOOKS)]
    ends = [*plan.computed[1:], float("inf")]
    losses, late, total = [], 0.0, 0.0
    for epoch in range(plan.epochs):
        for (place, enters_at, weight), samples in _together(plan.parts[epoch], swarm).items():
            if enters_at < plan.epochs:
                gradients = swarm.gradients(train.take(rows[samples]))
                pending[enters_at][place].add(gradients, weight * len(samples))
                late += weight * len(samples) * (enters_at > epoch)
                total += weight * len(samples)
        swarm.step(pending.pop(epoch, {}))
        if looks_now := sum(plan.computed[epoch] <= look < ends[epoch] for look in looks):
            losses += [swarm.loss(held_out)] * looks_now
    return sum(losses) / len(losses), late / total


def _together(parts: Sequence[Part], swarm: Swarm) -> dict[tuple[int, int, float], list[int]]:
    """Samples that enter one contribution with one weight, by (contribution, epoch, weight)."""
    found: dict[tuple[int, int, float], list[int]] = defaultdict(list)
    for part in parts:
        found[swarm.place(part.worker), part.enters_at, part.weight] += part.samples
    return found


def train(setting: Setting, rule: Rule, size: Size, data: Data, emoji: Path = EMOJI) -> Outcome:
    """One training from its beginning. Equal settings have equal weights, sample order and late contributions."""
    began = time.process_time()
    run = open_run(setting.data, emoji, seed=setting.seed, **CODECS[setting.codec])
    run = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"lr": run.optimizer.lr * setting.rate})})
    samples = size.target_batch_size * size.epochs
    workers = draw_workers(samples, setting.seed)
    ages = draw_ages(workers, size.target_batch_size, rule.ages, setting.seed)
    plan = make_plan(rule, workers, ages, size.target_batch_size)
    rows = order_rows(len(data.train.text), samples, setting.seed)
    loss, late = follow(plan, Swarm(run), data.train, rows, data.held_out)
    return Outcome(loss, plan.epochs, late, time.process_time() - began)
