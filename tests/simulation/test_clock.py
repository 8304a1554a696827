"""Virtual time."""

from __future__ import annotations

import random

from tests.simulation.clock import Clock, LocalClock


def test_calls_come_in_the_order_of_time_and_then_of_planning():
    clock, calls = Clock(), []
    clock.at(2.0, calls.append, "late")
    clock.at(1.0, calls.append, "first")
    clock.at(1.0, calls.append, "second")
    clock.run(1.5)
    assert calls == ["first", "second"] and clock.now == 1.5
    clock.run(3.0)
    assert calls == ["first", "second", "late"]


def test_a_call_may_plan_another_one_and_the_past_is_now():
    clock, times = Clock(), []
    clock.at(1.0, lambda: clock.at(0.5, lambda: times.append(clock.now)))
    clock.run(2.0)
    assert times == [1.0]


def test_stop_ends_the_run_after_the_call():
    clock, calls = Clock(), []
    clock.at(1.0, clock.stop)
    clock.at(1.0, calls.append, "never")
    clock.run(5.0)
    assert calls == [] and clock.now == 1.0


def test_a_local_timer_never_fires_before_its_time():
    rng = random.Random("clock")
    for _ in range(1000):
        clock = LocalClock(rng.uniform(-1e6, 1e6), rng.uniform(0.9, 1.1))
        local = rng.uniform(-1e6, 1e6)
        assert local <= clock.read(clock.when(local)) < local + 1e-3
