"""Take part in verified rounds (robust/btard.py) on a node: carry their messages, and report the verdicts.

A round's members send their commitments to its leader before any part travels. The leader tells all of them one list,
which decides whose work enters, and the entry names that list: a member with another list does not vote for it. When
the entry is committed, members reveal their numbers and state what they sent, each to all others, beside the next
rounds. Their findings travel with later commitments. A round without an entry has no effect here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from volunteer_kit.robust.btard import Verifier
from volunteer_kit.robust.checks import Part
from volunteer_kit.robust.messages import Commit, News, Reveal, Samples, Statement
from volunteer_kit.robust.reducing import DISTANCE, NORM, SUMS, UNKNOWN
from volunteer_kit.robust.sketch import sketch
from volunteer_kit.robust.standing import Settings
from volunteer_kit.robust.verified_round import VerifiedRound
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.node.signatures import Signatures
from volunteer_kit.swarm.node.talk import Brought, Recompute, Recomputed, Verdicts
from volunteer_kit.swarm.node.verified_words import (
    MOST_BODY,
    MOST_PIECES,
    AskListed,
    Lacking,
    Listed,
    Said,
    Sealed,
    Stage,
    Word,
    commit_body,
    digest_of_list,
    packed,
    pieces_of,
    read_commit,
    read_reveal,
    read_statement,
    reveal_body,
    statement_body,
    unpacked,
)
from volunteer_kit.swarm.rounds.blobs import Channel, receive_blob, send_blob
from volunteer_kit.swarm.rounds.commitments import (
    DIGEST,
    NOTHING,
    Commitments,
    cells_of_part,
    longest_answers,
    part_digest,
)
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import mean_of
from volunteer_kit.swarm.rounds.reducer import decode_answer
from volunteer_kit.swarm.sync.contributions import Share
from volunteer_kit.swarm.sync.entries import Entry
from volunteer_kit.swarm.sync.messages import Round, StartExchange
from volunteer_kit.swarm.wire import WireError, decode, encode

logger = logging.getLogger(__name__)

PROOF: Final = "proof"  # the name under which an accuser is asked for the bytes
# rounds; short epochs leave a training process that computes others' samples little time
PATIENCE: Final = 8
COMMITS_WAIT: Final = 0.3  # of the exchange's time, that a leader waits for commitments
LEAST_WAIT: Final = 1.0  # s for a stage
ASKS_AGAIN: Final = 0.5  # of a stage's time, then others are asked for what is lacking
ASKED: Final = 2  # members that are asked, or that pass a client's words on to others
MOST_ROUNDS: Final = 24  # that are remembered
WITH_OWN: Final = 4  # of those that came to no entry, whose parts are kept: one may still be proposed again
AT_ONCE: Final = 16  # rounds whose words are awaited
MOST_EARLY: Final = 1024  # words of rounds that this peer does not know yet
MOST_EARLY_EACH: Final = 16  # of one peer
MOST_EARLY_BYTES: Final = 2**25
MOST_NAMES_BYTES: Final = 2**19  # of the samples that one commitment is of; they have to fit into a statement
MOST_NAME: Final = 256  # bytes
MOST_ACCOUNTS: Final = 10_000
MOST_ANSWERS: Final = 8  # to one peer that lacks words of a round
OPENS_WITHIN: Final = 8.0  # s for a channel
SHOWN_WITHIN: Final = 60.0  # s for an accuser to show its bytes


class Transport(Protocol):
    """transport.Transport."""

    def send(self, peer: str, data: bytes) -> None: ...

    def answer(self, name: str, handler: Callable[[str, bytes, Any], Any]) -> None: ...

    async def ask(self, peer: str, name: str, head: bytes, timeout: float) -> Channel: ...


class Named(NamedTuple):
    """The samples of a contribution."""

    names: tuple[str, ...]
    microbatches: int


class AskProof(NamedTuple):
    """Ask an accuser for the bytes that this sender brought it for this cell."""

    fingerprint: bytes
    sender: str
    cell: int


class _Early(NamedTuple):
    """Words that have to wait."""

    peer: str
    fingerprint: bytes
    said: Said
    size: int  # bytes


class _Committed(NamedTuple):
    """A commitment that holds."""

    commit: Commit
    shares: tuple[Share, ...]
    lengths: tuple[float, ...]


@dataclass
class _Verified:
    """One round, as this peer goes through it."""

    plan: Round
    epoch: int
    round: VerifiedRound
    own: dict[int, bytes] = field(default_factory=dict)  # our encoded cells
    has_own: bool = True  # False: they were dropped to save memory
    news: tuple[News, ...] = ()  # that our commitment tells, until it is known whether the others hear them
    sealed: dict[Stage, dict[str, Sealed]] = field(default_factory=lambda: {stage: {} for stage in Stage})
    committed: dict[str, _Committed] = field(default_factory=dict)  # that a leader has
    silent: set[str] = field(default_factory=set)
    pieces: dict[int, Listed] = field(default_factory=dict)
    wanted: bytes = b""  # the digest of the list that the entry names
    listed: tuple[Sealed, ...] | None = None
    commits: dict[str, _Committed] = field(default_factory=dict)  # of the list
    keys: dict[str, bytes] = field(default_factory=dict)  # DER, of its authors
    entry: Entry | None = None
    is_over: bool = False  # its exchange
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    asked: Counter[str] = field(default_factory=Counter)  # by peers that lack words
    evidence: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (sender, cell) -> bytes

    @property
    def fingerprint(self) -> bytes:
        return self.plan.fingerprint

    @property
    def peers(self) -> list[str]:
        return [member.peer for member in self.plan.group]

    def note(self) -> None:
        """Something has changed."""
        self.changed.set()
        self.changed = asyncio.Event()


class Verification:
    """All verified rounds of one peer.

    :param peer: this one
    :param named: the samples of a contribution, by its number; they are as many as its samples, or it is not brought
    :param answer: the bytes of a committed answer. Raises KeyError
    :param parts: what members brought for our slice of a round: Exchange.parts_of
    :param lineage: of the model of an epoch; b"": it is not known any more
    :param tell: hands a message to the training process
    """

    def __init__(
        self,
        peer: str,
        settings: Settings,
        *,
        clips: bool,
        transport: Transport,
        signatures: Signatures,
        layout: Layout,
        max_staleness: int,
        named: Callable[[int], Named],
        answer: Callable[[bytes], bytes],
        parts: Callable[[bytes], Mapping[str, Mapping[int, bytes]]],
        lineage: Callable[[int], bytes],
        tell: Callable[[Any], None],
    ):
        self._peer, self._clips = peer, clips
        self._transport, self._signatures, self._layout = transport, signatures, layout
        self._max_staleness, self._named, self._answer = max_staleness, named, answer
        self._parts, self._lineage, self._tell = parts, lineage, tell
        self._accounts: dict[str, str] = {}
        self.verifier = Verifier(
            peer,
            replace(settings, patience=max(settings.patience, PATIENCE)),
            clips,
            account_of=lambda peer: self._accounts.get(str(peer), str(peer)),
        )
        self._rounds: OrderedDict[bytes, _Verified] = OrderedDict()
        self._early: deque[_Early] = deque()
        self._busy = asyncio.Lock()  # held while the verifier works, mostly in another thread
        self._tasks: set[asyncio.Task[None]] = set()
        self._verifying: OrderedDict[bytes, asyncio.Task[None]] = OrderedDict()
        transport.answer(PROOF, self._show)

    def close(self) -> None:
        """Stop everything."""
        for task in list(self._tasks):
            task.cancel()

    # --- 1: commitments ---

    async def commit(
        self, start: StartExchange, epoch: int, gradient: Callable[[int], torch.Tensor]
    ) -> Commitments | None:
        """Commit to our part, and hear what the members committed to. None: the round's leader did not say it before
        the exchange was over.

        :param epoch: of the round
        :param gradient: the gradient sum of a contribution, (elements,) float32, by its number
        """
        plan = start.round
        if plan.fingerprint in self._rounds:
            return None
        if len(self._accounts) > MOST_ACCOUNTS:
            self._accounts.clear()
        for member in plan.group:
            self._accounts[member.peer] = member.account
        shares, samples = self._nameable(start.shares)
        async with self._busy:
            self._take_back_news()
            this = _Verified(plan, epoch, self.verifier.prepare(plan.fingerprint, epoch, [m.peer for m in plan.group]))
            self._rounds[plan.fingerprint] = this
        self._forget_rounds()
        try:
            encoded, lengths = await self._in_thread(self._encode, shares, epoch, gradient)
        except ValueError as error:
            logger.warning("Our part cannot be sent: %s", error)
            shares, samples, encoded, lengths = (), Samples(()), {}, [0.0] * self._layout.num_cells
        this.own = encoded
        parts = b"".join(part_digest(encoded[c]) if c in encoded else NOTHING for c in range(self._layout.num_cells))
        async with self._busy:
            commit = this.round.commit(float(len(samples.names)), samples, parts)
            body, untold = commit_body(commit, shares, lengths)
            self.verifier.say_again(untold)
            this.news = commit.news[: len(commit.news) - len(untold)]
        sealed = self._seal(this, Stage.COMMIT, body, self._signatures.credential)
        if plan.ballot.leader == self._peer:
            self._take_commit(this, sealed)
        else:
            self._say(plan.ballot.leader, Word(sealed))
        self._replay(plan.fingerprint)
        if plan.ballot.leader == self._peer:
            await self._lead(this)
        else:
            await self._await_list(this)
        return self._commitments(this)

    def without(self, fingerprint: bytes, silent: Sequence[str]) -> None:
        """Do not wait for these members' commitments."""
        this = self._rounds.get(fingerprint)
        if this is not None:
            this.silent.update(silent)
            this.note()

    def end(self, fingerprint: bytes) -> None:
        """The exchange is over: nothing is committed to any more."""
        this = self._rounds.get(fingerprint)
        if this is not None:
            this.is_over = True
            this.note()

    def _nameable(self, shares: Sequence[Share]) -> tuple[tuple[Share, ...], Samples]:
        """Return the shares whose samples can all be named, each sample once, and those samples. A share that cannot be
        checked is not brought: it would be struck."""
        taken: list[Share] = []
        names: dict[str, None] = {}
        microbatches = size = 0
        for share in shares:
            found = self._named(share.number)
            own = dict.fromkeys(found.names)
            lengths = [len(name.encode()) for name in own]
            size += sum(lengths) + 4 * len(lengths)
            if size > MOST_NAMES_BYTES:
                break
            is_told = len(own) == len(found.names) == share.samples and max(lengths, default=0) <= MOST_NAME
            if is_told and not own.keys() & names.keys():
                taken.append(share)
                names |= own
                microbatches += found.microbatches
        return tuple(taken), Samples(tuple(names), microbatches=max(1, min(microbatches, len(names))))

    def _encode(
        self, shares: tuple[Share, ...], epoch: int, gradient: Callable[[int], torch.Tensor]
    ) -> tuple[dict[int, bytes], list[float]]:
        """Our whole part, as it will be sent, and the L2 of each cell as it is read. Raises ValueError."""
        encoded: dict[int, bytes] = {}
        lengths = [0.0] * self._layout.num_cells
        for cell in cells_of_part(self._layout, shares):
            data = self._layout.encode_cell(cell, mean_of(self._layout, shares, epoch, cell, gradient))
            encoded[cell] = data
            lengths[cell] = _length(self._layout.decode_cell(cell, data))
        return encoded, lengths

    def _take_back_news(self) -> None:
        """Tell the news of rounds that came to no entry again; it is told twice if one of them still does."""
        for each in reversed(self._rounds.values()):
            if each.entry is None and each.news:
                self.verifier.say_again(each.news)
                each.news = ()

    async def _lead(self, this: _Verified) -> None:
        """Wait for the commitments, and tell all members the list."""
        deadline = self._now + COMMITS_WAIT * this.plan.exchange_seconds
        others = set(this.peers)
        await self._until(this, lambda: others <= this.committed.keys() | this.silent or this.is_over, deadline)
        sealed = tuple(this.sealed[Stage.COMMIT][peer] for peer in this.peers if peer in this.committed)
        self._hear_list(this, sealed)
        for piece in pieces_of(this.fingerprint, sealed):
            data = packed(piece)
            for peer in this.peers:
                if peer != self._peer:
                    self._transport.send(peer, data)

    async def _await_list(self, this: _Verified) -> None:
        seconds = this.plan.exchange_seconds
        half = self._now + ASKS_AGAIN * seconds
        if not await self._until(this, lambda: this.listed is not None or this.is_over, half):
            self._say(this.plan.ballot.leader, AskListed(this.fingerprint))
            await self._until(this, lambda: this.listed is not None or this.is_over, half + seconds)

    def _commitments(self, this: _Verified) -> Commitments | None:
        if this.listed is None:
            return None
        places = this.round.trusted
        enters = frozenset(peer for place, peer in enumerate(this.peers) if place in places)
        return Commitments(
            digest_of_list(this.listed),
            {peer: each.shares for peer, each in this.commits.items()},
            {peer: each.commit.parts for peer, each in this.commits.items()},
            enters,
            longest_answers(
                [each.lengths for peer, each in this.commits.items() if peer in enters],
                self._layout.num_cells,
                self._clips,
            ),
            this.own if self._is_as_listed(this) else {},
        )

    def _is_as_listed(self, this: _Verified) -> bool:
        """Return whether the list has our commitment of this life; after a restart it has one of an earlier life."""
        own = this.commits.get(self._peer)
        return own is not None and this.has_own and all(
            part_digest(data) == own.commit.parts[cell * DIGEST : (cell + 1) * DIGEST]
            for cell, data in this.own.items()
        )

    def _take_commit(self, this: _Verified, sealed: Sealed) -> None:
        """As the round's leader. The first one of each member counts."""
        if sealed.author not in this.committed and this.listed is None:
            found = self._read_commit(this, sealed)
            if found is not None:
                this.sealed[Stage.COMMIT][sealed.author] = sealed
                this.committed[sealed.author] = found
                this.note()

    def _read_commit(self, this: _Verified, sealed: Sealed) -> _Committed | None:
        is_ours = sealed.fingerprint == this.fingerprint and sealed.stage == Stage.COMMIT
        if not is_ours or sealed.author not in this.peers or len(sealed.body) > MOST_BODY[Stage.COMMIT]:
            return None
        if not self._holds(sealed, sealed.key):
            return None
        try:
            about = (this.epoch, self._max_staleness, self._layout.num_cells)
            return _Committed(*read_commit(sealed.author, sealed.body, *about))
        except WireError as error:
            logger.info("The commitment of %s is none: %s", sealed.author, error)
            return None

    def _hear_list(self, this: _Verified, sealed: Sequence[Sealed]) -> None:
        """Take the list, without what nobody can have committed to; all members leave out the same."""
        this.commits, this.keys = {}, {}
        for each in sealed:
            found = self._read_commit(this, each) if each.author not in this.commits else None
            if found is not None:
                this.commits[each.author], this.keys[each.author] = found, each.key
        this.listed = tuple(sealed)
        this.round.believe({peer: each.commit for peer, each in this.commits.items()})
        this.note()
        self._replay(this.fingerprint)

    # --- 2: the entry ---

    def committed(self, entry: Entry) -> tuple[int, ...]:
        """An entry is this branch's next one: its round is verified from here on, if this peer was in it.

        :returns: contributions of ours that it took for checking alone
        """
        this = self._rounds.get(entry.fingerprint)
        if this is None or this.entry is not None:
            return ()
        this.entry, this.wanted, this.is_over = entry, entry.commitments, True
        this.note()
        task = self._spawn(self._verify(this, entry, self._parts(this.fingerprint)))
        self._verifying[this.fingerprint] = task
        while len(self._verifying) > AT_ONCE:
            self._verifying.popitem(last=False)[1].cancel()
        is_told = this.listed is not None and digest_of_list(this.listed) == this.wanted
        if not is_told or self._peer not in this.commits or this.round.own in this.round.trusted:
            return ()
        return tuple(share.number for share in this.commits[self._peer].shares)

    async def _verify(self, this: _Verified, entry: Entry, held: Mapping[str, Mapping[int, bytes]]) -> None:
        try:
            if await self._agree(this, entry):
                await self._enter(this)
                await self._reveal(this, entry)
                await self._state(this, entry, held)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # it costs the look at this round, not the round
            logger.warning("A round was not verified: %s", brief(error), exc_info=True)
        finally:
            self._verifying.pop(this.fingerprint, None)
            this.own = {}

    async def _agree(self, this: _Verified, entry: Entry) -> bool:
        """Return whether the list that the entry names is here; if not, ask others for it first."""

        def is_here() -> bool:
            return this.listed is not None and digest_of_list(this.listed) == this.wanted

        if not is_here():
            this.pieces = {}
            for peer in self._some(this, {member.peer for member in entry.group} - {self._peer}):
                self._say(peer, AskListed(this.fingerprint))
            await self._until(this, is_here, self._now + self._patience(this))
        return is_here()

    async def _enter(self, this: _Verified) -> None:
        async with self._busy:
            self.verifier.enter(this.round)
            if not self._is_as_listed(this):
                self.verifier.say_again(this.news)
            this.news = ()
            this.round.hear_commits({peer: each.commit for peer, each in this.commits.items()})
        self._follow_up()
        self._see_proofs()

    # --- 3: reveal, and state ---

    async def _reveal(self, this: _Verified, entry: Entry) -> None:
        group = range(len(this.peers))
        digests = {answer.reducer: answer.digest for answer in entry.answers}
        answers = tuple(digests.get(peer, b"") for peer in this.peers)
        counted = [self._counted(this, entry, place) for place in group]
        takes_part = self._is_as_listed(this)
        if takes_part:
            reveal = this.round.reveal(answers, counted[this.round.own])
            self._tell_all(this, Stage.REVEAL, reveal_body(reveal))
        await self._await_words(this, Stage.REVEAL, set(this.commits))
        heard: dict[Any, Reveal] = {}
        for peer, sealed in this.sealed[Stage.REVEAL].items():
            if peer in this.commits:
                with _Skipping(peer, "reveal"):
                    heard[peer] = read_reveal(sealed.body, answers, counted[this.peers.index(peer)])
        async with self._busy:
            this.round.hear_reveals(heard)

    def _counted(self, this: _Verified, entry: Entry, place: int) -> tuple[int, ...]:
        """Count, for each member, the reducer's parts that it is in: all if the entry says so or it had none for it."""
        reducer = this.peers[place]
        mask = dict(this.plan.slices).get(reducer, 0)
        size = mask.bit_count()
        entered = {
            share.peer for answer in entry.answers if answer.reducer == reducer for share in answer.shares
        }
        counted = []
        for peer in this.peers:
            brings = any(share.cells & mask for share in this.commits[peer].shares) if peer in this.commits else False
            counted.append(size if peer in entered or not brings else 0)
        return tuple(counted)

    async def _state(self, this: _Verified, entry: Entry, held: Mapping[str, Mapping[int, bytes]]) -> None:
        table = await self._in_thread(self._table, entry, this.round.seed)
        if self._is_as_listed(this) and this.round.own in this.round.reveals:
            numbers = await self._in_thread(table.of_ours, this.own)
            statement = this.round.state(numbers)
            self._tell_all(this, Stage.STATE, statement_body(statement))
        this.own = {}
        shown = {this.peers[place] for place in this.round.reveals}
        await self._await_words(this, Stage.STATE, shown)
        heard: dict[Any, Statement] = {}
        for peer, sealed in this.sealed[Stage.STATE].items():
            if peer in shown:
                with _Skipping(peer, "statement"):
                    heard[peer] = read_statement(sealed.body, self._layout.num_cells, self._sums)
        cells = self._layout.cells_of(dict(this.plan.slices).get(self._peer, 0))
        rows = Held(table, cells, {place: held[peer] for place, peer in enumerate(this.peers) if held.get(peer)})
        await self._in_thread(rows.prepare, this.round.targets)
        parts = self._parts_of(this.plan, this.peers)
        async with self._busy:
            await self._in_thread(this.round.hear_statements, heard, parts, table.answers, rows)
            for news in self.verifier.accusations(this.fingerprint):
                data = held.get(this.peers[news.sender], {}).get(news.part)
                if data is not None:
                    this.evidence[news.sender, news.part] = data
        self._follow_up()

    @property
    def _sums(self) -> int:
        return self.verifier.settings.sums

    def _parts_of(self, plan: Round, peers: Sequence[str]) -> list[Part]:
        """Each cell is a part of the vector."""
        parts: dict[int, Part] = {}
        for reducer, mask in plan.slices:
            for index, cell in enumerate(self._layout.cells_of(mask)):
                place = self._layout.cell(cell)
                parts[cell] = Part(peers.index(reducer), index, place.stop - place.start)
        return [parts[cell] for cell in range(self._layout.num_cells)]

    def _table(self, entry: Entry, seed: bytes) -> Table:
        averages: dict[int, torch.Tensor] = {}
        for answer in entry.answers:
            averages |= decode_answer(self._layout, answer.cells, self._answer(answer.digest))
        return Table(self._layout, averages, seed, self._sums)

    # --- what is found ---

    async def report(self, message: Recomputed) -> None:
        """The training process has computed others' samples."""
        async with self._busy:
            self.verifier.report(message.duty, message.totals)
            self.verifier.settle()
        self._follow_up()

    def forgive(self, peer: str) -> None:
        """A moderator has set a peer's strikes aside."""
        self.verifier.standing.forgive(peer)

    def _follow_up(self) -> None:
        """Hand on what the verifier found, and what is to be computed."""
        verifier = self.verifier
        duties, verifier.duties = verifier.duties, []
        for duty in duties:
            self._tell(Recompute(duty, tuple(self._lineage(load.birth) for load in duty.loads)))
        if verifier.events or verifier.bans or verifier.credits or verifier.measured:
            credits = tuple(
                Brought(str(peer), self._accounts.get(str(peer), str(peer)), samples)
                for peer, samples in verifier.credits.items()
                if samples > 0
            )
            self._tell(Verdicts(tuple(verifier.events), tuple(verifier.bans), credits, tuple(verifier.measured)))
            verifier.events, verifier.bans, verifier.credits = [], [], {}
            verifier.measured.clear()

    # --- accusations ---

    def _see_proofs(self) -> None:
        wanted, self.verifier.proofs_wanted = self.verifier.proofs_wanted, []
        by_accuser: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
        for round_, accuser, sender, part in wanted:
            by_accuser.setdefault((round_.round_id, accuser), []).append((sender, part))
        for (fingerprint, accuser), accused in by_accuser.items():
            this = self._rounds.get(fingerprint)
            if this is not None:
                self._spawn(self._judge_accuser(this, accuser, accused))

    async def _judge_accuser(self, this: _Verified, accuser: int, accused: Sequence[tuple[int, int]]) -> None:
        """One after the other, until the accuser has nothing to show."""
        for sender, cell in accused:
            if not await self._prove(this, accuser, sender, cell):
                break
        self._follow_up()

    async def _prove(self, this: _Verified, accuser: int, sender: int, cell: int) -> bool:
        """See what a sender had brought to its accuser. :returns: whether it showed anything"""
        assert this.entry is not None
        try:
            data = await self._shown_by(this.peers[accuser], AskProof(this.fingerprint, this.peers[sender], cell))
        except Exception as error:  # the line, or a member that has left
            logger.debug("An accuser did not answer: %s", brief(error))
            async with self._busy:
                this.round.no_proof(accuser)
                self.verifier.settle()
            return False
        true = None
        promised = this.commits[this.peers[sender]].commit.parts[cell * DIGEST : (cell + 1) * DIGEST]
        if part_digest(data) == promised:
            try:
                true = await self._in_thread(self._row_of, this.entry, this.round.seed, cell, data)
            except (ValueError, KeyError) as error:  # bytes that nobody can read prove nothing
                logger.debug("An accusation could not be proven: %s", brief(error))
        async with self._busy:
            this.round.prove(accuser, sender, cell, true)
            self.verifier.settle()
        return True

    def _row_of(self, entry: Entry, seed: bytes, cell: int, data: bytes) -> np.ndarray[Any, Any]:
        table = self._table(entry, seed)
        return table.row(cell, self._layout.decode_cell(cell, data))

    async def _shown_by(self, accuser: str, asked: AskProof) -> bytes:
        if accuser == self._peer:
            return self._evidence(asked)
        channel = await self._transport.ask(accuser, PROOF, encode(asked), OPENS_WITHIN)
        try:
            return await receive_blob(channel, self._layout.most_bytes(asked.cell), SHOWN_WITHIN)
        finally:
            channel.close()

    async def _show(self, peer: str, head: bytes, channel: Channel) -> None:
        """A member asks for the bytes of whom we accuse."""
        try:
            data = self._evidence(decode(AskProof, head, 2**12))
        except (WireError, LookupError) as error:
            logger.debug("%s asks for what is not here: %s", peer, error)
            channel.close()
            return
        await send_blob(channel, data, more=True)
        await channel.end()
        try:  # its end says that all is there
            while True:
                await channel.receive(SHOWN_WITHIN)
        except Exception as error:
            logger.debug("%s was shown a part: %s", peer, brief(error))

    def _evidence(self, asked: AskProof) -> bytes:
        this = self._rounds[asked.fingerprint]
        if asked.sender not in this.peers:
            raise LookupError("no member")
        return this.evidence[this.peers.index(asked.sender), asked.cell]

    # --- words ---

    def on_message(self, peer: str, data: bytes) -> None:
        """A message of a peer, behind the mark."""
        try:
            said = unpacked(data)
        except WireError as error:
            logger.debug("Words of %s were not understood: %s", peer, error)
            return
        self._hear(peer, said, len(data))

    def _hear(self, peer: str, said: Said, size: int) -> None:
        fingerprint = said.sealed.fingerprint if isinstance(said, Word) else said.fingerprint
        this = self._rounds.get(fingerprint)
        if this is None:
            self._wait_for_round(peer, fingerprint, said, size)
        elif peer not in this.peers:
            logger.debug("%s speaks in a round of others", peer)
        elif isinstance(said, Word):
            self._hear_word(this, peer, said.sealed, size)
        elif isinstance(said, Listed):
            self._hear_piece(this, peer, said)
        elif this.asked[peer] < MOST_ANSWERS:
            this.asked[peer] += 1
            self._answer_lacking(this, peer, said)

    def _wait_for_round(self, peer: str, fingerprint: bytes, said: Said, size: int) -> None:
        """Others may know of a round, or of its list, before this peer does."""
        if isinstance(said, (AskListed, Lacking)) or size > MOST_EARLY_BYTES // 2:
            return
        if sum(each.peer == peer for each in self._early) >= MOST_EARLY_EACH:
            return
        self._early.append(_Early(peer, fingerprint, said, size))
        while len(self._early) > MOST_EARLY or sum(each.size for each in self._early) > MOST_EARLY_BYTES:
            self._early.popleft()

    def _replay(self, fingerprint: bytes) -> None:
        here = [each for each in self._early if each.fingerprint == fingerprint]
        self._early = deque(each for each in self._early if each.fingerprint != fingerprint)
        for each in here:
            self._hear(each.peer, each.said, each.size)

    def _hear_word(self, this: _Verified, peer: str, sealed: Sealed, size: int) -> None:
        try:
            stage = Stage(sealed.stage)
        except ValueError:
            return
        if stage is Stage.COMMIT:
            if this.plan.ballot.leader == self._peer:
                self._take_commit(this, sealed)
            return
        if this.listed is None:  # its author's key comes with the list
            self._wait_for_round(peer, this.fingerprint, Word(sealed), size)
            return
        author, known = sealed.author, this.sealed[stage]
        if author in known or author not in this.keys or len(sealed.body) > MOST_BODY[stage]:
            return
        if self._holds(sealed, this.keys[author]):
            known[author] = sealed
            this.note()
            if peer == author:
                self._pass_on(this, sealed)

    def _pass_on(self, this: _Verified, sealed: Sealed) -> None:
        """Clients cannot call each other: some members that both can call carry their words."""
        public = {member.peer: member.public for member in this.plan.group}
        if public[sealed.author] or not public[self._peer] or self._peer not in self._carriers(this, sealed.author):
            return
        for peer, can_be_called in public.items():
            if not can_be_called and peer != sealed.author:
                self._say(peer, Word(sealed))

    def _carriers(self, this: _Verified, author: str) -> list[str]:
        public = [member.peer for member in this.plan.group if member.public]
        return sorted(public, key=lambda peer: _rank(this.fingerprint, author, peer))[:ASKED]

    def _hear_piece(self, this: _Verified, peer: str, piece: Listed) -> None:
        """Take a piece of the list: from the leader before the entry; from anybody when the entry has named
        a list that is not here."""
        is_leaders = peer == this.plan.ballot.leader and this.entry is None and this.listed is None
        is_named = bool(this.wanted) and (this.listed is None or digest_of_list(this.listed) != this.wanted)
        if not (is_leaders or is_named) or not 0 <= piece.piece < piece.pieces <= MOST_PIECES:
            return
        if any(each.pieces != piece.pieces for each in this.pieces.values()):
            this.pieces = {}
        this.pieces[piece.piece] = piece
        if len(this.pieces) < piece.pieces:
            return
        sealed = tuple(each for place in sorted(this.pieces) for each in this.pieces[place].sealed)
        this.pieces = {}
        if is_leaders or digest_of_list(sealed) == this.wanted:
            self._hear_list(this, sealed)

    def _answer_lacking(self, this: _Verified, peer: str, said: AskListed | Lacking) -> None:
        if isinstance(said, AskListed):
            for piece in pieces_of(this.fingerprint, this.listed) if this.listed is not None else ():
                self._say(peer, piece)
            return
        try:
            known = this.sealed[Stage(said.stage)]
        except ValueError:
            return
        for author in said.authors[: len(this.peers)]:
            if author in known:
                self._say(peer, Word(known[author]))

    def _tell_all(self, this: _Verified, stage: Stage, body: bytes) -> None:
        sealed = self._seal(this, stage, body)
        this.sealed[stage][self._peer] = sealed
        public = {member.peer: member.public for member in this.plan.group}
        data = packed(Word(sealed))
        for peer, can_be_called in public.items():
            if peer != self._peer and (can_be_called or public[self._peer]):
                self._transport.send(peer, data)
        this.note()

    async def _await_words(self, this: _Verified, stage: Stage, awaited: set[str]) -> None:
        """Until all have spoken, or their time is over."""
        known, patience = this.sealed[stage], self._patience(this)

        def are_here() -> bool:
            return awaited <= known.keys() | {self._peer}

        deadline = self._now + patience
        if not await self._until(this, are_here, self._now + ASKS_AGAIN * patience):
            lacking = tuple(sorted(awaited - known.keys() - {self._peer}))
            for peer in self._some(this, set(known) - {self._peer}):
                self._say(peer, Lacking(this.fingerprint, stage, lacking))
            await self._until(this, are_here, deadline)

    def _some(self, this: _Verified, peers: set[str]) -> list[str]:
        """Choose members that can be called, so that not all peers ask the same ones."""
        callable_ones = [member.peer for member in this.plan.group if member.public and member.peer in peers]
        return sorted(callable_ones, key=lambda peer: _rank(this.fingerprint, self._peer, peer))[:ASKED]

    def _patience(self, this: _Verified) -> float:
        return max(LEAST_WAIT, this.plan.exchange_seconds)

    def _seal(self, this: _Verified, stage: Stage, body: bytes, key: bytes = b"") -> Sealed:
        signature = self._signatures.sign_words(this.fingerprint, stage, body)
        return Sealed(this.fingerprint, int(stage), self._peer, body, signature, key)

    def _holds(self, sealed: Sealed, key: bytes) -> bool:
        return self._signatures.check_words(
            sealed.author, sealed.fingerprint, sealed.stage, sealed.body, sealed.signature, key
        )

    def _say(self, peer: str, said: Said) -> None:
        if peer != self._peer:
            try:
                self._transport.send(peer, packed(said))
            except WireError as error:
                logger.warning("Words are not sent: %s", error)

    # --- time, and threads ---

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _until(self, this: _Verified, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for it. :returns: whether it is so"""
        while not condition():
            left = deadline - self._now
            if left <= 0:
                return False
            try:
                await asyncio.wait_for(this.changed.wait(), left)
            except asyncio.TimeoutError:
                pass
        return True

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Whoever gives up waits for the thread: nobody else may work on the same things meanwhile."""
        running = asyncio.get_running_loop().run_in_executor(None, work, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})
            raise

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        async def watched() -> None:
            try:
                await work
            except Exception:
                logger.exception("A part of verification failed")

        task = asyncio.get_running_loop().create_task(watched())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: work.close())
        return task

    def _forget_rounds(self) -> None:
        for each in list(self._rounds.values())[:-WITH_OWN]:
            if each.entry is None:
                each.own, each.has_own = {}, False
        while len(self._rounds) > MOST_ROUNDS:
            fingerprint, old = self._rounds.popitem(last=False)
            old.is_over = True
            old.note()
            task = self._verifying.pop(fingerprint, None)
            if task is not None:
                task.cancel()


