"""Finds the batch size and checkpointing with the most samples a second, while training goes on.

A state machine without torch, clock or files: `next` says what the next microbatch should be, `measured` and
`out_of_memory` tell how it went; where to look is search.py's, what is allowed measurements.py's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from volunteer_kit.device.measurements import Bounds, Measurements, Setting
from volunteer_kit.device.plan import MICROBATCH_SECONDS
from volunteer_kit.device.search import OutOfMemory, Search

AS_GOOD = 0.01  # of the fastest speed, given away for a smaller batch


class Record(Protocol):
    """Where the best setting of this device and model is kept; remembered.Remembered is one."""

    def load(self) -> tuple[Setting, float] | None: ...  # and the bytes at its peak

    def save(self, setting: Setting, peak_bytes: float, samples_per_second: float) -> None: ...


class Tuner:
    """Settles on a setting, and shrinks it if memory runs out later.

    :param start: the plan's
    :param largest: samples that a microbatch may have (plan.largest_batch)
    :param estimate: bytes that a microbatch of a setting takes, for what was not measured
    :param limit_bytes: what the peak of memory may reach now
    :param idle_bytes: what is taken without any microbatch
    :param careful: running out is no exception but the end (a CPU): try only what was measured to be safe
    :param multiple: of which every batch should be, the number of devices
    :param record: of the last time; a setting from there is taken as it is, if it fits
    """

    def __init__(
        self,
        start: Setting,
        *,
        largest: int,
        estimate: Callable[[Setting], float],
        limit_bytes: float = math.inf,
        idle_bytes: float = 0.0,
        careful: bool = False,
        multiple: int = 1,
        microbatch_seconds: float = MICROBATCH_SECONDS,
        record: Record | None = None,
    ):
        bounds = Bounds(max(1, largest), microbatch_seconds, max(1, multiple), careful)
        self._known = Measurements(bounds, estimate, limit_bytes, idle_bytes)
        self._search, self._record = Search(self._known), record
        self._steps = self._search.steps(Setting(min(start.batch_size, bounds.largest), start.checkpointing))
        self.settled, self.why, self.ooms = False, "measuring", 0
        self.speed = 0.0  # samples/s of the setting it settled on, as measured; 0 if it was remembered
        last_time = record.load() if record is not None else None
        if last_time is not None and last_time[0].batch_size <= largest and last_time[1] <= self._known.room:
            self._settle(last_time[0], "the fastest here the last time")
        else:
            self._setting = next(self._steps)

    def next(self) -> Setting:
        """Of the next microbatch."""
        return self._setting

    def measured(
        self,
        setting: Setting,
        samples: int,
        seconds: float,
        peak_bytes: float = 0.0,
        limit_bytes: float = math.inf,
        idle_bytes: float = math.inf,
    ) -> None:
        """A microbatch of `setting` took `seconds`; the peak of memory was `peak_bytes` of the `limit_bytes` that there
        are now, from `idle_bytes` on. One of another setting or size says nothing."""
        if self.settled or setting != self._setting or samples != setting.batch_size or not seconds > 0:
            return
        seen = self._known[setting]
        seen.seconds.append(seconds)
        seen.peak = max(seen.peak, peak_bytes)
        self._known.limit, self._known.idle = limit_bytes, min(self._known.idle, idle_bytes)
        self._known.spent += seconds
        self._advance(lambda: next(self._steps))

    def out_of_memory(self, setting: Setting) -> None:
        """A microbatch of `setting` did not fit. Raises MemoryError if nothing smaller is left."""
        self.ooms += 1
        if setting == Setting(1, True):
            raise MemoryError("a single sample does not fit")
        self._known.ran_out(setting)
        if not self.settled:
            self._advance(lambda: self._steps.throw(OutOfMemory()))
            return
        size = self._known.bounds.rounded(0.75 * setting.batch_size)
        smaller = Setting(size, setting.checkpointing) if setting.batch_size > 1 else Setting(1, True)
        self._settle(smaller, f"memory ran out at {setting}")
        self._remember()

    def _advance(self, step: Callable[[], Setting]) -> None:
        try:
            self._setting = step()
        except StopIteration:
            self._choose()

    def _choose(self) -> None:
        known = self._known
        finalists = [s for s in self._search.finalists if known.fits(s)] or known.ranked() or known.settings()[:1]
        if not finalists:
            self._settle(Setting(1, True), "the least there is")
            return
        fastest = max(map(known.speed, finalists))
        best = min(s for s in finalists if known.speed(s) >= (1 - AS_GOOD) * fastest)
        self.speed = known.speed(best)
        others = "; ".join(f"{s}: {known.speed(s):.3g}" for s in known.settings() if s != best)
        self._settle(best, f"{self.speed:.3g} samples/s, the fastest" + (f" ({others})" if others else ""))
        self._remember()

    def _settle(self, setting: Setting, why: str) -> None:
        self._setting, self.settled = setting, True
        self.why = f"a batch of {setting}: {why}"

    def _remember(self) -> None:
        if self._record is not None:
            self._record.save(self._setting, self._known[self._setting].peak, self.speed)
