"""Faults in a HomeSwarm, one after the other, and somebody who restarts what has ended."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import dataclass

from benchmarks.home_parts.swarm import HomeSwarm, Worker

KINDS = ("kill", "stop", "cut", "partition")
RESTART_AFTER = 1.0  # s; a supervisor's first wait
APART = 3  # workers on the smaller side of a partition
GIVEN_UP = 120.0  # s without being ready until a restarted worker counts as one that somebody would have to look after


@dataclass
class Fault:
    kind: str
    numbers: tuple[int, ...]  # workers, from 0
    at: float  # time.monotonic()
    until: float | None = None  # it was lifted; of a kill: the restarted process's first microbatch


class Supervisor:
    """Restarts ended workers of a swarm from what they stored, and says "go" to them when they are ready."""

    def __init__(self, swarm: HomeSwarm):
        self.swarm = swarm
        self.crashes = self.manual_actions = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        started: dict[int, float] = {}
        while not self._stop.wait(0.1):
            for number, worker in enumerate(self.swarm.now()):
                if (code := worker.process.poll()) is not None:
                    self.crashes += code != -signal.SIGKILL
                    worker.kill()  # what it has begotten may live
                    self._stop.wait(RESTART_AFTER)
                    if self._stop.is_set():
                        return
                    self.swarm.start(number)
                    started[number] = time.monotonic()
                elif number in started:
                    if worker.said("ready"):
                        worker.say("go")
                        del started[number]
                    elif time.monotonic() - started[number] > GIVEN_UP:
                        self.manual_actions += 1
                        worker.kill()


class Faults:
    """One every `every` s, kinds in turn, on workers drawn by `seed`; what can be lifted lasts `lasting` s."""

    def __init__(self, swarm: HomeSwarm, every: float, lasting: float, seed: int = 0):
        self.swarm, self.every, self.lasting = swarm, every, lasting
        self.faults: list[Fault] = []
        self._draw = random.Random(seed)

    def go_on(self, seconds: float) -> None:
        """Faults for so long; the last one is lifted."""
        end, number = time.monotonic() + seconds, 0
        while time.monotonic() + self.every <= end:
            began = time.monotonic()
            self._strike(KINDS[number % len(KINDS)])
            number += 1
            time.sleep(max(0.0, began + self.every - time.monotonic()))
        time.sleep(max(0.0, end - time.monotonic()))

    def _strike(self, kind: str) -> None:
        numbers = self._draw.sample(range(len(self.swarm.workers)), APART if kind == "partition" else 1)
        fault = Fault(kind, tuple(numbers), time.monotonic())
        self.faults.append(fault)
        worker, lab = self.swarm.now()[numbers[0]], self.swarm.lab
        machines = [number + 2 for number in numbers]
        if kind == "kill":
            worker.kill()
            return
        if kind == "stop":
            worker.signal(signal.SIGSTOP)
        elif kind == "cut":
            lab.cut(machines[0])
        else:
            lab.partition(machines)
        time.sleep(self.lasting)
        if kind == "stop":
            worker.signal(signal.SIGCONT)
        else:
            for machine in machines:
                lab.mend(machine)
        fault.until = time.monotonic()


def first_microbatch(worker: Worker) -> float | None:
    """time.monotonic() of its first beat that has computed something."""
    return next((beat["at"] - beat["computed"] for beat in worker.said("beat")), None)


def settle_kills(swarm: HomeSwarm, faults: list[Fault]) -> None:
    """When did the restarted processes begin?"""
    for fault in faults:
        if fault.kind == "kill":
            begun = [first_microbatch(worker) for worker in swarm.workers[fault.numbers[0]]]
            fault.until = min((at for at in begun if at is not None and at > fault.at), default=None)
