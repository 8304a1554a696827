"""A device made of numbers: what a microbatch costs in time and memory, with noise, until there is none left."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from volunteer_kit.device import MICROBATCH_SECONDS, Setting, Tuner
from volunteer_kit.device.measurements import HEADROOM

GB = 1e9


class Killed(BaseException):
    """What happens to a process that takes more RAM than there is; nobody can catch it."""


@dataclass
class CostDevice:
    """seconds = overhead + samples * a_sample, more beyond a knee; bytes = idle + fixed + samples * sample_bytes.

    Recomputing costs a third more time and leaves `kept` of a sample's bytes.
    """

    name: str
    overhead: float  # s a microbatch
    a_sample: float  # s
    total: float  # bytes
    sample_bytes: float
    start: Setting
    idle: float = 0.5 * GB
    fixed: float = 0.1 * GB
    kept: float = 0.15
    recompute: float = 1.33
    knee: int = 10**6  # samples, beyond which each costs `slower` times as much (a cache that is full)
    slower: float = 1.5
    noise: float = 0.03  # relative, of one microbatch
    spikes: float = 0.02  # how many microbatches take three times as long
    drift: float = 0.0  # relative; slow waves, as from a neighbour that comes and goes
    estimate_off: float = 1.0  # times the truth
    largest: int = 512
    is_host: bool = False  # no exception: the process is killed
    seed: int = 0
    ooms: int = 0
    clock: float = 0.0
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def seconds(self, setting: Setting) -> float:
        """Without noise."""
        b = setting.batch_size
        work = self.a_sample * (b + max(0, b - self.knee) * (self.slower - 1))
        return self.overhead + work * (self.recompute if setting.checkpointing else 1)

    def peak(self, setting: Setting) -> float:
        kept = self.kept if setting.checkpointing else 1
        return self.idle + self.fixed + setting.batch_size * self.sample_bytes * kept

    def estimate(self, setting: Setting) -> float:
        return self.estimate_off * (self.peak(setting) - self.idle)

    def run(self, setting: Setting) -> float:
        """One microbatch. :returns: s; raises MemoryError, or Killed"""
        if self.peak(setting) > self.total:
            self.ooms += 1
            self.clock += 0.5 * self.seconds(setting)
            raise Killed if self.is_host else MemoryError
        wave = 1 + self.drift * math.sin(self.clock / 3) if self.drift else 1
        taken = self.seconds(setting) * wave * math.exp(abs(self._random.gauss(0, self.noise)))
        if self._random.random() < self.spikes:
            taken *= 3
        self.clock += taken
        return taken

    def allowed(self, setting: Setting) -> bool:
        """What the tuner may settle on."""
        in_time = self.seconds(setting) <= MICROBATCH_SECONDS or setting.batch_size == 1
        return in_time and self.peak(setting) <= (1 - HEADROOM) * self.total and setting.batch_size <= self.largest

    def speed(self, setting: Setting) -> float:
        return setting.batch_size / self.seconds(setting)

    def best(self) -> Setting:
        """Of all, by exhaustive search without noise."""
        every = [Setting(b, c) for b in range(1, self.largest + 1) for c in (False, True)]
        return max(filter(self.allowed, every), key=self.speed)

    def tuner(self, **options) -> Tuner:
        settings = {
            "largest": self.largest, "estimate": self.estimate, "limit_bytes": self.total, "idle_bytes": self.idle,
            "careful": self.is_host,
        }  # fmt: skip
        return Tuner(self.start, **(settings | options))


def tune(device: CostDevice, tuner: Tuner | None = None, most: int = 5000) -> Tuner:
    """Train on the device until the tuner has settled. Raises AssertionError if it never does."""
    tuner = tuner or device.tuner()
    for _ in range(most):
        if tuner.settled:
            return tuner
        setting = tuner.next()
        try:
            seconds = device.run(setting)
        except MemoryError:
            tuner.out_of_memory(setting)
            continue
        tuner.measured(setting, setting.batch_size, seconds, device.peak(setting), device.total, device.idle)
    raise AssertionError(f"not settled after {most} microbatches")


def gap_to_best(device: CostDevice, tuner: Tuner) -> float:
    """How much of the best allowed speed is missed; 1 if the choice is not allowed."""
    chosen = tuner.next()
    in_reason = device.seconds(chosen) <= 1.15 * MICROBATCH_SECONDS or chosen.batch_size == 1
    if device.peak(chosen) > (1 - HEADROOM) * device.total or not in_reason or chosen.batch_size > device.largest:
        return 1.0
    return 1 - device.speed(chosen) / device.speed(device.best())


DEVICES = [
    # the original's model on Kaggle's T4: a sample takes 0.3 s, the limit is time
    CostDevice("T4, time decides", 0.05, 0.3, 15.8 * GB, 1.1 * GB, Setting(2, True), idle=2 * GB, estimate_off=1.5),
    # a deep model that fits only when it recomputes, or one sample at a time
    CostDevice("6 GB card, recomputing pays", 0.15, 0.02, 6 * GB, 0.9 * GB, Setting(4, True), idle=1.5 * GB),
    # the plan is wrong by a factor of three
    CostDevice(
        "16 GB card, the plan does not fit", 0.04, 0.012, 16 * GB, 0.55 * GB, Setting(64), idle=2 * GB, estimate_off=0.3
    ),
    CostDevice("H100, a small model", 0.02, 0.0002, 80 * GB, 0.01 * GB, Setting(64), drift=0.05),
    CostDevice(
        "two shared cores", 0.01, 0.003, 2 * GB, 0.004 * GB, Setting(16), idle=1.2 * GB, knee=24, slower=1.6,
        noise=0.1, spikes=0.05, drift=0.1, largest=64, is_host=True,
    ),
]  # fmt: skip


def seeded(device: CostDevice, seed: int) -> CostDevice:
    return replace(device, seed=seed)
