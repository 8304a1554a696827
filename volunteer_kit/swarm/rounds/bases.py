"""Compute the fixed factors of low-rank gradients from the steps before.

A matrix M is not sent. At one step each member sends P = M Q, where all have the same Q with orthonormal columns; the
mean of the members' P, orthonormalised, is the fixed side of the next step, and Q = M^T P is sent then. Each is a
projection on a subspace that everybody knows, so the mean of projections is the projection of the mean, and a round has
one exchange. Zhang et al. 2023, "ACP-SGD", arXiv:2306.08881; the power iteration behind it is that of Vogels et al.
2019, "PowerSGD", arXiv:1905.13727.

All peers compute the same from an answer, to the last bit on all processors: sums have a fixed order, and addition,
multiplication, division and root are those of IEEE 754, one after another. BLAS and LAPACK promise neither.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from volunteer_kit.swarm.codecs.wire import FLOAT32

RIGHT, LEFT = 0, 1  # which factor is fixed: Q, and P = M Q travels; or P, and Q = M^T P travels
BASES, SIDES = "bases", "sides"  # names of the tensors
DEPENDENT: Final = 1e-6  # what is left of a column without those before it, of its length, if it is one of their span
SKEW: Final = 1e-3  # that columns which should be orthonormal may differ from it

Array = np.ndarray[Any, Any]


class Matrix(NamedTuple):
    """A tensor of a cell that is sent as a factor."""

    place: slice  # in the cell
    rows: int
    columns: int
    begin: int  # of its numbers in the bases' vector

    def height(self, side: int) -> int:
        """Rows of the factor that is fixed."""
        return self.columns if side == RIGHT else self.rows


class Bases:
    """The fixed factor of each matrix at one step. It never changes: `after` makes another one.

    :param cells: the matrices of each cell
    :param rank: r, columns of a factor
    :param flat: (S,) float32, the fixed factors one after another, filled up with zeros
    :param sides: (cells,) uint8, RIGHT or LEFT
    """

    def __init__(self, cells: Sequence[Sequence[Matrix]], rank: int, flat: torch.Tensor, sides: torch.Tensor):
        self._cells, self._rank = cells, rank
        self._flat, self._sides = flat, sides

    @classmethod
    def beginning(cls, cells: Sequence[Sequence[Matrix]], rank: int, seed: bytes) -> Bases:
        """Those of a run's first step: what all peers make of the seed."""
        size = max((m.begin + rank * max(m.rows, m.columns) for each in cells for m in each), default=0)
        made = cls(cells, rank, torch.zeros(size, **FLOAT32), torch.zeros(len(cells), dtype=torch.uint8, device="cpu"))
        for matrices in cells:
            for matrix in matrices:
                nothing = np.zeros((matrix.columns, rank), np.float32)
                made._put(matrix, orthonormal(nothing, seed + matrix.begin.to_bytes(8, "little")))
        return made

    def side(self, cell: int) -> int:
        """Return which factor of a cell's matrices is fixed."""
        return int(self._sides[cell])

    def fixed(self, cell: int, matrix: Matrix) -> Array:
        """The fixed factor, (n, r) float32; to be read only."""
        height = matrix.height(self.side(cell))
        found = self._flat.numpy()[matrix.begin : matrix.begin + height * self._rank]
        return found.reshape(height, self._rank)  # (n, r)

    def after(self, factors: Mapping[int, Sequence[Array]]) -> Bases:
        """The bases of the next step. Cells that the step has not keep factor and side.

        :param factors: of each cell that it has, those of its matrices that were sent, (n, r) each
        """
        made = Bases(self._cells, self._rank, self._flat.clone(), self._sides.clone())
        for cell, given in factors.items():
            for matrix, factor in zip(self._cells[cell], given, strict=True):
                seed = factor.tobytes() + matrix.begin.to_bytes(8, "little")
                made._put(matrix, orthonormal(factor, hashlib.sha256(seed).digest()))
            made._sides[cell] = LEFT if self.side(cell) == RIGHT else RIGHT
        return made

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that a state's file holds of the bases."""
        return {BASES: self._flat, SIDES: self._sides}

    def taken(self, tensors: Mapping[str, torch.Tensor]) -> Bases:
        """Those that a stranger's file holds.

        :raises ValueError: if there are none
        """
        for name, own in self.tensors().items():
            if tensors[name].shape != own.shape or tensors[name].dtype != own.dtype:
                raise ValueError(f"{name} are {tensors[name].dtype} {tuple(tensors[name].shape)}")
        made = Bases(self._cells, self._rank, tensors[BASES].clone(), tensors[SIDES].clone())
        if bool((made._sides > 1).any()):
            raise ValueError("a side that is neither left nor right")
        for cell, matrices in enumerate(self._cells):
            for matrix in matrices:
                made._check(cell, matrix)
        return made

    def _check(self, cell: int, matrix: Matrix) -> None:
        fixed = self.fixed(cell, matrix)
        used, whole = fixed.size, self._rank * max(matrix.rows, matrix.columns)
        rest = self._flat.numpy()[matrix.begin + used : matrix.begin + whole]
        with np.errstate(all="ignore"):
            skew = np.abs(fixed.T @ fixed - np.eye(self._rank, dtype=np.float32)).max()
        if not skew <= SKEW or rest.any():  # NaN goes through both
            raise ValueError("the columns of a basis are not orthonormal")

    def _put(self, matrix: Matrix, factor: Array) -> None:
        flat = self._flat.numpy()[matrix.begin : matrix.begin + self._rank * max(matrix.rows, matrix.columns)]
        flat[: factor.size] = factor.reshape(-1)
        flat[factor.size :] = 0.0


