"""Real state averagers on loopback, whose models drift apart between rounds."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
from hivemind.p2p import PeerID

from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.codec import make_codec
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.state import SwarmStateAverager, digest

STEPS, DRIFT = 1e-2, 1e-3  # standard deviations that all members move between rounds, and each on its own


def model() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(200, 300, generator=torch.Generator().manual_seed(0)))


def start_averager(peer, codec: str = "uniform8") -> SwarmStateAverager:
    return SwarmStateAverager(
        dht=peer.dht,
        prefix="differences",
        params=[model()],
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        client_mode=False,
        compression=make_codec(codec, codec, 512),
        state_compression=make_codec("none", "none", 512),
        min_matchmaking_time=5.0,
        start=True,
        reuse_tensors=True,
    )


def apart(averagers: list[SwarmStateAverager], generator: torch.Generator) -> torch.Tensor:
    """Let members drift; :returns: the mean of what they hold then."""
    held = [averager.state_tensors()[0] for averager in averagers]
    steps = torch.randn(held[0].shape, generator=generator)
    for tensor in held:
        tensor.add_(steps, alpha=STEPS).add_(torch.randn(tensor.shape, generator=generator), alpha=DRIFT)
    for averager in averagers:
        averager.describe()
    return torch.stack(held).mean(dim=0)


def error_after_round(averagers: list[SwarmStateAverager], generator: torch.Generator) -> float:
    """Standard deviation of what they hold after a round from what their mean was."""
    mean = apart(averagers, generator)
    for averager in averagers:
        averager.expected_group_size = len(averagers)
    with ThreadPoolExecutor(len(averagers)) as threads:
        list(threads.map(lambda averager: averager._average_parameters(60.0), averagers))
    assert len({digest(averager.state_tensors()[:1]) for averager in averagers}) == 1, "not all hold the same"
    assert not any(averager.take_remarks() for averager in averagers)
    return float((averagers[0].state_tensors()[0] - mean).std())


def test_who_was_in_the_last_round_sends_what_has_changed_since(peer):
    config = PeerConfig(initial_peers=peer.visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=60)
    generator = torch.Generator().manual_seed(1)
    with contextlib.ExitStack() as ends:
        peers = [peer, *(start_peer(config) for _ in range(3))]
        for other in peers[1:]:
            ends.callback(other.shutdown)
        averagers = [start_averager(one) for one in peers[:3]]
        for averager in averagers:
            ends.callback(averager.shutdown)
        whole = error_after_round(averagers, generator)
        assert whole > DRIFT, "8 bits of the whole are rounded by more than members differ"
        for _ in range(2):
            assert error_after_round(averagers, generator) < whole / 50
        averagers.append(start_averager(peers[3]))
        ends.callback(averagers[-1].shutdown)
        averagers[-1].state_tensors()[0].copy_(averagers[0].state_tensors()[0])  # as a download leaves it
        assert error_after_round(averagers, generator) > whole / 10, "a newcomer has not what it would add changes to"
        assert error_after_round(averagers, generator) < whole / 50


@pytest.mark.parametrize(
    "outcome, expected",
    [({}, 2.5), ({"received": 0.5}, 2.5), ({"kept_own": "it would move by 46"}, 2.0)],
    ids=["whole", "an answer lost", "not taken"],
)
def test_only_who_got_and_took_the_whole_answer_has_something_in_common_with_the_others(monkeypatch, outcome, expected):
    averager, group, sent = object.__new__(SwarmStateAverager), Mock(), []
    averager._parent_pid = None  # it has no process to end
    averager._base, averager.pace = [torch.ones(1)], Mock(is_marked_alike=Mock(return_value=True), mark=b"before")

    async def run_allreduce(self, tensors, group_info, *, outcome):
        sent.extend(float(tensor) for tensor in tensors)
        if outcome.kept_own is None:
            tensors[0].fill_(1.5)

    monkeypatch.setattr(SwarmAverager, "_run_allreduce_inplace_", run_allreduce)
    own = [torch.full((1,), 2.0)]
    outcome = Round(group=(PeerID(b"one"),), **outcome)
    asyncio.run(averager._run_allreduce_inplace_(own, group, outcome=outcome))
    assert sent == [1.0] and float(own[0]) == expected
    is_common = outcome.received == 1 and outcome.kept_own is None
    assert (averager._base == own, averager.pace.mark not in (b"", b"before")) == (is_common, is_common)