class _Skipping:
    """Skip a member's words that make no sense, as if it had said nothing."""

    def __init__(self, peer: str, what: str):
        self._peer, self._what = peer, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        if isinstance(error, WireError):
            logger.info("The %s of %s is none: %s", self._what, self._peer, error)
            return True
        return False


class Table:
    """Numbers of a round's cells along its direction; see robust.messages.Statement.

    :param averages: (n,) of each cell that has an answer
    :param sums: of a sketch
    :ivar answers: (cells, 1 + sums), length and sketch of each answer; NaN where there is none
    """

    def __init__(self, layout: Layout, averages: Mapping[int, torch.Tensor], seed: bytes, sums: int):
        self._layout, self._averages, self._seed, self._size = layout, averages, seed, sums
        self.width = SUMS + sums
        self.answers = np.full((layout.num_cells, 1 + sums), np.nan)
        for cell, average in averages.items():
            self.answers[cell, 0] = _length(average)
            self.answers[cell, 1:] = sketch(average, seed, layout.cell(cell).start, sums)

    def row(self, cell: int, values: torch.Tensor) -> np.ndarray[Any, Any]:
        """Length, distance from the answer and sketch of one part, (2 + sums,).

        :param values: (n,) of the cell
        """
        row = np.zeros(self.width)
        row[NORM], row[DISTANCE] = _length(values), UNKNOWN
        if cell in self._averages:
            row[DISTANCE] = _length(values.double() - self._averages[cell].double())
        row[SUMS:] = sketch(values, self._seed, self._layout.cell(cell).start, self._size)
        return row

    def decoded(self, cell: int, data: bytes) -> np.ndarray[Any, Any]:
        """As `row`, of an encoded cell. Raises ValueError."""
        return self.row(cell, self._layout.decode_cell(cell, data))

    def of_ours(self, encoded: Mapping[int, bytes]) -> np.ndarray[Any, Any]:
        """(cells, 2 + sums) float32 of all that we brought."""
        numbers = np.zeros((self._layout.num_cells, self.width), np.float32)
        numbers[:, DISTANCE] = UNKNOWN
        with np.errstate(over="ignore"):
            for cell, data in encoded.items():
                numbers[cell] = self.decoded(cell, data)
        return numbers


