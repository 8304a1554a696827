"""Carries one round of verified averaging (robust/btard.py) over the network, in the averager's process."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import torch
from hivemind.compression import CompressionBase
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.crypto import RSAPrivateKey
from hivemind.utils.logging import get_logger

from volunteer_kit.robust.btard import Verifier
from volunteer_kit.robust.checks import Part
from volunteer_kit.robust.messages import Duty, Event, Samples
from volunteer_kit.robust.reducing import DISTANCE, NORM, SUMS, UNKNOWN
from volunteer_kit.robust.sketch import sketch
from volunteer_kit.robust.standing import Strike
from volunteer_kit.robust.verified_round import VerifiedRound
from volunteer_kit.swarm.broadcast import Boards, tell_all
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.held_parts import read_values
from volunteer_kit.swarm.verified_allreduce import EncodedParts, VerifiedAllReduce
from volunteer_kit.swarm.verify_wire import COMMIT, PART_DIGEST, REVEAL, STATEMENT, part_digest, seal

logger = get_logger(__name__)
NOT_YET = "its work does not count before it was checked"


@dataclass
class Verdicts:
    """What a verified round leaves for the training process.

    :param trusted: does our own work enter? :param apart: not, because we hold another model than most
    :param duties: samples to compute again
    :param bans: who is to be banned, with the strikes; :param credits: samples of probations that ended
    :param void: why the round was not verified
    """

    trusted: bool = True
    apart: bool = False
    duties: list[Duty] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    bans: list[tuple[PeerID, list[Strike]]] = field(default_factory=list)
    credits: dict[PeerID, float] = field(default_factory=dict)
    measured: list[float] = field(default_factory=list)
    void: str = ""
    sent_bytes: int = 0


class VerifiedExchange:
    """One round: `commit`, then the exchange with what `runner_options` gives, then `verify`.

    :param verifier: this peer's
    :param group: in the leader's order; :param public: those of them that can be called
    :param stub_of: peer -> stub with rpc_tell and rpc_show_part
    :param patience: s for one stage
    :param busy: held while the verifier works in another thread
    :param apart: members that hold another model than most
    """

    def __init__(
        self,
        verifier: Verifier,
        boards: Boards,
        *,
        round_id: bytes,
        epoch: int,
        group: Sequence[PeerID],
        public: Sequence[PeerID],
        stub_of: Any,
        patience: float,
        busy: asyncio.Lock,
        apart: Collection[PeerID] = (),
    ):
        self.busy = busy
        self.verifier, self.public, self._stub_of, self._patience = verifier, list(public), stub_of, patience
        self.round: VerifiedRound = verifier.begin(round_id, epoch, group, apart)
        self.board = boards.open(round_id, group)
        self.encoded: EncodedParts | None = None  # until the round is verified
        self._sizes: list[int] = []  # of its parts, in values
        self._codec: CompressionBase | None = None  # that they travel in
        self.evidence: dict[tuple[int, int], runtime_pb2.Tensor] = {}  # (sender, part) -> what it had sent
        self._table: Table | None = None
        self.sent_bytes = 0
        self.lost: frozenset[int] = frozenset()  # reducers whose answers do not count

    async def commit(self, weight: float, samples: Samples, encoded: EncodedParts) -> None:
        """Promise, and hear what the others promise; then it is known whose parts enter."""
        self.encoded, self._sizes, self._codec = encoded, encoded.sizes, encoded.codec
        digests = await asyncio.to_thread(encoded.digests)
        heard = await self._tell(COMMIT, self.round.commit(weight, samples, digests))
        whole = {peer: said for peer, said in heard.items() if len(said.parts) == PART_DIGEST * len(encoded)}
        self.round.hear_commits(whole)
        here = [self.round.group[place] for place in self.round.commits]
        for stage in (REVEAL, STATEMENT):
            self.board.stages[stage].expect(here)

    @property
    def commits(self) -> dict[PeerID, Any]:
        return {self.round.group[place]: commit for place, commit in self.round.commits.items()}

    def not_trusted(self) -> dict[PeerID, str]:
        """Whose parts do not enter, in words."""
        trusted = {self.round.group[place] for place in self.round.trusted}
        return {peer: NOT_YET for peer in self.round.group if peer not in trusted}

    def waiting(self, runner: VerifiedAllReduce) -> dict[PeerID, float]:
        """Samples of those who went through the whole round, and count once they were found right."""
        here = self.round.statements.keys() - self.round.trusted - self.round.apart
        weights = {self.round.group[place]: self.round.commits[place].weight for place in here}
        banned = self.verifier.standing.is_banned
        return {peer: w for peer, w in weights.items() if not banned(peer) and runner.can_have_done(peer, w)}

    def fractions(self, planned: Sequence[float]) -> tuple[float, ...]:
        """Of the vector, by reducer: who is not trusted reduces nothing, if others can."""
        kept = tuple(part if place in self.round.trusted else 0 for place, part in enumerate(planned))
        return kept if any(kept) else tuple(planned)

    async def verify(self, runner: VerifiedAllReduce, answers: Sequence[torch.Tensor]) -> None:
        """:param answers: the averaged tensors"""
        group = range(len(self.round.group))
        digests = [runner.answer_digest(place) for place in group]
        counted = [runner.counted(peer) for peer in self.round.group]
        self.round.hear_reveals(await self._tell(REVEAL, self.round.reveal(digests, counted)))
        self.lost = self.round.lost(set(runner.reducers))
        table = await asyncio.to_thread(Table, self.encoded, runner, answers, self.round.seed, self._sums)
        own = await asyncio.to_thread(table.of_ours, self.encoded)
        heard = await self._tell(STATEMENT, self.round.state(own))
        numbered = zip(runner.reducers, self._sizes, strict=True)
        parts = [Part(r, place - runner.first_part(r), size) for place, (r, size) in enumerate(numbered)]
        held = Held(table, runner, self.round.group)
        async with self.busy:
            await asyncio.to_thread(self.round.hear_statements, heard, parts, table.answers, held)
        self.lost |= self.round.beyond
        self._keep_evidence(runner)
        self._table, self.encoded = table, None

    def drop_lost(self, runner: VerifiedAllReduce, answers: Sequence[torch.Tensor]) -> float:
        """Zero what those answered that do not count, as if nothing had come. :returns: the share of values left"""
        vector = torch.cat([tensor.reshape(-1) for tensor in answers])
        dropped = 0
        for part, reducer in zip(vector.split(self._sizes), runner.reducers, strict=True):
            if reducer in self.lost:
                part.zero_()
                dropped += part.numel()
        for tensor, values in zip(answers, vector.split([tensor.numel() for tensor in answers]), strict=True):
            tensor.copy_(values.view_as(tensor))
        return 1.0 - dropped / max(1, len(vector))

    @property
    def _sums(self) -> int:
        return self.verifier.settings.sums

    def _keep_evidence(self, runner: VerifiedAllReduce) -> None:
        """The bytes of whom we accuse; the others' are not needed any more."""
        first = runner.first_part(self.round.own)
        for news in self.verifier.accusations(self.round.round_id):
            self.evidence[news.sender, news.part] = runner.kept[self.round.group[news.sender]][news.part - first]
        runner.kept.clear()

    async def prove(self, accuser: int, sender: int, part: int) -> bool:
        """See for ourselves what a sender had sent to its accuser. :returns: did it show anything?"""
        if self._table is None:
            return True  # we did not see the round through, and cannot judge
        true = None
        try:
            words = msgpack.packb([self.round.round_id, sender, part], use_bin_type=True)
            request = averaging_pb2.DownloadData(metadata=words)
            stub = self._stub_of(self.round.group[accuser])
            answer = await asyncio.wait_for(stub.rpc_show_part(request), self._patience)
        except Exception as error:  # the line, or a member that has left
            logger.debug(f"an accuser did not answer: {brief(error)}")
            async with self.busy:
                self.round.no_proof(accuser)
            return False
        try:
            promised = self.round.commits[sender].parts[part * PART_DIGEST : (part + 1) * PART_DIGEST]
            if part_digest(answer.tensor_part) == promised:
                values = await asyncio.to_thread(read_values, answer.tensor_part, (self._sizes[part],), self._codec)
                true = await asyncio.to_thread(self._table.row, part, values.reshape(-1))
        except Exception as error:  # bytes that nobody can read prove nothing
            logger.debug(f"an accusation could not be proven: {brief(error)}")
        async with self.busy:
            self.round.prove(accuser, sender, part, true)
        return True

    async def _tell(self, stage: int, message: Any) -> Mapping[PeerID, Any]:
        envelope = seal(RSAPrivateKey.process_wide(), self.round.round_id, stage, message)
        self.sent_bytes += len(envelope) * len(self.public)
        own_id = self.verifier.own_id
        return await tell_all(self.board, stage, envelope, own_id, self.public, self._stub_of, self._patience)


