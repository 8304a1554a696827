"""Signatures: a peer says nothing under another name, and what others said can be carried on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from volunteer_kit.auth.keys import KeyFolder, Trust
from volunteer_kit.swarm.net.identity import ensure_identity, load_private_key
from volunteer_kit.swarm.node import signatures as book
from volunteer_kit.swarm.node.credentials import (
    LONGEST_CREDENTIAL,
    certified,
    make_credential,
    node_key_of,
    peer_id_of,
    public_der,
    read_credential,
)
from volunteer_kit.swarm.node.signatures import Equivocation, Leaver, Signatures, TwoKeys
from volunteer_kit.swarm.node.statements import BadSignature, contradicts, promise_of, proposal_of, vote_of
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Certificate, Goodbye
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.entries import Entry, Member, Opening, RollbackOrder, Verdict
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    Accuse,
    BallotRecord,
    Body,
    Held,
    Items,
    Lead,
    Message,
    Order,
    Promise,
    Propose,
    SignOpening,
    Sketches,
    Vote,
)
from volunteer_kit.swarm.wire import MOST, WireError, decode, encode

RUN = "a run"
HASH = bytes(32)


@cache
def key(place: int) -> RSAPrivateKey:
    return RSAPrivateKey()


@cache
def name(place: int) -> str:
    return peer_id_of(public_der(key(place)))


def new_book(place: int, run: str = RUN, **more: Any) -> Signatures:
    return Signatures(key(place), name(place), run, **more)


class Swarm:
    """Four peers at the genesis, and what they say to each other."""

    def __init__(self, **more: Any):
        self.names = [name(place) for place in range(4)]
        self.books = [new_book(place, **more) for place in range(4)]
        self.genesis = LogItem.genesis(Member(each, each, True) for each in self.names)
        self.ballot = Ballot(0, self.names[0])

    def say(self, sender: int, to: int, body: Body, item: LogItem | None = None) -> Message:
        head = (item or self.genesis).head
        data = self.books[sender].seal(Message(head, body), self.names[to])
        return self.books[to].open(self.names[sender], data)

    def entry(self, item: LogItem | None = None, ballot: Ballot | None = None, **more: Any) -> Entry:
        """An entry whose answers peers 1 and 2 gave to everybody."""
        head = (item or self.genesis).head
        answers = []
        for reducer in (1, 2):
            shares = tuple(Share(each, head.epoch, head.epoch, 8, 1 << (70 * reducer)) for each in sorted(self.names))
            answer = Answer(1 << (70 * reducer), self.names[reducer], head.lineage, shares)
            signature = self.books[reducer].sign_answer(answer)
            for each in self.books:
                assert each.check_answer(answer, signature, self.books[reducer].credential)
            answers.append(answer)
        members = tuple(sorted(Member(each, each, True) for each in self.names))
        birth = ballot or self.ballot
        return Entry(*head.order, head.epoch, head.lineage, birth, HASH, members, tuple(answers), 0, **more)

    def certified(self, item: LogItem | None = None, goodbyes: tuple[Goodbye, ...] = ()) -> LogItem:
        """An item for which peers 0, 1 and 2 voted; peer 0 has the votes."""
        before = item or self.genesis
        entry = self.entry(before)
        for voter in (1, 2):
            self.say(voter, 0, Vote(self.ballot, entry.lineage, None), before)
        voters = frozenset(self.names[:3])
        return before.after_entry(entry, Certificate(entry.lineage, self.ballot, voters, goodbyes))


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


# --- keys ---


def test_the_peer_id_is_libp2ps(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    ensure_identity(path)
    identity = path.read_bytes()
    found = load_private_key(identity)
    assert peer_id_of(public_der(found)) == str(PeerID.from_identity(identity).to_base58())


def test_the_peer_id_is_the_daemons(tmp_path: Path) -> None:
    from hivemind.p2p import P2P

    path = tmp_path / "identity"
    ensure_identity(path)

    async def ask() -> str:
        p2p = await P2P.create(identity_path=str(path))
        try:
            return str(p2p.peer_id.to_base58())
        finally:
            await p2p.shutdown()

    assert peer_id_of(public_der(load_private_key(path.read_bytes()))) == asyncio.run(ask())


def test_a_key_belongs_to_one_peer_id() -> None:
    with pytest.raises(ValueError, match="not that of"):
        Signatures(key(0), name(1), RUN)


# --- credentials ---


def liar(place: int, number: int) -> Signatures:
    """A peer with a node key that it should not have, and never two that are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(book, "node_key_of", lambda key, run: node_key_of(key, f"{run} {number}"))
        return new_book(place)


