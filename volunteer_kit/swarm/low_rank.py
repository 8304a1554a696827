"""Which tensors PowerSGD makes narrow, and how narrow; see power_sgd.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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


def values_of(shapes: Iterable[Sequence[int]], rank: int) -> int:
    """That go round in place of the tensors'."""
    total = 0
    for shape in shapes:
        matrix = matrix_of(shape, rank)
        total += rank * sum(matrix) if matrix else torch.Size(shape).numel()
    return total
