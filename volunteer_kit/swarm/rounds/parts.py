"""Build and check a member's part of one slice.

A part has the mean gradient of each cell, over this member's shares with that cell, and a weight. Both follow from the
shares: late ones count less, `discount(age)` of their samples. So a part names its shares and values, and no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.sync.contributions import Accounts, Share, discount

MOST_SHARES: Final = 1024  # of a part: a member has few contributions at once
MOST_HEAD: Final = 2**18  # bytes of what a part says before its values


class PartHead(NamedTuple):
    """What comes before a part's values: an encoded cell for each cell of the shares, in their order."""

    fingerprint: bytes  # of the round
    shares: tuple[Share, ...]  # none: this member only wants the answer
    knows: bool = False  # whether it has the reducer's credential


def shares_within(shares: Sequence[Share], cells: int) -> tuple[Share, ...]:
    """What of these shares is in a slice.

    :param cells: a bit per cell
    """
    within = (share._replace(cells=share.cells & cells) for share in shares)
    return tuple(share for share in within if share.cells)


def weights_of(layout: Layout, shares: Sequence[Share], epoch: int) -> dict[int, float]:
    """The weight of each cell that a part holds, in samples.

    :param epoch: of the round
    """
    weights: dict[int, float] = {}
    for share in shares:
        for cell in layout.cells_of(share.cells):
            weights[cell] = weights.get(cell, 0.0) + discount(epoch - share.birth) * share.samples
    return dict(sorted(weights.items()))


def mean_of(
    layout: Layout,
    shares: Sequence[Share],
    epoch: int,
    cell: int,
    gradient: Callable[[int], torch.Tensor],
    owed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The values of one cell of a part, (n,) float32.

    :param shares: with a share of this cell
    :param gradient: the gradient sum of a contribution, (elements,), by its number
    :param owed: (n,), a sum that rounds before have left out
    """
    place = layout.cell(cell)
    counted = [share for share in shares if share.cells >> cell & 1]
    weight = sum(discount(epoch - share.birth) * share.samples for share in counted)
    mean = torch.zeros(place.stop - place.start, dtype=torch.float32, device="cpu")
    for share in counted:
        mean.add_(gradient(share.number)[place], alpha=discount(epoch - share.birth) / weight)
    if owed is not None:
        mean.add_(owed, alpha=1.0 / weight)
    return mean


def why_not_taken(
    shares: Sequence[Share], sender: str, cells: int, epoch: int, max_staleness: int, limit: float, spent: Accounts
) -> str | None:
    """Why a reducer refuses a part that claims these shares; None: it takes it.

    :param cells: of the slice
    :param epoch: of the round
    :param limit: samples that are believed of the sender
    """
    if len(shares) > MOST_SHARES:
        return f"{len(shares)} shares"
    if len({share.number for share in shares}) != len(shares):
        return "a contribution is in it twice"
    for share in shares:
        if share.peer != sender:
            return "a share of somebody else"
        if share.cells <= 0 or share.cells & ~cells:
            return "a share of cells that are not in the slice"
        if share.samples < 1 or share.number < 0:
            return f"contribution {share.number} of {share.samples} samples"
        if not 0 <= epoch - share.birth <= max_staleness:
            return f"gradients of epoch {share.birth} in epoch {epoch}"
        if spent.committed(sender, share.number) & share.cells:
            return f"contribution {share.number} is committed already"
    samples = sum(share.samples for share in shares)
    if not samples <= limit:
        return f"{samples} samples, of which {limit:g} are believed"
    return None