class Held(Mapping[int, np.ndarray[Any, Any]]):
    """Place of a sender -> numbers of our cells that it brought, (cells of ours, 2 + sums); made when asked for.

    :param cells: of our slice
    :param parts: place of a sender -> its encoded cells
    """

    def __init__(self, table: Table, cells: Sequence[int], parts: Mapping[int, Mapping[int, bytes]]):
        self._table, self._cells, self._parts = table, cells, parts
        self._made: dict[int, np.ndarray[Any, Any]] = {}

    def prepare(self, places: Any) -> None:
        """They will be asked for."""
        for place in self._parts.keys() & set(places):
            self[place]

    def __getitem__(self, place: int) -> np.ndarray[Any, Any]:
        if place not in self._made:
            rows = np.zeros((len(self._cells), self._table.width))
            rows[:, DISTANCE] = UNKNOWN
            for index, cell in enumerate(self._cells):
                if cell in self._parts[place]:
                    rows[index] = self._table.decoded(cell, self._parts[place][cell])
            self._made[place] = rows
        return self._made[place]

    def __iter__(self) -> Iterator[int]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _length(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _rank(*words: str | bytes) -> bytes:
    joined = b"\0".join(word.encode() if isinstance(word, str) else word for word in words)
    return hashlib.sha256(joined).digest()

