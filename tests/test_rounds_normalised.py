"""Test how far a step goes whose members took local steps."""

from __future__ import annotations

import pytest

from volunteer_kit.swarm.rounds.normalised import scales_of, unit_of
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.entries import Entry

CELLS, ALL = 4, 0b1111


def entry(*answers: tuple[int, list[Share]], epoch: int = 9) -> Entry:
    covered = sum(cells for cells, _ in answers)
    made = tuple(Answer(cells, "a", bytes([cells]), tuple(sorted(shares))) for cells, shares in answers)
    return Entry(0, 0, epoch, b"parent", Ballot(0, "a"), b"round", (), made, ALL & ~covered)


def share(peer: str, samples: int, birth: int = 9, cells: int = ALL, number: int = 0) -> Share:
    return Share(peer, number, birth, samples, cells)


@pytest.mark.parametrize(
    ("shares", "steps"),
    [
        ([share("a", 32), share("b", 32), share("c", 32)], 32.0),
        ([share("a", 96)], 96.0),
        ([share("a", 60), share("b", 20)], (60 * 60 + 20 * 20) / 80),
        # who brings a single sample makes nobody's step shorter
        ([share("a", 1000), *(share(str(each), 1) for each in range(10))], pytest.approx(1000, rel=0.02)),
        # all late: relative weights count
        ([share("a", 32, birth=7), share("b", 32, birth=7)], 32.0),
        # a late one weighs a third, and has taken all of its steps
        ([share("a", 30), share("b", 90, birth=7)], (30 * 30 + 30 * 90) / 60),
        # two contributions of one member are one member's steps
        ([share("a", 16), share("a", 16, birth=8, number=1), share("b", 32)], 32.0),
        ([], 0.0),
    ],
)
def test_a_step_goes_as_far_as_its_members_went_by_their_weights(shares, steps):
    answers = [(ALL, shares)] if shares else []
    scales = scales_of(entry(*answers), CELLS, 64.0)
    assert scales == (scales[0],) * CELLS and scales[0] * 64 == steps


def test_each_cell_has_its_own():
    """The slice with the first two cells was lost in the round before, but for c, which is new."""
    shares = [share("a", 20), share("a", 20, 8, 0b0011, 1), share("b", 20), share("b", 20, 8, 0b0011, 1)]
    first = [each._replace(cells=each.cells & 0b0011) for each in shares]
    second = [each._replace(cells=0b0100) for each in shares if each.cells & 0b0100]
    scales = scales_of(entry((0b0011, first), (0b0100, second)), CELLS, 1.0)
    assert scales == (40.0, 40.0, 20.0, 0.0)


@pytest.mark.parametrize("target, unit", [(1, 1.0), (96, 128.0), (4096, 4096.0), (11, 8.0)])
def test_ways_travel_times_a_power_of_two(target, unit):
    assert unit_of(target) == unit
