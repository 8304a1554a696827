"""Causes of failed rounds, by tables; their counts in files and records."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import types
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PHandlerError, PeerID
from hivemind.utils import MSGPackSerializer
from pydantic.v1 import ValidationError

from tests.somebody import record_of
from volunteer_kit.home import Home, Totals
from volunteer_kit.swarm.failures import CAUSES, RoundCounts, cause_of_loss, cause_within_round, cause_without_round
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.swarm.records import PeerRecord
from volunteer_kit.swarm.round import Round

A, B = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in (1, 2))


@pytest.mark.parametrize(
    ("gave_up", "began", "error", "cause"),
    [
        (True, False, FutureTimeoutError(), "no_group"),
        (True, True, FutureTimeoutError(), "peer_lost"),  # a group broke up, and no other came
        (False, False, FutureTimeoutError(), "no_group"),
        (False, False, AllreduceException("could not find a group"), "no_group"),
        (False, True, asyncio.TimeoutError(), "timeout"),
        (False, True, FutureTimeoutError(), "timeout"),
        (False, True, MatchmakingException("Unable to run All-Reduce"), "peer_lost"),
        (False, True, P2PHandlerError("gone"), "peer_lost"),
        (False, True, ZeroDivisionError(), "other"),
    ],
)
def test_why_there_was_no_round(gave_up, began, error, cause):
    control = types.SimpleNamespace(cancelled=lambda: gave_up, began_allreduce=began)
    assert cause_without_round(control, error) == cause


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (asyncio.TimeoutError(), "timeout"),
        (P2PHandlerError("stream reset"), "peer_lost"),
        (ConnectionError("3 parts of 5"), "peer_lost"),
        (AllreduceException("values that are not finite"), None),
    ],
)
def test_how_a_member_was_lost(error, cause):
    assert cause_of_loss(error) == cause


@pytest.mark.parametrize(
    ("fields", "is_apart", "cause"),
    [
        (dict(received=0.0, refused={str(A): "weight 40"}), False, "refused"),
        (dict(received=0.5, refused={str(A): "weight 40"}), False, "incomplete"),  # others' parts were averaged
        ({}, False, None),
        ({"received": 0.5}, False, "incomplete"),
        ({"received": 0.5, "lost": {"x": "timeout"}}, False, "timeout"),
        ({"lost": {"x": "timeout", "y": "peer_lost"}}, False, "peer_lost"),
        ({"received": 0.5, "lost": {"x": "timeout"}}, True, "out_of_step"),
    ],
)
def test_what_a_round_lacked(fields, is_apart, cause):
    assert cause_within_round(Round(group=(A, B), **fields), is_apart) == cause


# --- counts ---


def report(group_size=2, expected=2, cause=None) -> StepReport:
    return StepReport(1, 8, group_size, 1.0, 0.1, 0, 0, {}, expected=expected, cause=cause)


def test_a_refused_part_is_not_called_a_peer_that_does_not_come():
    why = "weight 40, more than the 32 that anyone can have earned"
    refused = {str(B): why}
    told = dataclasses.replace(report(cause="refused"), is_postponed=True, received=0.0, refused=refused)
    assert told.why_postponed == f"its parts were refused ({B}: {why})"
    assert dataclasses.replace(told, group_size=1, cause="no_group").why_postponed == "nobody was met"


def test_each_round_counts_once_and_a_lone_peers_step_is_none():
    counts = RoundCounts()
    steps = [report(), report(1, 1), report(2, 3), report(1, 2, "no_group"), report(3, 2), report(2, 2, "timeout")]
    for step in steps:
        counts.count(step)
    assert counts.as_dict() == {"rounds": 5, "complete_groups": 3, "failed": {"no_group": 1, "timeout": 1}}
    assert RoundCounts.read(json.loads(json.dumps(counts.as_dict()))) == counts


@pytest.mark.parametrize(
    "said",
    [None, [], "x", {"rounds": -1}, {"rounds": True}, {"rounds": 1.5}, {"rounds": "9", "failed": {"no_group": 3}},
     {"failed": [1], "complete_groups": 7}],
)  # fmt: skip
def test_nonsense_counts_nothing(said):
    assert RoundCounts.read(said) == RoundCounts()


def test_no_part_is_more_than_the_whole():
    said = {"rounds": 10, "complete_groups": 99, "failed": {"no_group": 8, "timeout": 2**40, "new_cause": 5}}
    assert RoundCounts.read(said) == RoundCounts(10, 10, {"no_group": 8, "timeout": 2})


def test_counts_outlive_the_worker(tmp_path):
    counts = RoundCounts(5, 4, {"peer_lost": 1})
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
    told = record_of(A, rounds={"rounds": 3, "failed": {"no_group": 1, "solar_flare": 2}, "mood": "good"})
    assert told.rounds.dict() == {"rounds": 3, "complete_groups": 0, "failed": {"no_group": 1}, "kit": ""}
    assert record_of(A).rounds is None


@pytest.mark.parametrize(
    "rounds",
    [{"rounds": -1}, {"rounds": 2**31}, {"rounds": "3"}, {"complete_groups": 1.5}, {"failed": {"no_group": -1}},
     {"failed": {"timeout": 2**63}}, {"failed": ["no_group"]}, 7],
)  # fmt: skip
def test_impossible_counts_are_refused(rounds):
    with pytest.raises(ValidationError):
        record_of(A, rounds=rounds)
