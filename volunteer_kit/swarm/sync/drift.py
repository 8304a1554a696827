"""Drift and damage: find voters whose parameters differ from those of most voters.

Rounding over thousands of steps, a flipped bit or a damaged file make one peer's parameters differ. Votes carry a
sketch of them, so the others see it.
"""

from __future__ import annotations

from collections.abc import Sequence

from volunteer_kit.swarm.sync.messages import Vote


def outliers(votes: Sequence[tuple[str, Vote]], tolerance: float) -> set[str]:
    """Voters whose sketch is outside the tolerance of what more than half of them have."""
    told = {peer: vote.sketch for peer, vote in votes if vote.sketch is not None}
    near = {peer: sum(abs(mine - other) <= tolerance for other in told.values()) for peer, mine in told.items()}
    middle = max(sorted(told), key=lambda peer: near[peer], default=None)
    if middle is None or 2 * near[middle] <= len(told):
        return set()
    return {peer for peer, mine in told.items() if not abs(mine - told[middle]) <= tolerance}  # NaN too
