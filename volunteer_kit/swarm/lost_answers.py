"""Answers that did not come to us, fetched from members to whom they did.

A reducer that dies in the middle of a round, or gives up on one member, has answered some and not others. Those take
different steps, and whoever is apart downloads a state, over the same lines that were too slow already: one late part
cost a swarm at 20/10 Mbit/s the next six rounds. But a reducer's answers are the same bytes for everybody, so each
member has them to give; and what none of them has, all go without.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import islice
from typing import Any

import msgpack
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from volunteer_kit.swarm.codec_wire import check_around
from volunteer_kit.swarm.message_body import read_body

RECOVERY = 0.5  # of an exchange's time, that more may be taken for it
ASKING = 0.5  # of that, in which others tell how many they have; they may still be waiting themselves
MARGIN = 0.05  # of it, before the round would be given up
AT_ONCE = 4  # parts on their way
PART_PATIENCE = 30.0  # s for one part; 512 kB take 20 on a busy line of 1 Mbit/s
NO_TIMEOUT = 10.0  # s; of rounds that may take as long as they like


DIGEST_SIZE = 16
Take = Callable[[runtime_pb2.Tensor], Awaitable[None]]


class GivenAnswers:
    """What each reducer of one round has answered, as it came.

    :param members: of the group, ourselves among them
    :param own: our place
    :param sizes: values that each reducer reduces
    :param patience: s that others may let us wait for the end of our own exchange
    """

    def __init__(self, members: Sequence[PeerID], own: int, sizes: Sequence[int], patience: float):
        self.members, self.own, self.sizes, self.patience = tuple(members), own, tuple(sizes), patience
        self.entered: dict[PeerID, int] = {}  # of each sender, parts that our slice's averages contain
        self.is_logged = False  # the round is over, and all may ask for it: see missed_rounds.py
        self._parts: list[list[runtime_pb2.Tensor]] = [[] for _ in members]
        self._ended = [asyncio.Event() for _ in members]
        self._shown: Counter[PeerID] = Counter()

    def note(self, reducer: int, message: runtime_pb2.Tensor) -> None:
        self._parts[reducer].append(message)

    def end(self, reducer: int) -> None:
        """No more will come of this one."""
        self._ended[reducer].set()

    async def count(self, asker: PeerID, reducer: int, patience: float) -> tuple[int, int | None]:
        """Parts that it has answered, once no more will come or the patience is over; and, if it is ourselves, how
        many of the asker's have entered them."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._ended[reducer].wait(), min(patience, self.patience))
        return len(self._parts[reducer]), self.entered.get(asker, 0) if reducer == self.own else None

    @property
    def counts(self) -> list[int]:
        """Parts that came of each reducer."""
        return [len(parts) for parts in self._parts]

    def digest(self) -> bytes:
        """Of all that came, in order."""
        return digest_of(message for parts in self._parts for message in parts)

    @property
    def num_bytes(self) -> int:
        return sum(len(message.buffer) for parts in self._parts for message in parts)

    def show(self, asker: PeerID, reducer: int, part: int) -> runtime_pb2.Tensor | None:
        """None: we do not have it, or the asker has had as many as there are."""
        if not 0 <= part < len(self._parts[reducer]) or self._shown[asker] >= sum(self.counts):
            return None
        self._shown[asker] += 1
        return self._parts[reducer][part]


def digest_of(messages: Iterable[runtime_pb2.Tensor]) -> bytes:
    hasher = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for message in messages:
        hasher.update(message.buffer)
    return hasher.digest()


