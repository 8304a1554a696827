"""Steps that nobody else may have taken count once the others go on from them, and not before."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.local_swarm import local_swarm
from volunteer_kit.home import Home
from volunteer_kit.session.tally import Tally
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.swarm.uncertain import UncertainSteps


@pytest.fixture
def steps(clock):
    return UncertainSteps(certain_after=30.0, after_meeting=90.0, clock=clock)


def test_who_saw_nobody_for_long_is_the_swarm(steps, clock):
    assert not steps.taken(1, in_sight=False) and steps.kept_until() is None
    clock.now += 29
    assert not steps.taken(2, in_sight=False) and steps.kept_until() is None
    clock.now += 1
    assert steps.taken(3, in_sight=False) and steps.kept_until() == 3
    assert steps.taken(4, in_sight=False) and steps.kept_until() is None  # each of them counts at once from now on


def test_others_in_sight_begin_the_time_anew_and_make_it_longer(steps, clock):
    """Back from a cut of 75 s a peer saw nobody for eight steps, which the others had taken without it."""
    steps.taken(1, in_sight=False)
    clock.now += 60
    assert not steps.taken(2, in_sight=True)
    assert not steps.taken(3, in_sight=False) and steps.kept_until() is None
    clock.now += 89
    assert not steps.taken(4, in_sight=False) and steps.kept_until() is None
    clock.now += 1
    assert steps.taken(5, in_sight=False) and steps.kept_until() == 5


@pytest.mark.parametrize(
    ("decide", "kept_until"),
    [(UncertainSteps.shared, 7), (UncertainSteps.given_up, -1), (lambda steps: steps.given_up(6), 6)],
    ids=["the others have them", "another's state", "another's, which was ours before"],
)
def test_what_comes_later_decides(steps, clock, decide, kept_until):
    steps.taken(6, in_sight=False)
    steps.taken(7, in_sight=False)
    decide(steps)
    assert steps.kept_until() == kept_until and steps.kept_until() is None
    clock.now += 60
    assert not steps.taken(8, in_sight=False), "the time alone begins anew"


def test_without_steps_nothing_is_decided(steps):
    steps.shared()
    steps.given_up()
    steps.leaving()
    assert steps.kept_until() is None


@pytest.mark.parametrize(
    ("rounds", "kept_until"),
    [([True], 0), ([True, True], 1), ([False], -1), ([False, True], -1), ([True, False, True], 0),
     ([False, "shared", True], 2)],
    ids=["whole", "two", "in part", "after one in part", "then one in part", "after one that was shared"],
)  # fmt: skip
def test_who_leaves_takes_a_step_for_the_swarms_if_its_round_was_whole(steps, rounds, kept_until):
    for epoch, whole in enumerate(rounds):
        if whole == "shared":
            steps.shared()
            assert steps.kept_until() == epoch - 1
        else:
            assert not steps.taken(epoch, in_sight=True, whole=whole)
    steps.leaving()
    assert steps.kept_until() == kept_until


# --- what they earn ---


class Credits:
    """Of a Reading, what the tally asks of it."""

    def __init__(self):
        self.given_up = 0

    def applied(self, report: StepReport) -> int:
        return report.counted

    def lost(self, samples: int) -> None:
        self.given_up += samples


def step(epoch: int, samples: int, **fields) -> StepReport:
    return StepReport(epoch, samples, 2, 1.0, 0.1, 0, 0, {}, **fields)


def test_samples_wait_until_somebody_has_them(tmp_path):
    home, told = Home(tmp_path, "demo", "f"), []
    tally = Tally(Credits(), home, lambda event, **fields: told.append(fields))
    assert tally.count(step(1, 8)) == 8
    assert tally.count(step(2, 5, uncertain=True, failure="nobody answered in time")) == 0
    assert (told[-1]["samples"], told[-1]["waiting"]) == (8, 5)
    assert home.totals().samples == 8, "what is not certain is not written down"
    assert tally.count(step(3, 3, kept_until=2)) == 8
    assert (tally.samples, tally.epochs, tally.waiting) == (16, 3, 0) and home.totals().samples == 16


def test_a_step_that_was_given_up_never_counts():
    credits = Credits()
    tally = Tally(credits, None, lambda event, **fields: None)
    tally.count(step(1, 5, uncertain=True))
    assert tally.count(step(2, 7, uncertain=True, kept_until=0)) == 0  # of the one before, not of this one
    assert (tally.waiting, credits.given_up) == (7, 5)
    assert tally.count(step(3, 1, failure="at epoch 3, the others at 4", kept_until=2)) == 7


def test_of_steps_that_are_given_up_those_count_that_the_others_have_too():
    """Who misses a round loses that step, not the one before, which nobody had confirmed yet."""
    credits = Credits()
    tally = Tally(credits, None, lambda event, **fields: None)
    for epoch in (1, 2, 3):
        tally.count(step(epoch, 10 + epoch, uncertain=True))
    assert tally.count(step(3, 0, failure="at epoch 2, the others at 3", kept_until=2)) == 23
    assert (tally.samples, tally.epochs, tally.waiting, credits.given_up) == (23, 2, 0, 13)


@pytest.mark.parametrize(("kept_until", "samples"), [(1, 5), (0, 0), (None, 0)])
def test_the_last_steps_count_at_the_end_if_they_are_known_to_be_the_swarms(kept_until, samples):
    credits, told = Credits(), []
    tally = Tally(credits, None, lambda event, **fields: told.append(fields))
    tally.count(step(1, 5, uncertain=True))
    tally.end(kept_until)
    assert (tally.samples, tally.waiting, credits.given_up) == (samples, 0, 5 - samples)
    assert told[-1]["samples"] == samples and json.dumps(told)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.none() | st.integers(0, 9))))
def test_no_sample_is_counted_twice_or_forgotten(story):
    credits = Credits()
    tally = Tally(credits, None, lambda event, **fields: None)
    counted = 0
    for epoch, (samples, uncertain, kept_until) in enumerate(story):
        counted += tally.count(step(epoch, samples, uncertain=uncertain, kept_until=kept_until))
        assert counted == tally.samples
    assert tally.samples + tally.waiting + credits.given_up == sum(samples for samples, _, _ in story)


# --- a real swarm ---


def test_a_peer_that_was_alone_follows_the_others_when_they_meet(tmp_path):
    """Two peers hold different models; one must adopt the other's, statistics included. What the first did alone
    counts once the second has it, and no sooner."""
    with local_swarm(tmp_path) as swarm:
        first = swarm.add(metadata_expiration=240.0)  # half of it alone would be certainty
        first.wait_epoch(2)
        second = swarm.add()
        second.wait_epoch(3, group_size=2)
        ends = swarm.finish(first, second)
        assert ends[0]["digest"] == ends[1]["digest"]
    epochs = [e for e in first.events if e["event"] == "epoch"]
    decided = next(n for n, e in enumerate(epochs) if e["kept_until"] is not None)
    assert all(e["uncertain"] for e in epochs[:decided]) and decided >= 2
    assert epochs[decided]["kept_until"] == epochs[decided - 1]["epoch"] and epochs[decided]["group_size"] == 2
