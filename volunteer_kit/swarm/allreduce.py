"""One round of averaging in one group: every member is a reducer of its own slice of the tensors.

hivemind's runner keeps a running sum, trusts each sender's weight and values, and answers each sender with a
difference to that sender's own part, quantized for that sender alone. Here a reducer holds all parts of a slice,
refuses those that cannot be true, applies one rule to the rest and answers everybody with the same bytes: after a
round the members are equal to the last bit, and what they hold can be hashed and compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

import torch
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import CompressionBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import amap_in_executor

from volunteer_kit.robust.bounds import NORM_BOUND
from volunteer_kit.swarm.awaited_answers import AwaitedAnswers
from volunteer_kit.swarm.codec_wire import check_around
from volunteer_kit.swarm.failures import PEER_LOST, TIMEOUT, TIMEOUTS
from volunteer_kit.swarm.held_parts import (
    HeldPartReducer,
    Reduce,
    RefusedPart,
    read_values,
    reason_to_refuse,
    size_of,
    with_shapes,
)
from volunteer_kit.swarm.left_over import RoundsShare
from volunteer_kit.swarm.line_speed import Answers
from volunteer_kit.swarm.told_group import LED_APART, OTHER_GROUP, LedApart, is_split
from volunteer_kit.swarm.traffic import Traffic

# of a round's time: from when on nobody may keep the others waiting as long as it likes, and until when all parts shall
# be in; after that the last answers have time (ALL_ANSWERED). A line that takes 0.9 of it at an even pace is never cut
LENIENT, ALL_SENT = 0.5, 0.9
GRACE = 0.03  # of it, for all parts together, when there is no time left; a part may be here and not read yet
TOO_SLOW = "parts so late that the others could not have ended in time"


class SwarmAllReduce(AwaitedAnswers):
    """hivemind's runner with checked parts, held reduction and equal answers. It yields averages, not differences.

    :param reduce: the reduction rule
    :param max_weight: a larger declared weight is a lie; in samples for gradients, 1 for state
    :param weight_limit: of one sender, by its device and the time; None: not known
    :param out_of_step: members whose parts must not enter, with the reason; they are answered all the same
    :param lost_parts_are_zero: what stands for a part that no reducer answered: zero, or what we sent
    :param traffic: counts what is sent and received, and holds it below this peer's cap
    :param share: of this round, if what the codec leaves out is kept: its tensors are `tensors`
    :param round_timeout: s after which the round is given up; who is slower than that costs its own samples, or its
        slice, and not the round. None: there is no such time
    """

    # Overrides: bytes_received, bytes_sent

    def __init__(
        self,
        *,
        reduce: Reduce,
        max_weight: float,
        compression: CompressionBase,
        weight_limit: Callable[[PeerID], float | None] = lambda peer: None,
        out_of_step: Mapping[PeerID, str] = MappingProxyType({}),
        lost_parts_are_zero: bool = False,
        traffic: Traffic | None = None,
        round_timeout: float | None = None,
        share: RoundsShare | None = None,
        **kwargs,
    ):
        super().__init__(compression=compression, **kwargs)
        if share is not None:
            self.tensor_part_container.compression = share.sending(compression)
        self.codec, self.began, self._round_timeout = compression, time.monotonic(), round_timeout
        self.traffic = traffic or Traffic()
        self.outgoing = Answers(sum(peer != self.peer_id for peer in self.sender_peer_ids), self.traffic.speed.note)
        self.too_slow: set[PeerID] = set()  # senders left out for it
        self.heard: dict[PeerID, float] = {}  # time.monotonic() of the last part or answer that came of each member
        self.max_weight, self.weight_limit, self.out_of_step = max_weight, weight_limit, out_of_step
        self.refused: dict[PeerID, str] = dict(out_of_step)
        self._losses: dict[PeerID, str] = {}  # members that stayed silent or are gone; the first cause
        self.otherwise: set[PeerID] = set()  # members that were told another group than we were
        self.bytes_sent = self.bytes_received = 0
        self.tensor_part_container.return_deltas = lost_parts_are_zero  # hivemind's name; it has no other use of it
        _retire(self.tensor_part_reducer)
        container, index = self.tensor_part_container, self.ordered_peer_ids.index(self.peer_id)
        self.tensor_part_reducer = HeldPartReducer(
            shapes=[part.shape for part in self.parts_for_local_averaging],
            infos=[info for _, info in container._input_parts_by_peer[index]],
            num_senders=len(self.sender_peer_ids),
            reduce=reduce,
            codec=compression,
            left_over=None if share is None else share.take_slice(self.parts_for_local_averaging),
        )
        self._await_answers()

    @property
    def received(self) -> float:
        """Share of the values for which a reducer's answer arrived, 0 to 1."""
        container = self.tensor_part_container
        return 1.0 - container.failed_size / max(1, container.total_size)

    @property
    def weights(self) -> dict[PeerID, float]:
        """Members whose parts all entered our slice, with their weight."""
        return {self.sender_peer_ids[sender]: weight for sender, weight in self.tensor_part_reducer.weights.items()}

    @property
    def remarks(self) -> dict[PeerID, str]:
        """What is held against members that took part."""
        words = f"values more than {NORM_BOUND:g} times as long as the others', scaled down"
        return {self.sender_peer_ids[sender]: words for sender in self.tensor_part_reducer.too_long}

    @property
    def lost(self) -> dict[PeerID, str]:
        """Members that this round lost, and how: gone, or silent for too long. Not those who were refused or led
        apart; nor those who hung up when they had given all, whom hivemind bans as well."""
        others = self.banned_senders - self.refused.keys() - self.otherwise - self.weights.keys() - {self.peer_id}
        never_came = {peer: TIMEOUT for peer in others - self.active_senders}
        return dict.fromkeys(others, PEER_LOST) | never_came | self._losses

    @property
    def is_split(self) -> bool:
        """The leader led us apart: nothing of this round is to be applied."""
        return is_split(self.group_size, len(self.otherwise))

    async def told_otherwise(self, peer_id: PeerID) -> None:
        """A member was told another group: nothing of it is awaited, and too many of these end the round."""
        self.otherwise.add(peer_id)
        if peer_id in self.sender_peer_ids:
            await self._ban_sender(peer_id)
            self.active_senders.add(peer_id)  # or hivemind goes on waiting for its first part
            if len(self.active_senders) == len(self.sender_peer_ids):
                self.all_senders_started.set()
        if self.is_split and not self._future.done():
            self.tensor_part_reducer.fail(AllreduceException(LED_APART))
            self.finalize(exception=LedApart())
            self._future.exception()  # nobody may be waiting for it

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        async for message in super().rpc_aggregate_part(stream, context):
            if message.code == averaging_pb2.INTERNAL_ERROR and self.is_split:
                message = averaging_pb2.AveragingData(code=OTHER_GROUP)
            yield message

    async def _handle_missing_senders(self) -> None:
        await asyncio.gather(super()._handle_missing_senders(), self._drop_laggards())

    async def _drop_laggards(self) -> None:
        """Parts are reduced in order, so who gives each of its own just before its timeout would hold up everybody's.

        From the middle of the round on, what time is left is shared out among the parts that are: so long is each
        awaited, once half of the senders have given it. While half have not, it is the line or the round that is slow,
        and nobody's fault.
        """
        reducer = self.tensor_part_reducer
        if self._round_timeout is None:
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(reducer.finished.wait(), max(0.0, self._seconds_until(LENIENT)))
        least = GRACE * self._round_timeout / max(1, reducer.num_parts)
        for part_index in range(reducer.num_parts):
            left = reducer.num_parts - part_index
            late = await reducer.laggards(part_index, lambda n=left: max(least, self._seconds_until(ALL_SENT) / n))
            for sender in {self.sender_peer_ids[index] for index in late} - {self.peer_id}:
                self.refused.setdefault(sender, TOO_SLOW)
                self._losses.setdefault(sender, TIMEOUT)
                self.too_slow.add(sender)
                await self._ban_sender(sender)

    def _limits_of(self, sender: PeerID) -> tuple[float, float | None]:
        """Of a member that is out of step nothing counts, and it may have been at its epoch for long."""
        return self.max_weight, None if sender in self.out_of_step else self.weight_limit(sender)

    @property
    def _is_unheard(self) -> bool:
        """None of several others has sent us anything: our own line, or program, takes nothing in. A group of two is
        no evidence: the other may have died."""
        others = set(self.sender_peer_ids) - {self.peer_id}
        return len(others) > 1 and not others & self.active_senders

    async def _reduce_own_parts(self) -> None:
        peer_index, sender = self.ordered_peer_ids.index(self.peer_id), self.sender_peer_ids.index(self.peer_id)
        for part_index, part in enumerate(self.parts_for_local_averaging):
            # our own numbers get no more trust than a stranger's: one NaN of ours would be everybody's
            reason = reason_to_refuse(part, part.shape, self.weight, None, *self._limits_of(self.peer_id))
            if reason:
                self.refused[self.peer_id] = reason
                await self._ban_sender(self.peer_id)
                average, answer = await asyncio.shield(self.tensor_part_reducer._answers[part_index])
            elif self.peer_id in self.banned_senders:
                average, answer = await asyncio.shield(self.tensor_part_reducer._answers[part_index])
            else:
                counted = None if self.peer_id in self.out_of_step else part
                average, answer = await self.tensor_part_reducer.accumulate_part(
                    sender, part_index, counted, self.weight
                )
            if self._is_unheard:
                raise AllreduceException("nobody else's parts have reached us: ours alone are no average")
            self.answers.note(peer_index, answer)
            self.tensor_part_container.register_processed_part(peer_index, part_index, average)

    async def _accumulate_parts_streaming(self, stream: AsyncIterator, sender_index: int) -> AsyncIterator:
        sender, reducer = self.sender_peer_ids[sender_index], self.tensor_part_reducer
        part_index, first_weight = 0, None

        def read(message: averaging_pb2.AveragingData, shape: torch.Size) -> tuple[torch.Tensor | str, float, int]:
            """The part, or why it cannot be read."""
            try:
                check_around(message, size_of(message))
                return read_values(message.tensor_part, shape, self.codec), message.weight, size_of(message)
            except ValueError as error:
                return str(error), message.weight, size_of(message)

        try:
            async for part, weight, num_bytes in amap_in_executor(
                lambda pair: read(*pair),
                with_shapes(self.traffic.received(stream, size_of), reducer.shapes),
                max_prefetch=self.tensor_part_container.prefetch,
            ):
                self.bytes_received += num_bytes
                self.heard[sender] = time.monotonic()
                reason = part if isinstance(part, str) else reason_to_refuse(
                    part, reducer.shapes[part_index], weight, first_weight, *self._limits_of(sender)
                )
                if reason:
                    self.refused[sender] = reason
                    raise RefusedPart(reason)
                first_weight = weight
                counted = None if sender in self.out_of_step else part
                _, message = await reducer.accumulate_part(sender_index, part_index, counted, weight)
                part_index += 1
                self.bytes_sent += len(message.buffer)
                self.outgoing.answer(sender, len(message.buffer), part_index == reducer.num_parts)
                await self.traffic.send(len(message.buffer))
                yield averaging_pb2.AveragingData(code=averaging_pb2.AVERAGED_PART, tensor_part=message)
        except TIMEOUTS:
            self._losses.setdefault(sender, TIMEOUT)
            raise
        except BannedException:
            pass  # given up while it was sending; nothing of it is awaited any more
        finally:
            if part_index != reducer.num_parts:
                await self._ban_sender(sender)


def _retire(reducer) -> None:
    """hivemind's reducer, made in the parent's constructor and not used, must not warn when it is collected."""
    reducer.num_parts = 0
    reducer.finalize()
