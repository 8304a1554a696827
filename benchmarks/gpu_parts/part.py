"""The arguments of a part of benchmarks/gpu.py, and how it tells its findings."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """Where a part measures, and for how long."""

    device: str  # "cuda" or "cpu"
    tiny: bool  # sizes that a CPU gets through in seconds
    folder: Path  # an empty one of its own
    seconds: float  # until the part is ended
    began: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """s until it is ended."""
        return self.began + self.seconds - time.monotonic()


class Tell:
    """tell(name=figure, ...), as soon as it is known: what was told survives whatever happens to the part."""

    def __init__(self, write: Callable[..., None]):
        self._write = write

    def __call__(self, **figures: Any) -> None:
        self._write(**figures)

    def summary(self, text: str) -> None:
        """The part's line in the table."""
        self._write(summary=text)


def gigabytes_peak(device: str) -> float | None:
    """Peak memory of this process on the card, since it began or the peak was reset; None on a CPU."""
    if device != "cuda":
        return None
    import torch

    return torch.cuda.max_memory_reserved() / 1e9


def synchronize(device: str) -> None:
    """Until all that was queued is done: a GPU's clock is not the program's."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
