"""The trainer's side of the tuner: apply its setting, time the microbatch, read the memory, tell when it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class Setting(Protocol):
    """What a machine chooses for each microbatch."""

    @property
    def batch_size(self) -> int: ...  # samples

    @property
    def checkpointing(self) -> bool: ...  # recompute activations in backward


class Tunes(Protocol):
    """Chooses settings from what it is told of the last ones; device.Tuner does."""

    settled: bool  # measuring is over
    why: str

    def next(self) -> Setting: ...

    def measured(
        self, setting: Setting, samples: int, seconds: float, peak_bytes: float, limit_bytes: float, idle_bytes: float
    ) -> None: ...

    def out_of_memory(self, setting: Setting) -> None: ...  # raises MemoryError if a single sample does not fit


class Memory(Protocol):
    """Of the device that computes; device.memory_meter() gives one."""

    def begin(self) -> None: ...  # forget the peak, give back what is only cached

    def peak_bytes(self) -> float: ...  # since then

    def limit_bytes(self) -> float: ...  # that the peak could reach now, before memory runs out


class Chosen(NamedTuple):
    batch_size: int
    checkpointing: bool


class Halving:
    """A batch size that somebody has chosen: it stays, unless memory runs out."""

    settled = True

    def __init__(self, batch_size: int, checkpointing: bool):
        self._setting = Chosen(batch_size, checkpointing)
        self.why = f"a batch of {batch_size}, as asked for"

    def next(self) -> Chosen:
        return self._setting

    def measured(self, *_: object) -> None: ...

    def out_of_memory(self, setting: Setting) -> None:
        if setting.batch_size > 1:
            self._setting = Chosen(setting.batch_size // 2, setting.checkpointing)
        elif not setting.checkpointing:
            self._setting = Chosen(1, True)
        else:
            raise MemoryError
        self.why = f"a batch of {self._setting.batch_size}, because memory ran out"


class Tuning:
    """Between the loop and what chooses its settings.

    :param memory: None: not measured (a Halving needs none)
    :param on_plan: (setting, why), called when the tuner has settled, which may be before the first microbatch, and
        whenever it changes its mind after that
    """

    def __init__(
        self, tuner: Tunes, memory: Memory | None = None, on_plan: Callable[[Setting, str], None] | None = None
    ):
        self._tuner, self._memory, self._on_plan = tuner, memory, on_plan
        self.setting = tuner.next()
        self._applied: Setting | None = None
        self._idle = 0.0  # bytes taken between microbatches
        self._told: Setting | None = None
        self._is_first = True  # microbatch of this process: it pays for all that is loaded and compiled once

    @property
    def settled(self) -> bool:
        """Whether measuring is over."""
        return self._tuner.settled

    def prepare(self, model: torch.nn.Module) -> Setting:
        """Apply the setting of the next microbatch to the model. :returns: it"""
        if self.setting != self._applied:
            self._applied = self.setting
            if getattr(model, "checkpointing", None) not in (None, self.setting.checkpointing):
                model.checkpointing = self.setting.checkpointing
            if self._memory is not None and not self._tuner.settled:
                self._memory.begin()
                self._idle = self._memory.peak_bytes()
            self._tell()
        return self.setting

    def measured(self, samples: int, seconds: float) -> None:
        """A microbatch of the setting took so long. The first one, and one of another size (the stream's end), say
        nothing."""
        if self._is_first:
            self._is_first = False
            return
        if self._memory is None or self._tuner.settled or samples != self.setting.batch_size:
            return
        peak, limit = self._memory.peak_bytes(), self._memory.limit_bytes()
        self._tuner.measured(self.setting, samples, seconds, peak, limit, self._idle)
        self.setting = self._tuner.next()
        self._tell()

    def out_of_memory(self) -> None:
        """Take a smaller setting. Raises torch.OutOfMemoryError if there is none."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what is left of it is in pieces of the wrong size
        try:
            self._tuner.out_of_memory(self.setting)
        except MemoryError:
            raise torch.OutOfMemoryError("a single sample does not fit into this device's memory") from None
        self._applied = None
        self.setting = self._tuner.next()
        self._tell()

    def _tell(self) -> None:
        if self._tuner.settled and self.setting != self._told:
            self._told = self.setting
            if self._on_plan is not None:
                self._on_plan(self.setting, self._tuner.why)


# A host's, Metal's and XLA's allocators raise a plain RuntimeError.
SIGNS = (
    "RESOURCE_EXHAUSTED",
    "out of memory",
    "Ran out of memory",
    "can't allocate memory",
    "not enough memory",
    "ALLOC_FAILED",  # cuBLAS and cuDNN, asking for their workspace
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, could not give the memory that a microbatch asked for."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign.lower() in str(error).lower() for sign in SIGNS)
