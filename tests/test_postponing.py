"""Rounds that come to no step are tried again: nobody came to them, too few, or hardly any answers."""

from __future__ import annotations

from concurrent.futures import TimeoutError as FutureTimeoutError  # not the built-in one on Python 3.10
from threading import get_ident
from types import SimpleNamespace

import pytest
from hivemind.averaging.control import AveragingStage

from tests.lone_optimizer import (
    BROKEN_OFF,
    NAMES,
    after_a_step,
    meet,
    nobody_comes,
    others_answer,
    train,
)
from tests.somebody import Somebody, entry
from volunteer_kit.swarm.making_up import AGAIN_AND_AGAIN
from volunteer_kit.swarm.missed_rounds import UNDER_WAY
from volunteer_kit.swarm.state import digest


@pytest.fixture
def optimizer(lone):
    yield from after_a_step(lone)


@pytest.fixture
def has_round(optimizer, monkeypatch):
    return others_answer(optimizer, monkeypatch)


def test_a_round_that_nobody_came_to_is_tried_again_with_its_samples(optimizer, monkeypatch, has_round):
    """A step of ours would be nobody's, and its samples lost. Not for ever: who is seen may never come, and more than
    three rounds' samples are taken from nobody."""
    epoch, held, averager = optimizer.local_epoch, digest(optimizer.training_state()), optimizer.grad_averager
    told = optimizer.state_averager.told
    for missed in (1, 2, 3):
        optimizer._start_epoch_anew()
        with averager.get_tensors() as ours:
            for tensor in ours:
                tensor.fill_(3.0)
        nobody_comes(optimizer, monkeypatch)
        report = optimizer.reports.pop()
        assert report.failure == "nobody answered in time" and report.epoch == epoch + 1
        if missed > AGAIN_AND_AGAIN:
            assert not report.is_postponed and optimizer.local_epoch == epoch + 1 and optimizer._stepped_apart
            assert report.samples == 16 and report.uncertain, "they count if the others go on from it"
            return
        assert report.is_postponed and report.counted == report.samples == 0 and not report.names
        assert not report.uncertain and report.kept_until is None, "nothing has been decided"
        assert optimizer.state_averager.told == told and digest(optimizer.training_state()) == held
        averager.local_samples_accumulated, averager.local_weight_accumulated = 8, 8.0
        averager.names, averager.stale = ("since",), 1
        for accumulator in averager._grad_accumulators():
            accumulator.zero_()
        assert not optimizer._try_again() and optimizer.local_epoch == epoch
        mean = {float(value) for tensor in averager._grad_accumulators() for value in tensor.flatten()}
        found = averager.local_samples_accumulated, averager.local_weight_accumulated, averager.names, averager.stale
        assert found == (24, 24.0, ("missed", "since"), 0) and mean == {2.0}
        progress = optimizer.tracker.local_progress
        assert (progress.epoch, progress.samples_accumulated) == (epoch, 24)


@pytest.mark.parametrize("swarm_epochs_on, is_postponed", [(0, True), (1, False)])
def test_who_cannot_make_up_for_a_round_tries_again_only_while_it_is_to_come(
    optimizer, monkeypatch, swarm_epochs_on, is_postponed
):
    """In a run that verifies; it would step alone before the others each time, and miss all their rounds."""
    epoch = optimizer.local_epoch
    monkeypatch.setattr(optimizer.grad_averager, "verification", object())
    monkeypatch.setattr(optimizer.tracker.global_progress, "epoch", epoch + swarm_epochs_on)  # seen while we waited
    nobody_comes(optimizer, monkeypatch, swarm_epoch=epoch)
    assert optimizer.reports[-1].is_postponed is is_postponed
    if not is_postponed:
        assert optimizer._follow.at_least == epoch + 1, "and not with the next round, which it would miss as well"
        return
    optimizer._try_again()
    assert optimizer.local_epoch == epoch and optimizer.grad_averager.local_samples_accumulated == 16
    assert not optimizer._just_loaded, "it takes a state as soon as the others are ahead"


