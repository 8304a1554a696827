"""What is entered of credit and when: the ledger through kills and two monitors, the collector through pauses."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import time

import pytest
from hivemind.dht import DHT

from tests.credited import NAME_OF, NAMES, NOW, PEER_NAME, X, account_of, is_monitor, made, owner, peer_of, signed
from tests.somebody import Somebody, store_as
from tests.test_receipts import reduced
from volunteer_kit.swarm.agreement import BEGINNING
from volunteer_kit.swarm.credit import Credit, steps_of
from volunteer_kit.swarm.credit_collector import CreditCollector
from volunteer_kit.swarm.credit_ledger import LONGEST, CreditLedger
from volunteer_kit.swarm.receipts import LIFETIME, ReceiptBoard, digest_of, make_receipt, receipts_key

# --- the ledger ---


def step_of(epoch: int, line: str = "x", **more):
    [step] = steps_of(made([epoch], line, "a b c", **more), owner)
    return step


CREDITS = {"a": Credit(10, False), "a2": Credit(5, False), "b": Credit(20, True)}
DIGESTS = {digest_of(peer_of(name)): credit for name, credit in CREDITS.items()}
OWNERS = {digest: owner(digest) for digest in NAME_OF}


@pytest.fixture
def ledger(tmp_path):
    ledger = CreditLedger(tmp_path / "credit.sqlite")
    yield ledger
    ledger.close()


def test_totals_per_account_over_machines(ledger, tmp_path):
    ledger.learn(OWNERS, {b"A": "ann", b"B": "bob"})
    assert ledger.enter(step_of(1), DIGESTS, OWNERS)
    assert ledger.enter(step_of(2), DIGESTS, OWNERS)
    assert ledger.enter(step_of(3, at=9e6), {digest_of(peer_of("c")): Credit(1, False)}, OWNERS)
    board = {row["username"]: row for row in ledger.leaderboard()}
    ann = {"samples": 30, "provisional": 0, "seconds": 10.0, "machines": 2, "last_epoch": 2}
    assert board["ann"] == {"username": "ann", **ann}, "an epoch's time counts once, however many machines"
    assert (board["bob"]["samples"], board["bob"]["provisional"]) == (0, 40)
    assert board["43"]["seconds"] == LONGEST, "a night in which nothing happened is nobody's work"
    assert [row["username"] for row in ledger.leaderboard()] == ["ann", "43", "bob"]
    reader = CreditLedger(tmp_path / "credit.sqlite", read_only=True)
    assert reader.totals() == ledger.totals() and reader.sums() == (31, 40)
    with pytest.raises(sqlite3.OperationalError):
        reader.learn({}, {b"A": "eve"})
    reader.close()
    ledger.learn({digest_of(peer_of("a2")): b"B"}, {b"A": "anna"})
    assert ledger.machines()[digest_of(peer_of("a2"))] == b"B"
    assert ledger.totals()[0].username == "anna" and ledger.totals()[0].samples == 30, "what was earned stays"


def test_a_round_is_entered_once_and_beside_the_line_never(ledger):
    for epoch in (1, 2, 3, 5, 6):
        assert ledger.enter(step_of(epoch), DIGESTS, OWNERS)
        assert not ledger.enter(step_of(epoch), {d: Credit(99, False) for d in DIGESTS}, OWNERS)
    assert not ledger.enter(step_of(3, "y", since="x", at=31.0), DIGESTS, OWNERS), "another round of an epoch"
    assert not ledger.enter(step_of(4, "y", at=41.0), DIGESTS, OWNERS), "linked to nothing that is here"
    assert ledger.enter(step_of(4), DIGESTS, OWNERS), "late, and linked"
    assert ledger.sums() == (6 * 15, 6 * 20)
    assert ledger.enter(step_of(4, "r", at=100.0), DIGESTS, OWNERS), "all began again from a checkpoint"
    assert ledger.epochs_since(NOW + 50.0) == {4, 5, 6}


def test_a_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "ledger"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(sqlite3.DatabaseError):
        CreditLedger(path)
    with sqlite3.connect(tmp_path / "newer") as db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(sqlite3.DatabaseError, match="version 2"):
        CreditLedger(tmp_path / "newer")
    with pytest.raises(sqlite3.OperationalError):
        CreditLedger(tmp_path / "missing", read_only=True)


def enter_all(path, epochs, begun=None) -> None:
    ledger = CreditLedger(path)
    if begun is not None:
        begun.set()
    for epoch in epochs:
        ledger.enter(step_of(epoch), DIGESTS, OWNERS)
    ledger.close()


def test_a_monitor_killed_in_the_middle_and_two_at_once_change_nothing(tmp_path):
    path, context = tmp_path / "credit.sqlite", multiprocessing.get_context("fork")
    epochs = range(1, 121)
    for _ in range(6):
        begun = context.Event()
        process = context.Process(target=enter_all, args=(path, epochs, begun))
        process.start()
        assert begun.wait(120)
        time.sleep(random.uniform(0, 0.03))  # where it is hit does not matter
        os.kill(process.pid, signal.SIGKILL)
        process.join(120)
    both = [context.Process(target=enter_all, args=(path, epochs)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(240)
        assert process.exitcode == 0
    ledger = CreditLedger(path)
    assert ledger.sums() == (120 * 15, 120 * 20)
    assert {t.account: (t.samples, t.provisional) for t in ledger.totals()} == {b"A": (1800, 0), b"B": (0, 2400)}
    ledger.close()


# --- the collector ---


class Shelf:
    """Receipts by epoch, as a board has them; `asked`: epochs."""

    lifetime = LIFETIME

    def __init__(self):
        self.receipts, self.asked = [], []

    def fetch(self, epochs):
        epochs = list(epochs)
        self.asked += epochs
        return {epoch: [r for r in self.receipts if r.epoch == epoch] for epoch in epochs}


@pytest.fixture
def shelf():
    return Shelf()


@pytest.fixture
def collector(shelf, ledger, clock):
    clock.now = NOW
    username = lambda peer: PEER_NAME[peer][0] * 3  # noqa: E731
    peers = lambda: map(peer_of, NAMES)  # noqa: E731
    return CreditCollector(
        shelf, ledger, account_of, username, is_monitor, peers, max_samples=512, clock=clock, settle_after=15.0
    )


def test_a_round_is_entered_when_it_is_old_and_another_goes_on_from_it(collector, shelf, ledger, clock):
    shelf.receipts = X([1, 2])
    clock.now = NOW + 24.9
    assert collector.collect(2).steps == []
    clock.now = NOW + 25.0
    assert [step.epoch for step in collector.collect(2).steps] == [1]
    clock.now = NOW + 319.0
    assert collector.collect(2).steps == [], "nobody has gone on from the second"
    clock.now = NOW + 320.0
    collected = collector.collect(2)
    assert [step.epoch for step in collected.steps] == [2] and (collected.samples, collected.provisional) == (3, 0)
    assert collector.collect(2).steps == []
    assert {row["username"]: row["samples"] for row in ledger.leaderboard()} == {"aaa": 2, "bbb": 4}


def test_what_is_entered_is_not_asked_for_again(collector, shelf, clock):
    shelf.receipts = X(range(1, 41))
    clock.now = NOW + 440.0
    assert len(collector.collect(40).steps) == 39
    shelf.asked.clear()
    collector.collect(40)
    assert set(shelf.asked) == {37, 38, 39, 40, 41, 0}


def test_a_monitor_that_was_away_finds_what_it_missed(shelf, ledger, clock):
    shelf.receipts = X(range(1, 151))
    clock.now = NOW + 1600.0
    collector = CreditCollector(shelf, ledger, account_of, max_samples=512, clock=clock)
    assert [step.epoch for step in collector.collect(150).steps] == list(range(1, 150))
    shelf.asked.clear()
    again = CreditCollector(shelf, ledger, account_of, max_samples=512, clock=clock)
    assert again.collect(150).steps == [] and ledger.sums() == (149 * 3, 0)
    assert len(shelf.asked) < 10


def test_a_swarm_that_begins_again_at_an_earlier_epoch(collector, shelf, ledger, clock):
    shelf.receipts = X(range(1, 21))
    clock.now = NOW + 200 + 300
    assert len(collector.collect(20).steps) == 20
    for restart in range(1, 3):  # once while the monitor lives, once while it does not
        line = f"r{restart}"
        more = [
            signed(
                s, epoch, line, since="x" if epoch == 19 - restart else None, at=1000.0 * restart + epoch * 5, a=1, b=1
            )
            for epoch in range(19 - restart, 30)
            for s in "abc"
        ]
        shelf.receipts += more
        clock.now = NOW + 1000.0 * restart + 200.0
        entered = [step.epoch for step in collector.collect(29).steps]
        last_of_the_first = [29] if restart == 2 else []
        assert entered == last_of_the_first + list(range(19 - restart, 29)), restart
        collector = CreditCollector(shelf, ledger, account_of, max_samples=512, clock=clock, settle_after=15.0)


def test_receipts_of_the_future_and_of_long_ago_are_not_read(collector, shelf, clock):
    shelf.receipts = X([1], at=100.0) + X([2], at=-2000.0)
    clock.now = NOW
    collector.collect(1)
    assert collector._receipts == {}


def test_an_account_that_is_learned_later(shelf, ledger, clock):
    known = set("abc")
    shelf.receipts = [signed(s, e, a=1, g=7) for e in (1, 2) for s in "abc"]
    collector = CreditCollector(
        shelf, ledger, lambda p: account_of(p) if PEER_NAME[p] in known else None, lambda p: None, is_monitor,
        lambda: [peer_of("g")], max_samples=512, clock=clock, settle_after=15.0, give_up_after=100.0,
    )  # fmt: skip
    clock.now = NOW + 26.0
    collected = collector.collect(2)
    assert collected.findings.unknown == {digest_of(peer_of("g"))} and collected.samples == 1
    known.add("g")
    clock.now = NOW + 130.0
    assert collector.collect(2).samples == 8
    known.clear()
    again = CreditCollector(shelf, ledger, lambda p: None, max_samples=512, clock=clock)
    assert again._owners[digest_of(peer_of("g"))] == b"G", "and is known from then on"


def test_without_an_authority_every_peer_is_an_account(shelf, ledger, clock):
    shelf.receipts = [signed(s, e, a=1, a2=2, b=3) for e in (1, 2) for s in ("a", "a2", "b")]
    collector = CreditCollector(shelf, ledger, None, max_samples=512, clock=clock)
    clock.now = NOW + 60.0
    assert collector.collect(2).samples == 6
    assert sorted((t.samples, t.account) for t in ledger.totals()) == [
        (samples, digest_of(peer_of(name))) for samples, name in ((1, "a"), (2, "a2"), (3, "b"))
    ]


def test_through_a_real_dht(peer, tmp_path):
    """Three reducers, one liar, and a monitor that reads what the DHT holds."""
    people = [Somebody() for _ in range(3)]
    ids = [person.peer_id for person in people]
    board = ReceiptBoard(peer.dht, "collected")
    clock = [peer.dht.get_visible_maddrs() and time.time()]
    dht = DHT(initial_peers=peer.visible_maddrs(), client_mode=True, start=True, startup_timeout=120)
    try:
        before = BEGINNING
        for epoch in (1, 2):
            for number, person in enumerate(people):
                round_ = reduced(epoch=epoch, round_id=bytes([epoch]), round_name=bytes([epoch]), lineage_before=before)
                weights = {i: 500.0 if number == 2 and i == ids[2] else 40.0 for i in ids}
                receipt = make_receipt(person.peer_id, round_, weights, now=clock[0] + epoch)
                key = receipts_key("collected", epoch)
                assert store_as(person, dht, to=peer.peer_id, key=key, value=receipt.dict())
            before = receipt.after
    finally:
        dht.shutdown()
    ledger = CreditLedger(tmp_path / "credit.sqlite")
    monitor = CreditCollector(board, ledger, max_samples=512, clock=lambda: clock[0] + 50.0)
    assert monitor.collect(2).samples == 120
    assert ledger.of_machines() == {digest_of(i): (40, 0) for i in ids}
    ledger.close()
