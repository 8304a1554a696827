"""hivemind.Optimizer put together from our own parts: averagers, tracker, traffic and reach."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import hivemind

from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.robust.median import coordinate_median
from volunteer_kit.swarm.beside import BesideGradients, HeldBuffers
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.held_parts import Reduce
from volunteer_kit.swarm.local_steps import LocalSteps, LocalStepsConfig
from volunteer_kit.swarm.options import SwarmOptions
from volunteer_kit.swarm.peer import Peer
from volunteer_kit.swarm.plausible import Limits
from volunteer_kit.swarm.power_sgd import PowerSGDAverager
from volunteer_kit.swarm.progress import SwarmProgressTracker
from volunteer_kit.swarm.reach import Reach
from volunteer_kit.swarm.state import SwarmStateAverager
from volunteer_kit.swarm.traffic import Traffic


class AssembledOptimizer(hivemind.Optimizer):
    """:param peer: a running Peer
    :param options: what all peers share
    :param params: parameters or parameter groups, on the training device
    :param optimizer: parameter groups -> optimizer that holds its zero state already (hivemind would otherwise take a
        real step with zero gradients to create it)
    :param scheduler: optimizer -> scheduler, stepped once an epoch
    :param local_steps: steps on this peer's own model between rounds; `optimizer` is the outer one then, whose
        gradients are what these have moved. None: gradients are averaged
    :param reduce: seam: the reduction rule
    :param state_reduce: that of rounds in which parameters are averaged, where a mean would carry everybody some of the
        way to a liar
    :param buffers: of the model, which are averaged with the gradients where options.marks_unused; None: none are
    """

    def __init__(
        self,
        *,
        peer: Peer,
        options: SwarmOptions,
        params,
        optimizer: Callable,
        scheduler: Callable | None = None,
        local_steps: LocalStepsConfig | None = None,
        reduce: Reduce = weighted_mean,
        state_reduce: Reduce = coordinate_median,
        buffers: HeldBuffers | None = None,
    ):
        self.options, params = options, list(params)
        own = [dict(group) if isinstance(group, dict) else group for group in params]  # optimizers write into theirs
        self._traffic = Traffic(options.max_mbps)
        self._seams = {"admission": peer.admission, "reduce": reduce, "traffic": self._traffic}
        self._state_reduce, self._buffers = state_reduce, buffers if options.marks_unused else None
        self._begun: list[Any] = []  # parts with threads and processes of their own
        try:
            super().__init__(
                dht=peer.dht,
                client_mode=peer.client_mode,  # None on a client-mode DHT crashes after the first epoch
                params=params,
                optimizer=optimizer,
                scheduler=scheduler,
                **options.of_hivemind(),
            )
        except BaseException:  # with a part left running, the program would never end
            for part in reversed(self._begun):
                part.shutdown()
            raise
        if local_steps is not None:
            self._take_local_steps(local_steps, own)
        self.reach = Reach(peer.dht, options.alone_after)
        self.tracker.may_date = lambda: not self.reach.waits_for_itself
        self.tracker.on_others = self.reach.notice_others

    def _take_local_steps(self, config: LocalStepsConfig, params: Sequence[Any]) -> None:
        averager = self.state_averager
        shared = [parameter for group in averager.optimizer.param_groups for parameter in group["params"]]
        steps = LocalSteps(config, params, shared, lambda: self.local_epoch)
        self.grad_averager.local_steps = averager.local_steps = steps

    def shutdown(self) -> None:
        self.reach.close()
        if self.dht.processes.why_broken is None:
            super().shutdown()
            return
        with suppress(SwarmError):  # it says goodbye, and nobody is there to pass it on
            self.tracker.shutdown(self.shutdown_timeout)

    # --- parts, made ours ---

    def _make_progress_tracker(self, target_batch_size: int, **kwargs) -> SwarmProgressTracker:
        options = self.options
        limits = Limits(
            target_batch_size, options.max_samples_per_second, options.min_epoch_seconds, options.claim_inflation
        )
        tracker = SwarmProgressTracker(
            self.dht,
            self.run_id,
            target_batch_size,
            limits=limits,
            report_period=options.refresh_period / 2,
            client_mode=self.client_mode,
            status_loglevel=self.status_loglevel,
            start=True,
            **kwargs,
        )
        self._begun.append(tracker)
        return tracker

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
        averager = SwarmStateAverager(
            prefix=f"{self.run_id}_state_averager",
            offload_optimizer=True,
            custom_gradients=True,
            initialize_optimizer=False,  # the factory's has its zero state; hivemind's trial step would move the model
            status_loglevel=self.status_loglevel,
            start=True,
            measures_steps=self.options.average_state_every > 0,
            buffers=self._buffers,
            **{**self._averager_options(max_weight=1.0), "reduce": self._state_reduce},
            **kwargs,
        )
        self._begun.append(averager)
        return averager

    def _make_gradient_averager(self, factory, **kwargs) -> SwarmGradientAverager:
        """As hivemind's own, which knows of no tensor but the gradients."""
        # a fast peer may pass the target while others are at their last microbatch, hence more than one target
        options = self._averager_options(max_weight=2.0 * self.target_batch_size)
        options |= {"verification": self.options.verification, "clips": self.options.clips}
        options |= {"left_over_path": self.options.left_over}

        parameters = self.state_averager.main_parameters
        kind = SwarmGradientAverager
        if self.options.grad_rank is not None:
            kind = partial(PowerSGDAverager, rank=self.options.grad_rank)
        if self.options.marks_unused:
            options["beside"] = BesideGradients(len(parameters), self._buffers)
        prefix = f"{self.run_id}_grad_averager"
        about = {"parameters": parameters, "prefix": prefix, "allow_state_sharing": False, "start": True}
        averager = kind(**{**kwargs, **options, **about})
        self._begun.append(averager)
        averager.lend_to([p for group in self.state_averager.optimizer.param_groups for p in group["params"]])
        return averager

    def _load_averaged_gradients_into_optimizer_(self) -> None:
        self.state_averager.came_beside = self.grad_averager.came_beside()
        super()._load_averaged_gradients_into_optimizer_()

    # --- what can be seen of them ---

    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) by this peer so far, in rounds and as states."""
        return self._traffic.totals

    @property
    def cut_off(self) -> str | None:
        """Why we are out of the others' reach, None if we are not. Until it is over no step is taken and no more than
        an epoch's samples are kept."""
        return self.reach.cut_off

    @property
    def cut_off_for(self) -> float:
        """s since somebody last answered, 0 unless cut off. It heals by itself; after many minutes try a restart."""
        return self.reach.cut_off_for
