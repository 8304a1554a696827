"""LAMB's step over large CPU tensors: three passes through memory, temporaries of a block, statistics in 8 or 32 bits.

Block-wise 8-bit statistics are Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).

Every peer must compute the same bits, however many cores it has. So arithmetic is elementwise IEEE (no fastmath, no
fused multiply-add) and each norm is made of float64 sums over fixed chunks. The threads are a plain pool's, for the
step runs in a background thread of a process that forks, where numba's own threading layers are unsafe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numba import njit

BLOCK = 4096  # elements that share one absmax, as in the original run
CHUNK = 16 * BLOCK  # elements of one partial sum; part of the result's definition, so never a setting
PIECE = 512  # elements computed at once: what that needs stays in the first cache
LANES = 64  # partial sums side by side: one alone would wait for each addition before it begins the next
PARTS_PER_THREAD = 4  # work is cut finer than the threads, for one of them may share its core with the training
SMALLEST = np.float32(2.0**-126)  # a block whose largest value is below this counts as zero: 1/absmax would overflow


class Coefficients(NamedTuple):
    """What one step multiplies with; the same for all tensors of a group. float32 in the kernels."""

    scale: float  # of the gradient: the clip
    keep_mean: float  # beta1
    take_mean: float  # 1 - beta1
    keep_square: float  # beta2
    take_square: float  # 1 - beta2
    mean_correction: float  # 1 / (1 - beta1**step), or 1 without debiasing
    root_correction: float  # 1 / sqrt(1 - beta2**step), or 1
    eps: float
    weight_decay: float


# --- code books ---


def code_book(signed: bool) -> np.ndarray:
    """The values of dynamic 8-bit numbers (256,), ascending: decades from 1e-6 to 1, each twice as fine as the last.

    Equal to bitsandbytes' create_dynamic_map to float32 rounding. Its own last digits depend on the processor (with
    AVX2 up to 100 of the 256 differ), which would set peers apart; these are rounded once, from double precision.
    """
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        fractions = (0.1 + 0.9 * (i + 0.5) / count for i in range(count))
        values += [sign * fraction * 10.0 ** (decade - 6) for fraction in fractions for sign in (1, -1)[: 1 + signed]]
    return np.sort(np.array(values)).astype(np.float32)


def rounding_table(edges: np.ndarray) -> np.ndarray:
    """For each upper half of a float32 (65536,): plus its lower half, above bit 16, the edges passed.

    128 steps an octave are finer than any code book here, so at most one edge lies among the floats of one upper half:
    their code is known but for one comparison, and the comparison is the carry of the addition.
    """
    bits = edges.view(np.uint32).astype(np.int64)
    edges = np.where(bits < 2**31, bits + 2**31, 2**32 - 1 - bits)  # as integers in the order of the floats
    upper = np.arange(2**16)
    lowest = np.where(upper < 2**15, upper + 2**15, 2**16 - 1 - upper) << 16  # the same order
    code = np.searchsorted(edges, lowest)
    edge = np.append(edges, 2**32)[code]
    return ((code << 16) + 2**16 - 1 - np.minimum(edge - lowest, 2**16 - 1)).astype(np.uint32)


def position_lines(book: np.ndarray) -> np.ndarray:
    """(2, 65536): slope and offset of the line that gives a value's place among the codes, for each upper half of it.

    Codes are equally far apart within a decade, so lines are enough. Above zero no place is before the first code.
    """
    upper = np.arange(2**15 + 1, dtype=np.uint32).clip(max=2**14)  # 2**14: of 2.0
    low = (upper << 16).view(np.float32).astype(np.float64)
    places = np.interp(low, book.astype(np.float64), np.arange(len(book)))
    slopes = np.diff(places) / np.maximum(np.diff(low), 1e-40)
    slopes[(low[:-1] < book[1]) | (low[:-1] >= 1)] = 0
    offsets = places[:-1] - slopes * low[:-1]
    offsets[1:][low[1:-1] < book[1]] = 1
    return np.pad(np.stack([slopes, offsets]), ((0, 0), (0, 2**15))).astype(np.float32)


MEAN_BOOK, ROOT_BOOK = code_book(signed=True), code_book(signed=False)
MEAN_TABLE = rounding_table((MEAN_BOOK[:-1] + MEAN_BOOK[1:]) / np.float32(2))
# Rounded to the nearest, a second statistic that changes by less than half a gap a step would keep its code for good:
# it followed the gradient so late that losses lagged by 1 %. So a root is rounded up when it has passed a share of the
# gap between two codes that changes with element and step: right on average, and equal on all peers. No root but zero
# is rounded to zero, or a later step would divide its mean by eps alone.
ROOT_LINES = position_lines(ROOT_BOOK)
SHARES = np.tile((np.random.RandomState(0).permutation(BLOCK) + 0.5).astype(np.float32) / np.float32(BLOCK), 2)
ZERO_MEAN, ZERO_ROOT = (int(np.searchsorted(book, 0)) for book in (MEAN_BOOK, ROOT_BOOK))


# --- the loops, which LLVM makes vector instructions of: on a block or a piece of one ---


def compiled(*signature: str) -> Callable[[Callable], Callable]:
    """numba's njit; with a signature it compiles at import, or takes from the cache what an earlier import compiled."""
    options = {"nogil": True, "error_model": "numpy"}  # Python's error model tests every divisor

    def compile(function: Callable) -> Callable:
        try:
            return njit(*signature, cache=True, **options)(function)
        except (RuntimeError, OSError):  # neither the package's folder nor the home may be written to
            return njit(*signature, **options)(function)

    return compile


