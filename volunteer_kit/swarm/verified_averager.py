"""The averager of gradients in a run that verifies: what others ask of it, and what the training process tells it."""

from __future__ import annotations

import asyncio
import ctypes
from collections import OrderedDict
from collections.abc import Sequence

import msgpack
import numpy as np
import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.logging import get_logger

from volunteer_kit.robust.btard import Verifier
from volunteer_kit.robust.messages import Duty, Samples
from volunteer_kit.robust.standing import Settings
from volunteer_kit.robust.verified_round import VerifiedRound
from volunteer_kit.swarm.agreement import apart, read_told
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.averager import SwarmAverager
from volunteer_kit.swarm.broadcast import Boards
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.fork_context import FORK
from volunteer_kit.swarm.kept_waiting import KeptWaiting
from volunteer_kit.swarm.message_body import read_body
from volunteer_kit.swarm.options import STAGE_SHARE, STAGES
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.verified_allreduce import EncodedParts, VerifiedAllReduce
from volunteer_kit.swarm.verified_exchange import Verdicts, VerifiedExchange
from volunteer_kit.swarm.verify_wire import pack_samples, unpack_samples

logger = get_logger(__name__)
NO_TIMEOUT = 60.0  # s; stands for a round that may take as long as it likes
# rounds of which an accused sender's bytes can be shown: this one and the last; each has a copy of the average
KEPT_EXCHANGES = 2


