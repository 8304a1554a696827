"""A reducer takes parts whole or not at all, and makes one answer of them."""

from __future__ import annotations

import hashlib

import pytest
import torch

from volunteer_kit.robust.bounds import bound_norms
from volunteer_kit.robust.rules import RULES, rule
from volunteer_kit.swarm.codecs.registry import CODECS
from volunteer_kit.swarm.rounds.error_feedback import ErrorFeedback
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.reducer import TRIES, RefusedPart, SliceReducer, decode_answer
from volunteer_kit.swarm.rounds.weighed import WeighedVector
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Share

SHAPES = [torch.Size([300, 7]), torch.Size([40])]
CELLS, EPOCH = 4, 9
SLICE = 0b1110
NAMES = ["a", "b", "c", "d", "e"]


def layout_of(codec: str = "none") -> Layout:
    return Layout(SHAPES, CELLS, CODECS[codec])


def reducer_of(layout: Layout, **kwargs) -> SliceReducer:
    given = dict(
        epoch=EPOCH, max_staleness=2, limits=dict.fromkeys(NAMES, 1000.0), spent=Accounts(), feedback=None, rule="mean"
    )
    return SliceReducer(layout, SLICE, "a", **{**given, **kwargs})


def share(peer: str, samples: int = 10, cells: int = SLICE, number: int = 0) -> Share:
    return Share(peer, number, EPOCH, samples, cells)


