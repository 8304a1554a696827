"""The exchange of a verified round: parts are encoded before they are promised, and what came is kept until it is sure
that it was what its sender says."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import torch
from hivemind.averaging.partition import TensorPartContainer
from hivemind.compression import CompressionBase
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2, runtime_pb2

from volunteer_kit.robust.messages import Commit
from volunteer_kit.swarm.allreduce import SwarmAllReduce
from volunteer_kit.swarm.codec_wire import check_around, check_header
from volunteer_kit.swarm.held_parts import RefusedPart, read_values, size_of, with_shapes
from volunteer_kit.swarm.verify_wire import ANSWER_DIGEST, PART_DIGEST, part_digest

NOT_PROMISED = "bytes that it had not committed to"
NO_PROMISE = "it had committed to nothing"


class EncodedParts:
    """All of a vector's parts as they will be sent. Where one part ends and the next begins does not depend on who
    reduces what, so they can be promised before that is known."""

    def __init__(self, tensors: Sequence[torch.Tensor], compression: CompressionBase, **container_options: Any):
        container = TensorPartContainer(tensors, (1.0,), compression, return_deltas=False, **container_options)
        parts = list(container._input_parts_by_peer[0])
        self.codec = compression
        self.messages = [compression.compress(part, info) for part, info in parts]
        self.sizes = [part.numel() for part, _ in parts]
        container.finalize()

    def __len__(self) -> int:
        return len(self.messages)

    @property
    def offsets(self) -> list[int]:
        """Of each part's first value in the vector."""
        return [sum(self.sizes[:place]) for place in range(len(self.sizes))]

    def digests(self) -> bytes:
        """What is promised."""
        return b"".join(part_digest(message) for message in self.messages)

    def decoded(self, place: int) -> torch.Tensor:
        """As the reducer reads it; (size,) float32."""
        return read_values(self.messages[place]).reshape(-1)


class VerifiedAllReduce(SwarmAllReduce):
    """:param encoded: ours; :param commits: what members have promised, by peer"""

    # Overrides: fetches_lost_answers

    fetches_lost_answers = False  # it is the reducer that answers for them

    def __init__(self, *, encoded: EncodedParts, commits: Mapping[PeerID, Commit], **kwargs):
        super().__init__(**kwargs)
        self._encoded, self._commits = encoded, commits
        self.kept: dict[PeerID, list[runtime_pb2.Tensor]] = defaultdict(list)  # what senders have sent us, whole parts
        self._answers = [hashlib.blake2b(digest_size=ANSWER_DIGEST) for _ in self.ordered_peer_ids]
        self.answered = [0] * len(self.ordered_peer_ids)  # parts of each reducer
        self.own = self.ordered_peer_ids.index(self.peer_id)
        first = self.first_part(self.own)
        shapes = [part.shape for part in self.parts_for_local_averaging]
        self.parts_for_local_averaging = tuple(  # what we promised is what counts, in our own slice as well
            encoded.decoded(first + place).reshape(shape) for place, shape in enumerate(shapes)
        )

    def first_part(self, reducer: int) -> int:
        """Place in the vector of a reducer's first part."""
        return sum(self.tensor_part_container.num_parts_by_peer[:reducer])

    @property
    def reducers(self) -> list[int]:
        """Of each part of the vector, by place in the group."""
        parts = self.tensor_part_container.num_parts_by_peer
        return [place for place, count in enumerate(parts) for _ in range(count)]

    def answer_digest(self, reducer: int) -> bytes:
        """Of all that it answered, b"" if that was not all."""
        whole = self.answered[reducer] == self.tensor_part_container.num_parts_by_peer[reducer] > 0
        return self._answers[reducer].digest() if whole else b""

    def can_have_done(self, peer: PeerID, samples: float) -> bool:
        limit = self.weight_limit(peer)
        return samples <= self.max_weight and (limit is None or samples <= limit)

    def counted(self, peer: PeerID) -> int:
        """Of our own parts, how many this sender's enter, from the first on."""
        return self.tensor_part_reducer.parts_given(self.sender_peer_ids).get(peer, 0)

    async def _generate_input_for_peer(self, peer_index: int) -> AsyncIterator[averaging_pb2.AveragingData]:
        first = self.first_part(peer_index)
        about: dict[str, Any] = {"code": averaging_pb2.PART_FOR_AVERAGING, "group_id": self.group_id}
        for place in range(first, first + self.tensor_part_container.num_parts_by_peer[peer_index]):
            message = self._encoded.messages[place]
            yield averaging_pb2.AveragingData(tensor_part=message, weight=self.weight, **about)
            about = {}

    async def _accumulate_parts_streaming(self, stream: AsyncIterator, sender_index: int) -> AsyncIterator:
        sender = self.sender_peer_ids[sender_index]
        async for message in super()._accumulate_parts_streaming(self._promised(stream, sender), sender_index):
            yield message

    async def _promised(self, stream: AsyncIterator, sender: PeerID) -> AsyncIterator:
        """Raises RefusedPart at the first message that is not what was committed to."""
        commit, first = self._commits.get(sender), self.first_part(self.own)
        if commit is None:
            self.refused[sender] = NO_PROMISE
            raise RefusedPart(NO_PROMISE)
        async for message, shape in with_shapes(stream, self.tensor_part_reducer.shapes):
            place = first + len(self.kept[sender])
            promised = commit.parts[place * PART_DIGEST : (place + 1) * PART_DIGEST]
            try:
                check_around(message, size_of(message))
                check_header(message.tensor_part, shape)
            except ValueError as error:
                self.refused[sender] = str(error)
                raise RefusedPart(str(error)) from None
            if part_digest(message.tensor_part) != promised or message.weight != commit.weight:
                self.refused[sender] = NOT_PROMISED
                raise RefusedPart(NOT_PROMISED)
            self.kept[sender].append(message.tensor_part)
            yield message

    async def _reduce_own_parts(self) -> None:
        await super()._reduce_own_parts()
        for answer in self.tensor_part_reducer._answers:
            _, message = await answer
            self._note_answer(self.own, message)

    async def _receive_averages(self, peer_id: PeerID, peer_index: int, stream: Any) -> None:
        def note(message: averaging_pb2.AveragingData) -> None:
            self._note_answer(peer_index, message.tensor_part)

        await super()._receive_averages(peer_id, peer_index, Noted(stream, note))

    def _note_answer(self, reducer: int, message: runtime_pb2.Tensor) -> None:
        self._answers[reducer].update(part_digest(message, ANSWER_DIGEST))
        self.answered[reducer] += 1


class Noted:
    """A stream whose messages are looked at as they pass."""

    def __init__(self, stream: Any, note: Any):
        self._stream, self._note = stream, note

    def __aiter__(self) -> Noted:
        return self

    async def __anext__(self) -> Any:
        message = await self._stream.__anext__()
        self._note(message)
        return message

    async def aclose(self) -> None:
        await self._stream.aclose()
