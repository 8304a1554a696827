"""The codes of 8-bit LAMB's statistics, beside bitsandbytes' own and beside exact numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from volunteer_kit.optim import Lamb, Lamb8bit, fused
from volunteer_kit.optim.fused import BLOCK


def codes_of(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """What the kernel's table says of values in [-1, 1], with numpy."""
    bits = values.astype(np.float32).view(np.int32)
    upper, lower = (bits >> 16).astype(np.uint16), (bits ^ (bits >> 31)).astype(np.uint16)
    return (table[upper] + lower) >> 16


@pytest.mark.parametrize("signed", [True, False])
def test_the_code_books_are_bitsandbytes(signed):
    from bitsandbytes import functional  # takes seconds

    book = fused.code_book(signed)
    theirs = functional.create_dynamic_map(signed).numpy()
    np.testing.assert_allclose(book, theirs, rtol=2e-7, atol=0)
    assert (np.diff(book) > 0).all() and book.shape == (256,) and 0 in book and book[-1] == 1


def distance(book: np.ndarray, codes: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.abs(book[codes].astype(np.float64) - values)


def floats(book: np.ndarray) -> np.ndarray:
    """In [-1, 1]: random ones of every size, and those around each code and each middle of two codes."""
    random = np.random.default_rng(0).integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    middles = ((book[:-1].astype(np.float64) + book[1:]) / 2).astype(np.float32)
    marks = np.concatenate([book, middles, np.array([0.0, -0.0, 1e-45, -1e-45], np.float32)])
    around = [np.nextafter(marks, np.float32(side)) for side in (-2, 2)]
    return np.concatenate([random[np.abs(random) <= 1], marks, *around])


def test_the_table_finds_the_nearest_code_of_every_float():
    book, values = fused.MEAN_BOOK, floats(fused.MEAN_BOOK)
    after = np.searchsorted(book, values).clip(1, 255)
    nearest = np.minimum(distance(book, after, values), distance(book, after - 1, values))
    assert (distance(book, codes_of(values, fused.MEAN_TABLE), values) <= nearest + 1.2e-7 * np.abs(values)).all()


@pytest.mark.parametrize("share", [fused.SHARES.min(), 0.5, fused.SHARES.max()])
def test_the_lines_find_the_two_codes_around_every_root(share):
    book, values = fused.ROOT_BOOK.astype(np.float64), floats(fused.ROOT_BOOK)
    values = values[(values > 1e-40) | (values == 0)]
    values = np.abs(values)
    codes, shares = np.empty(len(values), np.uint8), np.full(len(values), share, np.float32)
    fused._round_roots(values.copy(), codes, fused.ROOT_LINES, shares, np.empty(len(values), np.uint16))
    places = np.interp(values, book, np.arange(256))
    expected = np.where(values > 0, np.clip(np.floor(places + share), 1, 255), 0)
    edge = np.abs(places + share - np.round(places + share)) < 0.06  # a decade's edge among floats of one upper half
    np.testing.assert_array_equal(codes[~edge], expected[~edge])
    assert np.abs(codes - expected).max() <= 1


def one_step(weight, grad, optimizer=Lamb8bit, **kwargs):
    param = nn.Parameter(weight.clone())
    param.grad = grad
    lamb = optimizer([param], **kwargs)
    lamb.step()
    return param.detach(), lamb.state[param]


def normalized(exact: torch.Tensor, absmax: torch.Tensor) -> np.ndarray:
    return (exact.double() / absmax.double().repeat_interleave(BLOCK)[: len(exact)]).numpy()


@pytest.fixture
def both(monkeypatch):
    """Exact and 8-bit statistics after the same step."""
    monkeypatch.setattr(Lamb, "fused_size", 1)
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(30 * BLOCK + 77, generator=generator) for _ in range(2))
    return one_step(weight, grad, Lamb)[1], one_step(weight, grad, min_8bit_size=1)[1]


def test_the_means_codes_are_bitsandbytes_or_nearer(both):
    """bitsandbytes' own search on the CPU is coarse for small values, and misses a code in a thousand."""
    from bitsandbytes import functional  # takes seconds

    exact, state = both
    book = torch.from_numpy(fused.MEAN_BOOK)
    theirs, scale = functional.quantize_blockwise(exact["exp_avg"], code=book, blocksize=BLOCK)
    assert torch.equal(state["exp_avg_absmax"], scale.absmax)
    values, theirs, ours = normalized(exact["exp_avg"], scale.absmax), theirs.numpy(), state["exp_avg"].numpy()
    same = ours == theirs
    distances = [distance(fused.MEAN_BOOK, codes, values)[~same] for codes in (ours, theirs)]
    assert same.mean() > 0.99 and (distances[0] < distances[1] + 1e-7).all()


def test_the_codes_of_roots_are_the_two_nearest_and_right_on_average(both):
    exact, state = both
    absmax = state["exp_avg_sq_absmax"]
    values, codes = normalized(exact["exp_avg_sq"].sqrt(), absmax), state["exp_avg_sq"].numpy()
    book = fused.ROOT_BOOK.astype(np.float64)
    above = np.searchsorted(book, values - 1e-7).clip(1, 255)
    assert ((codes == above) | (codes == above - 1)).mean() > 0.99
    assert (np.abs(codes.astype(int) - above + 0.5) < 2).all()
    low = values < 0.1  # gaps are wide there
    assert abs((book[codes] - values)[low].mean()) < 1e-5 < np.abs(book[codes] - values)[low].mean() / 10


def test_small_changes_of_a_square_are_not_lost():
    """Rounded to the nearest, a square that falls by 4 % a step would keep its code for ever."""
    param = nn.Parameter(torch.ones(BLOCK))
    lamb = Lamb8bit([param], min_8bit_size=1, max_grad_norm=None, lr=0.0)
    exact = torch.zeros(BLOCK, dtype=torch.float64)
    for step in range(41):
        param.grad = torch.full((BLOCK,), 1e-2 if step == 0 else 0.0)
        param.grad[0] = 1.0
        exact = 0.96 * exact + 0.04 * param.grad.double() ** 2
        lamb.step()
    root = torch.from_numpy(fused.ROOT_BOOK)[lamb.state[param]["exp_avg_sq"].int()]
    root = root * lamb.state[param]["exp_avg_sq_absmax"]
    assert float(root[1:].mean()) == pytest.approx(float(exact[1:].sqrt().mean()), rel=0.03)


@pytest.mark.parametrize("value", [0.0, 1e-42, -1e-39, 1.0, -3e38])
def test_blocks_of_one_value(value):
    values, codes = np.full(BLOCK, value, np.float32), np.empty(BLOCK, np.uint8)
    absmax = fused._normalize(values)
    fused._round_means(values, codes, fused.MEAN_TABLE, *np.empty((2, BLOCK), np.uint16))
    decoded = fused.MEAN_BOOK[codes] * absmax
    assert np.isfinite(decoded).all()
    np.testing.assert_allclose(decoded, value if abs(value) > 1e-38 else 0, rtol=0.01)
