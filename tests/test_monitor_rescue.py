"""Ordering everybody back: what could not be ordered is tried again."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from volunteer_kit.monitor.judge import Look
from volunteer_kit.monitor.kept import Kept
from volunteer_kit.monitor.rescue import TRY_EVERY, Rescue

RUINED = Look(30, finite=False)
GOOD = Kept(20, 0, "", "epoch-20", root="ab" * 32, total_bytes=9, chunk_size=9, confirmed=True)
ORDER = SimpleNamespace(resume_epoch=40, sequence=1, root=b"\xab" * 32)


@pytest.fixture
def scene(monkeypatch):
    """A Rescue without a network; `answers`: what comes of the orders that it gives."""
    scene = SimpleNamespace(answers=[], given=[], now=1000.0)
    scene.lookout = SimpleNamespace(is_our_turn=True)

    def order(one):
        scene.given.append(one)
        return scene.answers.pop(0)

    member = Mock()
    kept, run = SimpleNamespace(confirmed=[GOOD]), SimpleNamespace(run_id="r")
    monkeypatch.setattr("time.monotonic", lambda: scene.now)
    signing = SimpleNamespace(order=order)
    scene.rescue = Rescue(run, member, kept, signing, scene.lookout, Mock())
    return scene


def pass_time(scene) -> None:
    """The loop's chores, after a while; no new model is looked at."""
    scene.now += TRY_EVERY
    scene.rescue.try_again(scene.now)


def test_an_order_that_nobody_took_is_given_again(scene):
    scene.answers = [None, None, ORDER]
    scene.rescue.help("not finite", RUINED, [])
    scene.rescue.try_again(scene.now)
    assert len(scene.given) == 1, "not at once"
    for _ in range(4):
        pass_time(scene)
    assert scene.given == [GOOD, GOOD, GOOD], "and no more once it is out"


def test_a_monitor_whose_turn_it_becomes_goes_on_with_it(scene):
    scene.answers, scene.lookout.is_our_turn = [ORDER], False
    scene.rescue.help("not finite", RUINED, [])
    pass_time(scene)
    assert scene.given == []
    scene.lookout.is_our_turn = True  # the other one has died
    pass_time(scene)
    assert scene.given == [GOOD]


def test_a_ruin_that_has_passed_is_forgotten(scene):
    scene.lookout.is_our_turn = False
    scene.rescue.help("not finite", RUINED, [])
    scene.rescue.calm()
    scene.lookout.is_our_turn = True
    pass_time(scene)
    assert scene.given == []
