"""Messages of verified rounds: what goes out comes in, and what strangers send is refused in one way."""

from __future__ import annotations

import base64
import time

import msgpack
import numpy as np
import pytest
from hivemind.p2p import PeerID
from hivemind.utils.crypto import RSAPrivateKey
from hypothesis import given
from hypothesis import strategies as st

from volunteer_kit.auth.access_token import peer_id_of_key
from volunteer_kit.robust.messages import Accusation, Commit, Report, Reveal, Samples, Statement, Vote
from volunteer_kit.swarm.verify_wire import COMMIT, MAX_ENVELOPE, REVEAL, STATEMENT, Seals, pack, seal, unpack

KEY, OTHER = RSAPrivateKey(), RSAPrivateKey()
ROUND = b"r" * 32


def peer_of(key: RSAPrivateKey) -> PeerID:
    return PeerID(peer_id_of_key(key.get_public_key().to_bytes()))


NEWS = (
    Report(ROUND, 3, 1, np.array([0.5, -2.0, 1e300, 0.0, 1.0, 2.0, 3.0, 4.0])),
    Accusation(ROUND, 2, 17),
    Vote(ROUND, 4, "gradient", True, 1.97, frozenset({1, 5})),
    Vote(ROUND, 4, "statement", False, 0.0, frozenset(), 2),
)
COMMITS = (
    Commit(256.0, b"s" * 16, b"12345678" * 3, b"n" * 16, frozenset({1}), frozenset(), frozenset({3}), NEWS),
    Commit(0.0, b"", b"", b"n" * 16, None, frozenset({2})),
)
MESSAGES = [
    *((COMMIT, commit) for commit in COMMITS),
    (REVEAL, Reveal(b"n" * 16, (b"", b"a" * 16), (0, 7), (b"", b"h" * 8))),
    (STATEMENT, Statement(b"z" * 32, np.ones((3, 10), np.float32), (b"", b"h" * 8))),
    (
        STATEMENT,
        Statement(b"z" * 32, np.zeros((0, 10), np.float32), (), Samples(((0, 12, 5), 7, ("a", (1, 2))), 1, 2)),
    ),
]


@pytest.mark.parametrize(("stage", "message"), MESSAGES)
def test_what_goes_out_comes_in(stage, message):
    words = msgpack.unpackb(msgpack.packb(pack(message), use_bin_type=True), raw=False)
    back = unpack(stage, words)
    assert repr(back) == repr(message)  # arrays have no equality of one bool
    if isinstance(message, Statement) and message.opening is not None:
        assert back.opening.digest() == message.opening.digest()


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=8),
    max_leaves=20,
)


@given(st.sampled_from([COMMIT, REVEAL, STATEMENT]), ANYTHING)
def test_anything_else_is_one_error(stage, words):
    try:
        unpack(stage, words)
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, float("nan")),
        (0, -1.0),
        (0, 1e300),
        (0, 5),
        (1, b"x" * 17),
        (2, b"123"),
        (3, b"x" * 99),
        (4, [-1]),
        (4, ["a"]),
        (4, 3),
        (7, [["vote", ROUND, 1, "murder", True, 0.0, [], -1]]),
        (7, [["vote", ROUND, 1, "gradient", 1, 0.0, [], -1]]),
        (7, [["report", ROUND, 1, 0, b"123"]]),
        (7, [["other", ROUND, 1]]),
        (7, [[]]),
        (7, 1),
    ],
)
def test_a_commitment_that_cannot_be_one_is_refused(place, value):
    words = pack(COMMITS[0])
    words[place] = value
    with pytest.raises(ValueError):
        unpack(COMMIT, words)


@pytest.mark.parametrize("shape", [[3, 9], [2**20, 10], [3, 100], [3], [-1, 10]])
def test_a_statement_of_another_shape_is_refused(shape):
    words = pack(Statement(b"z", np.ones((3, 10), np.float32)))
    words[1] = shape
    with pytest.raises(ValueError):
        unpack(STATEMENT, words)


