"""A real model on a real device under the kit's own Trainer: what the tuner settles on, beside all that it could."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch

from volunteer_kit.device import Device, Setting, Workload, largest_batch, memory_meter, plan_device, tuner_for
from volunteer_kit.device.measurements import HEADROOM, PATIENCE, Bounds
from volunteer_kit.device.plan import MICROBATCH_SECONDS
from volunteer_kit.model.dalle import Dalle, DalleConfig
from volunteer_kit.training.trainer import Trainer
from volunteer_kit.training.tuning import Halving, Tuning


class Microbatch(NamedTuple):
    text: torch.Tensor  # (B, T)
    codes: torch.Tensor  # (B, N)
    names: range


class Accumulates:
    """What a swarm's optimizer does with a microbatch: look whether it is finite, and add it. There are no global
    steps: those are not timed by the tuner either."""

    local_epoch = 0
    only_accumulated = True

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self._parameters = list(parameters)
        self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        self.reports: deque = deque()

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, batch_size: int, grad_scale: float, names: object) -> bool:
        grads = [parameter.grad for parameter in self._parameters]
        if not torch.isfinite(torch.stack(torch._foreach_norm(grads))).all():
            return False
        torch._foreach_add_(self._sums, grads, alpha=batch_size / grad_scale)
        return True


def stream(config: DalleConfig, seed: int = 0):
    """Captions of five to all words, and codes, made ready before they are asked for."""
    generator, pool = torch.Generator().manual_seed(seed), 512
    text = torch.randint(1, config.num_text_tokens, (pool, config.text_seq_len), generator=generator)
    lengths = torch.randint(5, config.text_seq_len + 1, (pool, 1), generator=generator)
    text[torch.arange(config.text_seq_len)[None] >= lengths] = 0
    codes = torch.randint(config.num_image_tokens, (pool, config.image_seq_len), generator=generator)
    at = itertools.count()

    def next_batch(size: int) -> Microbatch:
        rows = (torch.arange(size) + next(at) * size) % pool
        return Microbatch(text[rows], codes[rows], range(size))

    return next_batch


def compute_loss(model: torch.nn.Module, batch: Microbatch) -> torch.Tensor:
    device = next(model.parameters()).device
    return model(batch.text.to(device), batch.codes.to(device)).loss


def workload_of(model: Dalle) -> Workload:
    c = model.config
    logits = c.text_seq_len * (c.num_text_tokens + c.text_seq_len) + c.image_seq_len * c.num_image_tokens
    tokens = c.text_seq_len + c.image_seq_len
    return Workload(model.num_parameters(), tokens, c.dim, c.depth, logits, c.reversible)


class Bench:
    """One model on one device."""

    def __init__(self, config: DalleConfig, device: Device, target_batch_size: int):
        torch.manual_seed(0)
        self.model, self.device, self.target = Dalle(config), device, target_batch_size
        # one thread: two of them, on cores that they share with others, wait for each other most of the time
        peers = device.cores if device.kind == "cpu" else 1
        workload = workload_of(self.model)
        self.plan = plan_device(device, workload, target_batch_size=target_batch_size, peers_on_machine=peers)
        torch.set_num_threads(self.plan.threads)
        self.model.to(self.plan.devices[0])
        self.optimizer = Accumulates(self.model.parameters())
        self.stream, self.memory = stream(config), memory_meter(self.plan.devices)

    def trainer(self, tuning: Tuning) -> Trainer:
        return Trainer(
            self.model, self.optimizer, self.stream, compute_loss,
            batch_size=self.plan.batch_size, precision=self.plan.precision, tuning=tuning,
        )  # fmt: skip

    def tune(self) -> tuple[Setting, float, int, str]:
        """(what the tuner settled on, s until then, out-of-memory errors, why)"""
        workload = workload_of(self.model)
        tuner = tuner_for(self.device, self.plan, workload, self.memory, target_batch_size=self.target)
        trainer, started = self.trainer(Tuning(tuner, self.memory)), time.perf_counter()
        trainer.train(lambda: tuner.settled)
        return tuner.next(), time.perf_counter() - started, tuner.ooms, tuner.why

    def run(self, setting: Setting, times: int) -> list[float]:
        """Seconds of so many microbatches of one setting, after one that warms up; [] if memory does not suffice."""
        tuning, seconds = Tuning(Halving(*setting)), []
        trainer = self.trainer(tuning)
        tuning.measured = lambda samples, taken: seconds.append(taken)  # what the tuner would have been told
        self.memory.begin()
        trainer.train(lambda: len(seconds) > times or trainer.microbatches_too_large > 0)
        return seconds[1:] if not trainer.microbatches_too_large else []

    def exhaustive(self, rounds: int) -> dict[Setting, float]:
        """Samples a second of every setting that is allowed, each run once in every round."""
        bounds = Bounds(largest_batch(self.target), MICROBATCH_SECONDS)
        sizes = sorted({bounds.rounded(size) for size in range(1, bounds.largest + 1)})
        if self.model.config.dim >= 256:  # each takes long: of every four one, or this would take hours
            sizes = [size for size in sizes if size % 2 ** max(0, size.bit_length() - 3) == 0]
        times: dict[Setting, list[float]] = {}
        for mode in (False, True):
            for size in sizes:
                seconds = self.run(Setting(size, mode), 3)
                is_full = self.memory.peak_bytes() > (1 - HEADROOM) * self.memory.limit_bytes()
                if not seconds or is_full or (size > 1 and min(seconds) > PATIENCE * MICROBATCH_SECONDS):
                    break  # larger ones all the more
                times[Setting(size, mode)] = seconds
        for setting in [s for _ in range(rounds - 1) for s in times]:
            times[setting] += self.run(setting, 3)
        return {s: s.batch_size / statistics.median(seconds) for s, seconds in times.items()}

    def best_of(self, speeds: dict[Setting, float], rounds: int) -> Setting:
        """The fastest, after a second look at the first few: of many that were measured one is always lucky."""
        first = sorted(speeds, key=speeds.get, reverse=True)[:4]
        times: dict[Setting, list[float]] = {s: [] for s in first}
        for setting in first * rounds:
            times[setting] += self.run(setting, 3)
        return max(first, key=lambda s: s.batch_size / statistics.median(times[s]))

    def gap(self, chosen: Setting, best: Setting, rounds: int) -> float:
        """The share of the best speed that is missed: median over rounds in which both run, one after the other."""
        if chosen == best:
            return 0.0
        gaps = []
        for number in range(rounds):
            pair = (chosen, best) if number % 2 else (best, chosen)  # the second meets what the first has left
            speeds = {s: s.batch_size / statistics.median(self.run(s, 3)) for s in pair}
            gaps.append(1 - speeds[chosen] / speeds[best])
        return max(0.0, statistics.median(gaps))

    def close(self) -> None:
        del self.model, self.optimizer
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