class AnswersKept:
    """Part of SwarmAverager: gives other members what reducers have answered us."""

    traffic: Any
    doorkeeper: Any

    def _begin_to_keep(self) -> None:
        self._kept_answers: dict[bytes, GivenAnswers] = {}  # by the id of the exchange
        self._let_go_at: dict[bytes, asyncio.TimerHandle] = {}

    def _keep_answers(self, exchange_id: bytes, answers: GivenAnswers, seconds: float | None) -> None:
        """The same id may come again, when a round is tried again: the newest answers and their time hold.

        :param seconds: from now, after which no other member can be asking any more
        """
        if earlier := self._let_go_at.pop(exchange_id, None):
            earlier.cancel()
        self._kept_answers[exchange_id] = answers
        wait = NO_TIMEOUT if seconds is None else seconds
        self._let_go_at[exchange_id] = asyncio.get_running_loop().call_later(wait, self._let_go, exchange_id)

    def _let_go(self, exchange_id: bytes) -> None:
        self._let_go_at.pop(exchange_id, None)
        answers = self._kept_answers.get(exchange_id)  # the log may have dropped them since
        if answers is not None and not answers.is_logged:
            del self._kept_answers[exchange_id]

    async def rpc_count_answers(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """`metadata`: [exchange id, reducer, s to wait for the end of our own exchange with it] -> [parts that it
        answered us, parts of the asker's that have entered, None if we do not know]."""
        self.doorkeeper.check(context.remote_id, "show_answer")
        try:
            exchange_id, reducer, patience = read_body(request.metadata, bytes, int, (int, float))
        except ValueError:
            return averaging_pb2.DownloadData(metadata=b"lacks")
        answers = self._answers_for(context.remote_id, exchange_id, reducer)
        if answers is None or not patience >= 0:  # NaN is no time at all
            return averaging_pb2.DownloadData(metadata=b"lacks")
        told = await answers.count(context.remote_id, reducer, float(patience))
        return averaging_pb2.DownloadData(metadata=msgpack.packb(told))

    async def rpc_show_answer(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """`metadata`: [exchange id, reducer, part] -> `tensor_part`: what that reducer answered us."""
        self.doorkeeper.check(context.remote_id, "show_answer")
        try:
            exchange_id, reducer, part = read_body(request.metadata, bytes, int, int)
        except ValueError:
            return averaging_pb2.DownloadData(metadata=b"lacks")
        answers = self._answers_for(context.remote_id, exchange_id, reducer)
        shown = answers.show(context.remote_id, reducer, part) if answers is not None else None
        if shown is None:
            return averaging_pb2.DownloadData(metadata=b"lacks")
        await self.traffic.send(len(shown.buffer))
        return averaging_pb2.DownloadData(tensor_part=shown)

    def _answers_for(self, asker: PeerID, exchange_id: bytes, reducer: int) -> GivenAnswers | None:
        """None: there are none of such a round, or they are not for this asker."""
        answers = self._kept_answers.get(exchange_id)
        may_ask = answers is not None and (answers.is_logged or asker in answers.members)
        return answers if may_ask and 0 <= reducer < len(answers.members) else None


class Asking:
    """Of one reducer's answers in one round.

    :param stubs: of the members that may have them
    """

    def __init__(self, exchange_id: bytes, reducer: int, stubs: Mapping[PeerID, Any]):
        self._about, self._stubs = (exchange_id, reducer), stubs
        self.entered: int | None = None  # parts of ours that the reducer has taken in, as it says

    async def most(self, total: int, seconds: float) -> tuple[int, set[PeerID]]:
        """How many parts members have at most, and who has so many; at once when one has all.

        :param total: parts that the reducer was to answer
        """

        async def ask(peer: PeerID) -> tuple[PeerID, int]:
            answer = await self._stubs[peer].rpc_count_answers(self._request(0.9 * seconds))
            have, entered = read_body(answer.metadata, int, (int, type(None)))
            if entered is not None and entered >= 0:
                self.entered = entered
            return peer, min(have, total)

        found: dict[PeerID, int] = {}
        asked = [asyncio.ensure_future(ask(peer)) for peer in self._stubs]
        try:
            for answer in asyncio.as_completed(asked, timeout=seconds):
                with suppress(Exception):  # it is gone, or knows nothing of this round, or of such questions
                    peer, have = await answer
                    found[peer] = have
                    if have == total:
                        break
        except asyncio.TimeoutError:
            pass
        finally:
            for task in asked:
                task.cancel()
        best = max(found.values(), default=0)
        return best, {peer for peer, have in found.items() if have == best}

    async def part(self, part: int, sources: set[PeerID]) -> runtime_pb2.Tensor | None:
        """None: nobody gives it."""
        for peer in random.sample(sorted(sources), len(sources)):  # not all askers the same one
            with suppress(Exception):
                asked = self._stubs[peer].rpc_show_answer(self._request(part))
                answer = await asyncio.wait_for(asked, PART_PATIENCE)
                check_around(answer, len(answer.tensor_part.buffer))
                if answer.tensor_part.buffer:
                    return answer.tensor_part
            sources.discard(peer)
        return None

    def _request(self, wanted: float) -> averaging_pb2.DownloadData:
        return averaging_pb2.DownloadData(metadata=msgpack.packb([*self._about, wanted]))


async def parts_of(
    wanted: Iterable[tuple[Asking, int]], sources: set[PeerID], at_once: int = AT_ONCE
) -> AsyncIterator[runtime_pb2.Tensor]:
    """In order, while the next ones are on their way, until one cannot be had. Who does not give one is no source any
    more."""
    wanted, coming = iter(wanted), deque[asyncio.Task]()
    try:
        while True:
            for asking, part in islice(wanted, at_once - len(coming)):
                coming.append(asyncio.create_task(asking.part(part, sources)))
            message = await coming.popleft() if coming else None
            if message is None:
                return
            yield message
    finally:
        for task in coming:
            task.cancel()


async def fetch(asking: Asking, have: int, total: int, seconds: float, take: Take) -> None:
    """What members have of a reducer's answers, beyond the first `have`, to `take`, in order; within `seconds`."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_fetch(asking, have, total, ASKING * seconds, take), seconds)


async def _fetch(asking: Asking, have: int, total: int, seconds: float, take: Take) -> None:
    best, sources = await asking.most(total, seconds)
    if best > have:
        async with aclosing(parts_of(((asking, part) for part in range(have, best)), sources)) as answers:
            async for message in answers:
                await take(message)