@compiled()
def _dequantize(codes, absmax, book, out):
    for i in range(codes.size):
        out[i] = book[codes[i]] * absmax


@compiled()
def _normalize(values):
    """To [-1, 1], in place; returns the absmax, 0 for a block that counts as zero."""
    bits = values.view(np.int32)
    largest = np.int32(0)
    for i in range(values.size):
        largest = max(largest, np.int32(bits[i] & 0x7FFFFFFF))  # positive floats are ordered as integers are
    absmax = np.full(1, largest, np.int32).view(np.float32)[0]
    if absmax < SMALLEST:
        absmax = np.float32(0)
    inverse = np.float32(1) / absmax if absmax > 0 else np.float32(0)
    for i in range(values.size):
        values[i] *= inverse
    return absmax


@compiled()
def _round_means(values, codes, table, upper, lower):
    """Nearest codes of normalized values; `upper`, `lower`: scratch for halves of floats."""
    bits = values.view(np.int32)
    for i in range(values.size):
        upper[i] = np.uint16(bits[i] >> np.int32(16))
        lower[i] = np.uint16(bits[i] ^ (bits[i] >> np.int32(31)))  # a negative float falls as its bits rise
    for i in range(values.size):
        codes[i] = np.uint32(table[upper[i]] + lower[i]) >> np.uint32(16)


@compiled()
def _round_roots(values, codes, lines, shares, upper):
    """The code below each normalized value, or the one above, by its share. Destroys `values`."""
    bits = values.view(np.int32)
    for i in range(values.size):
        upper[i] = np.uint16(bits[i] >> np.int32(16))
    for i in range(values.size):
        values[i] = values[i] * lines[0, upper[i]] + lines[1, upper[i]] + shares[i]
    for i in range(values.size):
        codes[i] = np.uint8(np.int32(values[i]))


@compiled()
def _square(values):
    for i in range(values.size):
        values[i] *= values[i]


@compiled()
def _root(values):
    for i in range(values.size):
        values[i] = np.sqrt(values[i])


@compiled()
def _advance(mean, square, grad, weight, update, c):
    """New statistics in place, and the direction before its trust ratio into `update`."""
    scale, keep_mean, take_mean, keep_square, take_square, mean_correction, root_correction, eps, weight_decay = c
    for i in range(mean.size):
        g = grad[i] * scale
        m = mean[i] * keep_mean + g * take_mean
        v = square[i] * keep_square + g * g * take_square
        mean[i] = m
        square[i] = v
        update[i] = m * mean_correction / (np.sqrt(v) * root_correction + eps) + weight[i] * weight_decay


