"""Open and accept streams of other peers through the control socket of a running p2pd.

hivemind's client of this socket keeps a file open for each stream that could not be opened, and lets 100 new streams
wait to be accepted: of 1,000 that were opened at once 728 were lost, though their openers were told "opened".
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr, protocols

from volunteer_kit.swarm.net.children import LOOK_EVERY, socket_lost
from volunteer_kit.swarm.net.sockets import SocketGuard

BACKLOG = 4096  # streams that wait to be accepted; the system may allow fewer (net.core.somaxconn)
ANSWER_WITHIN = 30.0  # s for p2pd's answer to what needs no other peer
UNREACHABLE = (OSError, EOFError, asyncio.TimeoutError, P2PDaemonError)  # what a call to another peer may end with

Handler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Closed(ConnectionError):
    """A stream was refused, has ended, or broke."""


class Daemon:
    """One process's link to p2pd.

    Peers are named by their ids in base58. Every method may raise OSError, EOFError or P2PDaemonError.

    :ivar lost: done, with words, once p2pd is gone, or a socket where it and this process meet
    """

    def __init__(self, maddr: str):
        self._path = Multiaddr(maddr).value_for_protocol(protocols.P_UNIX)
        # in the folder of p2pd's own socket: it is private to the peer, and is removed with it
        self._own_path = Path(self._path).with_name(f"node-{secrets.token_urlsafe(6)}.sock")
        self._handlers: dict[str, Handler] = {}
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.peer_id = ""
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def attach(cls, maddr: str) -> Daemon:
        """:param maddr: /unix/... of p2pd's control socket"""
        daemon = cls(maddr)
        about = await daemon._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        daemon.peer_id = PeerID(about.identify.id).to_base58()
        daemon._server = await asyncio.start_unix_server(daemon._accept, str(daemon._own_path), backlog=BACKLOG)
        reader, writer = await asyncio.open_unix_connection(daemon._path)
        daemon._hold(daemon._watch(reader, writer))
        daemon._hold(daemon._watch_sockets())
        return daemon

    async def handle(self, protocol: str, handler: Handler) -> None:
        """Let `handler` be called for each stream that another peer opens under this name. It closes the stream."""
        self._handlers[protocol] = handler
        own = Multiaddr(f"/unix{self._own_path}").to_bytes()
        asked = p2pd_pb2.StreamHandlerRequest(addr=own, proto=[protocol], balanced=False)
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=asked))

    async def open(self, peer: str, protocol: str, timeout: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to the handler of this name at `peer`, which may not know of it before it has answered.

        :param timeout: s, until p2pd says that it is open. Raises asyncio.TimeoutError
        """
        asked = p2pd_pb2.StreamOpenRequest(
            peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol], timeout=max(1, round(timeout))
        )
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=asked)
            await asyncio.wait_for(_exchange(reader, writer, request), timeout)
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def disconnect(self, peer: str) -> None:
        """End all connections to a peer; the next stream is opened over a new one."""
        asked = p2pd_pb2.DisconnectRequest(peer=PeerID.from_base58(peer).to_bytes())
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=asked))

    async def close(self) -> None:
        """Take no more streams. Those that are open are their owners'."""
        for protocol in self._handlers:
            own = Multiaddr(f"/unix{self._own_path}").to_bytes()
            asked = p2pd_pb2.RemoveStreamHandlerRequest(addr=own, proto=[protocol])
            with suppress(*UNREACHABLE):
                request = p2pd_pb2.Request(type=p2pd_pb2.Request.REMOVE_STREAM_HANDLER, removeStreamHandler=asked)
                await self._ask(request)
        if self._server is not None:
            self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.lost.cancel()
        self._own_path.unlink(missing_ok=True)

    async def _ask(self, request: p2pd_pb2.Request) -> p2pd_pb2.Response:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            return await asyncio.wait_for(_exchange(reader, writer, request), ANSWER_WITHIN)
        finally:
            writer.transport.abort()

    async def _watch(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """p2pd says nothing on a connection on which nothing was asked, until it ends."""
        with suppress(OSError):
            await reader.read(1)
        writer.transport.abort()
        self._end("The program that carries this peer's connections (p2pd) has ended")

    async def _watch_sockets(self) -> None:
        guard, paths = SocketGuard(), [self._path, str(self._own_path)]
        while (lost := guard.find_lost(paths)) is None:
            await asyncio.sleep(LOOK_EVERY)
        self._end(socket_lost(lost))

    def _end(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._hold(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        about = p2pd_pb2.StreamInfo()
        try:
            await asyncio.wait_for(read_pbmsg_safe(reader, about), ANSWER_WITHIN)
            await self._handlers[about.proto](PeerID(about.peer).to_base58(), reader, writer)
        except (*UNREACHABLE, KeyError):
            writer.transport.abort()

    def _hold(self, coroutine: Awaitable[None]) -> None:
        # asyncio itself knows a task only weakly
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: p2pd_pb2.Request
) -> p2pd_pb2.Response:
    """Raises P2PDaemonError with p2pd's words where it could not do what was asked."""
    await write_pbmsg(writer, request)
    response = p2pd_pb2.Response()
    await read_pbmsg_safe(reader, response)
    if response.type == p2pd_pb2.Response.ERROR:
        raise P2PDaemonError(response.error.msg)
    return response
