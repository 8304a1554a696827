"""Encode and decode the messages between members of a verified round: signed, typed, bounded.

robust/messages.py defines the messages. The author signs each one, so that a member that passes it on cannot change it.
A member decodes a message only if its author signed it and the round awaits it of that author.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np

from volunteer_kit.robust.draw import NONCE_SIZE, SEED_SIZE
from volunteer_kit.robust.messages import (
    DIGEST_SIZE,
    MAX_SAMPLES,
    Accusation,
    Commit,
    Load,
    News,
    Report,
    Reveal,
    Samples,
    Statement,
    Vote,
)
from volunteer_kit.robust.reducing import SUMS
from volunteer_kit.robust.standing import CAUSES
from volunteer_kit.swarm.rounds.commitments import DIGEST
from volunteer_kit.swarm.rounds.parts import MOST_SHARES
from volunteer_kit.swarm.sync.contributions import Share, discount
from volunteer_kit.swarm.wire import WireError, decode, encode

MARK: Final = b"\xc1"  # before a message of verification; no message of the core begins with it
MOST_MESSAGE: Final = 2**20 - 1  # bytes
MOST_NEWS_BYTES: Final = 2**16  # of one commitment, about; what is more comes with the next one
MOST_LISTED_BYTES: Final = 2**19  # of commitments in one message
MOST_PIECES: Final = 1024  # that a list of commitments comes in
MOST_PLACES: Final = 2048  # members of a group
SAMPLES_DIGEST: Final = 16  # bytes
MOST_ROUND: Final = 64  # bytes of a round's fingerprint
INFINITE: Final = -1.0  # a vote's measure without a bound


class Stage(IntEnum):
    """The stages of a round, in their order."""

    COMMIT = 0
    REVEAL = 1
    STATE = 2


MOST_BODY: Final[Mapping[Stage, int]] = {  # bytes
    Stage.COMMIT: 2**18,
    Stage.REVEAL: 2**16,
    Stage.STATE: 2**20 - 2**12,
}


# --- what travels ---


@dataclass(frozen=True)
class ToldReport:
    """See robust.messages.Report. `total` is little-endian float64."""

    round_id: bytes
    target: int
    part: int
    total: bytes


@dataclass(frozen=True)
class ToldVote:
    """See robust.messages.Vote."""

    round_id: bytes
    accused: int
    cause: str
    guilty: bool
    measure: float
    liars: frozenset[int]
    accuser: int


@dataclass(frozen=True)
class ToldCommit:
    """See robust.messages.Commit.

    :param shares: that the member may bring; weights follow from them
    :param lengths: L2 of each of its cells
    :param knows: False for a member that has just come: it distrusts nobody yet
    """

    samples: bytes
    parts: bytes
    nonce: bytes
    shares: tuple[Share, ...]
    lengths: tuple[float, ...]
    knows: bool
    distrusts: frozenset[int]
    bans: frozenset[int]
    due: frozenset[int]
    news: tuple[ToldReport | Accusation | ToldVote, ...]
    of: bytes
    stated: tuple[bytes, ...]


@dataclass(frozen=True)
class ToldReveal:
    """See robust.messages.Reveal. The entry says what was answered and who was counted."""

    nonce: bytes
    heard: tuple[bytes, ...]


@dataclass(frozen=True)
class Opening:
    """See robust.messages.Samples."""

    names: tuple[str, ...]
    microbatches: int


@dataclass(frozen=True)
class ToldStatement:
    """See robust.messages.Statement. `numbers` are little-endian float32, a row for each cell."""

    seed: bytes
    numbers: bytes
    heard: tuple[bytes, ...]
    opening: Opening | None


@dataclass(frozen=True)
class Sealed:
    """A member's words of one stage.

    :param key: the author's public key in DER, with a commitment; later ones are signed with the same
    """

    fingerprint: bytes
    stage: int
    author: str
    body: bytes
    signature: bytes
    key: bytes = b""


@dataclass(frozen=True)
class Word:
    """A member's own words, or somebody's who cannot be reached by all."""

    sealed: Sealed


@dataclass(frozen=True)
class Listed:
    """The commitments of a round, from its leader; a long list comes in pieces."""

    fingerprint: bytes
    piece: int
    pieces: int
    sealed: tuple[Sealed, ...]


@dataclass(frozen=True)
class AskListed:
    """Tell me this list again."""

    fingerprint: bytes


@dataclass(frozen=True)
class Lacking:
    """Tell me what these members said in this stage."""

    fingerprint: bytes
    stage: int
    authors: tuple[str, ...]


Said = Word | Listed | AskListed | Lacking


def packed(said: Said) -> bytes:
    """A message for the control stream. Raises WireError for one that is too long."""
    data = MARK + encode(said, Said)
    if len(data) > MOST_MESSAGE:
        raise WireError(f"{len(data)} bytes for a verified round; {MOST_MESSAGE} are the most")
    return data


def unpacked(data: bytes) -> Said:
    """A stranger's, behind the mark. Raises WireError."""
    said: Said = decode(Said, data, MOST_MESSAGE)
    return said


