"""One trial: some machines, one system, so many seconds; and the row that it comes to."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from benchmarks.home_parts import ledger
from benchmarks.home_parts.ledger import Account
from benchmarks.home_parts.material import EPOCH, line_scale, make_pool, make_run, speeds_apart
from benchmarks.home_parts.swarm import HomeSwarm, pressure
from benchmarks.netlab import Line
from volunteer_kit.run_sizes import state_bytes
from volunteer_kit.runs import load_run

MICROBATCHES = 32  # of each device in an epoch: as short beside matchmaking as a real one is
LEAST_BURST = 16.0  # kB; ten packets
BURST_SECONDS = 0.002  # of a fast line; the kernel's timers are not finer
WARM_UP = 2  # epochs, of the slowest worker, that are not counted: the first rounds begin when the workers do
WARM_UP_PATIENCE = 90.0  # s; a system that has not made its first epochs by then is measured as it is
REFRESH = 1.5  # s; hivemind's own is 0.5 at least, and dilated looks fill lines: see material.py
LEAST_STEPS = 2  # of each worker, for which a trial may take twice its time


@dataclass(frozen=True)
class Trial:
    """:param name: what its row is called
    :param system: kit, stock or ddp
    :param lines: of the workers, before they are scaled
    :param seconds: measured
    :param ratio: between the fastest and the slowest device
    :param swarm: fields of the run file's section `swarm`
    :param stock: of stock.py
    :param epoch: s in which all devices together compute target_batch_size samples; None: the original's, dilated
    :param refresh_period: s between plain hivemind's looks at the others' progress
    :param real_every: microbatches with one real backward pass
    :param microbatches: of each device in an epoch
    """

    name: str
    system: str
    lines: Sequence[Line]
    seconds: float = 60.0
    model: str = "4m"
    dilation: float = 15.0
    ratio: float = 16.0
    target_batch_size: int = 4096
    swarm: dict[str, Any] = field(default_factory=dict)
    stock: dict[str, Any] = field(default_factory=dict)
    epoch: float | None = None
    refresh_period: float = REFRESH
    real_every: int = 8
    microbatches: int = MICROBATCHES

    def run(self) -> dict[str, Any]:
        return make_run(self.model, self.target_batch_size, self.dilation, **self.swarm)

    @property
    def joins_fast(self) -> bool:
        """Return whether the lines are wide until all workers are ready: those of the kit take the state of one."""
        return self.system == "kit"

    @property
    def state_bytes(self) -> float:
        """The bytes of parameters and statistics."""
        return state_bytes(load_run(self.run()))

    @property
    def epoch_seconds(self) -> float:
        return self.epoch or EPOCH / self.dilation

    @property
    def speeds(self) -> Sequence[float]:
        return speeds_apart(len(self.lines), self.ratio, self.target_batch_size / self.epoch_seconds)

    def scaled_lines(self) -> list[Line]:
        scale = line_scale(self.run(), self.dilation)
        return [scaled(line, scale) for line in self.lines]

    def settings(self, folder: Path) -> dict[str, Any]:
        """Of all workers. Raises RunError."""
        run = self.run()
        load_run(run)
        make_pool(run, folder / "pool.safetensors")
        pool = str(folder / "pool.safetensors")
        return {
            "refresh_period": self.refresh_period,
            "system": self.system,
            "run": run,
            "pool": pool,
            "real": 1,
            "real_every": self.real_every,
        }

    def each(self) -> list[dict[str, Any]]:
        """Settings of each worker alone."""
        speeds = self.speeds
        found = []
        for number, (speed, line) in enumerate(zip(speeds, self.lines, strict=True)):
            one = {"speed": speed, "batch": max(1, round(speed * self.epoch_seconds / self.microbatches))}
            one["client_mode"] = line.nat
            if self.system == "ddp":
                door = HomeSwarm.address_of(0)
                one["ddp"] = {
                    "number": number, "workers": len(speeds), "total_speed": sum(speeds), "door": door,
                }  # fmt: skip
            if self.system == "stock":
                one["stock"] = self.stock
            found.append(one)
        return found


def scaled(line: Line, by: float) -> Line:
    down, up = line.down and by * line.down, line.up and by * line.up
    burst = max(LEAST_BURST, BURST_SECONDS * 125 * max(down or 0.0, up or 0.0), min(1.0, by) * line.burst)
    return replace(line, down=down, up=up, burst=burst)


@dataclass
class Outcome:
    """The result of a trial. `pressure`: share of the time in which somebody stood ready for a core and had none.
    `warm_up`: s from the start until the measured time began."""

    trial: Trial
    accounts: list[Account]
    curve: list[tuple[float, float]]  # (s since the start, loss)
    rounds: list[float]  # s
    pressure: float
    failures: dict[str, int]
    warm_up: float

    @property
    def total(self) -> Account:
        return reduce(add, self.accounts, Account())

    @property
    def goodput(self) -> float:
        """Of the devices' seconds; a worker that has made no two steps in the window has none."""
        walls = max((account.wall for account in self.accounts), default=0.0)
        missing = sum(walls for account in self.accounts if not account.wall)
        total = self.total
        return total.applied / max(1e-9, total.wall + missing - total.contention)

    @property
    def samples_per_second(self) -> float:
        """Applied, by all devices."""
        return sum(account.samples / account.wall for account in self.accounts if account.wall)

    def bytes_per_sample(self) -> float:
        """On all lines, sent."""
        return self.total.wire_sent / max(1, self.total.samples)

    def row(self) -> str:
        total = self.total
        steps = max(1, total.steps)
        shares = "".join(f"{total.share(s):>8.3f}" for s in (total.lost, total.waiting, total.own_work))
        contention = total.contention / max(1e-9, total.wall)
        return (
            f"{self.trial.name:<34}{self.goodput:>8.3f}{shares}{contention:>8.3f}{self.pressure:>9.2f}"
            f"{ledger.middle(self.rounds):>8.1f}{total.complete / steps:>9.2f}{total.failed:>5}/{total.steps:<5}"
            f"{8e-6 * total.wire_sent / max(1e-9, total.wall):>8.2f}"
            f"{8e-6 * total.control_sent / max(1e-9, total.wall):>8.2f}{self.bytes_per_sample() / 1e3:>10.1f}"
            f"{ledger.last_loss(self.curve):>9.3f}{self.warm_up:>9.0f}"
        )