def test_the_node_key_is_the_same_in_every_life_and_another_in_every_run(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    ensure_identity(path)

    def node_key(run: str) -> bytes:
        found = load_private_key(path.read_bytes())
        return read_credential(Signatures(found, peer_id_of(public_der(found)), run).credential).node_key

    assert node_key(RUN) == node_key(RUN) != node_key("another run")
    assert node_key(RUN) != read_credential(new_book(0).credential).node_key


def test_the_node_key_of_a_peer_never_changes() -> None:
    """A kit that derives another one makes liars of honest peers."""
    p, q = 2**1024 - 105, 2**1024 - 179  # primes
    d = pow(65537, -1, (p - 1) * (q - 1))
    public = rsa.RSAPublicNumbers(65537, p * q)
    known = RSAPrivateKey.__new__(RSAPrivateKey)
    known._private_key = rsa.RSAPrivateNumbers(p, q, d, d % (p - 1), d % (q - 1), pow(q, -1, p), public).private_key()
    derived = "80ced0063e3be51d57c0e62dd47519ed8aa0ea457da6ca7f1d54a38670faa7e2"
    assert node_key_of(known, "a run").public_key().public_bytes_raw().hex() == derived


def test_a_credential_holds_for_its_peer_and_run() -> None:
    credential = read_credential(new_book(0).credential)
    assert certified(credential, RUN).peer == name(0)
    foreign = read_credential(new_book(2).credential)
    for wrong in (
        read_credential(new_book(0, "another run").credential),
        credential._replace(signature=b""),
        credential._replace(signature=bytes(256)),
        credential._replace(node_key=foreign.node_key),
        credential._replace(key=foreign.key),
        credential._replace(key=b"no key"),
    ):
        with pytest.raises(BadSignature):
            certified(wrong, RUN)


def test_credentials_of_no_size_are_refused() -> None:
    credential = read_credential(new_book(0).credential)
    assert len(encode(credential)) < 600
    for wrong in (
        b"",
        bytes(LONGEST_CREDENTIAL + 1),
        encode(credential)[:-1],
        encode(credential._replace(node_key=credential.node_key[:-1])),
        encode(credential._replace(node_key=credential.node_key + b"x")),
        encode(credential._replace(key=bytes(1101))),
        encode(credential._replace(signature=bytes(4096))),
    ):
        with pytest.raises(BadSignature):
            read_credential(wrong)


@pytest.mark.parametrize("exponent, bits", [(3, 2048), (65537, 1024)])
def test_keys_that_libp2p_has_not_are_refused(exponent: int, bits: int) -> None:
    weak = RSAPrivateKey.__new__(RSAPrivateKey)
    weak._private_key = rsa.generate_private_key(exponent, bits)
    credential = make_credential(weak, node_key_of(weak, RUN), RUN)
    with pytest.raises(BadSignature, match="exponent|bits"):
        certified(read_credential(credential), RUN)


def test_a_credential_of_another_run_is_refused(swarm: Swarm) -> None:
    data = swarm.books[1].seal(Message(swarm.genesis.head, Vote(swarm.ballot, HASH, None)), name(0))
    envelope = decode(book.Envelope, data)
    for wrong in (new_book(1, "another run").credential, new_book(2).credential, b"none"):
        with pytest.raises(BadSignature):
            swarm.books[0].open(name(1), encode(replace(envelope, credentials=(wrong,))))
    assert not swarm.books[0].knows(name(1))
    swarm.books[0].open(name(1), data)
    assert swarm.books[0].knows(name(1))


def test_a_forged_signature_is_refused(swarm: Swarm) -> None:
    data = swarm.books[1].seal(Message(swarm.genesis.head, Vote(swarm.ballot, HASH, None)), name(0))
    envelope = decode(book.Envelope, data)
    (signature,) = envelope.signatures
    assert len(signature) == 64
    for wrong in (
        b"", signature[:-1], signature + b"x", bytes(64), signature[32:] + signature[:32], bytes(256),
        bytes([signature[0] ^ 1]) + signature[1:], swarm.books[2].credential,
    ):  # fmt: skip
        with pytest.raises(BadSignature, match="did not sign"):
            swarm.books[0].open(name(1), encode(replace(envelope, signatures=(wrong,))))
    assert len(swarm.books[0]) == 0


def test_an_answer_needs_a_credential_only_once(swarm: Swarm) -> None:
    answers = [Answer(1, name(1), bytes([each]) * 32, ()) for each in range(3)]
    signatures = [swarm.books[1].sign_answer(answer) for answer in answers]
    stranger = new_book(3)
    assert not stranger.check_answer(answers[0], signatures[0], b"")
    assert not stranger.check_answer(answers[0], signatures[0], swarm.books[2].credential)
    assert not stranger.knows(name(1))
    assert stranger.check_answer(answers[0], signatures[0], swarm.books[1].credential)
    assert stranger.knows(name(1)) and stranger.check_answer(answers[1], signatures[1], b"")
    assert not stranger.check_answer(answers[2], signatures[1], b"")


# --- two node keys of one peer ---


def test_a_second_node_key_is_a_proof(swarm: Swarm) -> None:
    """It says one thing to peer 0 and another to peer 2, each under a key of its own."""
    vote, other = Vote(swarm.ballot, HASH, None), Vote(swarm.ballot, b"other", None)
    swarm.say(1, 0, vote)
    honest, swarm.books[1] = swarm.books[1], liar(1, 2)
    swarm.say(1, 2, other)
    assert swarm.books[0].found == swarm.books[2].found == []
    with pytest.raises(BadSignature, match="second node key"):
        swarm.say(1, 0, other)
    (verdict,) = swarm.books[0].found
    assert verdict.peer == name(1) and new_book(3).proves(verdict)
    assert swarm.say(0, 3, Accuse(verdict)).body == Accuse(verdict)
    proof = decode(TwoKeys, verdict.proof)
    of_another = new_book(2).credential
    for wrong in (
        verdict._replace(peer=name(2)),
        verdict._replace(proof=encode(TwoKeys(proof.one, proof.one))),
        verdict._replace(proof=encode(TwoKeys(proof.one, honest.credential))),
        verdict._replace(proof=encode(TwoKeys(proof.one, of_another))),
        verdict._replace(proof=encode(TwoKeys(of_another, proof.one))),
        verdict._replace(proof=encode(TwoKeys(proof.one, new_book(1, "another run").credential))),
        verdict._replace(proof=encode(TwoKeys(proof.one, b""))),
    ):
        assert not new_book(3).proves(wrong)


def test_what_a_peer_signed_with_two_node_keys_can_be_carried_on(swarm: Swarm) -> None:
    vote, other = Vote(swarm.ballot, HASH, None), Vote(swarm.ballot, b"other", None)
    slot = swarm.genesis.head.lineage
    swarm.say(1, 0, vote)
    swarm.books[1] = liar(1, 2)
    swarm.say(1, 2, other)
    for sender, said in ((0, vote), (2, other)):
        body = Sketches(slot, ((name(1), said),))
        assert swarm.say(sender, 3, body).body == body, "honest peers can still talk to each other"
    (verdict,) = swarm.books[3].found
    assert new_book(2).proves(verdict)
    both = Sketches(slot, ((name(1), vote), (name(1), other)))
    assert swarm.say(3, 2, both).body == both
    swarm.books[0] = new_book(0)
    assert swarm.say(3, 0, both).body == both, "all credentials that it takes travel"


def test_a_credential_that_was_pushed_out_comes_again(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MOST_OF_PEER", 2)
    slot = swarm.genesis.head.lineage

    def sketches(turn: int) -> Sketches:
        return Sketches(slot, ((name(1), Vote(Ballot(turn, name(1)), HASH, None)),))

    swarm.say(1, 0, Vote(Ballot(0, name(1)), HASH, None))
    swarm.say(1, 0, Vote(Ballot(9, name(1)), HASH, None))
    swarm.say(0, 3, sketches(0))
    for turn in (1, 2):
        swarm.books[1] = liar(1, turn)
        swarm.books[2] = new_book(2)
        swarm.say(1, 2, Vote(Ballot(turn, name(1)), HASH, None))
        swarm.say(2, 3, sketches(turn))
    with pytest.raises(BadSignature, match="did not sign"):
        swarm.say(0, 3, sketches(9))
    swarm.say(3, 0, Lead(swarm.ballot, True))
    assert swarm.say(0, 3, sketches(9)).body == sketches(9)


# --- what travels ---


def test_messages_without_statements_travel(swarm: Swarm) -> None:
    assert swarm.say(0, 1, Lead(swarm.ballot, True)).body == Lead(swarm.ballot, True)
    data = swarm.books[0].seal(Message(None, Lead(swarm.ballot, True)), name(1))
    assert swarm.books[1].open(name(0), data).head is None


def test_a_certificate_carries_the_votes_that_its_leader_got(swarm: Swarm) -> None:
    item = swarm.certified()
    body = Items(swarm.genesis.head.lineage, (item,))
    assert swarm.say(0, 3, body).body == body
    assert swarm.books[3].check_items([item]) is None
    swarm.books[2] = new_book(2)  # it has never heard of anybody
    assert swarm.say(3, 2, body, item).body == body, "what came by one peer goes on to the next"


def test_a_certificate_needs_votes_that_were_given(swarm: Swarm) -> None:
    entry = swarm.entry()
    voters = frozenset({name(0), name(1)})
    item = swarm.genesis.after_entry(entry, Certificate(entry.lineage, swarm.ballot, voters))
    with pytest.raises(BadSignature, match="vote"):
        swarm.say(0, 3, Items(swarm.genesis.head.lineage, (item,)))
    assert swarm.books[3].check_items([item]) is not None


def test_an_entry_without_a_certificate_is_refused(swarm: Swarm) -> None:
    item = replace(swarm.certified(), certificate=None)
    with pytest.raises(BadSignature, match="certificate"):
        swarm.say(0, 3, Items(swarm.genesis.head.lineage, (item,)))
    assert "certificate" in (swarm.books[0].check_items([item]) or "")


def test_an_answer_needs_its_reducer(swarm: Swarm) -> None:
    entry = swarm.entry()
    assert swarm.say(0, 3, Propose(swarm.ballot, entry, ())).body == Propose(swarm.ballot, entry, ())
    (share, *others), answer = entry.answers[0].shares, entry.answers[0]
    changed = answer._replace(shares=(share._replace(samples=9), *others))
    with pytest.raises(BadSignature, match="answer"):
        swarm.say(0, 3, Propose(swarm.ballot, replace(entry, answers=(changed,)), ()))
    with pytest.raises(BadSignature, match="answer"):
        swarm.say(0, 3, Held(HASH, (changed,)))
    signature, public = swarm.books[0].answer_signature(answer) or (b"", b"")
    assert swarm.books[0].answer_signature(changed) is None
    stranger = new_book(3)
    assert not stranger.check_answer(changed, signature, public)
    assert not new_book(3).check_answer(answer, signature, stranger.credential)
    assert stranger.check_answer(answer, signature, public)
    with pytest.raises(ValueError, match="not this peer"):
        stranger.sign_answer(answer)


def test_a_proposal_is_its_leaders(swarm: Swarm) -> None:
    with pytest.raises(BadSignature, match="proposal"):
        swarm.say(1, 3, Propose(swarm.ballot, swarm.entry(), ()))


def test_a_vote_is_its_senders_and_of_its_slot(swarm: Swarm) -> None:
    data = swarm.books[1].seal(Message(swarm.genesis.head, Vote(swarm.ballot, HASH, None)), name(0))
    with pytest.raises(BadSignature):
        swarm.books[0].open(name(2), data)
    envelope = decode(book.Envelope, data)
    elsewhere = replace(envelope.message, head=swarm.genesis.head._replace(lineage=HASH))
    with pytest.raises(BadSignature, match="did not sign"):
        swarm.books[0].open(name(1), encode(replace(envelope, message=elsewhere)))
    with pytest.raises(BadSignature, match="slot"):
        swarm.books[0].open(name(1), encode(replace(envelope, message=replace(elsewhere, head=None))))
    assert swarm.books[0].open(name(1), data).body == Vote(swarm.ballot, HASH, None)


def test_a_promise_is_bound_to_its_slot_and_to_what_it_tells(swarm: Swarm) -> None:
    entry, higher = swarm.entry(), Ballot(1, name(3))
    swarm.say(0, 1, Propose(swarm.ballot, entry, ()))
    promise = Promise(higher, entry, swarm.ballot)
    assert swarm.say(1, 3, promise).body == promise
    body = Propose(higher, entry, ((name(1), promise), (name(3), Promise(higher, None, None))))
    assert swarm.say(3, 2, body).body == body, "the leader carries the promises that it got"
    hidden = Propose(higher, entry, ((name(1), Promise(higher, None, None)),))
    with pytest.raises(BadSignature, match="promise"):
        swarm.say(3, 2, hidden)


def test_a_promise_cannot_tell_of_a_proposal_that_nobody_made(swarm: Swarm) -> None:
    with pytest.raises(BadSignature, match="proposal"):
        swarm.say(1, 3, Promise(Ballot(1, name(3)), swarm.entry(), swarm.ballot))


def test_sketches_carry_votes(swarm: Swarm) -> None:
    vote = Vote(swarm.ballot, HASH, 0.5)
    swarm.say(1, 0, vote)
    body = Sketches(swarm.genesis.head.lineage, ((name(0), vote), (name(1), vote)))
    assert swarm.say(0, 2, body).body == body
    with pytest.raises(BadSignature, match="vote"):
        swarm.say(0, 2, replace(body, slot=HASH))


def test_an_opening_needs_its_signers(swarm: Swarm) -> None:
    members = tuple(sorted(Member(name(place), name(place), True) for place in (0, 1)))
    opening = Opening(0, 0, 0, swarm.genesis.head.lineage, 0, members)
    item = swarm.genesis.after_opening(opening, frozenset({name(0), name(1)}))
    body = Items(swarm.genesis.head.lineage, (item,))
    with pytest.raises(BadSignature, match="opening"):
        swarm.say(0, 2, body)
    swarm.say(1, 0, SignOpening(opening.lineage, 0))
    assert swarm.say(0, 2, body).body == body


def test_statements_of_another_run_do_not_hold(swarm: Swarm) -> None:
    data = new_book(1, "another run").seal(Message(swarm.genesis.head, Vote(swarm.ballot, HASH, None)), name(0))
    with pytest.raises(BadSignature, match="not certified for this run"):
        swarm.books[0].open(name(1), data)


# --- who has left ---


def test_an_entry_calls_nobody_gone_who_said_no_goodbye(swarm: Swarm) -> None:
    goodbye = Goodbye(name(3), swarm.genesis.head.lineage, swarm.ballot)
    entry = swarm.entry(gone=(name(3),))
    body = Propose(swarm.ballot, entry, ())
    with pytest.raises(BadSignature, match="goodbye"):
        swarm.say(0, 1, body)
    swarm.say(3, 0, goodbye)
    with_goodbye = replace(body, goodbyes=(goodbye,))
    assert swarm.say(0, 1, with_goodbye).body == with_goodbye
    higher = Ballot(1, name(2))
    promise = Promise(higher, entry, swarm.ballot)
    assert swarm.say(1, 2, promise).body == promise, "the goodbye travels beside the promise"
    again = Propose(higher, entry, ((name(1), promise),))
    assert swarm.say(2, 0, again).body == again


def test_a_goodbye_goes_into_certificates(swarm: Swarm) -> None:
    goodbye = Goodbye(name(3), swarm.genesis.head.lineage, swarm.ballot, swarm.entry(), swarm.ballot)
    swarm.say(3, 0, goodbye)
    item = swarm.certified(goodbyes=(goodbye,))
    body = Items(swarm.genesis.head.lineage, (item,))
    assert swarm.say(0, 1, body).body == body
    changed = replace(goodbye, promised=Ballot(9, name(0)))
    assert item.certificate is not None
    item = replace(item, certificate=item.certificate._replace(goodbyes=(changed,)))
    with pytest.raises(BadSignature, match="goodbye"):
        swarm.say(0, 1, replace(body, items=(item,)))


# --- credentials travel once ---


def test_credentials_travel_once_and_again_when_they_are_lacking(swarm: Swarm) -> None:
    vote = Vote(swarm.ballot, HASH, None)
    message = Message(swarm.genesis.head, vote)
    first = swarm.books[1].seal(message, name(0))
    second = swarm.books[1].seal(message, name(0))
    assert decode(book.Envelope, first).credentials == (swarm.books[1].credential,)
    assert decode(book.Envelope, second).credentials == ()
    with pytest.raises(BadSignature, match="key"):
        swarm.books[0].open(name(1), second)  # the first was lost
    swarm.say(0, 1, Lead(swarm.ballot, True))
    assert swarm.books[0].open(name(1), swarm.books[1].seal(message, name(0))) == message
    assert decode(book.Envelope, swarm.books[1].seal(message, name(0))).credentials == ()
    swarm.books[1].greet(name(0))
    assert decode(book.Envelope, swarm.books[1].seal(message, name(0))).credentials == (swarm.books[1].credential,)


def test_a_credential_of_somebody_else_is_no_use(swarm: Swarm) -> None:
    data = swarm.books[1].seal(Message(swarm.genesis.head, Vote(swarm.ballot, HASH, None)), name(0))
    envelope = decode(book.Envelope, data)
    for credentials in ((swarm.books[2].credential,), (b"no key",), (bytes(5000),), ()):
        with pytest.raises(BadSignature, match="key"):
            swarm.books[0].open(name(1), encode(replace(envelope, credentials=credentials)))


def test_each_statement_is_signed_once(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = []

    class Counted:
        def __init__(self, key: Ed25519PrivateKey):
            self.key = key
            self.public_key = key.public_key

        def sign(self, data: bytes) -> bytes:
            signed.append(data)
            return self.key.sign(data)

    monkeypatch.setattr(book, "node_key_of", lambda *args: Counted(node_key_of(*args)))
    swarm.books[1] = new_book(1)
    for to in (0, 2, 3):
        swarm.say(1, to, Vote(swarm.ballot, HASH, 0.1 * to))
    assert len(signed) == 1


# --- equivocation ---


def two_votes(swarm: Swarm) -> Verdict:
    """Peer 1 votes twice at one ballot; peer 0 hears both."""
    swarm.say(1, 0, Vote(swarm.ballot, HASH, None))
    assert swarm.books[0].found == []
    swarm.say(1, 0, Vote(swarm.ballot, b"other", None))
    (verdict,) = swarm.books[0].found
    return verdict


def test_two_votes_are_a_proof_for_everybody(swarm: Swarm) -> None:
    verdict = two_votes(swarm)
    assert verdict.peer == name(1)
    assert swarm.say(0, 2, Accuse(verdict)).body == Accuse(verdict)
    body = Propose(swarm.ballot, swarm.entry(verdicts=(verdict,)), ())
    assert swarm.say(0, 3, body).body == body
    swarm.say(1, 0, Vote(swarm.ballot, b"third", None))
    assert len(swarm.books[0].found) == 1, "one verdict on each peer"


def test_a_promise_that_hides_a_vote_is_a_proof(swarm: Swarm) -> None:
    swarm.say(1, 0, Vote(swarm.ballot, HASH, None))
    swarm.say(1, 0, Promise(Ballot(1, name(0)), None, None))
    (verdict,) = swarm.books[0].found
    assert new_book(3).proves(verdict)


def test_two_proposals_are_a_proof(swarm: Swarm) -> None:
    entry = swarm.entry()
    swarm.say(0, 1, Propose(swarm.ballot, entry, ()))
    swarm.say(0, 1, Propose(swarm.ballot, replace(entry, missing=4), ()))
    (verdict,) = swarm.books[1].found
    assert verdict.peer == name(0) and new_book(3).proves(verdict)


def test_a_verdict_needs_its_proof(swarm: Swarm) -> None:
    verdict = two_votes(swarm)
    proof = decode(Equivocation, verdict.proof)
    for wrong in (
        verdict._replace(peer=name(2)),
        verdict._replace(proof=b""),
        verdict._replace(proof=b"x"),
        verdict._replace(proof=encode(replace(proof, other=proof.one))),
        verdict._replace(proof=encode(replace(proof, other=proof.other._replace(entry=b"third")))),
        verdict._replace(proof=encode(replace(proof, other=proof.other._replace(ballot=Ballot(1, name(0)))))),
        verdict._replace(proof=encode(replace(proof, credential=swarm.books[2].credential))),
    ):
        with pytest.raises(BadSignature, match="no proof"):
            swarm.say(0, 3, Accuse(wrong))
        with pytest.raises(BadSignature, match="no proof"):
            swarm.say(0, 3, Propose(swarm.ballot, swarm.entry(verdicts=(wrong,)), ()))
    assert not new_book(3, "another run").proves(verdict)


def test_a_proof_of_another_kind_is_for_the_process_to_check() -> None:
    swarm = Swarm(check_proof=lambda verdict: verdict.proof == b"wrong gradients")
    body = Accuse(Verdict(name(1), b"wrong gradients"))
    assert swarm.say(0, 2, body).body == body
    with pytest.raises(BadSignature, match="no proof"):
        swarm.say(0, 2, Accuse(Verdict(name(1), b"other")))


def test_contradictions() -> None:
    slot, other, ballot = b"slot", b"other", Ballot(0, "a")
    higher = Ballot(1, "a")
    assert contradicts(vote_of("a", slot, ballot, b"one"), vote_of("a", slot, ballot, b"two"))
    assert not contradicts(vote_of("a", slot, ballot, b"one"), vote_of("a", slot, ballot, b"one"))
    assert not contradicts(vote_of("a", slot, ballot, b"one"), vote_of("b", slot, ballot, b"two"))
    assert not contradicts(vote_of("a", slot, ballot, b"one"), vote_of("a", other, ballot, b"two"))
    assert not contradicts(vote_of("a", slot, ballot, b"one"), vote_of("a", slot, higher, b"two"))
    assert not contradicts(vote_of("a", slot, ballot, b"one"), proposal_of(slot, ballot, b"two"))
    assert contradicts(proposal_of(slot, ballot, b"one"), proposal_of(slot, ballot, b"two"))
    hides = promise_of("a", slot, Promise(higher, None, None))
    assert contradicts(hides, vote_of("a", slot, ballot, b"one"))
    assert contradicts(vote_of("a", slot, ballot, b"one"), hides)
    assert not contradicts(hides, vote_of("a", slot, higher, b"one"))
    assert not contradicts(promise_of("a", slot, Promise(ballot, None, None)), vote_of("a", slot, ballot, b"one"))


# --- orders ---


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    folder.create(RUN)
    return folder


def test_an_order_is_the_monitors(keys: KeyFolder) -> None:
    swarm = Swarm(trust=Trust.of(RUN, keys.root_public))
    order = RollbackOrder(1, 0, 0, swarm.genesis.head.lineage, swarm.genesis.membership.recent[0])
    with pytest.raises(BadSignature, match="order"):
        swarm.say(0, 1, Order(order))
    signature = swarm.books[0].sign_order(order, keys.signer("monitor"))
    assert swarm.say(0, 1, Order(order)).body == Order(order)
    item = swarm.genesis.after_order(order)
    assert swarm.say(1, 2, Items(HASH, (item,))).body == Items(HASH, (item,))
    exported = swarm.books[1].export([item])
    assert swarm.books[3].load(exported) is None and swarm.books[3].check_items([item]) is None
    assert new_book(3, trust=Trust.of(RUN, keys.root_public)).check_order(order, signature)
    assert not new_book(3, trust=Trust.of(RUN, keys.root_public)).check_order(replace(order, epoch=3), signature)
    assert not new_book(3).check_order(order, signature), "without the run's root key there are no orders"
    with pytest.raises(BadSignature, match="not certified"):
        swarm.books[0].sign_order(replace(order, epoch=4), keys.signer("authority"))


# --- starting again ---


def test_a_book_that_starts_again_has_what_its_log_needs(swarm: Swarm) -> None:
    items = [swarm.certified()]
    items.append(swarm.certified(items[0]))
    exported = swarm.books[0].export(items)
    for place in (0, 3):
        again = new_book(place)
        assert again.load(exported) is None
        assert again.check_items(items) is None
        swarm.books[place] = again
        body = Items(swarm.genesis.head.lineage, tuple(items))
        swarm.books[1] = new_book(1)
        assert swarm.say(place, 1, body).body == body


def test_a_peer_that_trains_alone_can_show_its_log(swarm: Swarm) -> None:
    genesis = LogItem.genesis((swarm.genesis.membership.view[name(0)],))
    entry = replace(swarm.entry(genesis), answers=())
    item = genesis.after_entry(entry, Certificate(entry.lineage, swarm.ballot, frozenset({name(0)})))
    exported = swarm.books[0].export((genesis, item))
    assert swarm.books[1].load(exported) is None
    assert swarm.books[1].check_items((genesis, item)) is None


def test_a_peer_that_starts_again_can_promise_what_it_accepted(swarm: Swarm) -> None:
    goodbye = Goodbye(name(3), swarm.genesis.head.lineage, swarm.ballot)
    swarm.say(3, 0, goodbye)
    entry = swarm.entry(gone=(name(3),))
    swarm.say(0, 1, Propose(swarm.ballot, entry, (), (goodbye,)))
    exported = swarm.books[1].export(
        (swarm.genesis,), BallotRecord(entry.parent, swarm.ballot, entry, accepted_at=swarm.ballot)
    )
    promise = Promise(Ballot(1, name(2)), entry, swarm.ballot)
    swarm.books[1] = new_book(1)
    with pytest.raises(BadSignature):
        swarm.say(1, 2, promise)
    assert swarm.books[1].load(exported) is None
    assert swarm.say(1, 2, promise).body == promise


def test_what_a_stranger_exports_is_checked(swarm: Swarm) -> None:
    item = swarm.certified()
    exported = swarm.books[0].export([item])
    parts = decode(book.Exported, exported)
    first, *others = parts.signed
    wrong = first._replace(signature=bytes(64))
    for data in (
        b"",
        exported[:-1],
        encode(replace(parts, signed=(wrong, *others))),
        encode(replace(parts, credentials=())),
        encode(replace(parts, leavers=(Leaver(name(1), HASH, swarm.ballot, None, None, bytes(64)),))),
    ):
        again = new_book(3)
        assert again.load(data)
        assert len(again) == 0 and again.check_items([item])
    again = new_book(3)
    assert again.load(encode(replace(parts, signed=tuple(others)))) is None
    assert "is not signed" in (again.check_items([item]) or "")


def test_a_signature_of_one_peer_under_the_statement_of_another_is_no_use(swarm: Swarm) -> None:
    item = swarm.certified()
    parts = decode(book.Exported, swarm.books[0].export([item]))
    victims = [each for each in parts.signed if each.signer == name(1)]
    forged = []
    for each in victims:
        signature = book._signed_bytes(each.digest)
        forged.append(book.Signed(name(3), each.digest, node_key_of(key(3), RUN).sign(signature)))
    rest = tuple(each for each in parts.signed if each not in victims)
    again = new_book(2)
    credentials = (*parts.credentials, swarm.books[3].credential)
    assert again.load(encode(replace(parts, signed=(*rest, *forged), credentials=credentials))) is None
    assert name(1) in (again.check_items([item]) or "")


# --- bounds ---


def test_the_book_forgets_what_the_log_does_not_need(swarm: Swarm) -> None:
    items = [swarm.genesis]
    sizes = []
    for _ in range(8):
        item = swarm.certified(items[-1])
        swarm.say(3, 0, Vote(Ballot(5, name(3)), HASH, None), items[-1])  # for nothing
        swarm.say(0, 3, Items(items[-1].head.lineage, (item,)), item)
        items = [*items, item][-3:]
        swarm.books[0].prune(tuple(items))
        swarm.books[0].prune(tuple(items))  # as often as it likes
        sizes.append(len(swarm.books[0]))
        assert swarm.books[0].check_items(items[1:]) is None
    assert sizes[-1] == sizes[-2] == sizes[-3]


def test_what_a_slow_replay_needs_stays(swarm: Swarm) -> None:
    items = [swarm.genesis]
    for _ in range(6):
        items.append(swarm.certified(items[-1]))
    swarm.say(0, 3, Items(swarm.genesis.head.lineage, tuple(items[1:])), items[-1])
    for place in range(1, len(items)):  # peer 3 takes one step after another
        swarm.books[3].prune(tuple(items[:place]), tuple(items[place:]))
    assert swarm.books[3].check_items(items[1:]) is None


def test_what_is_said_of_the_slot_under_way_stays(swarm: Swarm) -> None:
    first = swarm.certified()
    vote = Vote(swarm.ballot, HASH, None)
    swarm.say(1, 0, vote, first)  # ahead of what peer 0 has
    for items in ((swarm.genesis,), (swarm.genesis, first)):
        swarm.books[0].prune(items)
    body = Sketches(first.head.lineage, ((name(1), vote),))
    assert swarm.say(0, 2, body, first).body == body


def test_a_flood_of_statements_has_an_end(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MOST_OF_ONE", 8)
    item = swarm.certified()
    swarm.say(0, 3, Items(swarm.genesis.head.lineage, (item,)))
    swarm.books[3].prune((swarm.genesis, item))
    before = len(swarm.books[3])
    for turn in range(30):
        swarm.say(1, 3, Vote(Ballot(turn, name(1)), HASH, None))
    assert len(swarm.books[3]) <= before + 9
    assert swarm.books[3].check_items([item]) is None


def test_a_flood_of_strangers_does_not_push_members_out(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "MOST_STATEMENTS", 32)
    members = tuple(each for each in swarm.genesis.membership.recent[0] if each.peer != name(3))
    genesis = LogItem.genesis(members)
    swarm.books[0].prune((genesis,))
    mine = Vote(swarm.ballot, HASH, None)
    swarm.say(1, 0, mine, genesis)
    for turn in range(64):
        swarm.say(3, 0, Vote(Ballot(turn, name(3)), HASH, None), genesis)
    assert len(swarm.books[0]) <= 32
    body = Sketches(genesis.head.lineage, ((name(1), mine),))
    assert swarm.say(0, 2, body).body == body


def test_hashes_that_are_too_long_are_refused(swarm: Swarm) -> None:
    for body in (Vote(swarm.ballot, bytes(65), None), SignOpening(bytes(65), 0)):
        with pytest.raises(BadSignature, match="lineage"):
            swarm.say(1, 0, body)


def test_items_that_are_too_long_are_cut(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [swarm.genesis]
    for _ in range(6):
        items.append(swarm.certified(items[-1]))
    body = Items(swarm.genesis.head.lineage, tuple(items[1:]))
    whole = swarm.books[0].seal(Message(items[-1].head, body), name(3))
    swarm.books[0].greet(name(3))
    monkeypatch.setattr(book, "MOST", len(whole) // 2)
    said = swarm.say(0, 3, body, items[-1]).body
    assert isinstance(said, Items) and said.items == body.items[: len(said.items)] and 0 < len(said.items) < 6
    monkeypatch.setattr(book, "MOST", 10)
    with pytest.raises(WireError, match="most"):
        swarm.say(0, 3, body)


def test_items_with_too_many_statements_are_cut(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [swarm.genesis]
    for _ in range(6):
        items.append(swarm.certified(items[-1]))
    body = Items(swarm.genesis.head.lineage, tuple(items[1:]))
    monkeypatch.setattr(book, "MOST_SIGNED", 5 * 4)  # an item has three votes and two answers
    said = swarm.say(0, 3, body, items[-1]).body
    assert isinstance(said, Items) and said.items == body.items[:3]
    monkeypatch.setattr(book, "MOST_SIGNED", 4)
    with pytest.raises(WireError, match="most"):
        swarm.say(0, 3, body)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_an_envelope_that_is_changed_is_refused(data: st.DataObject) -> None:
    swarm, valid, message = _sealed()
    changed = bytearray(valid)
    place = data.draw(st.integers(0, len(changed) - 1))
    changed[place] ^= data.draw(st.integers(1, 255))
    try:
        opened = swarm.books[3].open(name(0), bytes(changed))
    except (WireError, BadSignature):
        return
    assert opened == message or opened.head != message.head or opened.body != message.body
    assert swarm.books[3].check_items(opened.body.items) is None  # type: ignore[union-attr]


@cache
def _sealed() -> tuple[Swarm, bytes, Message]:
    swarm = Swarm()
    item = swarm.certified()
    message = Message(item.head, Items(swarm.genesis.head.lineage, (item,)))
    return swarm, swarm.books[0].seal(message, name(3)), message


def test_strangers_bytes_are_refused(swarm: Swarm) -> None:
    for data in (b"", b"\x91" * 1000, bytes(MOST + 1), encode(Message(None, Lead(swarm.ballot, True)))):
        with pytest.raises(WireError):
            swarm.books[0].open(name(1), data)