def vector(layout: Layout, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(layout.elements, generator=torch.Generator().manual_seed(seed)) * scale


def bring(reducer: SliceReducer, layout: Layout, peer: str, values: torch.Tensor, *shares: Share):
    part = reducer.begin(peer, shares)
    for cell in part.weights:
        reducer.read(part, cell, layout.encode_cell(cell, values[layout.cell(cell)]))
    reducer.take(part)


def averages_of(layout: Layout, found: tuple[Answer, bytes]) -> dict[int, torch.Tensor]:
    answer, data = found
    assert hashlib.sha256(data).digest() == answer.digest
    assert len(data) <= layout.most_answer_bytes(answer.cells) <= layout.largest_answer
    return decode_answer(layout, answer.cells, data)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("codec", ["none", "blockwise8"])
def test_every_rule_is_applied_to_each_cell_as_everybody_reads_it(name, codec):
    layout = layout_of(codec)
    reducer = reducer_of(layout, rule=name)
    weights = {"c": 7, "a": 30, "e": 1, "b": 10, "d": 12}
    vectors = {peer: vector(layout, seed, 1e6 if peer == "e" else 1.0) for seed, peer in enumerate(NAMES)}
    for peer, samples in weights.items():
        bring(reducer, layout, peer, vectors[peer], share(peer, samples))
    reducer.close()
    averages = averages_of(layout, reducer.reduce())
    assert set(averages) == {1, 2, 3} and reducer.too_long == {"e"}
    for cell, average in averages.items():
        sent = [layout.encode_cell(cell, vectors[peer][layout.cell(cell)]) for peer in NAMES]
        parts, _ = bound_norms([layout.decode_cell(cell, data) for data in sent], [weights[peer] for peer in NAMES])
        expected = rule(name)(parts, [weights[peer] for peer in NAMES])
        expected = layout.decode_cell(cell, layout.encode_cell(cell, expected))
        torch.testing.assert_close(average, expected, rtol=1e-5, atol=1e-5)


def test_the_answer_does_not_depend_on_who_was_first():
    layout = layout_of("blockwise8")
    answers = []
    for order in (NAMES, NAMES[::-1]):
        reducer = reducer_of(layout)
        for peer in order:
            bring(reducer, layout, peer, vector(layout, ord(peer)), share(peer, ord(peer)))
        reducer.close()
        answers.append(reducer.reduce())
    assert answers[0] == answers[1]


def test_cells_that_nobody_has_are_zeros_and_take_no_space():
    layout = layout_of()
    reducer = reducer_of(layout)
    bring(reducer, layout, "b", vector(layout, 1), share("b", cells=0b0010))
    bring(reducer, layout, "c", vector(layout, 2), share("c", cells=0b0110, samples=30))
    reducer.close()
    answer, data = reducer.reduce()
    averages = averages_of(layout, (answer, data))
    one, two = (vector(layout, seed) for seed in (1, 2))
    torch.testing.assert_close(averages[1], (one / 4 + 3 * two / 4)[layout.cell(1)])
    torch.testing.assert_close(averages[2], two[layout.cell(2)])
    assert not averages[3].any()
    assert len(data) == 3 * 4 + layout.most_bytes(1) + layout.most_bytes(2)
    assert answer.shares == (share("b", cells=0b0010), share("c", cells=0b0110, samples=30))
    assert answer.reducer == "a" and answer.cells == SLICE


def test_without_a_part_that_counts_there_is_no_answer():
    layout = layout_of()
    reducer = reducer_of(layout)
    bring(reducer, layout, "b", vector(layout, 1))
    with pytest.raises(RefusedPart, match="believed"):
        reducer.begin("c", (share("c", samples=1001),))
    assert reducer.done == {"b", "c"} and "believed" in reducer.refused["c"]
    reducer.close()
    assert reducer.reduce() is None


def test_a_part_enters_whole_or_not_at_all():
    layout = layout_of()
    reducer = reducer_of(layout)
    values = vector(layout, 1)
    part = reducer.begin("b", (share("b"),))
    reducer.read(part, 1, layout.encode_cell(1, values[layout.cell(1)]))
    with pytest.raises(RefusedPart, match="whole"):
        reducer.take(part)
    bring(reducer, layout, "c", values, share("c"))
    assert reducer.done == {"c"}
    reducer.close()
    with pytest.raises(RefusedPart, match="late"):
        reducer.take(part)
    assert {each.peer for each in reducer.reduce()[0].shares} == {"c"}


def test_a_part_that_is_begun_anew_replaces_the_one_before():
    layout = layout_of()
    reducer = reducer_of(layout)
    first = reducer.begin("b", (share("b"),))
    with pytest.raises(RefusedPart, match="already"):
        reducer.begin("b", ())  # it only wants the answer: its part is on its way
    bring(reducer, layout, "b", vector(layout, 1), share("b"))
    with pytest.raises(RefusedPart, match="late"):
        reducer.take(first)
    with pytest.raises(RefusedPart, match="already"):
        reducer.begin("b", (share("b"),))
    assert reducer.done == {"b"} and not reducer.refused


def test_a_part_that_is_begun_again_and_again_is_refused():
    reducer = reducer_of(layout_of())
    for _ in range(TRIES):
        reducer.drop(reducer.begin("b", (share("b"),)))
    with pytest.raises(RefusedPart, match="often"):
        reducer.begin("b", (share("b"),))
    assert reducer.done == {"b"}


def test_what_was_refused_once_stays_refused():
    reducer = reducer_of(layout_of())
    with pytest.raises(RefusedPart, match="somebody else"):
        reducer.begin("b", (share("c"),))
    with pytest.raises(RefusedPart, match="somebody else"):
        reducer.begin("b", (share("b"),))


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_that_make_no_sense_do_not_enter(codec):
    layout = layout_of(codec)
    reducer = reducer_of(layout)
    part = reducer.begin("b", (share("b"),))
    good = layout.encode_cell(1, vector(layout, 1)[layout.cell(1)])
    for cell, data in [(1, good[:-1]), (1, good + b"\0"), (1, b""), (0, good), (7, good)]:
        with pytest.raises(ValueError):
            reducer.read(part, cell, data)
    reducer.read(part, 1, good)
    with pytest.raises(ValueError, match="turn"):
        reducer.read(part, 1, good)


@pytest.mark.parametrize("data", [b"", bytes(3), bytes(11), bytes(13), b"\xff" * 12, bytes(10**6)])
def test_bytes_that_are_no_answer_are_refused(data):
    with pytest.raises(ValueError):
        decode_answer(layout_of(), SLICE, data)


def test_zeros_alone_are_an_answer():
    averages = decode_answer(layout_of(), SLICE, bytes(12))
    assert all(not average.any() and average.numel() for average in averages.values())


def test_what_an_answer_leaves_out_comes_in_a_later_one(tmp_path):
    layout = layout_of("sparse")
    feedback = ErrorFeedback(tmp_path / "answered.bin", layout)
    told, sent = torch.zeros(layout.elements), torch.zeros(layout.elements)
    for count in range(20):
        reducer = reducer_of(layout, feedback=feedback)
        bring(reducer, layout, "b", vector(layout, count), share("b", samples=10))
        bring(reducer, layout, "c", vector(layout, 100 + count), share("c", samples=30))
        reducer.close()
        answer, data = reducer.reduce()
        if count % 3 == 1:
            feedback.drop_rounds()  # this round failed
            continue
        feedback.settle(answer.digest, answer.cells)
        feedback.drop_rounds()
        for cell, average in decode_answer(layout, answer.cells, data).items():
            place = layout.cell(cell)
            told[place] += average
            for seed, weight in ((count, 0.25), (100 + count, 0.75)):
                read = layout.decode_cell(cell, layout.encode_cell(cell, vector(layout, seed)[place]))
                sent[place] += weight * read
    rest = torch.cat([feedback.residual(cell) for cell in range(CELLS)])
    assert rest.any() and all(feedback.weight(cell) == 40 for cell in (1, 2, 3))
    torch.testing.assert_close(told + rest, sent, rtol=1e-4, atol=1e-4)


def test_an_answer_that_is_not_sent_leaves_nothing_behind():
    layout = layout_of("sparse")
    feedback = ErrorFeedback(None, layout)
    reducer = reducer_of(layout, feedback=feedback)
    bring(reducer, layout, "b", vector(layout, 1), share("b"))
    reducer.close()
    first, _ = reducer.reduce()
    again = reducer_of(layout, feedback=feedback)  # a process that died, and started again
    bring(again, layout, "c", vector(layout, 2), share("c"))
    again.close()
    second, _ = again.reduce()
    feedback.settle(first.digest, SLICE)
    kept = feedback.residual(1).clone()
    sent = layout.decode_cell(1, layout.encode_cell(1, vector(layout, 1)[layout.cell(1)]))
    assert second.digest != first.digest
    assert kept.norm() < sent.norm()


# --- cells that begin with a weight ---

MOST = 8.0
VECTOR = WeighedVector([(30,), (9,)], [False, True], CELLS)


def weighed_layout() -> Layout:
    return Layout(VECTOR.shapes, CELLS, CODECS["none"], VECTOR.origins, MOST)


def weighed(gradient: torch.Tensor, exact: torch.Tensor, weight: float) -> torch.Tensor:
    slot = torch.zeros(VECTOR.elements)
    VECTOR.fill(slot, [gradient, exact], weight)
    return slot


@pytest.mark.parametrize("name", RULES)
def test_a_rule_sees_gradients_by_what_they_weigh_and_counters_apart_from_them(name):
    layout = weighed_layout()
    reducer = reducer_of(layout, rule=name)
    weights = {"a": (10, 0.5), "b": (20, 4.0), "c": (5, 2.0), "d": (7, 1.0), "e": (9, 0.0)}  # samples, of each
    gradients = {peer: torch.randn(30, generator=torch.Generator().manual_seed(i)) for i, peer in enumerate(NAMES)}
    exact = {peer: torch.full((9,), 1e5 * i) for i, peer in enumerate(NAMES)}  # so different that they would decide
    for peer, (samples, weight) in weights.items():
        bring(reducer, layout, peer, weighed(gradients[peer], exact[peer], weight), share(peer, samples))
    reducer.close()
    means = VECTOR.means(averages_of(layout, reducer.reduce()))
    here = [peer for peer in NAMES if weights[peer][1]]
    counted = [weights[peer][0] * weights[peer][1] for peer in here]
    for cell, mean in means.items():
        place = VECTOR.cell(cell)
        learnt, rest = slice(place.start, min(place.stop, 30)), slice(max(place.start, 30) - 30, place.stop - 30)
        if learnt.start < learnt.stop:
            expected = rule(name)([gradients[peer][learnt] for peer in here], counted)
            torch.testing.assert_close(mean[: len(expected)], expected, rtol=1e-4, atol=1e-5)
        if rest.start < rest.stop:
            expected = rule(name)([exact[peer][rest] for peer in here], counted)
            torch.testing.assert_close(mean[-len(expected) :], expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_is_bounded_by_gradients_and_a_weight_by_what_it_may_be():
    layout = weighed_layout()
    reducer = reducer_of(layout)
    for i, peer in enumerate(NAMES):
        scale = 1e5 if peer == "e" else 1.0
        gradient = scale * torch.randn(30, generator=torch.Generator().manual_seed(i))
        bring(reducer, layout, peer, weighed(gradient, torch.full((9,), 1e9), 1.0), share(peer))
    reducer.close()
    means = VECTOR.means(averages_of(layout, reducer.reduce()))
    assert reducer.too_long == {"e"}, "counters of all are long"
    values = torch.cat([means[cell] for cell in sorted(means)])
    begin = VECTOR.cell(1).start
    assert values[: 30 - begin].abs().max() < 1e3 and torch.equal(values[30 - begin :], torch.full((9,), 1e9))
    for weight in (-1.0, 2 * MOST):
        reducer = reducer_of(layout)
        with pytest.raises(ValueError, match="weighs"):
            bring(reducer, layout, "b", weighed(torch.ones(30), torch.ones(9), weight), share("b"))
