"""What this volunteer's samples came to: counted once they are in everybody's model, and kept over restarts."""

from __future__ import annotations

import time
from dataclasses import asdict

from volunteer_kit.home import Home, Totals
from volunteer_kit.reading import Reading
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.callbacks import Emit


class Tally:
    """`samples`, `epochs`: of this process; `totals`: of all stays of this machine in this run; `waiting`: samples of
    uncertain steps, of which is not known yet whether the others go on from them.

    :param home: where the totals are kept; None: nowhere
    """

    def __init__(self, reading: Reading, home: Home | None, emit: Emit):
        self._reading, self._home, self._emit = reading, home, emit
        self.totals = home.totals() if home else Totals()
        self.samples = self.epochs = self.waiting = 0
        self._waiting_epochs = 0
        self._counted_at = time.monotonic()

    def count(self, report: StepReport) -> int:
        """A global step was taken. :returns: samples of ours that are in everybody's model by now, and were not."""
        earned = self._reading.applied(report)
        counted, epochs = self._decide(report.fate)
        if report.uncertain:
            self.waiting += earned
            self._waiting_epochs += earned > 0
        else:
            counted, epochs = counted + earned, epochs + (earned > 0)
        self._add(counted, epochs)
        return counted

    def end(self, fate: bool | None) -> None:
        """No more steps. :param fate: what became of the last ones; not known: they do not count"""
        self._add(*self._decide(bool(fate)))

    def _decide(self, kept: bool | None) -> tuple[int, int]:
        if kept is None:
            return 0, 0
        samples, epochs = self.waiting, self._waiting_epochs
        self.waiting = self._waiting_epochs = 0
        if kept:
            return samples, epochs
        self._reading.lost(samples)
        return 0, 0

    def _add(self, samples: int, epochs: int) -> None:
        now = time.monotonic()
        self.samples += samples
        self.epochs += epochs
        self.totals.samples += samples
        self.totals.epochs += epochs
        self.totals.seconds += now - self._counted_at
        self._counted_at = now
        try:
            if self._home:
                self._home.save_totals(self.totals)
        except OSError as error:  # told once; training goes on
            self._home = None
            self._emit("warning", kind="disk", message=f"Your totals cannot be saved here any more: {error}.")
        self._emit("totals", waiting=self.waiting, **asdict(self.totals))
