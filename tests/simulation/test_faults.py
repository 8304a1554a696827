"""Schedules that hypothesis makes: faults of every kind at any time."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.simulation.schedule import Fault, PeerPlan, Schedule
from tests.simulation.simulation import Simulation
from volunteer_kit.swarm.sync.entries import Member

QUIET_FROM = 40.0
SETTINGS = {
    "target_batch_size": 100, "cells": 4, "isolated_after": 8.0, "alone_after": 15.0, "epoch_deadline": 15.0,
    "exchange_ceiling": 10.0, "vote_ceiling": 6.0, "catching_up_patience": 12.0, "fetch_patience": 4.0,
    "snapshot_patience": 20.0,
}  # fmt: skip


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Two to five peers and up to ten faults."""
    count = draw(st.integers(2, 5))
    public = draw(st.integers(1, count))
    names = [f"p{place}" for place in range(count)]
    group = tuple(
        PeerPlan(Member(name, name, place < public), True, 100 / 3 / count, 8, 0.02, 20.0, 0.0, 1.0)
        for place, name in enumerate(names)
    )
    faults = draw(st.lists(a_fault(names), max_size=10))
    return Schedule("broad", 0, group, tuple(sorted(faults)), SETTINGS, 0.2e6, QUIET_FROM, QUIET_FROM + 240)


def make(*values: Any) -> Fault:
    """A fault of just these values: `builds` would invent the others of a named tuple."""
    return Fault(*values)


def a_fault(names: list[str]) -> st.SearchStrategy[Fault]:
    """One fault that is over before the quiet time."""
    one = st.sampled_from(names).map(lambda name: (name,))
    two = st.permutations(names).map(lambda order: tuple(order[:2]))
    some = st.lists(st.sampled_from(names), min_size=1, max_size=len(names) - 1, unique=True).map(tuple)
    at = st.integers(1, 30).map(float)
    seconds = st.sampled_from((1.0, 3.0, 9.0))
    deeds = st.sampled_from(("crash", "crash before", "pause", "leave"))
    upon = st.builds(lambda deed, said: f"{deed} {said}", deeds, st.sampled_from(("vote", "promise", "propose")))
    return st.one_of(
        st.builds(make, at, st.just("crash"), one, st.just(0.0), st.integers(0, 12).map(float)),
        st.builds(make, at, st.just("upon"), some, st.just(5.0), st.just(0.0), upon),
        st.builds(make, at, st.just("pause"), one, seconds),
        st.builds(make, at, st.just("cut"), two, seconds, st.just(0.0), st.sampled_from(("", "one way"))),
        st.builds(make, at, st.just("partition"), some, seconds),
        st.builds(make, at, st.just("slow"), one, seconds, st.just(20.0)),
        st.builds(make, at, st.just("leave"), one),
        st.builds(make, at, st.just("order"), st.just(()), st.just(0.0), st.integers(0, 3).map(float)),
        st.builds(make, at, st.just("trouble"), st.just(()), seconds, st.just(0.3), st.just("deciding")),
    )


@given(schedules())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_invariants_hold_whatever_happens(schedule):
    Simulation(schedule).run()
