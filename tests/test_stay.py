"""A volunteer's stay with a stand-in worker: caps, pause, goodbye, and what others see of it."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.stays import births, over, stays, until, until_the_worker_is_gone
from volunteer_kit.home import Home
from volunteer_kit.stay import Stay, last_seen, seen_elsewhere
from volunteer_kit.supervisor import Supervisor
from volunteer_kit.training.protocol import OFFLINE, WorkerSpec
from volunteer_kit.widgets import words
from volunteer_kit.widgets.progress import Progress


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(life, caps) -> a Stay that has begun."""
    with stays(tmp_path, monkeypatch) as begin:
        yield begin


def test_it_trains_leaves_and_is_seen_from_other_processes(make):
    stay = make()
    assert until(stay, lambda p: p.my_samples == 100 and p.state == "training").name == "ann"
    deadline = time.monotonic() + 60
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
    assert stay.worker_pid is None and births(stay) == 0


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