@pytest.mark.parametrize(
    "claims, comes",
    [
        ([(0, 50)], True),
        ([(0, 50), (0, 50), (1, 0)], True),
        ([(0, 0)], False),  # trains nothing, and meets with whoever is first
        ([(1, 0), (1, 0), (0, 50)], False),
    ],
)
def test_others_who_compute_for_our_epoch_still_are_waited_for(optimizer, monkeypatch, claims, comes):
    """They do not believe us what we have, and end it later; unless most have ended it without us."""
    epoch, tracker = optimizer.local_epoch, optimizer.tracker
    found = {}
    for ahead, samples in claims:
        other = Somebody()
        found[other.subkey] = entry(other.claims(epoch=epoch + ahead, samples_accumulated=samples))
    future = SimpleNamespace(result=lambda timeout: SimpleNamespace(value=found))
    get, ours = tracker.dht.get, get_ident()

    def found_by_us(*words, **settings):
        """The tracker's own thread asks meanwhile, and awaits the answer."""
        return future if get_ident() == ours else get(*words, **settings)

    monkeypatch.setattr(tracker.dht, "get", found_by_us)
    monkeypatch.setattr(tracker, "_looked_at", float("-inf"))
    with tracker.pause_updates():
        assert optimizer._will_others_come(waited=3.0) is comes


@pytest.mark.parametrize("begun", [True, False])
def test_whose_round_has_begun_without_it_waits_no_more(optimizer, monkeypatch, begun):
    """It waited for as long as a group may take to come together, and was late for the next one as well; three who
    were waiting with each other for a majority did, too."""
    averager = optimizer.grad_averager
    monkeypatch.setattr(type(averager), "without_group", 0.0)
    monkeypatch.setattr(averager, "has_begun", lambda told, donors: begun and told == averager.told)
    monkeypatch.setattr(optimizer, "_will_others_come", lambda waited: True)
    monkeypatch.setattr(optimizer, "_next_begun_lookup", 0.0)
    averager.told = optimizer.state_averager.told
    control = LookingFor(answers_after=4)
    if begun:
        with pytest.raises(FutureTimeoutError):
            optimizer._await_round(control)
    else:
        assert optimizer._await_round(control) == "a round"
    assert control.cancelled is begun


class LookingFor:
    """A round's control, which finds its group when it has been asked so often."""

    def __init__(self, answers_after: int):
        self.answers_after, self.cancelled, self.stage = answers_after, False, AveragingStage.LOOKING_FOR_GROUP

    def result(self, timeout: float) -> str:
        self.answers_after -= 1
        if self.answers_after > 0:
            raise FutureTimeoutError
        return "a round"

    def cancel(self) -> None:
        self.cancelled = True


def test_samples_of_a_round_that_broke_off_do_not_go_into_the_next(optimizer, monkeypatch, has_round):
    """Others may have taken in what was sent."""
    epoch = optimizer.local_epoch
    nobody_comes(optimizer, monkeypatch, control=BROKEN_OFF)
    assert optimizer.reports[-1].is_postponed
    optimizer._try_again()
    assert optimizer.local_epoch == epoch and optimizer.grad_averager.local_samples_accumulated == 0


def test_samples_of_a_model_that_was_given_up_do_not_go_into_the_next(optimizer, monkeypatch, has_round):
    tensors, metadata = optimizer.named_state(NAMES)
    nobody_comes(optimizer, monkeypatch)
    optimizer.load_named_state(NAMES, tensors, metadata)
    assert optimizer.step(batch_size=8) and optimizer.grad_averager.local_samples_accumulated == 8


def test_a_round_that_was_over_is_made_up_for_and_its_samples_go_into_the_next(optimizer, monkeypatch, has_round):
    """A newcomer that took a state just before its donor stepped would train on a step of its own for an epoch."""
    epoch = optimizer.local_epoch
    nobody_comes(optimizer, monkeypatch, swarm_epoch=epoch + 1)
    has_round.append(b"round")
    assert optimizer._try_again() and optimizer.local_epoch == epoch + 1
    progress = optimizer.tracker.local_progress
    assert (progress.epoch, progress.samples_accumulated) == (epoch + 1, 16)
    assert optimizer.grad_averager.names == ("missed",) and optimizer.grad_averager.stale == 1
    monkeypatch.setattr(optimizer.tracker.global_progress, "num_peers", 1)
    optimizer.reports.clear()
    train(optimizer, 1)
    assert optimizer.reports[-1].samples >= 24, "with those of this epoch"