def pieces_of(fingerprint: bytes, sealed: Sequence[Sealed]) -> list[Listed]:
    """A list of commitments in messages that are short enough."""
    pieces: list[list[Sealed]] = [[]]
    size = 0
    for each in sealed:
        length = len(each.body) + len(each.signature) + len(each.key) + 256
        if pieces[-1] and size + length > MOST_LISTED_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(each)
        size += length
    return [Listed(fingerprint, place, len(pieces), tuple(each)) for place, each in enumerate(pieces)]


def digest_of_list(sealed: Iterable[Sealed]) -> bytes:
    """Return the digest that an entry names: equal for equal words of the same members."""
    hasher = hashlib.sha256(b"commitments")
    for each in sorted(sealed, key=lambda one: one.author):
        hasher.update(hashlib.sha256(each.author.encode()).digest() + hashlib.sha256(each.body).digest())
    return hasher.digest()


# --- commitments ---


def commit_body(commit: Commit, shares: tuple[Share, ...], lengths: Sequence[float]) -> tuple[bytes, tuple[News, ...]]:
    """A commitment as bytes, and the news that found no room in it."""
    taken: list[ToldReport | Accusation | ToldVote] = []
    size = 0
    for news in commit.news:
        told = _told_news(news)
        size += len(told.total) + 128 if isinstance(told, ToldReport) else 256
        if size > MOST_NEWS_BYTES:
            break
        taken.append(told)
    said = ToldCommit(
        commit.samples,
        commit.parts,
        commit.nonce,
        shares,
        tuple(float(length) for length in lengths),
        commit.distrusts is not None,
        commit.distrusts or frozenset(),
        commit.bans,
        commit.due,
        tuple(taken),
        commit.of,
        commit.stated,
    )
    return encode(said), commit.news[len(taken) :]


def read_commit(
    author: str, body: bytes, epoch: int, max_staleness: int, cells: int
) -> tuple[Commit, tuple[Share, ...], tuple[float, ...]]:
    """A stranger's commitment, its shares, and the lengths of its cells.

    :param epoch: of the round
    :raises WireError: for what nobody honest commits to
    """
    said: ToldCommit = decode(ToldCommit, body, MOST_BODY[Stage.COMMIT])
    _require(len(said.parts) == DIGEST * cells and len(said.lengths) == cells, "its parts")
    _require(len(said.samples) == SAMPLES_DIGEST and len(said.nonce) == SAMPLES_DIGEST, "a digest")
    _require(all(length >= 0 for length in said.lengths), "a length")
    _require(len(said.shares) <= MOST_SHARES, "too many shares")
    _require(len({share.number for share in said.shares}) == len(said.shares), "a contribution twice")
    for share in said.shares:
        is_whole = share.peer == author and share.number >= 0 and 1 <= share.samples <= MAX_SAMPLES
        _require(is_whole and 0 < share.cells < 1 << cells, "a share")
        _require(0 <= epoch - share.birth <= max_staleness, "a share's age")
    weight = sum(share.samples for share in said.shares)
    _require(weight <= MAX_SAMPLES, "too many samples")
    places = [*said.distrusts, *said.bans, *said.due]
    _require(all(0 <= place < MOST_PLACES for place in places), "a place")
    _require(len(said.of) <= MOST_ROUND and _are_digests(said.stated), "what it has heard")
    loads = tuple(Load(share.birth, share.samples, discount(epoch - share.birth), share.cells) for share in said.shares)
    commit = Commit(
        float(weight),
        said.samples,
        said.parts,
        said.nonce,
        said.distrusts if said.knows else None,
        said.bans,
        said.due,
        tuple(_news_of(each) for each in said.news),
        said.of,
        said.stated,
        loads,
    )
    return commit, said.shares, said.lengths


