"""Sketches of slices: the same numbers however a vector lies in memory, and what lies about them gain."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from volunteer_kit.robust import sketch as module
from volunteer_kit.robust.checks import Part, by_slice, slices_of
from volunteer_kit.robust.sketch import mismatch, sketch, sketch_slices

SEEDS = st.binary(min_size=16, max_size=32)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8)
SUMS = st.sampled_from([1, 8, 32])


def cut(vector: torch.Tensor, at: list[float]) -> list[torch.Tensor]:
    """Tensors that are the vector in a row; `at`: where one ends, as shares of its length."""
    ends = sorted(round(share * len(vector)) for share in at)
    return [part.reshape(-1, 1) for part in vector.tensor_split(ends)]


@settings(deadline=None)
@given(SIZES, st.lists(st.floats(0, 1), max_size=6), SEEDS, SUMS, st.sampled_from([4, 8, 2**20]))
def test_slices_are_the_sketches_of_their_parts_wherever_tensors_end(sizes, at, seed, size, chunk):
    vector = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(len(sizes)))
    expected = np.zeros((len(sizes), size))
    for place, (end, length) in enumerate(zip(itertools.accumulate(sizes), sizes, strict=True)):
        for at_once in range(end - length, end):  # one value at a time
            expected[place] += sketch(vector[at_once : at_once + 1], seed, at_once, size)
    with mock.patch.object(module, "CHUNK", chunk):
        found = sketch_slices(cut(vector, at), seed, sizes, size)
        whole = sketch(vector, seed, size=size)
    assert np.allclose(found, expected, atol=1e-9)
    assert np.allclose(found.sum(0), whole, atol=1e-9), "they add up to the whole vector's"


@given(SIZES, st.integers(1, 50), st.lists(st.floats(0, 1), max_size=6))
def test_more_values_than_slices_have_room_for_are_an_error(sizes, more, at):
    with pytest.raises(ValueError, match="more than"):
        sketch_slices(cut(torch.ones(sum(sizes) + more), at), bytes(16), sizes)


def test_fewer_values_leave_the_last_slices_empty():
    found = sketch_slices([torch.ones(5)], bytes(16), (3, 4, 2))
    assert found[0].any() and found[1].any() and not found[2].any()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.lists(st.integers(0, 9), min_size=30, max_size=30))
def test_a_reducers_parts_are_its_slice(pieces, sizes):
    """Place in the group is not place in the vector: who is not trusted reduces nothing."""
    names = [(2 * reducer + 1, index) for reducer, count in enumerate(pieces) for index in range(count)]
    parts = [Part(reducer, index, size) for (reducer, index), size in zip(names, sizes, strict=False)]
    vector = torch.randn(sum(part.size for part in parts))
    pieces_of = vector.split([part.size for part in parts])
    offsets = itertools.accumulate((part.size for part in parts), initial=0)
    rows = np.stack([sketch(piece, bytes(16), at) for piece, at in zip(pieces_of, offsets, strict=False)])
    assert np.allclose(by_slice(parts, rows), sketch_slices([vector], bytes(16), slices_of(parts)), atol=1e-9)


# --- what is sent, and what its samples give ---

TABLES = st.integers(0, 10**6).map(lambda seed: np.random.default_rng(seed).normal(size=(4, 8)))


@given(TABLES, st.integers(0, 3), st.lists(st.floats(-1e12, 1e12), min_size=8, max_size=8), st.booleans())
def test_a_lie_about_one_slice_does_not_make_up_for_the_others(true, lied, anything, makes_up):
    """-g was sent; of one slice it says what it likes, as for one that makes the whole right."""
    stated = -true
    stated[lied] = true.sum(0) - stated.sum(0) + stated[lied] if makes_up else anything
    assert mismatch(stated, true) > 0.6


@given(TABLES, st.floats(1e-12, 1e12), st.sampled_from([-1, 1]))
def test_no_length_makes_a_distance_small(true, length, sign):
    """The longer one's length counts: neither a long nor a short one hides anything."""
    off = abs(sign * length - 1) / max(length, 1)
    assert mismatch(sign * length * true, true) == pytest.approx(off, abs=1e-9)
    assert mismatch(true, sign * length * true) == pytest.approx(off, abs=1e-9)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_never_fits(wrong):
    true = np.ones((2, 8))
    assert mismatch(true, true) == 0.0 and mismatch(0 * true, 0 * true) == 0.0
    assert mismatch(true, np.where(np.eye(2, 8) > 0, wrong, true)) == float("inf")
