"""Compute the length of a step whose members took different numbers of local steps.

For each cell, a member brings how far its steps moved its model, per sample: members agree on a direction, and a member
that took many steps does not draw the model to its own optimum by that. The mean is then multiplied with the number of
steps that a member took, as FedNova does (Wang et al. 2020, arXiv:2007.07481, equation 8 and below): the mean over the
members, each by its weight. If all members take as many steps, this is the mean of their ways, as in DiLoCo.
"""

from __future__ import annotations

import math

from volunteer_kit.swarm.sync.contributions import discount
from volunteer_kit.swarm.sync.entries import Entry


def unit_of(target_batch_size: int) -> float:
    """Return what a way is multiplied with where it travels. A member then brings for one sample about the way of an
    epoch, which is not lost among the smallest numbers of 16 bits. A power of two changes no bit of it.

    :param target_batch_size: samples of an epoch, of all peers together
    """
    return 2.0 ** round(math.log2(target_batch_size))


def scales_of(entry: Entry, cells: int, unit: float) -> tuple[float, ...]:
    """Return what the mean of each cell is multiplied with. It is a function of the entry, so every peer computes the
    same. 0 where nobody brought anything.

    A member's samples count in full, late ones too, for it did take those steps; in the mean over the members it has
    the weight that its part had. No member's claim makes a step longer than all samples of the cell would.

    :param cells: of the parameter vector
    :param unit: of the ways, as `unit_of` has it
    """
    brought: list[dict[str, tuple[int, float]]] = [{} for _ in range(cells)]  # by peer: samples, weight
    for answer in entry.answers:
        for share in answer.shares:
            weight = discount(entry.epoch - share.birth) * share.samples
            for cell, members in enumerate(brought):
                if share.cells >> cell & 1:
                    samples, before = members.get(share.peer, (0, 0.0))
                    members[share.peer] = samples + share.samples, before + weight
    return tuple(_mean_samples(members) / unit for members in brought)


def _mean_samples(members: dict[str, tuple[int, float]]) -> float:
    total = sum(weight for _, weight in members.values())
    return sum(weight * samples for samples, weight in members.values()) / total if total else 0.0