def _told_news(news: News) -> ToldReport | Accusation | ToldVote:
    if isinstance(news, Report):
        total = np.ascontiguousarray(news.total, "<f8").tobytes()
        return ToldReport(news.round_id, news.target, news.part, total)
    if isinstance(news, Accusation):
        return Accusation(news.round_id, int(news.sender), int(news.part))
    measure = float(news.measure) if math.isfinite(news.measure) else INFINITE
    liars = frozenset(int(place) for place in news.liars)
    return ToldVote(news.round_id, int(news.accused), news.cause, bool(news.guilty), measure, liars, int(news.accuser))


def _news_of(told: ToldReport | Accusation | ToldVote) -> News:
    _require(len(told.round_id) <= MOST_ROUND, "a round")
    if isinstance(told, Accusation):
        _require(0 <= told.sender < MOST_PLACES and told.part >= 0, "an accusation")
        return told
    if isinstance(told, ToldReport):
        _require(0 <= told.target < MOST_PLACES and told.part >= 0 and len(told.total) % 8 == 0, "a report")
        return Report(told.round_id, told.target, told.part, np.frombuffer(told.total, "<f8"))
    _require(told.cause in CAUSES and -1 <= told.accuser < MOST_PLACES, "a vote")
    _require(0 <= told.accused < MOST_PLACES and len(told.liars) <= MOST_PLACES, "a vote")
    measure = math.inf if told.measure < 0 else told.measure
    cause: Any = told.cause
    return Vote(told.round_id, told.accused, cause, told.guilty, measure, told.liars, told.accuser)


# --- reveals and statements ---


def reveal_body(reveal: Reveal) -> bytes:
    """A reveal as bytes."""
    return encode(ToldReveal(reveal.nonce, reveal.heard))


def read_reveal(body: bytes, answers: tuple[bytes, ...], counted: tuple[int, ...]) -> Reveal:
    """A stranger's reveal.

    :param answers: of each member, what it answered, and `counted`: in how many of a reducer's parts it is; both as the
        entry says, so they are not the member's to tell
    :raises WireError: for anything else
    """
    said: ToldReveal = decode(ToldReveal, body, MOST_BODY[Stage.REVEAL])
    _require(len(said.nonce) == NONCE_SIZE and _are_digests(said.heard), "a reveal")
    return Reveal(said.nonce, answers, counted, said.heard)


def statement_body(statement: Statement) -> bytes:
    """A statement as bytes. Raises WireError for one that is too long."""
    opening = None
    if statement.opening is not None:
        opening = Opening(tuple(str(name) for name in statement.opening.names), statement.opening.microbatches)
    numbers = np.ascontiguousarray(statement.numbers, "<f4").tobytes()
    body = encode(ToldStatement(statement.seed, numbers, statement.heard, opening))
    _require(len(body) <= MOST_BODY[Stage.STATE], "a statement that is too long")
    return body


def read_statement(body: bytes, cells: int, sums: int) -> Statement:
    """A stranger's statement. Raises WireError."""
    said: ToldStatement = decode(ToldStatement, body, MOST_BODY[Stage.STATE])
    _require(len(said.seed) == SEED_SIZE and _are_digests(said.heard), "a statement")
    _require(len(said.numbers) == 4 * cells * (SUMS + sums), "numbers of another shape")
    numbers = np.frombuffer(said.numbers, "<f4").reshape(cells, SUMS + sums)  # (cells, 2 + sums)
    opening = None
    if said.opening is not None:
        _require(said.opening.microbatches >= 0, "a list of samples")
        opening = Samples(said.opening.names, microbatches=said.opening.microbatches)
    return Statement(said.seed, numbers, said.heard, opening)


def _are_digests(digests: Sequence[bytes]) -> bool:
    return len(digests) <= MOST_PLACES and all(len(each) in (0, DIGEST_SIZE) for each in digests)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise WireError(f"{what} makes no sense in a verified round")
