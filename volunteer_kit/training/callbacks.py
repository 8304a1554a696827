"""Save checkpoints at global steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from volunteer_kit.checkpoint import CheckpointError, keep_last, save_checkpoint
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.trainer import Callback, Trainer

if TYPE_CHECKING:
    from volunteer_kit.swarm.node.member import NodeOptimizer

Emit = Callable[..., None]  # event name and fields -> the supervisor


class SaveCheckpoints(Callback):
    """Saves parameters and statistics every `every_seconds`, keeps the last few. A full disk is told, not fatal.

    :param names: parameter names, in the optimizer's order
    :param meta: run_id, fingerprint and what else a reader needs
    """

    def __init__(
        self, folder: str | Path, names: list[str], meta: dict[str, Any], emit: Emit, every_seconds: float = 600.0
    ):
        self.folder, self._names, self._meta, self._emit = Path(folder), names, meta, emit
        self._every, self._last = every_seconds, time.monotonic()

    def on_epoch(self, trainer: Trainer, report: StepReport, loss: float | None) -> None:
        if time.monotonic() - self._last >= self._every:
            self.save(trainer.optimizer)

    def save(self, optimizer: NodeOptimizer) -> Path | None:
        """Save now. :returns: the checkpoint's folder, None if it could not be saved (told as a warning)."""
        self._last = time.monotonic()
        try:
            tensors, metadata = optimizer.named_state(self._names)
            path = save_checkpoint(self.folder, tensors, {**self._meta, **metadata})
            keep_last(self.folder, 3)
        except CheckpointError as e:
            self._emit("warning", kind="checkpoint", message=str(e))
            return None
        self._emit("checkpoint", path=str(path), epoch=metadata["epoch"])
        return path
