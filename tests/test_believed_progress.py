"""How much of others' claims counts towards the end of an epoch, and how far ahead one account alone can be."""

from __future__ import annotations

import time

import pytest
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tests.somebody import Somebody, entry
from volunteer_kit.swarm.believed_progress import Claim, Claims, Worth, believed_samples
from volunteer_kit.swarm.plausible import PACE, Limits, epochs_ahead
from volunteer_kit.swarm.progress import SwarmProgressTracker

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))


def worth_of(*epochs: tuple[float, float]) -> Worth:
    worth = Worth()
    for claimed, delivered in epochs:
        worth = worth.after(claimed, delivered)
    return worth


HONEST, MISSED, LIE = (80.0, 80.0), (80.0, 0.0), (256.0, 8.0)


@pytest.mark.parametrize(
    "epochs, low, high, why",
    [
        ([], 1.0, 1.0, "a newcomer"),
        ([HONEST] * 5, 1.0, 1.0, "who keeps its word"),
        ([(80.0, 96.0)] * 5, 1.0, 1.0, "a microbatch more than it had told"),
        ([(80.0, 41.0)] * 5, 1.0, 1.0, "no more than twice"),
        ([(80.0, 39.0)] * 5, 0.48, 0.49, "more than twice: at most that share"),
        ([LIE], 8 / 256, 8 / 256, "at once, by its first round"),
        ([HONEST] * 50 + [LIE], 8 / 256, 8 / 256, "whatever it was before"),
        ([LIE, HONEST, HONEST], 0.0, 0.5, "two honest epochs do not make up for it"),
        ([LIE] + [HONEST] * 12, 1.0, 1.0, "but it is forgiven"),
        ([(8.0, 256.0)] * 9 + [LIE], 0.0, 0.2, "who delivered more than it claimed has earned nothing by it"),
        ([HONEST] * 5 + [MISSED], 1.0, 1.0, "one round missed"),
        ([MISSED, HONEST], 1.0, 1.0, "its first round missed"),
        ([HONEST] * 5 + [MISSED] * 8, 0.0, 0.45, "many"),
        ([MISSED] * 3, 0.0, 0.0, "who never comes"),
    ],
)
def test_what_a_claim_is_worth(epochs, low, high, why):
    assert low <= worth_of(*epochs).share <= high, why


@pytest.mark.parametrize(
    "claimed, share, limit, believed",
    [(100, 1.0, None, 100), (100, 0.1, None, 10), (100, 1.0, 30.0, 30), (100, 0.1, 30.0, 10), (0, 1.0, 30.0, 0)],
)
def test_believed_samples(claimed, share, limit, believed):
    assert believed_samples(claimed, share, limit) == believed


@pytest.mark.parametrize(
    "seconds, durations, ahead, why",
    [
        (0.0, [], 2, "nothing is known yet"),
        (1.0, [], 7, "as many as a run can do"),
        (5.0, [10.0] * 9, 0, "nobody can have ended an epoch in half of its time alone"),
        (PACE * 10.0 + 0.1, [10.0] * 9, 1, "about now"),
        (35.0, [10.0] * 9, 4, "we slept"),
        (5.0, [10.0, 10.0, 1.0, 1.0, 1.0], 6, "the median: epochs have become shorter"),
        (0.1, [0.001] * 9, 0, "no shorter than a run can do"),
    ],
)
def test_how_far_ahead_one_account_can_be(seconds, durations, ahead, why):
    assert epochs_ahead(seconds, durations, 0.2) == ahead, why


# --- a round, and what was claimed of its epoch ---


def claims_of(**said: tuple[int, float, float]) -> Claims:
    claims = Claims()
    for name, words in said.items():
        claims.note({"a": A, "b": B, "c": C, "d": D}[name], *words)
    return claims


def test_a_round_tells_what_claims_were_worth():
    claims = claims_of(a=(5, 80, 88.0), b=(5, 256, 256.0), c=(5, 10, 5000.0), d=(4, 80, 88.0))
    claims.note(B, 5, 3, 3.0)  # its last word is not what counted
    claims.settle(5, [A, B, C, D], {A: 80.0, B: 8.0, C: 8.0}, target=256)
    assert claims.share(A) == 1.0
    assert claims.share(B) == pytest.approx(8 / 256)
    assert claims.share(C) == pytest.approx(8 / 2048), "claimed by speed"
    assert claims.share(D) == 1.0, "it was at another epoch"


