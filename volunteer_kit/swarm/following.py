"""Keeping one's training state the others': join, catch up, settle; and taking it out and putting it back."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from hivemind.utils.logging import get_logger

from volunteer_kit.checkpoint import CheckpointError
from volunteer_kit.swarm.agreement import BEGINNING, prevailing, read_all
from volunteer_kit.swarm.making_up import MakingUpOptimizer
from volunteer_kit.swarm.state import digest
from volunteer_kit.swarm.transfer import StateRefused

logger = get_logger(__name__)
LAST_RESORT = 3  # times that a lost state is asked for before we go on without
SETTLED = 1e-6  # relative distance of models at the end of a run; rounding of equal steps stays below it


class FollowingOptimizer(MakingUpOptimizer):
    """hivemind.Optimizer that knows whose state is right, and takes it when its own is not."""

    # Overrides: _follow, _stepped_apart, only_accumulated, states_asked_in_vain

    only_accumulated = True  # the last step() did, and waited for nobody: its time is the device's
    _asked_in_vain = 0  # times, for the statistics to parameters that we have
    _next_coming = 0.0  # time.monotonic(), of a request for the state of an epoch that somebody claims

    def _catch_up(self) -> bool:
        """Take the state that the last round's members went on with; if none gives it, the next round tells anew.

        :returns: whether one was taken
        """
        self._finish_updates()
        follow, self._follow = self._follow, None
        return follow is not None and self._take_state(at_least=follow.at_least, donors=follow.donors or None)

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
                    self._follow, self._stepped_apart, self.states_asked_in_vain = None, False, 0
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

    def come_to(self, epoch: int) -> bool:
        """Take the others' state if they say that they are at `epoch` and we are not; to be called again and again.
        Nothing changes if none of them has it: a peer may have claimed the epoch and died.

        :returns: whether we are there
        """
        is_claimed = self.local_epoch < epoch <= self.tracker.global_epoch
        if is_claimed and time.monotonic() >= self._next_coming:
            self._take_state(at_least=epoch)
            self._next_coming = time.monotonic() + self.matchmaking_time
        return self.local_epoch >= epoch

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
            if taken and (self.local_epoch >= self.tracker.global_epoch - 1 or self._is_left_behind):
                break  # or another download would begin, and be left behind as well, for all of our patience
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

    def named_state(
        self, names: Sequence[str], certain: bool = False
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A consistent copy for a checkpoint: parameters by name, statistics as "optimizer/NAME/STATISTIC", and
        what belongs into its meta (epoch, counters).

        :param names: of the parameters, in the order of the parameter groups
        :param certain: rather the last state that was the swarm's, if others are here and our later steps may be nobody
            else's: who is restarted can make up for rounds from there, and from no other
        Raises CheckpointError while statistics are on their way.
        """
        if not self.complete:
            raise CheckpointError("Nothing was saved: the optimizer's statistics are still being downloaded.")
        averager, others_are_here = self.state_averager, self.tracker.global_progress.num_peers > 1
        before = averager.last_shared() if certain and others_are_here else None
        metadata, tensors = before or averager.state_now()
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
