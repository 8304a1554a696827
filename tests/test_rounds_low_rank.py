"""Low-rank gradients: one factor a round, with the other one fixed by the steps before."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch

from volunteer_kit.swarm.codecs.low_rank import cell_ends, matrix_of, values_each_round
from volunteer_kit.swarm.codecs.registry import CODECS, make_codec
from volunteer_kit.swarm.rounds.bases import orthonormal
from volunteer_kit.swarm.rounds.error_feedback import ErrorFeedback
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import mean_of
from volunteer_kit.swarm.rounds.reducer import SliceReducer, decode_answer
from volunteer_kit.swarm.sync.contributions import Accounts, Share, discount

SHAPES = [(40, 30), (7,), (24, 36), (3, 3), (200,), (6, 4, 20), (64, 32)]
CELLS, RANK = 3, 2
ALL = (1 << CELLS) - 1


def layout_of(codec: str = "none", rank: int = RANK, shapes=SHAPES, cells: int = CELLS) -> Layout:
    return Layout([torch.Size(shape) for shape in shapes], cells, make_codec(codec, codec, 0), rank=rank)


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def encoded(layout: Layout, vector: torch.Tensor, cells: int = ALL) -> list[tuple[int, bytes]]:
    """A vector as answers of one slice for each cell."""
    answers = []
    for cell in layout.cells_of(cells):
        data = layout.encode_cell(cell, vector[layout.cell(cell)])
        answers.append((1 << cell, len(data).to_bytes(4, "little") + data))
    return answers


def decoded(layout: Layout, answers: list[tuple[int, bytes]]) -> torch.Tensor:
    vector = torch.zeros(layout.elements)
    for cells, data in answers:
        for cell, values in decode_answer(layout, cells, data).items():
            vector[layout.cell(cell)] = values
    return vector


def passed(layout: Layout, vector: torch.Tensor) -> torch.Tensor:
    """Return a vector as it comes out of encoding and decoding."""
    return decoded(layout, encoded(layout, vector))


# --- cells ---


@pytest.mark.parametrize("cells", [1, 2, 3, 5, 16, 64])
def test_cells_hold_whole_matrices_and_about_as_many_bytes_each(cells):
    layout = layout_of(cells=cells)
    bounds = [layout.cell(cell) for cell in range(cells)]
    assert bounds[0].start == 0 and bounds[-1].stop == layout.elements == sum(map(np.prod, SHAPES))
    assert all(one.stop == other.start for one, other in pairwise(bounds))
    begin = 0
    for shape in SHAPES:
        size = int(np.prod(shape))
        if matrix_of(shape, RANK):
            assert any(each.start <= begin and begin + size <= each.stop for each in bounds), shape
        begin += size
    costs = [layout.most_bytes(cell) for cell in range(cells)]
    largest = max(4 * RANK * max(matrix_of(shape, RANK) or (0,)) for shape in SHAPES)
    assert max(costs) <= 2 * (sum(costs) / cells + largest)
    for cell in range(cells):  # also of empty ones
        values = numbers(bounds[cell].stop - bounds[cell].start)
        assert layout.decode_cell(cell, layout.encode_cell(cell, values)).shape == values.shape


def test_vectors_that_travel_value_by_value_are_cut_anywhere():
    assert cell_ends([(1000,)], 2, 4) == (0, 250, 500, 750, 1000)
    assert cell_ends([(100, 100)], 2, 3) in {(0, 0, 10_000, 10_000), (0, 10_000, 10_000, 10_000)}
    assert values_each_round([(100, 100), (7,)], 2) == 207


def test_the_identity_names_codec_and_rank():
    layouts = [layout_of(), layout_of("float16"), layout_of(rank=1), layout_of(rank=0), layout_of(cells=4)]
    assert len({layout.identity() for layout in layouts}) == len(layouts)
    assert layout_of().identity() == layout_of().identity()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="16 or 32 bits"):
        layout_of("blockwise8")
    for ends in ((0, 10, 20, 100), (0, 10**6, 10**6, 10**6), (0, 1), (0, 5, 3, sum(map(int, map(np.prod, SHAPES))))):
        with pytest.raises(ValueError, match="cell|end"):
            Layout([torch.Size(shape) for shape in SHAPES], CELLS, CODECS["none"], rank=RANK, ends=ends)


# --- orthonormal columns ---


@pytest.mark.parametrize(("rows", "rank"), [(2, 1), (30, 2), (257, 4), (64, 32)])
def test_columns_are_orthonormal_and_span_the_same(rows, rank):
    factor = numbers(rows * rank).view(rows, rank).numpy()
    factor[:, -1] *= 1e-20
    found = orthonormal(factor, b"")
    assert found.dtype == np.float32 and np.abs(found.T @ found - np.eye(rank)).max() < 1e-5
    rest = factor - found @ (found.T @ factor)
    assert np.abs(rest).max() < 1e-5 * np.abs(factor).max()


def test_columns_of_no_length_or_direction_of_their_own_are_replaced():
    factor = numbers(60).view(20, 3).numpy()
    factor[:, 1], factor[:, 2] = 2 * factor[:, 0], 0.0
    found = orthonormal(factor, b"seed")
    assert np.abs(found.T @ found - np.eye(3)).max() < 1e-6
    assert np.array_equal(found, orthonormal(factor, b"seed")) and not np.array_equal(found, orthonormal(factor, b"2"))


def test_bases_are_equal_to_the_last_bit_on_every_machine():
    """This digest was computed once; no processor or library may change it."""
    factor = np.frombuffer(hashlib.shake_128(b"f").digest(4 * 999), "<i4").astype(np.float32).reshape(333, 3)
    found = hashlib.sha256(orthonormal(factor, b"").tobytes())
    found.update(orthonormal(np.zeros((50, 4), np.float32), b"beginning").tobytes())
    assert found.hexdigest()[:12] == "57bcbdfaca53"


# --- algebra ---


def test_the_mean_of_projections_is_the_projection_of_the_mean():
    layout = layout_of()
    for step in range(4):
        members = [numbers(layout.elements, 10 * step + each) for each in range(5)]
        mean = sum(members) / 5
        torch.testing.assert_close(sum(passed(layout, each) for each in members) / 5, passed(layout, mean))
        layout = layout.after(encoded(layout, mean))


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-5), ("float16", 2e-3)])
def test_an_answer_is_encoded_again_as_it_is(codec, tolerance):
    layout = layout_of(codec)
    for step in range(4):
        once = passed(layout, numbers(layout.elements, step))
        torch.testing.assert_close(passed(layout, once), once, rtol=tolerance, atol=tolerance)
        layout = layout.after(encoded(layout, once))


def test_sides_take_turns_and_the_factor_goes_after_the_gradient():
    """A gradient of that rank, which stays as it is, comes whole from the second step on."""
    layout = layout_of(shapes=[(40, 30)], cells=1)
    gradient = (numbers(80, 1).view(40, 2) @ numbers(60, 2).view(2, 30)).view(-1)
    sizes, errors = [], []
    for _ in range(4):
        answers = encoded(layout, gradient)
        sizes.append(len(answers[0][1]) - 4)
        errors.append(float((decoded(layout, answers) - gradient).norm() / gradient.norm()))
        layout = layout.after(answers)
    assert sizes == [4 * 2 * 40, 4 * 2 * 30] * 2
    assert errors[0] > 0.5 and max(errors[1:]) < 1e-5


def test_cells_that_a_step_has_not_keep_basis_and_side():
    layout = layout_of(cells=3)
    vector = numbers(layout.elements)
    there = encoded(layout, vector)
    after = layout.after([there[0], (0b100, bytes(4))])  # no answer for one cell, and nobody had anything of another
    for cell in (1, 2):
        values = vector[layout.cell(cell)]
        assert after.encode_cell(cell, values) == layout.encode_cell(cell, values)
    assert after.encode_cell(0, vector[layout.cell(0)]) != layout.encode_cell(0, vector[layout.cell(0)])
    assert passed(layout, vector).equal(decoded(layout, there)), "the layout before is as it was"


def test_a_state_holds_what_the_next_step_needs():
    layout = layout_of()
    for step in range(3):
        layout = layout.after(encoded(layout, numbers(layout.elements, step), cells=0b101))
    tensors = {name: tensor.clone() for name, tensor in layout.state_tensors().items()}
    again, vector = layout_of().with_state(tensors), numbers(layout.elements, 9)
    assert encoded(again, vector) == encoded(layout, vector) != encoded(layout_of(), vector)
    assert encoded(layout.at_beginning(), vector) == encoded(layout_of(), vector)
    assert not layout_of(rank=0).state_tensors() and not layout_of(rank=0).goes_by_steps


def test_a_state_that_no_steps_lead_to_is_refused():
    layout = layout_of()
    good = {name: tensor.clone() for name, tensor in layout.state_tensors().items()}
    layout.with_state(good)

    def changed(name: str, change) -> dict[str, torch.Tensor]:
        tensors = {name: tensor.clone() for name, tensor in good.items()}
        tensors[name] = change(tensors[name])
        return tensors

    for bad in (
        changed("bases", lambda t: t * 2),
        changed("bases", lambda t: t * float("nan")),
        changed("bases", lambda t: t + 1e30),
        changed("bases", lambda t: t[:-1]),
        changed("bases", lambda t: t.double()),
        changed("sides", lambda t: t + 2),
        changed("sides", lambda t: t + 1),  # the bases are those of the other side
        changed("sides", lambda t: t.float()),
    ):
        with pytest.raises(ValueError):
            layout.with_state(bad)


@pytest.mark.parametrize("codec", ["none", "float16"])
def test_bytes_that_make_no_sense_are_refused(codec):
    layout = layout_of(codec)
    after = layout.after(encoded(layout, numbers(layout.elements)))
    for cell in range(CELLS):
        place = layout.cell(cell)
        values = numbers(place.stop - place.start)
        data = layout.encode_cell(cell, values)
        infinite = data[:-4] + (torch.tensor([torch.inf]).numpy().tobytes() if codec == "none" else b"\0|\0|")
        other = after.encode_cell(cell, values)
        for bad in (b"", data[:-1], data + b"\0", data[: len(data) // 2], bytes(len(data) + 400), infinite):
            with pytest.raises(ValueError):
                layout.decode_cell(cell, bad)
            if bad and other != data:  # the cell has a matrix
                with pytest.raises(ValueError):
                    layout.after([(1 << cell, len(bad).to_bytes(4, "little") + bad)])
        if len(other) != len(data):
            with pytest.raises(ValueError):
                layout.decode_cell(cell, other)
        with pytest.raises(ValueError, match="finite"):
            layout.encode_cell(cell, values * float("nan"))
    huge = torch.full((layout.elements,), 3e38)
    with pytest.raises(ValueError, match="finite"):
        layout_of("none", rank=16, shapes=[(64, 64)], cells=1).encode_cell(0, huge[:4096])


# --- rounds ---


class Swarm:
    """Members, one reducer, and steps; no network."""

    def __init__(self, layout: Layout, members: int, feedback: bool = True):
        self.layout, self.epoch = layout, 0
        self.feedback = [ErrorFeedback(None, layout) if feedback else None for _ in range(members)]

    def round(self, sums: list[torch.Tensor], samples: list[int], births: list[int] | None = None, cells: int = ALL):
        """The mean gradient that all step by.

        :param sums: each member's gradient sum
        :param cells: that the entry has
        """
        births, names = births or [self.epoch] * len(sums), [f"m{place}" for place in range(len(sums))]
        reducer = SliceReducer(
            self.layout, ALL, "m0", epoch=self.epoch, max_staleness=4, limits=dict.fromkeys(names, 1e9),
            spent=Accounts(),
        )  # fmt: skip
        for name, total, count, birth, kept in zip(names, sums, samples, births, self.feedback, strict=True):
            share = Share(name, self.epoch, birth, count, ALL)
            part = reducer.begin(name, (share,))
            for cell, weight in part.weights.items():
                owed = kept.residual(cell) if kept is not None and kept.weight(cell) else None
                values = mean_of(self.layout, [share], self.epoch, cell, lambda _, total=total: total, owed)
                data = self.layout.encode_cell(cell, values)
                reducer.read(part, cell, data)
                if kept is not None:
                    left = (values - self.layout.decode_cell(cell, data)) * weight
                    kept.keep(str(self.epoch).encode(), cell, left)
            reducer.take(part)
        reducer.close()
        answer, data = reducer.reduce()
        answers = [
            (1 << cell, len(each).to_bytes(4, "little") + each)
            for cell, each in self.layout.split_answer(ALL, data).items()
            if cells >> cell & 1
        ]
        for kept in self.feedback:
            if kept is not None:
                kept.settle(str(self.epoch).encode(), cells)
                kept.drop_rounds()
        mean = decoded(self.layout, answers)
        self.layout, self.epoch = self.layout.after(answers), self.epoch + 1
        return mean

    def owed(self) -> torch.Tensor:
        """The sum of what all members have left over, (elements,)."""
        return sum(
            torch.cat([kept.residual(cell) for cell in range(self.layout.num_cells)]).double()
            for kept in self.feedback
            if kept is not None
        )


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-4), ("float16", 2e-2)])
def test_what_came_and_what_is_left_over_are_all_that_went_in(codec, tolerance):
    """With members of other weights, late gradients, and cells that some steps lack."""
    swarm = Swarm(layout_of(codec), 3)
    came = torch.zeros(swarm.layout.elements, dtype=torch.float64)
    brought = came.clone()
    for step in range(12):
        samples = [8, 32, 16]
        births = [swarm.epoch, swarm.epoch, max(0, swarm.epoch - step % 3)]
        weights = [count * discount(swarm.epoch - birth) for count, birth in zip(samples, births, strict=True)]
        sums = [numbers(swarm.layout.elements, 10 * step + each) * samples[each] for each in range(3)]
        cells = 0b011 if step % 4 == 2 else ALL
        layout = swarm.layout
        came += swarm.round(sums, samples, births, cells).double() * sum(weights)
        for cell in layout.cells_of(cells):
            for total, weight, count in zip(sums, weights, samples, strict=True):
                brought[layout.cell(cell)] += total[layout.cell(cell)].double() * weight / count
    difference = (came + swarm.owed() - brought).norm() / brought.norm()
    assert difference < tolerance
    assert swarm.owed().norm() > 0.1 * brought.norm()


def least_squares(layout: Layout | None, feedback: bool = True, steps: int = 240) -> float:
    """The loss behind some steps of three members, each with data of its own; matrices of full rank are learned.

    :param layout: None: the gradients travel as they are
    """
    shapes = [(40, 30), (40,)]
    target = numbers(1240, 1)
    inputs = [numbers(64 * 30, 2 + each).view(64, 30) * torch.logspace(0, -0.7, 30) for each in range(3)]
    parameters = torch.zeros(1240)

    def loss_and_gradient(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = parameters.clone().requires_grad_()
        made = data @ weights[:1200].view(shapes[0]).T + weights[1200:]
        wanted = data @ target[:1200].view(shapes[0]).T + target[1200:]
        loss = (made - wanted).square().mean()
        loss.backward()
        return loss.detach(), weights.grad

    swarm = Swarm(layout, 3, feedback) if layout is not None else None
    for _ in range(steps):
        gradients = [loss_and_gradient(data)[1] for data in inputs]
        mean = sum(gradients) / 3 if swarm is None else swarm.round([64 * each for each in gradients], [64] * 3)
        parameters -= 2.0 * mean
    return float(sum(loss_and_gradient(data)[0] for data in inputs)) / 3


def test_it_learns_nearly_as_well_as_with_whole_gradients():
    def layout() -> Layout:
        return layout_of("float16", shapes=[(40, 30), (40,)], cells=2)

    whole, low, without = least_squares(None), least_squares(layout()), least_squares(layout(), feedback=False)
    first = least_squares(None, steps=0)
    assert whole < 0.05 * first
    assert low < 1.2 * whole, (first, whole, low, without)
    assert without > 10 * low, (first, whole, low, without)
