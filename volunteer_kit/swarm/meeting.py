"""Whom a peer looks for before a round, with what it tells them, and for how long."""

from __future__ import annotations

import time
from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in one on Python 3.10
from typing import Any

from hivemind.averaging.control import AveragingStage, StepControl

from volunteer_kit.swarm.progress import SLOWEST
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.told_group import LONGEST
from volunteer_kit.swarm.turns import CountsOn, may_compute, seconds_of_others, takes_turns
from volunteer_kit.swarm.verifying import VerifyingOptimizer

GROUP_PATIENCE = 2.5  # learnt patiences that a peer looks for its group before it concludes that it missed it
IN_ALL = 5.0  # matchmaking times, if it was in groups meanwhile: a leader waits two of them, and may have stopped
# of waiting for what others should bring to a step: s at least, and of the time that its share took, until a peer
# computes what they have not got; at the next places twice, three times as long, or all would
TURN_PATIENCE, PATIENCE_SHARE = 3.0, 0.1
TOLD_WITHIN = 3.0  # s in which one hears what others have done
FIRST_PATIENCE = 10.0  # s likewise, while one has not brought anything yet: its first batch takes longest
WORD_EVERY, LOOK = 1.0, 1.0  # s, between words of one that waits, and for a look at the others'
POLL, POLL_SHARE = 0.02, 0.1  # between looks: s at least, and of the time since the epoch began
LESS = {CountsOn.SHARES: CountsOn.TOLD, CountsOn.TOLD: CountsOn.NOTHING}  # after waiting in vain
AGAIN = 0.1  # matchmaking times between looks whether its leader still keeps a follower


