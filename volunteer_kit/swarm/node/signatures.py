"""Sign and check statements: each statement travels with the signature of the peer that it binds.

A message travels in an envelope with the signatures of all statements in it, those of its sender and those of others
that it carries on. A book keeps the statements that hold, so each is signed once and checked once. Peers are known by
their libp2p ids and sign with node keys (`credentials`); a credential travels once to each peer, and again when that
peer says that it lacks it. Rollback orders are signed by the run's monitor (`auth.keys`).

A peer has one node key. With a second one it could contradict itself without proof, so two credentials of one peer are
a proof against it. Until it is out, others still check what it signed with either.

The book is not safe to use from several threads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import msgpack
from hivemind.utils.crypto import RSAPrivateKey

from volunteer_kit.auth.keys import Signer, TokenError, Trust
from volunteer_kit.swarm.node.credentials import (
    Credential,
    NodeKey,
    certified,
    make_credential,
    node_key_of,
    peer_id_of,
    public_der,
    read_credential,
)
from volunteer_kit.swarm.node.statements import (
    MONITOR,
    BadSignature,
    Statement,
    answer_of,
    contradicts,
    entry_in,
    item_statements,
    order_of,
    proposal_of,
    statements_in,
    words_of,
)
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Answer
from volunteer_kit.swarm.sync.entries import RollbackOrder, Verdict
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    Accuse,
    BallotRecord,
    Items,
    Message,
    Propose,
)
from volunteer_kit.swarm.wire import MOST, WireError, decode, encode

MOST_EXPORTED: Final = 16 << 20  # bytes
MOST_STATEMENTS: Final = 1 << 15  # in the book, about 1 kB each
MOST_OF_ONE: Final = 512  # statements of one peer, besides what the log needs
MOST_KEYS: Final = 4096  # peers whose keys are here
MOST_OF_PEER: Final = 4  # node keys; an honest peer has one
MOST_PEERS: Final = 4096  # whose lacking keys are remembered
MOST_WANTED: Final = 64  # keys that one message asks for
MOST_SIGNED: Final = 1 << 12  # statements of one message; checking so many takes 0.6 s
LONGEST_HASH: Final = 64  # bytes of a lineage
LONGEST_SIGNATURE: Final = 1024  # bytes of the monitor's


# --- what travels and what is kept ---


class Leaver(NamedTuple):
    """A goodbye without its accepted proposal: an entry calls its peer gone."""

    peer: str
    slot: bytes
    promised: Ballot
    accepted: bytes | None  # lineage
    accepted_at: Ballot | None
    signature: bytes

    @property
    def statement(self) -> Statement:
        """As the peer signed it."""
        return ("goodbye", *self[:-1])


@dataclass(frozen=True)
class Envelope:
    """A message as it travels."""

    message: Message
    signatures: tuple[bytes, ...]  # of its statements, in their order, each once
    leavers: tuple[Leaver, ...] = ()
    credentials: tuple[bytes, ...] = ()
    wants: tuple[str, ...] = ()  # signers whose credentials the sender lacks


class Signed(NamedTuple):
    """A digest that somebody signed. The signer may have signed anything: it says who the statement must be of."""

    signer: str
    digest: bytes  # of a statement
    signature: bytes


@dataclass(frozen=True)
class Exported:
    """A part of the book."""

    signed: tuple[Signed, ...]
    leavers: tuple[Leaver, ...]
    credentials: tuple[bytes, ...]


class SignedStatement(NamedTuple):
    """A vote, a proposal or a promise, as a proof carries it."""

    kind: str
    slot: bytes
    ballot: Ballot
    entry: bytes | None  # lineage
    accepted_at: Ballot | None  # of a promise
    signature: bytes

    def statement(self, signer: str) -> Statement:
        """As the signer signed it."""
        what = (self.entry, self.accepted_at) if self.kind == "promise" else self.entry
        return (self.kind, signer, self.slot, self.ballot, what)


@dataclass(frozen=True)
class Equivocation:
    """Two statements of one peer that contradict each other: the proof of a verdict."""

    credential: bytes
    one: SignedStatement
    other: SignedStatement


@dataclass(frozen=True)
class TwoKeys:
    """The credentials of two node keys of one peer: the proof of a verdict, whatever it signs with them."""

    one: bytes
    other: bytes


@dataclass(slots=True)
class _Known:
    """A statement that holds."""

    signature: bytes
    key: NodeKey | None  # that made it; None: the monitor's
    statement: Statement | None  # None: of an answer, or not seen yet
    seen: int  # when it was of use last, counted in slots


Digested = tuple[str, bytes, Statement]  # (signer, digest of the statement, statement)


class _Digester:
    """Digests of statements, with those of our own log's items at hand."""

    def __init__(self, run_key: str):
        self._run_key = run_key
        self._items: dict[int, tuple[LogItem, tuple[Digested, ...]]] = {}

    def digest(self, statement: Statement) -> bytes:
        """SHA-256 of the statement behind the run's key."""
        content = (self._run_key, *statement)
        try:
            packed = msgpack.packb(content)
        except OverflowError:
            packed = msgpack.packb(_without_long_ints(content))
        return hashlib.sha256(b"volunteer-kit node statement\0" + packed).digest()

    def of(self, statements: Iterable[Statement]) -> tuple[Digested, ...]:
        """Each statement once, in their order."""
        return tuple((str(each[1]), self.digest(each), each) for each in dict.fromkeys(statements))

    def of_item(self, item: LogItem) -> tuple[Digested, ...]:
        """The statements of an item, each with its digest."""
        known = self._items.get(id(item))
        return known[1] if known is not None else self.of(item_statements(item))

    def keep_items(self, items: Iterable[LogItem]) -> None:
        """These items, and no others, are asked for often."""
        self._items = {id(item): (item, self.of_item(item)) for item in items}


