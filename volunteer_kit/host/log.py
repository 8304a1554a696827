"""A process's log that never takes more than its share of the disk."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 5_000_000  # of one file; the one before it is kept too, as NAME.1


class BoundedLog:
    """Lines of several threads, appended to one file. A full disk is no reason to stop what is logged."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES):
        self.path, self._max_bytes = path, max_bytes
        self._lock = threading.Lock()
        self._file = None
        self._size = 0

    def write(self, line: bytes) -> None:
        with self._lock, suppress(OSError):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
                self._size = self.path.stat().st_size
            if self._size + len(line) > self._max_bytes:
                self._turn_over()
            self._size += self._file.write(line) or 0

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _turn_over(self) -> None:
        self._file.close()
        os.replace(self.path, self.path.with_name(self.path.name + ".1"))
        self._file, self._size = open(self.path, "ab", buffering=0), 0  # noqa: SIM115
