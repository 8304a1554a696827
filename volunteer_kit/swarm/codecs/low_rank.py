"""Choose which tensors PowerSGD makes narrow, how narrow, and where to cut the vector of all tensors between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import prod

import torch
from hivemind.utils.math import get_flatten_greedy_dims


def matrix_of(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """(rows, columns) that a tensor is seen as; None: it goes as it is, two narrow ones were more than half of it.

    Equal on all peers, but not for tensors that were reshaped.
    """
    if len(shape) < 2:
        return None
    rows, columns = get_flatten_greedy_dims(torch.empty(*shape, device="meta"))
    return (rows, columns) if 2 * rank * (rows + columns) <= rows * columns else None


def values_each_round(shapes: Iterable[Sequence[int]], rank: int) -> float:
    """Return how many values travel in place of the tensors'. Rounds carry a matrix's factors in turn: this is their
    mean."""
    total = 0.0
    for shape in shapes:
        matrix = matrix_of(shape, rank)
        total += rank * sum(matrix) / 2 if matrix else prod(shape)
    return total


def cell_ends(shapes: Sequence[Sequence[int]], rank: int, cells: int) -> tuple[int, ...]:
    """Cut a vector of tensors into cells that hold whole matrices and travel in about as many bytes each.

    A tensor that travels value by value may be cut anywhere; a matrix that is larger than a cell leaves its neighbours
    empty.

    :param shapes: of the tensors, in their order
    :returns: (cells + 1,) places in the vector, from 0 to all its numbers
    """
    matrices = [matrix_of(shape, rank) for shape in shapes]
    sizes = [prod(shape) for shape in shapes]
    costs = [2 * size if m is None else rank * sum(m) for m, size in zip(matrices, sizes, strict=True)]
    places, sent = [0, *accumulate(sizes)], [0, *accumulate(costs)]
    ends = [0]
    for cell in range(1, cells):
        target = sent[-1] * cell // cells
        tensor = bisect_right(sent, target) - 1
        within = target - sent[tensor]
        if tensor == len(sizes):
            ends.append(places[-1])
        elif matrices[tensor] is None:
            ends.append(places[tensor] + sizes[tensor] * within // costs[tensor])
        else:  # at the nearer end of the matrix
            ends.append(places[tensor + (2 * within > costs[tensor])])
    return (*ends, places[-1])
