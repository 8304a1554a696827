"""Leases: what is free by what peers say; and on a real DHT: claims, deaths, restarts, partitions."""

from __future__ import annotations

import json
import time

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.p2p import P2P
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import given
from hypothesis import strategies as st

from tests.local_swarm import LocalPeer
from volunteer_kit.swarm.leases.records import END, Free, LeaseRecord, free_ranges, merged, overlap
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer

NOW = 1000.0


def said(held=(), done=(), used=0, until=NOW + 1) -> LeaseRecord:
    return LeaseRecord(peer_id=b"p", held=held, used=used, until=until, done=done)


# what is free


@pytest.mark.parametrize(
    ("records", "ranges", "want", "free"),
    [
        ([], 8, 3, Free(0, 3, 0)),
        ([], 2, 5, Free(0, 2, 0)),
        ([said(held=[[0, 2]])], 8, 3, Free(2, 5, 0)),
        ([said(held=[[0, 2]]), said(held=[[3, 8]])], 8, 3, Free(2, 3, 0)),
        ([said(done=[[0, 8]])], 8, 3, None),
        ([said(held=[[4, 8]], done=[[0, 4]])], 8, 3, None),
        ([said(held=[[0, 4]], used=7, until=NOW - 1)], 8, 3, Free(0, 3, 7)),  # a dead one's, where it stopped
        ([said(held=[[2, 4]], done=[[0, 2]], used=7, until=NOW - 1)], 8, 9, Free(2, 8, 7)),
        ([said(held=[[2, 4]], used=7, until=NOW - 1)], 8, 9, Free(0, 2, 0)),  # what was begun is a lease of its own
        ([said(held=[[0, 4]], used=7, until=NOW - 1), said(held=[[0, 2]])], 8, 9, Free(2, 8, 0)),
        ([], None, 3, Free(0, END, 0)),
        ([said(held=[[0, END]])], None, 3, None),
        ([said(held=[[3, END]], done=[[0, 3]], used=5, until=NOW - 1)], None, 3, Free(3, END, 5)),
        ([said(done=[[0, END]])], None, 3, None),
        ([said(held=[[5, END]])], None, 3, None),  # somebody is further on in a shard that is read in order
    ],
)
def test_what_is_free(records, ranges, want, free):
    assert free_ranges(records, ranges, want, NOW) == free


spans = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda ab: [min(ab), max(ab)])


@given(st.lists(st.builds(said, held=st.lists(spans, max_size=3), done=st.lists(spans, max_size=3))))
def test_nothing_is_given_twice_and_all_is_given(records):
    busy = {n for r in records for first, last in (*r.held, *r.done) for n in range(first, last)}
    given_out = set()
    while free := free_ranges([*records, said(done=[[n, n + 1] for n in sorted(given_out)][:64])], 20, 4, NOW):
        ranges = set(range(free.first, free.last))
        assert ranges and not ranges & (busy | given_out)
        given_out |= ranges
    assert given_out | busy >= set(range(20))


@given(st.lists(spans))
def test_merged_spans_hold_the_same(found):
    whole = merged(found)
    assert {n for a, b in whole for n in range(a, b)} == {n for a, b in found for n in range(a, b)}
    assert all(a[1] < b[0] for a, b in zip(whole, whole[1:], strict=False))


def test_overlap():
    assert overlap((0, 4), (2, 9)) == 2 and overlap((0, 2), (2, 4)) == 0 and overlap((3, END), (5, END)) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"held": [[0, END + 1]]}, {"held": [[-1, 2]]}, {"held": [[0, 1]] * 17}, {"done": [[0, 1]] * 65}, {"used": -1},
     {"used": 1.5}, {"until": float("nan")}, {"until": float("inf")}, {"held": [[0]]}, {"held": None}],
)  # fmt: skip
def test_what_strangers_say_is_bounded(wrong):
    with pytest.raises(ValueError):
        LeaseRecord(**{**said().dict(), **wrong})


# on a real DHT


