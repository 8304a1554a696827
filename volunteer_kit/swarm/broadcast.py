"""Telling something to all members of a group: each member tells every member that can be called, and who cannot be
called asks one of them for all.

What is told is sealed by its author (verify_wire.py), so whoever passes it on cannot change it; it can be kept from
others only by those who keep it from all whom they could tell.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgpack
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.message_body import read_body, unpack_body
from volunteer_kit.swarm.verify_wire import MAX_ENVELOPE, MAX_ROUND_ID, STAGES, Seals

logger = get_logger(__name__)
KEPT_ROUNDS = 3
EARLY = 10.0  # s that a member's word may come before our own leader has told us of the group
MAX_ANSWER = 3_500_000  # bytes; p2pd takes 4 MB in one message
ASKED = 2  # members that are asked for all, of whom one may be a liar or dead
MAX_WAITING, MAX_WAITING_EACH = 1024, 4  # words for rounds that we do not know of yet, of all and of one caller
RELAYED = 0.25  # of a stage's time is for passing on what did not reach everybody


class Stage:
    """What members have told in one stage of one round."""

    def __init__(self, expected: Collection[PeerID]):
        self.expected = frozenset(expected)
        self.envelopes: dict[PeerID, bytes] = {}
        self.messages: dict[PeerID, Any] = {}
        self.complete = asyncio.Event()
        self.over = asyncio.Event()  # complete, or no longer waited for

    def awaits(self, author: PeerID) -> bool:
        """The first word of each member counts."""
        return author in self.expected and author not in self.messages

    def put(self, author: PeerID, envelope: bytes, message: Any) -> None:
        if self.awaits(author):
            self.envelopes[author], self.messages[author] = envelope, message
            self._look()

    def expect(self, peers: Collection[PeerID]) -> None:
        """Nobody else has to be waited for."""
        self.expected = frozenset(peers)
        self._look()

    def _look(self) -> None:
        if self.expected <= self.messages.keys():
            self.complete.set()
            self.over.set()


class Board:
    """One round's words, in the process of one member."""

    def __init__(self, round_id: bytes, group: Sequence[PeerID]):
        self.round_id, self.size, self.seals = round_id, len(group), Seals(round_id)
        self.stages = [Stage(group) for _ in STAGES]

    def take(self, stage: int, envelope: bytes, author: PeerID | None = None) -> None:
        """Raises ValueError for what nobody of the group has sealed. A second word of a member is not looked at."""
        opened = self.seals.open(envelope, stage, author, self.stages[stage].awaits)
        if opened is not None:
            said_by, message = opened
            self.stages[stage].put(said_by, envelope, message)


class Boards:
    """Of the rounds under way, and what comes for them."""

    def __init__(self):
        self._boards: OrderedDict[bytes, Board] = OrderedDict()
        self._opened: dict[bytes, asyncio.Event] = {}
        self._waiting: Counter[bytes] = Counter()  # words that wait for a round
        self._waiting_of: Counter[PeerID] = Counter()  # words of a caller that wait

    def open(self, round_id: bytes, group: Sequence[PeerID]) -> Board:
        self._boards[round_id] = board = Board(round_id, group)
        while len(self._boards) > KEPT_ROUNDS:
            self._boards.popitem(last=False)
        if round_id in self._opened:
            self._opened.pop(round_id).set()
        return board

    async def find(self, round_id: bytes, caller: PeerID) -> Board | None:
        """The round's board, once it is there."""
        has_room = len(self._opened) < MAX_WAITING and self._waiting_of[caller] < MAX_WAITING_EACH
        if round_id not in self._boards and has_room:
            opened = self._opened.setdefault(round_id, asyncio.Event())
            self._waiting_of[caller] += 1
            self._waiting[round_id] += 1
            try:
                await _until(opened, EARLY)
            finally:
                self._waiting_of[caller] -= 1
                self._waiting[round_id] -= 1
                self._waiting_of, self._waiting = +self._waiting_of, +self._waiting  # without zeros
                if round_id not in self._waiting:
                    self._opened.pop(round_id, None)
        return self._boards.get(round_id)

    async def answer(self, request: averaging_pb2.DownloadData, caller: PeerID, patience: float):
        """Of rpc_tell: take the caller's envelope, and give all of the stage, if it asks for them: once it is over, or
        at once to who has nothing to tell, for its own patience is at an end."""
        try:
            round_id, stage, wants = _read_request(request.metadata)
        except ValueError:
            return averaging_pb2.DownloadData(metadata=b"unknown")
        board = await self.find(round_id, caller)
        if board is None:
            return averaging_pb2.DownloadData(metadata=b"unknown")
        if request.tensor_part.buffer:
            try:
                board.take(stage, request.tensor_part.buffer, caller)
            except ValueError as error:
                logger.debug(f"{caller} told what cannot be taken: {brief(error)}")
        found: list[bytes] = []
        if wants:
            here = board.stages[stage]
            if request.tensor_part.buffer:
                await _until(here.over, patience)
            size = 0
            for envelope in here.envelopes.values():
                size += len(envelope)
                if size > MAX_ANSWER:
                    break
                found.append(envelope)
        return averaging_pb2.DownloadData(metadata=msgpack.packb(found, use_bin_type=True))


