"""Decode what is stored, without a fuzzer: each target in a process of its own, which may die of it."""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fuzz.frozen_clock import freeze
from tests.fuzz.target import MODULES, Fault, Target, examine

HERE = Path(__file__).parent
CORPUS, FOUND = HERE / "corpus", HERE / "found"
PATIENCE = 120  # s for one target's inputs


@dataclass
class Outcome:
    """What came of one target's inputs. `fault`: of the first that does what it must not do, "" for none."""

    name: str
    inputs: int = 0
    accepted_seeds: int = 0
    fault: str = ""


def targets() -> dict[str, Target]:
    """All of them, by name."""
    found: dict[str, Target] = {}
    for module in MODULES:
        registry = importlib.import_module(f"tests.fuzz.targets.{module}").registry
        if twice := found.keys() & registry.targets.keys():
            raise ValueError(f"two targets are called {', '.join(twice)}")
        found |= registry.targets
    return found


def stored(name: str) -> Iterator[tuple[str, bytes]]:
    """A target's corpus, and then each input that it once failed on, with their names."""
    path = CORPUS / f"{name}.zip"
    if path.is_file():
        with zipfile.ZipFile(path) as pack:
            for member in sorted(pack.namelist()):
                yield f"{path.name}/{member}", pack.read(member)
    for path in sorted((FOUND / name).glob("*")):
        yield f"{FOUND.name}/{name}/{path.name}", path.read_bytes()


def store(name: str, inputs: Iterable[bytes]) -> Path:
    """Pack a corpus: the same file for the same inputs."""
    CORPUS.mkdir(exist_ok=True)
    path = CORPUS / f"{name}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        for number, data in enumerate(inputs):
            member = zipfile.ZipInfo(f"{number:03d}")
            member.compress_type = zipfile.ZIP_DEFLATED
            pack.writestr(member, data)
    return path


def replay(name: str, target: Target, report: int) -> None:
    """In a process of its own: tells each input before it is decoded, and last the outcome, as lines of `report`."""
    outcome = Outcome(name)
    seeds = [(f"seed {number}", data) for number, data in enumerate(target.seeds())]
    for called, data in [*seeds, *stored(name)]:
        os.write(report, f"{called}\n".encode())
        outcome.inputs += 1
        try:
            accepted = examine(target, data)
        except Fault as fault:
            outcome.fault = outcome.fault or f"{called}: {fault}"
            continue
        outcome.accepted_seeds += accepted and called.startswith("seed")
    os.write(report, (json.dumps(asdict(outcome)) + "\n").encode())


def in_own_process(name: str, target: Target, patience: float = PATIENCE) -> Outcome:
    """The outcome, also where the decoder ends its process or does not end by itself."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            faulthandler.disable()  # it would trace a crash that is expected here into somebody's log
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(patience))
            replay(name, target, writing)
        except BaseException as error:  # noqa: BLE001  told in words: there is nobody above us
            os.write(writing, f"{type(error).__name__}: {error}\n".replace("\n", " ").encode() + b"\n")
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as lines:
        told = lines.read().splitlines()
    _, status = os.waitpid(child, 0)
    code, last = os.waitstatus_to_exitcode(status), told[-1] if told else "before its first input"
    if code == 0:
        return Outcome(**json.loads(last))
    if code == -signal.SIGALRM:
        return Outcome(name, len(told), fault=f"{last}: no end within {patience:.0f} s")
    how = f"signal {-code} ended the process" if code < 0 else "an error outside of the decoder"
    return Outcome(name, len(told), fault=f"{last}: {how}")


def main(names: list[str]) -> int:
    """One JSON line for each target."""
    known = targets()
    faults = 0
    for name in names or known:
        began = time.monotonic()
        outcome = in_own_process(name, known[name])
        print(json.dumps(asdict(outcome) | {"seconds": round(time.monotonic() - began, 2)}), flush=True)
        faults += bool(outcome.fault)
    return min(faults, 1)


if __name__ == "__main__":
    freeze()
    sys.exit(main(sys.argv[1:]))
