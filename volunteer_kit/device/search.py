"""The search for the fastest setting, as a generator: each `yield` is one microbatch of a setting.

It climbs from the start by doubling, halves if that does not pay, looks between the best and its neighbours, tries the
other way to use memory, and lets what is close run in turn, so that all meet the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from volunteer_kit.device.measurements import Measurements, Setting

BUDGET = 36.0  # s of microbatches in all; what is not clear by then does not matter much
FIRST_PART = {False: 0.75, True: 0.5}  # of the budget at most, before the mode beside this one is tried
DUEL = 4.0  # s that two settings, run in turn, have to show which is faster
FINAL = 8.0  # s for the last few
SHORT = 0.4  # s; a longer microbatch needs no warming up after a change, and two of them will do
BLOCK = 0.15  # s of short microbatches between two changes
EQUAL = 0.02  # what differs less in speed is equal, and the smaller batch is better
CLEAR = 1.25  # times faster: no second look is needed
CONTENDERS = 0.9  # of the fastest speed, to come into the final
RECOMPUTING = 1.2  # times the arithmetic, at least, when activations are computed twice

Steps = Generator[Setting, None, None]


class OutOfMemory(Exception):
    """Of the setting under way; thrown into the search."""


class Search:
    """`steps()` yields settings; `finalists` are what it leaves to choose from."""

    def __init__(self, known: Measurements):
        self.known, self._bounds = known, known.bounds
        self._until = BUDGET
        self.finalists: list[Setting] = []
        self._warmed: Setting | None = None

    def steps(self, start: Setting) -> Steps:
        self._until = FIRST_PART[start.checkpointing] * BUDGET
        yield from self._climb(start)
        self._until = BUDGET
        other = self._other_mode()
        if other is not None:
            yield from self._climb(other)
        while len(self._contenders()) > 1:
            try:
                yield from self._duel(self.finalists, FINAL)
                break
            except OutOfMemory:  # somebody else took it meanwhile; the others may still fit
                continue

    def _contenders(self) -> list[Setting]:
        ranked = self.known.ranked()
        self.finalists = [s for s in ranked if self.known.speed(s) > CONTENDERS * self.known.speed(ranked[0])][:4]
        return self.finalists

    # --- where to look ---

    def _climb(self, start: Setting) -> Steps:
        best = yield from self._first_that_fits(start)
        if best is None:
            return
        first = best = yield from self._double(best)
        while (lower := self._lower(best)) is not None:
            if (yield from self._compare(lower, best)) == best:
                break
            best = lower
        if best == first:  # with a smaller one measured, it is clearer what a larger one would take
            best = yield from self._double(best)
        for _ in range(2):
            best = yield from self._look_beside(best)

    def _double(self, best: Setting) -> Generator[Setting, None, Setting]:
        while (higher := self._higher(best)) is not None:
            if (yield from self._compare(best, higher)) == higher:
                best = higher
            elif self.known.fits(higher):
                break
        return best

    def _look_beside(self, best: Setting) -> Generator[Setting, None, Setting]:
        """Half way to the next measured one on either side."""
        measured = self.known.settings(best.checkpointing)
        at = measured.index(best)
        for neighbour in (*measured[at + 1 : at + 2], *measured[max(0, at - 1) : at]):
            middle = self._sized(best, (best.batch_size + neighbour.batch_size) / 2)
            if not self.known.has(middle) and self.known.may_try(middle) and self._affordable(middle):
                best = yield from self._compare(min(best, middle), max(best, middle))
        return best

    def _first_that_fits(self, setting: Setting) -> Generator[Setting, None, Setting | None]:
        """The start, or the first below it that fits in memory and time; measured. None: not one sample fits."""
        while setting.batch_size > 1 and not self.known.may_try(setting):
            setting = self._sized(setting, setting.batch_size / 2)
        while True:
            try:
                yield from self._measure([setting])
            except OutOfMemory:
                if setting.batch_size == 1:
                    return None
                # the estimate was wrong, nobody knows by how much: far down at once, to climb again is cheap
                setting = self._sized(setting, setting.batch_size / 8)
                continue
            if setting.batch_size == 1 or (self.known.in_time(setting) and self.known.fits(setting)):
                return setting if self.known.fits(setting) else None
            share = min(0.75, 0.9 * self._bounds.seconds / self.known[setting].typical)
            setting = self._sized(setting, share * setting.batch_size)

    def _higher(self, setting: Setting) -> Setting | None:
        """Twice as many samples, or as many as memory and time promise to allow. None: not a tenth more."""
        for tenths in range(20, 10, -1):
            higher = self._sized(setting, min(setting.batch_size * tenths / 10, self._bounds.largest))
            if higher <= setting or not self._could_gain(setting, higher):
                return None
            if self.known.may_try(higher) and self.known.expected_seconds(higher) <= self._bounds.seconds:
                return higher if not self.known.has(higher) and self._affordable(higher) else None
        return None

    def _could_gain(self, setting: Setting, higher: Setting) -> bool:
        """Whether the larger batch would be notably faster, if only what a microbatch costs whatever its size were to
        be shared by more samples. Unknown as long as one size was measured: then only much larger ones are worth it."""
        grown, left = higher.batch_size / setting.batch_size, self.known.gain_left(setting)
        fixed = 1 - 1 / left  # its share of the time
        return grown >= 1.3 if math.isinf(left) else fixed * (1 - 1 / grown) > EQUAL

    def _lower(self, setting: Setting) -> Setting | None:
        lower = self._sized(setting, setting.batch_size / 2)
        return lower if lower < setting and not self.known.has(lower) and self._affordable(lower) else None

    def _other_mode(self) -> Setting | None:
        """A start that uses memory the other way, if it could win. Without recomputing a sample costs less; with it
        more samples fit, which pays only where memory ended the climb and a larger batch still gained."""
        ranked = self.known.ranked()
        if not ranked:  # not a single sample without recomputing
            return Setting(1, True)
        best = ranked[0]
        other = Setting(best.batch_size, not best.checkpointing)
        if other.checkpointing:
            by_target = best.batch_size * 1.3 > self._bounds.largest
            by_time = self.known[best].typical > 0.7 * self._bounds.seconds
            if by_target or by_time or not self.known.held_by_memory(best) or self.known.gain_left(best) < RECOMPUTING:
                return None
        while other.batch_size > 1 and not self.known.may_try(other):
            other = self._sized(other, 0.75 * other.batch_size)
        return other if self.known.may_try(other) and self._affordable(other) else None

    def _sized(self, setting: Setting, size: float) -> Setting:
        return Setting(self._bounds.rounded(size), setting.checkpointing)

    # --- how to measure ---

    def _compare(self, small: Setting, large: Setting) -> Generator[Setting, None, Setting]:
        """The faster of two; the smaller if they are equal, or if the larger does not fit."""
        known = self.known
        try:
            for setting in (small, large):
                if not known.has(setting):
                    yield from self._measure([setting])
            if not (known.fits(large) and known.in_time(large)):
                return small
            if 1 / CLEAR < known.speed(large) / known.speed(small) < CLEAR:
                yield from self._duel([small, large], DUEL)
        except OutOfMemory:
            return small if known.has(small) else large
        return large if known.speed(large) > (1 + EQUAL) * known.speed(small) else small

    def _duel(self, settings: Sequence[Setting], patience: float) -> Steps:
        """Run settings in turn until the fastest is clear. What was measured in other weather is forgotten."""
        until = min(self.known.spent + patience, BUDGET)
        fresh: set[Setting] = set()
        while True:
            for setting in settings:
                before = len(self.known[setting].seconds) if setting not in fresh else 0
                yield from self._measure([setting])
                fresh.add(setting)
                del self.known[setting].seconds[:before]
            if self._is_clear(settings) or self.known.spent >= until:
                return

    def _measure(self, settings: Sequence[Setting]) -> Steps:
        """A few microbatches of each, after one that warms up."""
        for setting in settings:
            seen, expected = self.known[setting], self.known.expected_seconds(setting)
            if not seen.seconds or (setting != self._warmed and expected < SHORT):
                yield setting
                warming = seen.seconds.pop()
                self._warmed = setting
                if warming > 2 * self._bounds.seconds:  # no need to know it better, but for a pause of the machine
                    seen.seconds.append(warming)
                    if warming < 5 * self._bounds.seconds:
                        yield setting
                    continue
                expected = warming
            for _ in range(2 if expected > SHORT else max(3, min(20, int(BLOCK / max(expected, 1e-6))))):
                yield setting

    def _is_clear(self, settings: Sequence[Setting]) -> bool:
        """Whether the fastest is ahead of the second by more than chance, or both are known well enough."""
        second, first = sorted(settings, key=self.known.speed)[-2:]
        doubt = (self.known[first].doubt ** 2 + self.known[second].doubt ** 2) ** 0.5
        return self.known.speed(first) / self.known.speed(second) - 1 > EQUAL + 2.5 * doubt or doubt < EQUAL / 2

    def _affordable(self, setting: Setting) -> bool:
        """Whether there is time left to measure it."""
        return self.known.spent + 3 * self.known.expected_seconds(setting) < self._until
