"""A clock that stands still, so that what was stored a year ago is neither late nor early, and is read as deep."""

from __future__ import annotations

import time

NOW = 1_800_000_000.0  # s since 1970


def freeze() -> None:
    """To be called before hivemind is imported, which keeps a name of its own for the clock. In a process that does
    nothing else: monotonic clocks go on."""
    time.time = lambda: NOW
