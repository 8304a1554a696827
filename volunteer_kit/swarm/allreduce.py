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
from itertools import accumulate
from types import MappingProxyType
from typing import AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

import torch
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import CompressionBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor, attach_event_on_finished

from volunteer_kit.robust.bounds import NORM_BOUND
from volunteer_kit.swarm.failures import PEER_LOST, TIMEOUT, TIMEOUTS, cause_of_loss
from volunteer_kit.swarm.held_parts import (
    HeldPartReducer,
    Reduce,
    RefusedPart,
    check_average,
    read_values,
    reason_to_refuse,
    size_of,
)
from volunteer_kit.swarm.left_over import RoundsShare
from volunteer_kit.swarm.line_speed import Answers
from volunteer_kit.swarm.lost_answers import MARGIN, NO_TIMEOUT, RECOVERY, Asking, GivenAnswers, fetch
from volunteer_kit.swarm.told_group import LED_APART, OTHER_GROUP, LedApart, ToldOtherwise, is_split
from volunteer_kit.swarm.traffic import Traffic

# of a round's time: from when on nobody may keep the others waiting as long as it likes, until when all parts shall be
# in, and until when a reducer's last answer is awaited. A line that takes 0.9 of it at an even pace is never cut
LENIENT, ALL_SENT, ALL_ANSWERED = 0.5, 0.9, 0.96
GRACE = 0.03  # of it, for all parts together, when there is no time left; a part may be here and not read yet
TOO_SLOW = "parts so late that the others could not have ended in time"