def test_while_the_others_round_is_under_way_no_other_is_begun(optimizer, monkeypatch, has_round):
    epoch = optimizer.local_epoch
    nobody_comes(optimizer, monkeypatch)
    has_round += [UNDER_WAY]
    assert not optimizer._try_again() and optimizer._round_under_way is not None
    has_round += [UNDER_WAY]
    monkeypatch.setattr(optimizer, "_next_recovery", 0.0)
    optimizer._look_after_round_under_way()
    assert optimizer._round_under_way is not None and optimizer.local_epoch == epoch
    has_round += [b"round"]
    monkeypatch.setattr(optimizer, "_next_recovery", 0.0)
    optimizer._look_after_round_under_way()
    assert optimizer._round_under_way is None and optimizer.local_epoch == epoch + 1
    assert optimizer.grad_averager.local_samples_accumulated == 16


@pytest.mark.parametrize("held, is_left", [("the same", False), ("another", True)])
def test_a_round_that_was_arranged_with_another_state_is_left(optimizer, monkeypatch, held, is_left):
    """What was told there is no longer so: all would take us for out of step, and us for who has to follow."""
    dropped = []
    optimizer.grad_averager.told = optimizer.state_averager.told
    monkeypatch.setattr(optimizer, "_drop_scheduled_round", lambda: dropped.append(True))
    if held == "another":
        optimizer.state_averager.round_name = b"round"
        optimizer.state_averager.step(increment_epoch=True, optimizer_step=True)
    optimizer._prepare_to_meet()
    assert bool(dropped) is is_left and optimizer.grad_averager.told == optimizer.state_averager.told


@pytest.mark.parametrize("regulars, least", [(0, 1), (1, 2), (2, 2), (3, 3), (7, 5)])
def test_more_than_half_of_those_who_usually_come_are_wanted_twice_in_a_row(optimizer, monkeypatch, regulars, least):
    monkeypatch.setattr(optimizer.tracker, "num_regulars", regulars)
    for times_postponed in range(AGAIN_AND_AGAIN + 1):
        optimizer._times_postponed = times_postponed
        optimizer._prepare_to_meet()
        wanted = least if times_postponed < AGAIN_AND_AGAIN else 0
        assert optimizer.grad_averager.least_group_size == wanted
    optimizer._times_postponed = 0
    monkeypatch.setattr(optimizer.grad_averager, "verification", object())
    optimizer._prepare_to_meet()
    assert optimizer.grad_averager.least_group_size == 0, "who cannot put a step off takes what there is"


@pytest.mark.parametrize("received, is_lost", [(0.34, True), (0.5, True), (0.51, False)])
def test_who_got_hardly_any_answers_takes_the_step_of_those_who_got_most(
    optimizer, monkeypatch, has_round, received, is_lost
):
    """With zeros for the rest it came to a model that was nobody else's, and lost the next epoch's samples as well."""
    epoch, told, reduced = optimizer.local_epoch, optimizer.state_averager.told, []
    monkeypatch.setattr(optimizer, "on_reduced", reduced.append)
    meet(optimizer, monkeypatch, holders=3, received=received)
    report = optimizer.reports.pop()
    assert report.is_postponed is is_lost and bool(reduced) is not is_lost
    if not is_lost:
        assert optimizer.local_epoch == epoch + 1
        return
    assert report.samples == 0 and report.cause == "incomplete" and report.group_size == 3
    assert optimizer.local_epoch == epoch and optimizer.state_averager.told == told and not optimizer._stepped_apart
    has_round += [b"theirs"]
    assert optimizer._try_again() and optimizer.local_epoch == epoch + 1
    assert optimizer.grad_averager.local_samples_accumulated == 0, "some of what was sent may be in it"


def test_samples_of_a_round_that_is_under_way_are_no_steps_yet(optimizer):
    """A step is reported when the next epoch's round has begun, if that took as long as an epoch."""
    optimizer.grad_averager.local_samples_accumulated, epoch = 3, optimizer.local_epoch
    optimizer._report = {"epoch": epoch, "samples": 5}
    assert optimizer.samples_after(epoch) == 3
    optimizer._report = {"epoch": epoch + 1, "samples": 5}
    assert (optimizer.samples_after(epoch), optimizer.samples_after(epoch + 1)) == (8, 3)
