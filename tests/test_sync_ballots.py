"""Ballots, quorums, promises and phases: the pure rules behind the synchronization core."""

from __future__ import annotations

import itertools

import pytest

from volunteer_kit.swarm.sync.ballots import Ballot, is_quorum, leader_order, may_lead
from volunteer_kit.swarm.sync.entries import Entry
from volunteer_kit.swarm.sync.phases import COMPUTING, TRANSITIONS, ForbiddenMove, Phase, PhaseClock
from volunteer_kit.swarm.sync.promises import LOWEST, Acceptor

SLOT = b"slot"


def entry(turn: int = 0) -> Entry:
    return Entry(0, 0, 0, SLOT, Ballot(turn, "a"), b"round", (), (), 0)


# --- quorums ---


@pytest.mark.parametrize(
    ("electorate", "agreeing", "left", "decides"),
    [
        ("abc", "ab", "", True),
        ("abc", "a", "", False),
        ("abcd", "ab", "", True),  # half, with the smallest
        ("abcd", "cd", "", False),  # half, without it
        ("abcde", "cde", "", True),
        ("abcd", "bc", "a", True),  # two of the three that are left
        ("abc", "bc", "a", True),
        ("abc", "b", "a", True),  # half of b and c, with the smaller one
        ("abc", "c", "a", False),
        ("a", "a", "", True),
        ("a", "", "", False),
        ("ab", "", "ab", False),  # nobody is left to decide
        ("abc", "xyz", "", False),  # strangers do not count
    ],
)
def test_what_a_quorum_is(electorate, agreeing, left, decides):
    assert is_quorum(set(electorate), set(agreeing), set(left)) is decides


@pytest.mark.parametrize("size", range(1, 7))
def test_two_quorums_of_one_electorate_share_a_member(size):
    peers = "abcdef"[:size]
    groups = [set(some) for many in range(size + 1) for some in itertools.combinations(peers, many)]
    quorums = [group for group in groups if is_quorum(set(peers), group)]
    assert all(one & other for one, other in itertools.product(quorums, repeat=2))


@pytest.mark.parametrize("size", range(1, 6))
def test_quorums_share_a_member_whatever_each_side_knows_of_the_leavers(size):
    """Leavers never voted in this slot; each side may know of some of them only."""
    peers = set("abcde"[:size])
    for many in range(size + 1):
        for leavers in map(set, itertools.combinations(sorted(peers), many)):
            staying = sorted(peers - leavers)
            known = [set(some) for n in range(many + 1) for some in itertools.combinations(sorted(leavers), n)]
            votes = [set(some) for n in range(len(staying) + 1) for some in itertools.combinations(staying, n)]
            quorums = [group for group in votes for left in known if is_quorum(peers, group, left)]
            assert all(one & other for one, other in itertools.product(quorums, repeat=2))


def test_turns_follow_the_slot_and_one_leaver_moves_nobody_else():
    peers = [f"p{number}" for number in range(20)]
    order = leader_order(b"one", peers)
    assert sorted(order) == sorted(peers)
    assert order != leader_order(b"two", peers)
    without = leader_order(b"one", [peer for peer in peers if peer != order[3]])
    assert without == order[:3] + order[4:]


def test_a_turn_belongs_to_one_leader_until_all_had_one():
    order = ("b", "a")
    assert may_lead(Ballot(0, "b"), order)
    assert not may_lead(Ballot(0, "a"), order)
    assert may_lead(Ballot(1, "a"), order)
    assert may_lead(Ballot(2, "x"), order)
    assert not may_lead(Ballot(-1, "a"), order)


# --- promises ---


def test_a_promise_binds():
    acceptor = Acceptor(SLOT)
    assert acceptor.accepts(Ballot(0, "a"), entry())
    acceptor.promise(Ballot(2, "c"))
    assert not acceptor.accepts(Ballot(1, "z"), entry())
    assert not acceptor.accepts(Ballot(2, "b"), entry())
    assert acceptor.accepts(Ballot(2, "c"), entry())


def test_one_entry_for_each_ballot():
    acceptor = Acceptor(SLOT)
    one, other = entry(), entry(turn=1)
    acceptor.accept(Ballot(1, "b"), one)
    assert acceptor.accepts(Ballot(1, "b"), one)  # the question came twice
    assert not acceptor.accepts(Ballot(1, "b"), other)
    assert acceptor.accepts(Ballot(2, "c"), other)


def test_a_promise_tells_what_was_accepted():
    acceptor = Acceptor(SLOT)
    acceptor.accept(Ballot(1, "b"), entry())
    acceptor.promise(Ballot(3, "c"))
    said = acceptor.answer(Ballot(3, "c"))
    assert (said.accepted, said.accepted_at) == (entry(), Ballot(1, "b"))


def test_after_a_restart_nobody_leads_a_ballot_again():
    acceptor = Acceptor(SLOT)
    record = acceptor.propose(Ballot(1, "b"), entry())
    again = Acceptor(SLOT, record)
    assert not again.may_propose(Ballot(1, "b"))
    assert again.first_turn == 2
    assert again.may_propose(Ballot(2, "b"))


def test_a_record_of_another_slot_binds_nobody():
    record = Acceptor(b"before").promise(Ballot(7, "x"))
    assert Acceptor(SLOT, record).promised == LOWEST


# --- phases ---


def test_every_phase_can_be_left_but_the_last():
    assert set(TRANSITIONS) == set(Phase)
    assert [phase for phase, after in TRANSITIONS.items() if not after] == [Phase.LEAVING]
    running = set(Phase) - {Phase.JOINING, Phase.LEAVING, Phase.CATCHING_UP}
    assert all(Phase.CATCHING_UP in TRANSITIONS[phase] for phase in running), "an entry ahead leaves any phase"
    assert all(Phase.COLLECTING in TRANSITIONS[phase] for phase in set(Phase) - {Phase.COLLECTING, Phase.LEAVING})
    assert set(Phase) - COMPUTING == {Phase.JOINING, Phase.LEAVING}


def test_a_bound_counts_from_entering_the_phase():
    clock = PhaseClock(Phase.COLLECTING, 10.0)
    clock.move(Phase.EXCHANGING, 12.0, 5.0)
    assert (clock.phase, clock.entered, clock.until) == (Phase.EXCHANGING, 12.0, 17.0)
    with pytest.raises(ForbiddenMove, match="from exchanging to joining"):
        clock.move(Phase.JOINING, 13.0)
