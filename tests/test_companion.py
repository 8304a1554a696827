"""A second volunteer on the machine: it comes up first, pauses and leaves with the first one, and may fail alone."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.stays import births, over, stays, until
from volunteer_kit.companion import Companion
from volunteer_kit.home import Home
from volunteer_kit.stay import PAUSED_BY_YOU, Stay
from volunteer_kit.supervisor import Supervisor

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
    with stays(tmp_path, monkeypatch) as begin:
        yield begin


@pytest.fixture
def make_companion(tmp_path, monkeypatch):
    """make_companion(life) -> the real one, whose worker is a stand-in."""
    (tmp_path / "stand_in_companion.py").write_text(COMPANION)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "companions").mkdir()
    made = []

    def build(worker=Supervisor, **life) -> Companion:
        run = {"companions": str(tmp_path / "companions"), **life}
        config = SimpleNamespace(dumped_for_worker=lambda: run, optimizer=SimpleNamespace(total_epochs=None))
        made.append(
            Companion(config, Home(tmp_path / "other"), make_worker=partial(worker, module="stand_in_companion"))
        )
        return made[-1]

    yield build
    for companion in made:
        companion.close()


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
        until(stay, lambda p, capped=bool(caps): "comes up" in p.detail or (capped and p.state == "left"))
        wish(stay)
        assert over(stay).state == "left"
        assert births(stay) == 0 and not companion.running and stay.worker_pid is None


def test_a_pause_while_the_companion_comes_up(make, make_companion, tmp_path):
    companion = make_companion(silent=True)
    stay = make(companion=companion)
    until(stay, lambda p: "comes up" in p.detail)
    stay.pause()
    until(stay, lambda p: p.detail == PAUSED_BY_YOU)
    assert not companion.running and stay.worker_pid is None
    stay.resume()
    until(stay, lambda p: "comes up" in p.detail and companion.running)
    assert births(stay) == 0


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


def test_the_reason_of_an_end_is_not_lost_where_both_come_at_once(make_companion):
    """It gives up in the moment between the look for events and the look whether it runs."""

    class EndsMeanwhile(Supervisor):
        looks, events = 0, [{"event": "gave_up", "message": "No room."}]

        @property
        def running(self) -> bool:
            self.looks += 1
            return self.looks == 1

        def next_event(self, timeout):
            return self.events.pop() if self.looks > 1 and self.events else None

    companion = make_companion(EndsMeanwhile)
    companion.drain()
    companion.drain()
    assert companion.error == "No room."


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


def test_a_fault_at_the_end_does_not_keep_anybody_waiting(make, make_companion, monkeypatch):
    companion = make_companion()
    stay = make(companion=companion)
    until(stay, lambda p: p.my_samples == 100)
    monkeypatch.setattr(companion, "leave", lambda: 1 / 0)
    monkeypatch.setattr(stay.home, "save_status", lambda status: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    stay.leave()
    assert over(stay).state == "failed" and not companion.running and stay.home.lock()
