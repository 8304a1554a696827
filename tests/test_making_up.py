"""Being where the others are: rounds that were missed, made up for; steps that were nobody else's, taken back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hivemind.utils import MPFuture

from tests.lone_optimizer import LATER, NAMES, A, B, after_a_step, meet, nobody_comes, others_answer, train
from volunteer_kit.swarm.agreement import read_told
from volunteer_kit.swarm.arrival import Arrival
from volunteer_kit.swarm.state import digest


@pytest.fixture
def optimizer(lone):
    yield from after_a_step(lone)


@pytest.fixture
def has_round(optimizer, monkeypatch):
    return others_answer(optimizer, monkeypatch)


@pytest.mark.parametrize(
    "num_peers, num_ahead, is_taken",
    [(2, 1, True), (3, 1, False), (3, 2, True), (8, 3, False), (8, 4, True), (8, 7, True)],
)
def test_who_is_ahead_alone_is_not_followed(optimizer, monkeypatch, num_peers, num_ahead, is_taken):
    """It may have stepped without the others, and would go back to what they had, when they had gone to it."""
    monkeypatch.setattr(optimizer.tracker.global_progress, "num_peers", num_peers)
    monkeypatch.setattr(optimizer.tracker.global_progress, "epoch", optimizer.local_epoch + 2)
    monkeypatch.setattr(optimizer.tracker, "num_ahead", num_ahead)
    assert optimizer._should_load_state_from_peers() is is_taken


@pytest.mark.parametrize("ahead, is_left_behind", [(1, False), (2, True), (4, True)])
def test_statistics_are_waited_for_though_the_others_go_on(optimizer, monkeypatch, ahead, is_left_behind):
    """A newer state would be left behind as well, and the next: on a narrow line, for ever. What was missed since is
    made up for, and no round of another epoch is gone into."""
    monkeypatch.setattr(optimizer.tracker.global_progress, "num_peers", 3)
    monkeypatch.setattr(optimizer.tracker.global_progress, "epoch", optimizer.local_epoch + ahead)
    monkeypatch.setattr(optimizer.tracker, "num_ahead", 2)
    began = []
    monkeypatch.setattr(optimizer, "_prepare_to_meet", lambda: began.append(True))
    arrival = SimpleNamespace(failed=None)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer.state_averager, "_arrival", arrival)
        if is_left_behind:
            assert not optimizer._should_load_state_from_peers()
            optimizer._maybe_schedule_gradient_averaging()
            optimizer._update_global_epoch(None)
            assert not began
        assert optimizer._is_left_behind is is_left_behind
        arrival.failed = "it broke off"
        assert not optimizer._is_left_behind
    assert optimizer._should_load_state_from_peers() is (ahead > 1), "when all is here, the rounds are made up for"


def test_who_joins_waits_for_the_statistics_that_come(optimizer, monkeypatch):
    """In a swarm whose rounds take a second it began to download anew for half a minute, beside those who waited for it
    in each round."""
    monkeypatch.setattr(optimizer.tracker, "look_again", lambda timeout: None)
    ahead = optimizer.local_epoch + 4
    monkeypatch.setattr(type(optimizer.tracker), "global_epoch", property(lambda tracker: ahead))
    states = []

    def take_state():
        states.append(optimizer.local_epoch)
        monkeypatch.setattr(optimizer.state_averager, "_arrival", SimpleNamespace(failed=None))
        return True

    monkeypatch.setattr(optimizer, "_take_state", take_state)
    assert optimizer.join(patience=60.0) and len(states) == 1


@pytest.mark.parametrize(
    "held", ["another", "the same", "of another epoch", "another, but by one of three", "another, by one of six"]
)
def test_who_stepped_apart_looks_whether_the_others_came_to_the_same(optimizer, monkeypatch, held):
    """Two who each stepped alone, half an epoch apart, would miss each other's rounds for ever."""
    nobody_comes(optimizer, monkeypatch, lone=True)
    assert optimizer._stepped_apart and optimizer._follow is None
    own = read_told(optimizer.state_averager.told)
    another = replace(own, lineage=bytes(len(own.lineage)))
    said = {
        "another": {A: another, B: another},
        "the same": {A: own, B: own},
        "of another epoch": {A: replace(another, epoch=own.epoch - 1), B: replace(another, epoch=own.epoch + 1)},
        "another, but by one of three": {A: another, B: own},
        "another, by one of six": {A: another, **dict.fromkeys(LATER, replace(own, epoch=own.epoch - 1))},
    }[held]
    monkeypatch.setattr(optimizer.state_averager, "declared", lambda: {peer: one.words() for peer, one in said.items()})
    monkeypatch.setattr(optimizer.tracker, "behind", frozenset([A, B]))
    optimizer._compare_after_step_apart()
    assert optimizer._stepped_apart and optimizer._follow is None, "they are still to come"
    monkeypatch.setattr(optimizer.tracker, "behind", frozenset())
    optimizer._compare_after_step_apart()
    assert optimizer._stepped_apart is (held in ("of another epoch", "another, by one of six"))
    assert optimizer.state_averager.is_shared is (held in ("the same", "another, but by one of three"))
    follow = optimizer._follow
    assert (follow is not None) is (held == "another")
    assert follow is None or (follow.at_least, set(follow.donors)) == (own.epoch, {A, B})


