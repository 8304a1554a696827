"""Where a Trainer's peer is in its own data, which the number of the swarm's steps does not tell."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class OwnData:
    """Goes on after a checkpoint where this peer's data had been read to; and reads data without an end to no end.

    :param dataloader: the Trainer's
    :param steps: of this peer in one pass, as the Trainer reckons: without a length it takes max_steps for a pass
    :param accumulate: batches of a step
    :param saved: the checkpoint's trainer_state.json, {} for a beginning
    """

    def __init__(self, dataloader: Any, steps: int, accumulate: int, saved: dict[str, Any]):
        self.steps = StepsOfAPass(steps)
        self._iterator: Iterator | None = None
        self._batches_to_skip = self._steps_before = 0
        passes = saved.get("epoch") or 0.0
        self._length = _length(dataloader)
        if self._length is None:
            self._steps_before = round(passes * saved.get("max_steps", 0))
            self._batches_to_skip = self._steps_before * accumulate
        else:
            batches = round(passes % 1 * self._length)
            self.steps.done = int(passes) * steps + -(-batches // accumulate)

    def passes(self, steps: int) -> float | None:
        """Of data without a length, after so many more steps; None: the Trainer knows."""
        return (self._steps_before + steps) / self.steps if self._length is None else None

    def iterator(self, fresh: Iterator) -> Iterator:
        """What to read from. For the Trainer a pass over data without a length ends after max_steps of ours, `fresh` is
        the next, and what lies behind would never be read."""
        if self._length is not None:
            return fresh
        if self._iterator is None:
            self._iterator = fresh
            with torch.random.fork_rng(devices=[]):
                for _ in range(self._batches_to_skip):
                    next(fresh, None)
            self._batches_to_skip = 0
        return self._iterator

    def ended(self) -> None:
        """The iterator gives no more."""
        self._iterator = None


class StepsOfAPass(int):
    """To a Trainer that divides the swarm's steps by it, in order to know where it was, it answers by our own."""

    done = 0

    def __rfloordiv__(self, swarm_steps: int) -> int:
        return self.done // int(self)

    def __rmod__(self, swarm_steps: int) -> int:
        return self.done % int(self)


def saved_state(checkpoint: str | Path | None) -> dict[str, Any]:
    file = Path(checkpoint or "") / "trainer_state.json"
    return json.loads(file.read_text()) if checkpoint and file.is_file() else {}


def _length(dataloader: Any) -> int | None:
    try:
        return len(dataloader) or None
    except TypeError:
        return None
