"""The worker's story, told as it happens: the loop's progress as events for the supervisor."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from volunteer_kit.swarm import failures
from volunteer_kit.swarm.options import StepReport
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
        self._told_probation = self._told_slow_network = False
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
        progress = optimizer.tracker.global_progress
        self.session.emit(
            "step",
            epoch=optimizer.local_epoch,
            samples=optimizer.grad_averager.local_samples_accumulated,
            samples_per_second=round(trainer.samples_per_second, 3),
            loss=loss,
            num_peers=progress.num_peers,
            swarm_samples=progress.samples_accumulated,
            target_batch_size=optimizer.target_batch_size,
        )
        self._tell_uncallable(optimizer.tracker.num_uncallable)
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
            failure=report.failure,
            cause=report.cause,
            expected=report.expected,
            **self.session.tally.rounds.as_dict(),
            apart=report.apart,
        )
        if self.session.tally.samples and not self._counts:  # others, who see our share beside theirs, need not wait
            self._counts, self._last_record = True, float("-inf")
        self.wants_renewal = bool(self.session.lookout and self.session.lookout.why_renew)
        self._tell_trouble(report)
        self._told_probation = report.on_probation

    def on_postponed(self, trainer: Trainer, report: StepReport) -> None:
        self.session.tally.count(report)
        how = f"Step {report.epoch} is tried again: {report.why_postponed}."
        self.session.emit("warning", kind="round", message=how)

    def _tell_trouble(self, report: StepReport) -> None:
        if report.cause == failures.ALL_CLIENTS:
            pass  # told with its reason, once
        elif report.uncertain and report.failure:
            how = "was taken alone, for the others were not reached; its samples count once they go on from it"
            self.session.emit("warning", kind="round", message=f"Step {report.epoch} {how}.")
        elif report.on_probation:
            if not self._told_probation:
                how = f"This machine's samples do not count yet: {report.failure}."
                self.session.emit("warning", kind="verification", message=how)
        elif report.failure or report.apart:
            how = "Out of step with the others for a moment: this machine takes their model and goes on."
            self.session.emit("warning", kind="round", message=how)
        if report.slow_network is not None and not self._told_slow_network:
            self._told_slow_network = True
            self.session.emit("warning", kind="network", message=report.slow_network)
        for peer, why in report.refused.items():
            message = f"Left out of epoch {report.epoch}: {peer}: {why}."
            self.session.emit("warning", kind="refused", message=message)
        for peer, why in report.remarks.items():
            message = f"Noted in epoch {report.epoch}: {peer}: {why}."
            self.session.emit("warning", kind="refused", message=message)
