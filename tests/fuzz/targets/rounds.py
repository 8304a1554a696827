"""Verified rounds: envelopes, and what is in them."""

from __future__ import annotations

import msgpack
import numpy as np
from google.protobuf.message import DecodeError
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.crypto import RSAPrivateKey

from tests.fuzz.forms import MSGPACK, Protobuf
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import CALLER, UNREADABLE, download, loop, packed
from volunteer_kit.auth.access_token import peer_id_of_key
from volunteer_kit.robust.messages import Accusation, Commit, Report, Reveal, Samples, Statement, Vote, digest_of
from volunteer_kit.swarm.broadcast import Board, Boards, tell_all
from volunteer_kit.swarm.verify_wire import COMMIT, REVEAL, STAGES, STATEMENT, Seals, pack, seal, unpack, unpack_samples

registry = Registry()
ROUND = b"r" * 20
KEY = RSAPrivateKey()
AUTHOR = PeerID(peer_id_of_key(KEY.get_public_key().to_bytes()))
SAMPLES = Samples(((0, 12, 5), 7, ("a", (1, 2))), 1, 2)
MESSAGES = (
    (
        COMMIT,
        Commit(
            256.0, b"s" * 16, b"12345678" * 3, b"n" * 16, frozenset({1}), frozenset(), frozenset({3}),
            (
                Report(ROUND, 3, 1, np.array([0.5, -2.0, 1e300, 0.0, 1.0, 2.0, 3.0, 4.0])),
                Accusation(ROUND, 2, 17),
                Vote(ROUND, 4, "gradient", True, 1.97, frozenset({1, 5})),
            ),
        ),
    ),
    (REVEAL, Reveal(b"n" * 16, (b"", b"a" * 16), (0, 7), (b"", b"h" * 8))),
    (STATEMENT, Statement(b"z" * 32, np.ones((3, 10), np.float32), (b"", b"h" * 8))),
    (STATEMENT, Statement(b"z" * 32, np.zeros((0, 10), np.float32), (), SAMPLES)),
)  # fmt: skip


def _bodies() -> list[bytes]:
    return [packed(ROUND, stage, pack(message)) for stage, message in MESSAGES]


@registry.add(_bodies, *UNREADABLE, form=MSGPACK)
def round_message(data: bytes) -> bool:
    """The body of an envelope: any member can sign any."""
    _, stage, words = msgpack.unpackb(data, raw=False, strict_map_key=True)
    if type(stage) is not int or stage not in STAGES:
        return False
    message = unpack(stage, words)
    digest_of(message)
    if isinstance(message, Statement) and message.opening is not None:
        message.opening.digest()
        message.opening.fault(3.0)
    return True


@registry.add(lambda: [seal(KEY, ROUND, stage, message) for stage, message in MESSAGES], ValueError, form=MSGPACK)
def round_envelope(data: bytes) -> bool:
    """Signed; for each stage, of an author whose key is known."""
    seals, is_taken = Seals(ROUND), False
    seals.open(seal(KEY, ROUND, *MESSAGES[0]), COMMIT)
    for stage in STAGES:
        try:
            seals.open(data, stage)
            is_taken = True
        except ValueError:
            continue
    return is_taken


@registry.add(
    lambda: [msgpack.packb([[0, 1, 2], 1, 1]), msgpack.packb([["a", [1, [2]]], 0, 2])], *UNREADABLE, form=MSGPACK
)
def sample_names(data: bytes) -> bool:
    """The list of samples that a contribution was computed from."""
    samples = unpack_samples(msgpack.unpackb(data, raw=False))
    samples.digest()
    return samples.fault(float(len(samples.names))) is None


def _tell_requests() -> list[bytes]:
    envelope = seal(KEY, ROUND, *MESSAGES[0])
    return [
        averaging_pb2.DownloadData(
            metadata=packed(ROUND, 0, wants), tensor_part=runtime_pb2.Tensor(buffer=envelope if wants else b"")
        ).SerializeToString()
        for wants in (True, False)
    ]


@registry.add(_tell_requests, *UNREADABLE, form=Protobuf(averaging_pb2.DownloadData, MSGPACK), max_bytes=16_384)
def tell_request(data: bytes) -> bool:
    """rpc_tell, from a member. A round that is not known is not waited for here."""
    try:
        request = averaging_pb2.DownloadData.FromString(data)
    except DecodeError:
        return False
    boards = _Boards()
    boards.open(ROUND, [AUTHOR, CALLER])
    return loop().run_until_complete(boards.answer(request, AUTHOR, 0.0)).metadata != b"unknown"


class _Boards(Boards):
    async def find(self, round_id: bytes, caller: PeerID) -> Board | None:
        return self._boards.get(round_id)


class _Teller:
    def __init__(self, metadata: bytes) -> None:
        self.metadata = metadata

    async def rpc_tell(self, request: averaging_pb2.DownloadData) -> averaging_pb2.DownloadData:
        return download(self.metadata)


@registry.add(
    lambda: [packed(seal(KEY, ROUND, *MESSAGES[0])), b"unknown", packed()], form=MSGPACK, max_bytes=16_384
)
def tell_answer(data: bytes) -> bool:
    """What a member answers to rpc_tell: envelopes of all. It must not break the round."""
    own = PeerID(b"\x12\x20" + bytes(32))
    board = Board(ROUND, [AUTHOR])
    board.take = _quiet(board.take, own)  # we say nothing ourselves: to sign takes longer than all the rest
    told = loop().run_until_complete(tell_all(board, COMMIT, b"", own, [CALLER], lambda _: _Teller(data), 0.001))
    return bool(told)


def _quiet(take, own: PeerID):
    def take_others(stage: int, envelope: bytes, author: PeerID | None = None) -> None:
        if author != own:
            take(stage, envelope, author)

    return take_others
