"""Bytes counted and held below a cap, where they really flow: rounds and states between real peers."""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import signal
import time

import pytest
import torch
from hivemind.compression import NoCompression

from tests.local_swarm import local_swarm
from tests.one_averager import Counting, seen_donors
from tests.virtual_time import run_in_virtual_time
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.state import StateRefused, SwarmStateAverager, digest
from volunteer_kit.swarm.traffic import Traffic

MBPS = 12.0
SIZE = 1_000_000  # values of the model, 4 MB
TOLERANCE = 0.15


async def send_many(traffic: Traffic, messages: int, size: int) -> None:
    for _ in range(messages):
        await traffic.send(size)


def test_processes_share_one_cap_and_one_count():
    traffic = Traffic(max_mbps=8.0)  # 1 MB/s
    other = mp.Process(target=lambda: asyncio.run(send_many(traffic, 30, 50_000)))
    started = time.monotonic()
    other.start()
    asyncio.run(send_many(traffic, 30, 50_000))
    other.join()
    assert 2.4 <= time.monotonic() - started < 30, "in half the time with a cap for each"
    assert traffic.totals == (3_000_000, 0)


def test_the_directions_do_not_hold_each_other_up_and_a_pause_is_not_made_up_for():
    traffic = Traffic(max_mbps=8.0)

    async def story() -> None:
        await traffic.send(100_000)
        await asyncio.sleep(3.0)
        started = time.monotonic()
        await send_many(traffic, 10, 100_000)
        assert time.monotonic() - started > 0.4, "after a pause no more than the slack is free"
        started = time.monotonic()
        await asyncio.gather(traffic.send(500_000), traffic.receive(500_000))
        assert time.monotonic() - started < 1.0 - 0.1, "not one after the other"

    run_in_virtual_time(story, 60)
    assert traffic.totals == (1_600_000, 500_000)


def test_without_a_cap_nothing_waits():
    traffic = Traffic()
    run_in_virtual_time(lambda: send_many(traffic, 1000, 10**9), 0.5)
    assert traffic.totals == (10**12, 0)


@pytest.fixture(scope="module")
def peers():
    first = start_peer(PeerConfig(host_maddrs=["/ip4/127.0.0.1/tcp/0"], startup_timeout=60))
    second = start_peer(
        PeerConfig(initial_peers=first.visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=False)
    )
    yield first, second
    second.shutdown()
    first.shutdown()


