"""The monitor's word: stand on what it signed, go back when it orders so; and members under two orders."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tests.lone_optimizer import nobody_comes
from volunteer_kit.auth.keys import Trust
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.swarm.acceptance import StateTrust
from volunteer_kit.swarm.agreement import (
    BEGINNING,
    SKETCH_SIZE,
    common_order,
    out_of_step,
    rank_donors,
    read_all,
    read_told,
    under_order,
    whom_to_follow,
)
from volunteer_kit.swarm.manifest import Order
from volunteer_kit.swarm.missed_rounds import UNDER_WAY
from volunteer_kit.swarm.obeying import lineage_after
from volunteer_kit.swarm.optimizer import SwarmOptimizer, SwarmOptions
from volunteer_kit.swarm.state import digest
from volunteer_kit.swarm.stored_state import manifest_of

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))
KEY = "obeying"

# --- members under two orders ---


def told(epoch: int, order: int = 0, value: float = 1.0) -> list:
    words = [epoch, np.full(SKETCH_SIZE, value, "<f4").tobytes(), BEGINNING]
    return [*words, order] if order else words


OLD, NEW = told(40), told(48, 1)


@pytest.mark.parametrize(
    "members, common, left_out",
    [
        ({A: OLD, B: OLD}, 0, set()),
        ({A: OLD, B: OLD, C: NEW}, 0, {C}),  # the first who obeyed is alone with it
        ({A: OLD, B: NEW, C: NEW}, 1, {A}),
        ({A: OLD, B: NEW}, 1, {A}),
        ({A: NEW, B: NEW, C: told(48, 2**40)}, 1, {C}),  # invented
        ({A: NEW, B: NEW, C: told(90)}, 1, {C}),  # the old swarm's epoch is the higher number
    ],
)
def test_two_orders_do_not_mix_and_nobody_follows_across(members, common, left_out):
    assert common_order(read_all(members)) == common
    assert set(out_of_step(members, members)) == left_out
    for peer in members:
        assert whom_to_follow(members, peer, members) is None, "neither back nor forth: an order is obeyed, not voted"


def test_under_one_order_all_is_as_before():
    members = {A: told(48, 1), B: told(48, 1), C: told(48, 1, value=2.0), D: told(99)}
    assert whom_to_follow(members, C, members).donors == (A, B)
    assert rank_donors(members, [D, C, B, A], order=1)[:2] == [B, A] and D not in rank_donors(members, [D], order=1)
    assert rank_donors(members, [D, C, B, A])[0] == D, "who has no monitor asks anybody"


def test_an_order_is_read_with_care_and_told_only_if_there_was_one():
    assert read_told(OLD).words() == OLD and read_told(NEW).words() == NEW and read_told(NEW).order == 1
    assert not read_told(told(48, 1)).is_same(read_told(told(48, 2)))
    for order in (-1, True, 1.0, "1", 2**60, None):
        assert read_told([*OLD, order]) is None


def test_groups_are_of_one_order():
    assert under_order(b"tensors", 0) == b"tensors", "as ever, where there was none"
    assert len({under_order(b"tensors", 0), under_order(b"tensors", 1), under_order(b"tensors", 2)}) == 3


# --- one peer that obeys ---


@pytest.fixture(scope="module")
def optimizer(peer, keys, tmp_path_factory):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    optimizer = SwarmOptimizer(
        peer=peer,
        options=SwarmOptions(run_key=KEY, target_batch_size=16, matchmaking_time=1.0, delay_optimizer_step=False),
        params=list(model.parameters()),
        optimizer=lambda params: Lamb(params, lr=0.02),
    )
    trust = Trust.of("run", keys.root_public)
    folder = tmp_path_factory.mktemp("states")
    optimizer.trust_states(StateTrust(trust, KEY, folder, step_bound=lambda p, first, last: [1e9] * len(p)))
    yield optimizer
    optimizer.shutdown()


def train(optimizer, epochs: int) -> None:
    last, deadline = optimizer.local_epoch + epochs, time.monotonic() + 60
    while optimizer.local_epoch < last:
        optimizer.zero_grad()
        for parameter in optimizer.state_averager.main_parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step(batch_size=8)
        assert time.monotonic() < deadline


def sign_state(optimizer, keys):
    """What a monitor does with the state that this peer holds."""
    statements, now = optimizer.statements, get_dht_time()
    manifest, _ = manifest_of(
        optimizer.state_averager,
        optimizer.state_averager.trust.folder,
        KEY,
        statements.next_sequence("manifest"),
        now,
        statements.expiry("manifest", now),
    )
    assert statements.publish(keys.signer("monitor").sign, manifest)
    return manifest


def test_an_order_is_obeyed_once_and_the_epoch_goes_on(optimizer, keys):
    train(optimizer, 3)
    good = [tensor.clone() for tensor in optimizer.training_state()]
    manifest = sign_state(optimizer, keys)
    assert manifest.epoch == optimizer.local_epoch
    train(optimizer, 2)
    assert digest(optimizer.training_state()) != digest(good)
    optimizer.grad_averager.local_samples_accumulated = 8

    statements, now = optimizer.statements, get_dht_time()
    order = Order(KEY, 1, optimizer.local_epoch + 8, now, statements.expiry("rollback", now), manifest)
    assert statements.publish(keys.signer("monitor").sign, order)
    deadline, optimizer._next_order_lookup = time.monotonic() + 60, 0.0
    while not optimizer.obey_orders():
        assert time.monotonic() < deadline
        time.sleep(0.02)

    averager = optimizer.state_averager
    assert digest(optimizer.training_state()) == digest(good), "parameters and statistics"
    assert optimizer.local_epoch == averager.told[0] == order.resume_epoch and averager.obeyed == 1
    assert averager.told[2:] == [lineage_after(order), 1], "equal on all who obey, whenever they do"
    assert optimizer.grad_averager.local_samples_accumulated == 0
    assert torch.equal(averager.main_parameters[0].detach(), good[0]), "the model that trains, too"
    assert not optimizer.obey(order) and statements.sequences["rollback"] == 1
    train(optimizer, 1)
    assert averager.told[3] == 1 and averager.metadata()["order"] == 1


def test_after_an_order_a_manifest_carries_it(optimizer, keys):
    manifest = sign_state(optimizer, keys)
    assert manifest.order == 1 and manifest.sequence == 2
    assert not optimizer.stand_on_checkpoint(), "we are there already"
    train(optimizer, 1)
    optimizer.state_averager._order, optimizer.state_averager.local_epoch = 0, 0  # as on a new machine
    assert optimizer.stand_on_checkpoint(), "the state after the order, and the old one is not asked for"
    assert optimizer.local_epoch == manifest.epoch and optimizer.state_averager.obeyed == 1


def test_an_order_without_its_state_is_not_obeyed_yet(optimizer, keys):
    manifest = dataclasses.replace(sign_state(optimizer, keys), root=b"n" * 32, total_bytes=5000)
    order = Order(KEY, 9, 10_000, 1.0, get_dht_time() + 500, manifest)
    before = digest(optimizer.training_state())
    assert not optimizer.obey(order, timeout=1.0)
    assert digest(optimizer.training_state()) == before and optimizer.state_averager.obeyed == 1
    train(optimizer, 1)


def test_a_missed_round_is_asked_for_and_orders_are_looked_for_meanwhile(optimizer, keys, monkeypatch):
    """Both shared one timer once, and the lookups of orders left the recovery no turn."""
    train(optimizer, 1)
    manifest, statements = sign_state(optimizer, keys), optimizer.statements
    asked: list[float] = []

    def others_answer(told, donors, patience):
        asked.append(time.monotonic())
        return UNDER_WAY

    monkeypatch.setattr(optimizer.grad_averager, "make_up_for", others_answer)
    nobody_comes(optimizer, monkeypatch)
    optimizer.step(batch_size=8)
    assert asked, "the round that nobody came to is asked for at once"
    asked.clear()

    def step_until(reached) -> None:
        deadline = time.monotonic() + 60
        while not reached():
            assert optimizer.step(batch_size=8)
            assert time.monotonic() < deadline
            time.sleep(0.02)

    step_until(lambda: len(asked) >= 3)
    now, sequence = get_dht_time(), statements.next_sequence("rollback")
    order = Order(KEY, sequence, optimizer.local_epoch + 8, now, statements.expiry("rollback", now), manifest)
    assert statements.publish(keys.signer("monitor").sign, order)
    asked.clear()
    step_until(lambda: optimizer.state_averager.obeyed == order.sequence)
    assert optimizer.local_epoch == order.resume_epoch
    assert asked, "while orders are looked for"
