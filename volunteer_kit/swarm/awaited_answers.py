"""A member's side of a round: its parts go to the reducers, and their answers are awaited; of a reducer that does not
give them all, others have them, or nobody (lost_answers.py)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from itertools import accumulate
from typing import AsyncIterator  # noqa: UP035  as in allreduce.py

import torch
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.partition import AllreduceException
from hivemind.compression import CompressionBase
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import aiter_with_timeout, amap_in_executor, attach_event_on_finished

from volunteer_kit.swarm.codec_wire import check_around
from volunteer_kit.swarm.failures import TIMEOUT, cause_of_loss
from volunteer_kit.swarm.held_parts import HeldPartReducer, check_average, read_values, size_of, with_shapes
from volunteer_kit.swarm.lost_answers import MARGIN, NO_TIMEOUT, RECOVERY, Asking, GivenAnswers, fetch
from volunteer_kit.swarm.told_group import OTHER_GROUP, ToldOtherwise
from volunteer_kit.swarm.traffic import Traffic

ALL_ANSWERED = 0.96  # of a round's time, until when a reducer's last answer is awaited; see allreduce.py


class AwaitedAnswers(AllReduceRunner):
    """Part of SwarmAllReduce."""

    fetches_lost_answers = True

    began: float  # time.monotonic()
    traffic: Traffic
    otherwise: set[PeerID]
    heard: dict[PeerID, float]
    bytes_sent: int
    bytes_received: int
    tensor_part_reducer: HeldPartReducer
    codec: CompressionBase  # of parts and answers
    _round_timeout: float | None
    _losses: dict[PeerID, str]

    def _await_answers(self) -> None:
        """To be called when all else of the round is made."""
        sizes = [[part.numel() for part, _ in parts] for parts in self.tensor_part_container._input_parts_by_peer]
        firsts = accumulate(map(sum, sizes), initial=0)
        self._places = [list(accumulate(parts, initial=first)) for first, parts in zip(firsts, sizes, strict=False)]
        own = self.ordered_peer_ids.index(self.peer_id)
        slices = [sum(parts) for parts in sizes]
        self.answers = GivenAnswers(self.ordered_peer_ids, own, slices, self.recovery_seconds)
        self.answered_after: dict[PeerID, float] = {}  # s until a reducer's last answer
        self.failed_reducers: list[PeerID] = []  # that have not answered us all that they should
        self.missing: list[PeerID] = []  # of these, those of which nobody had all answers
        self.lost_places: list[range] = []  # in the vector of all values: what we sent of them has not entered

    async def _reduce_own_parts(self) -> None:
        raise NotImplementedError

    async def told_otherwise(self, peer_id: PeerID) -> None:
        raise NotImplementedError

    def _seconds_until(self, share: float) -> float | None:
        """Of the round's time; None: there is no such time."""
        return None if self._round_timeout is None else self.began + share * self._round_timeout - time.monotonic()

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        place = self.ordered_peer_ids.index(peer_id)
        try:
            if peer_id == self.peer_id:
                await self._reduce_own_parts()
            else:
                await asyncio.wait_for(self._exchange_with(peer_id, place), self._seconds_until(ALL_ANSWERED))
        except BaseException as e:
            self.answers.end(place)
            if peer_id != self.peer_id:
                await self._settle_lost_answers(place, e)
            elif isinstance(e, Exception):
                self._settle_lost_slice(place)
            raise
        finally:
            if peer_id == self.peer_id:
                self.answers.entered = self.tensor_part_reducer.parts_given(self.sender_peer_ids)
            self.answers.end(place)

    def _settle_lost_slice(self, place: int) -> None:
        """Our own reducer has no average: all go without, we as well."""
        self.failed_reducers.append(self.peer_id)
        self.lost_places.append(range(self._places[place][0], self._places[place][-1]))
        if not self.tensor_part_container.finished.is_set():
            self.missing.append(self.peer_id)
            self.tensor_part_container.register_failed_reducer(place)

    async def _settle_lost_answers(self, reducer: int, error: BaseException) -> None:
        """It has not answered all: what others have of it, and zeros or our own for the rest."""
        peer_id, container = self.ordered_peer_ids[reducer], self.tensor_part_container
        if isinstance(error, ToldOtherwise):
            await self.told_otherwise(peer_id)
        self.failed_reducers.append(peer_id)
        if cause := cause_of_loss(error):
            self._losses.setdefault(peer_id, cause)
        entered = container._outputs_registered_by_peer[reducer]
        if isinstance(error, Exception) and not isinstance(error, ToldOtherwise) and self.fetches_lost_answers:
            entered = max(entered, await self._fetch_from_others(reducer))
        places = self._places[reducer]
        self.lost_places.append(range(places[min(entered, len(places) - 1)], places[-1]))
        if not container.finished.is_set():
            if container._outputs_registered_by_peer[reducer] < container.num_parts_by_peer[reducer]:
                self.missing.append(peer_id)
            container.register_failed_reducer(reducer)

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
            average = await asyncio.to_thread(read_values, message, shapes[have], self.codec)
            check_average(average, shapes[have], self.ordered_peer_ids[reducer])
            if asking.entered == 0 and len(self.sender_peer_ids) == 2:
                raise AllreduceException("of two members' parts one's alone are no average")
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

    async def _receive_averages(self, peer_id: PeerID, peer_index: int, stream: AsyncIterator) -> None:
        shapes = [part.shape for part, _ in self.tensor_part_container._input_parts_by_peer[peer_index]]
        part_index = 0

        def decode(
            message: averaging_pb2.AveragingData, shape: torch.Size
        ) -> tuple[torch.Tensor, runtime_pb2.Tensor]:
            if message.code == OTHER_GROUP:
                raise ToldOtherwise(f"{peer_id} was told another group")
            if message.code != averaging_pb2.AVERAGED_PART:
                raise AllreduceException(f"{peer_id} answered {averaging_pb2.MessageCode.Name(message.code)}")
            self.bytes_received += size_of(message)
            self.heard[peer_id] = time.monotonic()
            check_around(message, size_of(message))
            return read_values(message.tensor_part, shape, self.codec), message.tensor_part

        answers = aiter_with_timeout(_first(stream, len(shapes)), self.reducer_timeout)
        async for average, answer in amap_in_executor(
            lambda pair: decode(*pair),
            with_shapes(self.traffic.received(answers, size_of), shapes),
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


async def _first(stream: AsyncIterator, count: int) -> AsyncIterator:
    """`count` messages at most, without asking for one more."""
    for _ in range(count):
        try:
            yield await anext(stream)
        except StopAsyncIteration:
            return
