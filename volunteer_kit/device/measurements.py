"""What is known of settings: measured times and peaks of memory, and what they let one expect of others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

HEADROOM = 0.1  # of the memory there is, never taken: fragments, longer captions, other programs
DOUBT = 1.7  # times what is estimated and not measured; the estimate is off by so much at worst
PATIENCE = 1.1  # times the seconds that a microbatch should take: a machine is never quiet


class Setting(NamedTuple):
    """What a machine chooses for each microbatch."""

    batch_size: int  # samples
    checkpointing: bool = False  # recompute activations in backward

    def __str__(self) -> str:
        return f"{self.batch_size}{' recomputing' if self.checkpointing else ''}"


@dataclass(frozen=True)
class Bounds:
    """What a setting must not exceed.

    :param largest: samples in a microbatch (plan.largest_batch)
    :param seconds: a microbatch may take; a single sample as long as it needs
    :param multiple: of which a batch should be: the number of devices that share it
    :param careful: to run out of memory is no exception but the end (a CPU): nothing is tried that what was measured
        does not promise to fit
    """

    largest: int
    seconds: float
    multiple: int = 1
    careful: bool = False

    def rounded(self, size: float) -> int:
        """Down to five leading bits, and to a multiple of the devices."""
        size = max(1, int(size + 1e-9))
        size -= size % 2 ** max(0, size.bit_length() - 5)
        return size - size % self.multiple if size >= self.multiple else size


@dataclass
class Seen:
    """Of one setting."""

    seconds: list[float] = field(default_factory=list)  # of microbatches after those that warm up
    peak: float = 0.0  # bytes

    @property
    def typical(self) -> float:
        """The lower quartile: what disturbs a machine never makes it faster, and beside busy neighbours half of all
        microbatches are disturbed. Of three the shortest."""
        return sorted(self.seconds)[len(self.seconds) // 4]

    @property
    def doubt(self) -> float:
        """Standard error of it, relative; from the better half, as the quartile itself."""
        spread = 1.48 * (statistics.median(self.seconds) - self.typical)
        return 1.25 * max(spread / self.typical, 0.01) / math.sqrt(len(self.seconds))


class Measurements:
    """Of all settings so far, and what is allowed.

    :param estimate: bytes that a microbatch takes beyond `idle`; used only where nothing was measured
    :param limit: bytes that the peak may reach now
    :param idle: bytes taken without any microbatch
    """

    def __init__(self, bounds: Bounds, estimate: Callable[[Setting], float], limit: float, idle: float):
        self.bounds, self.limit, self.idle = bounds, limit, idle
        self._estimate = estimate
        self._seen: dict[Setting, Seen] = {}
        self._full = {False: math.inf, True: math.inf}  # the smallest batch that did not fit
        self._is_careful = bounds.careful
        self._is_blind = False  # what was measured promised too much: larger than what has fitted is not tried again
        self.spent = 0.0  # s of microbatches

    def __getitem__(self, setting: Setting) -> Seen:
        return self._seen.setdefault(setting, Seen())

    def has(self, setting: Setting) -> bool:
        return setting in self._seen and bool(self._seen[setting].seconds)

    def settings(self, checkpointing: bool | None = None) -> list[Setting]:
        """Those with a time, small ones first; of one mode, or of both."""
        return sorted(s for s in self._seen if self.has(s) and checkpointing in (None, s.checkpointing))

    def speed(self, setting: Setting) -> float:
        """Samples a second."""
        return setting.batch_size / self._seen[setting].typical

    def ran_out(self, setting: Setting) -> None:
        """Memory did not suffice. What does not fit recomputing does not fit without, either.

        Once is enough: from then on nothing is tried that could fail in the same way.
        """
        self._is_careful = True
        if self._peaks(setting.checkpointing) and self.expected_bytes(setting) <= self.room:
            self._is_blind = True
        for mode in {False, setting.checkpointing}:
            self._full[mode] = min(self._full[mode], setting.batch_size)

    # --- what is allowed ---

    @property
    def room(self) -> float:
        return (1 - HEADROOM) * self.limit

    def fits(self, setting: Setting) -> bool:
        """With head-room left, as measured."""
        return setting.batch_size < self._full[setting.checkpointing] and self[setting].peak <= self.room

    def in_time(self, setting: Setting) -> bool:
        return setting.batch_size == 1 or self[setting].typical <= PATIENCE * self.bounds.seconds

    def may_try(self, setting: Setting) -> bool:
        """Whether it promises to fit into memory."""
        if setting.batch_size > self.bounds.largest or setting.batch_size >= self._full[setting.checkpointing]:
            return False
        fitted = (s.batch_size for s in self.settings() if setting.checkpointing or not s.checkpointing)
        if self._is_blind and setting.batch_size > max(fitted, default=1):
            return False
        return self.expected_bytes(setting) <= self.room

    def held_by_memory(self, setting: Setting) -> bool:
        """Whether twice as many samples would not fit."""
        twice = Setting(2 * setting.batch_size, setting.checkpointing)
        return twice.batch_size >= self._full[setting.checkpointing] or self.expected_bytes(twice) > self.room

    def ranked(self) -> list[Setting]:
        """What may be chosen, the fastest first."""
        allowed = [s for s in self.settings() if self.fits(s)]
        in_time = [s for s in allowed if self.in_time(s)]
        return sorted(in_time or allowed[:1], key=self.speed, reverse=True)

    # --- what is to be expected ---

    def expected_seconds(self, setting: Setting) -> float:
        """Of a microbatch: along a line through what was measured. 0 if nothing was."""
        known = self.settings(setting.checkpointing)
        if not known:
            known = self.settings()
        points = [(s.batch_size, self[s].typical) for s in known]
        return _along(points, 0.0, setting.batch_size, least=0.25) if points else 0.0

    def expected_bytes(self, setting: Setting) -> float:
        """At the peak, rather more than less."""
        points = self._peaks(setting.checkpointing)
        if not points:
            return self.idle + self._doubt() * self._estimate(setting)
        if len(points) == 1 and not self._is_careful and setting.batch_size > points[0][0]:
            at, peak = points[0]
            known = Setting(at, setting.checkpointing)
            off = (peak - self.idle) / max(1.0, self._estimate(known))
            return peak + off * (self._estimate(setting) - self._estimate(known))
        # a process that has grown once does not show how much it would have to grow again
        return _along(points, self.idle, setting.batch_size, least=0.5 if self._is_careful else 0.0, more=1.05)

    def _peaks(self, checkpointing: bool) -> list[tuple[int, float]]:
        """(samples, bytes) of what was measured in one mode, small ones first."""
        return sorted((s.batch_size, x.peak) for s, x in self._seen.items() if x.peak > 0 and s[1] == checkpointing)

    def _doubt(self) -> float:
        """By what to multiply an estimate: how far it was off in the other mode; a third more where errors are dear."""
        measured = [s for s, seen in sorted(self._seen.items()) if seen.peak > self.idle]
        if not measured:
            return DOUBT if self._is_careful else 1.0
        largest = measured[-1]
        off = (self[largest].peak - self.idle) / max(1.0, self._estimate(largest))
        return (1.3 if self._is_careful else 1.0) * max(0.3, off)

    def gain_left(self, setting: Setting) -> float:
        """How many times faster an endless batch would be, by a line through two sizes. Endless if there is one."""
        smaller = [s for s in self.settings(setting.checkpointing) if s < setting]
        if not smaller:
            return math.inf
        a_sample = (self[setting].typical - self[smaller[0]].typical) / (setting.batch_size - smaller[0].batch_size)
        return math.inf if a_sample <= 0 else self[setting].typical / setting.batch_size / a_sample


def _along(points: list[tuple[int, float]], origin: float, size: float, least: float, more: float = 1.0) -> float:
    """The value at `size`: between known points on the line between them (below the first: from `origin` at 0); above
    the last one along the line from the first to it, but no flatter than `least` of the line from `origin`, and no
    steeper than that."""
    known = [(0, min(origin, points[0][1])), *points]
    for (low, low_value), (high, high_value) in zip(known, known[1:], strict=False):
        if size <= high:
            return low_value + max(0.0, high_value - low_value) * (size - low) / (high - low)
    last, value = points[-1]
    slope = max(0.0, value - origin) / last
    if len(points) > 1:
        first, earlier = points[0]
        slope = min(slope, max((value - earlier) / (last - first), least * slope))
    return value + more * slope * (size - last)
