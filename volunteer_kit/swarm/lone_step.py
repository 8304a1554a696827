"""Steps of ours that may be nobody else's, though others are here: who missed a round took one, or who came to one of
another epoch; and where not all met, the others may have met elsewhere. If they prevail, such steps are taken back."""

from __future__ import annotations

from typing import Any

import torch
from hivemind.utils.logging import get_logger

logger = get_logger(__name__)


class LoneSteps:
    """Part of SwarmStateAverager: keeps what we held before, in memory. From there the rounds of those who met can be
    made up for; from a model that nobody else has, nothing can but to download a state.
    """

    steps_alone = False  # the step to come may be nobody else's: the optimizer sets it
    _before_lone_steps: tuple[dict, list[torch.Tensor]] | None = None

    def _note_before_step(self) -> None:
        """With the lock on the state, at each step of ours: is what we hold to be kept?"""
        if self.steps_alone and self._before_lone_steps is None and self.complete:
            tensors: list[Any] = [tensor.detach().clone() for tensor in self.state_tensors()]
            self._before_lone_steps = {**self.metadata(), "past": list(self._past)}, tensors
        elif not self.steps_alone:
            self._before_lone_steps = None
        self.steps_alone = False

    def before_lone_steps(self) -> tuple[dict, list[torch.Tensor]] | None:
        """What we held before them, as state_now gives it."""
        before = self._before_lone_steps
        return before and (dict(before[0]), before[1])

    def take_back_lone_steps(self) -> bool:
        """Hold what we held before them. Between two steps. :returns: whether there were any"""
        before = self._before_lone_steps
        if before is None:
            return False
        logger.info(f"Going back from epoch {self.local_epoch}, to which we went alone, to {before[0]['epoch']}")
        self.adopt_state(*before)
        self.stand_by_lone_steps()
        return True

    def stand_by_lone_steps(self) -> None:
        """They are others' as well, or what we hold no longer came of them."""
        self._before_lone_steps = None
