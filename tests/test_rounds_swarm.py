"""Test rounds in a real swarm: all of a quiet one are complete, and each is counted once."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.local_swarm import LocalPeer, local_swarm

IN_A_ROW = 12  # whole rounds


def rounds(peer: LocalPeer, after: int = 0) -> list[dict]:
    """Those with somebody in sight, of steps later than `after`."""
    found = [e for e in peer.events if e["event"] == "epoch" and e["epoch"] > after]
    return [e for e in found if max(e["expected"], e["group_size"]) > 1]


def are_whole(seen: list[dict]) -> bool:
    complete = [e["group_size"] == e["expected"] == 3 and e["cause"] is None for e in seen]
    return len(complete) == IN_A_ROW and all(complete)


def assert_counted_once(peer: LocalPeer) -> None:
    counts, seen = [e for e in peer.events if e["event"] == "epoch"][-1]["counts"], rounds(peer)
    assert counts["rounds"] == len(seen)
    assert counts["complete_groups"] == sum(e["group_size"] >= e["expected"] for e in seen)
    assert counts["failed"] == Counter(e["cause"] for e in seen if e["cause"])


@pytest.mark.slow
def test_an_undisturbed_swarms_groups_are_complete_and_nothing_fails(tmp_path):
    with local_swarm(tmp_path) as swarm:
        peers = [swarm.add() for _ in range(3)]
        for peer in peers:  # a busy machine keeps somebody from one
            peer.wait_for(lambda e, p=peer: e["event"] == "epoch" and are_whole(rounds(p, after=e["epoch"] - IN_A_ROW)))
            assert_counted_once(peer)
