"""Test that the credit ledger enters each step once, through kills and with two monitors."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import time

import pytest

from volunteer_kit.swarm.credit.ledger import LONGEST, CreditLedger, Place

NOW = 1_800_000_000.0
SAMPLES = {b"a": 10, b"a2": 5, b"b": 20}  # digest of a machine -> samples
OWNERS = {b"a": b"A", b"a2": b"A", b"b": b"B", b"c": b"C"}


def place(epoch: int, at: float | None = None, line: str = "x") -> Place:
    name = f"{line}{epoch}".encode()
    before = f"{line}{epoch - 1}".encode()
    return Place(epoch, name, before, name, NOW + (10.0 * epoch if at is None else at))


@pytest.fixture
def ledger(tmp_path):
    ledger = CreditLedger(tmp_path / "credit.sqlite")
    yield ledger
    ledger.close()


def test_totals_per_account_over_machines(ledger, tmp_path):
    ledger.learn(OWNERS, {b"A": "ann", b"B": "bob"})
    assert ledger.enter_committed(place(1), SAMPLES, OWNERS)
    assert ledger.enter_committed(place(2), SAMPLES, OWNERS)
    assert ledger.enter_committed(place(3, at=9e6), {b"c": 1}, OWNERS)
    board = {row["username"]: row for row in ledger.leaderboard()}
    ann = {"samples": 30, "provisional": 0, "seconds": 10.0, "machines": 2, "last_epoch": 2}
    assert board["ann"] == {"username": "ann", **ann}, "an epoch's time counts once, however many machines"
    assert board["bob"]["samples"] == 40
    assert board["43"]["seconds"] == LONGEST, "a night in which nothing happened is nobody's work"
    assert [row["username"] for row in ledger.leaderboard()] == ["bob", "ann", "43"]
    reader = CreditLedger(tmp_path / "credit.sqlite", read_only=True)
    assert reader.totals() == ledger.totals() and reader.sums() == (71, 0)
    with pytest.raises(sqlite3.OperationalError):
        reader.learn({}, {b"A": "eve"})
    reader.close()
    ledger.learn({b"a2": b"B"}, {b"A": "anna"})
    assert ledger.machines()[b"a2"] == b"B"
    anna = next(total for total in ledger.totals() if total.account == b"A")
    assert (anna.username, anna.samples) == ("anna", 30), "what was earned stays"


def test_a_step_is_entered_once(ledger):
    for epoch in (1, 2, 3, 5):
        assert ledger.enter_committed(place(epoch), SAMPLES, OWNERS)
        assert not ledger.enter_committed(place(epoch), dict.fromkeys(SAMPLES, 99), OWNERS)
    assert ledger.enter_committed(place(4), SAMPLES, OWNERS, missed=2), "late"
    assert ledger.sums() == (5 * 35, 0) and ledger.missed() == 2


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
        ledger.enter_committed(place(epoch), SAMPLES, OWNERS)
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
    assert ledger.sums() == (120 * 35, 0)
    assert {total.account: total.samples for total in ledger.totals()} == {b"A": 1800, b"B": 2400}
    ledger.close()
