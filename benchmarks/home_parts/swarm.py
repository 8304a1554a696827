"""Workers in a Netlab: started, listened to, killed, restarted; everything reaped.

Machine 1 is the first peer's, on a line as fast as the kernel; it trains nothing. Workers live on machines 2 and on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.netlab import Line, Netlab

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0  # s until all workers are ready
JOINING = {"down": 1000.0, "up": 1000.0, "burst": 256.0}  # Mbit/s, Mbit/s, kB


class Worker:
    """One process of worker.py, alone on its machine."""

    def __init__(self, lab: Netlab, machine: int, log: Path, settings: dict):
        self.settings, self.events = settings, []
        self.log, self._lab, self._machine = log, lab, machine
        self.process = subprocess.Popen(
            [*lab.inside(machine), sys.executable, "-m", "benchmarks.home_parts.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("a"), text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip
        self.say(json.dumps(settings))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with contextlib.suppress(ValueError):
                self.events.append(json.loads(line))

    def say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def said(self, name: str) -> list[dict]:
        return [event for event in list(self.events) if event["event"] == name]

    def wait_for(self, name: str, patience: float = PATIENCE) -> dict:
        """Its first event of this name. Raises SystemExit."""
        deadline = time.monotonic() + patience
        while not (found := self.said(name)):
            if time.monotonic() > deadline or self.process.poll() is not None:
                why = "ended" if self.process.poll() is not None else f"took more than {patience:g} s"
                raise SystemExit(f"A worker {why} before {name!r}: {self.log}\n{self.log.read_text()[-2000:]}")
            time.sleep(0.05)
        return found[0]

    def signal(self, number: int) -> None:
        """Send a signal to all processes on its machine: the node, and p2pd, which has left its process group."""
        for process in self._lab.processes(self._machine):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def kill(self) -> None:
        """Nothing lives on its machine afterwards."""
        while self._lab.processes(self._machine):
            self.signal(signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait(10)


class HomeSwarm:
    """:param lines: of the workers
    :param settings: what all workers have in common
    :param each: what each has beside
    :param joins_fast: the lines are JOINING until all are ready: a run of the kit begins with one peer's state, which
        all others take from there
    """

    def __init__(
        self,
        folder: Path,
        lines: Sequence[Line],
        settings: dict,
        each: Sequence[dict],
        joins_fast: bool = False,
    ):
        self.folder, self.settings, self.each = folder, settings, each
        self._narrowed = [line for line in lines if joins_fast]
        self.lab = Netlab([Line(), *(replace(line, **JOINING) if joins_fast else line for line in lines)])
        self.workers: list[list[Worker]] = [[] for _ in each]  # all processes that each machine has had
        self.began = 0.0

    def __enter__(self) -> HomeSwarm:
        self.lab.__enter__()
        try:
            first = {"system": "bootstrap", "address": self.lab.address(1)}
            self._first = Worker(self.lab, 1, self.folder / "first.log", first)
            self._invited = self._first.wait_for("connected")["maddrs"]
            for number in range(len(self.each)):
                self.start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, number: int) -> Worker:
        """A worker on its machine, from 0; again, if it had one."""
        folder = self.folder / f"worker-{number}-{len(self.workers[number])}"  # ours: a killed worker removes nothing
        own = {
            "folder": str(folder), **self.settings, **self.each[number], "address": self.address_of(number),
            "seed": number, "initial_peers": self._invited,
        }  # fmt: skip
        worker = Worker(self.lab, number + 2, self.folder / f"worker-{number}.log", own)
        self.workers[number].append(worker)
        return worker

    @staticmethod
    def address_of(number: int) -> str:
        """Of worker `number`, from 0."""
        return Netlab.address(number + 2)

    def go(self) -> None:
        """When all are ready, they begin together."""
        for worker in self.now():
            worker.wait_for("ready")
        for machine, line in enumerate(self._narrowed, start=2):
            self.lab.reshape(machine, line)
        self.began = time.monotonic()
        for worker in self.now():
            worker.say("go")

    def now(self) -> list[Worker]:
        return [processes[-1] for processes in self.workers]

    def wait_until(self, found: Callable[[], bool], patience: float) -> bool:
        """Raises SystemExit when a worker has ended that nobody killed."""
        deadline = time.monotonic() + patience
        while not found():
            for worker in self.now():
                if worker.process.poll() not in (None, -signal.SIGKILL):
                    raise SystemExit(f"A worker ended: {worker.log}\n{worker.log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
        return True

    def slowest(self) -> int:
        """Steps of the worker that has made fewest."""
        return min(len(worker.said("step")) for worker in self.now())

    def leave(self, patience: float = 20.0) -> None:
        """All workers end, as far as they do in time."""
        for worker in self.now():
            worker.say("leave")
        self.wait_until_ended(patience)

    def wait_until_ended(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for worker in self.now():
            while not worker.said("finished") and worker.process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)

    def keep(self, folder: Path) -> None:
        """Events and logs of all processes so far, and when the trial began."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "began.json").write_text(json.dumps({"began": self.began, "each": self.each}))
        for number, processes in enumerate(self.workers):
            for life, worker in enumerate(processes):
                lines = "".join(json.dumps(event) + "\n" for event in list(worker.events))
                (folder / f"worker-{number}-{life}.jsonl").write_text(lines)
            shutil.copy(processes[-1].log, folder)

    def __exit__(self, *_) -> None:
        for worker in [w for processes in self.workers for w in processes] + [getattr(self, "_first", None)]:
            if worker is not None:
                worker.kill()
        self.lab.__exit__()


def pressure() -> float:
    """s in which somebody on this machine stood ready for a core and had none; nan where the kernel does not say."""
    try:
        some = Path("/proc/pressure/cpu").read_text().splitlines()[0]
    except OSError:
        return float("nan")
    return int(some.split("total=")[1]) * 1e-6
