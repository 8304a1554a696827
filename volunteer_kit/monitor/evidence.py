"""Measures each state of the run, beside the loop: a look at a large model takes a minute on two cores."""

from __future__ import annotations

import math
import queue
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from volunteer_kit.checkpoint import is_finite
from volunteer_kit.monitor.judge import Look
from volunteer_kit.swarm.state.plausibility import ASTRAY, PublicLoss, StepBound, both_ways, distances


@dataclass(frozen=True)
class State:
    """A copy of the parameters after a step. `order`: the last rollback that is in it."""

    epoch: int
    order: int
    parameters: Sequence[torch.Tensor]
    statistics_finite: bool
    swarm_loss: float | None


@dataclass(frozen=True)
class Seen:
    """A look, and under which order it was taken."""

    order: int
    look: Look


class Looker:
    """A thread; one state at a time, and the states that come meanwhile are not looked at.

    :param public_loss: None: the run's samples cannot be read here
    """

    def __init__(self, step_bound: StepBound | None, public_loss: PublicLoss | None):
        self._step_bound, self._public_loss = step_bound, public_loss
        self._before: State | None = None
        self._todo: queue.Queue[State | None] = queue.Queue(maxsize=1)
        self._done: queue.Queue[Seen] = queue.Queue()
        self._busy = threading.Event()
        threading.Thread(target=self._run, name="looker", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        return self._busy.is_set() or not self._todo.empty()

    def submit(self, state: State) -> None:
        """Not while it is busy."""
        self._busy.set()
        self._todo.put_nowait(state)

    def results(self) -> list[Seen]:
        found = []
        while not self._done.empty():
            found.append(self._done.get_nowait())
        return found

    def close(self) -> None:
        self._todo.put(None)

    def _run(self) -> None:
        while (state := self._todo.get()) is not None:
            try:
                self._done.put(Seen(state.order, self._look(state)))
            except Exception:  # a look that fails is no reason to watch no longer
                traceback.print_exc()
            finally:
                self._before = state
                self._busy.clear()

    def _look(self, state: State) -> Look:
        finite = state.statistics_finite and is_finite(state.parameters)
        loss = self._public_loss(state.parameters) if finite and self._public_loss is not None else None
        return Look(state.epoch, finite, self._moved(state) if finite else None, loss, state.swarm_loss)

    def _moved(self, state: State) -> float | None:
        before = self._before
        if self._step_bound is None or before is None or before.order != state.order or before.epoch > state.epoch:
            return None
        since = max(0, before.epoch - ASTRAY)
        norms = [torch.linalg.vector_norm(p, dtype=torch.float64).item() for p in before.parameters]
        ours = self._step_bound(before.parameters, since, before.epoch)
        theirs = self._step_bound(before.parameters, since, state.epoch)
        bounds = [both_ways(*of_one) for of_one in zip(norms, ours, theirs, strict=True)]
        return largest_share(distances(before.parameters, state.parameters), bounds)


def largest_share(moved: Sequence[float], bounds: Sequence[float]) -> float:
    """Of each tensor's way in its bound the largest; inf where one moved that cannot."""
    largest = 0.0
    for way, bound in zip(moved, bounds, strict=True):
        share = 0.0 if way == 0 else way / bound if bound > 0 else math.inf
        largest = max(largest, math.inf if math.isnan(share) else share)
    return largest
