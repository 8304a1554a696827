"""The one averager, under both gradients and state: reduction rule, codec, and a report of each round. Who may take
part in it is admitted_averager.py."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import InvalidStateError
from typing import Any, AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

import hivemind.averaging.averager
import torch
from hivemind.averaging.allreduce import AllreduceException, AveragingMode
from hivemind.averaging.control import StepControl
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import achain, as_aiter, enter_asynchronously
from hivemind.utils.logging import get_logger

from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.swarm.admitted_averager import LINGER, TOKEN_PATIENCE, AdmittedAverager
from volunteer_kit.swarm.agreement import under_order
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.children import LastWords
from volunteer_kit.swarm.daemon_link import DaemonLink
from volunteer_kit.swarm.errors import SwarmError, brief
from volunteer_kit.swarm.forked import (
    Inbox,
    LeanDHT,
    Outbox,
    end_with_parent,
    fail,
    forget_inherited_tensors,
    hold_tasks,
)
from volunteer_kit.swarm.held_parts import Reduce
from volunteer_kit.swarm.left_over import RoundsShare
from volunteer_kit.swarm.lost_answers import RECOVERY, AnswersKept, GivenAnswers
from volunteer_kit.swarm.pace import Pace
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.shared_words import MAX_GROUP_SIZE, SharedWords
from volunteer_kit.swarm.told_group import (
    DIGEST_SIZE,
    MAX_GATHERED_BYTES,
    MAX_GROUP_ID,
    MISQUOTED,
    OTHER_GROUP,
    REQUEST_SHARE,
    UNUSABLE,
    LedApart,
    WaryMatchmaking,
    as_exchanged,
    in_order,
    leaders_id,
    read_entry,
)
from volunteer_kit.swarm.traffic import Traffic

logger = get_logger(__name__)


class SwarmAverager(AnswersKept, SharedWords, AdmittedAverager):
    """An averager for admitted peers with checked parts, a rule of choice and equal answers.

    :param reduce: the reduction rule, parts and weights -> one part
    :param max_weight: the largest weight that anyone can have earned in one round; more is refused as a lie
    :param traffic: counter and cap of this peer, shared by its averagers
    """

    keeps_left_over = False  # of what the codec leaves out; then members reduce the same slice in each round
    lost_parts_are_zero = False  # what stands where a reducer did not answer: zero, or our own values
    role = "The process that averages with others"  # in the sentence that tells of its end

    def __init__(
        self,
        *args,
        reduce: Reduce = weighted_mean,
        max_weight: float = float("inf"),
        traffic: Traffic | None = None,
        start: bool,
        **kwargs,
    ):
        self.traffic, self.last_words = traffic or Traffic(), LastWords()
        self._reduce, self._max_weight = reduce, max_weight
        self._share_words()
        self._begin_to_keep()
        self._remarks: dict[str, str] = {}  # of the step under way
        self._split_groups: deque[bytes] = deque(maxlen=16)  # by their leader's ids
        super().__init__(*args, start=False, **kwargs)
        self._exchange_timeout = self._allreduce_timeout  # of the exchange alone
        self._beside_exchange = 0.0  # s; the verification's
        self._outer_pipe = Outbox(self._outer_pipe)
        # DecentralizedAverager's default of 3 s would be longer than a quick swarm's whole matchmaking: deadlocks
        patience = self.matchmaking_kwargs["min_matchmaking_time"]
        longest = min(self.matchmaking_kwargs["request_timeout"], REQUEST_SHARE * patience)
        self.matchmaking_kwargs["request_timeout"] = longest
        self._learnt_patience.value = patience
        self.pace = Pace(self.serializer, self.traffic.speed, self.bandwidth, self._exchange_timeout)
        if start:
            self.run_in_background(await_ready=True)

    async def _step(self, *, step: StepControl, **kwargs) -> None:
        self._remarks = {}
        self._matchmaking.schema_hash = under_order(self.schema_hash, self.order)
        self._matchmaking.target_group_size = self.expected_group_size if self.expected_group_size > 1 else None
        self._matchmaking.awaited_group_size = lambda: self.awaited_group_size
        self._matchmaking.are_too_few = self.pace.are_too_few
        self._last_in_a_group.value = -math.inf
        self._matchmaking.on_group = lambda: setattr(self._last_in_a_group, "value", time.monotonic())
        self.pace.least = self.least_group_size
        step._data_for_gather = self.pace.told(step.data_for_gather)
        woken = step.wait_for_cancel

        async def wait_until_cancelled():
            await woken()
            while not step.done():  # hivemind wakes us before it marks the step; seen unmarked, the step looks on for a
                await asyncio.sleep(0.01)  # group, finds one, and keeps it waiting for parts that never come

        step.wait_for_cancel = wait_until_cancelled
        try:
            await super()._step(step=step, **kwargs)
        except InvalidStateError:
            if not step.cancelled():  # at the very moment when it ended
                raise
        except asyncio.TimeoutError:
            pass  # the control has it already; nobody awaits this task, and what it raises is printed as a traceback
        finally:
            self._learnt_patience.value = self._matchmaking.patience.seconds

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        """hivemind takes Ctrl-C away from this process first, for those that it forks; it may do so in the main thread
        only. A thread that forks holds the signal back until the fork ignores it (`run`)."""
        if threading.current_thread() is threading.main_thread():
            super().run_in_background(await_ready, timeout)
            return
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
        if await_ready:
            self.wait_until_ready(timeout)

    def start(self) -> None:
        super().start()
        if isinstance(self.dht, LeanDHT):
            self.dht.processes.add(self, self.role)

    def shutdown(self) -> None:
        if isinstance(self.dht, LeanDHT):
            self.dht.processes.remove(self)
        if self.is_alive():
            super().shutdown()

    def break_off(self, error: SwarmError) -> None:
        """Its process has died: fail the calls that wait for it, and all to come."""
        self._outer_pipe.break_off(error)
        fail(self._ready, error)
        self.lock_averaged_tensors.acquire(timeout=1.0)  # s; it may have died with the lock
        with contextlib.suppress(ValueError):
            self.lock_averaged_tensors.release()

    def run(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        end_with_parent()
        forget_inherited_tensors()
        hold_tasks(hivemind.averaging.averager)
        self._inner_pipe = Inbox(self._inner_pipe)
        if isinstance(self.dht, LeanDHT):
            DaemonLink(self.last_words, self.dht.sockets)
        torch.set_num_threads(1)  # the training process needs the cores more; parts are small
        hivemind.averaging.averager.Matchmaking = WaryMatchmaking
        super().run()

    # --- one round ---

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        await self._let_in_sender(context.remote_id)
        first = await anext(stream)
        if len(first.group_id) > MAX_GROUP_ID + DIGEST_SIZE:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        if first.group_id not in self._running_groups and not self._was_split(first.group_id):
            await self._pending_groups_registered.wait()
        runner = self._running_groups.get(first.group_id)
        if runner is not None:
            # hivemind awaits this future bare: a member that hangs up meanwhile would cancel it, and the round, for all
            await asyncio.wait({runner})
        if self._was_split(first.group_id):  # not left to hivemind, which would wait for our next round
            yield averaging_pb2.AveragingData(code=OTHER_GROUP)
        else:
            async for message in super().rpc_aggregate_part(achain(as_aiter(first), stream), context):
                # then it is late, or we have left
                was_told_the_same = first.group_id in self._matchmaking.groups
                if message.code == averaging_pb2.BAD_GROUP_ID and self._running_groups and not was_told_the_same:
                    await self._hear_of_other_group(context.remote_id, first.group_id)
                    message = averaging_pb2.AveragingData(code=OTHER_GROUP)
                yield message
        try:
            await asyncio.sleep(LINGER)
        except asyncio.CancelledError:
            if runner is not None and runner.done() and not runner.cancelled():
                runner.result().outgoing.hung_up(context.remote_id)
            raise

    def _was_split(self, group_id: bytes) -> bool:
        """Have we left a round under this name because its leader had told members different groups?"""
        return leaders_id(group_id) in self._split_groups

    async def _hear_of_other_group(self, peer_id: PeerID, group_id: bytes) -> None:
        """A peer sends parts of a group that is none of ours. If it is in our group as well, its leader told it another
        one; unless its words are late and of a round before."""
        over = {leaders_id(known) for known in self._matchmaking.groups if known not in self._running_groups}
        if leaders_id(group_id) in over:
            return
        known, _ = await asyncio.wait(set(self._running_groups.values()), timeout=TOKEN_PATIENCE)
        for runner in (future.result() for future in known if not future.cancelled()):
            if peer_id in runner.sender_peer_ids and peer_id not in runner.active_senders:
                await runner.told_otherwise(peer_id)

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo):
        if self._exchange_timeout is not None:  # hivemind reads _allreduce_timeout next
            self._exchange_timeout = self.pace.exchange_seconds(group_info)
            self._allreduce_timeout = (1 + RECOVERY) * self._exchange_timeout + self._beside_exchange
        exchanged = as_exchanged(group_info)
        with super()._register_allreduce_group(exchanged):
            try:
                yield
            finally:
                if not (runner := self._running_groups[exchanged.group_id]).done():
                    runner.cancel()  # a member's call waits for it, and would to the end of its round

    def is_in_agreement(self, gathered: dict[PeerID, Any]) -> bool:
        """Do all members hold the same, so that nothing has to be exchanged? Gradients never do."""
        return False

    def reason_to_keep_own(self, tensors: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> str | None:
        """Why must the averages not be taken? In the averager's process. Gradients have the rule to rely on."""
        return None

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **kwargs) -> Round:
        started = time.perf_counter()
        group_info = as_exchanged(group_info)
        if self.keeps_left_over:
            group_info = in_order(group_info)
        try:
            modes, bandwidths, gathered = self._read_group(group_info)
            if self._matchmaking.is_misquoted(leaders_id(group_info.group_id)):
                raise LedApart(MISQUOTED)
            donors = frozenset(
                peer for peer, mode in zip(group_info.peer_ids, modes, strict=True) if mode == AveragingMode.NODE
            )
            outcome = Round(group_info.peer_ids, group_info.group_id, gathered, donors)
            if self.is_in_agreement(gathered):
                outcome.in_agreement = True
                self._running_groups[group_info.group_id].cancel()  # nobody will send anything
            else:
                shares = self.pace.proportions(group_info, bandwidths)
                fractions = await asyncio.get_running_loop().run_in_executor(
                    None, load_balance_peers, self.total_size, shares, min_vector_size
                )
                async with enter_asynchronously(self.get_tensors()) as tensors:
                    await self._run_allreduce_inplace_(
                        tensors, group_info, peer_fractions=fractions, modes=modes, outcome=outcome, **kwargs
                    )
            outcome.seconds = time.perf_counter() - started
            outcome.remarks |= self._remarks
            return outcome
        except LedApart as e:
            # who was told otherwise comes with another id of exchange, and would wait for our parts unless we said so
            self._split_groups.append(leaders_id(group_info.group_id))
            self._led_apart.value += 1
            self._remarks[str(self._matchmaking.leader)] = str(e)
            self._matchmaking.avoid(self._matchmaking.leader)
            raise
        except Exception as e:
            logger.debug("averaging failed", exc_info=True)
            raise MatchmakingException(f"Unable to run All-Reduce: {brief(e)}") from e

    def _read_group(self, group_info: GroupInfo) -> tuple[tuple[AveragingMode, ...], list[float | None], dict]:
        """What the leader says of the group, checked: a leader is a stranger too."""
        size = len(group_info.peer_ids)
        if len(leaders_id(group_info.group_id)) > MAX_GROUP_ID:
            raise AllreduceException(f"a group with a name of {len(group_info.group_id)} bytes")
        if not 1 < size <= MAX_GROUP_SIZE or len(set(group_info.peer_ids)) < size:
            raise AllreduceException(f"a group of {size} peers, or with a peer named twice")
        modes, bandwidths, gathered = [], [], {}
        for peer_id, data in zip(group_info.peer_ids, group_info.gathered, strict=True):
            if len(data) > MAX_GATHERED_BYTES:
                raise AllreduceException(f"{peer_id} told its group {len(data)} bytes")
            entry = read_entry(data, self.serializer) or UNUSABLE
            gathered[peer_id] = self._read_words(peer_id, entry.words)
            if peer_id != self.peer_id and entry is not UNUSABLE:
                self.doorkeeper.check(peer_id, "group")
            modes.append(entry.mode)
            bandwidths.append(0.0 if entry.mode == AveragingMode.CLIENT else entry.bandwidth)
        return tuple(modes), bandwidths, gathered

    def _share_of_round(self, tensors: Sequence[torch.Tensor], weight: float) -> RoundsShare | None:
        """With what was left over of rounds before; None: nothing is kept of what a codec leaves out."""
        return None

    def _make_runner(self, **kwargs) -> SwarmAllReduce:
        return SwarmAllReduce(**kwargs)

    async def _run_allreduce_inplace_(
        self,
        tensors,
        group_info: GroupInfo,
        group_id: bytes | None = None,
        *,
        outcome: Round,
        weight: float = 1.0,
        **kwargs,
    ) -> None:
        """Average with the group. The tensors change together at the end, or not at all."""
        group_id = group_info.group_id if group_id is None else group_id
        share = self._share_of_round(tensors, weight)
        runner = self._make_runner(
            p2p=self._p2p,
            servicer_type=type(self),
            prefix=self.prefix,
            tensors=tensors if share is None else share.tensors,
            share=share,
            group_id=group_id,
            weight=weight,
            ordered_peer_ids=group_info.peer_ids,
            reduce=self._reduce,
            max_weight=self._max_weight,
            weight_limit=lambda peer: self._weight_limits.of(peer),  # they may come a moment after the group
            out_of_step=outcome.out_of_step(),
            lost_parts_are_zero=self.lost_parts_are_zero,
            traffic=self.traffic,
            round_timeout=self._exchange_timeout,
            **kwargs,
        )
        self._running_groups[group_id].set_result(runner)
        if runner.fetches_lost_answers:
            self._keep_answers(group_id, runner.answers, self._allreduce_timeout)
        averages = await self._averages_of(runner)
        if share is not None:
            share.settle(runner.lost_places, sum(runner.weights.values()), self.peer_id not in runner.refused)
        outcome.kept_own = self.reason_to_keep_own(tensors, averages)
        if self.mode != AveragingMode.AUX and outcome.kept_own is None:
            for tensor, average in zip(tensors, averages, strict=True):
                tensor.copy_(average)
        outcome.received = runner.received
        outcome.refused = {str(peer): why for peer, why in runner.refused.items()}
        outcome.remarks |= {str(peer): why for peer, why in runner.remarks.items()}
        outcome.failed_reducers = tuple(map(str, runner.missing))
        outcome.lost = {str(peer): cause for peer, cause in runner.lost.items()}
        outcome.weights = runner.weights
        outcome.bytes_sent, outcome.bytes_received = runner.bytes_sent, runner.bytes_received
        self._note_answers(group_id, runner.answers, outcome)

    def _note_answers(self, exchange_id: bytes, answers: GivenAnswers, outcome: Round) -> None:
        """The round is over, and its averages are taken."""

    async def _averages_of(self, runner: SwarmAllReduce) -> list[torch.Tensor]:
        """Raises LedApart, as soon as it is known, if nothing of the round must be applied."""
        try:
            averages = [] if runner.is_split else [average async for average in runner]
        except AllreduceException:
            if not runner.is_split:
                self.pace.failed()
                raise
        except asyncio.CancelledError:  # hivemind's, when the time is up
            self.pace.failed()
            raise
        if runner.is_split:
            raise LedApart
        self.pace.over(runner, self.peer_id)
        return averages
