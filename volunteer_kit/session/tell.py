"""The worker's story, told as it happens: the loop's progress as events for the supervisor."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from volunteer_kit.swarm.options import StepReport
from volunteer_kit.swarm.records import failures
from volunteer_kit.training.trainer import Callback, Trainer

if TYPE_CHECKING:
    from volunteer_kit.session import Session

STEP_EVERY = 1.0  # s between "step" events
RECORD_EVERY = 15.0  # s between renewals of our record, a quarter of its lifetime


class Tell(Callback):
    """Turns the loop's progress into events for the supervisor, and renews our record for the others."""

    def __init__(self, session: Session):
        self.session = session
        self.wants_renewal = False  # and is between two global steps
        self._last_step = self._last_record = 0.0
        self._skipped: dict[str, int] = {}
        self._counts = False  # some of our samples
        self._num_uncallable = 0  # others here, as last told: nobody can be called, neither they nor we

    def on_microbatch(self, trainer: Trainer, loss: float, samples: int) -> None:
        now = time.monotonic()
        if now - self._last_step >= STEP_EVERY:
            self._last_step = now
            self._tell_step(trainer, loss)
        if now - self._last_record >= RECORD_EVERY:
            self._last_record = now
            self.session.publish(loss, trainer.samples_per_second)
        self.session.reading.keep()

    def _tell_step(self, trainer: Trainer, loss: float) -> None:
        optimizer = trainer.optimizer
        progress = optimizer.progress()
        self.session.emit(
            "step",
            epoch=optimizer.local_epoch,
            samples=progress.own_samples,
            samples_per_second=round(trainer.samples_per_second, 3),
            loss=loss,
            num_peers=progress.num_peers,
            swarm_samples=progress.swarm_samples,
            target_batch_size=optimizer.target_batch_size,
        )
        self._tell_uncallable(progress.uncallable)
        lost = {
            "microbatch_not_finite": trainer.microbatches_not_finite,
            "out_of_memory": trainer.microbatches_too_large,
        }
        counts = self.session.reading.counts() | {cause: number for cause, number in lost.items() if number}
        if counts != self._skipped:
            self._skipped = dict(counts)
            self.session.emit("skipped", counts=counts)

    def _tell_uncallable(self, others: int) -> None:
        if others != self._num_uncallable:
            self._num_uncallable = others
            if others:
                self.session.emit("warning", kind="reach", message=failures.nobody_can_be_called(others))

    def on_epoch(self, trainer: Trainer, report: StepReport, loss: float | None) -> None:
        self.session.emit(
            "epoch",
            epoch=report.epoch,
            samples=self.session.tally.count(report),
            total_samples=self.session.tally.samples,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            group_size=report.group_size,
            received=report.received,
            seconds=round(report.seconds, 3),
            sent_bytes=report.bytes_sent,
            received_bytes=report.bytes_received,
            cause=report.cause,
            expected=report.expected,
            **self.session.tally.rounds.as_dict(),
        )
        if self.session.tally.samples and not self._counts:  # others, who see our share beside theirs, need not wait
            self._counts, self._last_record = True, float("-inf")
        self.wants_renewal = bool(self.session.lookout and self.session.lookout.why_renew)
