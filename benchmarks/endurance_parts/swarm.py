"""A host and volunteers, each on a machine (network namespace) of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.network import Network

PORT = 31337  # of the host, in its own namespace
PATIENCE = 240.0  # s
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}",  # for the worker with faults
}


class Machine:
    """A process tree in a namespace."""

    def __init__(self, net: Network, number: int, log: Path, command: list[str]):
        self.number, self.log, self.command = number, log, command
        self._inside = ["ip", "netns", "exec", net.machines[number - 1]]
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._inside, *self.command], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=log, text=True,
                start_new_session=True, env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip

    def tree(self) -> list[psutil.Process]:
        """It and all that it has begotten; a worker has a session of its own."""
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal_all(self, number: int) -> None:
        for process in self.tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def pss(self) -> float:
        """Bytes of the tree, shared pages once."""
        total = 0
        for process in self.tree():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        return total

    def end(self, patience: float = 60.0) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        family = self.tree()
        self.process.send_signal(signal.SIGTERM)  # a shell starts what is in its background deaf to SIGINT
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            pass
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue


class Host(Machine):
    """The first peer, at an address that a restart keeps."""

    def __init__(self, net: Network, run: Path, scratch: Path):
        maddr = f"/ip4/{net.address(1)}/tcp/{PORT}"
        command = [sys.executable, "-m", "volunteer_kit.cli", "host", str(run), "--no-authority"]
        command += ["--folder", str(scratch / "host"), "--host-maddrs", maddr]
        super().__init__(net, 1, scratch / "host.log", command)

    def start(self) -> str:
        """Its address."""
        super().start()
        for line in self.process.stdout:
            if found := re.search(r"--initial-peers (\S+)", line):
                return found[1]
        raise SystemExit(f"The host did not start; see {self.log}")


class Volunteer(Machine):
    """One who is shown something every second; `samples` is what he sees as his."""

    def __init__(self, net: Network, number: int, run: Path, scratch: Path):
        self.home = scratch / f"volunteer-{number}"
        script = str(Path(__file__).with_name("volunteer.py"))
        command = [sys.executable, script, str(run), str(self.home), net.address(number)]
        super().__init__(net, number, scratch / f"volunteer-{number}.log", command)
        self.shown: dict = {"samples": 0, "state": "", "pid": None}
        self.lost = 0  # samples that he saw as counted, and later did not
        self.states: list[tuple[float, str]] = []

    def start(self) -> None:
        super().start()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            try:
                shown = json.loads(line)
            except ValueError:
                continue
            self.lost += max(0, self.shown["samples"] - shown["samples"])
            if shown["state"] != self.shown["state"]:
                self.states.append((time.time(), f"{shown['state']} {shown['detail']}".strip()))
            self.shown = shown

    @property
    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def events(self, kind: str) -> list[dict]:
        """All of his worker's so far."""
        path = self.home / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def wait_until(found: Callable[[], bool], patience: float = PATIENCE) -> bool:
    deadline = time.monotonic() + patience
    while not found():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True
