"""The training process's part in verification: others' samples are computed without keeping our own swarm waiting."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from volunteer_kit.robust.messages import Duty, Samples
from volunteer_kit.swarm import verifying
from volunteer_kit.swarm.verifying import VerifyingOptimizer


def test_a_long_check_is_done_in_pieces_shorter_than_a_matchmaking(monkeypatch):
    """Who computes for longer than the others wait misses their round; and that is not its device's speed."""
    now, reports = [0.0], []

    def recompute(names, parameters):
        for _ in names:
            now[0] += 0.25
            yield [torch.ones(3)]

    monkeypatch.setattr(verifying, "time", SimpleNamespace(monotonic=lambda: now[0]))
    optimizer = VerifyingOptimizer.__new__(VerifyingOptimizer)
    optimizer._parent_pid = None  # it has no process of its own to end
    optimizer._begin_verifying()
    optimizer.matchmaking_time, optimizer.recompute = 2.0, recompute
    optimizer.grad_averager = SimpleNamespace(
        verification=SimpleNamespace(sums=8), report=lambda duty, totals: reports.append(totals), patience=2.0
    )
    optimizer._models[5, b""] = [torch.zeros(3)]
    samples = Samples(tuple(range(20)))
    optimizer._duties.append(Duty("check", b"round", 5, 1, samples, ((0, 20),), b"s" * 16, (3,)))
    pieces = []
    while not reports:
        began, optimizer.only_accumulated = now[0], True
        optimizer._work_off_duties()
        pieces.append(now[0] - began)
        assert not optimizer.only_accumulated
    assert max(pieces) < optimizer.matchmaking_time
    assert sum(pieces) == 5.0 and np.isfinite(reports[0][0]).all()
    optimizer.only_accumulated = True
    optimizer._work_off_duties()
    assert optimizer.only_accumulated, "nothing was to be done"
