"""Test how benchmarks/chaos.py settles a swarm, and what it simulates."""

from __future__ import annotations

import pytest

from benchmarks.chaos import Stay, figures, settle
from benchmarks.home_parts.accounts import lives_of
from benchmarks.home_parts.faults import Fault
from benchmarks.home_parts.simulated import name_of, simulate, virtual_faults
from benchmarks.protocol_parts.scenarios import WARM_UP
from benchmarks.protocol_parts.swarm import Home, speeds_apart
from tests.simulation import schedule

SPEED, EPOCH = 10.0, 10  # samples/s, s
SAMPLES = int(SPEED * EPOCH)  # of one worker in an epoch


def told(event: str, at: float, computed: float, committed: float, **more) -> dict:
    """:param computed: s in this life; `had` of the ledger's samples are of earlier ones"""
    totals = {"computed": SPEED * computed + more.pop("had", 0.0), "committed": committed}
    clock = {"computed": computed, "between": 0.0, "contention": 0.0, "own_work": 0.0}
    return {"event": event, "at": at, "totals": totals, **clock, **more}


def life(begin: int, end: int, had: float = 0.0) -> list[dict]:
    """A worker that computes all the time: a beat each second, and a step of the swarm each EPOCH."""
    events = [{"event": "ready", "at": begin, "totals": {"computed": had, "committed": had, "pending": 0.0}}]
    for at in range(begin + 1, end + 1):
        computed, committed = float(at - begin), max(had, (at - 100) // EPOCH * SAMPLES)
        events.append(told("beat", at, computed, committed, had=had))
        if at % EPOCH == 0:
            step = {"epoch": at // EPOCH, "samples": SAMPLES, "group_size": 2, "seconds": 1.0, "had": had}
            events.append(told("step", at, computed, committed, **step))
    return events


def test_each_life_ends_with_a_kill_and_begins_with_what_the_ledger_has():
    faults = [Fault("kill", (0,), 120.5), Fault("stop", (0,), 150.0, 158.0), Fault("kill", (0,), 171.0)]
    processes = [life(100, 120), life(130, 170, had=SAMPLES), [{"event": "connected", "at": 175.0}], life(180, 190)]
    found = lives_of(processes, faults)
    assert [(each.had, each.killed) for each in found] == [(0.0, 120.5), (SAMPLES, 171.0), (0.0, None)]
    assert [each.began for each in found] == [100.0, 130.0, 180.0]
    assert found[1].stops == [(150.0, 158.0)]


def test_losses_are_what_goodput_lacks():
    workers = [[life(100, 190)], [life(100, 124), life(134, 190, had=230.0)]]  # 1 s of the second was lost
    faults = [Fault("kill", (1,), 124.5, 134.0)]
    stay = settle([SPEED, SPEED], workers, 105.0, 185.0, faults)
    assert (stay.begin, stay.end) == (112.0, 182.0)  # 2 s behind the first and the last step
    assert stay.account["dead"] == pytest.approx(9.5)
    assert stay.account["microbatch lost"] == pytest.approx(1.5)
    assert sum(stay.account.values()) == pytest.approx(2 * stay.wall)
    assert stay.gaps == [10.0] * 7
    quiet = settle([SPEED, SPEED], [[life(100, 190)], [life(100, 190)]], 105.0, 185.0, [])
    assert quiet.goodput(2) == pytest.approx(1.0)
    found = figures(2, quiet, stay)
    assert found["losses_sum"] == pytest.approx(1.0)
    assert found["losses_dead"] == pytest.approx(9.5 / 140)
    assert found["worst_gap_ratio"] == pytest.approx(1.0)


def test_a_round_of_a_stopped_worker_is_not_one_of_the_spared():
    """Each round lasts 1 s and ends with its step; those of 120 and 150 lasted 9 s on the worker that was stopped."""
    long = life(100, 190)
    for step in (event for event in long if event["event"] == "step" and event["at"] in (120, 150)):
        step["seconds"] = 9.0
    faults = [Fault("stop", (1,), 112.0, 119.5), Fault("stop", (0,), 142.0, 148.5)]
    stay = settle([SPEED, SPEED], [[life(100, 190)], [long]], 105.0, 185.0, faults)
    quiet = settle([SPEED, SPEED], [[life(100, 190)], [life(100, 190)]], 105.0, 185.0, [])
    assert len(stay.rounds) == len(stay.spared_rounds) + 1 == 14
    found = figures(2, quiet, stay)
    assert found["worst_round_ratio"] == found["worst_spared_round_ratio"] == 9.0
    assert found["rounds_over_twice"] == pytest.approx(1 / 13)
    only = settle([SPEED, SPEED], [[life(100, 190)], [long]], 105.0, 145.0, faults)
    assert figures(2, quiet, only)["worst_spared_round_ratio"] == 1.0


@pytest.mark.parametrize(
    "fault, inside",
    [
        (Fault("kill", (1,), 95.0, 103.0), 3.0),  # before the first step
        (Fault("kill", (1,), 110.0, 150.0), 20.0),  # the most that one kill takes off
        (Fault("kill", (1,), 190.0), 10.0),  # it never came back
        (Fault("stop", (1,), 110.0, 118.0), 0.0),
    ],
)
def test_dead_time_is_that_between_the_two_steps(fault, inside):
    stay = Stay(100.0, 200.0, [1.0], [1.0], [fault], failures={}, applied=1.0, contention=0.0)
    assert stay.dead == pytest.approx(inside)


def test_the_same_faults_strike_the_same_workers_at_the_same_times_in_virtual_time():
    faults = [Fault("kill", (2,), 103.0, 115.0), Fault("cut", (0,), 123.0, 131.0), Fault("partition", (1, 2, 3), 143.0)]
    found = virtual_faults(faults, begin=100.0, end=160.0)
    assert [(each.at - WARM_UP, each.kind, each.seconds) for each in found] == [
        (3.0, "away", 12.0), (23.0, "partition", 8.0), (43.0, "partition", 17.0),
    ]  # fmt: skip
    assert found[2].peers == tuple(map(name_of, (1, 2, 3)))


def test_dead_time_is_taken_off_what_the_protocol_keeps():
    home = Home(peers=4, public=4, epoch=10.0, target=1024, microbatches=8)
    faults = [schedule.Fault(WARM_UP + 5, "away", ("p01",), 20.0)]
    kept = simulate(home, speeds_apart(4, 4.0, 102.4), faults, 60.0, seeds=1)
    assert kept.loud < kept.quiet - 0.02
    assert kept.kept > 0.97
