"""A device of a chosen speed: one small real backward pass, and a pause until a device of that speed would be done.

A microbatch counts as `batch` samples and takes batch / speed seconds. Its gradient is that of `real` samples, computed
anew every `real_every` microbatches and used again in between, so that two cores carry eight to sixteen workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.home_parts.material import Pool
from tests.orders import say

BEAT = 1.0  # s between two "beat" events
SCHEDSTAT = "/proc/thread-self/schedstat"  # ns on a core, ns ready to run while the cores were others', ...


class Microbatch(NamedTuple):
    """`text` has a row for each sample that it counts for; all name the same few real ones."""

    text: Tensor  # int64 (B, T)
    codes: Tensor  # int64 (real, I)
    names: tuple[int, ...]


class Clock:
    """Where the seconds of this thread have gone since start(): computing as long as the device would, contention, and
    between two microbatches.

    Contention is time that this machine's cores gave to others: what a microbatch took longer than the device would
    have, and, between microbatches, what this thread stood ready to run and did not. `between` is the rest of that:
    rounds, downloads, outages, and what the optimizer itself computes, which is `own_work` of it.
    """

    def __init__(self) -> None:
        self.computed = self.contention = self.between = self.own_work = 0.0  # s
        self.made = 0  # samples
        self.start()

    def start(self) -> None:
        self._mark, self._cpu, self._ready = time.monotonic(), time.thread_time(), ready_to_run()

    def begin_compute(self) -> float:
        now, cpu, ready = time.monotonic(), time.thread_time(), ready_to_run()
        waited_for_core = min(ready - self._ready, now - self._mark)
        self.contention += waited_for_core
        self.between += now - self._mark - waited_for_core
        self.own_work += cpu - self._cpu
        return now

    def end_compute(self, began: float, planned: float, samples: int) -> None:
        self.start()
        self.computed += planned
        self.contention += max(0.0, self._mark - began - planned)
        self.made += samples

    def read(self) -> dict[str, float]:
        names = ("computed", "contention", "between", "own_work", "made")
        return {name: round(getattr(self, name), 4) for name in names}


def ready_to_run() -> float:
    """s that this thread has stood ready to run while the cores were others'."""
    return int(Path(SCHEDSTAT).read_text().split()[1]) * 1e-9


class Device:
    """Trainer's `next_batch` and `compute_gradients`.

    :param speed: samples/s
    :param batch: samples of a microbatch
    """

    def __init__(self, pool: Pool, speed: float, batch: int, real: int, real_every: int, seed: int):
        self.speed, self.batch, self.real, self.real_every = speed, batch, real, real_every
        self.clock = Clock()
        self._pool, self._made = pool, 0
        self._order = torch.Generator().manual_seed(seed)
        self._gradients: list[Tensor | None] = []
        self._loss = torch.tensor(float("nan"))
        self._losses: list[float] = []
        self._told_at = 0.0
        self.also: Callable[[], dict[str, Any]] = dict  # what a "beat" says beside

    def next_batch(self, _: int = 0) -> Microbatch:
        rows = torch.randint(len(self._pool.text), (self.real,), generator=self._order)
        text = self._pool.text[rows].repeat_interleave(-(-self.batch // self.real), dim=0)[: self.batch]  # (B, T)
        first = self._made * self.batch
        return Microbatch(text, self._pool.codes[rows], tuple(range(first, first + self.batch)))

    def __call__(self, model: torch.nn.Module, microbatch: Microbatch, scale: float = 1.0) -> Tensor:
        began, planned = self.clock.begin_compute(), self.batch / self.speed
        parameters = list(model.parameters())
        if self._made % self.real_every == 0:
            step = -(-self.batch // self.real)
            self._loss = model(microbatch.text[::step], microbatch.codes).loss
            (self._loss * scale).backward()
            self._gradients = [p.grad for p in parameters]
            self._losses.append(self._loss.item())
        else:
            for parameter, gradient in zip(parameters, self._gradients, strict=True):
                parameter.grad = gradient
        self._made += 1
        time.sleep(max(0.0, began + planned - time.monotonic()))
        self.clock.end_compute(began, planned, self.batch)
        self.beat()
        return self._loss.detach()

    def beat(self) -> None:
        now = time.monotonic()
        if now - self._told_at >= BEAT:
            self._told_at = now
            say("beat", at=now, losses=self._losses, **self.clock.read(), **on_the_wire(), **self.also())
            self._losses = []


def on_the_wire() -> dict[str, int]:
    """Bytes and packets that this machine's line has carried, headers included."""
    for row in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = row.partition(":")
        if name.strip() == "line":
            counted = [int(value) for value in counters.split()]
            return {
                "wire_sent": counted[8], "wire_received": counted[0],
                "packets_sent": counted[9], "packets_received": counted[1],
            }  # fmt: skip
    return {}


class Words:
    """Words that come to a worker: "go", then "leave"; the end of stdin is "leave"."""

    def __init__(self, stdin) -> None:
        self.go, self.leave = threading.Event(), threading.Event()
        threading.Thread(target=self._read, args=(stdin,), daemon=True).start()

    def _read(self, stdin) -> None:
        for line in stdin:
            if line.strip() != b"go":
                break
            self.go.set()
        self.leave.set()
        self.go.set()
