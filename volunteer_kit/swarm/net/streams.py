"""Bound the streams of other peers: their number, their silence, and the length of a message.

hivemind awaits a stream's next message for as long as the stream is open, and reads as many bytes as its first eight
claim. Each stream holds an open file here and one in p2pd: a stranger that opened 2,500 and said nothing kept newcomers
out, and one that claims 2^63 bytes is read into memory.
"""

from __future__ import annotations

import asyncio
import resource
from collections import Counter, OrderedDict
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import hivemind.dht.dht
import hivemind.dht.node
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

# ends the stream that a handler is called for
_hang_up: ContextVar[Callable[[], object] | None] = ContextVar("hang_up", default=None)

StreamHandler = Callable[[StreamInfo, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class StreamBounds(NamedTuple):
    """Of one process of a peer, which has up to four. A round takes a stream from each sender and to each reducer; a
    state comes over 16 at a time.

    :param first_message_within: s from the opening; a sender's first part is encoded by then
    :param message_within: s from a message's first byte to its last, and for the other side to take an answer. A part
        has 0.5 MB at most; a line of 1 Mbit/s that a round fills besides brings it in a minute
    :param end_within: s from a handler's end to the stream's; hivemind never ends one whose caller sends on meanwhile
    :param longest_message: bytes
    :param per_peer: open streams
    :param silent: streams of all peers that have said nothing yet; a new one takes the place of the oldest
    :param total: open streams of all peers
    """

    first_message_within: float = 20.0
    message_within: float = 180.0
    end_within: float = 30.0
    longest_message: int = DEFAULT_MAX_MSG_SIZE
    per_peer: int = 64
    silent: int = 128
    total: int = 1024


class BoundedReader:
    """A stream's reading end, as far as hivemind uses it.

    :param first_within: s for the first message; None: as long as it takes

    What is out of bounds reads like the stream's end: hivemind closes it without a word.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        bounds: StreamBounds,
        first_within: float | None = None,
        on_first: Callable[[], None] = lambda: None,
    ):
        self._reader, self._bounds, self._on_first = reader, bounds, on_first
        loop = asyncio.get_running_loop()
        self._time = loop.time
        self._until = None if first_within is None else self._time() + first_within  # of the present message
        self._reads = 0  # of the present message: marker, length, content
        self._is_first = True

    async def readexactly(self, size: int) -> bytes:
        """hivemind reads a message in three pieces: a marker, the length, and the content. Raises IncompleteReadError,
        as at the stream's end."""
        if size > self._bounds.longest_message:
            raise asyncio.IncompleteReadError(b"", size)
        left = None if self._until is None else max(0.0, self._until - self._time())
        try:
            data = await asyncio.wait_for(self._reader.readexactly(size), left)
        except asyncio.TimeoutError:
            raise asyncio.IncompleteReadError(b"", size) from None
        self._reads += 1
        if self._reads == 1 and not self._is_first:
            self._until = self._time() + self._bounds.message_within
        elif self._reads == 3:
            self._reads, self._until = 0, None
            if self._is_first:
                self._is_first = False
                self._on_first()
        return data


class BoundedWriter:
    """A stream's writing end, as far as hivemind uses it.

    :param hang_up: called when the other side does not take what it is sent
    """

    def __init__(self, writer: asyncio.StreamWriter, bounds: StreamBounds, hang_up: Callable[[], object]):
        self._writer, self._bounds, self._hang_up = writer, bounds, hang_up
        self.write, self.close, self.is_closing = writer.write, writer.close, writer.is_closing

    async def drain(self) -> None:
        """Raises ConnectionError."""
        try:
            await asyncio.wait_for(self._writer.drain(), self._bounds.message_within)
        except asyncio.TimeoutError:
            self._hang_up()
            raise ConnectionError("the other side takes nothing") from None


class StreamGuard:
    """Counts a process's open streams, and hangs up on those that are too many."""

    def __init__(self, bounds: StreamBounds | None = None):
        self.bounds = bounds or fitting_bounds()
        self._open: Counter[PeerID] = Counter()
        self._silent: OrderedDict[asyncio.StreamWriter, None] = OrderedDict()

    @property
    def open_streams(self) -> int:
        return self._open.total()

    def guard(self, handler: StreamHandler) -> StreamHandler:
        """A handler that is called for streams within bounds only, with ends that are bounded."""

        async def guarded(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer, bounds = info.peer_id, self.bounds
            if self._open[peer] >= bounds.per_peer or self.open_streams >= bounds.total:
                writer.close()
                return
            if len(self._silent) >= bounds.silent:
                oldest, _ = self._silent.popitem(last=False)
                oldest.close()
            self._open[peer] += 1
            self._silent[writer] = None
            ending = BoundedReader(
                reader, bounds, bounds.first_message_within, on_first=lambda: self._silent.pop(writer, None)
            )
            hung_up = asyncio.Event()
            _hang_up.set(hung_up.set)
            handling = asyncio.create_task(handler(info, ending, BoundedWriter(writer, bounds, hung_up.set)))
            waiting = asyncio.create_task(hung_up.wait())
            try:
                await asyncio.wait({handling, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                handling.cancel()
                waiting.cancel()
                if hung_up.is_set():
                    writer.transport.abort()  # close() would wait until the other side has taken the rest
                self._silent.pop(writer, None)
                self._open[peer] -= 1
                if not self._open[peer]:
                    del self._open[peer]
                writer.close()

        return guarded


class BoundedP2P(P2P):
    """hivemind's P2P, whose streams are bounded."""

    def __init__(self, bounds: StreamBounds | None = None):
        super().__init__()
        self.streams = StreamGuard(bounds)

    async def add_protobuf_handler(self, name: str, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """As hivemind's, for a handler whose stream ends when it has ended."""
        if kwargs.get("stream_input") or kwargs.get("stream_output"):
            handler = self._ending(handler)
        await super().add_protobuf_handler(name, handler, *args, **kwargs)

    def _ending(self, handler: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        @wraps(handler)
        async def answers(request: Any, context: P2PContext) -> AsyncIterator[Any]:
            try:
                output = handler(request, context)
                if isinstance(output, AsyncIterable):
                    async for answer in output:
                        yield answer
                else:
                    yield await output
            finally:
                if (hang_up := _hang_up.get()) is not None:
                    asyncio.get_running_loop().call_later(self.streams.bounds.end_within, hang_up)

        return answers

    async def add_binary_stream_handler(self, name: str, handler: StreamHandler, balanced: bool = False) -> None:
        await super().add_binary_stream_handler(name, self.streams.guard(handler), balanced)

    async def call_binary_stream_handler(
        self, peer_id: PeerID, handler_name: str
    ) -> tuple[StreamInfo, BoundedReader, asyncio.StreamWriter]:
        """As hivemind's. The other side may take its time: its caller has deadlines of its own."""
        info, reader, writer = await super().call_binary_stream_handler(peer_id, handler_name)
        return info, BoundedReader(reader, self.streams.bounds), writer


def fitting_bounds() -> StreamBounds:
    """The usual ones, or less where this system lets a process open few files: p2pd holds one for each stream of all
    processes of the peer, and needs others for its connections."""
    bounds = StreamBounds()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return bounds
    total = min(bounds.total, max(bounds.per_peer, files // 8))
    return bounds._replace(total=total, silent=min(bounds.silent, total // 4))


def bound_streams() -> None:
    """Give these bounds to the DHT's streams, in this process and those that it forks."""
    hivemind.dht.node.P2P = hivemind.dht.dht.P2P = BoundedP2P
