"""The invariants raise, each for its own reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.exchange import make_answer
from tests.simulation.invariants import Invariants, Violation
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contributions import Accounts, Contribution, Ledger, Share
from volunteer_kit.swarm.sync.entries import Entry, Member, Opening
from volunteer_kit.swarm.sync.log import LogItem

A, B, C, D = (Member(name, name, name != "d") for name in "abcd")
GROUP = (A, B, C, D)
GENESIS = LogItem.genesis(GROUP)
BALLOT = Ballot(0, "a")


@pytest.fixture
def checks() -> Invariants:
    invariants = Invariants(4, frozenset(), {})
    invariants.genesis(GENESIS)
    return invariants


def after(item: LogItem, voters: str = "abc", number: int = 0, peer: str = "a", **others: object) -> LogItem:
    """An entry with one contribution."""
    head = item.head
    answer = make_answer(head.lineage, 0b1111, "a", (Share(peer, number, head.epoch, 5, 0b1111),))
    entry = Entry(0, 0, head.epoch, head.lineage, BALLOT, head.lineage, GROUP, (answer,), 0)
    entry = replace(entry, **others)
    return item.after_entry(entry, Certificate(entry.lineage, BALLOT, frozenset(voters)))


def violation(call, *arguments) -> str:
    with pytest.raises(Violation) as raised:
        call(*arguments)
    return raised.value.name


def test_a_chain_of_entries_is_fine(checks):
    item = GENESIS
    for number in range(5):
        item = after(item, number=number)
        checks.step("a", item)
    assert checks.commits == 5 and checks.branches[item.head.lineage].amounts == {"a": 5 * 5 * 4}


def test_agreement(checks):
    checks.step("a", after(GENESIS))
    other = after(GENESIS, number=1)
    later = replace(other, certificate=other.certificate._replace(ballot=Ballot(1, "b")))
    assert violation(checks.step, "b", later) == "I1"


@pytest.mark.parametrize("voters, valid", [("abc", True), ("ab", True), ("cd", False), ("bc", False), ("a", False)])
def test_a_certificate_needs_a_quorum(checks, voters, valid):
    item = after(GENESIS, voters)
    if valid:
        checks.step("a", item)
    else:
        assert violation(checks.step, "a", item) == "I2"


def test_who_left_does_not_count_and_a_goodbye_may_be_a_vote(checks):
    item = after(GENESIS, "b")
    entry = item.step
    assert isinstance(entry, Entry)
    left = [Goodbye(peer, GENESIS.head.lineage, BALLOT) for peer in "cd"]
    voted = Goodbye("c", GENESIS.head.lineage, BALLOT, entry, BALLOT)
    for goodbyes, valid in (((left[1],), False), ((voted, left[1]), True), (tuple(left), False)):
        certificate = Certificate(entry.lineage, BALLOT, frozenset("b"), goodbyes)
        given = GENESIS.after_entry(entry, certificate)
        if valid:
            checks.step("b", given)
        else:
            assert violation(checks.step, "b", given) == "I2"


def test_a_step_behind_nothing_is_invalid(checks):
    assert violation(checks.step, "a", after(after(GENESIS))) == "I2"


def test_an_opening_needs_all_its_members(checks):
    opening = Opening(0, 0, 0, GENESIS.head.lineage, 0, (A, B))
    assert violation(checks.step, "a", GENESIS.after_opening(opening, frozenset("a"))) == "I2"
    checks.step("a", GENESIS.after_opening(opening, frozenset("ab")))
    clients = Opening(0, 0, 0, GENESIS.head.lineage, 0, (D,))
    assert violation(checks.step, "d", GENESIS.after_opening(clients, frozenset("d"))) == "I2"


def test_a_contribution_enters_once(checks):
    first = after(GENESIS)
    checks.step("a", first)
    assert violation(checks.step, "a", after(first, number=0)) == "I3"


def test_a_head_says_what_its_entries_say(checks):
    item = after(GENESIS)
    assert violation(checks.step, "a", replace(item, head=item.head._replace(sample_cells=7))) == "I5"


def test_equal_lineage_means_equal_parameters_and_accounts(checks):
    branch = checks.step("a", after(GENESIS))
    checks.at_head("a", branch, 1, Accounts())
    checks.at_head("b", branch, 1, Accounts())
    checks.at_head("c", branch, None, Accounts())  # damaged
    assert violation(checks.at_head, "b", branch, 2, Accounts()) == "I5"
    assert violation(checks.at_head, "b", branch, 1, Accounts({"a": {0: (1, 0)}})) == "I5"


def test_every_sample_is_somewhere(checks):
    ledger = Ledger(4)
    ledger.add(5, 0)
    checks.ledger("a", ledger, 20)
    assert violation(checks.ledger, "a", ledger, 24) == "I4"
    lost = ledger.record()._replace(live=(Contribution(0, 0, 5, 0b0111, 0, False),))
    assert violation(checks.ledger, "a", Ledger(4, lost), 20) == "I4"


def test_only_believable_samples_are_taken():
    speeds = {"a": 1.0}
    checks = Invariants(4, frozenset("b"), speeds)
    checks.genesis(GENESIS)
    checks.now = 10.0
    checks.step("a", after(GENESIS))
    speeds["a"] = 0.01
    assert violation(checks.step, "a", after(after(GENESIS), number=1)) == "I9"
