"""Receipts: what a reducer signs at most, what one looks like, and through a real DHT whose are read."""

from __future__ import annotations

import math
import os
import time
from functools import partial

import pytest
from hivemind.dht import DHT
from hivemind.dht.protocol import DHTProtocol
from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from tests.somebody import Somebody, record_of, store_as
from volunteer_kit.swarm.agreement import BEGINNING, advance
from volunteer_kit.swarm.credit_bounds import Bounds, Machine, believed_weights, fit, level, speed_bound
from volunteer_kit.swarm.receipts import (
    MAX_SENDERS,
    Receipt,
    ReceiptBoard,
    ReceiptWriter,
    Reduced,
    digest_of,
    make_receipt,
    read_receipts,
    receipts_key,
)

A, B, C, D, E = (PeerID(name.encode() * 34) for name in "abcde")
NAN = float("nan")


# --- how many samples can be true ---


def machines(**said) -> dict[PeerID, Machine]:
    """name=(account, device, speed)"""
    return {PeerID(name.encode() * 34): Machine(m[0].encode(), m[1], m[2]) for name, m in said.items()}


@pytest.mark.parametrize(
    "said, bound, why",
    [
        ({}, 1000.0, "nothing is known of anybody: what the run allows"),
        ({"a": ("A", "T4", 10.0)}, 15.0, "its own word, with slack"),
        ({"a": ("A", "T4", 900.0)}, 1000.0, "no more than the run allows"),
        ({"a": ("A", "T4", 900.0), "b": ("B", "T4", 10.0)}, 1000.0, "one other says too little"),
        ({"a": ("A", "T4", 900.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 60.0, "the same device elsewhere"),
        ({"a": ("A", "T4", 10.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 15.0, "the least of all"),
        ({"a": ("A", "T4", 900.0), "b": ("A", "T4", 500.0), "c": ("A", "T4", 500.0)}, 1000.0, "its own account's"),
        (
            {"a": ("A", "T4", 900.0), "b": ("B", "T4", 9e2), "d": ("B", "T4", 9e2), "c": ("C", "T4", 10.0)},
            1000.0,
            "455 x 4",
        ),
        (
            {"a": ("A", "T4", 900.0), "b": ("B", "T4", 10.0), "c": ("B", "T4", 12.0), "d": ("C", "T4", 10.0)},
            42.0,
            "an account has one voice: 11 and 10",
        ),
        ({"a": ("A", "X1", 900.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 300.0, "nobody else has one"),
        ({"a": ("A", "X1", 100.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 150.0, "and it is as fast as that"),
        ({"a": ("A", "T4", 0.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 60.0, "it says nothing"),
        ({"a": ("A", "X1", 0.0), "b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 60.0, "nothing, of a rare device"),
        ({"b": ("B", "T4", 10.0), "c": ("C", "T4", 20.0)}, 60.0, "no record at all: no better than others'"),
        ({"a": ("A", "T4", 10.0), "b": ("B", "T4", 0.0), "c": ("C", "T4", 0.0)}, 15.0, "silent ones are no measure"),
    ],
)
def test_speed_bound(said, bound, why):
    assert speed_bound(A, machines(**said), 1000.0) == pytest.approx(bound), why


BOUNDS = Bounds(target_batch_size=400, max_samples_per_second=1000.0, microbatch=16, late=2.0)
EQUAL = machines(**{name: (name, "T4", 10.0) for name in "abcd"})  # four of 10/s: 40 s an epoch


@pytest.mark.parametrize(
    "declared, window, believed, why",
    [
        ({A: 100, B: 100, C: 100, D: 100}, 10.0, {A: 100, B: 100, C: 100, D: 100}, "what can be true is left alone"),
        ({A: 240, B: 60}, 14.0, {A: 240, B: 60}, "one and a half of its speed for 16 s, a microbatch more"),
        ({A: 799, B: 60}, 14.0, {A: 256, B: 60}, "no more than that"),
        ({A: 799}, 600.0, {A: 500 + 16 + 20}, "nor ever more than an epoch has"),
        ({A: -5, B: NAN, C: math.inf, D: 60}, 10.0, {D: 60}, "no weights at all"),
        ({A: 0, D: 60}, 10.0, {D: 60}, "it tagged along"),
        ({A: 50, B: 50}, -3.0, {A: 46, B: 46}, "clocks that go back leave what everybody can have done meanwhile"),
        ({E: 799, A: 100}, 10.0, {E: 496, A: 100}, "without a record: four times the others'"),
    ],
)
def test_believed_weights(declared, window, believed, why):
    assert believed_weights(declared, window, EQUAL, BOUNDS) == pytest.approx(believed), why


def test_who_claims_a_device_of_its_own_gains_what_an_epoch_has_beyond_its_target():
    liar = machines(**{name: (name, "T4", 10.0) for name in "abc"}, d=("d", "X1", 1000.0))
    believed = believed_weights({A: 100, B: 100, C: 100, D: 799}, 10.0, liar, BOUNDS)
    assert believed[A] == believed[B] == believed[C] == 100, "and takes nothing from the others"
    assert sum(believed.values()) <= 1.25 * 400 + 4 * 16 + 2 * (30 + 40)


@pytest.mark.parametrize(
    "weights, expected, limit, fitted",
    [
        ({A: 10, B: 20}, {A: 10, B: 10}, 30, {A: 10, B: 20}),
        ({A: 10, B: 20}, {A: 10, B: 10}, 25, {A: 10, B: 15}),
        ({A: 10, B: 30, C: 20}, {A: 10, B: 10, C: 10}, 45, {A: 10, B: 20, C: 15}),
        ({A: 10, B: 40}, {A: 10, B: 40}, 30, {A: 10, B: 20}),
        ({A: 10, B: 40}, {}, 30, {A: 6, B: 24}),
        ({A: 30, B: 40}, {A: 30, B: 40}, 30, {A: 15, B: 15}),
        ({}, {}, 30, {}),
    ],
)
def test_fit(weights, expected, limit, fitted):
    assert fit(weights, expected, limit) == pytest.approx(fitted)


def test_level():
    assert level({A: 1, B: 5, C: 9}, 100) == {A: 1, B: 5, C: 9}
    assert level({A: 1, B: 5, C: 9}, 9) == {A: 1, B: 4, C: 4}
    assert sum(level({A: 7, B: 5, C: 9}, 9).values()) == pytest.approx(9)


# --- one receipt ---


def reduced(**changes) -> Reduced:
    values = dict(
        epoch=8, round_name=b"name", lineage_before=BEGINNING, group=(A, B), weights={A: 32.0, B: 48.4}, seconds=1.0,
        round_id=b"id", at=100.0,
    )  # fmt: skip
    return Reduced(**{**values, **changes})


def test_what_a_reducer_signs():
    receipt = make_receipt(A, reduced(), {A: 32.0, B: 48.4, C: 0.0}, now=5.0)
    assert receipt.samples == {digest_of(A): 32, digest_of(B): 48}
    assert receipt.epoch == 8 and receipt.time == 5.0 and receipt.signer == digest_of(A)
    assert receipt.after == advance(BEGINNING, b"name"), "what the signer's state is called from now on"
    missed = make_receipt(B, reduced(round_name=b"name, but a part"), {A: 32.0}, now=5.5)
    assert missed.round == receipt.round, "one round"
    assert missed.after != receipt.after, "and two states"
    later = make_receipt(A, reduced(epoch=9, lineage_before=receipt.after, round_id=b"later"), {A: 1.0}, now=9.0)
    assert later.before == receipt.after and later.round != receipt.round


def test_a_receipt_of_a_large_round_fits_into_the_dht_and_each_sender_is_named_by_many():
    peers = [PeerID(os.urandom(34)) for _ in range(400)]
    weights = {peer: float(i + 1) for i, peer in enumerate(peers)}
    receipts = [make_receipt(peer, reduced(weights=weights), weights, now=5.0) for peer in peers[:50]]
    for receipt in receipts:
        assert len(receipt.samples) == MAX_SENDERS
        assert len(DHTProtocol.serializer.dumps(receipt.dict())) + 360 < 4096, "with the signature of a 2048 bit key"
        assert all(receipt.samples[d] == weights[p] for p in peers if (d := digest_of(p)) in receipt.samples)
    named = [sum(digest_of(peer) in receipt.samples for receipt in receipts) for peer in peers]
    assert min(named) > 20 and max(named) < 50


@pytest.fixture(scope="module")
def people():
    return [Somebody() for _ in range(4)]


def receipt_of(somebody: Somebody, **changes) -> dict:
    made = make_receipt(somebody.peer_id, reduced(), {A: 32.0, B: 48.0}, now=get_dht_time())
    return {**made.dict(), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": -1},
        {"epoch": 2**31},
        {"epoch": 8.0},
        {"epoch": True},
        {"round": b"short"},
        {"round": "12345678"},
        {"before": bytes(9)},
        {"after": b""},
        {"time": NAN},
        {"time": math.inf},
        {"time": -1.0},
        {"time": 5},
        {"senders": b"x" * 13},
        {"senders": bytes(8) + b"1234" + bytes(8) + b"1234"},
        {"senders": b"b" * 12 + b"a" * 12},
        {"senders": "a" * 12},
        {"senders": b"".join(i.to_bytes(8, "big") + bytes(4) for i in range(MAX_SENDERS + 1))},
    ],
    ids=str,
)
def test_a_receipt_is_typed_and_bounded(people, changes):
    with pytest.raises(ValueError):
        Receipt(**receipt_of(people[0], **changes))
    assert Receipt(**receipt_of(people[0], senders=b"")).samples == {}


# --- through a real DHT ---


def test_the_board_through_a_real_dht(peer, people):
    board = ReceiptBoard(peer.dht, "credit")
    assert board.fetch([8, 9]) == {8: [], 9: []}
    ours = make_receipt(peer.peer_id, reduced(), {A: 32.0}, now=get_dht_time())
    assert board.publish(ours).result(20)
    assert board.fetch([8, 9]) == {8: [ours], 9: []}

    dht = DHT(initial_peers=peer.visible_maddrs(), client_mode=True, start=True, startup_timeout=60)
    try:
        write = partial(store_as, stranger=dht, to=peer.peer_id, key=receipts_key("credit", 8))
        honest, thief, vandal, late = people
        assert write(honest, value=receipt_of(honest))
        assert write(thief, value=receipt_of(honest)), "signed by another than it says: dropped by its readers"
        assert write(vandal, value=receipt_of(vandal, senders=b"x" * 13)), "as is what is none"
        assert write(late, value=receipt_of(late, epoch=7)), "or is of another epoch"
        assert not write(vandal, value=receipt_of(vandal), sign=False)
        victim = Somebody()
        thief_as_victim = Somebody()
        thief_as_victim.subkey = victim.subkey
        assert not write(thief_as_victim, value=receipt_of(victim)), "another's key under the victim's name"
    finally:
        dht.shutdown()
    signers = {receipt.peer_id for receipt in board.fetch([8])[8]}
    assert signers == {peer.peer_id.to_bytes(), honest.peer_id.to_bytes()}
    assert read_receipts(peer.dht, 8, None) == []


def test_a_reducer_signs_no_more_than_the_time_since_the_last_round_allows(peer):
    board = ReceiptBoard(peer.dht, "writer")
    records = {p: record_of(p, samples_per_second=10.0) for p in (A, B)}
    writer = ReceiptWriter(board, BOUNDS, lambda: records)
    writer(reduced(at=100.0, epoch=1, weights={A: 300.0, B: 100.0}))  # the first one sees no time
    writer(reduced(at=110.0, epoch=2, weights={A: 300.0, B: 100.0}))
    writer(reduced(at=111.0, epoch=3, weights={}))  # no slice was ours
    writer(reduced(at=116.0, epoch=4, weights={A: 300.0, B: 10.0}, seconds=2.0))
    began = time.monotonic()
    writer.close(60)
    assert time.monotonic() - began < 60 and writer.written == 3 and writer.failed == 0
    found = board.fetch([1, 2, 3, 4])
    signed = {epoch: receipts[0].samples for epoch, receipts in found.items() if receipts}
    assert signed == {
        1: {digest_of(A): 300, digest_of(B): 100},
        2: {digest_of(A): round(15 * (11 + 2) + 16), digest_of(B): 100},  # 11 s since the first round began
        4: {digest_of(A): round(15 * (6 + 2) + 16), digest_of(B): 10},  # 6 s since the third
    }


def test_a_writer_lives_through_a_board_that_fails(peer):
    class Failing(ReceiptBoard):
        def publish(self, receipt):
            raise OSError("the network is away")

    writer = ReceiptWriter(Failing(peer.dht, "failing"), BOUNDS, dict)
    writer(reduced())
    writer(reduced())
    writer.close(30)
    assert writer.failed == 2 and writer.written == 0
