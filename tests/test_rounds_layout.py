"""The cut of the parameter vector into cells, and the bytes of a cell."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hivemind.compression import Quantile8BitQuantization

from volunteer_kit.swarm.codecs.registry import CODECS, make_codec
from volunteer_kit.swarm.rounds.layout import CHUNK, Layout

SHAPES = [torch.Size(shape) for shape in [(7,), (300, 41), (64,), (), (0, 3), (5000,), (2, 3, 4)]]
NUMEL = sum(math.prod(shape) for shape in SHAPES)


def values_of(layout: Layout, cell: int, seed: int = 0) -> torch.Tensor:
    place = layout.cell(cell)
    return torch.randn(place.stop - place.start, generator=torch.Generator().manual_seed(seed + cell))


@pytest.mark.parametrize("cells", [1, 3, 16, NUMEL + 5])
def test_cells_are_the_vector_in_order(cells):
    layout = Layout(SHAPES, cells, CODECS["none"])
    places = [layout.cell(cell) for cell in range(cells)]
    assert layout.elements == NUMEL == places[-1].stop and places[0].start == 0
    assert all(one.stop == next.start for one, next in itertools.pairwise(places))
    sizes = [place.stop - place.start for place in places]
    assert max(sizes) - min(sizes) <= 1


def test_a_mask_names_cells_and_none_beyond():
    layout = Layout(SHAPES, 4, CODECS["none"])
    assert layout.cells_of(0b1011) == [0, 1, 3]
    assert layout.cells_of(-1) == [0, 1, 2, 3]
    assert layout.cells_of(1 << 9) == []


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("cells", [1, 5])
def test_every_codec_brings_a_cell_back(name, cells):
    layout = Layout(SHAPES, cells, make_codec(name, name, 0))
    for cell in range(cells):
        values = values_of(layout, cell)
        data = layout.encode_cell(cell, values)
        read = layout.decode_cell(cell, data)
        assert len(data) <= layout.most_bytes(cell)
        assert read.shape == values.shape and read.dtype == torch.float32
        if name == "none":
            assert torch.equal(read, values)
        elif name != "sparse":
            assert (read - values).abs().max() < {"float16": 1e-2}.get(name, 2.0)
        assert layout.encode_cell(cell, values) == data


def test_small_tensors_have_a_codec_of_their_own():
    layout = Layout(SHAPES, 3, make_codec("none", "uniform4", 1000))
    vector = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    read = torch.cat([layout.decode_cell(c, layout.encode_cell(c, vector[layout.cell(c)])) for c in range(3)])
    small, begin = torch.zeros(NUMEL, dtype=torch.bool), 0
    for shape in SHAPES:
        small[begin : begin + math.prod(shape)] = math.prod(shape) <= 1000
        begin += math.prod(shape)
    assert torch.equal(read[small], vector[small])
    assert not torch.equal(read[~small], vector[~small])


def test_a_tensor_of_small_gradients_is_not_lost_beside_one_of_large_ones():
    layout = Layout([torch.Size([4000]), torch.Size([4000])], 1, CODECS["uniform8"])
    vector = torch.randn(8000, generator=torch.Generator().manual_seed(0))
    vector[4000:] *= 1e-4
    read = layout.decode_cell(0, layout.encode_cell(0, vector))
    assert (read[4000:] - vector[4000:]).norm() < 0.1 * vector[4000:].norm()


def test_a_byte_and_a_scale_for_each_block_travel():
    numel = 4 * CHUNK
    layout = Layout([torch.Size([numel])], 4, CODECS["blockwise8"])
    sent = sum(len(layout.encode_cell(cell, values_of(layout, cell))) for cell in range(4))
    assert sent / numel < 1.0041


def test_a_sparse_cell_keeps_its_bound_whatever_its_values_are():
    layout = Layout([torch.Size([3 * CHUNK + 17])], 1, CODECS["sparse"])
    numel = layout.elements
    generator = torch.Generator().manual_seed(0)
    cluster = torch.zeros(numel)
    cluster[numel // 2 : numel // 2 + numel // 80] = 1.0
    single = torch.zeros(numel)
    single[-1] = 1.0
    regular = torch.zeros(numel)
    regular[::80] = 1.0
    for values in (torch.randn(numel, generator=generator), cluster, single, regular, torch.zeros(numel)):
        data = layout.encode_cell(0, values)
        assert len(data) <= layout.most_bytes(0) < numel / 40
        assert layout.decode_cell(0, data).shape == values.shape


@pytest.mark.parametrize("name", CODECS)
def test_bytes_that_are_no_cell_are_refused(name):
    layout = Layout([torch.Size([1000]), torch.Size([30])], 1, make_codec(name, name, 0))
    data = layout.encode_cell(0, values_of(layout, 0))
    for wrong in (b"", data[:-1], data + b"\0", data[: len(data) // 2], bytes(layout.most_bytes(0) + 1)):
        with pytest.raises(ValueError):
            layout.decode_cell(0, wrong)


def test_values_that_are_not_finite_are_neither_sent_nor_read():
    layout = Layout([torch.Size([100])], 2, CODECS["none"])
    good = layout.encode_cell(1, torch.zeros(50))
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="finite"):
            layout.encode_cell(1, torch.full((50,), bad))
        with pytest.raises(ValueError, match="finite"):
            layout.decode_cell(1, good[:-4] + torch.tensor(bad).numpy().tobytes())
    with pytest.raises(ValueError, match="shape"):
        layout.encode_cell(1, torch.zeros(51))


def test_garbage_of_the_right_length_is_finite_or_refused():
    layout = Layout([torch.Size([5000])], 1, CODECS["sparse"])
    generator = torch.Generator().manual_seed(0)
    data = layout.encode_cell(0, values_of(layout, 0))
    for _ in range(200):
        changed = bytearray(data)
        for place in torch.randint(len(data), (3,), generator=generator).tolist():
            changed[place] = int(torch.randint(256, (1,), generator=generator))
        try:
            assert torch.isfinite(layout.decode_cell(0, bytes(changed))).all()
        except ValueError:
            pass


def test_layouts_that_differ_have_other_names():
    base = (SHAPES, 4, CODECS["blockwise8"])
    others = [
        (SHAPES[:-1], 4, CODECS["blockwise8"]),
        (SHAPES, 5, CODECS["blockwise8"]),
        (SHAPES, 4, CODECS["blockwise4"]),
        (SHAPES, 4, make_codec("float16", "blockwise8", 100)),
        (SHAPES, 4, make_codec("float16", "blockwise8", 200)),
    ]
    names = {Layout(*each).identity() for each in (base, *others)}
    assert len(names) == 6
    assert Layout(*base).identity() == Layout(*base).identity()


def test_what_leaves_out_and_what_does_not():
    assert Layout(SHAPES, 4, make_codec("float16", "sparse", 100)).leaves_out
    assert not Layout(SHAPES, 4, make_codec("float16", "sparse", 10**6)).leaves_out
    assert not Layout(SHAPES, 4, CODECS["blockwise8"]).leaves_out


def test_a_codec_without_bounds_is_refused():
    with pytest.raises(ValueError, match="Quantile8Bit"):
        Layout(SHAPES, 4, Quantile8BitQuantization())
