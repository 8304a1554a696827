"""A monitor's end of the pipe to its node: what it is told of steps, and how it orders everybody back."""

from __future__ import annotations

import hashlib
import threading

import pytest
import torch

from tests.test_node_member import BORN, LATER, NEXT, PATIENCE, Scene
from tests.waiting import wait_until
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.node.member import order_number
from volunteer_kit.swarm.node.talk import (
    Brought,
    Check,
    Checked,
    Founded,
    GiveOrder,
    History,
    Load,
    OrderToSign,
    PrepareOrder,
    StateWritten,
    Step,
    StepOf,
    Stepped,
    WriteState,
)
from volunteer_kit.swarm.sync.entries import RollbackOrder

NAMES = ["weight", "bias"]
ORDER = RollbackOrder(1, 7, 9, BORN, ())


@pytest.fixture
def peer(tmp_path):
    scene = Scene(tmp_path)
    scene.heard_steps = []
    scene.member.on_steps = scene.heard_steps.extend
    scene.found()
    yield scene
    scene.end()


def test_who_observes_is_told_of_each_step_and_of_the_logs_tail(peer):
    told = peer.step_of(shares=(Brought("a", "ada", 2.5),))
    peer.link.say(History((StepOf(BORN, b"", 0, 0, is_step=False),)), Step(told), Step(peer.step_of(LATER, NEXT, 2)))
    wait_until(lambda: len(peer.heard_steps) == 3)
    assert [step.lineage for step in peer.heard_steps] == [BORN, NEXT, LATER]
    assert peer.heard_steps[1] == told


def test_a_member_that_takes_no_microbatch_follows(peer):
    for place in range(3):
        lineage = bytes([place])
        peer.link.say(Step(peer.step_of(lineage, BORN if not place else bytes([place - 1]), place + 1)))
        assert peer.link.hear(Stepped).lineage == lineage
    assert peer.member.local_epoch == 3 and peer.member.order == 0
    tensors, about = peer.member.named_state(NAMES)
    assert (about["epoch"], about["order"]) == (3, 0) and not torch.equal(tensors["weight"], peer.model.weight)


def test_it_goes_on_looking_for_the_runs_model(tmp_path):
    scene = Scene(tmp_path)
    for _ in range(2):
        with pytest.raises(SwarmError) as error:
            scene.member.join(0.05)
        assert error.value.kind == "dead_peers" and scene.member.lineage is None
    assert len(scene.specs) == 1, "one node"
    scene.link.say(Founded(BORN, 0))
    assert scene.member.join(PATIENCE) is False and scene.member.lineage == BORN
    scene.end()


def ask(peer, sign=lambda digest: b"signed " + digest):
    """An order in a thread, as the monitor's loop gives it."""
    checkpoint, found = peer.member.named_state(NAMES), []
    thread = threading.Thread(target=lambda: found.append(peer.member.order_back(*checkpoint, sign)))
    thread.start()
    return thread, found


def test_the_monitor_orders_everybody_back(peer):
    thread, found = ask(peer)
    asked = peer.link.hear(PrepareOrder)
    assert asked.parent == BORN and hashlib.sha256(asked.path.read_bytes()).digest() == asked.digest
    peer.link.say(OrderToSign(ORDER, b"digest"))
    assert peer.link.hear(GiveOrder) == GiveOrder(ORDER, b"signed digest")
    thread.join(PATIENCE)
    assert found == [ORDER]

    before = peer.flat()
    peer.link.say(Step(peer.step_of()))
    assert peer.link.hear(Stepped).lineage == NEXT
    peer.link.say(Check(asked.path))
    assert peer.link.hear(Checked) == Checked(asked.path, "", BORN, 0)
    order = StepOf(LATER, BORN, ORDER.generation, ORDER.epoch, is_step=False, sequence=ORDER.sequence)
    peer.link.say(Load(BORN, 0, asked.path, (order,), "rollback"))
    assert peer.link.hear(Stepped).lineage == LATER
    tensors, about = peer.member.named_state(NAMES)
    assert torch.equal(torch.cat([tensors[name].flatten() for name in NAMES]), before)
    assert about["epoch"] == ORDER.epoch and about["order"] == peer.member.order == order_number(1, 7)
    wait_until(lambda: peer.heard_steps[-1:] == [order])
    peer.link.say(Step(peer.step_of(b"on", LATER, 10)))
    assert peer.link.hear(Stepped).lineage == b"on"


def test_a_state_says_which_order_is_in_it(peer):
    peer.link.say(WriteState(peer.folder / "state"))
    peer.link.hear(StateWritten)
    peer.link.say(Load(BORN, 0, peer.folder / "state", (), "behind", 3, 4))
    assert peer.link.hear(Stepped).lineage == BORN
    assert peer.member.order == order_number(3, 4) > order_number(2, 2**32 - 1)


def test_no_order_is_given_by_who_is_in_no_run(peer):
    thread, found = ask(peer)
    peer.link.hear(PrepareOrder)
    peer.link.say(OrderToSign(None))
    thread.join(PATIENCE)
    assert found == [None] and not any(isinstance(each, GiveOrder) for each in peer.link.has_said())
