"""Put a weight of its own before each cell of gradients, which the protocol does not know.

The protocol weighs a contribution by its samples. A Trainer's gradients are means over learned tokens, and the mean of
several has to be one over the tokens of all. So each cell of the vector begins with one number more, the weight: a slot
holds sums of weight times gradient, and of weights. Whatever members and contributions enter a cell, both are averaged
in the same way, and their quotient is the mean by weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from volunteer_kit.swarm.codecs.low_rank import cell_ends, matrix_of
from volunteer_kit.swarm.codecs.wire import FLOAT32
from volunteer_kit.swarm.options import SwarmOptions

ALONE_AFTER: Final = 60.0  # s
SLOW_STEP: Final = 3600.0  # s until a round begins with what there is
UNITS: Final = 16  # bits of a sample's units
TYPICAL: Final = 256  # words of a sample of which a gradient travels about as large as it is, for codecs of few bits
ALONE: Final = 2.0  # times more that a weight may be: a peer that is alone rounds its own to a power of two


def units_of(target_batch_size: int) -> int:
    """The units in which a node counts the samples of a step: a power of two, by which dividing changes no bit."""
    return 1 << ((target_batch_size - 1).bit_length() + UNITS)


def factor_of(longest: int) -> float:
    """Return what a unit's gradient is multiplied with if its sample is a full one.

    :param longest: words of a full sample
    """
    return max(1.0, longest / TYPICAL)


def most_weight_of(longest: int) -> float:
    """Return the most that the weight of a unit may be.

    :param longest: words of a full sample
    """
    return ALONE * factor_of(longest)


def weighed_sync(options: SwarmOptions, max_staleness: int) -> dict[str, Any]:
    """Fields of SyncConfig where Trainers train: a step waits for its samples, and they are counted in units."""
    return {
        "target_batch_size": units_of(options.target_batch_size),
        "max_staleness": max_staleness,
        "overlap": options.delay_optimizer_step or options.delay_grad_averaging,
        "exchange_ceiling": options.allreduce_timeout,
        "alone_after": ALONE_AFTER if options.alone_after is None else options.alone_after,
        "epoch_deadline": SLOW_STEP,
    }


class WeighedVector:
    """The order of a vector (N,), N = all tensors' numbers and one for each cell.

    Without those weights it is the compact vector (M,): the tensors one after another.

    :param tensors: the shape of each
    :param exact: of each, whether it travels as it is
    :param cells: that the vector is cut into
    :param rank: of the low-rank factors that matrices travel as, whole in one cell each; 0: none does
    :ivar shapes: of its pieces, each within a cell
    :ivar origins: of each piece, the size of the tensor that it is cut from; 0: it travels as it is
    :ivar ends: (cells + 1,) where the cells end; (): without `rank`, where the layout cuts them by itself
    """

    def __init__(self, tensors: Sequence[Sequence[int]], exact: Sequence[bool], cells: int, rank: int = 0):
        sizes = [math.prod(shape) for shape in tensors]
        self.cells, self._compact = cells, sum(sizes)
        ends = [self.elements * cell // cells for cell in range(cells + 1)]
        matrices = [
            matrix_of(shape, rank) if rank and not is_exact else None
            for shape, is_exact in zip(tensors, exact, strict=True)
        ]
        if rank:
            seen = [matrix or (size,) for matrix, size in zip(matrices, sizes, strict=True)]
            ends = [end + cell for cell, end in enumerate(cell_ends(seen, rank, cells))]
        self.ends = tuple(ends) if rank else ()
        self._begins = ends[:-1]
        # of each cell without its weight, in the compact vector
        self._within = [slice(ends[c] - c, ends[c + 1] - c - 1) for c in range(cells)]
        found: list[list[tuple[tuple[int, ...], int]]] = [[((1,), 0)] for _ in range(cells)]
        self._pieces: list[list[tuple[slice, slice]]] = []  # of each tensor: where in the vector, where in the tensor
        begin = 0
        for size, is_exact, matrix in zip(sizes, exact, matrices, strict=True):
            pieces = []
            for cell, within in enumerate(self._within):
                start, stop = max(begin, within.start), min(begin + size, within.stop)
                if start < stop:
                    shift = cell + 1
                    pieces.append((slice(start + shift, stop + shift), slice(start - begin, stop - begin)))
                    found[cell].append((matrix or (stop - start,), 0 if is_exact else size))
            self._pieces.append(pieces)
            begin += size
        self.shapes = tuple(shape for each in found for shape, _ in each)
        self.origins = tuple(origin for each in found for _, origin in each)

    @property
    def elements(self) -> int:
        """N."""
        return self._compact + self.cells

    def cell(self, i: int) -> slice:
        """Return where a cell's values are in the compact vector."""
        return self._within[i]

    def fill(self, slot: torch.Tensor, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        """Add gradients to a slot.

        :param slot: (N,) float32
        :param gradients: of each tensor, float32 on the CPU; None: zeros
        :param weight: of all of them
        """
        one = torch.ones(1, **FLOAT32)
        for begin in self._begins:
            slot[begin : begin + 1].add_(one, alpha=weight)
        for gradient, pieces in zip(gradients, self._pieces, strict=True):
            if gradient is not None:
                flat = gradient.reshape(-1)
                for there, here in pieces:
                    slot[there].add_(flat[here], alpha=weight)

    def means(self, averages: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Divide the averages of cells by their weights, which come first, and return the mean gradients.

        :returns: cell -> its values; zeros where nobody had any weight
        """
        return {cell: _mean(average) for cell, average in averages.items()}


def reduce_weighed(
    reduce: Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor],
    parts: Sequence[torch.Tensor],
    samples: Sequence[float],
    learnt: Sequence[slice],
) -> torch.Tensor:
    """The average of a cell by a rule that is no plain mean: of the gradients themselves, by what they weigh. Gradients
    and what travels as it is are two matters for the rule: a counter must not decide whose gradient is far from others.

    :param parts: (n,) of each member, the weight first
    :param samples: of each
    :param learnt: where the gradients are
    :returns: (n,), again with the mean weight first
    """
    weights = [float(part[0]) * count for part, count in zip(parts, samples, strict=True)]
    there = [place for place, weight in enumerate(weights) if weight > 0]
    result = torch.zeros_like(parts[0])
    if not there:
        return result
    result[0] = mean_weight = sum(weights) / sum(samples)
    is_learnt = torch.zeros(len(result), dtype=torch.bool, device="cpu")
    for place in learnt:
        is_learnt[place] = True
    is_exact = ~is_learnt
    is_exact[0] = False
    for chosen in (is_learnt, is_exact):
        if chosen.any():
            values = [parts[place][chosen] / parts[place][0] for place in there]
            result[chosen] = mean_weight * reduce(values, [weights[place] for place in there])
    return result


def _mean(average: torch.Tensor) -> torch.Tensor:
    weight, values = float(average[0]), average[1:]
    if not (weight > 0 and math.isfinite(weight)):
        return torch.zeros_like(values)
    found = values / average[0]
    return found if bool(torch.isfinite(found).all()) else torch.zeros_like(values)
