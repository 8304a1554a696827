"""How long is awaited what usually takes less."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volunteer_kit.swarm.sync.timing import LEAST, USUAL_ROUNDS, Deadline, agreed, enough_samples, too_slow_network

SECONDS = st.floats(0.0, 1000.0)


def after(*durations: float, ceiling: float = 60.0) -> Deadline:
    deadline = Deadline(ceiling)
    for seconds in durations:
        deadline.succeeded(seconds)
    return deadline


@pytest.mark.parametrize(
    "durations, least, most, why",
    [
        ([], 60, 60, "nothing is known"),
        ([5.0] * (LEAST - 1), 60, 60, "too little is known"),
        ([5.0] * 8, 10.0, 10.0, "twice as long, though all were alike"),
        ([4.6, 5.0, 5.4, 5.0, 4.8, 5.2, 5.0, 5.1], 10.0, 11.0, "twice the longest but one of the last"),
        ([5.0] * 4 + [50.0] + [5.0] * 8, 10.0, 10.0, "one slow round is forgotten"),
        ([5.0] * 8 + [50.0], 10.0, 10.0, "and was no sign that the next is as slow"),
        ([5.0] * 8 + [50.0, 5.0, 50.0], 57, 60, "two are"),
        ([0.01] * 8, 3.0, 3.0, "a machine may be busy for a moment"),
        ([100.0] * 8, 60, 60, "never longer than the run says"),
    ],
)
def test_what_the_last_rounds_took(durations, least, most, why):
    assert least <= after(*durations).seconds <= most, why


def test_a_failure_widens_and_success_narrows_again():
    deadline = after(*[5.0] * 8)
    usual = deadline.seconds
    deadline.failed(0.1)
    assert deadline.seconds == pytest.approx(1.5 * usual), "a few were late: dead, or too little time"
    deadline.failed()
    assert deadline.seconds == pytest.approx(3 * usual)
    for _ in range(9):
        deadline.failed()
    assert deadline.seconds == 60.0
    for _ in range(8):
        deadline.succeeded(5.0)
    assert deadline.seconds == usual


def test_a_line_that_got_slow_is_not_cut_for_long():
    deadline, cut = after(*[5.0] * 16), 0
    for _ in range(30):
        if deadline.seconds >= 25.0:
            deadline.succeeded(25.0)
        else:
            deadline.failed(0.1)
            cut += 1
    assert cut <= 4


@given(st.lists(st.one_of(SECONDS, st.none()), max_size=60), st.floats(0.1, 100.0))
def test_it_is_never_out_of_bounds(story, ceiling):
    deadline = Deadline(ceiling)
    for seconds in story:
        deadline.failed() if seconds is None else deadline.succeeded(seconds)
        assert 0 < deadline.floor <= deadline.seconds <= ceiling


@pytest.mark.parametrize(
    "told, expected, why",
    [
        ([None] * 4, 60, "nobody knows"),
        ([8.0, 8.0, None, None], 60, "half know nothing: a new group"),
        ([8.0] * 4, 8.0, "all say the same"),
        ([8.0, 9.0, 1e6], 9.0, "one that says a week"),
        ([8.0, 9.0, 1e-9], 8.0, "one that says nothing at all"),
        ([8.0] * 9 + [None], 12.0, "a newcomer's line is not known"),
        ([8.0] * 6 + [None] * 4, 8 / 0.6, "a round grows with its newcomers"),
        ([1e-9] * 4, 3.0, "not below the floor"),
        ([1e9] * 4, 60, "not above the ceiling"),
        ([8.0, 9.0, 10.0, math.nan, -1.0], 15.0, "what could not be true is nothing"),
    ],
)
def test_what_a_group_agrees_on(told, expected, why):
    assert agreed(told, 3.0, 60.0) == pytest.approx(expected), why


@given(st.lists(st.floats(5.0, 10.0), min_size=3, max_size=9), st.data())
def test_fewer_than_half_cannot_move_it_beyond_what_the_others_say(honest, data):
    liars = data.draw(st.lists(st.floats(1e-6, 1e6), max_size=len(honest) - 1))
    assert min(honest) <= agreed([*liars, *honest], 1.0, 60.0) <= max(honest)


@pytest.mark.parametrize(
    "round_seconds, epoch_seconds, enough",
    [
        (41.0, 20.0, 16384),
        (19.0, 20.0, None),
        (20.0, 20.0, None),
        (21.0, 20.0, 8192),
        (200.0, 20.0, 65536),
        (0.0, 20.0, None),
        (10.0, math.inf, None),
        (10.0, 0.0, None),
        (math.nan, 1.0, None),
    ],
)
def test_which_target_batch_would_do(round_seconds, epoch_seconds, enough):
    assert enough_samples(round_seconds, epoch_seconds, 4096) == enough


@given(st.floats(0.1, 1e4), st.floats(0.1, 1e4), st.integers(1, 10**6))
def test_with_that_target_batch_the_network_keeps_up(round_seconds, epoch_seconds, target):
    enough = enough_samples(round_seconds, epoch_seconds, target)
    if enough is not None:
        assert enough_samples(round_seconds, epoch_seconds * enough / target, enough) is None


def test_the_host_is_told_in_words():
    rounds = [41.0] * USUAL_ROUNDS
    assert too_slow_network(rounds, 20.0, 4096) == (
        "A round takes 41 s and an epoch 20 s: devices wait for the network. "
        "With target_batch_size: 16384 they would not."
    )
    assert too_slow_network(rounds[1:], 20.0, 4096) is None, "too few were seen"
    assert too_slow_network([*rounds[:3], 5.0, 5.0, 5.0], 20.0, 4096) is None, "it keeps up by now"
