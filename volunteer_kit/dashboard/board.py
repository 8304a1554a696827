"""The newest dict, read again only when the journal has changed: a hundred watchers cost as much as one."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volunteer_kit.dashboard.state import State, build_state, empty_state, status_of, way_in
from volunteer_kit.journal import JournalError, JournalReader
from volunteer_kit.ways_in import read_offer

LOOK_EVERY = 1.0  # s; more often nobody can tell
FILE = "journal.sqlite"
PNG = b"\x89PNG\r\n\x1a\n"
LARGEST_PICTURE = 4 * 2**20  # bytes


@dataclass(frozen=True)
class Edition:
    """One state, as it is shown until the next."""

    state: State
    tag: str  # differs if the state does
    problem: str = ""  # why the journal could not be read just now; the state is the last that could


class Board:
    """Reads a journal that may not be there yet, and may be replaced. Threads may share it.

    :param folder: the monitor's, with journal.sqlite and the pictures; the host's offer to volunteers lies beside it
    :param run: as of run_info()
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], clock: Callable[[], float] = time.time):
        self.folder, self.run = folder, dict(run)
        self._clock = clock
        self._lock = threading.Lock()
        self._journal: JournalReader | None = None
        self._seen: object = None  # version, status and offer of the edition
        self._edition = _edition(empty_state(run))
        self._looked = float("-inf")  # monotonic s

    def edition(self) -> Edition:
        """The newest one, at most LOOK_EVERY old."""
        with self._lock:
            if time.monotonic() - self._looked >= LOOK_EVERY:
                self._look()
                self._looked = time.monotonic()
            return self._edition

    def state(self) -> State:
        return self.edition().state

    def picture(self, number: int) -> Path | None:
        """The file of a picture that the journal knows, if it is one, and inside the folder."""
        with self._lock:
            if self._journal is None:
                return None
            try:
                row = self._journal.picture(number)
            except JournalError:
                return None
        if row is None:
            return None
        path, folder = (self.folder / row["path"]).resolve(), self.folder.resolve()
        return path if path.is_relative_to(folder) and _is_picture(path) else None

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal = self._seen = None

    def _look(self) -> None:
        """An unreadable journal is told once it has been tried with a new connection."""
        if (offer := read_offer(self.folder.parent)) is not None:
            self.run |= way_in(offer)
        for is_last in (False, True):
            try:
                self._read()
                return
            except FileNotFoundError:
                self._close()
                self._edition = _edition(empty_state(self.run))
                return
            except JournalError as error:
                self._close()
                if is_last:
                    self._edition = _edition(self._edition.state, str(error))

    def _read(self) -> None:
        now = self._clock()
        if self._journal is None:
            self._journal = JournalReader(self.folder / FILE)
        version = self._journal.version()
        latest = self._edition.state["now"]
        status = status_of(self.run, latest if latest["time"] is not None else None, now)
        ways = self.run["ways"]
        if (version, status, ways) == self._seen and not self._edition.problem:
            return
        state = build_state(self._journal, self.run, now)
        self._seen = (version, state["run"]["status"], ways)
        self._edition = _edition(state)


def _is_picture(path: Path) -> bool:
    """A small PNG: what else lies in the folder is nobody's business."""
    try:
        with path.open("rb") as file:
            return path.stat().st_size <= LARGEST_PICTURE and file.read(len(PNG)) == PNG
    except OSError:
        return False


def _edition(state: State, problem: str = "") -> Edition:
    text = json.dumps([state, problem], sort_keys=True, allow_nan=False)
    return Edition(state, hashlib.sha256(text.encode()).hexdigest()[:20], problem)
