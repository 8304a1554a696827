"""Rounds that we missed, made up for: their averages are fetched from members, and our own optimizer takes their steps.

Who misses a round, or was away for some, lacks a few averages, which are as large as the codec makes them: 2 MB each
where the state has 500 MB and more. At 5/1 Mbit/s that is a minute in place of an hour, on the lines of those who give
it as well. Steps from equal states by equal averages are equal, so what comes out is what all others hold.

Members tell a digest of the averages, and most accounts are believed; where the run knows accounts, two must agree, or
one donor could lead us anywhere. The bytes themselves may then come from anybody.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgpack
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.partition import TensorPartContainer
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture
from hivemind.utils.asyncio import enter_asynchronously
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.agreement import Told, read_told
from volunteer_kit.swarm.codec_wire import FLOAT32, check_header
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.held_parts import read_values
from volunteer_kit.swarm.lost_answers import DIGEST_SIZE, AnswersKept, Asking, GivenAnswers, parts_of
from volunteer_kit.swarm.message_body import read_body, unpack_body
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.shared_words import MAX_GROUP_SIZE

logger = get_logger(__name__)
MAX_ROUNDS, MAX_BYTES = 64, 64 * 2**20  # that one peer keeps, and one round at least, whatever its size
ASKED = 5  # members at once
LEAST_ACCOUNTS = 2  # that tell the same, in a run that knows accounts
PATIENCE, LOOK_PATIENCE = 10.0, 2.0  # s, for their answers; and where a group is looked for meanwhile
MAX_NAME = 4096  # bytes of what a round is called
MAX_ROUND = 3 * MAX_NAME + 2 * 9 * MAX_GROUP_SIZE + 64  # bytes of all that is told of one
NOT_OURS = -1  # place in the group of who was not in it
LACKS, UNDER_WAY = b"lacks", b"under way"  # answers, where there is no round to tell of
PARTS_AT_ONCE = 8  # on their way, of all reducers: each comes from another busy line


@dataclass(frozen=True)
class Logged:
    """A round whose step we took. `before`: what those held who took it; `counts`: parts that came of each reducer,
    the first of the `sizes` values that it had; what nobody got stands for zeros."""

    exchange_id: bytes
    before: Told
    name: bytes
    counts: tuple[int, ...]
    sizes: tuple[int, ...]
    digest: bytes
    num_bytes: int


class RoundsLogged(AnswersKept):
    """Part of SwarmGradientAverager: the averages of its last rounds, given to those who missed them; and fetched, and
    then given as well: two who met alone may have been killed since, or gone back themselves."""

    def _begin_to_keep(self) -> None:
        super()._begin_to_keep()
        self._log: deque[Logged] = deque()
        self._under_way: Told | None = None  # what we held when the round began that we are in

    def _log_round(self, exchange_id: bytes, answers: GivenAnswers, before: Any, name: bytes | None) -> None:
        told = read_told(before)
        if told is None or told.sketch is None or name is None or len(name) > MAX_NAME:
            return
        if self._log and self._log[-1].before.order != told.order:
            self._forget()  # they led to a state that the monitor has given up
        answers.is_logged = True
        self._kept_answers[exchange_id] = answers
        counts, digest = tuple(answers.counts), answers.digest()
        self._log.append(Logged(exchange_id, told, name, counts, answers.sizes, digest, answers.num_bytes))
        while len(self._log) > 1 and (len(self._log) > MAX_ROUNDS or sum(r.num_bytes for r in self._log) > MAX_BYTES):
            self._kept_answers.pop(self._log.popleft().exchange_id, None)

    async def _run_allreduce_inplace_(self, tensors, group_info: GroupInfo, *, outcome: Round, **kwargs) -> None:
        if self.peer_id not in outcome.out_of_step():
            self._under_way = read_told(outcome.gathered.get(self.peer_id))
        try:
            await super()._run_allreduce_inplace_(tensors, group_info, outcome=outcome, **kwargs)
        finally:
            self._under_way = None

    async def _forget_rounds(self) -> None:
        """They led to a state that is given up."""
        self._forget()

    def _forget(self) -> None:
        while self._log:
            self._kept_answers.pop(self._log.popleft().exchange_id, None)

    async def rpc_show_round(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """`metadata`: what the asker holds, as it is told in rounds -> [exchange id, the round's name, parts of
        each reducer, values of each, digest] of the round that began with that; its parts by rpc_show_answer.
        UNDER_WAY: it is not over yet."""
        self.doorkeeper.check(context.remote_id, "show_answer")
        try:
            held = read_told(unpack_body(request.metadata))
        except ValueError:
            held = None
        for logged in reversed(self._log):
            if held is not None and logged.before.is_same(held):
                told = [logged.exchange_id, logged.name, logged.counts, logged.sizes, logged.digest]
                return averaging_pb2.DownloadData(metadata=msgpack.packb(told))
        is_ours = held is not None and self._under_way is not None and self._under_way.is_same(held)
        return averaging_pb2.DownloadData(metadata=UNDER_WAY if is_ours else LACKS)

    # --- who missed it ---

    def make_up_for(self, held: list, donors: Sequence[PeerID], timeout: float) -> bytes | None:
        """Fetch the averages of the round that began with what we hold, into our own averaged tensors; in the training
        process. :returns: the round's name; UNDER_WAY: it is not over yet; None: nobody has it."""
        return self._learn("_fetch_round", held, donors, timeout)

    def has_begun(self, held: list, donors: Sequence[PeerID]) -> bool:
        """Is the round under way, or over, that begins with what we hold? In the training process."""
        return bool(self._learn("_look_for_round", held, donors, timeout=2 * LOOK_PATIENCE))

    def _learn(self, call: str, held: list, donors: Sequence[PeerID], timeout: float) -> Any:
        """What a call in the averager's process finds, with ASKED of the donors; None: nothing within `timeout` s."""
        future = MPFuture()
        asked = [donor.to_bytes() for donor in random.sample(donors, min(len(donors), ASKED))]
        self._outer_pipe.send(("_learn_within", [call, held, asked, timeout], {"future": future}))
        try:
            return future.result(timeout + PATIENCE)
        except Exception as error:
            logger.info(f"Nothing was learnt of a round: {brief(error)}")
            future.cancel()
            return None

    async def _learn_within(self, call: str, held: list, donors: list[bytes], timeout: float, future: MPFuture) -> None:
        found = None
        try:
            stubs = {peer: self.get_stub(self._p2p, peer, namespace=self.prefix) for peer in map(PeerID, donors)}
            found = await asyncio.wait_for(getattr(self, call)(held, stubs), timeout)
        except Exception as error:
            logger.info(f"{call} of a round that we are not in: {brief(error)}")
        finally:
            if not future.done():
                future.set_result(found)

    async def _look_for_round(self, held: list, stubs: dict[PeerID, Any]) -> bool:
        votes = self._votes(await self._ask_for_round(held, stubs, LOOK_PATIENCE))
        return _know(votes) >= self._least_accounts and _know(votes) > votes[LACKS]  # who is cut off says nothing

    async def _ask_for_round(
        self, held: list, stubs: dict[PeerID, Any], patience: float = PATIENCE
    ) -> dict[PeerID, tuple | bytes | str | None]:
        """What these say of the round that begins with what is held: what is known of it, UNDER_WAY or LACKS, or what
        went wrong; until most accounts have said the same."""
        request = averaging_pb2.DownloadData(metadata=msgpack.packb(held))

        async def ask(peer: PeerID) -> tuple[PeerID, tuple | bytes | str | None]:
            try:
                told = (await asyncio.wait_for(stubs[peer].rpc_show_round(request), patience)).metadata
                return peer, told if told in (LACKS, UNDER_WAY) else _read_round(told)
            except Exception as error:
                return peer, brief(error)

        told: dict[PeerID, Any] = {}
        asked, accounts = (
            [asyncio.ensure_future(ask(peer)) for peer in stubs],
            set(map(self.doorkeeper.account_of, stubs)),
        )
        try:
            for answer in asyncio.as_completed(asked):
                peer, told[peer] = await answer
                if 2 * max(self._votes(told).values(), default=0) > len(accounts):
                    break  # the others may be dead, and let us wait
        finally:
            for task in asked:
                task.cancel()
        return told

    async def _fetch_round(self, held: list, stubs: dict[PeerID, Any]) -> bytes | None:
        told = await self._ask_for_round(held, stubs)
        said = {peer: one for peer, one in told.items() if isinstance(one, tuple)}
        chosen = self._what_most_accounts_say(said)
        if chosen is None:
            votes = self._votes(told)
            if votes[UNDER_WAY] and 2 * _know(votes) > votes.total():
                return UNDER_WAY
            why = dict(Counter(brief(one) for one in told.values() if not isinstance(one, tuple)))
            logger.info(f"Nobody can tell of the round that we missed: {why}, {len(said)} can")
            return None
        exchange_id, name, counts, sizes, digest = chosen
        if sum(sizes) != self.total_size:
            raise ValueError(f"a round of {sum(sizes)} values")
        if sum(counts) > (most := await self._count_parts()):
            raise ValueError(f"a round of {sum(counts)} parts, where ours have {most}")
        codec, left = self.allreduce_kwargs["compression"], _most_bytes(sum(sizes), sum(counts))
        sources = {peer for peer, one in said.items() if one == chosen}
        askings = [Asking(exchange_id, reducer, {p: stubs[p] for p in sources}) for reducer in range(len(sizes))]
        wanted = ((asking, part) for asking, count in zip(askings, counts, strict=True) for part in range(count))
        reducers = (reducer for reducer, count in enumerate(counts) for _ in range(count))  # of these
        given = GivenAnswers((self.peer_id,) * len(sizes), NOT_OURS, sizes, patience=0.0)  # for who asks us
        firsts = list(accumulate(sizes, initial=0))
        vector, places = torch.zeros(self.total_size, **FLOAT32), firsts[:-1]
        hasher = hashlib.blake2b(digest_size=DIGEST_SIZE)
        async with aclosing(parts_of(wanted, sources, PARTS_AT_ONCE)) as answers:
            async for message in answers:
                reducer = next(reducers)
                check_header(message)
                await self.traffic.receive(len(message.buffer))
                end, left = places[reducer] + math.prod(message.size), left - len(message.buffer)
                if not places[reducer] < end <= firsts[reducer + 1] or left < 0:
                    raise ValueError("a part of more values than are left, or of none")
                given.note(reducer, message)
                hasher.update(message.buffer)
                part = (await asyncio.to_thread(read_values, message, None, codec)).reshape(-1)
                if not part.is_floating_point() or not part.isfinite().all():
                    raise ValueError("values that cannot be this round's")
                vector[places[reducer] : end] = part
                places[reducer] = end
        if next(reducers, None) is not None:
            raise ValueError("a part that nobody gives")
        if hasher.digest() != digest:
            raise ValueError("other values than were told")
        async with enter_asynchronously(self.get_tensors()) as tensors:
            for tensor, part in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))
        self._log_round(exchange_id, given, held, name)
        return name

    async def _count_parts(self) -> int:
        """Of a whole round: where one part ends and the next begins does not depend on who reduces what."""
        options = {name: self.allreduce_kwargs[name] for name in ("compression", "part_size_bytes")}
        async with enter_asynchronously(self.get_tensors()) as tensors:
            container = TensorPartContainer(tensors, (1.0,), tensor_infos=self.tensor_infos, **options)
        return sum(container.num_parts_by_peer)

    def _votes(self, told: dict[PeerID, Any]) -> Counter:
        """Accounts that say each of these; a peer of which no account is known has no vote."""
        said = {(self.doorkeeper.account_of(peer), one) for peer, one in told.items()}
        return Counter(one for account, one in said if account is not None)

    def _what_most_accounts_say(self, said: dict[PeerID, tuple]) -> tuple | None:
        """None: nobody says anything, or, in a run that knows accounts, nobody but one."""
        votes = self._votes(said).most_common(1)
        return votes[0][0] if votes and votes[0][1] >= self._least_accounts else None

    @property
    def _least_accounts(self) -> int:
        return 1 if self.doorkeeper.is_open else LEAST_ACCOUNTS


def _most_bytes(values: int, parts: int) -> int:
    """That the averages of a round have at most, in any codec: 8 for a value, and what stands before a part's."""
    return 8 * values + 2**11 * parts


def _know(votes: Counter) -> int:
    """Accounts for which the round has begun."""
    return sum(count for one, count in votes.items() if one == UNDER_WAY or isinstance(one, tuple))


def _read_round(metadata: bytes) -> tuple[bytes, bytes, tuple[int, ...], tuple[int, ...], bytes] | None:
    """A stranger's words of one round; None: none that could be. Raises ValueError for what cannot be read."""
    types = (bytes, bytes, list, list, bytes)
    exchange_id, name, counts, sizes, digest = read_body(metadata, *types, longest=MAX_ROUND, most=MAX_GROUP_SIZE)
    fine = all(len(word) <= MAX_NAME for word in (exchange_id, name, digest)) and len(counts) == len(sizes)
    if not fine or not all(type(number) is int and 0 <= number < 2**40 for number in (*counts, *sizes)):
        return None
    return exchange_id, name, tuple(counts), tuple(sizes), digest
