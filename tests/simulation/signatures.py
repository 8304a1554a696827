"""Every statement that a peer really signed. A liar says what it likes, but not under somebody else's name."""

from __future__ import annotations

from collections.abc import Iterable

from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contributions import Answer
from volunteer_kit.swarm.sync.entries import Entry, Opening, RollbackOrder, Verdict
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    Accuse,
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

Statement = tuple[object, ...]  # (kind, signer, slot, ballot, what), or a shorter one


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


def certificate_statements(slot: bytes, certificate: Certificate) -> list[Statement]:
    """The votes in a certificate."""
    return [vote_of(peer, slot, certificate.ballot, certificate.entry) for peer in sorted(certificate.voters)]


def statements_in(sender: str, message: Message) -> list[Statement]:
    """What is signed in a message; the envelope itself is the sender's."""
    body = message.body
    if isinstance(body, Vote) and message.head is not None:
        return [vote_of(sender, message.head.lineage, body.ballot, body.entry)]
    if isinstance(body, Promise) and message.head is not None:
        found = [promise_of(sender, message.head.lineage, body)]
        if body.accepted is not None and body.accepted_at is not None:
            found.append(proposal_of(body.accepted.parent, body.accepted_at, body.accepted.lineage))
        return found
    if isinstance(body, Propose):
        slot = body.entry.parent
        found = [promise_of(peer, slot, promise) for peer, promise in body.promises]
        found += [goodbye_of(each) for each in body.goodbyes]
        found.append(proposal_of(slot, body.ballot, body.entry.lineage))
        return found
    if isinstance(body, Items):
        found = []
        for item in body.items:
            found += item_statements(item)
        return found
    if isinstance(body, Goodbye):
        return [goodbye_of(body)]
    if isinstance(body, Sketches):
        return [vote_of(peer, body.slot, vote.ballot, vote.entry) for peer, vote in body.votes]
    if isinstance(body, SignOpening):
        return [("opening", sender, body.opening)]
    if isinstance(body, Order):
        return [("order", "monitor", body.order.lineage)]
    if isinstance(body, Accuse):
        return [("proof", *body.verdict)]
    return []


def item_statements(item: LogItem) -> list[Statement]:
    """What is signed in one step of a log."""
    step, certificate = item.step, item.certificate
    if isinstance(step, Entry):
        if certificate is None:
            return [("nothing", "nobody")]
        found = certificate_statements(step.parent, certificate)
        found += [goodbye_of(each) for each in certificate.goodbyes]
        return found
    if isinstance(step, Opening):
        return [("opening", peer, step.lineage) for peer in sorted(item.signers)]
    if isinstance(step, RollbackOrder):
        return [("order", "monitor", step.lineage)]
    return []


def answers_in(message: Message) -> tuple[Answer, ...]:
    """Answers in a message; a reducer signed each of them."""
    body = message.body
    if isinstance(body, Held):
        return body.answers
    if isinstance(body, Propose):
        return body.entry.answers
    if isinstance(body, Promise) and body.accepted is not None:
        return body.accepted.answers
    if isinstance(body, Items):
        return tuple(
            answer for item in body.items if isinstance(item.step, Entry) for answer in item.step.answers
        )
    return ()


class Signatures:
    """The registry of all statements. A process signs what it sends with its own name, and checks what it gets."""

    def __init__(self) -> None:
        self._made: set[Statement] = set()
        self._answers: set[Answer] = set()
        self._valid: dict[int, Message] = {}  # messages that were found valid, kept so that no id comes twice

    def sign(self, sender: str, message: Message) -> list[Statement]:
        """Make the sender's own statements of this message.

        :returns: those that are new
        """
        new = []
        for statement in statements_in(sender, message):
            if statement[1] == sender and statement not in self._made:
                self._made.add(statement)
                new.append(statement)
        return new

    def sign_answers(self, answers: Iterable[Answer]) -> None:
        """A reducer's answers, as it gave them to at least one member."""
        self._answers.update(answers)

    def sign_statement(self, statement: Statement) -> None:
        """Something that is signed outside of a message: an order, a proof."""
        self._made.add(statement)

    def made(self, statement: Statement) -> bool:
        """Whether the signer really said it."""
        return statement in self._made

    def hold(self, sender: str, message: Message) -> bool:
        """Whether every signature in the message holds."""
        if id(message) in self._valid:
            return True
        made = self._made
        for statement in statements_in(sender, message):
            if statement not in made:
                return False
        for answer in answers_in(message):
            if answer not in self._answers:
                return False
        self._valid[id(message)] = message
        return True


def contradicts(one: Statement, other: Statement) -> bool:
    """Whether both statements of one signer are proof that it equivocates."""
    if one == other or one[:2] != other[:2] or len(one) != 5:
        return False
    return one[0] in ("vote", "proposal") and one[2:4] == other[2:4]


def verdict_on(peer: str) -> Verdict:
    """The proof that two contradicting statements are."""
    return Verdict(peer, b"equivocation of " + peer.encode())
