"""One target under atheris, in a process forked from one that has imported and instrumented all targets: to do that
takes longer than many a decoder needs to show its faults."""

from __future__ import annotations

import hashlib
import importlib
import logging
import mmap
import os
import random
import signal
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import atheris

from tests.fuzz.forms import Form
from tests.fuzz.target import Fault, Target, examine

# Python code whose branches are seen. What is written in C is not, but for what it makes of the bytes
SEEN = [
    "volunteer_kit", "hivemind.utils.serializer", "hivemind.dht", "hivemind.compression", "hivemind.utils.streaming",
    "pydantic.v1", "yaml",
]  # fmt: skip
FORMED = 0.75  # share of the mutations that keep the input's form
INPUT_SECONDS = 20  # of a wall clock; then an input counts as one without end
MEMORY_MB = 3000  # of the whole process, torch among it
MOST_STARTS = 5  # of one target's process, which crashes may end
OF_FUZZER = ("crash-", "timeout-", "oom-", "leak-", "slow-unit-")  # what libFuzzer calls an input that it writes down
SLACK = 60.0  # s that a process may need beyond its time to end by itself


@dataclass
class Result:
    """What came of fuzzing one target."""

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    executions: int = 0
    found: set[str] = field(default_factory=set)  # names of files


class Current:
    """The input that is being decoded, kept where it outlives the process: a stack that overflows leaves the fuzzer no
    moment to write it down. Counts the inputs, too."""

    HEAD = struct.Struct("<QQ")  # executions, bytes of the input

    def __init__(self, most_bytes: int) -> None:
        self._shared = mmap.mmap(-1, self.HEAD.size + most_bytes)
        self.executions = 0

    def note(self, data: bytes) -> None:
        self.executions += 1
        self._shared[: self.HEAD.size] = self.HEAD.pack(self.executions, len(data))
        self._shared[self.HEAD.size : self.HEAD.size + len(data)] = data

    def read(self) -> tuple[int, bytes]:
        executions, size = self.HEAD.unpack(self._shared[: self.HEAD.size])
        return executions, self._shared[self.HEAD.size : self.HEAD.size + size]


def load(modules: Iterable[str]) -> dict[str, Target]:
    """The targets of these modules, their decoders instrumented."""
    found: dict[str, Target] = {}
    with atheris.instrument_imports(include=SEEN):
        for module in modules:
            found |= importlib.import_module(f"tests.fuzz.targets.{module}").registry.targets
    return found


def fuzz(target: Target, seconds: float, corpus: Path, found: Path, log: Path) -> Result:
    """For so many seconds, restarts after crashes included. `found`: a folder for what must not be; `corpus`: one of
    inputs to begin from, which grows."""
    result, before = Result(target.name), _names(found)
    began = time.monotonic()
    for _ in range(MOST_STARTS):
        left = seconds - (time.monotonic() - began)
        if left < 1:
            break
        current, known = Current(target.max_bytes), _names(found)
        child = os.fork()
        if child == 0:
            try:
                _begin(target, left, corpus, found, log, current)
            finally:
                os._exit(1)
        status, cpu_seconds = _wait(child, left + SLACK)
        executions, data = current.read()
        result.executions += executions
        result.cpu_seconds += cpu_seconds
        if status == 0:
            break
        if not any(name.startswith(OF_FUZZER) for name in _names(found) - known):  # it had no moment to write one
            how = f"signal-{-status}" if status < 0 else f"exit-{status}"
            (found / f"{how}-{_digest(data)}").write_bytes(data)
        for path in corpus.iterdir():
            if path.read_bytes() == data:  # each new start would end with it
                path.unlink()
    result.seconds, result.found = time.monotonic() - began, _names(found) - before
    return result


def _wait(child: int, patience: float) -> tuple[int, float]:
    """Exit code (negative: a signal), and processor time in s."""
    until = time.monotonic() + patience
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            until = float("inf")
        time.sleep(0.05)


def _begin(target: Target, seconds: float, corpus: Path, found: Path, log: Path, current: Current) -> None:
    """In the forked process, which the fuzzer ends."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    logging.disable(logging.CRITICAL)

    def run(data: bytes) -> None:
        current.note(data)
        try:
            examine(target, data)
        except Fault as fault:  # noted once, and the fuzzer goes on: the next fault may be another one
            if not any(found.glob(f"{fault.kind}-*")):
                (found / f"{fault.kind}-{_digest(data)}").write_bytes(data)
                print(f"FOUND {fault.kind}: {fault}", file=sys.stderr, flush=True)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if type(target.form) is not Form and chance.random() < FORMED:
            try:
                changed = target.form.mutate(bytes(data), chance, lambda part: atheris.Mutate(part, len(part) + 64))
            except Exception:  # the bytes have not this form
                changed = b""
            if 0 < len(changed) <= max_size:
                return changed
        return atheris.Mutate(data, max_size)

    options = [
        f"-max_total_time={max(1, round(seconds))}", f"-timeout={INPUT_SECONDS}", f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={target.max_bytes}", f"-artifact_prefix={found}/", f"-report_slow_units={INPUT_SECONDS}",
        str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], run, custom_mutator=mutate)
    atheris.Fuzz()


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
