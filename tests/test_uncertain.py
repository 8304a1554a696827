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
    assert not steps.taken(in_sight=False) and steps.fate() is None
    clock.now += 29
    assert not steps.taken(in_sight=False) and steps.fate() is None
    clock.now += 1
    assert steps.taken(in_sight=False) and steps.fate() is True
    assert steps.taken(in_sight=False) and steps.fate() is None  # each of them counts at once from now on


def test_others_in_sight_begin_the_time_anew_and_make_it_longer(steps, clock):
    """Back from a cut of 75 s a peer saw nobody for eight steps, which the others had taken without it."""
    steps.taken(in_sight=False)
    clock.now += 60
    assert not steps.taken(in_sight=True)
    assert not steps.taken(in_sight=False) and steps.fate() is None
    clock.now += 89
    assert not steps.taken(in_sight=False) and steps.fate() is None
    clock.now += 1
    assert steps.taken(in_sight=False) and steps.fate() is True


@pytest.mark.parametrize("kept", [True, False])
def test_what_comes_later_decides(steps, clock, kept):
    steps.taken(in_sight=False)
    steps.shared() if kept else steps.given_up()
    assert steps.fate() is kept and steps.fate() is None
    clock.now += 60
    assert not steps.taken(in_sight=False), "the time alone begins anew"


def test_without_lone_steps_nothing_is_decided(steps):
    steps.shared()
    steps.given_up()
    assert steps.fate() is None


# --- what they earn ---


class Credits:
    """Of a Reading, what the tally asks of it."""

    def __init__(self):
        self.given_up = 0

    def applied(self, report: StepReport) -> int:
        return report.counted

    def lost(self, samples: int) -> None:
        self.given_up += samples


def step(samples: int, **fields) -> StepReport:
    alone = fields.get("uncertain", False)
    return StepReport(1, samples, 1 if alone else 2, 1.0, 0.1, 0, 0, {}, **fields)


def test_samples_wait_until_somebody_has_them(tmp_path):
    home, told = Home(tmp_path, "demo", "f"), []
    tally = Tally(Credits(), home, lambda event, **fields: told.append(fields))
    assert tally.count(step(8)) == 8
    assert tally.count(step(5, uncertain=True, failure="nobody answered in time")) == 0
    assert (told[-1]["samples"], told[-1]["waiting"]) == (8, 5)
    assert home.totals().samples == 8, "what is not certain is not written down"
    assert tally.count(step(3, fate=True)) == 8
    assert (tally.samples, tally.epochs, tally.waiting) == (16, 3, 0) and home.totals().samples == 16


def test_a_step_that_was_given_up_never_counts():
    credits = Credits()
    tally = Tally(credits, None, lambda event, **fields: None)
    tally.count(step(5, uncertain=True))
    assert tally.count(step(7, uncertain=True, fate=False)) == 0  # of the one before, not of this one
    assert (tally.waiting, credits.given_up) == (7, 5)
    assert tally.count(step(1, failure="at epoch 3, the others at 4", fate=True)) == 7


@pytest.mark.parametrize(("fate", "samples"), [(True, 5), (False, 0), (None, 0)])
def test_the_last_steps_count_at_the_end_if_they_are_known_to_be_the_swarms(fate, samples):
    credits, told = Credits(), []
    tally = Tally(credits, None, lambda event, **fields: told.append(fields))
    tally.count(step(5, uncertain=True))
    tally.end(fate)
    assert (tally.samples, tally.waiting, credits.given_up) == (samples, 0, 5 - samples)
    assert told[-1]["samples"] == samples and json.dumps(told)


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from([None, True, False]))))
def test_no_sample_is_counted_twice_or_forgotten(story):
    credits = Credits()
    tally = Tally(credits, None, lambda event, **fields: None)
    counted = 0
    for samples, alone, fate in story:
        counted += tally.count(step(samples, uncertain=alone, fate=fate))
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
    decided = next(n for n, e in enumerate(epochs) if e["fate"] is not None)
    assert all(e["uncertain"] for e in epochs[:decided]) and decided >= 2
    assert epochs[decided]["fate"] is True and epochs[decided]["group_size"] == 2
