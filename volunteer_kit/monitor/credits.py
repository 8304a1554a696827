"""Credit, beside the loop: the committed steps become the ledger, and the ledger the leaderboard."""

from __future__ import annotations

import shlex
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from volunteer_kit.monitor.notes import Notes
from volunteer_kit.swarm.credit.accounting import EntryCollector
from volunteer_kit.swarm.credit.ledger import CreditLedger

PAUSE = 5.0  # s between two looks


class Credits:
    """A thread that collects every few seconds.

    :param make_collector: ledger -> collector
    :param epoch: where the swarm is
    """

    def __init__(
        self,
        path: Path,
        notes: Notes,
        make_collector: Callable[[CreditLedger], EntryCollector],
        epoch: Callable[[], int],
    ):
        self._path, self._notes, self._make, self._epoch = path, notes, make_collector, epoch
        self.samples = 0  # of all steps entered
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="credit", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        collector: EntryCollector | None = None
        while not self._stop.is_set():
            try:
                if collector is None:
                    collector = self._make(CreditLedger(self._path))
                    self._tell(collector)
                collector.collect(self._epoch())
                self._tell(collector)
            except sqlite3.Error as error:
                self._notes.warn(_in_words(self._path, error), about="credit")
            except Exception as error:  # the next look comes
                self._notes.complain("credit", f"Credit was not collected: {error!r}")
            self._stop.wait(PAUSE)
        if collector is not None:
            try:
                collector.close()
            except sqlite3.Error as error:
                self._notes.warn(_in_words(self._path, error), about="credit")

    def _tell(self, collector: EntryCollector) -> None:
        self.samples = sum(collector.ledger.sums())
        self._notes.do("set_leaderboard", collector.ledger.leaderboard())


def _in_words(path: Path, error: sqlite3.Error) -> str:
    """A ledger is never begun anew by itself: what everybody has done would be 0 on the dashboard."""
    text = f"Credit cannot be written to {path}: {error}. It is tried again later."
    if isinstance(error, sqlite3.OperationalError):  # busy, full, read-only
        return text
    file = shlex.quote(str(path))
    return (
        f"{text}\n1. Put back its backup.\n"
        f"2. Without one, put it aside, and credit begins anew: mv {file} {file}.damaged"
    )
