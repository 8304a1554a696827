"""Messages of verified rounds as bytes, and back: signed, typed, bounded; whatever does not fit is no message.

An envelope is [body, signature, author], the author's key where nobody can know it yet (a commitment), else its peer
id; the body is [round id, stage, message]. The signature is of the member's libp2p key, so that a member in client mode
can take all messages from one that it can call.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
from cryptography.exceptions import UnsupportedAlgorithm
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from volunteer_kit.auth.access_token import peer_id_of_key
from volunteer_kit.robust.messages import (
    DIGEST_SIZE,
    Accusation,
    Commit,
    News,
    Report,
    Reveal,
    Samples,
    Statement,
    Vote,
)
from volunteer_kit.robust.reducing import SUMS
from volunteer_kit.robust.standing import CAUSES
from volunteer_kit.swarm.codec_wire import check_header
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.identity import is_peer_id
from volunteer_kit.swarm.message_body import open_body, read_body

COMMIT, REVEAL, STATEMENT = STAGES = range(3)
MAX_ENVELOPE = 2**21  # bytes; a statement of 125.9 M parameters has about 20 KB, a list of 4,096 samples 60 KB
PART_DIGEST = 8  # bytes
ANSWER_DIGEST = 16  # bytes
MAX_PARTS = 2**16
MAX_NAME = 256  # bytes
MAX_MEMBERS = 1024
MAX_ROUND_ID = 256  # bytes
MAX_REPORT = 2**17  # bytes; 64 for each reducer
MAX_NAMES, MAX_LISTS = 2**20, 2**17  # of samples in a statement, and of those whose names are lists


def part_digest(part: runtime_pb2.Tensor, digest_size: int = PART_DIGEST) -> bytes:
    """Of a part as it is sent, and how it is to be read: the same bytes are other values in another codec. Who shows it
    later is the one who received it, so a sender gains nothing by two parts of one digest.

    Raises ValueError for a part with more around its values than any has.
    """
    check_header(part)
    about = repr((part.compression, part.dtype, tuple(part.size), len(part.buffer))).encode()
    digest = hashlib.blake2b(about, digest_size=digest_size, person=b"part")
    digest.update(part.buffer)
    return digest.digest()


# --- messages ---


def pack(message: Commit | Reveal | Statement) -> list:
    """What goes into a body."""
    if isinstance(message, Commit):
        distrusts = None if message.distrusts is None else sorted(message.distrusts)
        news = [_pack_news(one) for one in message.news]
        promised = [float(message.weight), message.samples, message.parts, message.nonce]
        return [*promised, distrusts, sorted(message.bans), sorted(message.due), news, message.of, list(message.stated)]
    if isinstance(message, Reveal):
        return [message.nonce, list(message.answers), list(message.counted), list(message.heard)]
    opening = None if message.opening is None else pack_samples(message.opening)
    numbers = np.asarray(message.numbers, "<f4")
    return [message.seed, list(numbers.shape), numbers.tobytes(), list(message.heard), opening]


def unpack(stage: int, words: Any) -> Commit | Reveal | Statement:
    """A stranger's. Raises ValueError for what is no message of this stage."""
    try:
        return (_commit, _reveal, _statement)[stage](*words)
    except (TypeError, ValueError, IndexError, KeyError, OverflowError, AttributeError) as error:
        raise ValueError(f"no message of stage {stage}: {brief(error)}") from None


def _commit(weight, samples, parts, nonce, distrusts, bans, due, news, of, stated) -> Commit:
    weight = _number(weight)
    if not 0 <= weight < 2**40 or len(_bytes(parts, PART_DIGEST * MAX_PARTS)) % PART_DIGEST:
        raise ValueError("weight or parts")
    distrusts = None if distrusts is None else _places(distrusts)
    known = tuple(_unpack_news(one) for one in _list(news, 1024))
    promised = (weight, _bytes(samples, 16), parts, _bytes(nonce, 16))
    before = (_bytes(of, MAX_ROUND_ID), _digests(stated, DIGEST_SIZE))
    return Commit(*promised, distrusts, _places(bans), _places(due), known, *before)


def _reveal(nonce, answers, counted, heard) -> Reveal:
    counted = tuple(_count(n) for n in _list(counted, MAX_MEMBERS))
    return Reveal(_bytes(nonce, 16), _digests(answers, ANSWER_DIGEST), counted, _digests(heard, DIGEST_SIZE))


def _statement(seed, shape, numbers, heard, opening) -> Statement:
    parts, columns = (_count(n) for n in _list(shape, 2))
    if parts > MAX_PARTS or not SUMS <= columns <= 64 or len(_bytes(numbers, MAX_ENVELOPE)) != 4 * parts * columns:
        raise ValueError("numbers of another shape")
    table = np.frombuffer(numbers, "<f4").reshape(parts, columns)
    opening = None if opening is None else unpack_samples(opening)
    return Statement(_bytes(seed, 32), table, _digests(heard, DIGEST_SIZE), opening)


def pack_samples(samples: Samples) -> list:
    names = [list(name) if isinstance(name, tuple) else name for name in samples.names]
    return [names, samples.stale, samples.microbatches]


