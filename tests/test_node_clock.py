"""A node's clock leaves out the time in which its process was stopped."""

from __future__ import annotations

from volunteer_kit.swarm.node.clock import LONGEST_GAP, RunningClock


def test_it_goes_on_while_the_process_runs():
    times = iter([10.0, 11.0, 12.5, 12.5])
    clock = RunningClock(lambda: next(times))
    assert [clock(), clock(), clock()] == [11.0, 12.5, 12.5]


def test_it_leaves_out_a_stop():
    times = iter([10.0, 11.0, 11.0 + LONGEST_GAP + 60.0, 12.0 + LONGEST_GAP + 60.0])
    clock = RunningClock(lambda: next(times))
    assert [clock(), clock(), clock()] == [11.0, 11.0, 12.0]
