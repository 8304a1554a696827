"""Test how fast the peers' devices are believed to be."""

from __future__ import annotations

import pytest
from hivemind.p2p import PeerID

from tests.somebody import record_of
from volunteer_kit.swarm.records.device_speeds import (
    DEVICE_SLACK,
    OWN_SLACK,
    RARE_SLACK,
    Machine,
    believed_speeds,
    speed_bound,
)

A, B, C, D, STRANGER = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 6))
PEERS = {"a": A, "b": B, "c": C, "d": D}


def records(**speeds: float) -> dict:
    return {PEERS[name]: record_of(PEERS[name], samples_per_second=speed) for name, speed in speeds.items()}


def test_while_nobody_has_said_a_speed_nothing_is_known():
    for said in ({}, records(a=0.0), records(a=0.0, b=0.0)):
        limits = believed_speeds(said, None, 1000.0)
        assert limits.of(A) is None and limits.of(STRANGER) is None


@pytest.mark.parametrize(
    "said, of, speed, why",
    [
        ({"a": 10.0}, A, OWN_SLACK * 10.0, "its own word, with slack"),
        ({"a": 10.0, "b": 10.0, "c": 900.0}, C, DEVICE_SLACK * 10.0, "the same device elsewhere"),
        ({"a": 10.0, "b": 10.0, "c": 0.0}, C, DEVICE_SLACK * 10.0, "it has not said it yet"),
        ({"a": 10.0, "b": 10.0}, STRANGER, RARE_SLACK * 10.0, "to say nothing does not help"),
    ],
)
def test_what_is_believed_of_a_device(said, of, speed, why):
    limits = believed_speeds(records(**said), None, 1000.0)
    assert limits.of(of) == pytest.approx(speed), why
    assert limits.times(4.0).of(of) == pytest.approx(4 * speed), "in other units"


def machines(**said) -> dict[PeerID, Machine]:
    """name=(account, device, speed)"""
    return {PEERS[name]: Machine(m[0].encode(), m[1], m[2]) for name, m in said.items()}


@pytest.mark.parametrize(
    "said, bound, why",
    [
        ({}, 1000.0, "nothing is known of anybody: what the run allows"),
        ({"a": ("A", "T4", 10.0)}, 30.0, "its own word, with slack"),
        ({"a": ("A", "T4", 900.0)}, 1000.0, "no more than the run allows"),
        ({"a": ("A", "T4", 900.0), "b": ("B", "T4", 10.0)}, 1000.0, "one other says too little"),
        ({"a": ("A", "T4", 900.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 30.0, "the same device elsewhere"),
        ({"a": ("A", "T4", 10.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 30.0, "the least of all"),
        ({"a": ("A", "T4", 900.0), "b": ("A", "T4", 500.0), "c": ("A", "T4", 500.0)}, 1000.0, "its own account's"),
        (
            {"a": ("A", "T4", 900.0), "b": ("B", "T4", 9e2), "d": ("B", "T4", 9e2), "c": ("C", "T4", 10.0)},
            910.0,
            "455 x 2",
        ),
        (
            {"a": ("A", "T4", 900.0), "b": ("B", "T4", 10.0), "c": ("B", "T4", 12.0), "d": ("C", "T4", 10.0)},
            21.0,
            "an account has one voice: 11 and 10",
        ),
        ({"a": ("A", "X1", 900.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 225.0, "nobody else has one"),
        ({"a": ("A", "X1", 60.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 180.0, "and it is as fast as that"),
        ({"a": ("A", "T4", 0.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 30.0, "it says nothing"),
        ({"a": ("A", "X1", 0.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 225.0, "nothing, of a rare device"),
        ({"a": ("A", "T4", 0.0), "b": ("B", "T4", 10.0)}, 150.0, "nothing, and one other has its device"),
        ({"b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 225.0, "no record at all: it may be a rare one"),
        ({"a": ("A", "T4", 10.0), "b": ("B", "T4", 0.0), "c": ("C", "T4", 0.0)}, 30.0, "silent ones are no measure"),
    ],
)
def test_speed_bound(said, bound, why):
    assert speed_bound(A, machines(**said), 1000.0) == pytest.approx(bound), why
