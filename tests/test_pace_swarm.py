"""Real peers on loopback: how long a dead member is awaited, who reduces how much, and one reducer for many clients."""

from __future__ import annotations

import os
import signal

from tests.local_swarm import LocalPeer, local_swarm


def epochs(peer: LocalPeer) -> list[dict]:
    return [event for event in peer.events if event["event"] == "epoch"]


def await_rounds(peer: LocalPeer, count: int, group_size: int, timeout: float = 90.0) -> list[dict]:
    """The next `count` rounds of at least so many members."""
    found: list[dict] = []
    while len(found) < count:
        after = max((event["epoch"] for event in found), default=epochs(peer)[-1]["epoch"] if epochs(peer) else 0)
        found.append(peer.wait_epoch(after + 1, group_size, timeout))
    return found


def test_a_member_that_falls_silent_costs_less_than_the_runs_timeouts(tmp_path):
    """Stopped, not killed: its connections stay, and nothing says that it is gone."""
    timeouts = {"matchmaking_time": 15.0, "allreduce_timeout": 60.0, "next_chunk_timeout": 30.0, "pause": 0.05}
    timeouts["averaging_timeout"] = 180.0
    with local_swarm(tmp_path) as swarm:
        members = [swarm.add(**timeouts) for _ in range(4)]
        for peer in members:
            await_rounds(peer, 7, group_size=4)
        os.killpg(members[-1].process.pid, signal.SIGSTOP)
        for peer in members[:-1]:
            last = peer.wait_epoch(epochs(peer)[-1]["epoch"] + 6, group_size=3)
            after = [event for event in epochs(peer) if event["epoch"] > last["epoch"] - 6]
            longest = max(event["seconds"] for event in after)
            assert longest < 12.0, f"a minute's exchange or 15 s of waiting: {peer.story()}"


def test_slices_follow_what_lines_carry(tmp_path):
    """A slice's reducer sends its answers to all others: who has a slow line sends less in all."""
    settings = {"hidden": 500, "target_batch_size": 1024}
    with local_swarm(tmp_path) as swarm:
        members = [swarm.add(**settings) for _ in range(3)]
        members.append(swarm.add(max_mbps=0.5, **settings))
        for peer in members:
            await_rounds(peer, 8, group_size=4)
        sent = [await_rounds(peer, 2, group_size=4)[-1]["sent"] for peer in members]
        assert sent[3] < 0.8 * min(sent[:3]), sent
        ends = swarm.finish(*members)
        assert len({(end["epoch"], end["digest"]) for end in ends}) == 1


def test_one_public_peer_carries_all_clients(tmp_path):
    with local_swarm(tmp_path) as swarm:
        public = swarm.add()
        clients = [swarm.add(client_mode=True) for _ in range(4)]
        for peer in (public, *clients):
            await_rounds(peer, 6, group_size=5, timeout=120.0)
        ends = swarm.finish(public, *clients)
        assert len({(end["epoch"], end["digest"]) for end in ends}) == 1
        for peer in clients:
            whole = [event for event in epochs(peer) if event["group_size"] == 5]
            assert len(whole) >= 0.9 * (len(epochs(peer)) - epochs(peer).index(whole[0])), peer.story()
