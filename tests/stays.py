"""Stays with a stand-in worker, and waiting for what becomes of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from volunteer_kit.home import Home
from volunteer_kit.stay import Stay
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import WorkerSpec
from volunteer_kit.widgets.progress import Progress

WORKER = r"""
import json, os, sys, time

def tell(event, **fields):
    print(json.dumps({"event": event, "time": time.time(), **fields}), flush=True)

line = sys.stdin.readline()
if not line:
    sys.exit(0)
spec = json.loads(line)
life = spec["run"]
born = life["births"] + "/" + str(os.getpid())
open(born, "w").write(line)
number = len(os.listdir(life["births"]))
tell("starting", pid=os.getpid(), name=spec["name"])
tell("state_loaded", epoch=3, source="peers")
tell("totals", samples=100 * number, epochs=number, seconds=9.0, waiting=0)
tell("traffic", sent=life.get("sent", 10), received=20)
if life.get("finishes"):
    tell("finished", epoch=9, path="", total_samples=5)
if number <= life.get("crashes", 0):
    sys.exit(life["code"])
for line in sys.stdin:
    tell("left", total_samples=5, epochs=1)
    break
"""


@contextlib.contextmanager
def stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stay]]:
    """Gives begin(life, companion, worker, **caps) -> a Stay that has begun."""
    (tmp_path / "stand_in_stay.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "births").mkdir()
    made = []

    def begin(life: dict | None = None, companion=None, worker=Supervisor, **caps) -> Stay:
        worker = partial(worker, module="stand_in_stay", backoff=0.01)
        stay = Stay(Home(tmp_path / "home"), Progress(run_id="r"), make_worker=worker, **caps)
        made.append(stay)
        stay.warm_up()
        stay.begin(WorkerSpec(run={"births": str(tmp_path / "births"), **(life or {})}, name="ann"), companion)
        return stay

    yield begin
    for stay in made:
        stay.close()


def until(stay: Stay, found: Callable[[Progress], object], timeout: float = 120.0) -> Progress:
    """`timeout` in s."""
    deadline = time.monotonic() + timeout
    while not found(stay.progress):
        assert time.monotonic() < deadline, stay.progress
        time.sleep(0.02)
    return stay.progress


def over(stay: Stay, timeout: float = 120.0) -> Progress:
    return until(stay, lambda progress: stay.over, timeout)


def until_the_worker_is_gone(stay: Stay) -> None:
    until(stay, lambda progress: stay.worker_pid is None)


def births(stay: Stay) -> int:
    return len(list((stay.home.path.parent / "births").iterdir()))
