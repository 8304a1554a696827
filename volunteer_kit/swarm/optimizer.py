"""hivemind.Optimizer for one run: our averagers under it, and a peer that doubts its own state asks the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import NoCompression
from hivemind.utils.logging import get_logger

from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.swarm.admission import IsAdmitted, admit_everybody
from volunteer_kit.swarm.allreduce import Reduce
from volunteer_kit.swarm.averager import Round, SwarmGradientAverager
from volunteer_kit.swarm.options import StepReport, SwarmOptions
from volunteer_kit.swarm.peer import Peer
from volunteer_kit.swarm.records import Limits, SwarmProgressTracker
from volunteer_kit.swarm.state import StateRefused, SwarmStateAverager, digest

logger = get_logger(__name__)
GROUP_PATIENCE = 2.5  # matchmaking times that a peer looks for its group before it concludes that it missed it
ROUNDS_APART = 2  # in a row; averaging parameters mends one difference, statistics that differ bring it back


class SwarmOptimizer(hivemind.Optimizer):
    """hivemind.Optimizer with checked, equal averaging and exact state transfer.

    :param peer: a running Peer
    :param options: what all peers share
    :param params: parameters or parameter groups, on the training device
    :param optimizer: parameter groups -> optimizer that holds its zero state already (hivemind would otherwise take a
        real step with zero gradients to create it)
    :param scheduler: optimizer -> scheduler, stepped once an epoch
    :param is_admitted: seam: may this peer id take part? In the averagers' processes
    :param reduce: seam: the reduction rule
    """

    def __init__(
        self,
        *,
        peer: Peer,
        options: SwarmOptions,
        params,
        optimizer: Callable,
        scheduler: Callable | None = None,
        is_admitted: IsAdmitted = admit_everybody,
        reduce: Reduce = weighted_mean,
    ):
        self.options = options
        self.reports: deque[StepReport] = deque(maxlen=1000)  # of global steps not yet taken by the trainer
        self._seams = {"is_admitted": is_admitted, "reduce": reduce}
        self.in_doubt: str | None = None  # why our state may differ from the others'
        self._report: dict[str, Any] = {}  # of the global step under way
        self._just_loaded = False  # and not stepped since
        self._last_met = float("-inf")  # when we last knew of another peer
        super().__init__(
            dht=peer.dht,
            run_id=options.run_key,
            target_batch_size=options.target_batch_size,
            params=params,
            optimizer=optimizer,
            scheduler=scheduler,
            matchmaking_time=options.matchmaking_time,
            averaging_timeout=options.averaging_timeout,
            allreduce_timeout=options.allreduce_timeout,
            next_chunk_timeout=options.next_chunk_timeout,
            load_state_timeout=options.load_state_timeout,
            average_state_every=options.average_state_every,
            offload_optimizer=True,
            delay_optimizer_step=options.delay_optimizer_step,
            delay_grad_averaging=options.delay_grad_averaging,
            delay_state_averaging=True,
            client_mode=peer.client_mode,  # None on a client-mode DHT crashes after the first epoch
            grad_compression=options.grad_codec,
            state_averaging_compression=options.state_codec,
            load_state_compression=NoCompression(),  # a joiner equals its donor to the last bit
            tracker_opts={
                "min_refresh_period": options.refresh_period,
                "default_refresh_period": 2 * options.refresh_period,
                "metadata_expiration": options.metadata_expiration,
            },
        )

    # --- parts, made ours ---

    def _make_progress_tracker(self, target_batch_size: int, **kwargs) -> SwarmProgressTracker:
        limits = Limits(target_batch_size, self.options.max_samples_per_second)
        return SwarmProgressTracker(
            self.dht,
            self.run_id,
            target_batch_size,
            limits=limits,
            report_period=self.options.refresh_period / 2,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
            **kwargs,
        )

    def _averager_options(self, max_weight: float) -> dict[str, Any]:
        return {
            "dht": self.dht,
            "min_matchmaking_time": self.matchmaking_time,
            "allreduce_timeout": self.allreduce_timeout,
            "next_chunk_timeout": self.next_chunk_timeout,
            "shutdown_timeout": self.shutdown_timeout,
            "client_mode": self.client_mode,
            "max_weight": max_weight,
            "declare_state_period": 10.0,  # s; a vanished donor is forgotten as fast
            **self._seams,
        }

    def _make_state_averager(self, **kwargs) -> SwarmStateAverager:
        return SwarmStateAverager(
            prefix=f"{self.run_id}_state_averager",
            offload_optimizer=True,
            custom_gradients=True,
            status_loglevel=self.status_loglevel,
            start=True,
            **self._averager_options(max_weight=1.0),
            **kwargs,
        )

    def _make_gradient_averager(self, factory, **kwargs) -> SwarmGradientAverager:
        # a fast peer may pass the target while others are at their last microbatch, hence more than one target
        options = self._averager_options(max_weight=2.0 * self.target_batch_size)
        return super()._make_gradient_averager(
            lambda **hivemind_kwargs: SwarmGradientAverager(
                **{**hivemind_kwargs, **options, "allow_state_sharing": False}
            ),
            **kwargs,
        )

    # --- one microbatch ---

    def step(self, batch_size: int, grad_scale: float = 1.0) -> bool:
        """Count the gradients in .grad, the mean over `batch_size` samples times `grad_scale`; when the swarm has
        target_batch_size samples, average and take the global step. :returns: False if they were not finite."""
        self._grad_scale, self._taken = grad_scale, True
        if self.state_averager.rounds_apart >= ROUNDS_APART:
            self.in_doubt = "our state differs from what most others hold"
            self.state_averager.rounds_apart = 0
        if self.in_doubt and self.tracker.global_progress.num_peers > 1 and self._settle_doubt():
            return True  # the gradients at hand are of the model we just gave up
        super().step(batch_size=batch_size)
        return self._taken

    def _should_load_state_from_peers(self) -> bool:
        """Behind the others by more than a step under way. A newcomer that is one epoch behind after its download takes
        part in the next round, where it is told the rest: it would otherwise download for ever beside fast peers."""
        behind = self.tracker.global_epoch - self.local_epoch
        if behind <= 0 or (behind == 1 and self._just_loaded):
            return False
        return super()._should_load_state_from_peers()

    def _check_and_accumulate_gradients(self, batch_size: int, grad_scaler=None) -> bool:
        self._taken = self.grad_averager.accumulate_grads_(batch_size, self._grad_scale)
        if self._taken:
            self.tracker.report_local_progress(self.local_epoch, self.grad_averager.local_samples_accumulated)
        return self._taken

    def _maybe_schedule_gradient_averaging(self) -> None:
        self.grad_averager.epoch = self.local_epoch
        self.grad_averager.expected_group_size = self.tracker.global_progress.num_peers
        super()._maybe_schedule_gradient_averaging()

    def _maybe_schedule_state_averaging(self) -> None:
        """Never ahead: members tell each other what they hold after the step, so the round begins after it."""

    # --- the global step ---

    def _update_global_epoch(self, grad_scaler) -> None:
        if self.tracker.global_progress.num_peers <= 1:
            self.tracker.look_again(timeout=self.matchmaking_time)
            if self.tracker.global_progress.num_peers > 1:
                return  # we were about to step alone; the next microbatch counts with theirs
        self.grad_averager.epoch, self._just_loaded = self.local_epoch, False
        self.grad_averager.expected_group_size = self.tracker.global_progress.num_peers
        self.state_averager.expected_group_size = self.tracker.global_progress.num_peers
        report = self._report = {
            "epoch": self.local_epoch + 1,
            "samples": self.grad_averager.local_samples_accumulated,
            "started": time.perf_counter(),
        }
        met_others = self.tracker.global_progress.num_peers > 1
        super()._update_global_epoch(grad_scaler)
        if not report.get("averaged"):  # alone; right if we are, and wrong if we just could not see the others
            seen_lately = time.monotonic() - self._last_met < 2 * self.options.metadata_expiration
            self._finish_report(report, Round(), "stepped alone, though others were here" if seen_lately else None)
        if met_others:
            self._last_met = time.monotonic()
        self._declare_priority()

    def _average_gradients_and_load_into_optimizer(self, maybe_step_control: StepControl | None) -> None:
        """Take the averaged gradients; when the round failed, our own (they are still in the buffers), and doubt.

        With delay_grad_averaging hivemind calls this in a background thread.
        """
        report, outcome, failure = self._report, Round(), None
        if maybe_step_control is not None:
            report["averaged"] = True
            try:
                outcome = self._await_round(maybe_step_control)
            except BaseException as e:
                failure = f"no round of averaging: {e!r}"
            if not outcome.complete:
                failure = f"received {outcome.received:.1%} of the averaged gradients"
            elif outcome.round_epoch is not None and outcome.round_epoch != report["epoch"] - 1:
                failure = f"the others were at epoch {outcome.round_epoch + 1}"
        self._load_averaged_gradients_into_optimizer_()
        if maybe_step_control is not None:
            self._finish_report(report, outcome, failure)

    def _await_round(self, control: StepControl) -> Round:
        """The round's outcome. Raises TimeoutError, and leaves, when no group is found while one should have been:
        the others have gone on without us, and what is left is to follow them."""
        try:
            return control.result(GROUP_PATIENCE * self.matchmaking_time)
        except FutureTimeoutError:  # not the built-in one on Python 3.10
            if control.stage in (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP):
                control.cancel()
                raise
            return control.result(self.averaging_timeout)

    def _finish_report(self, report: dict[str, Any], outcome: Round, failure: str | None) -> None:
        if failure:
            self.in_doubt = failure
            self._declare_priority()
        self.reports.append(
            StepReport(
                epoch=report["epoch"],
                samples=report["samples"],
                group_size=max(1, len(outcome)),
                received=outcome.received,
                seconds=time.perf_counter() - report["started"],
                bytes_sent=outcome.bytes_sent,
                bytes_received=outcome.bytes_received,
                refused=outcome.refused,
                failure=failure,
            )
        )

    # --- agreeing with the others ---

    def _drop_scheduled_round(self) -> None:
        """Leave a round that is being arranged. One that runs already is seen through, with weight 0: leaving it would
        make its members wait for us."""
        control, self.scheduled_grads = self.scheduled_grads, None
        if control is None or control.done():
            return
        if control.stage in (AveragingStage.IDLE, AveragingStage.LOOKING_FOR_GROUP):
            control.cancel()
        else:
            self._tag_along_with_zero_weight(control)

    def _declare_priority(self) -> None:
        """Tell joiners how good a donor we are: by epoch, and behind those that do not doubt their own state."""
        if not self.client_mode:
            self.state_averager.state_sharing_priority = self.local_epoch - (0.5 if self.in_doubt else 0.0)

    def _settle_doubt(self) -> bool:
        """Take the state of a peer that ranks above us; if there is none, ours is the one that others take.

        :returns: whether a state was taken
        """
        self._drop_scheduled_round()
        self.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
        rank = (self.local_epoch - 0.5, self.dht.peer_id.to_bytes())
        with self.tracker.pause_updates():
            loaded = self.state_averager.load_state_from_peers(timeout=self.load_state_timeout, own_rank=rank)
            if loaded:
                self._start_epoch_anew()
        self.in_doubt = None
        self._declare_priority()
        return loaded

    def join(self, patience: float = 30.0) -> bool:
        """Look for the swarm and take its state, before the first microbatch. :returns: whether a state was taken.

        hivemind finds out only while it trains: the newcomer's first round would be one of epoch 0 among veterans.

        :param patience: s to wait for the first look at the others' progress, and for a donor to answer
        """
        deadline, taken = time.monotonic() + patience, False
        self.tracker.fetched_global_progress_this_epoch.wait(patience)
        while self.tracker.global_epoch > self.local_epoch:
            taken = self.load_state_from_peers() or taken
            if taken and self.local_epoch >= self.tracker.global_epoch - 1:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(min(1.0, self.options.refresh_period))
        return taken

    def load_state_from_peers(self, **kwargs) -> bool:
        """Adopt the newest state from the best donor, drop local progress. :returns: whether a state was adopted."""
        self._drop_scheduled_round()
        self.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
        with self.tracker.pause_updates():
            loaded = self.state_averager.load_state_from_peers(timeout=self.load_state_timeout, **kwargs)
            if not loaded:
                logger.warning("No peer shares a newer state yet")
            if loaded:
                self.in_doubt, self._last_met = None, time.monotonic()
            self._start_epoch_anew()
        return loaded

    def _start_epoch_anew(self) -> None:
        self._just_loaded = True
        self.tracker.report_local_progress(local_epoch=self.local_epoch, samples_accumulated=0)
        self.grad_averager.reset_accumulated_grads_()
        self._declare_priority()

    def settle(self) -> str:
        """Finish what runs in the background, resolve doubts. :returns: digest of parameters and statistics."""
        self.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
        self._drop_scheduled_round()
        if self.in_doubt and self.tracker.global_progress.num_peers > 1:
            self._settle_doubt()
        return digest(self.state_averager.state_tensors())

    def named_state(self, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A consistent copy for a checkpoint: parameters by name, statistics as "optimizer/NAME/STATISTIC", and
        what belongs into its meta (epoch, counters).

        :param names: of the parameters, in the order of the parameter groups
        """
        metadata, tensors, _ = self.state_averager.get_current_state()
        keys = [*names, *self.state_averager.statistic_keys(names)]
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
        self.state_averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
        metadata, _, _ = self.state_averager.get_current_state()
        self.state_averager.adopt_state(metadata, list(tensors))
        self.grad_averager.reset_accumulated_grads_()

    def training_state(self) -> list[torch.Tensor]:
        """The optimizer's own (CPU, float32) parameters and statistics, as a joiner would download them."""
        return self.state_averager.state_tensors()
