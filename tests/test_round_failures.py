"""Test the counts of failed rounds by cause, in files and records."""

from __future__ import annotations

import json

import pytest
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from pydantic.v1 import ValidationError

from tests.somebody import record_of
from volunteer_kit.home import Home, Totals
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.swarm.records.failures import CAUSES, RoundCounts
from volunteer_kit.swarm.records.peer_record import PeerRecord

A = PeerID(b"\x12\x20" + bytes([1]) * 32)

# --- counts ---


def report(group_size=2, expected=2, cause=None) -> StepReport:
    return StepReport(
        epoch=1, samples=8, group_size=group_size, received=1.0, seconds=0.1, bytes_sent=0, bytes_received=0,
        expected=expected, cause=cause,
    )  # fmt: skip


def test_each_round_counts_once_and_a_lone_peers_step_is_none():
    counts = RoundCounts()
    steps = [report(), report(1, 1), report(2, 3), report(2, 2, "incomplete"), report(3, 2)]
    for step in steps:
        counts.count(step)
    assert counts.as_dict() == {"rounds": 4, "complete_groups": 3, "failed": {"incomplete": 1}}
    assert RoundCounts.read(json.loads(json.dumps(counts.as_dict()))) == counts


@pytest.mark.parametrize(
    "said",
    [None, [], "x", {"rounds": -1}, {"rounds": True}, {"rounds": 1.5}, {"rounds": "9", "failed": {"incomplete": 3}},
     {"failed": [1], "complete_groups": 7}],
)  # fmt: skip
def test_nonsense_counts_nothing(said):
    assert RoundCounts.read(said) == RoundCounts()


def test_no_part_is_more_than_the_whole():
    said = {"rounds": 10, "complete_groups": 99, "failed": {"incomplete": 2**40, "new_cause": 5}}
    assert RoundCounts.read(said) == RoundCounts(10, 10, {"incomplete": 10})


def test_counts_outlive_the_worker(tmp_path):
    counts = RoundCounts(5, 4, {"incomplete": 1})
    Home(tmp_path).save_totals(Totals(7, 2, 3.5, counts.as_dict()))
    assert RoundCounts.read(Home(tmp_path).totals().rounds) == counts
    (tmp_path / "totals.json").write_text('{"samples": 7, "epochs": 2, "seconds": 3.5}')  # of an older kit
    assert RoundCounts.read(Home(tmp_path).totals().rounds) == RoundCounts()


# --- records ---


def test_a_record_with_every_cause_is_small_and_comes_back():
    counts = RoundCounts(2**31 - 1, 2**31 - 1, dict.fromkeys(CAUSES, 2**31 - 1))
    told = record_of(A, rounds=counts.as_dict(), name="n" * 64, device="d" * 64)
    raw = MSGPackSerializer.dumps(told.dict())
    assert len(raw) < 1024
    assert PeerRecord.parse_obj(MSGPackSerializer.loads(raw)) == told


def test_a_newer_kits_causes_and_fields_are_left_out():
    said = {"rounds": 3, "failed": {"incomplete": 1, "no_group": 2, "solar_flare": 2}, "mood": "good"}
    told = record_of(A, rounds=said)
    assert told.rounds.dict() == {"rounds": 3, "complete_groups": 0, "failed": {"incomplete": 1}, "kit": ""}
    assert record_of(A).rounds is None


@pytest.mark.parametrize(
    "rounds",
    [{"rounds": -1}, {"rounds": 2**31}, {"rounds": "3"}, {"complete_groups": 1.5}, {"failed": {"incomplete": -1}},
     {"failed": {"incomplete": 2**63}}, {"failed": ["incomplete"]}, 7],
)  # fmt: skip
def test_impossible_counts_are_refused(rounds):
    with pytest.raises(ValidationError):
        record_of(A, rounds=rounds)