def test_the_epoch_after_the_next_is_not_remembered_for_it():
    claims = claims_of(a=(5, 80, 80.0))
    claims.note(A, 6, 10, 10.0), claims.note(A, 5, 90, 95.0), claims.note(A, 6, 5, 5.0)
    assert (claims.of(A, 5), claims.of(A, 6)) == (Claim(90, 95.0), Claim(10, 10.0)), "back once, for a round of nobody"
    claims.note(A, 100, 0, 0.0), claims.note(A, 7, 30, 30.0)
    assert claims.of(A, 7) == Claim(30, 30.0) and claims.of(A, 5) is None, "whatever it says of later ones"


def test_to_be_expected_more_of_is_no_lie():
    """Its round began before ours: it trained no more, and we took it that it did."""
    claims = claims_of(a=(5, 40, 75.0), b=(5, 80, 80.0))
    claims.settle(5, [A, B], {A: 40.0, B: 80.0}, target=256)
    assert claims.share(A) == claims.share(B) == 1.0


def test_who_claimed_and_did_not_come_delivered_nothing():
    """Which happens once to everybody, and is forgiven to who claimed no more than others do."""
    claims = claims_of(a=(5, 80, 80.0), b=(5, 90, 90.0), c=(5, 256, 256.0), d=(5, 8, 5000.0))
    claims.settle(5, [A, C], {A: 80.0}, target=256)
    assert claims.share(A) == claims.share(B) == 1.0
    assert claims.share(C) * 256 < 100 and claims.share(D) * 2048 < 100
    claims.note(A, 6, 80, 80.0), claims.note(B, 6, 80, 80.0)
    claims.settle(6, [A], {A: 80.0}, target=256)
    assert claims.share(A) == 1.0 and claims.share(B) < 0.5, "twice is not"


def test_who_is_apart_from_most_judges_nobody():
    claims = claims_of(a=(5, 80, 80.0), b=(5, 80, 80.0), c=(5, 80, 80.0))
    claims.settle(5, [A], {A: 80.0}, target=256)
    assert claims.share(B) == claims.share(C) == 1.0


def test_who_reduced_nothing_judges_nobody():
    claims = claims_of(a=(5, 80, 80.0))
    claims.settle(5, [A], {}, target=256)
    assert claims.share(A) == 1.0


def test_what_a_sample_weighs_is_what_most_say():
    claims = claims_of(a=(5, 80, 80.0), b=(5, 100, 100.0), c=(5, 256, 256.0), d=(4, 80, 88.0))
    assert claims.weight_of_a_sample(5, {A: 20.0, B: 30.0, C: 8.0, D: 80.0}) == 20 / 80, "the liar's 8 of 256 is less"
    assert claims.weight_of_a_sample(5, {A: 90.0, B: 110.0}) == 1.0, "more than its last word"
    assert claims.weight_of_a_sample(5, {D: 80.0}) == claims.weight_of_a_sample(5, {}) == 1.0


# --- the tracker ---


@pytest.fixture(scope="module")
def people():
    return [Somebody() for _ in range(3)]


@pytest.fixture
def tracker(peer, request):
    tracker = SwarmProgressTracker(
        peer.dht, f"p_{abs(hash(request.node.name))}", 256, limits=Limits(256, 10_000.0), start=False
    )
    for epoch in (2, 3):
        tracker.report_local_progress(local_epoch=epoch, samples_accumulated=20)
        tracker._note_own_epoch()
    return tracker


def read(tracker, *claims):
    return tracker._parse_swarm_progress_data({somebody.subkey: entry(words) for somebody, words in claims})


def test_a_claim_counts_as_far_as_its_device_allows(tracker, people):
    honest, liar = people[:2]
    claims = (honest, honest.claims(samples_accumulated=50)), (liar, liar.claims(samples_accumulated=256))
    assert read(tracker, *claims).samples_accumulated >= 256
    tracker.speed_limit = lambda peer, seconds: {liar.peer_id: 16.0}.get(peer)
    assert 50 <= read(tracker, *claims).samples_accumulated < 100


def test_one_that_is_believed_less_than_it_says_has_no_turn(tracker, people):
    honest, liar = people[:2]
    claims = (honest, honest.claims(samples_accumulated=50)), (liar, liar.claims(samples_accumulated=256))

    def at_work() -> list[int]:
        read(tracker, *claims)
        return sorted(other.samples for other in tracker.others_at_work(3)[1])

    assert at_work() == [50, 256]
    tracker.speed_limit = lambda peer, seconds: {liar.peer_id: 16.0}.get(peer)
    assert at_work() == [50]
    tracker.speed_limit = lambda peer, seconds: None
    tracker.settle_round(3, [honest.peer_id, liar.peer_id], {honest.peer_id: 50.0, liar.peer_id: 8.0})
    assert at_work() == [50]


