"""Credit, beside the loop: what the reducers signed becomes the ledger, and the ledger the leaderboard."""

from __future__ import annotations

import shlex
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from volunteer_kit.monitor.notes import Notes
from volunteer_kit.swarm.credit_collector import CreditCollector
from volunteer_kit.swarm.credit_ledger import CreditLedger

LEAST_PAUSE, LONGEST_PAUSE = 5.0, 120.0  # s between two looks


class Credits:
    """A thread that collects a few times an epoch.

    :param make_collector: ledger -> collector
    :param epoch: where the swarm is
    :param pause: s between two looks as things are, bounded by the two above
    """

    def __init__(
        self,
        path: Path,
        notes: Notes,
        make_collector: Callable[[CreditLedger], CreditCollector],
        epoch: Callable[[], int],
        pause: Callable[[], float],
    ):
        self._path, self._notes, self._make, self._epoch, self._pause = path, notes, make_collector, epoch, pause
        self.samples = 0  # of all rounds entered, provisional ones too
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="credit", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)

    def _run(self) -> None:
        collector: CreditCollector | None = None
        while not self._stop.is_set():
            try:
                if collector is None:
                    collector = self._make(CreditLedger(self._path))
                    self._tell(collector)
                collector.collect(self._epoch())
                self._tell(collector)
            except sqlite3.Error as error:
                self._notes.warn(_in_words(self._path, error), about="credit")
            except Exception as error:  # of the DHT or of what strangers signed; the next look comes
                self._notes.complain("credit", f"Credit was not collected: {error!r}")
            self._stop.wait(min(max(self._pause(), LEAST_PAUSE), LONGEST_PAUSE))
        if collector is not None:
            collector.ledger.close()

    def _tell(self, collector: CreditCollector) -> None:
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
