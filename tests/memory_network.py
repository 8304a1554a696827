"""A network in memory: what `node.transport` does, between peers of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress


class Closed(ConnectionError):
    """The stream has ended."""


class Stream:
    """One side of a stream. `hub.tamper` may change, swallow or refuse a frame."""

    def __init__(self, hub: Hub, owner: str, peer: str, head: bytes):
        self.hub, self.owner, self.peer, self.head = hub, owner, peer, head
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue(4)
        self.gone = asyncio.Event()
        self.other: Stream
        self.ended = self.saw_end = self.opened = False

    async def send(self, data: bytes, more: bool = False) -> None:
        assert len(data) <= 2**20 and not self.ended
        frame = self.hub.tamper(self, data)
        if asyncio.iscoroutine(frame):
            frame = await frame
        await self._put(frame)

    async def _put(self, frame: bytes | None) -> None:
        putting = asyncio.ensure_future(self.other.inbox.put(frame))
        gone = [asyncio.ensure_future(each.gone.wait()) for each in (self, self.other)]
        try:
            await asyncio.wait({putting, *gone}, return_when=asyncio.FIRST_COMPLETED)
            if not putting.done():
                raise Closed("closed by the other side")
        finally:
            for each in (putting, *gone):
                each.cancel()

    async def receive(self, timeout: float) -> bytes:
        getting = asyncio.ensure_future(self.inbox.get())
        gone = [asyncio.ensure_future(each.gone.wait()) for each in (self, self.other)]
        try:
            await asyncio.wait({getting, *gone}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                raise Closed("closed") if any(each.done() for each in gone) else asyncio.TimeoutError
            frame = getting.result()
            if frame is None:
                self.inbox.put_nowait(None)
                self.saw_end = True
                raise Closed("ended")
            return frame
        finally:
            for each in (getting, *gone):
                each.cancel()

    async def end(self) -> None:
        if not self.ended:
            self.ended = True
            await self._put(None)

    def close(self) -> None:
        self.gone.set()


class Hub:
    """All peers of a network."""

    def __init__(self):
        self.handlers: dict[tuple[str, str], Callable] = {}  # by peer and name
        self.wires: dict[str, Wire] = {}  # those that live
        self.down: set[str] = set()
        self.split: frozenset[str] = frozenset()  # these reach each other only, and the others too
        self.streams: list[Stream] = []
        self.tasks: set[asyncio.Task] = set()
        self.failures: list[Exception] = []  # of handlers, beside those of their streams
        self.tamper: Callable[[Stream, bytes], bytes] = lambda stream, data: data

    def kill(self, peer: str) -> None:
        """A process ends: its streams break."""
        self.down.add(peer)
        self.wires.pop(peer, None)
        for stream in self.streams:
            if peer in (stream.owner, stream.peer):
                stream.close()

    def is_cut(self, one: str, other: str) -> bool:
        """Whether no word goes between the two."""
        return (one in self.split) != (other in self.split)

    def cut(self, peers: Iterable[str]) -> None:
        """Cut the network between these peers and the others; none heals it."""
        self.split = frozenset(peers)
        for stream in self.streams:
            if self.is_cut(stream.owner, stream.peer):
                stream.close()

    async def serve(self, handler: Callable, stream: Stream) -> None:
        """The stream ends when the handler returns, and breaks where it raises."""
        try:
            await handler(stream.peer, stream.head, stream)
            with suppress(Closed):
                await stream.end()
        except BaseException as error:
            stream.close()
            if isinstance(error, Exception) and not isinstance(error, OSError):
                self.failures.append(error)


class Wire:
    """One peer's transport. A new one of the same peer takes the place of the old one."""

    def __init__(self, hub: Hub, peer: str):
        self.hub, self.peer_id = hub, peer
        self.on_message: Callable[[str, bytes], None] = lambda sender, data: None
        self.on_measured: Callable[[float], None] = lambda mbps: None
        self.traffic = (0, 0)
        self.banned: set[str] = set()
        hub.down.discard(peer)
        hub.wires[peer] = self

    def send(self, peer: str, data: bytes, names: Iterable[str] = ()) -> None:
        """Messages come in their order, or not at all."""
        asyncio.get_running_loop().call_soon(self._deliver, peer, data)

    def _deliver(self, peer: str, data: bytes) -> None:
        other = self.hub.wires.get(peer) if not self.hub.is_cut(self.peer_id, peer) else None
        if other is not None and self.hub.wires.get(self.peer_id) is self and self.peer_id not in other.banned:
            self.traffic = (self.traffic[0] + len(data), self.traffic[1])
            other.traffic = (other.traffic[0], other.traffic[1] + len(data))
            other.on_message(self.peer_id, data)

    def ban(self, peer: str) -> None:
        self.banned.add(peer)

    def answer(self, name: str, handler: Callable) -> None:
        self.hub.handlers[self.peer_id, name] = handler

    async def ask(self, peer: str, name: str, head: bytes, timeout: float) -> Stream:
        is_away = {peer, self.peer_id} & self.hub.down or self.hub.is_cut(self.peer_id, peer)
        if is_away or (peer, name) not in self.hub.handlers:
            raise OSError("it cannot be reached")
        near, far = Stream(self.hub, self.peer_id, peer, head), Stream(self.hub, peer, self.peer_id, head)
        near.other, far.other, near.opened = far, near, True
        self.hub.streams += [near, far]
        task = asyncio.ensure_future(self.hub.serve(self.hub.handlers[peer, name], far))
        self.hub.tasks.add(task)
        task.add_done_callback(self.hub.tasks.discard)
        return near
