"""Lines that die: nothing counted is lost, nobody steps alone beside a swarm, and all come back by themselves."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial

import psutil
import pytest
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tests.local_swarm import LocalPeer, local_swarm
from tests.network import network
from tests.waiting import wait_until
from volunteer_kit.swarm.net.connectivity import (
    MAX_KNOWN,
    Look,
    Reach,
    answers,
    is_loopback,
    is_private,
    is_refused,
    look_around,
    split_address,
)
from volunteer_kit.swarm.net.peer import PeerConfig, start_peer

BACK_WITHIN = 180.0  # s, on a busy machine; p2pd waits longer before each vain dial
ALONE_AFTER = 15.0  # s, longer than a peer takes to know that it has no majority
OUTAGE = 60.0  # s; longer than p2pd keeps a dead connection, and than the others' records live


def epochs(peer: LocalPeer) -> list[dict]:
    return [event for event in peer.said() if event["event"] == "epoch"]


def newest(peer: LocalPeer) -> int:
    return max(event["epoch"] for event in epochs(peer))


def peer_id(peer: LocalPeer) -> str:
    return peer.wait_event("connected")["peer_id"]


def wait_until_equal(swarm, peers: list[LocalPeer]) -> None:
    ends = swarm.finish(*peers)
    assert len({(end["epoch"], end["digest"]) for end in ends}) == 1, "\n\n".join(peer.story() for peer in peers)


# --- real outages ---


@pytest.mark.slow
def test_whose_line_is_cut_and_who_is_suspended_take_no_step_and_come_back_by_themselves(tmp_path):
    """The swarm has five peers, so that the other three are a majority."""
    with network(5) as net, local_swarm(tmp_path) as swarm:
        peers = [swarm.add(**net.settings(number), pause=0.4) for number in (1, 2, 3, 4, 5)]
        for peer in peers:
            peer.wait_epoch(2, group_size=5)
        *others, asleep, lost = peers
        tree = [psutil.Process(asleep.process.pid)]
        tree += tree[0].children(recursive=True)
        for process in tree:
            process.send_signal(signal.SIGSTOP)
        net.cut(5)
        began = time.monotonic()
        cut = lost.wait_event("cut_off")
        before = newest(others[0])
        for peer in others:
            peer.wait_epoch(before + 3, group_size=3)
        time.sleep(max(0.0, OUTAGE - (time.monotonic() - began)))  # an outage has a length; nothing is awaited
        assert newest(lost) <= cut["epoch"] + 1, lost.story()  # a step that was decided when the line was cut
        net.mend(5)
        for process in tree:
            process.send_signal(signal.SIGCONT)
        lost.wait_event("back", BACK_WITHIN)
        here = newest(others[0])
        for peer in (asleep, lost):
            peer.wait_epoch(here + 1, group_size=4, timeout=BACK_WITHIN)
        wait_until_equal(swarm, peers)


@pytest.mark.slow
def test_when_the_first_peer_dies_the_others_go_on_and_a_newcomer_finds_them(tmp_path):
    """Its address is dead; what is remembered of the others leads back."""
    with local_swarm(tmp_path) as swarm:
        first, second, third = (swarm.add() for _ in range(3))
        for peer in (first, second, third):
            peer.wait_epoch(2, group_size=3)
        known = second.wait_for(lambda e: e["event"] == "known" and len(e["maddrs"]) >= 2)["maddrs"]
        dead = first.wait_event("connected")["maddrs"]
        assert set(known) >= set(dead) | set(third.wait_event("connected")["maddrs"])
        first.kill()
        third.wait_epoch(newest(third) + 2, group_size=2)
        again = swarm.add(initial_peers=[*dead, *known])
        joined = again.wait_event("joined")
        assert joined["taken"]
        again.wait_epoch(joined["epoch"] + 1, group_size=2)
        wait_until_equal(swarm, [second, third, again])


@pytest.mark.slow
def test_the_one_that_is_left_of_two_counts_nothing_until_it_goes_on_alone(tmp_path):
    """The only peer it knows is gone: it cannot know whether the swarm is over or its line is dead. After a while
    without a majority it opens a branch of its own."""
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add(sync={"alone_after": ALONE_AFTER}) for _ in range(2)]
        for peer in peers:
            peer.wait_epoch(1, group_size=2)
        gone, left = sorted(peers, key=peer_id)  # of two, the one with the smaller id may decide alone
        gone.kill()
        cut = left.wait_event("cut_off")
        assert "Nobody" in cut["why"] or "More than half" in cut["why"]  # a founder may know that the other is gone
        since = left.events.index(cut)
        alone = left.wait_for(lambda e: e["event"] == "epoch" and e in left.events[since:] and e["group_size"] == 1)
        assert not any(event.get("samples") for event in left.events[since : left.events.index(alone)]), left.story()
        left.wait_epoch(alone["epoch"] + 2, group_size=1)


# --- who may be believed, who is remembered ---


@pytest.fixture(scope="module")
def peers():
    first = start_peer(PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=60))
    maddrs = first.visible_maddrs()
    server = start_peer(
        PeerConfig(initial_peers=maddrs, host_maddrs=["/ip4/127.0.0.1/tcp/0"], announce_maddrs=["/ip4/1.2.3.4/tcp/5"])
    )
    client = start_peer(PeerConfig(initial_peers=maddrs, host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=True))
    yield first, server, client
    for peer in (client, server, first):
        peer.shutdown()


@pytest.fixture
def reach(peers):
    made = [Reach(peer.dht) for peer in peers]
    yield made
    for one in made:
        one.close()


def test_peers_that_answer_are_connected_and_remembered_by_what_they_announce(peers, reach):
    first, server, client = reach
    for one in reach:
        assert one.cut_off is None and one.cut_off_for == 0
    deadline = time.monotonic() + 120
    while not first.known_peers() or not client.known_peers():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert first.known_peers() == [f"/ip4/1.2.3.4/tcp/5/p2p/{peers[1].peer_id}"], "and who takes no calls is not"
    assert client.known_peers()[0] in (*peers[0].visible_maddrs(), *first.known_peers())


async def ask(dht, node, peer) -> bool:
    return await answers(node, peer)


def test_who_answers_whatever_it_says_is_there_and_who_is_unknown_is_not(peers, reach):
    first, server, client = peers
    for asker, asked in [(first, server), (first, client), (server, first), (client, first)]:
        wait_until(lambda asker=asker, asked=asked: asker.dht.run_coroutine(partial(ask, peer=asked.peer_id)))
    nobody = PeerID(b"\x12\x20" + bytes(32))
    assert first.dht.run_coroutine(partial(ask, peer=nobody)) is False
    wait_until(lambda: reach[0].is_there({nobody, client.peer_id}))
    assert not reach[0].is_there({nobody})
    assert not reach[0].is_there(set())


async def forget_all(dht, node) -> None:
    """As when all of its calls were too late."""
    table = node.protocol.routing_table
    for node_id, peer in list(table.uid_to_peer_id.items()):
        node.blacklist.register_failure(peer)
        del table[node_id]


def test_who_is_connected_and_knows_nobody_any_more_asks_those_who_are_there(peers):
    first, _, client = peers
    first.dht.store("found again", 1, expiration_time=get_dht_time() + 60)
    wait_until(lambda: client.dht.get("found again", latest=True))
    client.dht.run_coroutine(forget_all)
    assert client.dht.get("found again", latest=True) is None
    addresses = [str(maddr) for maddr in first.visible_maddrs()]
    wait_until(lambda: client.dht.run_coroutine(partial(look_around, addresses=addresses)).answered)
    wait_until(lambda: client.dht.get("found again", latest=True))


class NoDht:
    """Answers as it is told."""

    def __init__(self, initial_peers, *looks: Look):
        self.initial_peers, self.looks = initial_peers, list(looks)
        self.asked = threading.Event()

    def run_coroutine(self, coro, return_future):
        return self

    def result(self, timeout):
        return self.looks.pop(0) if self.looks else Look()


A, B = "/ip4/10.0.0.1/tcp/1/p2p/A", "/ip4/10.0.0.2/tcp/1/p2p/B"
HERE, SILENT, NONE = Look(answered=True, known=[A]), Look(silent=[A]), Look()
REFUSED = Look(refused=True, silent=[B])
FAILED = None  # the DHT did not answer


@pytest.mark.parametrize(
    "first, looks, cut_off",
    [
        ([], [NONE] * 3, False),  # a new swarm, and nobody yet
        ([], [HERE], False),
        ([], [HERE, REFUSED, REFUSED], False),  # one is gone, its machine is there
        ([], [HERE, SILENT, SILENT], True),  # they have been here, and the line is dead
        ([], [HERE, FAILED, FAILED], True),  # that we could not look is no sign that they are gone
        ([], [FAILED] * 3, False),
        ([B], [HERE], False),
        ([B], [HERE, SILENT], False),  # once is not enough to be sure
        ([B], [HERE, SILENT, SILENT], True),
        ([B], [HERE, REFUSED, REFUSED], True),  # first peers that are down can come back, and others with them
        ([B], [SILENT, SILENT, HERE], False),
    ],
)
def test_who_is_cut_off(first, looks, cut_off, monkeypatch):
    monkeypatch.setattr("volunteer_kit.swarm.net.connectivity.PERIOD", 1e6)
    monkeypatch.setattr("volunteer_kit.swarm.net.connectivity.PERIOD_SILENT", 1e6)
    reach = Reach(NoDht(first, *looks[:-1], *[looks[-1]] * 2))
    try:
        for _ in looks:
            reach._look()
        assert (reach.cut_off is not None) is cut_off and (reach.cut_off_for > 0) is cut_off
    finally:
        reach.close()


def test_who_is_told_to_goes_on_alone_after_long_silence(monkeypatch):
    """A fine-tune of two, one of whom has gone home."""
    monkeypatch.setattr("volunteer_kit.swarm.net.connectivity.PERIOD", 1e6)
    monkeypatch.setattr("volunteer_kit.swarm.net.connectivity.PERIOD_SILENT", 1e6)
    reach = Reach(NoDht([B]), alone_after=60.0)
    try:
        for silence, cut_off in [(30.0, False), (50.0, True), (61.0, False)]:
            reach._answered_at = time.monotonic() - silence
            reach._look()
            assert (reach.cut_off is not None) is cut_off, silence
        reach._take(HERE, time.monotonic())
        reach._answered_at = time.monotonic() - 30.0
        assert reach.cut_off is None, "somebody was here again: the silence begins anew"
    finally:
        reach.close()


def test_what_is_remembered_is_bounded_and_the_latest_first(monkeypatch):
    monkeypatch.setattr("volunteer_kit.swarm.net.connectivity.PERIOD_SILENT", 1e6)
    monkeypatch.setattr("volunteer_kit.swarm.net.connectivity.PERIOD", 1e6)
    reach = Reach(NoDht([]))
    try:
        for number in range(2 * MAX_KNOWN):
            reach._take(Look(answered=True, known=[f"/ip4/10.0.0.1/tcp/{number + 1}/p2p/A"]), time.monotonic())
        reach._take(Look(answered=True, known=[f"/ip4/10.0.0.1/tcp/{MAX_KNOWN + 1}/p2p/A"]), time.monotonic())
        known = reach.known_peers()
        assert len(known) == len(set(known)) == MAX_KNOWN
        assert [int(address.split("/")[4]) for address in known[:2]] == [MAX_KNOWN + 1, 2 * MAX_KNOWN]
    finally:
        reach.close()


def test_addresses():
    peer_id = "QmVw55HRsuptQWXCVBQEpzFhMHftKSh5aEtfyv6MgV74PX"
    host, port, maddr = split_address(f"/ip4/1.2.3.4/tcp/5555/p2p/{peer_id}")
    assert (host, port, maddr["p2p"]) == ("1.2.3.4", 5555, peer_id)
    assert split_address(f"/ip4/1.2.3.4/udp/5555/quic-v1/p2p/{peer_id}")[1] is None
    assert split_address(f"/dns4/a.example/tcp/5555/p2p/{peer_id}")[:2] == ("a.example", 5555)
    assert is_loopback("/ip4/127.0.0.1/tcp/1") and not is_loopback("/dns4/localhost/tcp/1")
    assert is_private("/ip4/192.168.0.7/tcp/1") and not is_private("/ip4/8.8.8.8/tcp/1")
    assert is_private("/ip4/100.64.7.2/tcp/1") and is_private("/ip6/fd12::7/tcp/1")  # a provider's own, a home's
    assert is_private("/dns4/nas.lan/tcp/1") and not is_private("/dns4/run.example.org/tcp/1")


WORLD, HOME = "/ip4/8.8.8.8/tcp/1/p2p/A", "/ip4/192.168.0.5/tcp/1/p2p/B"


@pytest.mark.parametrize(
    "ends, refused",
    [
        ({WORLD: "refused"}, True),
        ({HOME: "refused"}, True),  # a swarm of one house
        ({WORLD: "silent", HOME: "refused"}, False),  # somebody else's 192.168.0.5, and ours answered
        ({WORLD: "silent"}, False),
        ({}, False),
    ],
)
def test_a_machine_at_home_does_not_prove_that_the_line_works(ends, refused):
    assert is_refused(ends) is refused
