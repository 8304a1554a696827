"""Keeping one's training state the others': join, catch up, settle; and taking it out and putting it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from hivemind.averaging.control import AveragingStage
from hivemind.p2p import PeerID
from hivemind.utils.logging import get_logger

from volunteer_kit.checkpoint import CheckpointError
from volunteer_kit.swarm.agreement import BEGINNING, Follow, Told, prevailing, read_all, under
from volunteer_kit.swarm.assembly import AssembledOptimizer
from volunteer_kit.swarm.missed_rounds import UNDER_WAY
from volunteer_kit.swarm.obeying import ObeyingOptimizer
from volunteer_kit.swarm.state import digest
from volunteer_kit.swarm.transfer import StateRefused

logger = get_logger(__name__)
LAST_RESORT = 3  # times that a lost state is asked for before we go on without
SETTLED = 1e-6  # relative distance of models at the end of a run; rounding of equal steps stays below it


class FollowingOptimizer(ObeyingOptimizer, AssembledOptimizer):
    """hivemind.Optimizer that knows whose state is right, and takes it when its own is not."""

    _just_loaded = False  # and not stepped since
    only_accumulated = True  # the last step() did, and waited for nobody: its time is the device's
    states_asked_in_vain = 0  # times in a row that the others were ahead and none of them gave us their state
    _asked_in_vain = 0  # times, for the statistics to parameters that we have
    made_up_for = 0  # rounds that we had missed, since the last report
    _round_under_way: float | None = None  # time.monotonic() since when one is of which we are no member
    _stepped_alone = False  # while others were here; what they hold is not known since
    _look_at = 0.0  # time.monotonic(); not before

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

    def _finish_updates(self) -> None:
        self.only_accumulated = False
        self.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)

    def _catch_up(self) -> bool:
        """Take the state that the last round's members went on with; if none gives it, the next round tells anew.

        :returns: whether one was taken
        """
        self._finish_updates()
        follow, self._follow = self._follow, None
        return follow is not None and self._take_state(at_least=follow.at_least, donors=follow.donors or None)

    def _miss_round(self, own_epoch: int, swarm_epoch: int) -> None:
        """Nobody came to our round, though others are here: it was over, or theirs is still to come.

        :param own_epoch: ours when it began, :param swarm_epoch: theirs
        """
        if self._follow is None and swarm_epoch > own_epoch:
            self._follow = Follow(swarm_epoch, (), f"at epoch {own_epoch}, the others at {swarm_epoch}")
        else:
            self._stepped_alone = True
        self.state_averager.steps_alone = True

    def _compare_after_lone_step(self) -> None:
        """When most others have ended the epoch too: do they hold what we hold? Who waited for the next round to find
        out would train for nobody meanwhile, begin it at a time of its own, and miss it again; who asked fewer might
        follow one that has stepped alone, too."""
        at_our_epoch = self.tracker.global_progress.num_peers - 1 - len(self.tracker.behind)
        if at_our_epoch < 1 or time.monotonic() < self._look_at or not self.state_averager.is_between_steps:
            return
        self._look_at = time.monotonic() + self.options.refresh_period
        own_id, epoch = self.dht.peer_id, self.local_epoch
        others = {peer: one for peer, one in self._declared().items() if peer != own_id}
        said = {peer: one for peer, one in others.items() if one.epoch == epoch}
        if 2 * len(said) <= len(others):
            return  # they will declare it in a moment
        donors = frozenset(said) | (frozenset() if self.client_mode else {own_id})
        right = prevailing(said | read_all({own_id: self.state_averager.told}), epoch, donors)
        self._stepped_alone = False
        if right and own_id not in right:
            self._follow = Follow(epoch, tuple(sorted(right)), "our model is not the others'")

    def _take_state(self, **which) -> bool:
        """Download and adopt a state, begin the epoch anew. Nothing changes if there is none.

        Back when the parameters are here; the statistics come while we train, and the next step waits for them.

        A round that is being arranged meanwhile is kept, and left only if the download takes long: whoever leaves a
        group makes the others wait, and is itself too late for the next.
        """
        self.state_averager.abandon_statistics()  # or a step that waits for them would be waited for
        self._finish_updates()
        leave = threading.Timer(self.matchmaking_time, self._drop_scheduled_round)
        leave.start()
        try:
            with self.tracker.pause_updates():
                before = self.made_up_for
                if self._make_up_for_rounds(**which):
                    self._follow, self._stepped_alone, self.states_asked_in_vain = None, False, 0
                    self._go_on_after(self.made_up_for - before)
                    return True
                ours, others = self.local_epoch, self.tracker.global_epoch
                logger.info(f"Downloading a state at epoch {ours}, the others at {others}")
                loaded = self.state_averager.load_state_from_peers(
                    timeout=self.load_state_timeout, whole=False, on_download=self.on_download, **which
                )
                if loaded:
                    self._follow = None
                    self.uncertain_steps.given_up(self.state_averager.kept_until)
                    self._start_epoch_anew()
        finally:
            leave.cancel()
        self.states_asked_in_vain = 0 if loaded else self.states_asked_in_vain + 1
        return loaded or self.stand_on_checkpoint_if_lost()

    def _make_up_for_rounds(self, at_least: int | None = None, donors: Sequence[PeerID] | None = None, **_) -> bool:
        """Take the steps that the others have taken since, from the averages of their rounds.

        :returns: are we where they are? If not, we may be some steps nearer
        """
        if self.grad_averager.verification is not None or not self.complete:
            return False
        averager, own_id = self.state_averager, self.dht.peer_id
        if averager.take_back_lone_steps():
            self._tell_tracker_where_we_are()
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
            averager.round_name, averager.makes_no_step = name, not self._something_came()
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
        return own_id in right

    def _declared(self) -> dict[PeerID, Told]:
        """What those donors hold that have obeyed the order that we have."""
        return under(self.state_averager.obeyed, read_all(self.state_averager.declared()))

    def _look_after_round_under_way(self) -> bool:
        """Is it over? We count samples meanwhile, and go into no other round: they are of the model before its step,
        and so one step old at most. :returns: whether the gradients at hand are older"""
        if time.monotonic() < self._look_at:
            return False
        self._look_at, before = time.monotonic() + self.options.refresh_period, self.made_up_for
        with self.tracker.pause_updates():
            self._make_up_for_rounds()
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
        self._just_loaded = True
        self._tell_tracker_where_we_are()
        if made_up_for:
            self.grad_averager.stale = len(self.grad_averager.names)
        self.tracker.report_local_progress(self.local_epoch, self.grad_averager.local_samples_accumulated)

    @property
    def complete(self) -> bool:
        """Parameters and statistics are those of one peer at one moment: nothing is on its way, or has been lost."""
        return self.state_averager.complete

    def _replace_lost_statistics(self) -> bool:
        """The statistics to our parameters will not come: take another donor's state. If nobody has one, go on with the
        statistics that we have; whoever comes later with better ones is followed.

        :returns: whether a state was taken
        """
        if self._take_state():
            self._asked_in_vain = 0
            return True
        self._asked_in_vain += 1
        if self._asked_in_vain >= LAST_RESORT:
            self._asked_in_vain = 0
            logger.warning("Nobody gives the optimizer's statistics; going on with our own")
            self.state_averager.go_on_without()
        return False

    def load_state_from_peers(self, **kwargs) -> bool:
        """Adopt the newest state from the best donor, drop local progress. :returns: whether a state was adopted."""
        loaded = self._take_state(**kwargs)
        if not loaded:
            logger.warning("No peer shares a newer state yet")
            with self.tracker.pause_updates():
                self._start_epoch_anew()
        return loaded

    def _tell_tracker_where_we_are(self) -> None:
        if self.local_epoch < self.tracker.local_progress.epoch:
            self.tracker.go_back(self.local_epoch)

    def _start_epoch_anew(self) -> None:
        self._just_loaded = True
        self._tell_tracker_where_we_are()
        self.tracker.report_local_progress(local_epoch=self.local_epoch, samples_accumulated=0)
        self.grad_averager.reset_accumulated_grads_()

    def join(self, patience: float = 30.0) -> bool:
        """Look for the swarm and take its parameters, before the first microbatch; the statistics follow, see
        `complete`. :returns: whether a state was taken.

        hivemind finds out only while it trains: the newcomer's first round would be one of epoch 0 among veterans.

        :param patience: s to wait for the first look at the others' progress, and for a donor to answer
        """
        deadline, taken = time.monotonic() + patience, self.stand_on_checkpoint()
        self.tracker.look_again(timeout=patience)  # by itself it does every ten seconds, when nothing goes on
        if self.tracker.global_progress.num_peers <= 1:  # a DHT node that has just come may know too few others
            self.tracker.look_again(timeout=self.matchmaking_time)
        # a claim that nobody confirms yet (one peer is up, and a dead one's record is behind it) is waited for as well:
        # to take it for an empty swarm would be to start anew beside a running one
        while max(self.tracker.global_epoch, self.tracker.highest_claim) > self.local_epoch:
            taken = self._take_state() or taken
            if taken and self.local_epoch >= self.tracker.global_epoch - 1:
                break
            if time.monotonic() > deadline:
                break
            if taken:  # who is fast and alone does not wait for whom it does not see
                self.tracker.attend(self.local_epoch)
            self.tracker.look_again(timeout=self.matchmaking_time)
            time.sleep(min(1.0, self.options.refresh_period))
        return taken

    def settle(self, patience: float = 0.0) -> str:
        """Finish what runs in the background. :returns: digest of parameters and statistics.

        :param patience: s to wait until all donors hold the same as we, following those whom most follow; 0 to leave
        """
        deadline = time.monotonic() + patience
        with suppress(StateRefused):
            self.state_averager.await_statistics(patience)
        self.state_averager.abandon_statistics()
        self._finish_updates()
        self._drop_scheduled_round()
        while time.monotonic() < deadline and self.tracker.global_progress.num_peers > 1:
            if self._agree(late=time.monotonic() > deadline - patience / 2):
                self.uncertain_steps.shared()
                break
            time.sleep(self.options.refresh_period)
        with suppress(StateRefused):
            self.state_averager.await_statistics(max(0.0, deadline - time.monotonic()))
        return digest(self.state_averager.state_tensors())

    def _agree(self, late: bool) -> bool:
        """Do all donors hold what we hold? If not, and most others of our epoch agree, take theirs.

        :param late: no longer wait for those that are an epoch behind
        """
        if not self.complete:
            if self.state_averager.why_incomplete:
                self._take_state()
            return False
        own_id, own_epoch = self.dht.peer_id, self.local_epoch
        declared = self._declared()
        newest = max((one.epoch for one in declared.values()), default=own_epoch)
        if self.client_mode and late and newest < own_epoch:  # ahead alone, where nobody can follow
            self._take_state(at_least=newest)
            return False
        said = declared | read_all({own_id: self.state_averager.told})
        # further behind are the dead, for as long as their word is remembered, and who will download anyway
        said = {peer: one for peer, one in said.items() if one.epoch >= own_epoch - 1}
        if newest > own_epoch:
            self._take_state()
            return False
        if min(one.epoch for one in said.values()) < own_epoch and not late:
            return False  # on its way, and with a vote
        said = {peer: one for peer, one in said.items() if one.epoch == own_epoch}
        donors = frozenset(said) - ({own_id} if self.client_mode else frozenset())
        right = prevailing(said, own_epoch, donors, SETTLED)
        if own_id not in right and right:
            self._take_state(at_least=own_epoch, donors=tuple(right & donors))
        return right == frozenset(said)

    # --- out and back ---

    def named_state(self, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A consistent copy for a checkpoint: parameters by name, statistics as "optimizer/NAME/STATISTIC", and
        what belongs into its meta (epoch, counters).

        :param names: of the parameters, in the order of the parameter groups
        Raises CheckpointError while statistics are on their way.
        """
        if not self.complete:
            raise CheckpointError("Nothing was saved: the optimizer's statistics are still being downloaded.")
        metadata, tensors, _ = self.state_averager.get_current_state()
        keys = [*names, *self.state_averager.statistic_keys(names)]
        del metadata["past"]
        return dict(zip(keys, tensors, strict=True)), metadata

    def load_named_state(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor], metadata: dict) -> None:
        """Continue from what named_state gave. Raises StateRefused if it does not fit this model and optimizer."""
        keys = [*names, *self.state_averager.statistic_keys(names)]
        missing = [key for key in keys if key not in tensors]
        if missing:
            raise StateRefused(f"the checkpoint lacks {missing[0]} and {len(missing) - 1} more")
        state = [tensors[key] for key in keys]
        self.state_averager.check_state(metadata, state)
        self.state_averager.adopt_state(metadata, state)
        with self.tracker.pause_updates():
            self._start_epoch_anew()

    def restore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put an earlier training_state() back; the epoch goes on (a maximum of claims would undo going back)."""
        self.state_averager.abandon_statistics()
        self._finish_updates()
        self.state_averager.adopt_state({**self.state_averager.metadata(), "lineage": BEGINNING.hex()}, list(tensors))
        self.uncertain_steps.given_up()
        self.grad_averager.forget_left_over()
        self.grad_averager.reset_accumulated_grads_()

    def training_state(self) -> list[torch.Tensor]:
        """The optimizer's own (CPU, float32) parameters and statistics, as a joiner would download them."""
        return self.state_averager.state_tensors()
