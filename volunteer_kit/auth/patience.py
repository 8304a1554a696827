"""Waiting for what passes by itself: a Hub or an authority that is away, too busy, or asked too often."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

from volunteer_kit.auth.identity import LoginError

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 60.0  # s; twice as long each time
LONGEST_ASKED = 300.0  # s that a server may have us wait
# Kinds of trouble that pass by themselves -> s that they are waited for. A line that is not there is often this
# machine's own, and its owner should hear of it soon.
PATIENCE: Mapping[str, float] = {"away": 900.0, "down": 900.0, "limit": 900.0, "network": 60.0}
T = TypeVar("T")


def pause_after(
    failures: int, asked_for: float | None, first: float = FIRST_PAUSE, longest: float = LONGEST_PAUSE
) -> float:
    """s until the next question, after so many before the last that were in vain.

    :param asked_for: s, the server's Retry-After; None: it named none
    """
    return max(min(longest, first * 2 ** min(failures, 10)), min(asked_for or 0.0, LONGEST_ASKED))


def ask_patiently(
    ask: Callable[[], T], on_wait: Callable[[LoginError, float], None], wait: Callable[[float], object]
) -> T | None:
    """What `ask` gives; again after growing pauses while the trouble is one of PATIENCE. Raises LoginError when it has
    not passed in time.

    :param on_wait: called before each pause with the trouble and how long it is, s
    :param wait: sleeps so long; true: wait no longer
    :returns: None if `wait` said so
    """
    waited = 0.0
    for attempt in itertools.count():
        try:
            return ask()
        except LoginError as trouble:
            pause = pause_after(attempt, trouble.retry_after)
            if waited + pause > PATIENCE.get(trouble.kind, 0.0):
                raise
            on_wait(trouble, pause)
        waited += pause
        if wait(pause):
            return None
    raise AssertionError
