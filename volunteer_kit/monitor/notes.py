"""The monitor's journal, for callers that must not stumble over a sick disk: what cannot be written is told once."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from pathlib import Path
from typing import Any

from volunteer_kit.journal import Journal, JournalError
from volunteer_kit.storage import keep_aside
from volunteer_kit.storage.sqlite import require_whole

TELL_EVERY = 300.0  # s between two complaints of the same kind on stderr
REOPEN_EVERY = 30.0  # s


class Notes:
    """Journal's own methods by their names, none of which raises JournalError. Threads may share one."""

    def __init__(self, path: Path):
        self._path, self._journal, self._lock = path, None, threading.Lock()
        self._told: dict[str, float] = {}
        self._reopen_at = 0.0
        self.failed = 0  # entries that were lost
        self._open()

    def _open(self) -> Journal | None:
        with self._lock:
            if self._journal is None and time.monotonic() >= self._reopen_at:
                self._reopen_at = time.monotonic() + REOPEN_EVERY
                try:
                    self._set_aside_if_cut_off()
                    self._journal = Journal(self._path)
                except (JournalError, OSError) as error:
                    self.complain("journal", str(error))
            return self._journal

    def _set_aside_if_cut_off(self) -> None:
        try:
            require_whole(self._path)
        except sqlite3.DatabaseError as error:
            aside = keep_aside(self._path, beside=("-wal", "-shm"))
            text = f"{error}.{aside} Curves and events begin anew; credit, checkpoints and bans are kept elsewhere."
            self.complain("cut off", text)

    def do(self, method: str, *args: Any, default: Any = None, **fields: Any) -> Any:
        """Call a method of the journal. :returns: its result, `default` if the disk did not let it."""
        journal = self._open()
        if journal is None:
            self.failed += 1
            return default
        try:
            return getattr(journal, method)(*args, **fields)
        except JournalError as error:
            self.failed += 1
            self.complain("journal", str(error))
            return default

    def event(self, kind: str, text: str = "", **detail: Any) -> None:
        self.do("add_event", time.time(), kind, text, **detail)

    def warn(self, reason: str, kind: str = "warning", about: str | None = None) -> None:
        """Into the journal and to stderr, not again within TELL_EVERY s.

        :param about: what it is about, where the words may change
        """
        if self.complain(reason if about is None else about, reason):
            self.event(kind, reason=" ".join(reason.split()))

    def complain(self, about: str, text: str) -> bool:
        """To stderr. :returns: False if the same was told a while ago."""
        now = time.monotonic()
        if now - self._told.get(about, float("-inf")) < TELL_EVERY:
            return False
        self._told = {key: when for key, when in self._told.items() if now - when < TELL_EVERY} | {about: now}
        print(text, file=sys.stderr, flush=True)
        return True

    def close(self) -> None:
        with self._lock:
            if self._journal is not None:
                self._journal.close()
