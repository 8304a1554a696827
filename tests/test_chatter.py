"""What benchmarks/chatter.py takes off the bytes of a line."""

from __future__ import annotations

import pytest

from benchmarks.chatter import BEFORE, Chatter, are_together, figures, on_lines, tensors_sent
from benchmarks.home_parts.wire import sent_by_all


def step(at: float, epoch: int, group_size: int = 2, bytes_sent: int = 0) -> dict:
    return {"event": "step", "at": at, "epoch": epoch, "group_size": group_size, "bytes_sent": bytes_sent}


def beat(at: float, wire_sent: int) -> dict:
    return {"event": "beat", "at": at, "wire_sent": wire_sent}


def test_bytes_of_lines_are_between_two_beats_of_each_worker():
    workers = [[beat(1, 50), beat(2, 150), beat(4, 350), beat(9, 999)], [beat(2, 0), beat(5, 30)], [beat(3, 7)]]
    assert on_lines(workers, 2, 5) == (200 + 30, 2 + 3)


def test_tensors_are_what_rounds_of_these_groups_send():
    workers = [[step(1, 1, 2, 100), step(3, 2, 2, 110)], [step(3, 2, 2, 90), step(5, 3, 2, 80)], [step(4, 3, 3, 1)]]
    assert tensors_sent(workers, 2, 4, 10.0) == sent_by_all(2, 10.0) + sent_by_all(3, 10.0) == 20 + 40


def test_peers_are_together_within_a_step():
    assert are_together([[step(1, 4)], [step(1, 4), step(2, 5)]])
    assert not are_together([[step(1, 4)], [step(1, 6)]])
    assert not are_together([[step(1, 0)], []])


def test_the_last_line_has_what_was_measured():
    after = Chatter(0.05, 0.1, 0.9, True, 1.0, 9, 0.3, 0.02)
    told = figures({"after": after, "narrow": after})
    assert told["chatter_mbps_before"] == BEFORE and told["ratio"] == pytest.approx(BEFORE / 0.05)
    assert told["together_narrow"] is True and told["said_mbps_after"] == 0.02
    assert told["pressure"] == 0.3
    assert "ratio" not in figures({"narrow": after})
