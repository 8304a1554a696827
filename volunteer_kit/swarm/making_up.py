"""Being where the others are: rounds that nobody came to, tried again; rounds that we missed, made up for; steps that
are nobody else's, taken back."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from hivemind.averaging.control import AveragingStage
from hivemind.p2p import PeerID
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.agreement import Follow, Told, prevailing, read_all, under
from volunteer_kit.swarm.assembly import AssembledOptimizer
from volunteer_kit.swarm.missed_rounds import UNDER_WAY
from volunteer_kit.swarm.obeying import ObeyingOptimizer

logger = get_logger(__name__)
AGAIN_AND_AGAIN = 2  # times in a row; others take no more samples from anybody than its device can have done lately


class Untaken(NamedTuple):
    """What a round was to be of that nobody came to."""

    samples: int
    weight: float
    names: tuple


class MakingUpOptimizer(ObeyingOptimizer, AssembledOptimizer):
    """hivemind.Optimizer that knows which rounds it lacks, and fetches their averages."""

    # Overrides: _follow

    _just_loaded = False  # and not stepped since
    states_asked_in_vain = 0  # times in a row that the others were ahead and none of them gave us their state
    made_up_for = 0  # rounds that we had missed, since the last report
    _round_under_way: float | None = None  # time.monotonic() since when one is of which we are no member
    _stepped_apart = False  # alone, or with no more than half of those here: what the others hold is not known since
    _untaken: Untaken | None = None  # our last round was postponed
    _times_postponed = _times_back = 0  # since a round that was the swarm's for certain
    _next_comparison = 0.0  # time.monotonic(), of what the others hold with what we hold
    _next_recovery = 0.0  # time.monotonic(), of a request for the round under way

    @property
    def complete(self) -> bool:
        """Parameters and statistics are those of one peer at one moment: nothing is on its way, or has been lost."""
        return self.state_averager.complete

    @property
    def _is_left_behind(self) -> bool:
        """Statistics of a state are on their way that the others have left behind. It is waited for all the same, and
        the rounds since made up for: a newer one would be left behind as well, and the next, on a line that takes
        longer for one than the others for two rounds."""
        is_arriving = not self.complete and self.state_averager.why_incomplete is None
        return is_arriving and self.tracker.global_epoch > self.local_epoch + 1

    @property
    def _can_make_up(self) -> bool:
        return self.grad_averager.verification is None and self.complete

    @property
    def _may_postpone(self) -> bool:
        """The next step, if its round comes to nothing."""
        may = self.complete and self.grad_averager.local_steps is None
        return may and self._times_postponed < AGAIN_AND_AGAIN

    def _finish_updates(self) -> None:
        self.only_accumulated = False
        self.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)

    def _drop_scheduled_round(self) -> None:
        """Leave a round that is being arranged. One that runs already is seen through, with weight 0: leaving it would
        make its members wait for us."""
        control, self.scheduled_grads = self.scheduled_grads, None
        if control is None or control.done() or control.triggered:  # triggered: the step in the background waits for it
            return
        if control.stage in (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP):
            control.cancel()
        else:
            self._tag_along_with_zero_weight(control)

    def _tell_tracker_where_we_are(self) -> None:
        if self.local_epoch < self.tracker.local_progress.epoch:
            self.tracker.go_back(self.local_epoch)

    def _start_epoch_anew(self) -> None:
        self._just_loaded, self._untaken = True, None
        self._tell_tracker_where_we_are()
        self.tracker.report_local_progress(local_epoch=self.local_epoch, samples_accumulated=0)
        self.grad_averager.reset_accumulated_grads_()

    # --- rounds that we missed ---

    def _postpone(self, report: dict[str, Any], was_alone: bool) -> bool:
        """A step of ours would be nobody's, so none is taken; but only so often, for some who are seen never come. Who
        could not make up for the round, if it was over, takes none if it is still to come.

        :param was_alone: nobody can have got anything of ours
        """
        is_to_come = was_alone and max(report["swarm_epoch"], self.tracker.global_epoch) < report["epoch"]
        if not (self._may_postpone and (self._can_make_up or is_to_come)):
            return False
        self._times_postponed += 1
        kept = was_alone and report["samples"] > 0
        self._untaken = Untaken(*(report[n] for n in Untaken._fields)) if kept else Untaken(0, 0.0, ())
        self.state_averager.is_postponed = True
        return True

    def _miss_round(self, own_epoch: int, swarm_epoch: int) -> None:
        """Nobody came to our round, though others are here: it was over, or theirs is still to come.

        :param own_epoch: ours when it began, :param swarm_epoch: theirs
        """
        if self._follow is None and swarm_epoch > own_epoch:
            self._follow = Follow(swarm_epoch, (), f"at epoch {own_epoch}, the others at {swarm_epoch}")
        else:
            self._stepped_apart = True

    def _try_again(self) -> bool:
        """Be at the epoch again whose round nobody came to, with its samples; if it was over, take its step now.

        :returns: whether one was taken, and the gradients at hand are of the model before it
        """
        self._finish_updates()
        untaken, self._untaken = self._untaken, None
        before = self.made_up_for
        with self.tracker.pause_updates():
            self.grad_averager.stale = 0  # of the model that we hold still
            if untaken.samples:
                self.grad_averager.take_back(*untaken)
            self._make_up_from_here()
            self._go_on_after(self.made_up_for - before)
        return self.made_up_for > before

    def _compare_after_step_apart(self) -> None:
        """When most others have ended the epoch too: do they hold what we hold? Who waited for the next round to find
        out would train for nobody meanwhile, begin it at a time of its own, and miss it again; who asked fewer might
        follow one that has stepped alone, too."""
        at_our_epoch = self.tracker.global_progress.num_peers - 1 - len(self.tracker.behind)
        is_due = time.monotonic() >= self._next_comparison and self.state_averager.is_between_steps
        if at_our_epoch < 1 or not is_due:
            return
        self._next_comparison = time.monotonic() + self.options.refresh_period
        own_id, epoch = self.dht.peer_id, self.local_epoch
        others = {peer: one for peer, one in self._declared().items() if peer != own_id}
        said = {peer: one for peer, one in others.items() if one.epoch == epoch}
        if 2 * len(said) <= len(others):
            return  # they will declare it in a moment
        donors = frozenset(said) | (frozenset() if self.client_mode else {own_id})
        right = prevailing(said | read_all({own_id: self.state_averager.told}), epoch, donors)
        self._stepped_apart = False
        if right and own_id not in right:
            self._follow = Follow(epoch, tuple(sorted(right)), "our model is not the others'")
        elif 2 * len(right) > 1 + len(others):
            self.state_averager.is_shared = True

    def _declared(self) -> dict[PeerID, Told]:
        """What those donors hold that have obeyed the order that we have."""
        return under(self.state_averager.obeyed, read_all(self.state_averager.declared()))

    def _make_up_for_rounds(self, at_least: int | None = None, donors: Sequence[PeerID] | None = None, **_) -> bool:
        """Take the steps that the others have taken since, from the averages of their rounds: from what we hold, or
        from the last state that most others held as well. Where statistics did not arrive the latter alone can be.

        :param donors: who has told that it is elsewhere: here, though our line was cut and their records are over
        :returns: are we where they are? If not, we may be some steps nearer
        """
        if self.grad_averager.verification is not None:
            return False
        if self._make_up_from_here(at_least, donors):
            return True
        others_are_here = bool(donors) or self.tracker.global_progress.num_peers > 1
        if not (others_are_here and self._go_back()):
            return False
        if self._make_up_from_here(at_least, donors):
            return True
        last = max(at_least or 0, self.tracker.global_epoch)
        if self.local_epoch >= last - 1 and self._times_back <= AGAIN_AND_AGAIN:
            logger.info(f"Back at epoch {self.local_epoch}, where most met; nobody has a round that begins there yet")
            return True
        return False

    def _make_up_from_here(self, at_least: int | None = None, donors: Sequence[PeerID] | None = None) -> bool:
        if not self._can_make_up:
            return False
        averager, own_id = self.state_averager, self.dht.peer_id
        last = max(at_least or 0, self.tracker.global_epoch)
        first, asked = self.local_epoch, list(donors or self._declared())
        under_way, self._round_under_way = self._round_under_way, None
        while True:  # to the last that they have: a quick swarm is a round farther when we have the one we asked for
            name = self.grad_averager.make_up_for(averager.told, asked, self.load_state_timeout)
            if name is None:
                break
            if name == UNDER_WAY:
                since = under_way if under_way is not None and self.local_epoch == first else time.monotonic()
                if time.monotonic() - since < self.averaging_timeout:
                    self._round_under_way = since
                    self._drop_scheduled_round()  # it was to be this one
                    logger.info(f"Made up for rounds {first} to {self.local_epoch}; the next one is under way")
                    return True
                break
            if self.local_epoch == first:
                self.uncertain_steps.given_up(kept_until=first)  # it began with what we hold: that is the swarm's
            averager.round_name, averager.makes_no_step = name, not self.grad_averager.something_came()
            self._load_averaged_gradients_into_optimizer_()
            averager.step(increment_epoch=True, optimizer_step=True)
            self.made_up_for += 1
        # the last round may be under way still, and we in time for the next
        if self.local_epoch == first or self.local_epoch < (at_least or last - 1):
            logger.info(f"Made up for rounds {first} to {self.local_epoch}, of {last}: not enough")
            return False
        said = {peer: one for peer, one in self._declared().items() if one.epoch == self.local_epoch}
        right = prevailing(said | read_all({own_id: averager.told}), self.local_epoch, {*said, own_id})
        logger.info(f"Made up for rounds {first} to {self.local_epoch}; the others hold the same: {own_id in right}")
        if own_id in right:
            self._times_postponed = 0  # they do come, and it is we who were late
        return own_id in right

    def _go_back(self) -> bool:
        """:returns: whether there were any"""
        if not self.state_averager.go_back_to_last_shared():
            return False
        self._times_back += 1
        self.uncertain_steps.given_up(kept_until=self.local_epoch)
        self._tell_tracker_where_we_are()
        return True

    def _look_after_round_under_way(self) -> bool:
        """Is it over? We count samples meanwhile, and go into no other round: they are of the model before its step,
        and so one step old at most. :returns: whether the gradients at hand are older"""
        if time.monotonic() < self._next_recovery:
            return False
        self._next_recovery, before = time.monotonic() + self.options.refresh_period, self.made_up_for
        with self.tracker.pause_updates():
            self._make_up_from_here()
            made_up_for = self.made_up_for - before
            if made_up_for:
                self._go_on_after(made_up_for)
        return made_up_for > 1

    def _go_on_after(self, made_up_for: int) -> None:
        """Gradients of a model that is one step old are as good as those that others compute while a round is under
        way; those of an older one are not."""
        if made_up_for > 1 or (made_up_for and self.grad_averager.stale):
            self._start_epoch_anew()
            return
        self._just_loaded = self._can_make_up  # else who is behind has missed it, and takes a state
        self._tell_tracker_where_we_are()
        if made_up_for:
            self.grad_averager.stale = len(self.grad_averager.names)
        self.tracker.count_again(self.local_epoch, self.grad_averager.local_samples_accumulated)