@compiled()
def _subtract(weight, update, rate):
    for i in range(weight.size):
        weight[i] -= update[i] * rate


@compiled()
def _add_squares(values, lanes):
    whole = values.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            x = np.float64(values[start + lane])
            lanes[lane] += x * x
    for lane in range(values.size - whole):
        x = np.float64(values[whole + lane])
        lanes[lane] += x * x


# --- kernels: chunks `first` to `last` of flat tensors (elements,); absmax (blocks,), sums (chunks,) ---

_FP32 = "f4[::1], f4[::1], f4[::1], f4[::1]"
_8BIT = "f4[::1], f4[::1], u1[::1], f4[::1], u1[::1], f4[::1], f4[:, ::1]"  # with absmax, and the code books
_C = "UniTuple(f4, 9)"


@compiled("void(f4[::1], f8[::1], i8, i8)")
def _square_sums(values, sums, first, last):
    for chunk in range(first, last):
        lanes = np.zeros(LANES)
        _add_squares(values[chunk * CHUNK : min((chunk + 1) * CHUNK, values.size)], lanes)
        sums[chunk] = lanes.sum()


@compiled(f"void({_FP32}, {_C}, f8[:, ::1], i8, i8)")
def _norms_fp32(weight, grad, mean, square, c, sums, first, last):
    scratch = np.empty((3, PIECE), np.float32)
    for chunk in range(first, last):
        weight_lanes, update_lanes = np.zeros(LANES), np.zeros(LANES)
        for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, weight.size), PIECE):
            stop = min(start + PIECE, weight.size)
            m, v, update = scratch[0, : stop - start], scratch[1, : stop - start], scratch[2, : stop - start]
            m[:] = mean[start:stop]
            v[:] = square[start:stop]
            _advance(m, v, grad[start:stop], weight[start:stop], update, c)
            _add_squares(weight[start:stop], weight_lanes)
            _add_squares(update, update_lanes)
        sums[0, chunk], sums[1, chunk] = weight_lanes.sum(), update_lanes.sum()


@compiled(f"void({_FP32}, {_C}, f4, i8, i8)")
def _apply_fp32(weight, grad, mean, square, c, rate, first, last):
    update = np.empty(PIECE, np.float32)
    for start in range(first * CHUNK, min(last * CHUNK, weight.size), PIECE):
        stop = min(start + PIECE, weight.size)
        _advance(mean[start:stop], square[start:stop], grad[start:stop], weight[start:stop], update, c)
        _subtract(weight[start:stop], update, rate)


