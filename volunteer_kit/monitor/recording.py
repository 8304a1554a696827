"""Metrics as lines of JSON, and to trackio or Weights & Biases: in a thread that nobody waits for."""

from __future__ import annotations

import importlib
import json
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from volunteer_kit.packages import require_tracker

WAITING = 256  # rows; what comes while a tracker does not answer is dropped, newest first
FILE_LIMIT = 64 * 2**20  # bytes of metrics.jsonl; then it is put aside, and the one put aside before is lost
TRACKERS = {"trackio": "trackio", "wandb": "Weights & Biases"}  # module -> what people call it


class Tracker(Protocol):
    """trackio's and wandb's common part."""

    def init(self, **settings: Any) -> Any: ...
    def log(self, metrics: dict[str, Any], step: int | None = None) -> None: ...
    def finish(self) -> None: ...


def find_tracker(name: str) -> Tracker:
    """Raises MissingDependency with the install line."""
    require_tracker(name)
    return importlib.import_module(name)


class Recorder:
    """Writes rows of numbers.

    :param path: metrics.jsonl
    :param tracker: None: the file only
    :param settings: for tracker.init
    :param complain: told in words what does not work
    """

    def __init__(self, path: Path, tracker: Tracker | None, settings: dict[str, Any], complain: Callable[[str], None]):
        self._path, self._tracker, self._settings, self._complain = path, tracker, settings, complain
        self._rows: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=WAITING)
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def record(self, row: dict[str, Any]) -> None:
        """Returns at once."""
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self.dropped += 1

    def close(self, patience: float = 3.0) -> None:
        """Write what waits, for `patience` s at most."""
        try:
            self._rows.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(patience)

    def _run(self) -> None:
        tracker = self._begin()
        while (row := self._rows.get()) is not None:
            try:
                self._write(row)
            except OSError as error:
                self._complain(f"{self._path} cannot be written: {error.strerror or error}.")
            if tracker is not None:
                try:
                    numbers = {key: value for key, value in row.items() if key != "time" and value is not None}
                    tracker.log(numbers, step=row["epoch"])
                except Exception as error:  # whatever a tracker of a hundred thousand lines comes up with
                    self._complain(f"The tracker does not take the metrics: {error!r}"[:300])
        if tracker is not None:
            try:
                tracker.finish()
            except Exception as error:
                self._complain(f"The tracker did not finish: {error!r}"[:300])

    def _begin(self) -> Tracker | None:
        if self._tracker is None:
            return None
        try:
            self._tracker.init(**self._settings)
        except Exception as error:
            self._complain(f"The tracker does not start, metrics are in the journal only: {error!r}"[:300])
            return None
        return self._tracker

    def _write(self, row: dict[str, Any]) -> None:
        line = json.dumps(row, allow_nan=False) + "\n"
        with open(self._path, "ab+") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else f"\n{line}"  # the last one was cut off
            file.write(line.encode())
            size = file.tell()
        if size > FILE_LIMIT:
            os.replace(self._path, self._path.with_name("metrics.1.jsonl"))
