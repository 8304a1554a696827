"""The schedule of an emulated swarm: what each worker computes, what comes late, and what a rule makes of it.

Pure arithmetic, without tensors. Time is counted in computed samples of the whole swarm, and cut into slots of one
target batch. A contribution is all that one worker computes in one slot; it is in time or late as a whole. A late
contribution is computed on the parameters of epoch `e` and enters the step of epoch `e + k`; `k` is its age. Lateness
belongs to the slot and not to the epoch, so under every rule the same samples are late by the same age.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

WORKERS = 8
SPEED_RATIO = 16.0  # between the fastest and the slowest worker
LATE_SHARE = 0.3  # of the contributions
AGES = (2, 4)  # epochs, both inclusive; ages are equally likely
MAX_STALENESS = 4  # epochs, the protocol's default; an older contribution expires

DISCOUNTS: dict[str, Callable[[int], float]] = {
    "1": lambda age: 1.0,
    "1/sqrt(1+k)": lambda age: 1 / math.sqrt(1 + age),
    "1/(1+k)": lambda age: 1 / (1 + age),
    "1/(1+k)^2": lambda age: 1 / (1 + age) ** 2,
    "0": lambda age: 0.0,
}


@dataclass(frozen=True)
class Rule:
    """How a swarm treats late contributions.

    :param discount: of DISCOUNTS, the weight of a late sample of age `k`; a fresh sample weighs 1
    :param is_late: False: every contribution is in time
    :param waits: late samples do not count towards the target batch, so the epoch waits for fresh ones. Else they
        count in the epoch in which they are computed, those that are thrown away or expire later too
    :param on_arrival: they count in the epoch that they enter instead, which makes epochs uneven
    :param ages: youngest and oldest age of late contributions, epochs
    :param max_staleness: an older contribution expires
    """

    words: str
    discount: str = "1/(1+k)"
    is_late: bool = True
    waits: bool = False
    on_arrival: bool = False
    ages: tuple[int, int] = AGES
    max_staleness: int = MAX_STALENESS

    def weight(self, age: int) -> float:
        """The weight of a sample of this age, in the numerator and in the denominator of the mean."""
        if age == 0:
            return 1.0
        return 0.0 if self.waits or age > self.max_staleness else DISCOUNTS[self.discount](age)

    def counts_at(self, epoch: int, age: int) -> int | None:
        """The epoch whose target batch a sample of `epoch` and this age counts towards, in full; None: no epoch's."""
        if age == 0:
            return epoch
        if self.waits:
            return None
        return epoch + age if self.on_arrival else epoch


class Part(NamedTuple):
    """Samples of one worker that are computed in one epoch and enter a step together."""

    worker: int
    enters_at: int  # epoch
    age: int  # epochs between the parameters that it was computed on and the step
    weight: float  # of each sample
    samples: tuple[int, ...]  # places in the order of all computed samples


@dataclass
class Plan:
    """A whole training. Lists are by epoch, of those that close."""

    parts: list[list[Part]] = field(default_factory=list)  # computed in this epoch, and used in some step
    computed: list[int] = field(default_factory=list)  # samples computed until the epoch closes, thrown ones too

    @property
    def epochs(self) -> int:
        """Epochs that close."""
        return len(self.computed)


def speeds() -> np.ndarray:
    """Share of all computed samples that each worker computes, (WORKERS,), evenly apart on a logarithmic scale."""
    steps = SPEED_RATIO ** np.linspace(0, 1, WORKERS)
    return steps / steps.sum()


def draw_workers(samples: int, seed: int) -> np.ndarray:
    """The worker of each sample, (samples,), in the order in which the workers finish them."""
    begun = np.random.default_rng([seed, 1]).random(WORKERS)  # a worker's first sample is partly done at the start
    counts = np.ceil(samples * speeds()).astype(int) + 1
    times = np.concatenate([(np.arange(n) + b) / s for n, b, s in zip(counts, begun, speeds(), strict=True)])
    return np.repeat(np.arange(WORKERS), counts)[np.argsort(times, kind="stable")[:samples]]


def draw_ages(workers: np.ndarray, target_batch_size: int, ages: tuple[int, int], seed: int) -> np.ndarray:
    """The age at which each sample enters, (samples,); 0 is in time. Equal seeds draw the same late contributions.

    :param workers: of each computed sample, in order; (samples,)
    """
    slots = np.arange(len(workers)) // target_batch_size
    shape = (int(slots[-1]) + 1, WORKERS)
    is_late = np.random.default_rng([seed, 2]).random(shape) < LATE_SHARE
    drawn = np.random.default_rng([seed, 3]).random(shape)
    by_slot = np.where(is_late, ages[0] + (drawn * (ages[1] + 1 - ages[0])).astype(int), 0)  # (slots, WORKERS)
    return by_slot[slots, workers]


def make_plan(rule: Rule, workers: np.ndarray, ages: np.ndarray, target_batch_size: int) -> Plan:
    """Close an epoch whenever the samples that count towards it reach the target, until every sample is computed.

    :param workers: of each computed sample, in order; (samples,)
    :param ages: of each computed sample, 0 in time; (samples,)
    """
    plan, epoch = Plan(), 0
    counted: Counter[int] = Counter()  # samples, by epoch
    found: dict[tuple[int, int], list[int]] = defaultdict(list)  # samples of this epoch, by (worker, age)
    for sample, (worker, age) in enumerate(zip(workers.tolist(), ages.tolist(), strict=True)):
        age = age if rule.is_late else 0
        found[worker, age].append(sample)
        at = rule.counts_at(epoch, age)
        if at is not None:
            counted[at] += 1
        while counted[epoch] >= target_batch_size:
            plan.parts.append(_parts(rule, epoch, found))
            plan.computed.append(sample + 1)
            found.clear()
            epoch += 1
    return plan


def _parts(rule: Rule, epoch: int, found: dict[tuple[int, int], list[int]]) -> list[Part]:
    """The parts of an epoch that have a weight."""
    return [
        Part(worker, epoch + age, age, rule.weight(age), tuple(samples))
        for (worker, age), samples in sorted(found.items())
        if rule.weight(age) > 0
    ]
