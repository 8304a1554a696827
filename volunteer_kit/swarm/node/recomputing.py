"""The training process's part in verified rounds: keep the last models, and compute others' samples again.

A validator works between two microbatches of its own, a batch at a time. If it cannot do some work, nobody is struck:
the others ask another member later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch

from volunteer_kit.robust.sketch import sketch_slices
from volunteer_kit.swarm.node.talk import Recompute, Recomputed

logger = logging.getLogger(__name__)

LATER: Final = 4  # models beside those that contributions may be computed on: jurors come after validators
FEWEST: Final = 4  # models
MODELS_BYTES: Final = 4 * 2**30  # of all of them
MOST_DUTIES: Final = 256
AT_LEAST: Final = 1.0  # s of others' samples between two microbatches of our own
OF_OWN: Final = 2.0  # times our own microbatch's time


class Recomputer(Protocol):
    """Gradients of named samples, on a model that was.

    :param names: as the node tells them, texts
    :param parameters: of the model, in the optimizer's order
    :returns: batches of the work, each the sum of its samples' gradients of their own loss, in that order, float32 on
        the CPU; asked for one after the other, so that the trainer can go on in between. Raises DataError for samples
        that cannot be read
    """

    def __call__(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor]
    ) -> Iterator[Sequence[torch.Tensor]]: ...


class Recomputing:
    """Threads share it; one of them computes.

    :param model_bytes: of one model's parameters
    :param max_staleness: epochs
    :param sums: numbers of a sketch
    :param answer: hands what was computed to the node
    :ivar recompute: None: what this peer is asked for stays undone
    """

    def __init__(self, model_bytes: int, max_staleness: int, sums: int, answer: Callable[[Recomputed], Any]):
        fitting = MODELS_BYTES // max(1, model_bytes)
        self._kept = max(FEWEST, min(max_staleness + 1 + LATER, fitting))
        self._sums, self._answer = sums, answer
        self._models: OrderedDict[bytes, list[torch.Tensor]] = OrderedDict()  # by lineage
        self._asked: deque[Recompute] = deque(maxlen=MOST_DUTIES)
        self._work: Iterator[None] | None = None
        self._lock = threading.Lock()
        self.recompute: Recomputer | None = None

    def keep(self, lineage: bytes, parameters: Sequence[torch.Tensor]) -> None:
        """These are the parameters at this lineage; a copy is kept for a while."""
        copies = [parameter.detach().clone() for parameter in parameters]
        with self._lock:
            self._models[lineage] = copies
            self._models.move_to_end(lineage)
            while len(self._models) > self._kept:
                self._models.popitem(last=False)

    def ask(self, message: Recompute) -> None:
        """The node asks for it."""
        self._asked.append(message)

    def work_off(self, own_seconds: float) -> bool:
        """Compute others' samples, for a while. :returns: whether there were some

        :param own_seconds: that a microbatch of our own takes
        """
        deadline = time.monotonic() + max(AT_LEAST, OF_OWN * own_seconds)
        has_worked = False
        while time.monotonic() < deadline and (self._asked or self._work is not None):
            has_worked = True
            if self._work is None:
                self._work = self._compute(self._asked.popleft())
            try:
                next(self._work)
            except StopIteration:
                self._work = None
            except Exception as error:  # samples that cannot be read, a model that is gone
                logger.warning("Samples of another member could not be computed again: %r", error)
                self._work = None
        return has_worked

    def _compute(self, message: Recompute) -> Iterator[None]:
        """Answer one question, a batch at a time."""
        duty, totals = message.duty, []
        if self.recompute is None:
            return
        for first, last in duty.ranges:
            total = np.zeros((len(duty.slices), self._sums))
            for place, begin, end in _by_load(message, first, last):
                load = duty.loads[place]
                with self._lock:
                    model = self._models.get(message.models[place])
                if model is None:
                    raise LookupError(f"the model of epoch {load.birth} is not here any more")
                cells = [[float(load.parts >> cell & 1)] for cell in range(len(duty.slices))]
                factor = load.factor * np.array(cells)  # (cells, 1)
                names = [str(name) for name in duty.samples.names[begin:end]]
                for gradients in self.recompute(names, model):
                    total += factor * sketch_slices(gradients, duty.seed, duty.slices, self._sums)
                    yield
            totals.append(total)
        self._answer(Recomputed(duty, tuple(totals)))


def _by_load(message: Recompute, first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """(load, first, last): samples [first, last) of the list, by the load that they are of."""
    begin = 0
    for place, load in enumerate(message.duty.loads):
        end = begin + load.samples
        if max(begin, first) < min(end, last):
            yield place, max(begin, first), min(end, last)
        begin = end