def unpack_samples(words: Any) -> Samples:
    names, stale, microbatches = words
    return Samples(tuple(_name(name) for name in _list(names, MAX_NAMES)), _count(stale), _count(microbatches))


def _pack_news(news: News) -> list:
    if isinstance(news, Report):
        return ["report", news.round_id, news.target, news.part, np.asarray(news.total, "<f8").tobytes()]
    if isinstance(news, Accusation):
        return ["accusation", news.round_id, news.sender, news.part]
    words = [news.accused, news.cause, news.guilty, float(news.measure), sorted(news.liars), news.accuser]
    return ["vote", news.round_id, *words]


def _unpack_news(words: Any) -> News:
    kind, round_id, *rest = _list(words, 8)
    round_id = _bytes(round_id, MAX_ROUND_ID)
    if kind == "report":
        target, part, total = rest
        sums = np.frombuffer(_bytes(total, MAX_REPORT), "<f8")
        return Report(round_id, _count(target), _count(part), sums)
    if kind == "accusation":
        sender, part = rest
        return Accusation(round_id, _count(sender), _count(part))
    if kind != "vote":
        raise ValueError("no news")
    accused, cause, guilty, measure, liars, accuser = rest
    if cause not in CAUSES or type(guilty) is not bool or type(accuser) is not int:
        raise ValueError("no vote")
    return Vote(round_id, _count(accused), cause, guilty, _number(measure, finite=False), _places(liars), accuser)


def _bytes(value: Any, longest: int) -> bytes:
    if not isinstance(value, bytes) or len(value) > longest:
        raise ValueError("no bytes, or too many")
    return value


def _list(value: Any, longest: int) -> Sequence:
    if not isinstance(value, list) or len(value) > longest:
        raise ValueError("no list, or too long")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError("no count")
    return value


def _number(value: Any, finite: bool = True) -> float:
    if type(value) is not float or (finite and not np.isfinite(value)):
        raise ValueError("no number")
    return value


def _digests(value: Any, size: int) -> tuple[bytes, ...]:
    return tuple(_bytes(digest, size) for digest in _list(value, MAX_MEMBERS))


def _places(value: Any) -> frozenset[int]:
    return frozenset(_count(place) for place in _list(value, MAX_MEMBERS))


def _name(value: Any, depth: int = 2) -> Any:
    """Of a sample: an integer, a text, or a short list of them."""
    if type(value) is int or (isinstance(value, str) and len(value) <= MAX_NAME):
        return value
    return tuple(_name(part, depth - 1) for part in _list(value, 8 if depth else -1))


# --- envelopes ---


def seal(key: RSAPrivateKey, round_id: bytes, stage: int, message: Commit | Reveal | Statement) -> bytes:
    """Signed. A commitment brings its author's key along."""
    body = msgpack.packb([round_id, stage, pack(message)], use_bin_type=True)
    public = key.get_public_key().to_bytes()
    author = public if stage == COMMIT else peer_id_of_key(public)
    return msgpack.packb([body, base64.b64decode(key.sign(body)), author], use_bin_type=True)


class Seals:
    """Opens envelopes of one round, and keeps the keys that came with its commitments."""

    def __init__(self, round_id: bytes):
        self._round_id = round_id
        self._keys: dict[PeerID, RSAPublicKey] = {}

    def open(
        self,
        envelope: bytes,
        stage: int,
        author: PeerID | None = None,
        is_awaited: Callable[[PeerID], bool] = lambda peer: True,
    ) -> tuple[PeerID, Any] | None:
        """What is said is not unpacked before it is known who has signed it, and that it is awaited of this member.

        :param author: whose it must be; None: whoever has signed it (a commitment)
        :returns: (author, message); None: it is not awaited
        Raises ValueError for anything that its author has not signed for this stage.
        """
        body, signature, said_by = read_body(envelope, bytes, bytes, bytes, longest=MAX_ENVELOPE)
        reader = open_body(body, MAX_ENVELOPE, most=MAX_NAMES, lists=MAX_LISTS)
        try:
            length, round_id, said_stage = reader.read_array_header(), reader.unpack(), reader.unpack()
        except Exception as error:  # msgpack has a dozen of them
            raise ValueError(f"no envelope: {brief(error)}") from None
        if length != 3:
            raise ValueError("no envelope")
        if round_id != self._round_id or said_stage != stage:
            raise ValueError("an envelope of another round or stage")
        if stage == COMMIT:
            signer, key = _owner_of(said_by)
        elif is_peer_id(said_by) and PeerID(said_by) in self._keys:
            signer = PeerID(said_by)
            key = self._keys[signer]
        else:
            raise ValueError("an envelope of somebody whose key nobody has shown")
        if author is not None and signer != author:
            raise ValueError("another member's envelope")
        if not is_awaited(signer):
            return None
        if not key.verify(body, base64.b64encode(signature)):
            raise ValueError("a forged envelope")
        self._keys.setdefault(signer, key)
        try:
            words = reader.unpack()
        except Exception as error:
            raise ValueError(f"no message of stage {stage}: {brief(error)}") from None
        return signer, unpack(stage, words)


def _owner_of(key: Any) -> tuple[PeerID, RSAPublicKey]:
    try:
        return PeerID(peer_id_of_key(key)), RSAPublicKey.from_bytes(key)
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm):
        raise ValueError("no key") from None
