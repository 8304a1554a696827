"""Processes that hivemind forks: what they inherit and never look at."""

from __future__ import annotations

import gc
from contextlib import suppress

import hivemind
import torch

LARGE = 2**20  # bytes


def forget_inherited_tensors() -> None:
    """Give back the parent's tensors that are not shared memory. To be called first in a forked process.

    A fork has its parent's memory page by page until one of them writes: the parent soon rewrites model, gradients and
    statistics, and their old pages would stay in every forked process, 1.5 GB in each for the original's model.
    """
    for thing in gc.get_objects():
        if type(thing) not in (torch.Tensor, torch.nn.Parameter) or thing.device.type != "cpu":
            continue
        with suppress(RuntimeError):  # no plain memory, or not torch's own
            if thing.untyped_storage().nbytes() >= LARGE and not thing.is_shared():
                thing.untyped_storage().resize_(0)


class LeanDHT(hivemind.DHT):
    """hivemind.DHT whose process keeps nothing of the model."""

    def run(self) -> None:
        forget_inherited_tensors()
        super().run()
