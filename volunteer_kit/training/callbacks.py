"""What happens around global steps: keep a good copy, save checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from volunteer_kit.checkpoint import CheckpointError, is_finite, keep_last, save_checkpoint
from volunteer_kit.swarm.optimizer import StepReport, SwarmOptimizer
from volunteer_kit.training.trainer import Callback, Trainer

Emit = Callable[..., None]  # event name and fields -> the supervisor


class KeepGoodState(Callback):
    """Holds a copy of the last training state that was finite and not worse; puts it back when the model breaks.

    Averaging refuses values that are not finite, so a broken model means broken everywhere at once (a learning rate
    too high, say). The copy costs as much RAM as parameters and statistics together.

    :param every: epochs between copies
    """

    def __init__(self, emit: Emit, every: int = 10):
        self._emit, self._every = emit, every
        self._good: list[torch.Tensor] | None = None
        self._good_epoch = 0

    def on_epoch(self, trainer: Trainer, report: StepReport, loss: float | None) -> None:
        if not trainer.optimizer.complete:
            return  # parameters and statistics of two moments would be no state to go back to
        state = trainer.optimizer.training_state()
        parameters = state[: len(trainer.optimizer.state_averager.main_parameters)]
        if (loss is not None and not math.isfinite(loss)) or not is_finite(parameters):
            self._restore(trainer.optimizer)
        elif self._good is None or report.epoch >= self._good_epoch + self._every:
            with trainer.optimizer.state_averager.get_tensors():
                if self._good is None:
                    self._good = [tensor.clone() for tensor in state]
                else:
                    for copy, tensor in zip(self._good, state, strict=True):
                        copy.copy_(tensor)
            self._good_epoch = report.epoch

    def _restore(self, optimizer: SwarmOptimizer) -> None:
        if self._good is None:
            self._emit("warning", kind="not_finite", message="The model is no longer finite and there is no good copy.")
            return
        optimizer.restore(self._good)
        self._emit(
            "warning",
            kind="restored",
            message=f"The model was no longer finite; the copy of epoch {self._good_epoch} is back, training goes on.",
        )


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
            self.save(trainer.optimizer, certain=True)

    def save(self, optimizer: SwarmOptimizer, certain: bool = False) -> Path | None:
        """Save now. :returns: the checkpoint's folder, None if it could not be saved (told as a warning).

        :param certain: as of SwarmOptimizer.named_state
        """
        self._last = time.monotonic()
        try:
            tensors, metadata = optimizer.named_state(self._names, certain)
            path = save_checkpoint(self.folder, tensors, {**self._meta, **metadata})
            keep_last(self.folder, 3)
        except CheckpointError as e:
            self._emit("warning", kind="checkpoint", message=str(e))
            return None
        self._emit("checkpoint", path=str(path), epoch=metadata["epoch"])
        return path