def make_state(peer, prefix: str, traffic: Traffic, seed: int, patience: float) -> SwarmStateAverager:
    generator = torch.Generator().manual_seed(seed)
    return SwarmStateAverager(
        dht=peer.dht,
        prefix=prefix,
        params=[torch.nn.Parameter(torch.randn(SIZE // 2, generator=generator)) for _ in range(2)],
        optimizer=Counting,
        offload_optimizer=True,
        custom_gradients=True,
        client_mode=False,
        state_compression=NoCompression(),
        declare_state_period=1.0,
        min_matchmaking_time=1.0,
        next_chunk_timeout=patience,
        traffic=traffic,
        start=True,
    )


@pytest.fixture
def pair(peers, request):
    """(donor that has stepped three times, joiner), their caps in Mbit/s as the test asks, and s that a chunk may take
    where it has to come to an end."""
    donor_cap, joiner_cap, *patience = request.param
    [patience] = patience or [60.0]
    prefix = f"state-{time.monotonic_ns()}"
    donor = make_state(peers[0], prefix, Traffic(donor_cap), 1, patience)
    joiner = make_state(peers[1], prefix, Traffic(joiner_cap), 2, patience)
    for _ in range(3):
        donor.step(increment_epoch=True, optimizer_step=True)
    deadline = time.monotonic() + 120
    while seen_donors(peers[1], prefix).get(peers[0].peer_id) != 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield donor, joiner
    for averager in (donor, joiner):
        if averager.is_alive():
            averager.shutdown()


@pytest.mark.parametrize(
    "pair",
    [pytest.param((None, MBPS), id="joiner"), pytest.param((MBPS, None), id="donor", marks=pytest.mark.slow)],
    indirect=True,
)
def test_a_state_travels_at_the_cap_and_says_how_far_it_is(pair):
    donor, joiner = pair
    told, size = [], 9 * SIZE + 8  # fp32 values and means, 8-bit codes, two scales
    started = time.monotonic()
    assert joiner.load_state_from_peers(timeout=240, on_download=lambda *bytes_: told.append(bytes_))
    seconds = time.monotonic() - started
    assert seconds >= 5
    assert MBPS / 6 <= size * 8e-6 / seconds <= (1 + TOLERANCE) * MBPS  # a busy machine is slower
    assert digest(joiner.state_tensors()) == digest(donor.state_tensors())
    assert joiner.traffic.totals == (0, size) and donor.traffic.totals == (size, 0)
    done = [bytes_ for bytes_, _ in told]
    assert {total for _, total in told} == {size} and done == sorted(done) and done[-1] == size
    assert len(set(done)) >= 10, "often enough to draw it"


@pytest.mark.parametrize("pair", [(None, 10.0)], indirect=True)
def test_parameters_come_first_and_the_step_waits_for_the_statistics(pair):
    donor, joiner = pair
    told = []
    assert joiner.load_state_from_peers(timeout=240, whole=False, on_download=lambda *bytes_: told.append(bytes_))
    assert told[-1] == (4 * SIZE, 4 * SIZE)
    parameters = joiner.state_tensors()[:2]
    assert digest(parameters) == digest(donor.state_tensors()[:2]) and joiner.local_epoch == 3
    assert torch.equal(joiner.main_parameters[1], parameters[1]), "the model on the device has them"
    assert not joiner.complete and not joiner.allow_state_sharing and joiner.why_incomplete is None
    with pytest.raises(StateRefused, match="on their way"):
        joiner.get_current_state()

    for averager in (donor, joiner):  # the swarm's next step
        averager.round_name = b"next"
        averager.step(increment_epoch=True, optimizer_step=True, delay_optimizer_step=True, delay_averaging=True)
    assert not joiner.is_between_steps
    for averager in (donor, joiner):
        averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
    assert joiner.complete and joiner.allow_state_sharing
    assert digest(joiner.state_tensors()) == digest(donor.state_tensors())
    expected = {"epoch": 4, "lineage": donor.told[2].hex(), "numbers": [4, 4]}
    assert joiner.metadata() == donor.metadata() == expected
    assert joiner.told == donor.told


@pytest.mark.parametrize("pair", [(6.0, None, 10.0)], indirect=True)
def test_without_its_statistics_no_step_is_taken(pair):
    donor, joiner = pair
    assert joiner.load_state_from_peers(timeout=240, whole=False)
    before = digest(joiner.state_tensors()[:2])
    joiner.step(increment_epoch=True, optimizer_step=True, delay_optimizer_step=True, delay_averaging=True)
    os.kill(donor.pid, signal.SIGSTOP)  # in the middle of them
    try:
        joiner.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
    finally:
        os.kill(donor.pid, signal.SIGCONT)
    assert not joiner.complete and "statistics" in joiner.why_incomplete
    assert digest(joiner.state_tensors()[:2]) == before and joiner.told[0] == 3, "and it says what it holds"
    joiner.go_on_without()
    assert joiner.complete and joiner.allow_state_sharing and joiner.told[0] == 4


@pytest.mark.slow
def test_a_round_keeps_to_the_cap_and_nobody_is_given_up(peers):
    capped, free = (
        SwarmGradientAverager(
            [torch.nn.Parameter(torch.zeros(SIZE))],
            dht=peer.dht,
            prefix="round",
            client_mode=False,
            min_matchmaking_time=1.0,
            next_chunk_timeout=60.0,
            allreduce_timeout=240.0,
            traffic=Traffic(cap),
            start=True,
        )
        for peer, cap in zip(peers, [5.0, None], strict=True)
    )
    try:
        controls = [averager.step(wait=False, timeout=240) for averager in (capped, free)]
        rounds = [control.result(280) for control in controls]
        for outcome in rounds:
            assert len(outcome) == 2 and outcome.received == 1.0 and not outcome.failed_reducers and not outcome.refused
            assert outcome.seconds >= 5
            assert 5.0 / 6 <= 4 * SIZE * 8e-6 / outcome.seconds <= (1 + TOLERANCE) * 5.0  # a busy machine is slower
        assert capped.traffic.totals == (rounds[0].bytes_sent, rounds[0].bytes_received) == (4 * SIZE, 4 * SIZE)
        assert free.traffic.totals == (4 * SIZE, 4 * SIZE)
    finally:
        for averager in (capped, free):
            averager.shutdown()


@pytest.mark.slow
def test_a_late_joiner_on_a_slow_line_computes_before_it_has_everything(tmp_path):
    """33 kB of state at 12.5 kB/s, and no epoch shorter than three seconds."""
    with local_swarm(tmp_path) as swarm:
        first = swarm.add(target_batch_size=1024)
        first.wait_epoch(1)
        late = swarm.add(target_batch_size=1024, max_mbps=0.1)
        joined = late.wait_event("joined")
        assert joined["taken"] and not joined["complete"]
        complete = late.wait_event("complete")
        assert complete["made"] > 0 and complete["traffic"][1] >= 3 * 2760 * 4
        met = late.wait_epoch(joined["epoch"] + 1, group_size=2)
        late.wait_for(lambda e: e["event"] == "epoch" and e["epoch"] > met["epoch"] and e["samples"] > 0)
        ends = swarm.finish(first, late, more=2)
        assert ends[0]["digest"] == ends[1]["digest"], late.story()