HEAD = (
    f"{'':<34}{'goodput':>8}{'lost':>8}{'waiting':>8}{'(own)':>8}{'cont.':>8}{'pressure':>9}{'round s':>8}"
    f"{'complete':>9}{'failed':>8}   {'Mbit/s':>8}{'(ctrl)':>8}{'kB/sample':>10}{'loss':>9}{'warm-up':>9}"
)
WORDS = """goodput: seconds of devices whose samples entered an applied step / (wall seconds - contention); lost:
computed, and not applied; waiting: between microbatches, of which (own) is what the optimizer itself computed; cont.:
contention, of the wall seconds; pressure: of the time, somebody on this machine wanted a core and had none; complete:
steps in a group of all; Mbit/s: sent by a worker, headers included, (ctrl) all but gradients and averages, of the kit
only; kB/sample: sent, for each applied sample; warm-up: s that passed before, until the slowest worker's third step"""


def perform(trial: Trial, keep: Path | None = None) -> Outcome:
    """Raises NoNetlab; RunError; SystemExit if a worker does not start, or ends.

    :param keep: a folder for the workers' events and logs
    """
    with tempfile.TemporaryDirectory(prefix="home-links-") as name:
        folder = Path(name)
        with HomeSwarm(folder, trial.scaled_lines(), trial.settings(folder), trial.each(), trial.joins_fast) as swarm:
            swarm.go()
            warm = 1 if trial.system == "ddp" else WARM_UP + 1  # its first step is as all others
            swarm.wait_until(lambda: swarm.slowest() >= warm, WARM_UP_PATIENCE)
            begin, pressed, steps = time.monotonic(), pressure(), swarm.slowest()
            swarm.wait_until(lambda: False, trial.seconds)
            swarm.wait_until(lambda: swarm.slowest() >= steps + LEAST_STEPS, trial.seconds)
            end, pressed = time.monotonic(), pressure() - pressed
            if trial.system == "kit":  # its last step takes what was under way
                swarm.leave()
            events = [worker.events[:] for worker in swarm.now()]
            if keep is not None:
                swarm.keep(keep / trial.name.replace(" ", "-").replace("/", "-"))
            return settle(trial, events, swarm.began, begin, end, pressed / (end - begin))


def settle(trial: Trial, events: list[list[dict]], began: float, begin: float, end: float, pressed: float) -> Outcome:
    workers = len(events)
    failures: dict[str, int] = {}
    for event in (e for one in events for e in one if e.get("failure")):
        failures[event["failure"]] = failures.get(event["failure"], 0) + 1
    return Outcome(
        trial=trial,
        accounts=[
            ledger.account(one, speed, workers, begin, end)
            for one, speed in zip(events, trial.speeds, strict=True)
        ],
        curve=[(s, loss) for s, loss in ledger.losses(events, began) if s <= end - began],
        rounds=ledger.round_seconds(events, begin, end),
        pressure=pressed,
        failures=failures,
        warm_up=begin - began,
    )
