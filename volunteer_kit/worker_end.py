"""How a worker process ended: in words, and whether another one may follow it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from volunteer_kit.home import log_end
from volunteer_kit.training.protocol import BROKEN, OFFLINE, REFUSED

NOT_NOW = ("startup", "port_taken")  # errors that tell about this moment, where all was well before


@dataclass(frozen=True)
class WorkerEnd:
    """What is known of one worker that is gone.

    :param exit_code: negative: killed by that signal; None: it could not be started
    :param error: message and `error_kind` of its newest "error" or "broken" event; empty: it sent none
    """

    exit_code: int | None
    error: str = ""
    error_kind: str = ""

    def may_be_followed(self, crashes: int, max_restarts: int, was_connected: bool) -> bool:
        """A line that was there once is waited for as long as it takes; what crashes again and again is not.

        :param crashes: in a row, this one included
        :param was_connected: some worker has met the swarm
        """
        if self.exit_code == OFFLINE:
            return was_connected
        if self.exit_code == REFUSED and not (was_connected and self.error_kind in NOT_NOW):
            return False
        return crashes <= max_restarts

    def in_words(self) -> str:
        """A clause, without a full stop."""
        code = self.exit_code
        if code is None:
            return self.error or "it could not be started"
        if code in (REFUSED, BROKEN, OFFLINE) and self.error:
            return self.error.splitlines()[0].rstrip(".")
        if code == OFFLINE:
            return "nobody could be reached"
        if code == -signal.SIGKILL:
            return "it was killed (SIGKILL), often the system's answer to a lack of memory"
        return f"it ended with exit code {code}" if code >= 0 else f"it was killed by signal {-code}"

    def why_given_up(self, crashes: int, log_path: Path) -> str:
        """To be read where no worker follows: what happened, what to do, and the end of the log."""
        if self.exit_code in (REFUSED, OFFLINE):
            return self.error or f"The worker refused to go on. {log_path} ends with:\n{log_end(log_path)}"
        often = f"{crashes} times in a row" if crashes > 1 else "once, and restarting is switched off"
        return (
            f"The worker crashed {often} ({self.in_words()}). Samples already counted are safe.\n"
            f"  1. Read the end of its log: tail -n 50 {log_path}\n"
            "  2. If it speaks of memory, close other programs; if of the disk, make room.\n"
            f"  3. Join again.\nThe log ends with:\n{log_end(log_path)}"
        )
