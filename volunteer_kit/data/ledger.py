"""Which samples are in steps that were taken: what a restart must not read again, and what earns credit."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

from .leases import Lease
from .stream import Batch
from .walk import Position


class Applied(NamedTuple):
    """What one global step took in. `after`: all of the stream before it is done with; None: nothing of it was."""

    after: Position | None
    samples: dict[Lease, int]  # how many of each lease


class Ledger:
    """Batches on their way from the stream into a global step."""

    def __init__(self) -> None:
        self._given: deque[Batch] = deque()
        self.lost = 0  # samples that never entered a step: not finite, out of memory, or of a model given up

    def given(self, batch: Batch) -> Batch:
        """A batch leaves the stream."""
        self._given.append(batch)
        return batch

    def applied(self, names: Collection, waiting: Collection = ()) -> Applied:
        """A global step took the samples of these names; batches given before the last of them and not in it are
        lost, but for those of which samples are still `waiting` for a later step."""
        names = set(names)
        batches = list(self._given)
        taken = [i for i, batch in enumerate(batches) if batch.names[0] in names]
        if not taken:
            return Applied(None, {})
        samples: dict[Lease, int] = {}
        kept: list[Batch] = []
        after: Position | None = None
        for i in range(taken[-1] + 1):
            batch = self._given.popleft()
            if i in taken:
                for lease, count in batch.leases.items():
                    samples[lease] = samples.get(lease, 0) + count
            elif batch.names[0] in waiting:
                kept.append(batch)
            else:
                self.lost += len(batch.names)
            after = after if kept else batch.after
        self._given.extendleft(reversed(kept))
        return Applied(after, samples)
