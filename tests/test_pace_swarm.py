"""Real peers on loopback: how long a dead member is awaited, who reduces how much, and one reducer for many clients."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from tests.local_swarm import LocalPeer, local_swarm
from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.line_speed import LEAST
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.traffic import Traffic


def epochs(peer: LocalPeer) -> list[dict]:
    return [event for event in peer.events if event["event"] == "epoch"]


def await_rounds(peer: LocalPeer, count: int, group_size: int, timeout: float = 240.0) -> list[dict]:
    """The next `count` rounds of at least so many members."""
    found: list[dict] = []
    while len(found) < count:
        after = max((event["epoch"] for event in found), default=epochs(peer)[-1]["epoch"] if epochs(peer) else 0)
        found.append(peer.wait_epoch(after + 1, group_size, timeout))
    return found


def await_streak(peer: LocalPeer, count: int, group_size: int, timeout: float = 240.0) -> None:
    """Awaits `count` rounds in a row, each of all members and received whole."""

    def is_over(_: dict) -> bool:
        last = epochs(peer)[-count:]
        return len(last) == count and all(e["group_size"] == group_size and e["received"] == 1 for e in last)

    peer.wait_for(is_over, timeout)


@pytest.mark.slow
def test_a_killed_member_costs_less_than_the_runs_timeouts(tmp_path):
    """Its record stays, and the others expect it. (Of one that is stopped the DHT asks in vain, for seconds each.)"""
    timeouts = {"matchmaking_time": 15.0, "allreduce_timeout": 60.0, "next_chunk_timeout": 30.0, "pause": 0.05}
    timeouts["averaging_timeout"] = 180.0
    with local_swarm(tmp_path) as swarm:
        members = [swarm.add(**timeouts) for _ in range(4)]
        for peer in members:
            await_rounds(peer, 7, group_size=4)
        began = time.monotonic()
        while time.monotonic() - began < timeouts["matchmaking_time"] + 1:  # what was told before is over by then
            await_rounds(members[0], 1, group_size=4)
        members[-1].kill()
        for peer in members[:-1]:
            last = peer.wait_epoch(epochs(peer)[-1]["epoch"] + 6, group_size=3)
            after = [event for event in epochs(peer) if event["epoch"] > last["epoch"] - 6]
            longest = max(event["seconds"] for event in after)
            assert longest < 10.0, f"a minute's exchange or 15 s of waiting: {peer.story()}"


class SlowUplink(Traffic):
    """Sends at 1 Mbit/s; what it receives is not held up."""

    def __init__(self):
        super().__init__(max_mbps=1.0)

    async def receive(self, num_bytes: int) -> None:
        return


def test_slices_follow_what_lines_carry(peer):
    """A slice's reducer sends its answers to all others: who has a slow line sends less in all."""
    config = PeerConfig(initial_peers=peer.visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=60)
    with contextlib.ExitStack() as ends:
        peers = [peer, *(start_peer(config) for _ in range(3))]
        for other in peers[1:]:
            ends.callback(other.shutdown)
        members = []
        for place, own in enumerate(peers):
            members.append(
                SwarmAverager(
                    [torch.full((100_000,), float(place))],
                    dht=own.dht,
                    prefix="slices",
                    client_mode=False,
                    min_matchmaking_time=5.0,
                    part_size_bytes=100_000,  # what follows the last part is measured: a slice, not a moment
                    traffic=SlowUplink() if place == 3 else Traffic(),
                    start=True,
                )
            )
            ends.callback(members[-1].shutdown)
            members[-1].expected_group_size = len(peers)
        rounds = []
        while len(rounds) < LEAST + 3:
            controls = [member.step(gather=member.to_tell(0), wait=False, timeout=60) for member in members]
            rounds.append([control.result(90) for control in controls])
            assert all(outcome.received == 1 for outcome in rounds[-1])
        sent = [[outcome.bytes_sent for outcome in outcomes] for outcomes in rounds]
        assert min(sent[0]) > 0.9 * max(sent[0]), "nothing was known"
        assert sent[-1][3] < 0.8 * min(sent[-1][:3]), sent


@pytest.mark.slow
def test_one_public_peer_carries_all_clients(tmp_path):
    with local_swarm(tmp_path) as swarm:
        public = swarm.add()
        clients = [swarm.add(client_mode=True) for _ in range(4)]
        for peer in clients:
            peer.wait_event("joined")  # on a busy machine it is their start that takes two minutes
        for peer in (public, *clients):
            await_streak(peer, 6, group_size=5)  # load delays it; a reducer that fails its clients prevents it
        ends = swarm.finish(public, *clients)
        assert len({(end["epoch"], end["digest"]) for end in ends}) == 1
