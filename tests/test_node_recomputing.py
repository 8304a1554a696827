"""Others' samples, computed again between two microbatches."""

from __future__ import annotations

import numpy as np
import torch

from volunteer_kit.robust.messages import Duty, Load, Samples
from volunteer_kit.robust.sketch import sketch_slices
from volunteer_kit.swarm.node.recomputing import FEWEST, Recomputing
from volunteer_kit.swarm.node.talk import Recompute

SLICES, SUMS, SEED = (3, 5, 2), 8, b"s" * 32
SIZE = sum(SLICES)


def gradient(name: str, parameters: torch.Tensor) -> torch.Tensor:
    return parameters * int(name) + torch.arange(SIZE)


def recompute(names, parameters):
    for name in names:
        yield [gradient(name, parameters[0])]


def asked(*ranges: tuple[int, int], models: tuple[bytes, ...] = (b"old", b"new")) -> Recompute:
    loads = (Load(4, 2, 0.5, 0b101), Load(5, 3, 1.0, 0b111))
    duty = Duty("judge", b"round", 5, 1, Samples(tuple("12345")), ranges, SEED, SLICES, loads=loads)
    return Recompute(duty, models)


def make(max_staleness: int = 4, model_bytes: int = 4 * SIZE):
    answers = []
    made = Recomputing(model_bytes, max_staleness, SUMS, answers.append)
    made.recompute = recompute
    return made, answers


def test_samples_are_computed_on_the_model_of_their_birth_and_weighed_as_they_count():
    made, answers = make()
    old, new = torch.ones(SIZE), torch.full((SIZE,), 2.0)
    made.keep(b"old", [old])
    made.keep(b"new", [new])
    made.ask(asked((0, 3), (3, 5)))
    assert made.work_off(0.0) and not made.work_off(0.0)
    [answer] = answers
    first = 0.5 * (gradient("1", old) + gradient("2", old))
    first[3:8] = 0  # the second slice holds none of the older samples
    expected = first + gradient("3", new), gradient("4", new) + gradient("5", new)
    for total, vector in zip(answer.totals, expected, strict=True):
        assert np.allclose(total, sketch_slices([vector], SEED, SLICES, SUMS))


def test_nothing_is_answered_of_a_model_that_is_gone_and_the_next_one_is():
    made, answers = make()
    made.keep(b"new", [torch.ones(SIZE)])
    made.ask(asked((0, 5)))
    made.ask(asked((0, 5), models=(b"", b"new")))
    made.ask(asked((2, 5)))
    made.work_off(0.0)
    assert len(answers) == 1 and answers[0].duty.ranges == ((2, 5),)


def test_models_are_kept_as_long_as_samples_may_be_old_and_memory_allows():
    for staleness, size, kept in ((4, 4, 9), (16, 4, 21), (16, 2**30, FEWEST)):
        made, answers = make(staleness, size)
        for number in range(40):
            made.keep(b"%d" % number, [torch.ones(SIZE)])
        for number in range(40):
            made.ask(asked((2, 3), models=(b"", b"%d" % number)))
        while made.work_off(0.0):
            pass
        assert len(answers) == kept
