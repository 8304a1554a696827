"""A state's way from donor to joiner: parameters first, then statistics, in one stream.

This is the part in the averager's process: who is asked, what is sent and what is put together of it. What it means is
the training process's to say, in state.py.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any, AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

import torch
from hivemind.compression import CompressionBase
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, ValueWithExpiration, get_dht_time
from hivemind.utils.asyncio import aiter_with_timeout
from hivemind.utils.logging import get_logger
from hivemind.utils.streaming import combine_from_streaming, split_for_streaming

from volunteer_kit.swarm.agreement import rank_donors
from volunteer_kit.swarm.chunk_transfer import ChunkTransfer
from volunteer_kit.swarm.codec import decode
from volunteer_kit.swarm.codec_wire import check_around, check_header
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.fork_context import FORK
from volunteer_kit.swarm.held_parts import size_of
from volunteer_kit.swarm.identity import is_peer_id

logger = get_logger(__name__)
MAX_METADATA_BYTES = 2**16
GIVEN_AT_ONCE = 3  # states; each is a copy of the whole until it is sent, and more would share the line that there is
# s that a donor waits to be hung up on: what it closes first is lost as far as it is not read (see
# admitted_averager.LINGER), and a home link has megabytes still to read by then
HANG_UP = 120.0
ANY_ORDER = -1
MAX_DONORS = 1024  # that are compared with each other


class StateRefused(ValueError):
    """A donor's state does not fit this run, or is not finite."""


