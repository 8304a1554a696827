"""Keeping everybody's parameters the same: rounds in which members that differ average them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.agreement import BEGINNING, advance, prevailing, read_all
from volunteer_kit.swarm.averaged_differences import AveragedDifferences
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.ground import ASTRAY, Ground
from volunteer_kit.swarm.state_round import REMEMBERED, OwnSteps, reason_to_keep_own

logger = get_logger(__name__)


class AveragedState(AveragedDifferences):
    """Averages parameters when, and only when, members differ: while all hold the same, nothing is sent. What would
    carry us farther than honest steps can have set us apart is not taken.

    :param measures_steps: state is averaged, and the run's optimizer may have no known bound: costs a copy of the
        parameters at each step where there is none
    """

    def __init__(self, *, measures_steps: bool = False, **kwargs):
        self._own_steps = OwnSteps() if measures_steps else None
        self._bounds_of_round: list[float] = []  # in the averager's process
        self._agreed_at = 0  # epoch of the last round of state averaging whose result we hold
        self.remarks: dict[str, str] = {}  # for the next report
        super().__init__(**kwargs)

    def is_in_agreement(self, gathered: dict[PeerID, Any]) -> bool:
        said = read_all(gathered)
        epochs = {one.epoch for one in said.values()}
        return len(epochs) == 1 and prevailing(said, epochs.pop(), said) == frozenset(gathered)

    def _average_parameters(self, timeout: float | None) -> None:
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()
        try:
            self._bound_round()
            control = DecentralizedAverager.step(
                self,
                gather=self.to_tell(self.told),
                scheduled_time=get_dht_time(),  # then as long as groups have taken; hivemind's is a matchmaking_time
                timeout=timeout,
                require_trigger=True,
                wait=False,
            )
            control.allow_allreduce()
            outcome = control.result(timeout=timeout)
            self.remarks |= outcome.remarks
            if outcome.kept_own is not None:
                self.remarks["state averaging"] = f"we keep our own parameters: {outcome.kept_own}"
                logger.warning(f"The average of a round is not taken: {outcome.kept_own}")
                if outcome.is_shared(self.peer_id, self.told):  # or who lies in each round is believed in the end
                    self._agreed_at = self._state_epoch
                return
            self._agreed_at = self._state_epoch
            if not outcome.in_agreement:
                self._lineage = advance(BEGINNING, outcome.name)
                self.describe()
        except BaseException as e:
            logger.log(self.status_loglevel, f"State averaging failed: {brief(e)}")

    def take_remarks(self) -> dict[str, str]:
        """What there is to be told of the rounds since this was asked last, by whom or what it is about."""
        taken, self.remarks = self.remarks, {}
        return taken

    # --- how far a round may carry us ---

    def _measure(self, step: Callable[[], Any]) -> None:
        """Take a step of our own; where nothing bounds it, see how far it goes."""
        own = self._own_parameters
        is_measured = self._own_steps is not None and not self._has_bound
        before = [tensor.clone() for tensor in own] if is_measured else []
        step()
        if is_measured:
            self._own_steps.moved(before, own)

    @property
    def _has_bound(self) -> bool:
        return self.trust is not None and self.trust.step_bound is not None

    def _bound_round(self) -> None:
        """Tell the averager's process how far a round may carry us."""
        own, others = self._own_parameters, len(self.extra_tensors)
        epochs = max(ASTRAY, min(REMEMBERED, self._state_epoch - self._agreed_at))
        if self._has_bound:
            bounds = self._bounds(Ground(self._state_epoch, own, is_veteran=True), self._state_epoch, epochs)
        else:
            bounds = (self._own_steps or OwnSteps()).bounds(own, epochs)
        bounds = [*map(float, bounds), *[math.inf] * others]
        self._outer_pipe.send(("_take_bounds", [bounds], {}))

    async def _take_bounds(self, bounds: list[float]) -> None:
        self._bounds_of_round = bounds

    def reason_to_keep_own(self, tensors: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> str | None:
        return reason_to_keep_own(tensors, averages, self._bounds_of_round)