def orthonormal(factor: Array, seed: bytes) -> Array:
    """Orthonormal columns that span what a factor's do: Gram-Schmidt, twice. In the place of a column that is zero, or
    one of the span of those before it, comes one that the seed gives.

    :param factor: (n, r), n >= r, finite
    :returns: (n, r) float32
    """
    columns = np.ascontiguousarray(factor.T, np.float64)  # (r, n)
    done = np.empty_like(columns)
    for place, column in enumerate(columns):
        found, attempt = _orthogonal(column, done[:place]), 0
        while found is None:
            about = seed + place.to_bytes(4, "little") + attempt.to_bytes(4, "little")
            found, attempt = _orthogonal(_numbers(about, len(column)), done[:place]), attempt + 1
        done[place] = found
    return np.ascontiguousarray(done.T, np.float32)  # (n, r)


def _orthogonal(column: Array, others: Array) -> Array | None:
    """A column's part that is orthogonal to others, with length 1; None: there is none to speak of.

    :param column: (n,)
    :param others: (k, n), orthonormal
    """
    largest = float(np.abs(column).max())
    if largest == 0.0:
        return None
    column = column / largest
    length = math.sqrt(_sums(column * column))
    for _ in range(2 if len(others) else 1):  # twice is enough: what the first time left is rounding
        if len(others):
            products = _sums((others * column).T)  # (k,)
            column = column - _sums(others * products[:, None])
        left = math.sqrt(_sums(column * column))
        if left < DEPENDENT * length:
            return None
        column, length = column / left, 1.0
    return column


def _sums(values: Array) -> Any:
    """The sums over the first dimension, in an order of their own: halves are added, and halves of these."""
    while (count := len(values)) > 1:
        half = count // 2
        halves = values[:half] + values[half : 2 * half]
        if count % 2:
            halves[0] = halves[0] + values[-1]
        values = halves
    return values[0]


def _numbers(seed: bytes, count: int) -> Array:
    """Pseudo-random numbers from -1 to 1, equal everywhere: torch's own differ in their last bits by processor."""
    return np.frombuffer(hashlib.shake_128(seed).digest(2 * count), "<i2").astype(np.float64) / 2**15  # (count,)


def place_matrices(
    cells: Iterable[Iterable[tuple[slice, tuple[int, int]]]], rank: int
) -> tuple[tuple[Matrix, ...], ...]:
    """The matrices of each cell, with their places in the bases' vector.

    :param cells: of each cell (where a matrix is in it, its rows and columns)
    """
    placed, begin = [], 0
    for cell in cells:
        matrices = []
        for place, (rows, columns) in cell:
            matrices.append(Matrix(place, rows, columns, begin))
            begin += rank * max(rows, columns)
        placed.append(tuple(matrices))
    return tuple(placed)
