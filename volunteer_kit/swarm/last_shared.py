"""What we held when most of those here held the same; for any step after it may turn out to be nobody else's.

No round tells by itself that all got the same of it: where a line breaks while answers travel, a member can have all of
them, and the others go without one. Only what is told in the next round shows who holds what, and so the last state
that most others were seen to hold is kept. If they prevail with another model, our steps since then are taken back.
"""

from __future__ import annotations

from typing import Any

import torch
from hivemind.utils.logging import get_logger

logger = get_logger(__name__)


class LastShared:
    """Part of SwarmStateAverager: keeps that state, in memory. From there the rounds of those who met can be made up
    for; from a model that nobody else has, nothing can but to download a state.
    """

    # before a step: do most of those here hold what we hold? None: nobody else was ever here. The optimizer sets it
    is_shared: bool | None = False
    _last_shared: tuple[dict, list[torch.Tensor]] | None = None

    @torch.no_grad()
    def _note_before_step(self) -> None:
        """With the lock on the state, at each step of ours: is what we hold to be kept?"""
        before, is_shared, self.is_shared = self._last_shared, self.is_shared, False
        if is_shared is None:
            self._last_shared = None
        elif self.complete and (is_shared or before is None):
            tensors: list[Any] = self.state_tensors()
            if before is None:
                kept = [tensor.clone() for tensor in tensors]
            else:  # into the same memory: half a gigabyte a round would be fetched and given back otherwise
                kept = before[1]
                for copy, tensor in zip(kept, tensors, strict=True):
                    copy.copy_(tensor)
            self._last_shared = {**self.metadata(), "past": list(self._past)}, kept

    def last_shared(self) -> tuple[dict, list[torch.Tensor]] | None:
        """A copy of it, as state_now gives it."""
        with self.lock_optimizer:
            before = self._last_shared
            return before and (dict(before[0]), [tensor.clone() for tensor in before[1]])

    def go_back_to_last_shared(self) -> bool:
        """Hold that state again. Between two steps. :returns: whether it is another than ours"""
        before = self._last_shared
        if before is None or (self.complete and before[0]["lineage"] == self.metadata()["lineage"]):
            return False
        logger.info(f"Going back from epoch {self.local_epoch} to {before[0]['epoch']}, which most others had as well")
        self.adopt_state(*before)
        return True

    def forget_last_shared(self) -> None:
        """What we hold no longer came of it."""
        self._last_shared = None
