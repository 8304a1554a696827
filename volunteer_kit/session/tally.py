"""What this volunteer's samples came to: counted once others are seen to have them, and kept over restarts."""

from __future__ import annotations

import time
from dataclasses import asdict

from volunteer_kit.home import Home, Totals
from volunteer_kit.reading import Reading
from volunteer_kit.swarm.failures import RoundCounts
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.callbacks import Emit


class Tally:
    """`samples`, `epochs`: of this process; `totals`, `rounds`: of all stays of this machine in this run.

    :param home: where the totals are kept; None: nowhere
    """

    def __init__(self, reading: Reading, home: Home | None, emit: Emit):
        self._reading, self._home, self._emit = reading, home, emit
        self.totals = home.totals(lambda text: emit("warning", kind="totals", message=text)) if home else Totals()
        self.rounds = RoundCounts.read(self.totals.rounds)
        self.samples = self.epochs = 0
        self._waiting: list[tuple[int, int]] = []  # epoch, samples
        self._counted_at = time.monotonic()

    @property
    def waiting(self) -> int:
        """Samples of steps of which is not known yet whether the others go on from them."""
        return sum(samples for _, samples in self._waiting)

    def count(self, report: StepReport) -> int:
        """A global step was taken. :returns: samples of ours that are in everybody's model by now, and were not."""
        self.rounds.count(report)
        self.totals.rounds = self.rounds.as_dict()
        earned = self._reading.applied(report)
        counted, epochs = self._decide(report.kept_until)
        if not report.uncertain:
            counted, epochs = counted + earned, epochs + (earned > 0)
        elif earned:
            self._waiting.append((report.epoch, earned))
        self._add(counted, epochs)
        return counted

    def end(self, kept_until: int | None) -> None:
        """No more steps. :param kept_until: epoch up to which the last ones are the swarm's; not known: none"""
        self._add(*self._decide(-1 if kept_until is None else kept_until))

    def _decide(self, kept_until: int | None) -> tuple[int, int]:
        """:returns: samples, steps that count from now on"""
        if kept_until is None:
            return 0, 0
        kept = [samples for epoch, samples in self._waiting if epoch <= kept_until]
        self._reading.lost(self.waiting - sum(kept))
        self._waiting = []
        return sum(kept), len(kept)

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
