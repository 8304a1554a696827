"""Make hivemind's pending calls safe against an answer of p2pd that comes when no caller waits any more.

A call that is given up (each DHT call has a timeout) is cancelled at once and forgotten one turn of the loop later. An
answer in between finds a future that is done; hivemind's reader of answers dies of the InvalidStateError, and every
later call of the process waits for ever. An answer that comes later is written out as text for a line of the log that
nobody sees: a stranger's 4 MB of zeros stopped the process for three seconds.
"""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import Any

from hivemind.p2p.p2p_daemon_bindings.control import ControlClient


class PatientFuture(asyncio.Future):
    """May be told its answer too late."""

    def set_result(self, result: Any) -> None:
        if not self.done():
            super().set_result(result)

    def set_exception(self, exception: type | BaseException) -> None:
        if not self.done():
            super().set_exception(exception)


class PendingCalls(dict[Any, asyncio.Future]):
    """Calls by id. For the reader, which asks before it answers, all are in it; nobody hears the answer to one that has
    been forgotten."""

    def __setitem__(self, call_id: Any, future: asyncio.Future) -> None:
        super().__setitem__(call_id, PatientFuture(loop=future.get_loop()))

    def __contains__(self, call_id: object) -> bool:
        return True

    def __missing__(self, call_id: Any) -> asyncio.Future:
        nobody = PatientFuture()
        nobody.cancel()
        return nobody


def outlive_late_answers() -> None:
    """For all of this process's clients of p2pd, and those of its forks, made from now on."""
    original = ControlClient.__init__
    if getattr(original, "outlives_late_answers", False):
        return

    @wraps(original)
    def patient(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._pending_calls = PendingCalls()

    patient.outlives_late_answers = True
    ControlClient.__init__ = patient