def test_who_met_nobody_and_cannot_make_up_follows_at_once(optimizer, monkeypatch):
    monkeypatch.setattr(optimizer.grad_averager, "verification", object())
    nobody_comes(optimizer, monkeypatch, swarm_epoch=optimizer.local_epoch + 1)
    assert optimizer._follow.at_least == optimizer.local_epoch and not optimizer._stepped_apart
    assert "the others at" in optimizer.reports[-1].apart


def test_what_most_others_held_last_is_kept_and_gone_back_to(optimizer, monkeypatch, has_round):
    """No round tells by itself that all got the same of it: who has all answers, where the others went without one,
    learns it in the next, and has no way back to them but to download a state."""
    epoch, held = optimizer.local_epoch, digest(optimizer.training_state())
    meet(optimizer, monkeypatch, holders=3)  # most hold what we hold before its step
    meet(optimizer, monkeypatch, holders=1)  # they do not any more
    assert optimizer.local_epoch == epoch + 2
    has_round += [None, b"their round", b"and their next"]
    monkeypatch.setattr(optimizer, "_declared", lambda: {A: read_told(optimizer.state_averager.told)})
    assert optimizer._make_up_for_rounds(at_least=epoch + 2) and optimizer.local_epoch == epoch + 2
    optimizer._times_back = 0
    has_round += [None, None]
    assert optimizer._make_up_for_rounds(at_least=epoch + 1) and optimizer.local_epoch == epoch
    assert digest(optimizer.training_state()) == held


def test_rounds_are_made_up_for_from_what_we_hold_before_anything_is_given_up(optimizer, monkeypatch, has_round):
    epoch = optimizer.local_epoch
    meet(optimizer, monkeypatch, holders=3)
    meet(optimizer, monkeypatch, holders=2)
    has_round += [b"round"]
    monkeypatch.setattr(optimizer, "_declared", lambda: {A: read_told(optimizer.state_averager.told)})
    assert optimizer._make_up_for_rounds(at_least=epoch + 3)
    assert optimizer.local_epoch == epoch + 3 and optimizer.made_up_for == 1
    optimizer.made_up_for = 0


def test_who_goes_back_to_where_all_met_downloads_nothing(optimizer, monkeypatch, has_round):
    """A round that begins there is still to come, or not yet to be had; a state takes ten minutes at home. Not for
    ever: the others may have gone on from elsewhere."""
    epoch = optimizer.local_epoch
    for gone_back, others_at in ((1, epoch + 1), (2, epoch + 1), (1, epoch + 2), (3, epoch + 1)):
        meet(optimizer, monkeypatch, holders=3)
        optimizer._times_back = gone_back - 1
        is_there = optimizer._make_up_for_rounds(at_least=others_at)
        assert optimizer.local_epoch == epoch and is_there is (gone_back < 3 and others_at == epoch + 1)