class Table:
    """Numbers of a round's parts along its direction; see messages.Statement."""

    def __init__(
        self,
        encoded: EncodedParts,
        runner: VerifiedAllReduce,
        averages: Sequence[torch.Tensor],
        seed: bytes,
        sums: int,
    ):
        self._seed, self._size, self.width = seed, sums, SUMS + sums
        self._offsets = encoded.offsets
        vector = torch.cat([tensor.detach().reshape(-1).float() for tensor in averages])
        self._averages = vector.split(encoded.sizes)
        self.answers = np.full((len(encoded), 1 + sums), np.nan)
        for place, reducer in enumerate(runner.reducers):
            if place - runner.first_part(reducer) < runner.answered[reducer]:
                average = self._averages[place]
                self.answers[place, 0] = torch.linalg.vector_norm(average, dtype=torch.float64)
                self.answers[place, 1:] = sketch(average, seed, self._offsets[place], sums)

    def row(self, place: int, values: torch.Tensor) -> np.ndarray:
        """Length, distance from the answer and sketch of one part, (2 + sums,)."""
        row = np.zeros(SUMS + self._size)
        row[NORM] = torch.linalg.vector_norm(values, dtype=torch.float64)
        row[DISTANCE] = UNKNOWN
        if np.isfinite(self.answers[place, 0]):
            row[DISTANCE] = torch.linalg.vector_norm(values.double() - self._averages[place].double())
        row[SUMS:] = sketch(values, self._seed, self._offsets[place], self._size)
        return row

    def of_ours(self, encoded: EncodedParts) -> np.ndarray:
        """(parts, 2 + sums) of all that we sent, float32."""
        rows = [self.row(place, encoded.decoded(place)) for place in range(len(encoded))]
        return np.asarray(rows, np.float32).reshape(len(rows), SUMS + self._size)


class Held(Mapping[int, np.ndarray]):
    """Place of a sender -> numbers of our parts that it sent, (parts that came, 2 + sums); made when asked for."""

    def __init__(self, table: Table, runner: VerifiedAllReduce, group: Sequence[PeerID]):
        self._table, self._first, self._codec = table, runner.first_part(runner.own), runner.codec
        self._shapes = runner.tensor_part_reducer.shapes
        self._kept = {place: runner.kept[peer] for place, peer in enumerate(group) if runner.kept.get(peer)}

    def __getitem__(self, place: int) -> np.ndarray:
        rows = []
        for i, (message, shape) in enumerate(zip(self._kept[place], self._shapes, strict=False)):  # or it gave fewer
            try:
                rows.append(self._table.row(self._first + i, read_values(message, shape, self._codec).reshape(-1)))
            except ValueError:  # bytes that it had promised, and that are no part: it was refused, and sent no more
                break
        return np.asarray(rows).reshape(len(rows), self._table.width)

    def __iter__(self) -> Iterator[int]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
