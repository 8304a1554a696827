"""Count what this volunteer's samples came to, and keep the totals over restarts."""

from __future__ import annotations

import time
from dataclasses import asdict

from volunteer_kit.home import Home, Totals
from volunteer_kit.reading import Reading
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.swarm.records.failures import RoundCounts
from volunteer_kit.training.callbacks import Emit


class Tally:
    """`samples`, `epochs`: of this process; `totals`, `rounds`: of all stays of this machine in this run.

    Counted samples stay counted: those that only the members of a branch have wait until a quorum is on it.

    :param home: where the totals are kept; None: nowhere
    """

    def __init__(self, reading: Reading, home: Home | None, emit: Emit):
        self._reading, self._home, self._emit = reading, home, emit
        self.totals = home.totals(lambda text: emit("warning", kind="totals", message=text)) if home else Totals()
        self.rounds = RoundCounts.read(self.totals.rounds)
        self.samples = self.epochs = 0
        self._counted_at = time.monotonic()

    def count(self, report: StepReport) -> int:
        """A global step was taken.

        :returns: samples of ours that are in everybody's model now, and were not. While this peer is on a branch that
            may lose, they wait.
        """
        self.rounds.count(report)
        self.totals.rounds = self.rounds.as_dict()
        earned = self._reading.applied(report)
        now_counted, epochs = self._settle(report.openings, report.is_unconfirmed)
        if not report.is_unconfirmed:
            now_counted, epochs = now_counted + earned, epochs + int(earned > 0)
        elif earned:
            waiting, steps = self.totals.waiting.get(report.openings[-1], (0, 0))
            self.totals.waiting[report.openings[-1]] = waiting + earned, steps + 1
        self._add(now_counted, epochs)
        return now_counted

    def _settle(self, openings: tuple[str, ...], is_unconfirmed: bool) -> tuple[int, int]:
        """Take the samples that no longer wait off the list.

        :returns: samples and steps that count now, since their branch is confirmed; those of other branches are lost
        """
        still = openings if is_unconfirmed else ()
        over = {key: self.totals.waiting.pop(key) for key in list(self.totals.waiting) if key not in still}
        lost = sum(samples for key, (samples, _) in over.items() if key not in openings)
        if lost:
            text = (
                f"{lost:,} samples that this machine trained on while it was cut off from most of the swarm are not in "
                "the run's model, and were never counted: the swarm goes on from another one."
            )
            self._emit("warning", kind="branch", message=text)
        counted = [what for key, what in over.items() if key in openings]
        return sum(samples for samples, _ in counted), sum(steps for _, steps in counted)

    def end(self) -> None:
        """No more steps; the time since the last one counts."""
        self._add(0, 0)

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
        self._emit("totals", **asdict(self.totals) | {"waiting": self.totals.waiting_samples})