def test_only_who_signed_it_said_it():
    seals, commit = Seals(ROUND), COMMITS[0]
    envelope = seal(KEY, ROUND, COMMIT, commit)
    assert seals.open(envelope, COMMIT)[0] == peer_of(KEY)
    with pytest.raises(ValueError, match="another member's envelope"):
        seals.open(envelope, COMMIT, peer_of(OTHER))
    with pytest.raises(ValueError, match="another round or stage"):
        seals.open(envelope, REVEAL)
    with pytest.raises(ValueError, match="another round or stage"):
        Seals(b"other").open(envelope, COMMIT)
    body, signature, key = msgpack.unpackb(envelope, raw=False)
    forged = msgpack.packb([body[:-1] + b"\x01", signature, key], use_bin_type=True)
    with pytest.raises(ValueError):
        seals.open(forged, COMMIT)
    theirs = msgpack.packb([body, base64.b64decode(OTHER.sign(body)), key], use_bin_type=True)
    with pytest.raises(ValueError, match="forged"):
        seals.open(theirs, COMMIT)


def test_later_stages_need_a_key_that_a_commitment_has_shown():
    seals, reveal = Seals(ROUND), seal(KEY, ROUND, REVEAL, MESSAGES[2][1])
    with pytest.raises(ValueError, match="nobody has shown"):
        seals.open(reveal, REVEAL, peer_of(KEY))
    seals.open(seal(KEY, ROUND, COMMIT, COMMITS[1]), COMMIT)
    assert seals.open(reveal, REVEAL, peer_of(KEY))[0] == peer_of(KEY)
    assert seals.open(reveal, REVEAL)[0] == peer_of(KEY)  # passed on by somebody else


@pytest.mark.parametrize(
    "envelope", [b"", b"\xff" * 30, msgpack.packb([1, 2, 3]), msgpack.packb({"a": 1}), b"\x91" * 5000]
)
def test_junk_is_no_envelope(envelope):
    with pytest.raises(ValueError):
        Seals(ROUND).open(envelope, COMMIT)


def envelope_of(body: bytes, said_by: bytes, signature: bytes = bytes(256)) -> bytes:
    return msgpack.packb([body, signature, said_by], use_bin_type=True)


@pytest.mark.parametrize(
    ("stage", "envelope"),
    [
        (REVEAL, envelope_of(msgpack.packb([ROUND, REVEAL, []]), b"\x12\x20" + bytes(2**21 - 400))),
        (COMMIT, envelope_of(msgpack.packb([ROUND, COMMIT, []]), b"ssh-rsa " + b"A" * (2**21 - 400))),
        (COMMIT, bytes(MAX_ENVELOPE + 1)),
        (COMMIT, b"\xdd" + (2**20).to_bytes(4, "big") + b"\x90" * 2**20),
        (COMMIT, envelope_of(b"\x93" + b"\xdd" + (2**20).to_bytes(4, "big") + b"\x90" * 2**20, b"x")),
        (COMMIT, envelope_of(b"\x93" * 1000, b"x")),
    ],
    ids=["2 MB of a peer id", "2 MB of a key", "too long", "lists", "lists within", "deep"],
)
def test_a_heavy_envelope_is_refused_before_it_is_read(stage, envelope):
    """The base58 of a peer id takes time with the square of its bytes: hours for these, with the interpreter held."""
    began = time.process_time()
    with pytest.raises(ValueError) as refused:
        Seals(ROUND).open(envelope, stage)
    assert time.process_time() - began < 2.0 and len(str(refused.value)) < 300


def test_what_is_not_awaited_is_not_unpacked():
    """Of somebody who is not in the group, or has said it: it costs no more than a signature."""
    seals, envelope = Seals(ROUND), seal(KEY, ROUND, COMMIT, COMMITS[0])
    assert seals.open(envelope, COMMIT, is_awaited=lambda peer: False) is None
    junk = msgpack.packb([ROUND, COMMIT, "no commitment"], use_bin_type=True)
    signed = envelope_of(junk, KEY.get_public_key().to_bytes(), base64.b64decode(KEY.sign(junk)))
    assert seals.open(signed, COMMIT, is_awaited=lambda peer: peer == peer_of(OTHER)) is None
    with pytest.raises(ValueError, match="no message"):
        seals.open(signed, COMMIT, is_awaited=lambda peer: peer == peer_of(KEY))
