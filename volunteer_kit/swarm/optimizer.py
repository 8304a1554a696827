"""hivemind.Optimizer for one run: our averagers under it, and the global step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in one on Python 3.10
from typing import Any

from hivemind.averaging.control import StepControl
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm import failures
from volunteer_kit.swarm.believed_speed import Limits as WeightLimits
from volunteer_kit.swarm.believed_speed import Speeds
from volunteer_kit.swarm.meeting import MeetingOptimizer
from volunteer_kit.swarm.options import StepReport, SwarmOptions
from volunteer_kit.swarm.peer import Peer
from volunteer_kit.swarm.receipts import Reduced
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.sync.timing import USUAL_ROUNDS, too_slow_network
from volunteer_kit.swarm.told_group import LED_APART
from volunteer_kit.swarm.uncertain import UncertainSteps

logger = get_logger(__name__)
OTHER_MODEL = "our model was not the others'"
ON_PROBATION = "they are computed again by others first, and are credited when they were found right"
ALONE_AFTER_ALL = 90.0  # s without anybody until a peer that has met others takes itself for the swarm


class SwarmOptimizer(MeetingOptimizer):
    """hivemind.Optimizer with checked, equal averaging and exact state transfer.

    :param parts: as of AssembledOptimizer
    """

    # Overrides: _follow, _just_loaded, _stepped_apart, _times_back, _times_postponed, made_up_for, only_accumulated
    # Overrides: scheduled_grads

    _attends = False  # trains nothing
    weights_are_samples = True  # what parts weigh; otherwise a sample weighs less than 1, nobody has said how much
    on_round: Callable[[int], None] | None = None  # told, with the number of peers here, when averaging begins
    speeds: Speeds | None = None  # what the others' devices can have done; None: not known
    on_reduced: Callable[[Reduced], None] | None = None  # told of each round that had a group

    def __init__(self, *, peer: Peer, options: SwarmOptions, **parts: Any):
        self.reports: deque[StepReport] = deque(maxlen=1000)  # of global steps not yet taken by the trainer
        self._rounds: deque[float] = deque(maxlen=USUAL_ROUNDS)  # s, of the last rounds from meeting to the last answer
        self._report: dict[str, Any] = {}  # of the global step under way
        self._last_began: float | None = None  # time.monotonic() of our last round
        self.uncertain_steps = UncertainSteps(options.metadata_expiration / 2, ALONE_AFTER_ALL)
        self._begin_verifying()
        super().__init__(peer=peer, options=options, **parts)

    def settle(self, patience: float = 0.0) -> str:
        held = super().settle(patience)
        if self.tracker.global_progress.num_peers <= 1 and self.cut_off is None:
            self.uncertain_steps.shared()  # with nobody: there is no other model
        return held

    # --- one microbatch ---

    def step(
        self,
        batch_size: int,
        grad_scale: float = 1.0,
        names: Sequence[Hashable] = (),
        weight: float | None = None,
        ends_pass: bool = False,
    ) -> bool:
        """Count the gradients in .grad, the mean over `batch_size` samples of these `names`, times `grad_scale`; when
        the swarm has target_batch_size samples, average and take the global step. :returns: False if they were not
        finite.

        :param weight: what they are the mean over, if not over samples; at most 1 a sample, or others take it for a lie
        :param ends_pass: they are the last of a pass over our data: a peer that is alone steps with what it has
        """
        self._microbatch = {"grad_scale": grad_scale, "names": names, "weight": weight}
        self._taken, self.only_accumulated = True, True
        if self.obey_orders():
            return True
        if self._untaken is not None and self._try_again():
            return True
        if self._stepped_apart and self._follow is None:
            self._compare_after_step_apart()
        if self._follow is not None and self._catch_up():
            return True  # the gradients at hand are of the model we just gave up
        if self.cut_off is not None:
            return self._wait_for_the_network(batch_size)
        if self._round_under_way is not None and self._look_after_round_under_way():
            return True
        if self.state_averager.why_incomplete and self._replace_lost_statistics():
            return True
        self.tracker.ends_pass = ends_pass
        try:
            super().step(batch_size=batch_size)
        finally:
            self.tracker.ends_pass = False
        if self.verifies:
            self._note_model()
            self._work_off_duties()
        return self._taken

    def attend(self) -> None:
        """Be a member that trains nothing, as the run's monitor is: go into rounds with weight 0, take their steps, and
        share the state. To be called several times a second."""
        self.step(batch_size=0)

    def _wait_for_the_network(self, batch_size: int) -> bool:
        """Keep samples for the epoch under way, as many as it needs; slowly, for more cannot be of use."""
        self.only_accumulated = False
        self.state_averager.step(apply_delayed_updates=True)
        if self.grad_averager.local_samples_accumulated < self.target_batch_size:
            return self._check_and_accumulate_gradients(batch_size)
        time.sleep(min(1.0, self.matchmaking_time))
        return True

    def _should_load_state_from_peers(self) -> bool:
        """Behind the others by more than a step under way.

        A newcomer that is one epoch behind after its download takes part in the next round, where it is told what to
        take: it would otherwise download for ever beside fast peers. And with delay_grad_averaging the others count
        an epoch when its round begins, so that one epoch behind means: go into that round. Where most are not ahead,
        who is may have stepped alone: all would take its state, and it would go back to what they had.
        """
        behind = self.tracker.global_epoch - self.local_epoch
        if self._round_under_way is not None or behind <= 0 or self._is_left_behind:
            return False
        if behind == 1 and (self._just_loaded or self.delay_grad_averaging):
            return False
        if 2 * self.tracker.num_ahead < self.tracker.global_progress.num_peers:
            return False
        return super()._should_load_state_from_peers()

    def _check_and_accumulate_gradients(self, batch_size: int, grad_scaler=None) -> bool:
        self._attends = batch_size == 0 and not self.grad_averager.local_samples_accumulated
        if self._attends:
            self.tracker.attend(self.local_epoch)
        if batch_size == 0:
            return True
        self._taken = self.grad_averager.accumulate_grads_(batch_size, **self._microbatch)
        if self._taken:
            self.tracker.report_local_progress(self.local_epoch, self.grad_averager.local_samples_accumulated)
        return self._taken

    # --- the global step ---

    def _update_global_epoch(self, grad_scaler) -> None:
        if self._round_under_way is not None or self._is_left_behind:
            return  # not ours: we take its averages when it is over
        self._finish_updates()
        if self._follow is not None or self._untaken is not None:
            return  # a step in the background has told us that our state is not the others', or that it was none
        if self.tracker.global_progress.num_peers <= 1:
            if not self.reach.may_go_alone():
                return  # cut off: a step of ours alone would be nobody's, and its samples lost
            self.tracker.look_again(timeout=self.matchmaking_time)
            if self.tracker.global_progress.num_peers > 1:
                return  # we were about to step alone; the next microbatch counts with theirs
        self._just_loaded = False
        self._prepare_to_meet()
        if self.scheduled_grads is not None and (self.scheduled_grads.triggered or self.scheduled_grads.done()):
            self.scheduled_grads = None  # of the last round; hivemind, finding it here, would begin none and step alone
        self._limit_weights()
        report = self._report = {
            "epoch": self.local_epoch + 1,
            "samples": self.grad_averager.local_samples_accumulated,
            "names": self.grad_averager.names,
            "told": self.state_averager.told,
            "started": time.perf_counter(),
            "weight": self.grad_averager.local_weight_accumulated,
            "num_peers": self.tracker.global_progress.num_peers,
            "uncallable": self.tracker.num_uncallable,
            "swarm_epoch": self.tracker.global_epoch,
        }
        logger.debug(f"Round of epoch {self.local_epoch}: {self.tracker.seen()}")
        if report["num_peers"] <= 1 and not self.uncertain_steps.has_met:
            self.state_averager.is_shared = None
        elif report["num_peers"] > 1 and self.on_round is not None:
            self.on_round(self.tracker.global_progress.num_peers)
        if report["num_peers"] > 1 and self._shares_steps_out:
            self.tracker.go_into_round(self.local_epoch)
        super()._update_global_epoch(grad_scaler)
        if not report["averaged"]:
            self._settle_absence(report, Round(), was_alone=True)
            self._finish_report(report, Round(), None, failures.OTHER)

    def samples_after(self, epoch: int) -> int:
        """Ours that no step up to `epoch` took: those at hand, and those of a round that is under way."""
        later = self._report["samples"] if self._report.get("epoch", 0) > epoch else 0
        return later + self.grad_averager.local_samples_accumulated

    def believe_speeds(self, speeds: Speeds) -> None:
        """From now on nobody's weight and progress are believed beyond what its device can have done."""
        self.speeds = speeds
        self.tracker.speed_limit = lambda peer, seconds: speeds.samples_within(seconds).of(peer)

    def _limit_weights(self) -> None:
        """Nobody can have more samples than its device does between two rounds; others may have begun the last one a
        matchmaking earlier."""
        now, last, self._last_began = time.monotonic(), self._last_began, time.monotonic()
        if self.speeds is not None:
            known = last is not None
            limits = self.speeds.samples_within(now - last + self.matchmaking_time) if known else WeightLimits()
            self.grad_averager.limit_weights(limits)

    def _begin_averaging_gradients(self, grad_scaler) -> bool:
        self._report["averaged"] = super()._begin_averaging_gradients(grad_scaler)
        # who was first seen when we had begun to look for the group could not be in it
        expected = self.tracker.global_progress.num_peers - self.tracker.num_late
        self._report["expected"] = min(expected, self.grad_averager.sought or expected)
        if not self._report["averaged"]:
            self.state_averager.makes_no_step = self._attends
        return self._report["averaged"]

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: StepControl | None) -> None:
        """Take the averaged gradients; our own, still in the buffers, when there was no round.

        With delay_grad_averaging hivemind calls this in a background thread.
        """
        report, outcome, failure, cause = self._report, Round(), None, None
        if maybe_step_control is not None:
            report["triggered"] = time.perf_counter()
            own_id, led_apart = self.dht.peer_id, self.grad_averager.led_apart
            try:
                outcome = self._await_round(maybe_step_control)
            except BaseException as e:
                failure = "nobody answered in time" if isinstance(e, (TimeoutError, FutureTimeoutError)) else repr(e)
                cause = failures.cause_without_round(maybe_step_control, e)
                if self.grad_averager.led_apart > led_apart:
                    failure, cause = LED_APART, failures.LED_APART
            self._settle_absence(report, outcome, was_alone=cause == failures.NO_GROUP)
            if outcome.group:
                self._follow = outcome.whom_to_follow(own_id, report["told"])
                # those who did not come may have met elsewhere, and be more; or others got what we did not
                for_certain = 2 * len(outcome) > report["num_peers"] and outcome.received == 1
                self._stepped_apart = self._follow is None and not for_certain
                if for_certain:
                    self._times_back = self._times_postponed = 0
                if 2 * outcome.holders(own_id, report["told"]) > report["num_peers"]:
                    self.state_averager.is_shared = True
                if outcome.is_lost and self._follow is None and self._postpone(report, was_alone=False):
                    self._stepped_apart = False
                failure = outcome.out_of_step().get(own_id)
                if failure is None:  # else it was a round of another epoch than that of which we know claims
                    self._settle_claims(report, outcome)
                self._take_verdicts(outcome)
                if outcome.verdicts is not None and not outcome.verdicts.trusted:
                    failure = failure or (OTHER_MODEL if outcome.verdicts.apart else ON_PROBATION)
                cause = failures.cause_within_round(outcome, is_apart=failure not in (None, ON_PROBATION))
        if outcome.group:
            self._rounds.append(time.perf_counter() - report["triggered"])
        self.state_averager.round_name = outcome.name
        if outcome.group and not self.state_averager.is_postponed and self.on_reduced is not None:
            self.on_reduced(reduced(report, outcome))
        # who trains nothing has no gradients of its own; zeros would still turn the model by their momentum
        something_came = self.grad_averager.something_came() if outcome.group else not self._attends
        self.state_averager.makes_no_step = not something_came
        self._load_averaged_gradients_into_optimizer_()
        if maybe_step_control is not None:
            self._finish_report(report, outcome, failure, cause)

    def _settle_absence(self, report: dict[str, Any], outcome: Round, was_alone: bool) -> None:
        """:param was_alone: nobody can have got anything of ours"""
        self._stepped_apart = False
        if outcome.group:
            return
        if report["num_peers"] > 1:
            if not (report["averaged"] and self._postpone(report, was_alone)):  # else the step is taken already
                self._miss_round(report["epoch"] - 1, max(report["swarm_epoch"], self.tracker.global_epoch))
        elif self.uncertain_steps.has_met:  # their records are over; it may be our line that was
            self._stepped_apart = True

    def _settle_claims(self, report: dict[str, Any], outcome: Round) -> None:
        """What others claimed of this epoch beside what they weighed; in samples, though a weight may be of other
        things: ours tells how many of them a sample has, or the others' do if we have none."""
        epoch, own = report["epoch"] - 1, 1.0
        if report["samples"] and report["weight"]:
            own = report["weight"] / report["samples"]
        elif not self.weights_are_samples:
            own = self.tracker.claims.weight_of_a_sample(epoch, outcome.delivered)
        weights = {peer: weight / own for peer, weight in outcome.delivered.items()}
        self.tracker.settle_round(epoch, outcome.group, weights)

    def _finish_report(
        self, report: dict[str, Any], outcome: Round, failure: str | None, cause: str | None = None
    ) -> None:
        met = len(outcome) > 1
        if met and failure is None and self._follow is None and outcome.is_shared(self.dht.peer_id, report["told"]):
            self.uncertain_steps.shared()  # what we held before this step, that is
        expected = max(1, report.get("expected", 1))
        if max(expected, len(outcome)) <= 1:
            cause = None  # with nobody to meet there was no round that could fail
        elif cause in failures.OF_THE_LINE and self.cut_off is not None:
            cause = failures.CUT_OFF  # it was our own line
        elif cause == failures.NO_GROUP and (report.get("uncallable") or self.tracker.num_uncallable):
            cause = failures.ALL_CLIENTS
        is_postponed = self.state_averager.is_postponed
        uncertain = not is_postponed and (failure is None or not met)
        if uncertain:
            whole = met and self._follow is None and outcome.received == 1 and len(outcome) >= report["num_peers"]
            uncertain = not self.uncertain_steps.taken(report["epoch"], report["num_peers"] > 1, whole)
        made_up_for, kept_until = 0, None
        if not is_postponed:  # which is no step, for which things would be told
            made_up_for, self.made_up_for = self.made_up_for, 0
            kept_until = self.uncertain_steps.kept_until()
        self.reports.append(
            StepReport(
                epoch=report["epoch"],
                samples=0 if is_postponed else report["samples"],
                names=() if is_postponed else report["names"],
                group_size=max(1, len(outcome)),
                received=outcome.received,
                seconds=time.perf_counter() - report["started"],
                bytes_sent=outcome.bytes_sent,
                bytes_received=outcome.bytes_received,
                refused=outcome.refused,
                remarks={**outcome.remarks, **self.state_averager.take_remarks()},
                failure=failure,
                slow_network=too_slow_network(self._rounds, self.tracker.seconds_of_computing, self.target_batch_size),
                on_probation=failure == ON_PROBATION,
                expected=expected,
                cause=cause,
                apart=self._follow.why if self._follow is not None else None,
                uncertain=uncertain,
                kept_until=kept_until,
                made_up_for=made_up_for,
                is_postponed=is_postponed,
            )
        )


def reduced(report: dict[str, Any], outcome: Round) -> Reduced:
    """What our receipt of this round will say."""
    _, _, lineage_before, *_ = report["told"]
    return Reduced(
        epoch=report["epoch"],
        round_name=outcome.name,
        lineage_before=lineage_before,
        group=outcome.group,
        weights=outcome.weights,
        seconds=outcome.seconds,
        round_id=outcome.round_id,
    )