def _without_long_ints(value: Any) -> Any:
    """Ints that msgpack has no form for become bytes; each place in a statement has one type, so this is unique."""
    if isinstance(value, tuple):
        return [_without_long_ints(each) for each in value]
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
    return value


def _signed_bytes(digest: bytes) -> bytes:
    return b"volunteer-kit node signature\0" + digest


class Signatures:
    """The book of one peer.

    :param key: this peer's libp2p key (`identity.load_private_key`)
    :param peer_id: what the key's public half hashes to, in base58
    :param run_key: statements of another run never hold
    :param trust: the run's root keys, for the monitor's orders; None: orders are refused
    :param check_proof: of a verdict that is no equivocation; None: such a verdict is refused
    :param now: s since 1970, for the end of the monitor's certificate

    `found` gets a verdict on each peer that contradicted itself; the owner takes them out.
    """

    def __init__(
        self,
        key: RSAPrivateKey,
        peer_id: str,
        run_key: str,
        *,
        trust: Trust | None = None,
        check_proof: Callable[[Verdict], bool] | None = None,
        now: Callable[[], float] = time.time,
    ):
        if peer_id_of(public_der(key)) != peer_id:
            raise ValueError(f"the key is not that of {peer_id}")
        self._key, self._run_key = node_key_of(key, run_key), run_key
        self.credential = make_credential(key, self._key, run_key)  # of this peer
        self.peer_id = peer_id
        self.found: list[Verdict] = []
        self._trust, self._check_proof, self._now = trust, check_proof, now
        self._digester = _Digester(run_key)
        self._known: dict[tuple[str, bytes], _Known] = {}  # (signer, digest), the newest last
        self._of_signer: dict[str, dict[bytes, None]] = {}  # digests, the newest last
        own = certified(read_credential(self.credential), run_key)
        self._keys: dict[str, dict[bytes, NodeKey]] = {peer_id: {own.node_key: own}}  # peer -> its keys, newest last
        self._given: dict[str, set[tuple[str, bytes]]] = {}  # peer -> signers and node keys that it was sent
        self._lacking: dict[str, dict[str, None]] = {}  # peer -> signers whose keys it did not send
        self._needed: frozenset[tuple[str, bytes]] = frozenset()
        self._members: frozenset[str] = frozenset()
        self._slot = b""
        self._slots_passed = 0
        self._proven: dict[bytes, None] = {}  # hashes of verdicts that hold
        self._caught: dict[str, None] = {}  # peers with a verdict of ours

    def __len__(self) -> int:
        """Statements in the book."""
        return len(self._known)

    # --- messages ---

    def seal(self, message: Message, to: str) -> bytes:
        """The message with all signatures that `to` needs. Items that would be too many are cut behind the first ones.

        :raises BadSignature: if it carries a statement of somebody else whose signature is not in the book
        :raises WireError: if it is too long, or a part of it has a wrong type
        """
        data = self._seal(message, to)
        while data is None and isinstance(message.body, Items) and len(message.body.items) > 1:
            items = message.body.items
            message = replace(message, body=replace(message.body, items=items[: len(items) // 2]))
            data = self._seal(message, to)
        if data is None:
            most = f"{MOST} bytes and {MOST_SIGNED} statements are the most"
            raise WireError(f"a {type(message.body).__name__} is too long; {most}")
        return data

    def _seal(self, message: Message, to: str) -> bytes | None:
        """None: it is too long."""
        body = message.body
        if isinstance(body, Items):
            found = tuple(dict.fromkeys(each for item in body.items for each in self._digester.of_item(item)))
        else:
            found = self._digester.of(statements_in(self.peer_id, message))
        leavers = self._leavers_for(message)
        if len(found) + len(leavers) > MOST_SIGNED:
            return None
        said = [self._said(*each) for each in found]
        signatures = tuple(known.signature for known in said)
        given = self._of_peer(self._given, to, set)
        new = {
            (key.peer, key.node_key): key.credential
            for key in self._keys_under(said, leavers)
            if key.peer != to and (key.peer, key.node_key) not in given
        }
        wants = tuple(self._lacking.get(to, ()))[:MOST_WANTED]
        data = encode(Envelope(message, signatures, leavers, tuple(new.values()), wants))
        if len(data) > MOST:
            return None
        given.update(new)
        for signer in wants:
            del self._lacking[to][signer]
        return data

    def _keys_under(self, said: Iterable[_Known], leavers: Iterable[Leaver]) -> list[NodeKey]:
        """The node keys of these statements, each once."""
        digested = [(each.peer, self._digester.digest(each.statement)) for each in leavers]
        keys = [known.key for known in (*said, *(self._known[each] for each in digested)) if known.key is not None]
        return list({(key.peer, key.node_key): key for key in keys}.values())

    def open(self, sender: str, data: bytes) -> Message:
        """The message, if every signature in it holds.

        :raises WireError: if it is no message
        :raises BadSignature: if a signature does not hold, or the key for it is not here
        """
        envelope: Envelope = decode(Envelope, data)
        message = envelope.message
        if envelope.wants and sender in self._given:
            self._given[sender] = {each for each in self._given[sender] if each[0] not in envelope.wants}
        statements = statements_in(sender, message)
        if len(statements) + len(envelope.leavers) > MOST_SIGNED:
            raise BadSignature(f"{len(statements)} statements; a message has {MOST_SIGNED} at most")
        found = self._digester.of(statements)
        if len(found) != len(envelope.signatures):
            raise BadSignature(f"{len(envelope.signatures)} signatures for {len(found)} statements")
        signed = [*zip(found, envelope.signatures, strict=True), *self._digested_leavers(envelope.leavers)]
        signers = {signer for (signer, _, _), _ in signed}
        self._learn_keys(signers, envelope.credentials, sender)
        keys = self._check_all(signed, sender)
        self._check_more(message, envelope.leavers)
        self._keep_all(signed, keys)
        self._make_room(signers)
        return message

    def greet(self, peer: str) -> None:
        """Its connection is new, or it started anew: it is sent all credentials again."""
        self._given.pop(peer, None)

    def knows(self, peer: str) -> bool:
        """Return whether a credential of this peer is here."""
        return peer in self._keys

    def _leavers_for(self, message: Message) -> tuple[Leaver, ...]:
        """Goodbyes of those whom the message's entry calls gone, as far as the message has not got them."""
        entry = entry_in(message)
        if entry is None or not entry.gone:
            return ()
        told = {each.peer for each in message.body.goodbyes} if isinstance(message.body, Propose) else set()
        return tuple(self._leaver(peer) for peer in entry.gone if peer not in told)

    def _leaver(self, peer: str) -> Leaver:
        found = self._find_leaver(peer)
        if found is None:
            raise BadSignature(f"{peer} is said to be gone, and its goodbye is not known")
        return found

    def _find_leaver(self, peer: str) -> Leaver | None:
        for digest in reversed(self._of_signer.get(peer, {})):
            known = self._known[peer, digest]
            if known.statement is not None and known.statement[0] == "goodbye":
                fields: tuple[Any, ...] = (*known.statement[1:], known.signature)
                return Leaver(*fields)
        return None

    def _digested_leavers(self, leavers: tuple[Leaver, ...]) -> list[tuple[Digested, bytes]]:
        statements = [each.statement for each in leavers]
        return [
            ((str(statement[1]), self._digester.digest(statement), statement), each.signature)
            for each, statement in zip(leavers, statements, strict=True)
        ]

    def _check_more(self, message: Message, leavers: tuple[Leaver, ...]) -> None:
        """Words that are proven by more than a signature: verdicts, and that somebody is gone.

        A quorum has judged both in entries that are certified.
        """
        body = message.body
        if isinstance(body, Accuse) and not self.proves(body.verdict):
            raise BadSignature(f"the verdict on {body.verdict.peer} has no proof")
        entry = entry_in(message)
        if entry is None:
            return
        said = {each.peer for each in leavers}
        said |= {each.peer for each in body.goodbyes} if isinstance(body, Propose) else set()
        for peer in entry.gone:
            if peer not in said:
                raise BadSignature(f"{peer} is said to be gone, without its goodbye")
        for verdict in entry.verdicts:
            if not self.proves(verdict):
                raise BadSignature(f"the verdict on {verdict.peer} has no proof")

    # --- answers ---

    def sign_answer(self, answer: Answer) -> bytes:
        """This reducer's signature under its answer."""
        if answer.reducer != self.peer_id:
            raise ValueError(f"{answer.reducer} reduced it, not this peer")
        statement = answer_of(answer)
        return self._said(self.peer_id, self._digester.digest(statement), statement).signature

    def check_answer(self, answer: Answer, signature: bytes, credential: bytes) -> bool:
        """Return whether its reducer signed the answer. The book keeps the answer if so.

        :param credential: the reducer's; empty: it is here (`knows`)
        """
        statement = answer_of(answer)
        digest = self._digester.digest(statement)
        try:
            self._learn_keys({answer.reducer}, (credential,) if credential else (), answer.reducer)
            key = self._check(answer.reducer, digest, signature)
        except BadSignature:
            return False
        self._keep(answer.reducer, digest, signature, key, statement)
        self._make_room((answer.reducer,))
        return True

    def answer_signature(self, answer: Answer) -> tuple[bytes, bytes] | None:
        """(signature, credential) of an answer; None: they are not in the book."""
        known = self._known.get((answer.reducer, self._digester.digest(answer_of(answer))))
        return None if known is None or known.key is None else (known.signature, known.key.credential)

    # --- verified rounds ---

    def sign_words(self, fingerprint: bytes, stage: int, body: bytes) -> bytes:
        """This peer's signature under what it tells the members of a verified round. The book does not keep it."""
        digest = self._digester.digest(words_of(self.peer_id, fingerprint, stage, body))
        return self._key.sign(_signed_bytes(digest))

    def check_words(
        self, author: str, fingerprint: bytes, stage: int, body: bytes, signature: bytes, credential: bytes
    ) -> bool:
        """Return whether the author signed these words.

        :param credential: the author's; b"": it is here already
        """
        try:
            self._learn_keys({author}, (credential,) if credential else (), author)
            self._check(author, self._digester.digest(words_of(author, fingerprint, stage, body)), signature)
        except BadSignature:
            return False
        return True

    # --- orders ---

    def order_digest(self, order: RollbackOrder) -> bytes:
        """The fields that the monitor signs, as kind "order", in an order."""
        return self._digester.digest(order_of(order))

    def sign_order(self, order: RollbackOrder, signer: Signer) -> bytes:
        """The monitor's signature under an order. It is in the book behind this.

        :param signer: the monitor's online key
        :raises BadSignature: if the run's root keys do not certify it
        """
        signature = signer.sign("order", self.order_digest(order))
        if not self.check_order(order, signature):
            raise BadSignature("the monitor's key is not certified for this run")
        return signature

    def check_order(self, order: RollbackOrder, signature: bytes) -> bool:
        """Whether the monitor signed the order. The book keeps what holds."""
        statement = order_of(order)
        digest = self._digester.digest(statement)
        try:
            self._check(MONITOR, digest, signature)
        except BadSignature:
            return False
        self._keep(MONITOR, digest, signature, None, statement)
        return True

    # --- verdicts ---

    def proves(self, verdict: Verdict) -> bool:
        """Whether the verdict's proof holds."""
        hashed = hashlib.sha256(verdict.peer.encode() + b"\0" + verdict.proof).digest()
        if hashed in self._proven:
            return True
        is_proven = self._is_equivocation(verdict) or self._has_two_keys(verdict)
        if not is_proven and not (self._check_proof and self._check_proof(verdict)):
            return False
        _drop_oldest(self._proven, MOST_PEERS)
        self._proven[hashed] = None
        return True

    def _is_equivocation(self, verdict: Verdict) -> bool:
        try:
            proof: Equivocation = decode(Equivocation, verdict.proof)
            credential = read_credential(proof.credential)
            one, other = proof.one.statement(verdict.peer), proof.other.statement(verdict.peer)
            if credential.peer != verdict.peer or not contradicts(one, other):
                return False
            key = certified(credential, self._run_key)
            signed = (one, proof.one.signature), (other, proof.other.signature)
            return all(_holds(key, self._digester.digest(each), signature) for each, signature in signed)
        except (WireError, BadSignature):
            return False

    def _has_two_keys(self, verdict: Verdict) -> bool:
        try:
            proof: TwoKeys = decode(TwoKeys, verdict.proof)
            one, other = read_credential(proof.one), read_credential(proof.other)
            if not one.peer == other.peer == verdict.peer or one.node_key == other.node_key:
                return False
            certified(one, self._run_key)
            certified(other, self._run_key)
        except (WireError, BadSignature):
            return False
        return True

    def _look_for_contradiction(self, signer: str, statement: Statement) -> None:
        if len(statement) != 5 or signer in self._caught or signer == self.peer_id:
            return
        for digest in self._of_signer[signer]:
            known = self._known[signer, digest]
            if known.statement is not None and contradicts(known.statement, statement):
                self._convict(self.equivocation(known.statement, statement))
                return

    def _convict(self, verdict: Verdict) -> None:
        if verdict.peer not in self._caught:
            _drop_oldest(self._caught, MOST_PEERS)
            self._caught[verdict.peer] = None
            self.found.append(verdict)

    def equivocation(self, one: Statement, other: Statement) -> Verdict:
        """The verdict on a peer that signed two statements which contradict each other; both are in the book."""
        peer = str(one[1])
        known = [self._known[peer, self._digester.digest(each)] for each in (one, other)]
        keys = [each.key for each in known if each.key is not None]
        if keys[0].node_key != keys[1].node_key:
            return Verdict(peer, encode(TwoKeys(keys[0].credential, keys[1].credential)))
        signed = [_signed_statement(each, its.signature) for each, its in zip((one, other), known, strict=True)]
        return Verdict(peer, encode(Equivocation(keys[0].credential, *signed)))

    # --- logs, and starting again ---

    def check_items(self, items: Iterable[LogItem]) -> str | None:
        """Which signature of a log is not in the book, in words; None: all are there."""
        try:
            for item in items:
                for signer, digest, statement in self._digester.of_item(item):
                    if (signer, digest) not in self._known:
                        return f"the {statement[0]} of {signer} behind epoch {item.head.epoch} is not signed"
        except BadSignature as error:
            return str(error)
        return None

    def export(self, items: Iterable[LogItem], record: BallotRecord | None = None) -> bytes:
        """The signatures that these items need, with their credentials, as far as the book has them. The items are of
        our own log: what this peer said in them and never sent, it signs now.

        :param record: and those under its accepted proposal, without which a promise cannot be made after a restart
        """
        needed = []
        for item in items:
            for signer, digest, statement in self._digester.of_item(item):
                needed.append((signer, digest))
                if signer == self.peer_id:
                    self._said(signer, digest, statement)
        leavers: list[Leaver] = []
        if record is not None and record.accepted is not None and record.accepted_at is not None:
            entry = record.accepted
            said = (proposal_of(entry.parent, record.accepted_at, entry.lineage), *map(answer_of, entry.answers))
            needed += [(signer, digest) for signer, digest, _ in self._digester.of(said)]
            leavers += filter(None, map(self._find_leaver, entry.gone))
        wanted = [each for each in dict.fromkeys(needed) if each in self._known]
        signed = tuple(Signed(*each, self._known[each].signature) for each in wanted)
        keys = self._keys_under([self._known[each] for each in wanted], leavers)
        return encode(Exported(signed, tuple(leavers), tuple(key.credential for key in keys)))

    def load(self, data: bytes) -> str | None:
        """Take what `export` wrote, of this peer or of a stranger; `check_items` says what it is worth. A check takes
        about 150 us for each signature.

        :returns: why it is refused as a whole, in words; None: it is taken
        """
        try:
            exported: Exported = decode(Exported, data, MOST_EXPORTED)
            if len(exported.signed) + len(exported.leavers) > MOST_STATEMENTS:
                return f"{len(exported.signed)} signatures; {MOST_STATEMENTS} are the most"
            leavers = self._digested_leavers(exported.leavers)
            signers = {each.signer for each in exported.signed} | {each.peer for each in exported.leavers}
            self._learn_keys(signers, exported.credentials, None)
            keys = [self._check(*each) for each in exported.signed]
            keys_of_leavers = self._check_all(leavers)
        except (WireError, BadSignature) as error:
            return str(error)
        for each, key in zip(exported.signed, keys, strict=True):
            self._keep(*each, key, None)
        self._keep_all(leavers, keys_of_leavers)
        self._make_room(signers)
        return None

    def prune(self, items: tuple[LogItem, ...], ahead: tuple[LogItem, ...] = ()) -> None:
        """Forget what neither these items need, nor the slot behind the last one, nor what is said of newer ones.

        Call it with the log's items whenever they are written. What was of no use in two slots is old.

        :param ahead: items that are being replayed: they are part of the log soon
        """
        slot = items[-1].head.lineage if items else b""
        if slot == self._slot:
            return
        self._slot = slot
        self._digester.keep_items((*items, *ahead))
        self._needed = frozenset(
            (signer, digest) for item in (*items, *ahead) for signer, digest, _ in self._digester.of_item(item)
        )
        self._members = frozenset(items[-1].membership.view) if items else frozenset()
        for (signer, digest), known in list(self._known.items()):
            statement = known.statement
            is_current = statement is not None and len(statement) > 2 and statement[2] == slot
            is_goodbye = statement is not None and statement[0] == "goodbye" and signer in self._members
            is_old = known.seen < self._slots_passed and not is_current and not is_goodbye
            if is_old and (signer, digest) not in self._needed:
                self._forget(signer, digest)
        self._slots_passed += 1

    # --- the book ---

    def _said(self, signer: str, digest: bytes, statement: Statement) -> _Known:
        known = self._known.get((signer, digest))
        if known is not None:
            self._touch(signer, digest, known)
            return known
        if signer != self.peer_id:
            raise BadSignature(f"the {statement[0]} of {signer} is not known")
        (own,) = self._keys[signer].values()
        known = self._keep(signer, digest, self._key.sign(_signed_bytes(digest)), own, statement)
        self._make_room((signer,))
        return known

    def _check_all(self, signed: list[tuple[Digested, bytes]], sender: str | None = None) -> list[NodeKey | None]:
        keys = []
        for (signer, digest, statement), signature in signed:
            _check_form(statement)
            keys.append(self._check(signer, digest, signature, sender))
        return keys

    def _keep_all(self, signed: list[tuple[Digested, bytes]], keys: list[NodeKey | None]) -> None:
        for ((signer, digest, statement), signature), key in zip(signed, keys, strict=True):
            self._keep(signer, digest, signature, key, statement)

    def _check(self, signer: str, digest: bytes, signature: bytes, sender: str | None = None) -> NodeKey | None:
        """:returns: the signer's key; None: it is the monitor, or the statement is known

        :raises BadSignature: if this is no signature of the signer
        """
        if (signer, digest) in self._known:
            return None
        if signer == MONITOR:
            if len(signature) > LONGEST_SIGNATURE or not self._is_monitors(digest, signature):
                raise BadSignature(f"{signer} did not sign this")
            return None
        keys = self._keys.get(signer)
        if keys is None:
            raise BadSignature(f"the key of {signer} is not known")
        for key in reversed(keys.values()):
            if _holds(key, digest, signature):
                return key
        self._note_lacking(sender, [signer])  # it may have another node key
        raise BadSignature(f"{signer} did not sign this")

    def _is_monitors(self, digest: bytes, envelope: bytes) -> bool:
        if self._trust is None:
            return False
        try:
            return self._trust.open(envelope, "order", "monitor", self._now()) == digest
        except TokenError:
            return False

    def _keep(
        self, signer: str, digest: bytes, signature: bytes, key: NodeKey | None, statement: Statement | None
    ) -> _Known:
        """Of an answer only the digest stays: its shares may be many."""
        if statement is not None and statement[0] == "answer":
            statement = None
        known = self._known.get((signer, digest))
        if known is None:
            known = self._known[signer, digest] = _Known(signature, key, None, self._slots_passed)
            self._of_signer.setdefault(signer, {})[digest] = None
        self._touch(signer, digest, known)
        if known.statement is None and statement is not None:
            self._look_for_contradiction(signer, statement)
            known.statement = statement
        return known

    def _touch(self, signer: str, digest: bytes, known: _Known) -> None:
        """It is of use now: the newest."""
        known.seen = self._slots_passed
        self._known[signer, digest] = self._known.pop((signer, digest))
        self._of_signer[signer][digest] = self._of_signer[signer].pop(digest)

    def _forget(self, signer: str, digest: bytes) -> None:
        del self._known[signer, digest], self._of_signer[signer][digest]
        if not self._of_signer[signer]:
            del self._of_signer[signer]

    def _make_room(self, signers: Iterable[str]) -> None:
        """The oldest that the log does not need go first: of who said too much, of strangers, of members. What this
        peer said itself it can sign again."""
        for signer in signers:
            digests = self._of_signer.get(signer, {})
            if len(digests) > MOST_OF_ONE:
                spare = [digest for digest in digests if (signer, digest) not in self._needed]
                for digest in spare[: max(0, len(spare) - MOST_OF_ONE)]:
                    self._forget(signer, digest)
        if len(self._known) > MOST_STATEMENTS:
            spared = self._members | {MONITOR}
            spare_pairs = [each for each in self._known if each not in self._needed]
            spare_pairs.sort(key=lambda each: each[0] in spared)  # stable: the oldest first
            for signer, digest in spare_pairs[: len(self._known) - MOST_STATEMENTS * 7 // 8]:
                self._forget(signer, digest)

    def _learn_keys(self, signers: set[str], credentials: Iterable[bytes], sender: str | None) -> None:
        """Take the credentials of these signers, and remember which of them the sender left out.

        :raises BadSignature: for one that does not hold, and for the sender's own second node key
        """
        if len(self._keys) > MOST_KEYS:
            spared = self._of_signer.keys() | self._members | {self.peer_id}
            spare = [peer for peer in self._keys if peer not in spared]
            for peer in spare[: len(self._keys) - MOST_KEYS * 7 // 8]:
                del self._keys[peer]
        for data in credentials:
            credential = read_credential(data)
            if credential.peer in signers - {self.peer_id, MONITOR}:
                self._learn_key(credential.peer, credential, sender)
        self._note_lacking(sender, [each for each in signers if each not in self._keys and each != MONITOR])

    def _learn_key(self, peer: str, credential: Credential, sender: str | None) -> None:
        keys = self._keys.get(peer, {})
        if credential.node_key in keys:
            return
        key = certified(credential, self._run_key)
        if keys:
            first = next(iter(keys.values()))
            self._convict(Verdict(peer, encode(TwoKeys(first.credential, key.credential))))
            if peer == sender:
                raise BadSignature(f"{peer} has a second node key")
        self._keys.setdefault(peer, keys)[key.node_key] = key
        if len(keys) > MOST_OF_PEER:
            del keys[next(iter(keys))]

    def _note_lacking(self, sender: str | None, signers: Iterable[str]) -> None:
        missing = sorted(signers)[:MOST_WANTED]
        if missing and sender is not None:
            lacking = self._of_peer(self._lacking, sender, dict)
            lacking.update(dict.fromkeys(missing))
            while len(lacking) > MOST_WANTED:
                del lacking[next(iter(lacking))]

    @staticmethod
    def _of_peer(of: dict[str, Any], peer: str, empty: Callable[[], Any]) -> Any:
        if peer not in of:
            _drop_oldest(of, MOST_PEERS)
            of[peer] = empty()
        return of[peer]


def _drop_oldest(of: dict[Any, Any], most: int) -> None:
    while len(of) >= most:
        del of[next(iter(of))]


def _holds(key: NodeKey, digest: bytes, signature: bytes) -> bool:
    return key.holds(_signed_bytes(digest), signature)


def _check_form(statement: Statement) -> None:
    """The book keeps statements, so none of their hashes is long."""
    if any(isinstance(each, bytes) and len(each) > LONGEST_HASH for each in statement):
        raise BadSignature(f"the {statement[0]} of {statement[1]} is of no lineage")
    if statement[0] == "promise" and isinstance(statement[4], tuple):
        _check_form(("promised", statement[1], *statement[4]))


def _signed_statement(statement: Statement, signature: bytes) -> SignedStatement:
    kind, _, slot, ballot, what = statement
    assert isinstance(kind, str) and isinstance(slot, bytes) and isinstance(ballot, Ballot)
    if isinstance(what, tuple):
        return SignedStatement(kind, slot, ballot, what[0], what[1], signature)
    assert isinstance(what, bytes)
    return SignedStatement(kind, slot, ballot, what, None, signature)
