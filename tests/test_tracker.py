"""What a peer believes of the others' progress: honest peers counted, liars not followed, no step climbed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.utils import get_dht_time

from tests.somebody import LIFETIME, NOW, Somebody, entry
from volunteer_kit.swarm.children import BROKEN
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.identity import peer_id_of_owner
from volunteer_kit.swarm.options import SwarmOptions
from volunteer_kit.swarm.peer import Peer
from volunteer_kit.swarm.plausible import Limits, believed_epoch, is_plausible
from volunteer_kit.swarm.progress import SwarmProgressTracker


@pytest.fixture(scope="module")
def people():
    return [Somebody() for _ in range(5)]


LIMITS = Limits(target_batch_size=256, max_samples_per_second=1000.0)


def claim(**changes) -> LocalTrainingProgress:
    values = dict(peer_id=b"x", epoch=3, samples_accumulated=10, samples_per_second=5.0, time=NOW, client_mode=False)
    return LocalTrainingProgress.construct(**{**values, **changes})


@pytest.mark.parametrize(
    "changes, plausible",
    [
        ({}, True),
        ({"samples_per_second": 0.0}, True),
        ({"samples_per_second": 1000.0}, True),
        ({"samples_per_second": 1000.1}, False),
        ({"samples_per_second": float("inf")}, False),
        ({"samples_per_second": float("nan")}, False),
        ({"samples_accumulated": 1024}, True),
        ({"samples_accumulated": 1025}, False),
        ({"samples_accumulated": 10**12}, False),
        ({"time": NOW + 4.9}, True),
        ({"time": NOW + 5.1}, False),
        ({"time": NOW + 1e9}, False),
        ({"time": NOW - 119}, True),
        ({"time": NOW - 121}, False),
        ({"time": float("nan")}, False),
        ({"time": float("inf")}, False),
        ({"epoch": 2**31 - 1}, True),
        ({"epoch": 2**31}, False),
    ],
)
def test_is_plausible(changes, plausible):
    assert is_plausible(claim(**changes), LIMITS, NOW, LIFETIME) is plausible


@pytest.mark.parametrize(
    "epochs, own, advance, believed, why",
    [
        ([], 7, 2, 7, "nobody else"),
        ([7, 7, 6], 7, 2, 7, "all are here"),
        ([8, 7, 7], 7, 2, 8, "one is ahead, as time allows"),
        ([9], 7, 2, 9, "the only other, as time allows"),
        ([10], 7, 2, 7, "the only other, faster than time allows"),
        ([10**6, 7, 7], 7, 2, 7, "one liar"),
        ([10**6, 9, 7], 7, 2, 9, "one liar does not hide an honest one"),
        ([10**6, 500, 7, 8], 7, 2, 8, "two liars who do not agree"),
        ([10**9] * 2 + [7] * 13, 7, 2, 7, "two liars who do, among fourteen"),
        ([10**9] * 7 + [7] * 8, 7, 2, 7, "seven of sixteen"),
        ([8] * 2 + [7] * 13, 7, 0, 7, "two who want the epoch to end as soon as it has begun"),
        ([8] * 8 + [7] * 7, 7, 0, 8, "most have begun the next one"),
        ([500, 500], 7, 2, 500, "two confirm each other: we were asleep"),
        ([501] * 5 + [500] * 4 + [7], 7, 2, 500, "we were asleep, and the others are about to step"),
        ([500, 500, 7, 7], 7, 2, 7, "half is not most"),
        ([500, 499, 7], 7, 2, 499, "what most have reached"),
        ([501, 499], 7, 2, 499, "both have reached it"),
        ([10**6, 500, 499], 7, 2, 500, "the highest that is confirmed"),
        ([300], 0, 2, 300, "a newcomer has only one witness"),
        ([10**6, 300, 300], 0, 2, 300, "a newcomer among several believes the confirmed one"),
        ([10**9] * 2 + [300] * 7, 0, 2, 300, "a newcomer believes most, not the highest"),
        ([10**6, 300], 0, 2, 300, "a newcomer and two who disagree: so far are both"),
        ([3, 2], 7, 2, 7, "we are ahead"),
        ([500], 7, 493, 500, "we slept long enough for it"),
    ],
)
def test_believed_epoch(epochs, own, advance, believed, why):
    claims = [(epoch, f"account {number}") for number, epoch in enumerate(epochs)]
    assert believed_epoch(claims, own, advance) == believed, why
    assert believed_epoch(list(reversed(claims)), own, advance) == believed, "the order of claims does not matter"
    assert believed_epoch(iter(claims), own, advance) == believed


def test_two_machines_of_one_account_do_not_confirm_each_other():
    assert believed_epoch([(10**8, "mallory"), (10**8, "mallory"), (7, "ada")], 7, 2) == 7
    assert believed_epoch([(500, "ada"), (500, "bob"), (7, "cleo")], 7, 2) == 500


def test_peers_that_nobody_can_follow_confirm_what_others_claim_and_claim_nothing():
    clients = [(500, "ada"), (500, "bob")]
    assert believed_epoch([], 7, 2, clients) == believed_epoch([(7, "cleo")], 7, 2, clients) == 7
    assert believed_epoch([(500, "cleo")], 7, 2, clients) == 500
    assert believed_epoch([(10**9, "mallory"), (10**9, "trudy")], 7, 2, [(7, "ada"), (7, "bob")]) == 7
    clients = [(500, "ada"), (499, "bob"), (499, "dora")]
    assert believed_epoch([(501, "cleo")], 7, 2, clients) == 499, "most are there, and one of them can be followed"
    assert believed_epoch([(7, "cleo")], 7, 2, clients) == 7
    assert believed_epoch([(10**9, "mallory"), (7, "cleo")], 7, 2, [(9, "ada"), (7, "bob")]) == 7, "a client makes none"


@pytest.fixture
def tracker(peer, request):
    tracker = SwarmProgressTracker(
        peer.dht, f"t_{abs(hash(request.node.name))}", 256, limits=Limits(256, 1000.0), start=False
    )
    tracker.report_local_progress(local_epoch=3, samples_accumulated=20)
    tracker._own_epoch = (3, time.monotonic())
    return tracker


@pytest.mark.parametrize(
    "we, others, uncallable",
    [(True, [True, True], 2), (True, [True, False], 0), (False, [True, True], 0), (True, [], 0)],
)
def test_a_run_in_which_nobody_can_be_called_is_noticed(tracker, people, we, others, uncallable):
    """However far apart they are: peers that never meet step alone, and their epochs are soon no longer believed."""
    tracker.client_mode = we
    tracker._parse_swarm_progress_data(
        {
            one.subkey: entry(one.claims(epoch=3 + 50 * number, client_mode=is_client))
            for number, (one, is_client) in enumerate(zip(people, others, strict=False))
        }
    )
    assert tracker.num_uncallable == uncallable


def test_the_tracker_counts_honest_peers_and_drops_lies(peer, tracker, people):
    honest, second, liar, thief, fast = people
    lies = {
        liar.subkey: entry(liar.claims(epoch=10**6)),
        thief.subkey: entry(thief.claims(honest.peer_id, samples_accumulated=200)),
        fast.subkey: entry(fast.claims(samples_per_second=1e300)),
        b"garbage": entry({"epoch": 1}),
    }
    claims = {
        honest.subkey: entry(honest.claims(samples_accumulated=100)),
        second.subkey: entry(second.claims(epoch=2, client_mode=True)),
        **lies,
    }
    progress = tracker._parse_swarm_progress_data(claims)
    assert progress.epoch == 3, "a lie must not become the swarm's epoch"
    assert tracker.highest_claim == 10**6, "but a newcomer waits a while, for it might be the only one who is right"
    assert progress.num_peers == 3 and progress.num_clients == 1, "ourselves, though our own record is not stored yet"
    # ours, once; the honest one's, and what it did since it wrote them; nothing of the thief's
    assert 100 <= progress.samples_accumulated <= 140
    assert tracker.claims_dropped == len(lies)
    assert progress.eta_next_epoch - get_dht_time() < 1000.0


def test_two_liars_among_many_do_not_confirm_each_other(tracker, people):
    """Everybody would be behind for ever."""
    claims = {one.subkey: entry(one.claims()) for one in people[:3]}
    claims |= {one.subkey: entry(one.claims(epoch=10**9)) for one in people[3:]}
    assert tracker._parse_swarm_progress_data(claims).epoch == 3
    claims |= {one.subkey: entry(one.claims(epoch=500)) for one in people[:3]}
    assert tracker._parse_swarm_progress_data(claims).epoch == 500, "and who has slept finds back"


def test_a_lone_liar_does_not_climb(tracker, people):
    """Each of its claims is one step beyond what was believed before; only time may raise what is believed."""
    liar = people[2]
    began, believed = time.monotonic(), 3
    for _ in range(200):
        believed = tracker._parse_swarm_progress_data({liar.subkey: entry(liar.claims(epoch=believed + 1))}).epoch
    assert believed <= 3 + 2 + (time.monotonic() - began) / tracker.limits.min_epoch_seconds


def test_what_a_client_says_does_not_move_the_swarms_epoch(tracker, people):
    """It cannot reduce or share state, so nobody could follow it."""
    honest, second = people[:2]
    claims = {honest.subkey: entry(honest.claims()), second.subkey: entry(second.claims(epoch=4, client_mode=True))}
    assert tracker._parse_swarm_progress_data(claims).epoch == 3
    claims = {second.subkey: entry(second.claims(epoch=5, client_mode=True))}
    assert tracker._parse_swarm_progress_data(claims).epoch == 3
    claims = {honest.subkey: entry(honest.claims(epoch=900))}
    assert tracker._parse_swarm_progress_data(claims).epoch == 3, "no step on the way to a larger lie, either"
    assert tracker._parse_swarm_progress_data({honest.subkey: entry(honest.claims(epoch=4))}).epoch == 4


@pytest.mark.parametrize(
    "samples, ends_pass, num_peers, is_ready",
    [
        (256, False, 1, True),
        (255, False, 1, False),
        (7, True, 1, True),
        (0, True, 1, False),
        (7, True, 2, False),
    ],
)
def test_a_peer_that_is_alone_goes_by_its_own_count(tracker, samples, ends_pass, num_peers, is_ready):
    """On a busy machine a look at the swarm began before its last samples, and ends after them."""
    tracker.report_local_progress(3, samples)
    progress = tracker.global_progress
    progress.samples_accumulated, progress.eta_next_epoch, progress.num_peers = 0, float("inf"), num_peers
    progress.epoch, tracker.ends_pass = 3, ends_pass
    assert tracker.ready_to_update_epoch is is_ready


@pytest.mark.parametrize(
    "epoch, silent, behind, late, why",
    [
        (3, 50.0, 0, 0, "at a long microbatch of ours"),
        (2, 50.0, 1, 0, "its round may be the next"),
        (1, 1.0, 1, 0, "where epochs are short its word is older than they are"),
        (1, 50.0, 1, 1, "killed, or it has a state to take first"),
    ],
)
def test_who_is_gone_is_not_awaited_as_long_as_its_record_lasts(tracker, people, epoch, silent, behind, late, why):
    claims = people[0].claims(epoch=epoch, time=get_dht_time() - silent)
    progress = tracker._parse_swarm_progress_data({people[0].subkey: entry(claims)})
    assert (progress.num_peers, len(tracker.behind), tracker.num_late) == (2, behind, late), why


@pytest.mark.parametrize("matchmaking_time", [0.6, 2.0, 15.0, 60.0])
def test_whatever_the_others_claim_we_look_again_in_time_for_their_round(peer, people, matchmaking_time):
    """They wait for us for a matchmaking_time from when they have enough samples, which may be sooner than it seems."""
    options = SwarmOptions("quick", 10_000, matchmaking_time=matchmaking_time, refresh_period=0.1).of_hivemind()
    tracker = SwarmProgressTracker(
        peer.dht, f"quick_{matchmaking_time}", 10_000, limits=Limits(10_000), start=False, **options["tracker_opts"]
    )
    progress = tracker._parse_swarm_progress_data({people[0].subkey: entry(people[0].claims(epoch=0))})
    now = get_dht_time()
    assert progress.eta_next_epoch - now > 1000 and progress.next_fetch_time - now <= matchmaking_time / 2


def test_others_are_told_of_when_they_are_there(tracker, people):
    told = []
    tracker.on_others = lambda: told.append(True)
    tracker._parse_swarm_progress_data({})
    assert not told
    tracker._parse_swarm_progress_data({people[0].subkey: entry(people[0].claims())})
    assert told


def test_a_peer_that_has_left_is_no_lie(tracker, people):
    progress = tracker._parse_swarm_progress_data({people[0].subkey: entry(None)})
    assert progress.num_peers == 1 and tracker.claims_dropped == 0
    for nothing in (None, "words", []):
        assert tracker._parse_swarm_progress_data(nothing).epoch == 3


@contextlib.contextmanager
def running_tracker(peer: Peer, prefix: str, **options: float) -> Iterator[SwarmProgressTracker]:
    options = {"min_refresh_period": 0.1, "default_refresh_period": 0.2, **options}
    tracker = SwarmProgressTracker(peer.dht, prefix, 256, limits=Limits(256), start=True, **options)
    try:
        yield tracker
    finally:
        tracker.shutdown(timeout=60)


def stored_progress(peer: Peer, prefix: str) -> tuple[bytes, LocalTrainingProgress]:
    deadline = time.monotonic() + 60
    while (found := peer.dht.get(f"{prefix}_progress", latest=True)) is None:
        assert time.monotonic() < deadline
    [(subkey, value)] = found.value.items()
    return subkey, LocalTrainingProgress.parse_obj(value.value)


def wait_until_told(peer: Peer, prefix: str, samples: int) -> LocalTrainingProgress:
    deadline = time.monotonic() + 60
    while (claim := stored_progress(peer, prefix)[1]).samples_accumulated != samples:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return claim


def test_a_thread_of_the_tracker_reports_itself_and_reads_it_back(peer):
    with running_tracker(peer, "thread") as tracker:
        tracker.report_local_progress(local_epoch=0, samples_accumulated=20)
        subkey, claim = stored_progress(peer, "thread")
        assert claim.samples_accumulated == 20
        assert peer_id_of_owner(subkey) == peer.peer_id, "records are signed with the libp2p identity"
        tracker.look_again(timeout=60)
        assert tracker.global_progress.num_peers == 1 and tracker.claims_dropped == 0


def test_the_last_microbatch_of_a_step_is_told_though_it_came_soon_after_the_word_before(peer):
    """Nothing follows it that would be told in its place; and where one batch is a step, the others wait for it."""
    with running_tracker(peer, "last", report_period=2.0, metadata_expiration=600.0) as tracker:
        tracker.report_local_progress(local_epoch=0, samples_accumulated=4)
        assert stored_progress(peer, "last")[1].samples_accumulated == 4
        tracker.report_local_progress(local_epoch=0, samples_accumulated=8)
        wait_until_told(peer, "last", samples=8)


def test_a_microbatch_that_ends_while_the_one_before_is_told_is_told_too(peer, monkeypatch):
    """Training goes on while a record is made. The word about the later microbatch was lost with that of the first, and
    the others waited seconds for samples that were there."""
    with running_tracker(peer, "race", metadata_expiration=600.0) as tracker:

        def time_while_training_goes_on() -> float:  # the reporter asks for it when it has read our progress
            if tracker.local_progress.samples_accumulated == 4:
                tracker.report_local_progress(local_epoch=0, samples_accumulated=8)
            return get_dht_time()

        tracker.look_again(timeout=60)  # both of its threads wait by now
        monkeypatch.setattr("volunteer_kit.swarm.progress.get_dht_time", time_while_training_goes_on)
        tracker.report_local_progress(local_epoch=0, samples_accumulated=4)
        wait_until_told(peer, "race", samples=8)


def test_a_tracker_that_failed_keeps_nobody_waiting(peer, monkeypatch):
    """Its process was killed while it looked at the others' progress. The lock that it held was nobody's any more, and
    a Trainer waited for it for ever."""
    asked = threading.Event()

    def ask_in_vain(*_, **__) -> asyncio.Future:
        asked.set()
        return asyncio.get_running_loop().create_future()

    def find_it_dead(*_, **__) -> None:
        raise SwarmError("The DHT's process was killed.", kind=BROKEN)

    with running_tracker(peer, "failing") as tracker, monkeypatch.context() as patch:
        patch.setattr(peer.dht, "get", ask_in_vain)
        assert asked.wait(60)
        patch.setattr(peer.dht, "store", find_it_dead)
        tracker.attend(epoch=0)
        tracker.join(60)
        assert not tracker.is_alive()
        for _ in range(2):
            with pytest.raises(SwarmError, match="was killed"), tracker.pause_updates():
                pass


def test_a_peer_that_has_gone_into_the_round_says_so_until_it_computes_again(peer, people):
    """It may find the step complete by how fast others are; they would wait for a batch of it that does not come."""
    reader = SwarmProgressTracker(peer.dht, "round", 256, limits=Limits(256), start=False)
    reader.report_local_progress(local_epoch=3, samples_accumulated=8)

    def is_in_round(speed: float) -> bool:
        read = people[0].claims(samples_accumulated=8, samples_per_second=speed)
        progress = reader._parse_swarm_progress_data({people[0].subkey: entry(read)})
        assert progress.num_peers == 2 and progress.samples_accumulated == 8
        [other] = reader.others_at_work(3)[1]
        assert not other.waits and other.samples == 8 and other.speed == 5.0, "its device is as fast as it was"
        return other.is_in_round

    assert not is_in_round(5.0)
    with running_tracker(peer, "round", report_period=600.0) as tracker:
        tracker.report_local_progress(local_epoch=3, samples_accumulated=8)
        tracker.go_into_round(3)
        deadline = time.monotonic() + 60
        while (speed := stored_progress(peer, "round")[1].samples_per_second) > 1e-6:  # the word before it, as yet
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert is_in_round(speed)
        tracker.report_local_progress(local_epoch=3, samples_accumulated=12)
        tracker.tell_now()
        assert wait_until_told(peer, "round", samples=12).samples_per_second > 1e-6, "it computes again"


def test_a_microbatch_of_minutes_is_no_lie(peer):
    """What was reported long ago is told again with the time at which it still holds."""
    with running_tracker(peer, "slow", metadata_expiration=1.0) as tracker:
        tracker.report_local_progress(local_epoch=0, samples_accumulated=20)
        _, first = stored_progress(peer, "slow")

        def is_told_again() -> bool:
            again = stored_progress(peer, "slow")[1]
            assert again.samples_accumulated == 20
            holds = is_plausible(again, tracker.limits, get_dht_time(), tracker.metadata_expiration)
            return holds and again.time >= first.time + 2.5

        deadline = time.monotonic() + 60
        while not is_told_again():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_who_only_attends_is_seen_at_once(peer):
    """Others would meet it in a round, take themselves for alone, and call the round off."""
    with running_tracker(peer, "attends") as tracker:
        tracker.look_again(timeout=60)
        assert peer.dht.get("attends_progress", latest=True) is None, "a newcomer without samples is not waited for"
        tracker.attend(epoch=0)
        _, claim = stored_progress(peer, "attends")
        assert claim.samples_accumulated == 0 and claim.epoch == 0


@pytest.mark.parametrize(
    "epoch, said, looked", [(0.5, 0.25, 0.5), (10.0, 0.5, 0.5), (30.0, 1.5, 1.0), (150.0, 2.0, 2.0)]
)
def test_where_epochs_are_long_less_is_said_and_looked_at(peer, epoch, said, looked):
    """At 10 Mbit/s records and looks every half second were a tenth of the line; they are over epochs of minutes."""
    tracker = SwarmProgressTracker(peer.dht, "slow", 256, limits=Limits(256), start=False, min_refresh_period=0.5)
    tracker._keep_pace(epoch)
    assert (tracker.should_report_progress.period, tracker.min_refresh_period) == (said, looked)


def test_whose_epochs_are_shorter_than_its_reports_is_seen_all_the_same(peer):
    """Whenever its record is told, its epoch has just begun and has no samples."""
    limits = Limits(256)
    tracker = SwarmProgressTracker(peer.dht, "fast", 256, limits=limits, start=False, default_refresh_period=0.2)
    for epoch in range(3):
        tracker.report_local_progress(epoch, samples_accumulated=256)
    tracker.report_local_progress(3, samples_accumulated=0)
    tracker.start()
    try:
        _, claim = stored_progress(peer, "fast")
        assert claim.epoch == 3
    finally:
        tracker.shutdown(timeout=60)
