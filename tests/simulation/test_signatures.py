"""Nobody speaks under another name."""

from __future__ import annotations

from tests.simulation.exchange import make_answer
from tests.simulation.signatures import Signatures, contradicts, promise_of, proposal_of, vote_of
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate
from volunteer_kit.swarm.sync.entries import Entry, Member
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import Items, Message, Promise, Propose, Vote

A, B = Member("a", "a", True), Member("b", "b", True)
GENESIS = LogItem.genesis((A, B))
BALLOT = Ballot(0, "a")


def entry(*, samples_of: str = "a") -> Entry:
    answer = make_answer(b"round", 0b1, samples_of, ())
    return Entry(0, 0, 0, GENESIS.head.lineage, BALLOT, b"round", (A, B), (answer,), 0)


def test_a_certificate_needs_votes_that_were_given():
    signatures, step = Signatures(), entry()
    signatures.sign_answers(step.answers)
    item = GENESIS.after_entry(step, Certificate(step.lineage, BALLOT, frozenset("ab")))
    message = Message(item.head, Items(GENESIS.head.lineage, (item,)))
    signatures.sign("a", message)  # its own vote
    assert not signatures.hold("a", message)
    signatures.sign("b", Message(GENESIS.head, Vote(BALLOT, step.lineage, None)))
    assert signatures.hold("a", message)


def test_an_answer_needs_its_reducer():
    signatures, step = Signatures(), entry()
    message = Message(GENESIS.head, Propose(BALLOT, step, ()))
    signatures.sign("a", message)
    assert not signatures.hold("a", message)
    signatures.sign_answers(step.answers)
    assert signatures.hold("a", message)


def test_a_proposal_is_its_leaders():
    signatures, step = Signatures(), entry()
    signatures.sign_answers(step.answers)
    message = Message(GENESIS.head, Propose(BALLOT, step, ()))
    signatures.sign("b", message)
    assert not signatures.hold("b", message), "b cannot propose at a's ballot"


def test_contradictions():
    slot, other = b"slot", b"other"
    assert contradicts(vote_of("a", slot, BALLOT, b"one"), vote_of("a", slot, BALLOT, b"two"))
    assert not contradicts(vote_of("a", slot, BALLOT, b"one"), vote_of("a", slot, BALLOT, b"one"))
    assert not contradicts(vote_of("a", slot, BALLOT, b"one"), vote_of("b", slot, BALLOT, b"two"))
    assert not contradicts(vote_of("a", slot, BALLOT, b"one"), vote_of("a", other, BALLOT, b"two"))
    assert not contradicts(vote_of("a", slot, BALLOT, b"one"), vote_of("a", slot, Ballot(1, "a"), b"two"))
    assert contradicts(proposal_of(slot, BALLOT, b"one"), proposal_of(slot, BALLOT, b"two"))
    promise = promise_of("a", slot, Promise(BALLOT, None, None))
    assert not contradicts(promise, vote_of("a", slot, BALLOT, b"one"))