class StateTransfer(ChunkTransfer):
    """Declares, gives and fetches states. What is declared and given comes from the subclass."""

    _given_now = 0  # states on their way to others

    def __init__(self, *args, **kwargs):
        self._arrived = FORK.Value(ctypes.c_int64, 0, lock=False)  # bytes of the download under way
        self.ask_under = FORK.Value(ctypes.c_int64, ANY_ORDER, lock=False)  # donors under this order only
        super().__init__(*args, **kwargs)

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters, extra tensors, then statistics."""
        raise NotImplementedError

    @property
    def num_parameters(self) -> int:
        """How many of state_tensors() a joiner needs to begin: all but the statistics."""
        raise NotImplementedError

    def state_sizes(self) -> list[int]:
        """Bytes of each of state_tensors(): the manifest that donor and joiner must agree in."""
        return [tensor.numel() * tensor.element_size() for tensor in self.state_tensors()]

    # --- a donor ---

    async def _declare_for_download_periodically(self) -> None:
        """Tell that we share our state. hivemind's declaration expires before its next one is stored, and whoever
        looks in between finds no donor."""
        was_shared = False
        while True:
            self._state_updated.clear()
            shared = self.allow_state_sharing
            if shared or was_shared:
                asyncio.create_task(self._declare(self.told if shared else None))
            was_shared = shared
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state_updated.wait(), self.declare_state_period)

    async def _declare(self, told: list | None) -> None:
        with suppress(Exception):  # the next one follows soon
            stored = self.dht.store(
                f"{self.prefix}.all_averagers",
                subkey=self.peer_id.to_bytes(),
                value=told,
                expiration_time=get_dht_time() + 2 * self.declare_state_period,
                return_future=True,
            )
            await asyncio.wait_for(stored, self.declare_state_period)

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        self.doorkeeper.check(context.remote_id, "download_state")
        if not self.allow_state_sharing or self._given_now >= GIVEN_AT_ONCE:
            return  # the joiner asks the next donor, and us again
        self._given_now += 1
        try:
            async with aclosing(self._parts_of_state()) as parts:
                async for part in parts:
                    yield part
        finally:
            self._given_now -= 1
        await asyncio.sleep(HANG_UP)

    async def _parts_of_state(self) -> AsyncIterator[averaging_pb2.DownloadData]:
        metadata, tensors, infos = await self._get_current_state_from_host_process()
        if not tensors:
            return
        manifest = self.serializer.dumps({**self.serializer.loads(metadata), "sizes": self.state_sizes()})
        for tensor, info in zip(tensors, infos, strict=True):
            for part in split_for_streaming(self.state_compression.compress(tensor, info, allow_inplace=False)):
                await self.traffic.send(len(part.buffer))
                yield averaging_pb2.DownloadData(tensor_part=part, metadata=manifest)
                manifest = b""

    # --- a joiner ---

    async def _download_state(
        self, parameters: MPFuture, statistics: MPFuture, refused: list[bytes], donors: list[bytes] | None
    ) -> None:
        """One attempt through the donors, best first. Sets `parameters` to (donor, metadata, tensors) as soon as they
        are here, `statistics` to the rest of the tensors; None if nobody gives them. Ends when it is cancelled."""
        try:
            for donor in await self._choose_donors(donors):
                if donor.to_bytes() in refused:
                    continue
                try:
                    await self._download_from(donor, parameters, statistics)
                    return
                except Exception as e:
                    logger.warning(f"Could not download the state from {donor}: {brief(e)}")
                    if parameters.done():
                        return
        except Exception:
            logger.exception("Could not look for donors")
        finally:
            for future in (parameters, statistics):
                if not future.done():
                    future.set_result(None)

    async def _choose_donors(self, donors: list[bytes] | None) -> list[PeerID]:
        if donors is not None:
            return [PeerID(donor) for donor in random.sample(donors, len(donors))]
        found = await self.dht.get(f"{self.prefix}.all_averagers", latest=True, return_future=True)
        told = read_donors(found.value if found else {}, self.peer_id)
        order = None if self.ask_under.value == ANY_ORDER else self.ask_under.value
        return rank_donors(told, random.sample(sorted(told), len(told)), order)

    async def _download_from(self, donor: PeerID, parameters: MPFuture, statistics: MPFuture) -> None:
        """Raises StateRefused, or whatever breaks the connection."""
        self._arrived.value = 0
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        async with aclosing(stream):
            received = aiter_with_timeout(stream, timeout=self.next_chunk_timeout)
            state = IncomingState(self.state_tensors(), self.state_compression)
            async for message in self.traffic.received(received, size_of):
                if statistics.cancelled():
                    return
                if state.metadata is None:
                    state.metadata = self._read_manifest(message.metadata, state.sizes)
                    message.metadata = b""
                if state.add(message):
                    await asyncio.to_thread(state.read)
                self._arrived.value = state.bytes
                if len(state) >= self.num_parameters and not parameters.done():
                    parameters.set_result((donor.to_bytes(), state.metadata, state.take()))
                if len(state) == len(state.sizes):
                    statistics.set_result(state.take())
                    return
        raise StateRefused("it broke off" if state.metadata else "it shares no state")

    def _read_manifest(self, metadata: bytes, sizes: Sequence[int]) -> dict:
        if len(metadata) > MAX_METADATA_BYTES:
            raise StateRefused(f"{len(metadata)} bytes about itself")
        said = self.serializer.loads(metadata) if metadata else None
        theirs = said.pop("sizes", None) if isinstance(said, dict) else None
        if not isinstance(theirs, list) or theirs != list(sizes):
            raise StateRefused("another model's or optimizer's state")
        return said


class IncomingState:
    """Tensors put together from a donor's messages, one after another, no larger than they may be.

    :param like: tensors of the shapes and types that are expected; their values are not looked at
    :param codec: that they travel in
    """

    def __init__(self, like: Sequence[torch.Tensor], codec: CompressionBase):
        self._kinds, self._codec = [(tensor.shape, tensor.dtype) for tensor in like], codec
        self.sizes = [tensor.numel() * tensor.element_size() for tensor in like]
        self.metadata, self.bytes = None, 0
        self._tensors: list[torch.Tensor] = []
        self._taken = 0
        self._parts: list = []
        self._size = 0  # bytes of the parts

    def __len__(self) -> int:
        """Tensors complete, those taken included."""
        return self._taken + len(self._tensors)

    def add(self, message: averaging_pb2.DownloadData) -> bool:
        """:returns: whether the next tensor is whole, and to be `read`. Raises StateRefused for more bytes than it has,
        or another shape."""
        try:
            check_around(message, size_of(message))
            check_header(message.tensor_part, None if self._parts else self._kinds[len(self)][0])
        except ValueError as error:
            raise StateRefused(f"tensor {len(self)}: {error}") from None
        self._parts.append(message.tensor_part)
        self._size += size_of(message)
        self.bytes += size_of(message)
        if self._size > 2 * self.sizes[len(self)] + 2**10 or len(self._parts) > self._size // 2**10 + 2:
            raise StateRefused("more than the whole state has")
        return len(self._parts) >= self._parts[0].chunks

    def read(self) -> None:
        """Put a tensor together; not to be called in an event loop, which it would hold up. Raises StateRefused."""
        place, (shape, dtype) = len(self), self._kinds[len(self)]
        message, self._parts, self._size = combine_from_streaming(self._parts), [], 0
        try:
            tensor = decode(message, shape, self._codec)
        except ValueError as error:
            raise StateRefused(f"tensor {place}: {error}") from None
        if tensor.dtype != dtype:
            raise StateRefused(f"tensor {place} is {tensor.dtype} instead of {dtype}")
        self._tensors.append(tensor)

    def take(self) -> list[torch.Tensor]:
        """The tensors that are complete and not taken yet."""
        tensors, self._tensors = self._tensors, []
        self._taken += len(tensors)
        return tensors


def read_donors(records: Any, own_id: PeerID) -> dict[PeerID, Any]:
    """The DHT's list of donors, ours left out -> what each says that it holds, unread; of more than MAX_DONORS some."""
    found = {
        key: info.value
        for key, info in (records.items() if isinstance(records, dict) else ())
        if is_peer_id(key) and key != own_id.to_bytes()
        if isinstance(info, ValueWithExpiration) and info.value is not None
    }
    chosen = random.sample(sorted(found), MAX_DONORS) if len(found) > MAX_DONORS else found
    return {PeerID(key): found[key] for key in chosen}