def test_who_saw_nobody_for_a_while_goes_back_for_those_that_tell_it(optimizer, monkeypatch, has_round):
    """Its line was cut, and the others' records are over; those whose state it would download are here all the same."""
    epoch = optimizer.local_epoch
    meet(optimizer, monkeypatch, holders=3)
    monkeypatch.setattr(optimizer.tracker.global_progress, "num_peers", 1)
    assert not optimizer._make_up_for_rounds(at_least=epoch + 1) and optimizer.local_epoch == epoch + 1
    assert optimizer._make_up_for_rounds(at_least=epoch + 1, donors=(A,)) and optimizer.local_epoch == epoch


def test_a_state_that_breaks_off_leaves_the_way_back(optimizer, monkeypatch, has_round):
    """One worker downloaded five in a row, each left behind or broken off; the rounds since were a hundredth of one."""
    averager, epoch, held = optimizer.state_averager, optimizer.local_epoch, digest(optimizer.training_state())
    meet(optimizer, monkeypatch, holders=3)
    metadata, tensors = averager.state_now()
    arrival = Arrival(A.to_bytes(), metadata, MPFuture())
    averager._begin_with({**metadata, "epoch": epoch + 5}, tensors[: averager.num_parameters], arrival)
    assert optimizer.local_epoch == epoch + 5 and not optimizer.complete
    arrival.statistics.set_result(None)
    assert arrival.settled.wait(60) and averager.why_incomplete
    assert optimizer._make_up_for_rounds(at_least=epoch + 1, donors=(A,))
    assert optimizer.complete and optimizer.local_epoch == epoch and digest(optimizer.training_state()) == held


def test_steps_that_are_taken_back_have_not_counted(optimizer, monkeypatch, has_round):
    epoch = optimizer.local_epoch
    meet(optimizer, monkeypatch, holders=3)
    assert optimizer.reports[-1].uncertain
    optimizer._make_up_for_rounds(at_least=epoch + 1)
    assert optimizer.uncertain_steps.kept_until() == epoch


def test_what_is_kept_for_a_restart_is_what_all_held(optimizer, monkeypatch):
    """From a state that nobody else has ever held, no round can be made up for."""
    epoch, held = optimizer.local_epoch, digest(optimizer.training_state())
    meet(optimizer, monkeypatch, holders=3)
    assert optimizer.named_state(NAMES)[1]["epoch"] == epoch + 1, "on leaving, what we have"
    tensors, metadata = optimizer.named_state(NAMES, certain=True)
    assert metadata["epoch"] == epoch
    meet(optimizer, monkeypatch, holders=1)
    assert digest(tensors.values()) == held, "a copy"
    assert optimizer.named_state(NAMES, certain=True)[1]["epoch"] == epoch
    meet(optimizer, monkeypatch, holders=2)
    assert optimizer.named_state(NAMES, certain=True)[1]["epoch"] == epoch + 2
    monkeypatch.setattr(optimizer.tracker.global_progress, "num_peers", 1)
    assert optimizer.named_state(NAMES, certain=True)[1]["epoch"] == epoch + 3, "the swarm is we"
    optimizer.load_named_state(NAMES, tensors, metadata)
    assert digest(optimizer.training_state()) == held and optimizer.local_epoch == epoch


def test_who_was_never_with_anybody_keeps_nothing(optimizer, monkeypatch):
    """Half a gigabyte, for the original's model."""
    monkeypatch.setattr(optimizer.uncertain_steps, "has_met", False)
    train(optimizer, 2)
    assert optimizer.state_averager.last_shared() is None


@pytest.mark.parametrize("met, received, is_apart", [(5, 1.0, False), (4, 1.0, True), (2, 1.0, True), (7, 0.9, True)])
def test_a_step_is_the_swarms_with_more_than_half_of_those_here(optimizer, monkeypatch, met, received, is_apart):
    """Of eight. Two halves that each went on would never meet again; and one dead peer made all compare their states,
    epoch after epoch."""
    optimizer._times_back = optimizer._times_postponed = 1
    meet(optimizer, monkeypatch, holders=met, received=received, met=met, num_peers=8)
    assert optimizer._stepped_apart is is_apart
    assert optimizer._times_back == optimizer._times_postponed == int(is_apart)