class SwarmAllReduce(AllReduceRunner):
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

    fetches_lost_answers = True

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
        self.began, self._round_timeout = time.monotonic(), round_timeout
        self.traffic = traffic or Traffic()
        self.outgoing = Answers(sum(peer != self.peer_id for peer in self.sender_peer_ids), self.traffic.speed.note)
        self.answered_after: dict[PeerID, float] = {}  # s until a reducer's last answer
        self.too_slow: set[PeerID] = set()  # senders left out for it
        self.max_weight, self.weight_limit, self.out_of_step = max_weight, weight_limit, out_of_step
        self.refused: dict[PeerID, str] = dict(out_of_step)
        self.failed_reducers: list[PeerID] = []  # that have not answered us all that they should
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
        sizes = [[part.numel() for part, _ in parts] for parts in container._input_parts_by_peer]
        firsts = accumulate(map(sum, sizes), initial=0)
        self._places = [list(accumulate(parts, initial=first)) for first, parts in zip(firsts, sizes, strict=False)]
        self.answers = GivenAnswers(self.ordered_peer_ids, index, self.recovery_seconds)
        self.lost_places: list[range] = []  # in the vector of all values: what we sent of them has not entered
        self.missing: list[PeerID] = []  # reducers of which nobody had all answers

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

    def _seconds_until(self, share: float) -> float | None:
        """Of the round's time; None: there is no such time."""
        return None if self._round_timeout is None else self.began + share * self._round_timeout - time.monotonic()

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

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        peer_index = self.ordered_peer_ids.index(peer_id)
        try:
            if peer_id == self.peer_id:
                await self._reduce_own_parts()
                return
            await asyncio.wait_for(self._exchange_with(peer_id, peer_index), self._seconds_until(ALL_ANSWERED))
        except BaseException as e:
            if peer_id == self.peer_id:
                raise
            if isinstance(e, ToldOtherwise):
                await self.told_otherwise(peer_id)
            self.failed_reducers.append(peer_id)
            if cause := cause_of_loss(e):
                self._losses.setdefault(peer_id, cause)
            self.answers.end(peer_index)
            answered = entered = self.tensor_part_container._outputs_registered_by_peer[peer_index]
            if isinstance(e, Exception) and not isinstance(e, ToldOtherwise) and self.fetches_lost_answers:
                entered = max(answered, await self._fetch_from_others(peer_index))
            places, container = self._places[peer_index], self.tensor_part_container
            self.lost_places.append(range(places[min(entered, len(places) - 1)], places[-1]))
            if not container.finished.is_set():
                if container._outputs_registered_by_peer[peer_index] < container.num_parts_by_peer[peer_index]:
                    self.missing.append(peer_id)
                container.register_failed_reducer(peer_index)
            raise
        finally:
            if peer_id == self.peer_id:
                self.answers.entered = self.tensor_part_reducer.parts_given(self.sender_peer_ids)
            self.answers.end(peer_index)

    @property
    def recovery_seconds(self) -> float:
        """That may be taken for answers that did not come, beyond the round's time."""
        return NO_TIMEOUT if self._round_timeout is None else RECOVERY * self._round_timeout

    async def _fetch_from_others(self, reducer: int) -> int:
        """Of one reducer's answers those that others have. :returns: parts of ours that it says have entered."""
        container, gone = self.tensor_part_container, self._losses.get(self.ordered_peer_ids[reducer])
        members = zip(self.ordered_peer_ids, self.modes, strict=True)
        asked = {peer for peer, mode in members if mode == AveragingMode.NODE} - {self.peer_id} - self.otherwise
        if gone == TIMEOUT:
            asked.discard(self.ordered_peer_ids[reducer])
        shapes = [part.shape for part, _ in container._input_parts_by_peer[reducer]]
        have, left = container._outputs_registered_by_peer[reducer], self._seconds_until(1 + RECOVERY - MARGIN)
        asking = Asking(self.group_id, reducer, {peer: self._get_peer_stub(peer) for peer in asked})

        async def take(message: runtime_pb2.Tensor) -> None:
            nonlocal have
            self.bytes_received += len(message.buffer)
            await self.traffic.receive(len(message.buffer))
            average = await asyncio.to_thread(read_values, message)
            check_average(average, shapes[have], self.ordered_peer_ids[reducer])
            if not container.finished.is_set():
                container.register_processed_part(reducer, have, average)
                self.answers.note(reducer, message)
                have += 1

        with contextlib.suppress(Exception):  # what cannot be had, or read, is lost
            seconds = self.recovery_seconds if left is None else min(left, self.recovery_seconds)
            await fetch(asking, have, len(shapes), seconds, take)
        return asking.entered or 0

    async def _exchange_with(self, peer_id: PeerID, peer_index: int) -> None:
        done_sending = asyncio.Event()
        inputs = attach_event_on_finished(self._count_sent(self._generate_input_for_peer(peer_index)), done_sending)
        stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(inputs)
        if self.should_delay_results(self.peer_id):
            await done_sending.wait()
        await self._receive_averages(peer_id, peer_index, stream)

    def _limits_of(self, sender: PeerID) -> tuple[float, float | None]:
        """Of a member that is out of step nothing counts, and it may have been at its epoch for long."""
        return self.max_weight, None if sender in self.out_of_step else self.weight_limit(sender)

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
            self.answers.note(peer_index, answer)
            self.tensor_part_container.register_processed_part(peer_index, part_index, average)

    async def _receive_averages(self, peer_id: PeerID, peer_index: int, stream: AsyncIterator) -> None:
        shapes = [part.shape for part, _ in self.tensor_part_container._input_parts_by_peer[peer_index]]
        part_index = 0

        def decode(message: averaging_pb2.AveragingData) -> tuple[torch.Tensor, runtime_pb2.Tensor]:
            if message.code == OTHER_GROUP:
                raise ToldOtherwise(f"{peer_id} was told another group")
            if message.code != averaging_pb2.AVERAGED_PART:
                raise AllreduceException(f"{peer_id} answered {averaging_pb2.MessageCode.Name(message.code)}")
            self.bytes_received += size_of(message)
            return read_values(message.tensor_part), message.tensor_part

        async for average, answer in amap_in_executor(
            decode,
            self.traffic.received(aiter_with_timeout(_first(stream, len(shapes)), self.reducer_timeout), size_of),
            max_prefetch=self.tensor_part_container.prefetch,
        ):
            check_average(average, shapes[part_index], peer_id)
            self.answers.note(peer_index, answer)
            self.tensor_part_container.register_processed_part(peer_index, part_index, average)
            part_index += 1
        if part_index != len(shapes):
            raise ConnectionError(f"{peer_id} answered {part_index} parts of {len(shapes)}")
        self.answered_after[peer_id] = time.monotonic() - self.began
        await stream.aclose()  # the answering side waits for it: see admitted_averager.LINGER

    async def _count_sent(self, messages: AsyncIterator) -> AsyncIterator:
        async for message in messages:
            self.bytes_sent += size_of(message)
            await self.traffic.send(size_of(message))
            yield message

    async def _accumulate_parts_streaming(self, stream: AsyncIterator, sender_index: int) -> AsyncIterator:
        sender, reducer = self.sender_peer_ids[sender_index], self.tensor_part_reducer
        part_index, first_weight = 0, None
        try:
            async for part, weight, num_bytes in amap_in_executor(
                lambda msg: (read_values(msg.tensor_part), msg.weight, size_of(msg)),
                self.traffic.received(stream, size_of),
                max_prefetch=self.tensor_part_container.prefetch,
            ):
                self.bytes_received += num_bytes
                if part_index >= reducer.num_parts:
                    raise RefusedPart("more parts than the slice has")
                reason = reason_to_refuse(
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


async def _first(stream: AsyncIterator, count: int) -> AsyncIterator:
    """`count` messages at most, without asking for one more."""
    for _ in range(count):
        try:
            yield await anext(stream)
        except StopAsyncIteration:
            return


def _retire(reducer) -> None:
    """hivemind's reducer, made in the parent's constructor and not used, must not warn when it is collected."""
    reducer.num_parts = 0
    reducer.finalize()
