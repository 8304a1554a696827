"""The accounts of devices whose samples are committed: where every second went, over kills and stops."""

from __future__ import annotations

import pytest

from benchmarks.home_parts.accounts import Life, account_of, goodput, losses, sum_of

SPEED = 10.0  # samples/s


def beat(at: float, computed: float, committed: float, idle: float = 0.0, contention: float = 0.0, **expired) -> dict:
    """:param computed: s"""
    totals = {"computed": SPEED * computed, "committed": committed, "pending": 0.0, **expired}
    clock = {"computed": computed, "between": idle, "contention": contention, "own_work": 0.0}
    return {"event": "beat", "at": at, "totals": totals, **clock}


def test_all_seconds_between_two_times_are_somewhere():
    life = Life([beat(101, 1.0, 0), beat(111, 9.0, 40, idle=2.0), beat(121, 17.0, 120, idle=3.0, contention=1.0)])
    found = account_of([life], SPEED, end=121).between(101, 121)
    assert sum(found.values()) == pytest.approx(20.0)
    assert {name: seconds for name, seconds in found.items() if seconds} == pytest.approx(
        {"committed": 12.0, "idle": 3.0, "contention": 1.0, "pending": 4.0}
    )
    assert goodput(found) == pytest.approx(12 / 19)
    assert losses(found)["idle"] == pytest.approx(3 / 19)
    assert goodput(found) + sum(losses(found).values()) == pytest.approx(1.0)


def test_a_killed_worker_keeps_what_its_ledger_has_and_loses_the_rest():
    before = Life([beat(101, 1.0, 0), beat(105, 5.0, 20)], killed=106.5)
    after = Life([beat(117, 1.0, 60), beat(121, 5.0, 90)], had=58.0)  # samples: 0.8 s more than the last beat told of
    account = account_of([before, after], SPEED, end=121)
    found = account.between(100, 121)
    assert {name: seconds for name, seconds in found.items() if seconds} == pytest.approx(
        {"committed": 9.0, "dead": 116 - 106.5, "microbatch lost": 0.7, "pending": 5.8 + 5.0 - 9.0}
    )
    assert sum(account.between(103, 112).values()) == pytest.approx(9.0)
    assert account.between(107, 112)["dead"] == pytest.approx(5.0)


def test_a_worker_that_never_came_back_is_dead_to_the_end():
    found = account_of([Life([beat(101, 1.0, 0)], killed=102.0)], SPEED, end=110.0).between(100, 110)
    assert found["dead"] == pytest.approx(8.0)
    assert sum(found.values()) == pytest.approx(10.0)


@pytest.mark.parametrize("idle, contention, of_the_clock", [(0.1, 7.7, "contention"), (7.9, 0.0, "idle")])
def test_a_stop_is_neither_contention_nor_idleness(idle, contention, of_the_clock):
    computed = 10.0 - idle - contention
    beats = [beat(101, 1.0, 0), beat(111, 1.0 + computed, 0, idle=idle, contention=contention)]
    found = account_of([Life(beats, stops=[(102.0, 109.6)])], SPEED, end=111).between(101, 111)
    assert found["stopped"] == pytest.approx(7.6)
    assert found[of_the_clock] == pytest.approx({"contention": 0.1, "idle": 0.3}[of_the_clock])
    assert sum(found.values()) == pytest.approx(10.0)


def test_what_expires_later_is_told_by_its_cause():
    life = Life([beat(101, 1.0, 0), beat(111, 11.0, 70, stale=20.0)])
    found = account_of([life], SPEED, end=121).between(101, 121)
    assert found["expired: stale"] == pytest.approx(2.0)
    assert found["idle"] == pytest.approx(10.0)  # it waits, and says nothing
    assert sum_of((found, {"pending": -1.0}))["pending"] == pytest.approx(0.0)