def _read_request(metadata: bytes) -> tuple[bytes, int, bool]:
    """Raises ValueError."""
    round_id, stage, wants = read_body(metadata, bytes, int, bool)
    if len(round_id) > MAX_ROUND_ID or stage not in STAGES:
        raise ValueError("no request")
    return round_id, stage, wants


async def _until(event: asyncio.Event, patience: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), patience)
        return True
    except asyncio.TimeoutError:
        return False


async def tell_all(
    board: Board,
    stage: int,
    envelope: bytes,
    own_id: PeerID,
    public: Sequence[PeerID],
    stub_of: Callable[[PeerID], Any],
    patience: float,
) -> dict[PeerID, Any]:
    """Tell, and hear what all members told in this stage, as far as it comes within `patience` s, relays included: a
    member that says nothing costs the others no more.

    :param public: members that can be called; who is not one of them asks two that are
    """
    board.take(stage, envelope, own_id)
    here, others = board.stages[stage], [peer for peer in public if peer != own_id]
    first = sum(own_id.to_bytes()) % max(1, len(others))
    others = [*others[first:], *others[:first]]  # not all ask the same ones
    is_public = own_id in public

    async def call(peer: PeerID, wants: bool, word: bytes = envelope) -> None:
        words = msgpack.packb([board.round_id, stage, wants], use_bin_type=True)
        request = averaging_pb2.DownloadData(metadata=words, tensor_part=runtime_pb2.Tensor(buffer=word))
        try:
            answer = await asyncio.wait_for(stub_of(peer).rpc_tell(request), EARLY + patience)
            _take_answer(board, stage, answer)
        except Exception as error:  # whatever breaks a call; others have what it would have told us
            logger.debug(f"{peer} was told in vain: {brief(error)}")

    calls = [asyncio.create_task(call(peer, wants=not is_public and i < ASKED)) for i, peer in enumerate(others)]
    complete = asyncio.create_task(here.complete.wait())
    waiting = {complete} if is_public else {complete, asyncio.gather(*calls)}
    alone = (1 - RELAYED) * patience if is_public else patience
    try:
        await asyncio.wait(waiting, timeout=alone, return_when=asyncio.FIRST_COMPLETED)
        here.over.set()
        asked = [peer for peer in others if peer in here.messages][:ASKED]
        if not here.complete.is_set() and is_public and asked:  # what did not reach us may have reached others
            relays = [asyncio.create_task(call(peer, True, b"")) for peer in asked]
            await asyncio.wait(relays, timeout=patience - alone)
    finally:
        complete.cancel()
    return dict(here.messages)


def _take_answer(board: Board, stage: int, answer: averaging_pb2.DownloadData) -> None:
    if answer.metadata == b"unknown" or len(answer.metadata) > 2 * MAX_ENVELOPE:
        return
    found = unpack_body(answer.metadata, 2 * MAX_ENVELOPE, most=board.size)
    for envelope in found if isinstance(found, list) else ():
        if isinstance(envelope, bytes):
            try:
                board.take(stage, envelope)
            except ValueError as error:
                logger.debug(f"what was passed on cannot be taken: {brief(error)}")