@compiled(f"void({_8BIT}, {_C}, f8[:, ::1], i8, i8)")
def _norms_8bit(weight, grad, mean, mean_max, square, square_max, books, c, sums, first, last):
    scratch = np.empty((3, PIECE), np.float32)
    for chunk in range(first, last):
        weight_lanes, update_lanes = np.zeros(LANES), np.zeros(LANES)
        for start in range(chunk * CHUNK, min((chunk + 1) * CHUNK, weight.size), PIECE):
            stop = min(start + PIECE, weight.size)
            m, v, update = scratch[0, : stop - start], scratch[1, : stop - start], scratch[2, : stop - start]
            _dequantize(mean[start:stop], mean_max[start // BLOCK], books[0], m)
            _dequantize(square[start:stop], square_max[start // BLOCK], books[1], v)
            _square(v)
            _advance(m, v, grad[start:stop], weight[start:stop], update, c)
            _add_squares(weight[start:stop], weight_lanes)
            _add_squares(update, update_lanes)
        sums[0, chunk], sums[1, chunk] = weight_lanes.sum(), update_lanes.sum()


@compiled(f"void({_8BIT}, u4[::1], f4[:, ::1], f4[::1], i8, {_C}, f4, i8, i8)")
def _apply_8bit(
    weight, grad, mean, mean_max, square, square_max, books, table, lines, shares, step, c, rate, first, last
):
    means, squares = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    update, halves = np.empty(PIECE, np.float32), np.empty((2, BLOCK), np.uint16)
    for base in range(first * CHUNK, min(last * CHUNK, weight.size), BLOCK):
        end, block = min(base + BLOCK, weight.size), base // BLOCK
        for start in range(base, end, PIECE):
            stop = min(start + PIECE, end)
            m, v = means[start - base : stop - base], squares[start - base : stop - base]
            _dequantize(mean[start:stop], mean_max[block], books[0], m)
            _dequantize(square[start:stop], square_max[block], books[1], v)
            _square(v)
            _advance(m, v, grad[start:stop], weight[start:stop], update, c)
            _subtract(weight[start:stop], update, rate)
        m, v, upper, lower = means[: end - base], squares[: end - base], halves[0], halves[1]
        mean_max[block] = _normalize(m)
        _round_means(m, mean[base:end], table, upper, lower)
        _root(v)
        square_max[block] = _normalize(v)
        turn = (step + 1021 * block) % BLOCK
        _round_roots(v, square[base:end], lines, shares[turn : turn + v.size], upper)


# --- over whole tensors ---

_BOOKS = np.stack([MEAN_BOOK, ROOT_BOOK])


def square_sum(pool: ThreadPoolExecutor, values: torch.Tensor) -> float:
    """Sum of the squares of a float32 CPU tensor, in float64."""
    sums = np.zeros(_chunks(values))
    _in_parts(pool, _square_sums, len(sums), _flat(values), sums)
    return math.fsum(sums)


def update(
    pool: ThreadPoolExecutor,
    weight: torch.Tensor,
    grad: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    step: int,
    c: Coefficients,
    lr: float,
    clamp_value: float,
) -> None:
    """One LAMB step of one tensor, in place: norms from the old statistics first, then everything again, written.

    The step is computed twice because keeping it would take the tensor's size in memory, and the statistics that the
    first pass could write are rounded: a direction made of them is another one.

    :param weight, grad: float32, contiguous, on the CPU; any shape.
    :param statistics: exp_avg, exp_avg_sq in float32; or each as uint8 codes followed by its absmax a block, where the
        codes of exp_avg_sq are of its root: half the decades, so small squares keep their digits.
    :param step: counts this tensor's updates; chooses how squares are rounded.
    """
    tensors = [_flat(tensor) for tensor in (weight, grad, *statistics)]
    coefficients, sums = tuple(map(float, c)), np.zeros((2, _chunks(weight)))
    norms, apply, books, rounding = _norms_fp32, _apply_fp32, (), ()
    if len(statistics) == 4:
        norms, apply, books = _norms_8bit, _apply_8bit, (_BOOKS,)
        rounding = MEAN_TABLE, ROOT_LINES, SHARES, int(step) % BLOCK
    _in_parts(pool, norms, sums.shape[1], *tensors, *books, coefficients, sums)
    weight_norm, update_norm = (math.sqrt(math.fsum(row)) for row in sums)
    trust = min(weight_norm, clamp_value) / update_norm if weight_norm > 0 and update_norm > 0 else 1.0
    _in_parts(pool, apply, sums.shape[1], *tensors, *books, *rounding, coefficients, float(lr * trust))


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().view(-1).numpy()


def _chunks(tensor: torch.Tensor) -> int:
    return math.ceil(tensor.numel() / CHUNK)


def _in_parts(pool: ThreadPoolExecutor, kernel: Callable, chunks: int, *arguments) -> None:
    parts = min(chunks, PARTS_PER_THREAD * torch.get_num_threads())
    bounds = [chunks * part // parts for part in range(parts + 1)]
    for future in [pool.submit(kernel, *arguments, first, last) for first, last in pairwise(bounds)]:
        future.result()
