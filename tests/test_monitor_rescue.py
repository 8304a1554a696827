"""Ordering everybody back: what could not be ordered is tried again, and who lies about his epoch does not move it."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from volunteer_kit.monitor import signing as signing_module
from volunteer_kit.monitor.judge import Look
from volunteer_kit.monitor.kept import Kept
from volunteer_kit.monitor.rescue import TRY_EVERY, Rescue
from volunteer_kit.monitor.signing import Signing
from volunteer_kit.swarm.manifest import MANIFEST_EVERY

RUINED = Look(30, finite=False)
GOOD = Kept(20, 0, "", "epoch-20", root="ab" * 32, total_bytes=9, chunk_size=9, confirmed=True)
ORDER = SimpleNamespace(resume_epoch=40, sequence=1, root=b"\xab" * 32)


@pytest.fixture
def scene(monkeypatch):
    """A Rescue without a network; `answers`: what comes of the orders that it gives."""
    scene = SimpleNamespace(answers=[], given=[], now=1000.0)
    scene.lookout = SimpleNamespace(is_our_turn=True)

    def order(one, pace):
        scene.given.append(one)
        return scene.answers.pop(0)

    member = SimpleNamespace(optimizer=Mock())
    kept, disbelief = SimpleNamespace(confirmed=[GOOD]), SimpleNamespace(lately=lambda now: [])
    pace, run = SimpleNamespace(epochs_per_second=lambda now: 1.0), SimpleNamespace(run_id="r")
    monkeypatch.setattr("time.monotonic", lambda: scene.now)
    signing = SimpleNamespace(order=order)
    scene.rescue = Rescue(run, member, kept, signing, scene.lookout, disbelief, Mock(), pace)
    return scene


def pass_time(scene) -> None:
    """The loop's chores, after a while; no new model is looked at."""
    scene.now += TRY_EVERY
    scene.rescue.look_after_the_others([], scene.now)


def test_an_order_that_nobody_took_is_given_again(scene):
    scene.answers = [None, None, ORDER]
    scene.rescue.help("not finite", RUINED, [])
    scene.rescue.look_after_the_others([], scene.now)
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


@pytest.mark.parametrize("claimed, most", [(32, 60), (10**8, 4000), (2**31 - 2, 4000)])
def test_who_claims_to_be_far_ahead_does_not_move_the_number(monkeypatch, claimed, most):
    """Epochs only go on: with such a number the run's schedule would be over."""
    made = []
    tracker = SimpleNamespace(global_epoch=claimed)
    optimizer = SimpleNamespace(local_epoch=30, tracker=tracker)
    member = SimpleNamespace(optimizer=optimizer, run_key="key", order=0)
    statements = SimpleNamespace(next_sequence=lambda kind: 1, expiry=lambda kind, now: now + 1000)
    signing = Signing.__new__(Signing)
    signing._member, signing._statements, signing._notes = member, statements, Mock()
    signing._manifest = lambda one: None
    signing._is_out = lambda order, kind: made.append(order) or True
    monkeypatch.setattr(signing_module, "Order", lambda **words: SimpleNamespace(**words))
    order = signing.order(GOOD, 1.0)
    assert order is made[0] and 33 <= order.resume_epoch <= most + MANIFEST_EVERY
