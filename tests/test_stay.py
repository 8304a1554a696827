"""A volunteer's stay with a stand-in worker: caps, pause, goodbye, and what others see of it."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from volunteer_kit.companion import Companion
from volunteer_kit.home import Home, Totals
from volunteer_kit.stay import PAUSED_BY_YOU, Stay, last_seen, seen_elsewhere
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import OFFLINE, WorkerSpec
from volunteer_kit.widgets import words
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
COMPANION = r"""
import json, os, sys, time
life = json.loads(sys.stdin.readline())["run"]
open(life["companions"] + "/" + str(os.getpid()), "w").close()
if not life.get("silent"):
    maddrs = ["/ip4/127.0.0.1/tcp/7/p2p/" + str(os.getpid())]
    event = {"event": "connected", "time": time.time(), "peer_id": "Qm", "maddrs": maddrs, "client_mode": False}
    print(json.dumps(event), flush=True)
if life.get("refuses"):
    print(json.dumps({"event": "error", "time": time.time(), "kind": "k", "message": "No room.\n1. Make some."}))
    sys.exit(2)
sys.stdin.readline()
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(life, caps) -> a Stay that has begun."""
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


def until_the_worker_is_gone(stay: Stay) -> None:
    deadline = time.monotonic() + 20
    while stay.worker_pid is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def make_companion(tmp_path, monkeypatch):
    """make_companion(life) -> the real one, whose worker is a stand-in."""
    (tmp_path / "stand_in_companion.py").write_text(COMPANION)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "companions").mkdir()
    made = []

    def build(worker=Supervisor, **life) -> Companion:
        run = {"companions": str(tmp_path / "companions"), **life}
        config = SimpleNamespace(model_dump=lambda mode: run, optimizer=SimpleNamespace(total_epochs=None))
        made.append(
            Companion(config, Home(tmp_path / "other"), make_worker=partial(worker, module="stand_in_companion"))
        )
        return made[-1]

    yield build
    for companion in made:
        companion.close()


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
    assert until(stay, lambda p: p.my_samples == 100 and p.state == "training").name == "ann"
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
    until_the_worker_is_gone(stay)
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


def test_the_last_wish_holds(make):
    stay = make()
    until(stay, lambda p: p.my_samples == 100)
    for wish in (stay.pause, stay.resume, stay.pause):
        wish()
    until_the_worker_is_gone(stay)
    gone = time.time()
    until(stay, lambda p: p.updated > gone + 1 or p.state == "training")
    assert stay.progress.state == "paused" and births(stay) == 1
    stay.leave()
    assert over(stay).state == "left" and births(stay) == 1


def test_leaving_during_a_pause(make):
    stay = make()
    until(stay, lambda p: p.my_samples == 100)
    stay.pause()
    until(stay, lambda p: p.state == "paused")
    stay.leave()
    assert over(stay).state == "left"


@pytest.mark.parametrize(
    ("caps", "life", "says"),
    [
        ({"max_gb": 1e-6}, {"sent": 2000}, "Your limit of 1.0 kB is"),
        ({"max_hours": 1 / 3600}, {}, "Your limit of 1 s is"),
    ],
)
def test_caps(make, caps, life, says):
    progress = over(make(life, **caps))
    assert progress.state == "left" and says in progress.message


def test_new_caps_hold_for_a_stay_that_goes_on_and_count_from_its_beginning(make):
    stay = make({"sent": 2000}, max_gb=1.0)
    until(stay, lambda p: p.bytes_sent == 2000)
    stay.limit(1.0, None)
    stay._began -= 3599.0
    assert "Your limit of 1 h is" in over(stay).message


def test_a_cap_that_is_not_given_again_stays(make):
    stay = make({"sent": 2000}, max_gb=1.0)
    until(stay, lambda p: p.bytes_sent == 2000)
    stay.limit(1.0, 1e-6)
    stay.limit(2.0, None)
    assert "Your limit of 1.0 kB is" in over(stay).message


def test_below_the_caps_it_stays(make):
    stay = make({"sent": 100}, max_gb=1.0, max_hours=1.0)
    until(stay, lambda p: p.bytes_sent == 100)
    assert not stay.over


def test_a_finished_run_is_shared_for_a_while_and_left(make, monkeypatch):
    monkeypatch.setattr("volunteer_kit.stay.SHARE_FOR", 0.5)
    progress = over(make({"finishes": True}))
    assert progress.state == "finished" and "\n".join(words.summary(progress)).count("finished") == 1


def test_a_finished_run_is_not_paused(make):
    stay = make({"finishes": True})
    until(stay, lambda p: p.state == "finished")
    stay.pause()
    stay.leave()
    assert over(stay).state == "finished"


def test_a_worker_that_crashes_or_loses_the_line_comes_back_by_itself(make):
    stay = make({"crashes": 2, "code": OFFLINE})
    progress = until(stay, lambda p: p.my_samples == 300 and p.state == "training")
    assert progress.restarts == 2 and any("Nobody could be reached" in text for _, text in progress.warnings)


def test_closing_leaves_no_process(make):
    stay = make()
    until(stay, lambda p: p.my_samples == 100)
    stay.close()
    assert stay.over and stay.worker_pid is None


# A second volunteer on this machine


def companions(tmp_path: Path) -> int:
    return len(list((tmp_path / "companions").iterdir()))


def specs(stay: Stay) -> list[dict]:
    """What the workers were told, in their order."""
    found = sorted((stay.home.path.parent / "births").iterdir(), key=lambda path: path.stat().st_mtime)
    return [json.loads(path.read_text()) for path in found]


def test_a_pause_is_the_companions_too(make, make_companion, tmp_path):
    companion = make_companion()
    stay = make(companion=companion)
    until(stay, lambda p: p.my_samples == 100)
    stay.pause()
    until(stay, lambda p: p.detail == PAUSED_BY_YOU)
    assert not companion.running and companions(tmp_path) == 1
    stay.resume()
    until(stay, lambda p: p.my_samples == 200 and p.state == "training")
    first, second = (spec["initial_peers"] for spec in specs(stay))
    assert companion.running and companions(tmp_path) == 2 and second == companion.maddrs != first
    assert not stay.progress.warnings
    stay.leave()
    assert over(stay).state == "left" and not companion.running


def test_leaving_and_caps_while_the_companion_comes_up(make, make_companion):
    for caps, wish in (({}, Stay.leave), ({"max_hours": 0.5 / 3600}, lambda stay: None), ({}, Stay.close)):
        companion = make_companion(silent=True)
        stay = make(companion=companion, **caps)
        until(stay, lambda p: "comes up" in p.detail)
        wish(stay)
        assert over(stay, timeout=10).state == "left"
        assert births(stay) == 0 and not companion.running and stay.worker_pid is None


def test_a_pause_while_the_companion_comes_up(make, make_companion, tmp_path):
    companion = make_companion(silent=True)
    stay = make(companion=companion)
    until(stay, lambda p: "comes up" in p.detail)
    stay.pause()
    until(stay, lambda p: p.detail == PAUSED_BY_YOU, timeout=10)
    assert not companion.running and stay.worker_pid is None
    stay.resume()
    until(stay, lambda p: "comes up" in p.detail)
    assert companion.running and births(stay) == 0


def test_a_companion_that_is_late_is_ended_and_the_worker_begins_alone(make, make_companion, monkeypatch):
    monkeypatch.setattr("volunteer_kit.companion.STARTUP", 0.5)
    companion = make_companion(silent=True)
    stay = make(companion=companion)
    progress = until(stay, lambda p: p.my_samples == 100)
    ((_, warning),) = progress.warnings
    assert "did not start: it did not answer within two minutes" in warning and "alone" in warning
    assert not companion.running and specs(stay)[0]["initial_peers"] == []


def test_a_dead_companion_is_told_once(make, make_companion):
    stay = make(companion=make_companion(refuses=True))
    ((when, warning),) = until(stay, lambda p: p.my_samples == 100 and p.warnings).warnings
    assert "has left: No room. Yours goes on alone" in warning
    progress = until(stay, lambda p: p.updated > when + 1)
    assert progress.warnings == [(when, warning)] and progress.state == "training"


def test_what_is_closed_before_it_starts_does_not_start(make_companion, tmp_path):
    class ClosedMeanwhile(Supervisor):
        def start(self):
            companion.close()
            super().start()

    for companion in (make_companion(), make_companion(ClosedMeanwhile)):
        if companion._worker.__class__ is Supervisor:
            companion.close()
        companion.start()
        assert not companion.running
    assert companions(tmp_path) == 0


# What should not happen


class Breaks(Supervisor):
    def next_event(self, timeout=None):
        raise RuntimeError("the floor is wet")


def test_a_fault_of_ours_is_no_thank_you(make):
    stay = make(worker=Breaks)
    progress = over(stay)
    assert progress.state == "failed" and "the floor is wet" in progress.message and "\n1. " in progress.message
    assert str(stay.home.log) in progress.message and "Traceback" in stay.home.log.read_text()
    assert stay.worker_pid is None and stay.home.lock() and last_seen(stay.home).state == "failed"


def test_a_fault_at_the_end_does_not_keep_anybody_waiting(make, make_companion, monkeypatch):
    companion = make_companion()
    stay = make(companion=companion)
    until(stay, lambda p: p.my_samples == 100)
    monkeypatch.setattr(companion, "leave", lambda: 1 / 0)
    monkeypatch.setattr(stay.home, "save_status", lambda status: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    stay.leave()
    assert over(stay).state == "failed" and not companion.running and stay.home.lock()


def test_what_others_saved_of_themselves(tmp_path):
    home = Home(tmp_path)
    assert last_seen(home) is None
    for unreadable in ({"state": "flying"}, {"state": ["training"]}, {"updated": "noon"}):
        home.save_status(unreadable)
        assert last_seen(home) is None and seen_elsewhere(home).state == "training"
    home.save_status(Progress(state="averaging").as_dict())
    assert last_seen(home).state == "averaging" and seen_elsewhere(home).is_elsewhere


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
