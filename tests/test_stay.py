"""A volunteer's stay with a stand-in worker: caps, pause, goodbye, and what others see of it."""

from __future__ import annotations

import time
from functools import partial

import pytest

from volunteer_kit.home import Home, Totals
from volunteer_kit.stay import Stay
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import OFFLINE, WorkerSpec
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


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(life, caps) -> a Stay that has begun."""
    (tmp_path / "stand_in_stay.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "births").mkdir()
    made = []

    def begin(life: dict | None = None, **caps) -> Stay:
        worker = partial(Supervisor, module="stand_in_stay", backoff=0.01)
        stay = Stay(Home(tmp_path / "home"), Progress(run_id="r"), make_worker=worker, **caps)
        made.append(stay)
        stay.warm_up()
        stay.begin(WorkerSpec(run={"births": str(tmp_path / "births"), **(life or {})}, name="ann"))
        return stay

    yield begin
    for stay in made:
        stay.close()


def until(stay: Stay, found, timeout: float = 30.0) -> Progress:
    deadline = time.monotonic() + timeout
    while not found(stay.progress):
        assert time.monotonic() < deadline, stay.progress
        time.sleep(0.02)
    return stay.progress


def over(stay: Stay, timeout: float = 30.0) -> Progress:
    deadline = time.monotonic() + timeout
    while not stay.over:
        assert time.monotonic() < deadline, stay.progress
        time.sleep(0.02)
    return stay.progress


def births(stay: Stay) -> int:
    return len(list((stay.home.path.parent / "births").iterdir()))


def test_it_trains_leaves_and_is_seen_from_other_processes(make):
    stay = make()
    until(stay, lambda p: p.my_samples == 100 and p.state == "training")
    deadline = time.monotonic() + 10
    while Home(stay.home.path).status().get("my_samples") != 100:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stay.leave()
    assert over(stay).state == "left" and births(stay) == 1
    assert Home(stay.home.path).status()["state"] == "left"


def test_a_pause_ends_the_worker_and_resuming_begins_another_one(make):
    stay = make()
    until(stay, lambda p: p.my_samples == 100)
    stay.pause()
    until(stay, lambda p: p.state == "paused")
    deadline = time.monotonic() + 20
    while stay.worker_pid is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not stay.over and stay.progress.my_samples == 100
    stay.resume()
    until(stay, lambda p: p.my_samples == 200 and p.state == "training")
    stay.leave()
    assert over(stay).state == "left" and births(stay) == 2


def test_resuming_before_the_worker_has_said_goodbye_is_not_forgotten(make):
    stay = make()
    until(stay, lambda p: p.my_samples == 100)
    stay.pause()
    stay.resume()
    until(stay, lambda p: p.my_samples == 200 and p.state == "training")
    stay.leave()
    assert over(stay).state == "left" and births(stay) == 2


def test_leaving_during_a_pause(make):
    stay = make()
    until(stay, lambda p: p.my_samples == 100)
    stay.pause()
    until(stay, lambda p: p.state == "paused")
    stay.leave()
    assert over(stay).state == "left"


@pytest.mark.parametrize(
    ("caps", "life", "words"),
    [
        ({"max_gb": 1e-6}, {"sent": 2000}, "0.000001 GB|1e-06 GB"),
        ({"max_hours": 0.5 / 3600}, {}, "hours"),
    ],
)
def test_caps(make, caps, life, words):
    progress = over(make(life, **caps))
    assert progress.state == "left" and any(word in progress.message for word in words.split("|"))


def test_below_the_caps_it_stays(make):
    stay = make({"sent": 100}, max_gb=1.0, max_hours=1.0)
    until(stay, lambda p: p.bytes_sent == 100)
    assert not stay.over


def test_a_finished_run_is_shared_for_a_while_and_left(make, monkeypatch):
    monkeypatch.setattr("volunteer_kit.stay.SHARE_FOR", 0.5)
    progress = over(make({"finishes": True}))
    assert progress.state == "finished" and "finished" in progress.message


def test_a_worker_that_crashes_or_loses_the_line_comes_back_by_itself(make):
    stay = make({"crashes": 2, "code": OFFLINE})
    progress = until(stay, lambda p: p.my_samples == 300 and p.state == "training")
    assert progress.restarts == 2 and any("Nobody could be reached" in text for _, text in progress.warnings)


def test_closing_leaves_no_process(make):
    stay = make()
    until(stay, lambda p: p.my_samples == 100)
    stay.close()
    assert stay.over and stay.worker_pid is None


def test_a_stay_that_never_began_is_closed_too(tmp_path, make):
    worker = partial(Supervisor, module="stand_in_stay")
    stay = Stay(Home(tmp_path / "other"), Progress(), make_worker=worker)
    stay.warm_up()
    stay.close()
    assert stay.worker_pid is None and births(make()) == 0


def test_the_token_is_in_the_pipe_and_nowhere_else(make, tmp_path):
    spec = WorkerSpec(run={"births": str(tmp_path / "births")}, hf_token="hf_secret_token")
    assert "hf_secret_token" not in repr(spec) + str(spec)
    stay = Stay(Home(tmp_path / "h"), Progress(), make_worker=partial(Supervisor, module="stand_in_stay"))
    stay.warm_up()
    stay.begin(spec)
    until(stay, lambda p: p.my_samples == 100)
    (birth,) = (tmp_path / "births").iterdir()
    assert "hf_secret_token" in birth.read_text()  # it came through stdin
    for name in ("environ", "cmdline"):
        assert b"hf_secret_token" not in (tmp_path.__class__(f"/proc/{stay.worker_pid}") / name).read_bytes()
    kept = [path for path in (tmp_path / "h").rglob("*") if path.is_file()]
    assert kept and not any(b"hf_secret_token" in path.read_bytes() for path in kept)
    stay.close()


def test_totals_of_before_are_shown_at_once(tmp_path):
    home = Home(tmp_path)
    home.save_totals(Totals(50, 5, 3600.0))
    assert home.totals().samples == 50