class VerifiedAverager(SwarmAverager):
    """:param verification: its settings; None: rounds are as any averager's"""

    # Overrides: _beside_exchange

    def __init__(self, *args, verification: Settings | None = None, clips: bool = True, start: bool, **kwargs):
        self.verification, self._clips = verification, clips
        # contributions that the training process has told
        self._contributed = FORK.Value(ctypes.c_int64, 0, lock=False)
        self._contributions = 0  # of them, those that have come to the averager's process
        self._contribution = Samples(())
        self._exchange: VerifiedExchange | None = None
        self._exchanges: OrderedDict[bytes, VerifiedExchange] = OrderedDict()
        self._verifier: Verifier | None = None
        self._proving: set[asyncio.Task] = set()
        self._kept_waiting = KeptWaiting()
        super().__init__(*args, start=False, **kwargs)
        self._patience = STAGE_SHARE * (self._allreduce_timeout or NO_TIMEOUT)  # s, for one stage
        if verification is not None and self._allreduce_timeout is not None:
            self._beside_exchange = STAGES * self._patience
        if start:
            self.run_in_background(await_ready=True)

    # --- the training process ---

    def contribute(self, samples: Samples) -> None:
        """What the round that begins now was computed from. Call before the round may begin."""
        self._contributed.value += 1
        packed = msgpack.packb(pack_samples(samples), use_bin_type=True)
        self._outer_pipe.send(("_take_contribution", [self._contributed.value, packed], {}))

    def report(self, duty: Duty, totals: Sequence[np.ndarray]) -> None:
        """A duty is done; see robust.btard.Verifier.report."""
        self._outer_pipe.send(("_take_report", [duty, list(totals)], {}))

    def forgive(self, peer: PeerID) -> None:
        """A moderator has set a peer's strikes aside."""
        self._outer_pipe.send(("_forgive", [peer.to_bytes()], {}))

    # --- its own process ---

    @property
    def verifier(self) -> Verifier:
        if self._verifier is None:
            self._verifier = Verifier(self.peer_id, self.verification, self._clips, account_of=self._account_of)
            self._boards = Boards()
            self._came = asyncio.Event()
            self._busy = asyncio.Lock()
        return self._verifier

    def _account_of(self, peer: PeerID) -> bytes:
        return self.doorkeeper.account_of(peer) or peer.to_bytes()

    async def _take_contribution(self, number: int, packed: bytes) -> None:
        if self.verifier is not None and number > self._contributions:
            self._contribution = unpack_samples(msgpack.unpackb(packed, raw=False))
            self._contributions = number
            self._came.set()

    async def _take_report(self, duty: Duty, totals: list[np.ndarray]) -> None:
        verifier = self.verifier
        async with self._busy:
            verifier.report(duty, totals)

    async def _forgive(self, peer: bytes) -> None:
        self.verifier.standing.forgive(PeerID(peer))

    async def _own_samples(self) -> Samples:
        """Of the contribution that this round is of; it may come a moment later than the round's trigger."""
        while self._contributions < self._contributed.value:
            self._came.clear()
            await asyncio.wait_for(self._came.wait(), self._patience)
        return self._contribution

    async def rpc_tell(self, request: averaging_pb2.DownloadData, context: P2PContext) -> averaging_pb2.DownloadData:
        """A member tells its group something; see broadcast.py."""
        self.doorkeeper.check(context.remote_id, "tell")
        if self.verification is None or self.verifier is None:
            return averaging_pb2.DownloadData(metadata=b"unknown")
        return await self._boards.answer(request, context.remote_id, self._patience)

    async def rpc_show_part(
        self, request: averaging_pb2.DownloadData, context: P2PContext
    ) -> averaging_pb2.DownloadData:
        """`metadata`: [round id, sender, part] -> `tensor_part`: what that sender, whom we accuse, had sent us."""
        self.doorkeeper.check(context.remote_id, "show_part")
        try:
            round_id, sender, part = read_body(request.metadata, bytes, int, int)
        except ValueError:
            return averaging_pb2.DownloadData(metadata=b"lacks")
        exchange = self._exchanges.get(round_id)
        shown = exchange.evidence.get((sender, part)) if exchange is not None else None
        if shown is None:
            return averaging_pb2.DownloadData(metadata=b"lacks")
        await self.traffic.send(len(shown.buffer))
        return averaging_pb2.DownloadData(tensor_part=shown)

    async def _run_allreduce_inplace_(
        self, tensors, group_info: GroupInfo, *, outcome: Round, peer_fractions, weight: float, tensor_infos, **kwargs
    ) -> None:
        if self.verification is None:
            about = {"peer_fractions": peer_fractions, "weight": weight, "tensor_infos": tensor_infos}
            await super()._run_allreduce_inplace_(tensors, group_info, outcome=outcome, **about, **kwargs)
            return
        samples, told = await self._own_samples(), read_told(outcome.gathered.get(self.peer_id))
        exchange = VerifiedExchange(
            self.verifier,
            self._boards,
            round_id=group_info.group_id,
            epoch=told.epoch if told is not None else 0,
            group=group_info.peer_ids,
            public=[peer for peer in group_info.peer_ids if peer in outcome.donors],
            stub_of=lambda peer: type(self).get_stub(self._p2p, peer, namespace=self.prefix),
            patience=self._patience,
            busy=self._busy,
            apart=apart(outcome.gathered, outcome.donors),
        )
        options = {name: kwargs[name] for name in ("compression", "part_size_bytes") if name in kwargs}
        encoded = await asyncio.to_thread(EncodedParts, tensors, tensor_infos=tensor_infos, **options)
        await exchange.commit(float(weight), samples, encoded)
        self._see_proofs()
        self._remember(group_info.group_id, exchange)
        await super()._run_allreduce_inplace_(
            tensors,
            group_info,
            outcome=outcome,
            peer_fractions=exchange.fractions(peer_fractions),
            weight=weight,
            tensor_infos=tensor_infos,
            **kwargs,
        )
        await self._verify(exchange, tensors, outcome)

    def _can_be_told_on(self, gathered: bytes, peer_id: PeerID) -> bool:
        return not self._kept_waiting.is_refused(peer_id) and super()._can_be_told_on(gathered, peer_id)

    def _note_who_is_silent(self, round_: VerifiedRound) -> None:
        silent = {peer for place, peer in enumerate(round_.group) if place not in round_.statements}
        if not round_.void:
            self._kept_waiting.note(silent - {self.peer_id})
        for peer in filter(self._kept_waiting.is_refused, silent):
            self._matchmaking.avoid(peer)

    def _see_proofs(self) -> None:
        """Of the accusations that have just come: beside the exchange, for an accuser that does not answer must not
        keep the group waiting."""
        wanted, self.verifier.proofs_wanted = self.verifier.proofs_wanted, []
        by_accuser: dict[tuple[bytes, int], list[tuple[int, int]]] = {}
        for round_, accuser, sender, part in wanted:
            by_accuser.setdefault((round_.round_id, accuser), []).append((sender, part))
        for (round_id, accuser), accused in by_accuser.items():
            if round_id in self._exchanges:
                task = asyncio.create_task(_prove(self._exchanges[round_id], accuser, accused))
                self._proving.add(task)
                task.add_done_callback(self._proving.discard)

    def _remember(self, round_id: bytes, exchange: VerifiedExchange) -> None:
        self._exchange = self._exchanges[round_id] = exchange
        while len(self._exchanges) > KEPT_EXCHANGES:
            self._exchanges.popitem(last=False)

    def _make_runner(self, **kwargs) -> SwarmAllReduce:
        exchange = self._exchange
        if exchange is None or exchange.round.round_id != kwargs["group_id"]:
            return super()._make_runner(**kwargs)
        kwargs["out_of_step"] = {**exchange.not_trusted(), **kwargs["out_of_step"]}
        self._runner = VerifiedAllReduce(encoded=exchange.encoded, commits=exchange.commits, **kwargs)
        return self._runner

    async def _verify(self, exchange: VerifiedExchange, tensors: Sequence[torch.Tensor], outcome: Round) -> None:
        """What goes wrong here costs the look at this round, not the round."""
        verifier = self.verifier
        try:
            await exchange.verify(self._runner, tensors)
            self._note_who_is_silent(exchange.round)
        except Exception as error:
            logger.warning(f"This round was not verified: {brief(error)}")
            exchange.round.void = brief(error)
        if exchange.lost:
            outcome.received = await asyncio.to_thread(exchange.drop_lost, self._runner, tensors)
            outcome.failed_reducers = tuple(str(exchange.round.group[place]) for place in sorted(exchange.lost))
        outcome.waiting = exchange.waiting(self._runner)
        outcome.verdicts = Verdicts(
            trusted=exchange.round.own in exchange.round.trusted,
            apart=exchange.round.own in exchange.round.apart,
            duties=verifier.duties,
            events=verifier.events,
            bans=verifier.bans,
            credits={peer: samples for peer, samples in verifier.credits.items() if samples > 0},
            measured=list(verifier.measured),
            void=exchange.round.void,
            sent_bytes=exchange.sent_bytes,
        )
        verifier.duties, verifier.events, verifier.bans, verifier.credits = [], [], [], {}
        verifier.measured.clear()
        outcome.bytes_sent += exchange.sent_bytes


async def _prove(exchange: VerifiedExchange, accuser: int, accused: Sequence[tuple[int, int]]) -> None:
    """One after the other, until the accuser has nothing to show."""
    for sender, part in accused:
        if not await exchange.prove(accuser, sender, part):
            break
