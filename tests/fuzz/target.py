"""What is fuzzed: one decoder, what it may answer to bytes that it refuses, and how much they may cost."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.forms import RAW, Form

MODULES = (
    "messages", "tensors", "dht", "records", "rounds", "nodes", "verified", "states", "authority", "shards", "runs",
    "files",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """One decoder of bytes that somebody else wrote.

    :param decode: bytes -> whether they were accepted. It raises one of `refusals` for bytes that are refused
    :param seeds: valid inputs, made by our own encoders; at least one is accepted
    :param form: how the mutator sees the bytes
    :param max_bytes: longest input that is tried
    :param cpu_seconds: that one input may take
    :param memory_mb: that the process may grow by for one input
    """

    name: str
    decode: Callable[[bytes], bool]
    refusals: tuple[type[Exception], ...]
    seeds: Callable[[], Iterable[bytes]]
    form: Form = RAW
    max_bytes: int = 4096
    cpu_seconds: float = 2.0
    memory_mb: int = 256


@dataclass
class Registry:
    """The targets of one module, by name."""

    targets: dict[str, Target] = field(default_factory=dict)

    def add(
        self, seeds: Callable[[], Iterable[bytes]], *refusals: type[Exception], name: str = "", **options: Any
    ) -> Callable[[Callable[[bytes], bool]], Callable[[bytes], bool]]:
        """A decorator: the function becomes a target of its own name."""

        def register(decode: Callable[[bytes], bool]) -> Callable[[bytes], bool]:
            called = name or decode.__name__
            if called in self.targets:
                raise ValueError(f"two targets are called {called}")
            self.targets[called] = Target(called, decode, refusals, seeds, **options)
            return decode

        return register


class Fault(Exception):
    """The decoder did what it must not do with this input."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind  # inputs of one kind have one cause, most likely


def examine(target: Target, data: bytes) -> bool:
    """Decode one input. :returns: whether it was accepted. Raises Fault."""
    before, began = _peak_mb(), time.process_time()
    try:
        accepted = bool(target.decode(data))
    except target.refusals:
        accepted = False
    except Exception as error:
        raise Fault(_place_of(error), f"{type(error).__name__}: {str(error)[:200]}") from error
    took, grown = time.process_time() - began, _peak_mb() - before
    if took > target.cpu_seconds:
        raise Fault("slow", f"{took:.1f} s of processor time for {len(data)} bytes")
    if grown > target.memory_mb:
        raise Fault("memory", f"{grown:.0f} MB more memory for {len(data)} bytes")
    return accepted


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _place_of(error: Exception) -> str:
    """Type of an error and the line of the kit, or else the last line, where it arose."""
    frames, step = [], error.__traceback__
    while step is not None:
        frames.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    ours = [frame for frame in frames if "/volunteer_kit/" in frame[0]]
    file, line = (ours or frames)[-1]
    return f"{type(error).__name__}-{file.rpartition('/')[2].removesuffix('.py')}-{line}"