@pytest.fixture
def peers(tmp_path):
    started: list[LocalPeer] = []

    def start(**settings) -> LocalPeer:
        if started:
            settings.setdefault("initial_peers", started[0].wait_event("connected")["maddrs"])
        peer = LocalPeer(tmp_path / f"{len(started)}.log", module="tests.lease_peer", **settings)
        started.append(peer)
        peer.wait_event("connected")
        return peer

    yield start
    for peer in started:
        peer.kill()


def claim(peer: LocalPeer, shard: int = 0, ranges: int | None = 8, want: int = 2, epoch: int = 0):
    return peer.ask(do="claim", epoch=epoch, shard=shard, ranges=ranges, want=want)["result"]


def test_peers_share_a_shard_and_go_on_where_one_died(peers):
    a, b = peers(lifetime=15), peers(lifetime=120)
    first, second = claim(a), claim(b)
    assert first[2:5] == [0, 2, 0] and second[2:5] == [2, 4, 0]
    a.ask(do="applied", lease=first, range_=1, used=40)
    assert claim(b)[2:5] == [4, 6, 0]
    a.kill()
    deadline = time.monotonic() + 120
    assert claim(b)[2:5] == [6, 8, 0]
    while (taken := claim(b)) == "held":  # until its claim has expired
        assert time.monotonic() < deadline
    assert taken[2:5] == [1, 2, 40]  # [0, 1) is done, and of [1, 2) so many records
    assert b.ask(do="counts")["result"] == {"taken_over": 1}


def test_what_is_done_stays_done_and_another_epoch_is_free(peers):
    a, b = peers(), peers()
    lease = claim(a, want=8)
    a.ask(do="ended", lease=lease, before=None)
    after = claim(a, shard=1)
    a.ask(do="applied", lease=after, range_=0, used=3)
    assert claim(b) == "done"
    assert claim(b, epoch=1)[2:4] == [0, 2]


def test_a_shard_whose_end_nobody_knows_is_one_peers(peers):
    a, b = peers(lifetime=120), peers()
    whole = claim(a, ranges=None)
    assert whole[2:4] == [0, None] and claim(b, ranges=None) == "held"
    a.ask(do="applied", lease=whole, range_=3, used=5)
    a.ask(do="close")  # leaves in good order
    rest = claim(b, ranges=None)
    assert rest[2:5] == [3, None, 5]
    b.ask(do="ended", lease=rest, before=None)
    b.ask(do="applied", lease=claim(b, shard=1), range_=0, used=0)
    assert claim(b, ranges=None) == "done"


def test_what_one_had_done_is_remembered_when_its_own_word_is_lost(peers):
    """DHT records go with the nodes that hold them: whoever reads on in a shard repeats what it saw."""
    a, b, c = peers(), peers(), peers()
    a.ask(do="applied", lease=claim(a, want=4), range_=3, used=0)
    assert claim(b)[2:4] == [4, 6]
    c.ask(do="forget", peer_id=a.wait_event("connected")["peer_id"])
    assert claim(c)[2:4] == [3, 4]


def test_peers_tell_each_other_where_they_are(peers):
    group = [peers() for _ in range(4)]
    assert group[0].ask(do="where", epoch=2, place=7)["result"] == [2, 7]  # nobody else is there yet
    for peer, place in zip(group, (7, 9, 900_000), strict=False):
        peer.ask(do="where", epoch=2, place=place)
    assert group[3].ask(do="where", epoch=0, place=0)["result"] == [2, 9]  # the median: one alone leads nobody astray


def test_a_peer_that_comes_back_goes_on_with_its_own_lease(peers, tmp_path):
    key = str(tmp_path / "identity.key")
    peers()
    a = peers(identity_path=key)
    lease = claim(a, want=4)
    a.ask(do="applied", lease=lease, range_=1, used=9)
    a.kill()
    a = peers(identity_path=key)
    # what was saved is older than what was told
    resumed = a.ask(do="resume", lease=[0, 0, 0, 4, 0], range_=0, used=0)["result"]
    assert resumed[2:5] == [1, 4, 9]
    other = peers()
    assert claim(other)[2:5] == [4, 6, 0]
    assert other.ask(do="resume", lease=[0, 0, 0, 4, 0], range_=0, used=0)["result"] is None