def test_nor_is_a_speed_believed_that_its_device_does_not_have(tracker, people):
    liar = people[0]
    claim = liar.claims(samples_accumulated=1, samples_per_second=9000.0)
    now = time.time()
    assert read(tracker, (liar, claim)).eta_next_epoch - now < 1.0
    tracker.speed_limit = lambda peer, seconds: 16.0
    assert read(tracker, (liar, claim)).eta_next_epoch - now > 5.0


def test_while_it_is_not_known_when_the_epoch_began_nobody_is_cut(peer, people):
    newcomer = SwarmProgressTracker(peer.dht, "newcomer", 256, limits=Limits(256), start=False)
    newcomer.report_local_progress(local_epoch=3, samples_accumulated=20)
    newcomer.speed_limit = lambda peer, seconds: 16.0
    assert read(newcomer, (people[0], people[0].claims(samples_accumulated=200))).samples_accumulated >= 200


def test_whose_claims_were_worth_little_counts_for_little(tracker, people):
    honest, liar = people[:2]
    claims = (honest, honest.claims(samples_accumulated=50)), (liar, liar.claims(samples_accumulated=256))
    read(tracker, *claims)
    tracker.settle_round(3, [honest.peer_id, liar.peer_id], {honest.peer_id: 50.0, liar.peer_id: 8.0})
    assert 50 <= read(tracker, *claims).samples_accumulated < 90


def test_who_has_more_than_can_be_believed_ends_its_epoch_all_the_same(tracker, people, monkeypatch):
    """It waited for a round of others; its own record would be dropped, and it would wait for ever."""
    ours = Somebody()
    monkeypatch.setattr(tracker.dht, "_peer_id", ours.peer_id, raising=False)
    tracker.report_local_progress(local_epoch=3, samples_accumulated=5 * 256)
    attends = people[0], people[0].claims(samples_accumulated=0)
    tracker.global_progress = read(tracker, attends, (ours, tracker._said().dict()))
    assert tracker.claims_dropped == 0 and tracker.global_progress.num_peers == 2
    assert tracker.global_progress.samples_accumulated == 4 * 256 and tracker.ready_to_update_epoch


def test_who_goes_back_forgets_what_was_known_of_the_epoch_it_gave_up(tracker, people, monkeypatch):
    """It would end the new one at once, with a microbatch, and step alone again."""
    ours = Somebody()
    monkeypatch.setattr(tracker.dht, "_peer_id", ours.peer_id, raising=False)
    assert tracker.dht.peer_id == ours.peer_id
    tracker.report_local_progress(local_epoch=4, samples_accumulated=200)
    other = people[0], people[0].claims(samples_accumulated=50)
    stale = ours, ours.claims(epoch=4, samples_accumulated=200)
    tracker.global_progress = read(tracker, other, stale)
    assert tracker.global_epoch == 4
    tracker.go_back(3)
    tracker.report_local_progress(local_epoch=3, samples_accumulated=0)
    assert tracker.global_epoch == 3 and not tracker.ready_to_update_epoch
    assert tracker.global_progress.next_fetch_time <= get_dht_time() and tracker.global_state_updated.is_set()
    tracker.global_progress = read(tracker, other, stale)
    assert tracker.global_epoch == 3 and not tracker.ready_to_update_epoch, "our own record of it lies there still"


def test_a_few_accounts_that_are_ahead_are_counted_and_not_followed_yet(tracker, people):
    """Everybody would end the epoch at once, with what a moment has brought."""
    honest, second, liar, fourth = *people, Somebody()
    tracker._durations.extend([60.0] * 5)
    ahead = liar, liar.claims(epoch=4, samples_accumulated=256)
    progress = read(tracker, ahead, (honest, honest.claims(samples_accumulated=50)))
    assert progress.epoch == 3 and progress.num_peers == 3 and progress.samples_accumulated < 100
    progress = read(
        tracker, ahead, (second, second.claims(epoch=4)), (honest, honest.claims()), (fourth, fourth.claims())
    )
    assert progress.epoch == 3, "two of four say so"
    progress = read(tracker, ahead, (second, second.claims(epoch=4)), (honest, honest.claims()))
    assert progress.epoch == 4, "two of three"
    tracker._in_common = (3, time.monotonic() - PACE * 60.0 - 1)
    assert read(tracker, ahead, (honest, honest.claims())).epoch == 4, "it is about time"


