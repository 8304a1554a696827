"""What becomes of rounds, in real swarms: all of a quiet one are complete; what fails is counted once, by cause."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest

from tests.local_swarm import LocalPeer, local_swarm
from volunteer_kit.swarm.peer import PeerConfig, start_peer

STEADY = {"target_batch_size": 512}
ATTEMPTS = 3
IN_A_ROW = 12  # whole rounds
TOLD = ("epoch", "postponed")  # events, of a round that came to a step or to none


def rounds(peer: LocalPeer, after: int = 0) -> list[dict]:
    """Those with somebody in sight, of steps later than `after`."""
    found = [e for e in peer.events if e["event"] in TOLD and e["epoch"] > after]
    return [e for e in found if max(e["expected"], e["group_size"]) > 1]


def are_whole(seen: list[dict]) -> bool:
    complete = [e["group_size"] == e["expected"] == 3 and e["cause"] is None for e in seen]
    return len(complete) == IN_A_ROW and all(complete)


def assert_counted_once(peer: LocalPeer) -> None:
    counts, seen = [e for e in peer.events if e["event"] in TOLD][-1]["counts"], rounds(peer)
    assert counts["rounds"] == len(seen)
    assert counts["complete_groups"] == sum(e["group_size"] >= e["expected"] for e in seen)
    assert counts["failed"] == Counter(e["cause"] for e in seen if e["cause"])


@pytest.mark.slow
def test_an_undisturbed_swarms_groups_are_complete_and_nothing_fails(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add() for _ in range(3)]
        for peer in peers:  # who came last makes up for a round or two; a busy machine keeps somebody from one
            peer.wait_for(lambda e, p=peer: e["event"] == "epoch" and are_whole(rounds(p, after=e["epoch"] - IN_A_ROW)))
            assert_counted_once(peer)


@pytest.mark.slow
def test_a_peer_that_is_gone_before_the_round_leaves_no_group(tmp_path):
    with local_swarm(tmp_path) as swarm:
        first, met = swarm.add(target_batch_size=1024), 0
        for _ in range(ATTEMPTS):  # on a busy machine it may die before its word of the new epoch has spread
            second = swarm.add(target_batch_size=1024)
            met = first.wait_epoch(met + 1, group_size=2)["epoch"]
            met = second.wait_epoch(met + 1, group_size=2)["epoch"]  # just now, and the next group is not sought yet
            second.kill()  # its record is believed for a while
            failed = first.wait_for(lambda e, met=met: e["event"] in TOLD and e["epoch"] > met and e["group_size"] == 1)
            if failed["expected"] == 2:
                break
        assert (failed["cause"], failed["group_size"], failed["expected"]) == ("no_group", 1, 2), first.story()
        since = failed["epoch"]  # until it is missed no more
        alone = first.wait_for(lambda e: e["event"] == "epoch" and e["epoch"] >= since and e["expected"] == 1)
        assert alone["cause"] is None, first.story()
        assert {e["cause"] for e in rounds(first, after=met)} - {None} == {"no_group"}, first.story()
        assert_counted_once(first)


def broke(event: dict, after: int) -> bool:
    """A round that lacks something, of a step later than `after`."""
    return event["event"] in TOLD and event["epoch"] > after and event["group_size"] > 1 and event["received"] < 1


@pytest.mark.parametrize(
    "attack, cause", [("die", "peer_lost"), pytest.param("stall", "timeout", marks=pytest.mark.slow)]
)
def test_a_peer_that_dies_or_stalls_in_the_middle(tmp_path, attack, cause):
    """kill -9 or SIGSTOP of the whole peer, once its first message of the round is on its way."""
    with local_swarm(tmp_path) as swarm:
        others = [swarm.add(**STEADY), swarm.add(**STEADY)]
        for peer in others:  # hold the same by then: who is apart in the round has another cause
            peer.wait_for(lambda e: e["event"] == "epoch" and e["group_size"] == 2 and e["cause"] is None)
        failed = {}
        for _ in range(ATTEMPTS):  # on a busy machine its second round may be with one of them alone
            victim = swarm.add(attack=attack, **STEADY)
            since = victim.wait_event("joined")["epoch"]  # what broke before is not its doing
            with suppress(AssertionError):
                failed = {peer: peer.wait_for(lambda e, since=since: broke(e, since), timeout=60.0) for peer in others}
                break
            victim.kill()
        assert failed, [peer.story() for peer in others]
        causes = {event["cause"] for event in failed.values()}
        # who gives a stalled one up first is lost to the other
        assert cause in causes <= {cause, "peer_lost"}, [peer.story() for peer in others]
        for peer in others:
            later = peer.wait_epoch(failed[peer]["epoch"] + 1, group_size=2)
            assert later["counts"]["failed"][failed[peer]["cause"]] >= 1, peer.story()
            assert_counted_once(peer)
        victim.kill()


@pytest.mark.slow
def test_volunteers_whom_nobody_can_call_are_told_so(tmp_path):
    """With a host that is an address only: it keeps what they sign, so that they know of each other."""
    host = start_peer(PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=90.0))
    try:
        with local_swarm(tmp_path) as swarm:
            settings = {"initial_peers": host.visible_maddrs(), "client_mode": True}
            for peer in [swarm.add(**settings), swarm.add(**settings)]:
                failed = peer.wait_for(lambda e: e["event"] in TOLD and e["cause"] is not None)
                assert (failed["cause"], failed["group_size"]) == ("all_clients", 1), peer.story()
    finally:
        host.shutdown()
