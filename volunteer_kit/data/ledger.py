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

    def applied(self, names: Collection) -> Applied:
        """A global step took the samples of these names; batches given before the last of them and not in it are
        lost."""
        names = set(names)
        batches = list(self._given)
        taken = [i for i, batch in enumerate(batches) if batch.names[0] in names]
        if not taken:
            return Applied(None, {})
        samples: dict[Lease, int] = {}
        for i in range(taken[-1] + 1):
            batch = self._given.popleft()
            if i not in taken:
                self.lost += len(batch.names)
                continue
            for lease, count in batch.leases.items():
                samples[lease] = samples.get(lease, 0) + count
        return Applied(batches[taken[-1]].after, samples)
