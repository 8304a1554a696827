"""The memory of one process tree over time, and the line through it."""

from __future__ import annotations

import threading
import time

from scipy import stats

EVERY = 5.0  # s


class Watch:
    """Samples a machine's memory from `after` s on, until stop()."""

    def __init__(self, machine, after: float):
        self.last = 0.0  # bytes
        self._points: list[tuple[float, float]] = []  # (h, MB)
        self._machine, self._began, self._after = machine, time.monotonic(), after
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def slope(self) -> tuple[float, float, float]:
        """MB an hour by least squares, and the ends of its 95 % interval."""
        if len(self._points) < 3:
            return float("nan"), float("nan"), float("nan")
        hours, megabytes = zip(*self._points, strict=True)
        line = stats.linregress(hours, megabytes)
        margin = stats.t.ppf(0.975, len(hours) - 2) * line.stderr
        return line.slope, line.slope - margin, line.slope + margin

    def _run(self) -> None:
        while not self._stop.wait(EVERY):
            age = time.monotonic() - self._began
            if age >= self._after:
                self.last = self._machine.pss()
                self._points.append((age / 3600, self.last / 1e6))
