"""Rounds that nobody came to are tried again; rounds that were missed, made up for; lone steps, taken back."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID

from tests.lone_optimizer import BROKEN_OFF, GIVEN_UP, make_optimizer, train
from volunteer_kit.swarm.agreement import read_told
from volunteer_kit.swarm.making_up import AGAIN_AND_AGAIN
from volunteer_kit.swarm.missed_rounds import UNDER_WAY
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.state import digest

A, B, *LATER = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 7))
NAMES = ["weight", "bias"]


@pytest.fixture(scope="module")
def one(peer):
    optimizer = make_optimizer(peer, "making_up")
    yield optimizer
    optimizer.shutdown()


@pytest.fixture
def optimizer(one):
    """After a step, with nothing of the last test."""
    train(one, 1)
    one._start_epoch_anew()
    one._follow, one._untaken, one._stepped_apart, one._round_under_way = None, None, False, None
    one._times_back = one._times_postponed = 0
    one.state_averager.stand_by_lone_steps()
    one.uncertain_steps.shared()
    one.uncertain_steps.kept_until()
    one.reports.clear()
    yield one
    one._follow, one._untaken, one._stepped_apart, one._round_under_way = None, None, False, None


@pytest.fixture
def has_round(optimizer, monkeypatch):
    """What the others answer, one after another, who are asked for a round; in the end nobody has one."""
    answers: list = []
    monkeypatch.setattr(optimizer.grad_averager, "make_up_for", lambda *_: answers.pop(0) if answers else None)
    return answers


def nobody_comes(optimizer, monkeypatch, swarm_epoch: int | None = None, control=GIVEN_UP, lone: bool = False) -> None:
    """:param lone: once more than we wait for anybody"""

    def nobody(control):
        raise TimeoutError

    monkeypatch.setattr(optimizer, "_await_round", nobody)
    if lone:
        monkeypatch.setattr(optimizer, "_times_postponed", AGAIN_AND_AGAIN)
    come_to(optimizer, monkeypatch, swarm_epoch, control)


def come_to(optimizer, monkeypatch, swarm_epoch: int | None = None, control=GIVEN_UP, num_peers: int = 3) -> None:
    """The end of an epoch."""
    monkeypatch.setattr(optimizer, "_look_at", 0.0)
    monkeypatch.setattr(optimizer.tracker.global_progress, "num_peers", num_peers)
    epoch = optimizer.local_epoch
    optimizer._report = {
        "epoch": epoch + 1,
        "samples": 16,
        "weight": 16.0,
        "names": ("missed",),
        "started": 0.0,
        "triggered": 0.0,
        "averaged": True,
        "num_peers": num_peers,
        "swarm_epoch": epoch if swarm_epoch is None else swarm_epoch,
        "told": optimizer.state_averager.told,
    }
    optimizer._average_gradients_and_load_into_optimizer(control)
    optimizer.state_averager.step(increment_epoch=True, optimizer_step=True)


# --- tried again ---


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
    monkeypatch.setattr(optimizer, "_look_at", 0.0)
    optimizer._look_after_round_under_way()
    assert optimizer._round_under_way is not None and optimizer.local_epoch == epoch
    has_round += [b"round"]
    monkeypatch.setattr(optimizer, "_look_at", 0.0)
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


# --- taken back ---


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


def meet(optimizer, monkeypatch, holders: int, received: float = 1.0, met: int = 3, num_peers: int = 3) -> None:
    """A round with others, of whom so many hold what we hold, ourselves among them."""
    own_id, told = optimizer.dht.peer_id, optimizer.state_averager.told
    other = [told[0], told[1], b"another."]
    group = (own_id, A, B, *LATER)[:met]
    gathered = {peer: told if place < holders else other for place, peer in enumerate(group)}
    outcome = Round(group=group, received=received, gathered=gathered, round_id=b"round %d" % told[0])
    monkeypatch.setattr(optimizer, "_await_round", lambda control: outcome)
    come_to(optimizer, monkeypatch, num_peers=num_peers)


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
    assert optimizer.state_averager.before_lone_steps() is None


@pytest.mark.parametrize("met, received, is_apart", [(5, 1.0, False), (4, 1.0, True), (2, 1.0, True), (7, 0.9, True)])
def test_a_step_is_the_swarms_with_more_than_half_of_those_here(optimizer, monkeypatch, met, received, is_apart):
    """Of eight. Two halves that each went on would never meet again; and one dead peer made all compare their states,
    epoch after epoch."""
    optimizer._times_back = optimizer._times_postponed = 1
    meet(optimizer, monkeypatch, holders=met, received=received, met=met, num_peers=8)
    assert optimizer._stepped_apart is is_apart
    assert optimizer._times_back == optimizer._times_postponed == int(is_apart)
