"""hivemind's calls that await p2pd's answers, made safe against one that comes when nobody waits any more.

A call that is given up (each DHT call has a timeout) is cancelled at once and forgotten one turn of the loop later. An
answer in between finds a future that is done; hivemind's reader of answers dies of the InvalidStateError, and every
later call of the process waits for ever.
"""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import Any

from hivemind.p2p.p2p_daemon_bindings.control import ControlClient


class PendingCalls(dict[Any, asyncio.Future]):
    """Calls by id. One that is done is no longer in it, for the reader, which asks before it answers."""

    def __contains__(self, call_id: object) -> bool:
        future = self.get(call_id)
        return future is not None and not future.done()


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
