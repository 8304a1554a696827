"""What a donor's state must be to fit ours: metadata that can be read, tensors of our shapes and types, all finite."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from volunteer_kit.swarm.agreement import BEGINNING, LINEAGE_SIZE, MAX_EPOCH, MAX_SEQUENCE
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.transfer import StateRefused


class CheckedState:
    """Part of SwarmStateAverager."""

    def check_state(self, metadata: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Raises StateRefused unless a donor's state fits ours in every shape and type, and is finite."""
        self.check_metadata(metadata)
        wanted = len(self.state_tensors())
        if len(tensors) != wanted:
            raise StateRefused(f"{len(tensors)} tensors instead of {wanted}")
        self.check_tensors(tensors)

    def check_metadata(self, metadata: Any) -> None:
        epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch < MAX_EPOCH:
            raise StateRefused(f"epoch {brief(epoch)}")
        lineage = metadata.get("lineage", BEGINNING.hex())  # old checkpoints have none
        if not isinstance(lineage, str) or not re.fullmatch(f"[0-9a-f]{{{2 * LINEAGE_SIZE}}}", lineage):
            raise StateRefused(f"lineage {brief(lineage)}")
        order = metadata.get("order", 0)
        if type(order) is not int or not 0 <= order < MAX_SEQUENCE:
            raise StateRefused(f"order {brief(order)}")
        numbers = metadata.get("numbers")
        own_numbers = [value for _, _, value in self._statistics() if not isinstance(value, torch.Tensor)]
        if not isinstance(numbers, list) or len(numbers) != len(own_numbers):
            raise StateRefused("another optimizer's counters")
        if not all(isinstance(n, (int, float)) and math.isfinite(n) and n >= 0 for n in numbers):
            raise StateRefused("counters that are not finite")

    def check_tensors(self, tensors: Sequence[torch.Tensor], first: int = 0) -> None:
        """The same for a part of the tensors, from place `first` on."""
        own, non_negative = self.state_tensors(), getattr(self.optimizer, "non_negative", ())
        names = [None] * self.num_parameters
        names += [name for _, name, value in self._statistics() if isinstance(value, torch.Tensor)]
        for index, theirs in enumerate(tensors, start=first):
            if theirs.shape != own[index].shape or theirs.dtype != own[index].dtype:
                raise StateRefused(f"tensor {index} is {theirs.dtype} {tuple(theirs.shape)}")
            if theirs.is_floating_point() and not torch.isfinite(theirs).all():
                raise StateRefused(f"tensor {index} is not finite")
            if names[index] in non_negative and (theirs < 0).any():
                raise StateRefused(f"a negative {names[index]}, whose root is no number")
