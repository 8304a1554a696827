"""What the members' devices can have done between two rounds, and that a sender above it loses its part only."""

from __future__ import annotations

import threading

import pytest
import torch
from hivemind.p2p import PeerID

from tests.allreduce_group import assert_equal_bytes, average, flat, honest_mean, make_group, make_tensors
from tests.somebody import record_of
from volunteer_kit.robust.bounds import NORM_BOUND
from volunteer_kit.swarm.believed_speed import SLACK, UNMEASURED_SLACK, Limits, Speeds, believed_speeds
from volunteer_kit.swarm.credit_bounds import DEVICE_SLACK, OWN_SLACK, Bounds

A, B, C, D, STRANGER = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 6))
BOUNDS = Bounds(target_batch_size=1000, microbatch=8, late=2.0)


def records(**speeds: float) -> dict:
    peers = {"a": A, "b": B, "c": C, "d": D}
    return {peers[name]: record_of(peers[name], samples_per_second=speed) for name, speed in speeds.items()}


def test_while_nobody_has_said_a_speed_nothing_is_known():
    for said in ({}, records(a=0.0), records(a=0.0, b=0.0)):
        limits = believed_speeds(said, None, 1000.0)
        assert limits.of(A) is None and limits.of(STRANGER) is None
        assert limits.within(60.0, BOUNDS).of(A) is None


@pytest.mark.parametrize(
    "said, of, speed, why",
    [
        ({"a": 10.0}, A, SLACK * OWN_SLACK * 10.0, "its own word, with slack"),
        ({"a": 10.0, "b": 10.0, "c": 900.0}, C, SLACK * DEVICE_SLACK * 10.0, "the same device elsewhere"),
        ({"a": 10.0, "b": 10.0, "c": 0.0}, C, UNMEASURED_SLACK * DEVICE_SLACK * 10.0, "it has not said it yet"),
        ({"a": 10.0, "b": 10.0}, STRANGER, UNMEASURED_SLACK * DEVICE_SLACK * 10.0, "to say nothing does not help"),
    ],
)
def test_what_is_believed_of_a_device(said, of, speed, why):
    limits = believed_speeds(records(**said), None, 1000.0)
    assert limits.of(of) == pytest.approx(speed), why
    assert limits.within(60.0, BOUNDS).of(of) == pytest.approx(8 + speed * 62.0)
    assert limits.within(-5.0, BOUNDS).of(of) == pytest.approx(8 + speed * 2.0)


def test_the_records_are_looked_up_in_the_background():
    looked, speeds = threading.Event(), {"a": 10.0}

    def fetch():
        if looked.is_set():
            raise RuntimeError("the DHT's process has ended")
        looked.set()
        return records(**speeds)

    found = Speeds(BOUNDS, fetch, refresh=0.01)
    assert looked.wait(10)
    found.close()
    assert found.samples_within(10.0).of(A) == pytest.approx(8 + SLACK * OWN_SLACK * 10.0 * 12.0)


def test_more_than_a_device_can_have_earned_is_refused_and_costs_nobody_else():
    tensors = [make_tensors(seed) for seed in range(3)]
    liar = PeerID(b"\x12\x20" + bytes([2]) * 32)
    limits = Limits({liar: 20.0}, others=None)
    runners, results = average(lambda: make_group(tensors, weights=[5.0, 5.0, 60.0], weight_limit=limits.of))
    assert_equal_bytes(results[:2])
    assert (flat(results[0]) - honest_mean(tensors, [0, 1])).abs().max() < 1e-6
    for runner in runners[:2]:
        assert "more than the 20 that its device can have earned" in runner.refused[liar]
        assert runner.weights.keys() == {runners[0].peer_id, runners[1].peer_id}


def test_below_its_limit_or_where_none_is_known_a_weight_stands():
    tensors = [make_tensors(seed) for seed in range(3)]
    known = PeerID(b"\x12\x20" + bytes([2]) * 32)
    limits = Limits({known: 60.0}, others=None)
    runners, results = average(lambda: make_group(tensors, weights=[5.0, 64.0, 60.0], weight_limit=limits.of))
    assert_equal_bytes(results)
    assert not any(runner.refused for runner in runners)


def test_who_is_out_of_step_is_answered_whatever_it_declares():
    """It may have kept the samples of half an hour without a line."""
    tensors = [make_tensors(seed) for seed in range(3)]
    late = PeerID(b"\x12\x20" + bytes([2]) * 32)
    options = {"out_of_step": {late: "at epoch 2, the others at 3"}, "weight_limit": Limits({late: 1.0}).of}
    runners, results = average(lambda: make_group(tensors, weights=[5.0, 5.0, 60.0], **options))
    assert_equal_bytes(results)
    assert (flat(results[2]) - honest_mean(tensors, [0, 1])).abs().max() < 1e-6


def test_a_part_that_is_far_too_long_is_scaled_down_and_told():
    tensors = [make_tensors(seed) for seed in range(4)]
    tensors[3] = [1e9 * tensor for tensor in tensors[3]]
    runners, results = average(lambda: make_group(tensors))
    assert_equal_bytes(results)
    longest = max(tensor.norm() for member in tensors[:3] for tensor in member)
    assert flat(results[0]).norm() < 10 * NORM_BOUND * longest
    for runner in runners:
        assert set(runner.remarks) <= {runners[3].peer_id} and not runner.refused
        assert runner.weights.get(runners[3].peer_id) in (1.0, None)
    told = [why for runner in runners for why in runner.remarks.values()]
    assert told and all("100 times" in why for why in told)


def test_a_lone_sparse_sender_is_not_touched():
    tensors = [[torch.zeros_like(tensor) for tensor in make_tensors(0)] for _ in range(4)]
    tensors[2] = make_tensors(2)
    runners, results = average(lambda: make_group(tensors))
    assert (flat(results[0]) - flat(tensors[2]) / 4).abs().max() < 1e-6
    assert not any(runner.remarks for runner in runners)
