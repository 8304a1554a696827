"""Bound the log lines that strangers can cause in hivemind.

hivemind logs a traceback for each call that is refused, and whoever knows a peer's address can call: at some hundred
calls a second a log would grow by gigabytes in a night, on a volunteer's disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LOGGER = "hivemind"
PER_PLACE = 10  # records of one line of code in WITHIN
WITHIN = 60.0  # s
MAX_PLACES = 1024  # lines of code that log; hivemind and ours have some hundred


class RepeatFilter(logging.Filter):
    """Passes a few records of each line of hivemind's code in a minute, and then one that says how many were left out.

    The records of other packages pass unchanged: a program may give one handler to several loggers.

    :param clock: monotonic, s
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        super().__init__()
        self._clock = clock
        self._places: dict[tuple[str, int], tuple[float, int]] = {}  # since when, and how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Is it to be logged?"""
        if record.name.partition(".")[0] != LOGGER:
            return True
        place, now = (record.pathname, record.lineno), self._clock()
        since, count = self._places.get(place, (now, 0))
        if now - since >= WITHIN:
            if count > PER_PLACE:
                record.msg, record.args = f"{record.getMessage()} (and {count - PER_PLACE} more before it)", ()
            since, count = now, 0
        if len(self._places) >= MAX_PLACES and place not in self._places:
            self._places.clear()
        self._places[place] = (since, count + 1)
        return count < PER_PLACE


def bound_logs() -> None:
    """For all that hivemind logs in this process, and in those that it forks."""
    for handler in logging.getLogger(LOGGER).handlers:
        if not any(isinstance(one, RepeatFilter) for one in handler.filters):
            handler.addFilter(RepeatFilter())
