"""Who attacks, and how: a class each, with one method for everything that a member can falsify.

All of them know everything that is known (the honest members' gradients of this epoch, the model, what was drawn in
earlier rounds) and act together; that is the papers' omniscient attacker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from volunteer_kit.robust.messages import Duty


@dataclass
class View:
    """What an attacker sees before it sends."""

    me: int
    epoch: int  # since the attack began
    own: torch.Tensor  # the honest gradient of its own samples
    flipped: torch.Tensor  # the same with false labels
    late: torch.Tensor  # the same on the model of long ago
    honest: torch.Tensor  # (honest members, size): what they send
    attackers: frozenset[int]
    known: Sequence[torch.Tensor] = ()  # directions that were drawn in earlier rounds, (size,) each
    others: int = 16  # members in all
    trusted: bool = True  # does what we send enter the average?

    def constant(self, seed: int = 0) -> torch.Tensor:
        """A random direction as long as an honest gradient, the same for everybody and always."""
        drawn = torch.randn(self.own.shape, generator=torch.Generator().manual_seed(seed))
        return drawn * (self.length / drawn.norm())

    @property
    def length(self) -> float:
        return float(self.honest.norm(dim=1).median())


@dataclass
class Attack:
    """Honest in all things; attacks replace what they falsify.

    :param columns: that it makes sense for; () is all
    :param names_others: it names as many samples as it claims, its own or not
    """

    name: str = "none"
    columns: tuple[str, ...] = field(default=(), repr=False)
    names_others: bool = field(default=False, repr=False)
    needs_flipped: bool = field(default=False, repr=False)
    needs_late: bool = field(default=False, repr=False)

    def gradient(self, view: View) -> torch.Tensor:
        """What it sends."""
        return view.own

    def is_here(self, epoch: int) -> bool:
        """Does it come to the round, so many epochs after the attack began?"""
        return True

    def speed(self, speed: float) -> float:
        """What it says of its device, samples/s."""
        return speed

    def weight(self, samples: int, limit: float) -> float:
        """:param limit: what is believed of its device"""
        return float(samples)

    def progress(self, samples: int, target: int) -> float:
        """How many samples of this epoch it says to have done. :param target: of the whole swarm"""
        return float(samples)

    def answer(self, average: torch.Tensor, receiver: int) -> torch.Tensor | None:
        """What it returns as a reducer; None: nothing."""
        return average

    def counts(self, senders: Sequence[int], attackers: frozenset[int]) -> list[int]:
        """As a reducer: whose parts it averages, of those that came."""
        return list(senders)

    def lists(self, group: tuple[int, ...], attackers: frozenset[int]) -> dict[int, tuple[int, ...]]:
        """As leader: whom it tells each member to average with."""
        return dict.fromkeys(group, group)

    def report(self, duty: Duty, totals: list[np.ndarray], sent: np.ndarray | None) -> list[np.ndarray]:
        """As validator or juror. `sent`: the sketch of what an accomplice sent, None for an honest target."""
        return totals

    def says(self, stage: str, message: Any, round_: Any, view: Mapping[str, Any], receiver: int) -> Any:
        """Of a message of verification ("commit", "reveal", "statement"), what `receiver` gets; None: nothing."""
        return message
