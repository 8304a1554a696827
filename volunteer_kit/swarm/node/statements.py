"""Define the statements that peers sign: genesis, votes, promises, proposals, goodbyes, answers, openings, orders.

A statement names its signer and binds it to a slot, so it cannot be used for another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contributions import Answer
from volunteer_kit.swarm.sync.entries import Entry, Opening, RollbackOrder
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    Held,
    Items,
    Message,
    Order,
    Promise,
    Propose,
    SignOpening,
    Sketches,
    Vote,
)

MONITOR: Final = "monitor"  # who signs orders

Statement = tuple[object, ...]  # (kind, signer, slot, ballot, what), or a shorter one


class BadSignature(Exception):
    """A signature that does not hold, or one that is not known; str() says whose."""


def vote_of(peer: str, slot: bytes, ballot: Ballot, entry: bytes) -> Statement:
    """A vote."""
    return ("vote", peer, slot, ballot, entry)


def promise_of(peer: str, slot: bytes, promise: Promise) -> Statement:
    """A promise, with the accepted proposal that it tells."""
    accepted = promise.accepted.lineage if promise.accepted is not None else None
    return ("promise", peer, slot, promise.ballot, (accepted, promise.accepted_at))


def proposal_of(slot: bytes, ballot: Ballot, entry: bytes) -> Statement:
    """A proposal, signed by the ballot's leader."""
    return ("proposal", ballot.leader, slot, ballot, entry)


def goodbye_of(goodbye: Goodbye) -> Statement:
    """A goodbye, with the accepted proposal that it tells."""
    accepted = goodbye.accepted.lineage if goodbye.accepted is not None else None
    return ("goodbye", goodbye.peer, goodbye.slot, goodbye.promised, accepted, goodbye.accepted_at)


def answer_of(answer: Answer) -> Statement:
    """An answer, signed by its reducer."""
    return ("answer", answer.reducer, answer.digest, answer.cells, answer.shares)


def opening_of(peer: str, opening: bytes) -> Statement:
    """A signature under an opening."""
    return ("opening", peer, opening)


def genesis_of(founder: str, lineage: bytes) -> Statement:
    """A founder's signature under the run's beginning."""
    return ("genesis", founder, lineage)


def words_of(author: str, fingerprint: bytes, stage: int, body: bytes) -> Statement:
    """A member's words in one stage of a verified round."""
    return ("words", author, fingerprint, stage, hashlib.sha256(body).digest(), len(body))


def order_of(order: RollbackOrder) -> Statement:
    """A rollback order, signed by the monitor."""
    return ("order", MONITOR, order.lineage)


def statements_in(sender: str, message: Message) -> list[Statement]:
    """What is signed in a message, its answers included.

    :raises BadSignature: for a message that nobody can sign
    """
    body = message.body
    if isinstance(body, Items):
        return [each for item in body.items for each in item_statements(item)]
    return [*_spoken_in(sender, message), *map(answer_of, answers_in(message))]


def item_statements(item: LogItem) -> list[Statement]:
    """What is signed in one step of a log, its answers included.

    :raises BadSignature: for an entry without a certificate
    """
    return [*_spoken_in_item(item), *map(answer_of, _answers_of(item))]


def answers_in(message: Message) -> tuple[Answer, ...]:
    """Answers in a message; a reducer signed each of them."""
    body = message.body
    if isinstance(body, Held):
        return body.answers
    if isinstance(body, Items):
        return tuple(answer for item in body.items for answer in _answers_of(item))
    entry = entry_in(message)  # of a proposal or a promise
    return () if entry is None else entry.answers


def _spoken_in(sender: str, message: Message) -> Iterator[Statement]:
    body = message.body
    if isinstance(body, Vote):
        yield vote_of(sender, _slot_of(message), body.ballot, body.entry)
    elif isinstance(body, Promise):
        yield promise_of(sender, _slot_of(message), body)
        if body.accepted is not None and body.accepted_at is not None:
            yield proposal_of(body.accepted.parent, body.accepted_at, body.accepted.lineage)
    elif isinstance(body, Propose):
        slot = body.entry.parent
        for peer, promise in body.promises:
            yield promise_of(peer, slot, promise)
        yield from map(goodbye_of, body.goodbyes)
        yield proposal_of(slot, body.ballot, body.entry.lineage)
    elif isinstance(body, Goodbye):
        yield goodbye_of(body)
    elif isinstance(body, Sketches):
        for peer, vote in body.votes:
            yield vote_of(peer, body.slot, vote.ballot, vote.entry)
    elif isinstance(body, SignOpening):
        yield opening_of(sender, body.opening)
    elif isinstance(body, Order):
        yield order_of(body.order)


def _slot_of(message: Message) -> bytes:
    if message.head is None:
        raise BadSignature("a vote or promise without a slot")
    return message.head.lineage


def _spoken_in_item(item: LogItem) -> Iterator[Statement]:
    step, certificate = item.step, item.certificate
    if isinstance(step, Entry):
        if certificate is None:
            raise BadSignature(f"the entry of epoch {step.epoch} without a certificate")
        yield from _certificate_statements(step.parent, certificate)
    elif isinstance(step, Opening):
        for peer in sorted(item.signers):
            yield opening_of(peer, step.lineage)
    elif isinstance(step, RollbackOrder):
        yield order_of(step)
    else:
        for peer in sorted(item.membership.founders):
            yield genesis_of(peer, item.head.lineage)


def _certificate_statements(slot: bytes, certificate: Certificate) -> Iterator[Statement]:
    for peer in sorted(certificate.voters):
        yield vote_of(peer, slot, certificate.ballot, certificate.entry)
    yield from map(goodbye_of, certificate.goodbyes)


def _answers_of(item: LogItem) -> tuple[Answer, ...]:
    return item.step.answers if isinstance(item.step, Entry) else ()


def entry_in(message: Message) -> Entry | None:
    """The entry that a message proposes, or that its sender accepted: no quorum has judged it yet."""
    body = message.body
    if isinstance(body, Propose):
        return body.entry
    return body.accepted if isinstance(body, Promise) else None


def contradicts(one: Statement, other: Statement) -> bool:
    """Whether both statements of one signer are proof that it equivocates: two votes or proposals at one ballot, or a
    promise that hides a vote below it."""
    if one == other or one[1:3] != other[1:3] or len(one) != 5 or len(other) != 5:
        return False
    if one[0] == other[0]:
        return one[0] in ("vote", "proposal") and one[3] == other[3]
    return _hides(one, other) or _hides(other, one)


def _hides(promise: Statement, vote: Statement) -> bool:
    if promise[0] != "promise" or vote[0] != "vote":
        return False
    ballot, told, voted = promise[3], promise[4], vote[3]
    assert isinstance(ballot, Ballot) and isinstance(told, tuple) and isinstance(voted, Ballot)
    return voted < ballot and (told[1] is None or told[1] < voted)
