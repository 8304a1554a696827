"""Compute the layout at a node's head, which encodes the cells of the next round.

With low-rank gradients it follows from the steps before, so it moves with the head, and comes with states. A thread of
its own computes it, in the order in which the node said what happened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

from volunteer_kit.swarm.node.training_state import codec_tensors_in
from volunteer_kit.swarm.rounds.layout import Layout

logger = logging.getLogger(__name__)

Answers: TypeAlias = "list[tuple[int, bytes]]"  # of one step: cells and bytes


class HeadLayout:
    """Keep the layout at the head: an engine asks for it when a round begins, and reports each step that it takes.

    :param layout: of the run's first step
    """

    def __init__(self, layout: Layout):
        self._first = layout
        self._thread = ThreadPoolExecutor(1, "bases")
        self._here: Future[Layout] | None = _done(layout)  # None: the state that it is in has not come
        self._waiting: list[Answers] = []  # of the steps behind that state

    @property
    def goes_by_steps(self) -> bool:
        """Return whether the layout changes with the steps, so that the engine has to report them."""
        return self._first.goes_by_steps

    @property
    def here(self) -> Future[Layout] | None:
        """The layout at the head; it fails where the bytes that it follows from are damaged. None: it is not known."""
        return self._here

    def begin(self) -> None:
        """This peer stands at the run's beginning."""
        self._stand_on(_done(self._first))

    def load(self, path: Path, behind: Iterable[Answers] = ()) -> None:
        """It stands on the state in this file, which was checked, and on these steps behind it."""
        if not self.goes_by_steps:
            return
        self._stand_on(self._thread.submit(self._layout_in, path))
        for answers in behind:
            self.step(answers)

    def await_state(self) -> None:
        """It stands on a state that has not come yet."""
        if self.goes_by_steps:
            self._here, self._waiting = None, []

    def arrived(self, path: Path) -> None:
        """Take the awaited state from this file, which was checked."""
        self.load(path, self._waiting)

    def step(self, answers: Answers) -> None:
        """It has taken a step."""
        if not self.goes_by_steps:
            return
        if self._here is None:
            self._waiting.append(answers)
        else:
            before = self._here  # done when its turn comes
            self._stand_on(self._thread.submit(lambda: before.result().after(answers)))

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _layout_in(self, path: Path) -> Layout:
        """Raises ValueError."""
        return self._first.with_state(codec_tensors_in(path, self._first.state_tensors()))

    def _stand_on(self, layout: Future[Layout]) -> None:
        self._here, self._waiting = layout, []


def _done(layout: Layout) -> Future[Layout]:
    future: Future[Layout] = Future()
    future.set_result(layout)
    return future
