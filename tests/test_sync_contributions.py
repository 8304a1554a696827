"""Contributions: every sample-cell is pending, in flight, committed, or expired with a cause."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.beliefs import Beliefs
from volunteer_kit.swarm.sync.contributions import (
    Accounts,
    AccountsRecord,
    Answer,
    Cause,
    Ledger,
    Settled,
    Share,
    discount,
    why_refused,
)
from volunteer_kit.swarm.sync.entries import Entry, Member

CELLS = 4
ALL = (1 << CELLS) - 1


def answer(cells: int, *shares: Share, reducer: str = "r") -> Answer:
    inside = tuple(share._replace(cells=share.cells & cells) for share in shares)
    return Answer(cells, reducer, b"digest", inside)


def share(peer: str, number: int, birth: int, samples: int, cells: int = ALL) -> Share:
    return Share(peer, number, birth, samples, cells)


def balance(ledger: Ledger) -> int:
    live = sum(each.samples * (each.pending | each.in_flight).bit_count() for each in ledger.live)
    return ledger.committed + live + sum(ledger.expired.values())


def test_the_discount_is_one_for_what_is_fresh():
    assert [discount(age) for age in (0, 1, 3)] == [1.0, 0.5, 0.25]


def test_microbatches_of_one_epoch_are_one_contribution_until_it_travels():
    ledger = Ledger(CELLS)
    ledger.add(2, birth=3)
    ledger.add(3, birth=3)
    assert ledger.send("me", b"slot", b"round") == (share("me", 0, 3, 5),)
    ledger.add(1, birth=3)
    ledger.return_all()
    assert ledger.send("me", b"slot", b"round") == (share("me", 0, 3, 5), share("me", 1, 3, 1))


def test_a_slice_that_was_lost_is_pending_again():
    ledger = Ledger(CELLS)
    ledger.add(10, birth=0)
    (sent,) = ledger.send("me", b"slot", b"round")
    assert ledger.commit(b"entry", "me", [answer(0b0011, sent)]) == (Settled(0, 10, 0b0011),)
    ledger.return_all()
    assert ledger.send("me", b"slot", b"round") == (sent._replace(cells=0b1100),)
    assert ledger.committed == 20


def test_an_entry_counts_once():
    ledger = Ledger(CELLS)
    ledger.add(10, birth=0)
    (sent,) = ledger.send("me", b"slot", b"round")
    ledger.commit(b"entry", "me", [answer(0b0011, sent)])
    assert ledger.commit(b"entry", "me", [answer(0b0011, sent)]) == ()
    assert ledger.committed == 20


def test_a_lost_branch_takes_what_it_committed():
    ledger = Ledger(CELLS)
    ledger.add(10, birth=0)
    (sent,) = ledger.send("me", b"slot", b"round")
    ledger.commit(b"entry", "me", [answer(ALL, sent)])
    ledger.switch([b"entry", b"another"], [], "me", Cause.LOST_BRANCH)
    assert (ledger.committed, ledger.expired) == (0, {Cause.LOST_BRANCH: 40})


def test_what_both_branches_hold_is_not_lost():
    ledger = Ledger(CELLS)
    ledger.add(10, birth=0)
    (sent,) = ledger.send("me", b"slot", b"round")
    ledger.commit(b"ours", "me", [answer(0b0111, sent)])
    ledger.switch([b"ours"], [(b"theirs", [answer(0b1110, sent)])], "me", Cause.LOST_BRANCH)
    assert (ledger.committed, ledger.expired, ledger.live) == (30, {Cause.LOST_BRANCH: 10}, ())
    ledger.switch([b"theirs"], [], "me", Cause.ROLLBACK)
    assert (ledger.committed, ledger.expired) == (0, {Cause.LOST_BRANCH: 10, Cause.ROLLBACK: 30})


def test_a_branch_that_wins_after_all_gives_back_what_expired_with_it():
    """Its entries come one by one, behind the snapshot of it that the peer adopts."""
    ledger = Ledger(CELLS)
    ledger.add(10, birth=0)
    (sent,) = ledger.send("me", b"slot", b"round")
    ledger.commit(b"entry", "me", [answer(ALL, sent)])
    ledger.switch([b"entry"], [], "me", Cause.LOST_BRANCH)
    ledger.switch([b"theirs"], [], "me", Cause.LOST_BRANCH)
    settled = ledger.commit(b"entry", "me", [answer(ALL, sent)])
    assert [(each.number, each.cells) for each in settled] == [(0, ALL)]
    assert (ledger.committed, ledger.expired) == (40, {Cause.LOST_BRANCH: 0})
    assert ledger.commit(b"entry", "me", [answer(ALL, sent)]) == ()


def test_a_process_that_starts_again_has_everything_but_the_round():
    ledger = Ledger(CELLS)
    ledger.add(10, birth=0)
    ledger.send("me", b"slot", b"round")
    again = Ledger(CELLS, ledger.record())
    assert again.pending_samples == 10
    assert (again.rounds(b"slot"), again.rounds(b"next")) == ((b"round",), ())
    again.add(1, birth=0)
    assert [each.number for each in again.send("me", b"slot", b"round")] == [0, 1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 9), st.integers(0, 6)),
            st.tuples(st.just("send"), st.just(0), st.just(0)),
            st.tuples(st.just("return"), st.just(0), st.just(0)),
            st.tuples(st.just("commit"), st.integers(0, ALL), st.integers(0, 5)),
            st.tuples(st.just("expire"), st.integers(0, 6), st.just(0)),
            st.tuples(st.just("lose"), st.integers(0, 5), st.integers(0, 9)),
            st.tuples(st.just("restart"), st.just(0), st.just(0)),
        ),
        max_size=30,
    )
)
def test_the_sum_is_exact_whatever_happens(steps):
    ledger, sent, computed = Ledger(CELLS), [], 0
    for kind, one, other in steps:
        if kind == "add":
            ledger.add(one, other)
            computed += one * CELLS
        elif kind == "send":
            sent = list(ledger.send("me", b"slot", b"round"))
        elif kind == "return":
            ledger.return_all()
        elif kind == "commit" and one:
            ledger.commit(bytes([other]), "me", [answer(one, *sent)])
        elif kind == "expire":
            ledger.expire_born(one, None, Cause.STALE)
        elif kind == "lose":
            gained = [(bytes([other]), [answer(ALL, *sent)])]
            ledger.switch([bytes([one])], gained, "me", Cause.LOST_BRANCH)
        elif kind == "restart":
            ledger = Ledger(CELLS, ledger.record())
        assert balance(ledger) == ledger.computed == computed


# --- accounts ---


def test_accounts_know_the_cells_of_each_contribution():
    accounts = Accounts().after([answer(0b01, share("a", 0, 5, 3)), answer(0b10, share("a", 1, 5, 3))], 6, 4)
    assert (accounts.committed("a", 0), accounts.committed("a", 1), accounts.committed("b", 0)) == (0b01, 0b10, 0)


def test_a_number_that_is_too_old_is_settled_for_ever():
    accounts = Accounts().after([answer(0b01, share("a", 7, 5, 3))], 6, 4)
    later = accounts.after([answer(0b10, share("a", 8, 12, 3))], 13, 4)
    assert later.committed("a", 7) & 0b1111 == 0b1111
    assert later.committed("a", 3) & 0b1111 == 0b1111
    assert later.committed("a", 8) == 0b10


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([answer(0b0011, share("a", 0, 5, 3))], None),
        ([answer(0b0011), answer(0b0010)], "slices overlap"),
        ([answer(1 << CELLS)], "slices overlap"),
        ([answer(0b1, reducer="x")], "a reducer is not in the group"),
        ([answer(0b1, share("a", 0, 5, 3)), answer(0b10, share("a", 0, 5, 4))], "one contribution is told in two ways"),
        ([answer(0b1, share("x", 0, 5, 3))], "a share has no member"),
        ([answer(0b1, share("a", 0, 5, 0))], "a share has no member"),
        ([answer(0b1, share("a", 0, 6, 3))], "a share has an age that is not allowed"),
        ([answer(0b1, share("a", 0, 0, 3))], "a share has an age that is not allowed"),
        ([answer(0b1, share("a", 9, 5, 3))], "a share is committed already"),
        ([answer(0b1, share("a", 0, 5, 3), share("a", 0, 5, 3))], "a share is counted twice"),
        ([Answer(0b1, "r", b"", (share("a", 0, 5, 3, 0b10),))], "a share is counted twice"),
        ([Answer(0b1, "r", b"", (share("a", 0, 5, 3, 0),))], "a share is counted twice"),
    ],
)
def test_shares_that_do_not_add_up_are_refused(answers, why):
    accounts = Accounts().after([answer(0b1, share("a", 9, 4, 3))], 5, 4)
    assert why_refused(answers, accounts, 5, frozenset("ar"), 4, CELLS) == why


# --- what is believed ---


def test_an_account_earns_what_its_devices_can_compute():
    beliefs = Beliefs(most_epochs=5, cells=CELLS)
    beliefs.saw(Member("p", "account", True), 2.0)
    beliefs.saw(Member("q", "account", False), 3.0)
    assert beliefs.limit("account", now=0.0, epoch_seconds=10.0, slack=1.0) == pytest.approx(5 * 50)
    group = (Member("p", "account", True),)
    brought = (answer(ALL, share("p", 0, 0, 200)),)
    entry = Entry(0, 0, 0, b"parent", Ballot(0, "p"), b"round", group, brought, 0)
    assert beliefs.why_refused(entry, 100.0, epoch_seconds=10.0) is None
    beliefs.committed(entry, 100.0, epoch_seconds=10.0)
    assert beliefs.limit("account", now=110.0, epoch_seconds=10.0, slack=1.0) == pytest.approx(5 * 20)
    beliefs.committed(entry, 110.0, epoch_seconds=10.0)
    assert beliefs.limit("account", now=900.0, epoch_seconds=10.0, slack=2.0) == pytest.approx(2 * 5 * 50)
    beliefs.committed(entry, 900.0, epoch_seconds=10.0)
    beliefs.committed(entry, 900.0, epoch_seconds=10.0)
    assert beliefs.why_refused(entry, 901.0, epoch_seconds=10.0) == "account brings 200 samples, 20 are believed"


def test_accounts_are_their_record():
    accounts = Accounts()
    for epoch in range(20):
        shares = share("a", epoch, epoch, 5), share("b", epoch, epoch, 5)
        accounts = accounts.after([answer(0b11, *shares)], epoch + 1, 4)
    record = accounts.as_record()
    assert record.floors and record.settled
    assert Accounts.from_record(record) == accounts
    assert Accounts.from_record(Accounts().as_record()) == Accounts()


@pytest.mark.parametrize(
    "record",
    [
        AccountsRecord((("a", ((1, 1, 0), (1, 2, 0))),), ()),
        AccountsRecord((("a", ()), ("a", ())), ()),
        AccountsRecord((), (("a", 1), ("a", 2))),
    ],
)
def test_accounts_that_tell_something_twice_are_refused(record):
    with pytest.raises(ValueError, match="twice"):
        Accounts.from_record(record)