class MeetingOptimizer(VerifyingOptimizer):
    """hivemind.Optimizer that comes together with those who are here."""

    takes_turns = False  # a step holds fewer batches than there are peers
    _shares_steps_out = False  # this peer and its like wait for each other's shares: `await_turn` is called
    _counts_on = -1, CountsOn.SHARES  # in that epoch
    _looked_in = -1  # the epoch in which we know who is at work
    _next_begun_lookup = 0.0  # time.monotonic(), of whether the others' round has begun without us

    def __init__(self, **parts: Any):
        super().__init__(**parts)
        self.tracker.on_look = self._say_who_is_awaited  # it is older than the averagers

    def _say_who_is_awaited(self) -> None:
        for averager in (self.grad_averager, self.state_averager):
            averager.awaited_group_size = 1 + len(self.tracker.awaited)

    def _maybe_schedule_gradient_averaging(self) -> None:
        """Not before the last step is done: members tell each other what they hold when they look for a group."""
        is_member = self._round_under_way is None and not self._is_left_behind
        if self.state_averager.is_between_steps and is_member:
            self._prepare_to_meet()
            super()._maybe_schedule_gradient_averaging()

    def _prepare_to_meet(self) -> None:
        """A round that was arranged before we took another state is left: what was told there is no longer so, and its
        members would take us for out of step."""
        if self.grad_averager.told != self.state_averager.told:
            self._drop_scheduled_round()
        self.grad_averager.told = self.state_averager.told
        most = (1 + self.tracker.num_regulars) // 2 + 1
        self.grad_averager.least_group_size = most if self._may_postpone and self._can_make_up else 0
        self.grad_averager.due = self.tracker.estimated_next_update_time
        for averager in (self.grad_averager, self.state_averager):
            averager.expected_group_size = self.tracker.global_progress.num_peers - self.tracker.num_late
            averager.order = self.state_averager.obeyed

    def _maybe_schedule_state_averaging(self) -> None:
        """Never ahead: members tell each other what they hold after the step."""

    def _await_round(self, control: StepControl) -> Round:
        """The round's outcome. Raises TimeoutError, and leaves, when no group is found while one should have been:
        the others have gone on without us, and what is left is to follow them.

        Where groups come together faster than the run allows for, nobody is looked for as long either; but who waits in
        a group waits on, for its leader awaits others, and when it has lost its leader looks for another. Who waits for
        longer than groups take asks others: if their round has begun, it waits no more, and makes up for it later.
        """
        longest, began = IN_ALL * self.matchmaking_time, time.monotonic()
        usual = self.grad_averager.patience
        enough = min(longest, max(self.matchmaking_time, GROUP_PATIENCE * usual))
        seconds = min(enough, usual)
        while True:
            try:
                return control.result(seconds)
            except FutureTimeoutError:
                if control.stage not in (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP):
                    return control.result(self.averaging_timeout)
                waited, seconds = time.monotonic() - began, AGAIN * self.matchmaking_time
                alone = self.grad_averager.without_group > self.matchmaking_time
                in_vain = alone and waited >= enough and not self._will_others_come(waited)
                if waited >= longest or in_vain or self._has_begun_without_us():
                    control.cancel()
                    raise

    # --- before the next batch ---

    def await_turn(self, batch: int, last_epoch: int | None = None) -> None:
        """Return when another batch of ours is wanted; until then go into the rounds that come.

        Others are given time, and no more: one that has vanished is not waited for. With delay_grad_averaging the next
        step's samples are computed while a round runs, and nobody waits.

        :param batch: samples of our next one
        :param last_epoch: after which none is wanted; None: there is no last
        """
        tracker, target, epoch, counted_on = self.tracker, self.target_batch_size, -1, CountsOn.SHARES
        if self.delay_grad_averaging or batch <= 0:
            return
        self._shares_steps_out = True
        if self._looked_in != self.local_epoch and tracker.global_progress.num_peers > 1:
            self._looked_in = self.local_epoch  # a step may take less time than lies between two looks
            tracker.look_again(timeout=LOOK)
        ahead = TOLD_WITHIN + batch / max(tracker.performance_ema.samples_per_second, SLOWEST)
        try:
            while self.cut_off is None and (last_epoch is None or self.local_epoch < last_epoch):
                if self._counts_on[0] != self.local_epoch:
                    self._counts_on = self.local_epoch, CountsOn.SHARES
                place, others = tracker.others_at_work(self.local_epoch)
                own = self.grad_averager.local_samples_accumulated
                if may_compute(own, batch, target, place, others, ahead, self._counts_on[1]):
                    return
                if self._counts_on != (epoch, counted_on):
                    epoch, counted_on = self._counts_on
                    told = time.monotonic()
                    least = FIRST_PATIENCE if any(other.usual is None for other in others) else TURN_PATIENCE
                    patience = max(least, PATIENCE_SHARE * tracker.seconds_in_epoch) * (1 + place)
                    deadline = told + patience
                    if counted_on is CountsOn.SHARES:
                        deadline += seconds_of_others(batch, target, others, ahead)
                    tracker.wait_in(epoch)
                if time.monotonic() > deadline:
                    self._counts_on = epoch, LESS[counted_on]
                    continue
                self.takes_turns |= takes_turns(1 + len(others), batch, target)
                if time.monotonic() - told > WORD_EVERY:
                    tracker.tell_now()
                    told = time.monotonic()
                with tracker.performance_ema.pause():
                    tracker.look_again(timeout=LOOK)
                    self.step(batch_size=0)  # go into a round that is due
                    time.sleep(max(POLL, min(tracker.min_refresh_period, POLL_SHARE * tracker.seconds_in_epoch)))
        finally:  # who takes turns says at once in the next epoch that it waits: no samples of it are expected by then
            tracker.wait_in(self.local_epoch + 1 if self.takes_turns else None)

    def _has_begun_without_us(self) -> bool:
        if not self._can_make_up or time.monotonic() < self._next_begun_lookup:
            return False
        self._next_begun_lookup = time.monotonic() + self.options.refresh_period
        return self.grad_averager.has_begun(self.state_averager.told, list(self._declared()))

    def _will_others_come(self, waited: float) -> bool:
        """Are they still in the last round, that we have behind us? Not for longer than they would wait for us. Or do
        they compute for the epoch that we take for ended? Not everybody believes everybody the same: who steps alone
        before the others each time misses all their rounds, and is believed less for it."""
        if not self.delay_grad_averaging:  # else the tracker is not paused, and looks itself
            self.tracker.look_while_paused()
        tracker = self.tracker
        if waited < LONGEST * self.matchmaking_time and tracker.awaited & tracker.behind:
            return True
        have_met = 2 * tracker.num_ahead >= tracker.global_progress.num_peers
        return not have_met and bool(tracker.awaited & tracker.computing)