def test_who_has_ended_the_epoch_a_moment_before_us_counts_on(tracker, people):
    """Who looks in this moment would find their samples gone, and compute them itself while they wait for it. Nobody
    can be followed here: they are in client mode."""
    early = [(one, one.claims(samples_accumulated=70, samples_per_second=1.0, client_mode=True)) for one in people]
    assert 200 < read(tracker, *early).samples_accumulated < 256
    gone_on = [(one, one.claims(epoch=4, samples_accumulated=5, client_mode=True)) for one in people]
    progress = read(tracker, *gone_on)
    assert (progress.epoch, progress.num_peers) == (3, 4)
    assert 215 < progress.samples_accumulated < 256, "and with what they compute on, as if they had not told it yet"
    liar = Somebody()
    at_once = liar, liar.claims(epoch=4, samples_accumulated=256, client_mode=True)
    assert read(tracker, *gone_on, at_once).samples_accumulated == progress.samples_accumulated
    tracker.settle_round(3, [one.peer_id for one in people], {people[0].peer_id: 70.0, people[1].peer_id: 7.0})
    assert tracker.claims.share(people[0].peer_id) == 1.0
    assert tracker.claims.share(people[1].peer_id) < 0.15, "its round ends when it is at the next epoch long since"


def test_who_steps_alone_sees_those_who_are_far_ahead_still(tracker, people, monkeypatch):
    """It took the next step by itself, and from then on nobody could have come so far: it stayed alone."""
    others = [*people, Somebody()]
    claims = [(somebody, somebody.claims(epoch=33)) for somebody in others]
    tracker._durations.extend([0.4] * 5)
    tracker.settle_round(2, [somebody.peer_id for somebody in others], {})
    clock = time.monotonic() + 12.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    tracker.global_progress = read(tracker, *claims)
    assert tracker.global_progress.num_peers == 5
    for epoch in (4, 5):
        tracker.report_local_progress(local_epoch=epoch, samples_accumulated=20)
        tracker.global_progress = read(tracker, *claims)
        assert (tracker.global_progress.num_peers, tracker.num_ahead) == (5, 4)
    tracker.settle_round(4, [others[0].peer_id], {})
    assert read(tracker, *claims[:1]).num_peers == 2, "two of five may be apart from the swarm"
    tracker.settle_round(4, [somebody.peer_id for somebody in others], {})
    assert read(tracker, *claims).num_peers == 5, "what most accounts say is believed"
    assert read(tracker, claims[0], *((one, one.claims(epoch=5)) for one in others[1:])).num_peers == 4


def test_who_has_just_come_is_taken_to_be_as_fast_as_the_others(tracker, people):
    """Whatever it says, and at whatever epoch: its speed alone would end the epoch."""
    honest, second, liar = people
    claims = [(one, one.claims(samples_accumulated=50, samples_per_second=5.0)) for one in (honest, second)]
    read(tracker, *claims)
    tracker.settle_round(3, [honest.peer_id, second.peer_id], {honest.peer_id: 50.0, second.peer_id: 50.0})
    claims.append((liar, liar.claims(epoch=2, samples_per_second=9000.0)))
    assert read(tracker, *claims).eta_next_epoch - time.time() > 5.0


def test_who_was_caught_is_taken_to_be_as_fast_as_the_others_and_counts_by_its_share(tracker, people):
    """Between two reports hivemind adds what somebody does by its speed; a claimed one costs nothing either."""
    honest, second, liar = people
    weights = {honest.peer_id: 50.0, second.peer_id: 50.0, liar.peer_id: 64.0}

    def seconds_to_go(age: float) -> float:
        at = {"time": get_dht_time() - age}
        claims = [(one, one.claims(samples_accumulated=50, samples_per_second=5.0, **at)) for one in (honest, second)]
        claims.append((liar, liar.claims(samples_accumulated=256, samples_per_second=9000.0, **at)))
        return read(tracker, *claims).eta_next_epoch - get_dht_time()

    seconds_to_go(age=0.0)
    tracker.settle_round(3, [one.peer_id for one in people], weights)
    assert seconds_to_go(age=1.0) > 2.0
