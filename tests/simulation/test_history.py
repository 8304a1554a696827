"""Histories that people read, and schedules that are shrunk."""

from __future__ import annotations

from tests.simulation.history import History, shrink, words
from tests.simulation.invariants import Violation
from tests.simulation.modes import make_schedule
from tests.simulation.schedule import Fault, Schedule
from tests.simulation.simulation import Simulation
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Share


def test_values_in_few_words():
    assert words(Ballot(3, "p1")) == "3/p1"
    assert words(Share("p0", 2, 4, 10, 255)) == "p0#2 e4 x10 ff"
    assert words(b"\x12\x34\x56\x78") == "123456" and words(None) == "None" and words(1.5) == "1.50"
    assert words(frozenset({"b", "a"})) == "{a b}"


def test_a_history_tells_a_whole_run():
    history = History()
    Simulation(make_schedule("nasty", 1), history=history).run()
    text = "\n".join(history.lines)
    for said in ("starts", "Begin round", "sends parts", "Propose", "Vote", "does Apply", "FAULT trouble", "dies"):
        assert said in text
    assert "Lead" not in text, "heartbeats are left out"


def test_faults_that_do_not_matter_are_dropped():
    faults = tuple(Fault(at, kind, ("p0",)) for at, kind in ((1, "pause"), (2, "crash"), (3, "slow"), (9, "leave")))
    schedule = Schedule("broad", 0, (), faults, {}, 0.0, 10.0, 20.0)

    def run(candidate: Schedule) -> None:
        kinds = [fault.kind for fault in candidate.faults]
        if "crash" in kinds:
            raise Violation("I1" if "slow" in kinds else "I8", 4.0, "p0", "two entries are certified")

    assert [fault.kind for fault in shrink(schedule, run).faults] == ["crash", "slow"]


def test_a_schedule_that_holds_stays_whole():
    schedule = make_schedule("broad", 3)
    assert shrink(schedule, lambda candidate: None) == schedule