def test_a_machine_that_slept_gives_up_what_others_have_done_meanwhile(peers):
    a, b = peers(lifetime=12), peers(lifetime=120)
    lease = claim(a, want=4)
    deadline = time.monotonic() + 120
    while (taken := claim(b, want=8))[2:4] != [0, 4]:  # while a says nothing, as one that sleeps
        assert time.monotonic() < deadline
    b.ask(do="ended", lease=taken, before=None)
    b.ask(do="applied", lease=claim(b, shard=1), range_=0, used=0)
    assert a.ask(do="holds", lease=lease)["result"] is False
    assert a.ask(do="earns", lease=lease)["result"] is False


def test_two_sides_of_a_partition_are_counted_and_one_lets_go(peers):
    a, b = peers(), peers()
    b.ask(do="cut", cut=True)
    mine, theirs = claim(a, want=3), claim(b, want=2)
    assert mine[2:4] == [0, 3] and theirs[2:4] == [0, 2]
    b.ask(do="cut", cut=False)
    for peer in (b, a, b):  # each tells what it holds and sees the other
        peer.ask(do="renew")
    holds = [peer.ask(do="holds", lease=lease)["result"] for peer, lease in ((a, mine), (b, theirs))]
    assert sorted(holds) == [False, True]
    counts = [peer.ask(do="counts")["result"] for peer in (a, b)]
    assert sum(one.get("lost", 0) for one in counts) == 1 and max(one.get("duplicate", 0) for one in counts) >= 2
    earns = [peer.ask(do="earns", lease=lease)["result"] for peer, lease in ((a, mine), (b, theirs))]
    assert earns == holds


def test_quick_claims_at_the_same_moment_never_give_the_same_twice(peers):
    group = [peers() for _ in range(3)]
    for shard in range(4):
        for peer in group:
            peer.order(json.dumps({"do": "claim", "epoch": 0, "shard": shard, "ranges": 6, "want": 2}))
        answers = [peer.wait_for(lambda e, n=shard: e["event"] == "answer" and e["number"] == n) for peer in group]
        given_out = [range(*one["result"][2:4]) for one in answers if one["result"] != "held"]
        flat = [n for ranges in given_out for n in ranges]
        assert len(flat) == len(set(flat)) >= 2  # and who gave way tried again


def test_a_record_that_another_signed_is_not_heard(peers, tmp_path):
    """A stranger that writes a claim in another peer's name, or nonsense, takes nothing from anybody."""
    a = peers()
    stranger = start_peer(
        PeerConfig(initial_peers=a.wait_event("connected")["maddrs"], host_maddrs=["/ip4/127.0.0.1/tcp/0"],
                   client_mode=False)
    )  # fmt: skip
    try:
        key, signer = "test_lease_0_0", RSASignatureValidator()
        stranger.dht.add_validators([signer])
        everything = {"held": [[0, END]], "used": 0, "until": time.time() + 1000, "done": [[0, END]]}
        for value in ({**everything, "peer_id": P2P.__name__.encode()}, {"held": "all"}, {b"x": 1}, 7):
            assert stranger.dht.store(key, value, time.time() + 100, subkey=signer.local_public_key)
        for place in (key, "test_places"):
            assert not stranger.dht.store(place, {b"x": 1}, time.time() + 100, subkey=b"nobody"), "a name of no peer"
        assert a.ask(do="where", epoch=0, place=0)["result"] == [0, 0]
        assert not stranger.dht.store(key, {**everything, "peer_id": b"x"}, time.time() + 100, subkey=b"unsigned")
        assert claim(a)[2:4] == [0, 2]
    finally:
        stranger.shutdown()
        RSAPrivateKey._process_wide_key = None
