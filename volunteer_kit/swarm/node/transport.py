"""Carry the traffic between nodes: small messages on one control stream for each pair, bulk on streams of its own.

The process attaches to the p2pd that the DHT's process owns. Read `links` for control streams, `channels` for bulk,
`pacing` for how fast bulk goes out, and `daemon` for p2pd itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from hivemind.utils import get_logger

from volunteer_kit.swarm.net.access.control import REASONS
from volunteer_kit.swarm.net.streams import StreamBounds, fitting_bounds
from volunteer_kit.swarm.node.access import Access
from volunteer_kit.swarm.node.channels import (
    MAX_FRAME,
    ByteCount,
    Channel,
    Ended,
    Line,
    read_request,
    read_token_of,
    request,
    welcome,
)
from volunteer_kit.swarm.node.daemon import UNREACHABLE, Closed, Daemon
from volunteer_kit.swarm.node.links import MAX_MESSAGE, ControlStream, Ground, Link
from volunteer_kit.swarm.node.pacing import Flight, PaceKeeper, TimeLine, Window

__all__ = ["MAX_FRAME", "MAX_MESSAGE", "Channel", "Closed", "Ended", "Transport", "protocol"]

logger = get_logger(__name__)

TICK = 0.25  # s between looks at the links
LATE = 0.5  # s; a look that comes later was held up by this machine
CONTROL_PER_PEER = 4  # streams; one that is lost may not have ended yet when the next one comes
MOST_LINKS = 4096  # peers whose links are remembered
FORGOTTEN = 600.0  # s after which a link without a stream is forgotten
FREE_FOR = 45.0  # s that a bulk stream is kept for the next request to its peer
WAITS_FOR = 60.0  # s that the other side waits for it
FREE_EACH = 2  # such streams to one peer

Answer = Callable[[str, bytes, Channel], Awaitable[None]]


def protocol(run_key: str, kind: str) -> str:
    """The name under which p2pd knows the streams of a run. :param kind: control or bulk"""
    return f"/volunteer-kit/node/1/{hashlib.sha256(run_key.encode()).hexdigest()[:32]}/{kind}"


class StreamLimits:
    """How many streams others may hold open. Those that have said nothing yet give way to new ones."""

    def __init__(self, bounds: StreamBounds):
        self.bounds = bounds
        self._open: Counter[str] = Counter()
        self._silent: OrderedDict[asyncio.StreamWriter, None] = OrderedDict()

    def enter(self, peer: str, writer: asyncio.StreamWriter) -> bool:
        """Whether a new stream is within bounds; `leave` must follow if it is."""
        if self._open[peer] >= self.bounds.per_peer or self._open.total() >= self.bounds.total:
            return False
        if len(self._silent) >= self.bounds.silent:
            self._silent.popitem(last=False)[0].transport.abort()
        self._open[peer] += 1
        self._silent[writer] = None
        return True

    def spoke(self, writer: asyncio.StreamWriter) -> None:
        """Its first message has come."""
        self._silent.pop(writer, None)

    def rest(self, writer: asyncio.StreamWriter) -> None:
        """It says nothing for now, and gives way if need be."""
        if len(self._silent) >= self.bounds.silent:
            self._silent.popitem(last=False)[0].transport.abort()
        self._silent[writer] = None

    def leave(self, peer: str, writer: asyncio.StreamWriter) -> None:
        self._silent.pop(writer, None)
        self._open[peer] -= 1
        if self._open[peer] <= 0:
            del self._open[peer]


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class FreeStreams:
    """Bulk streams of ours whose request is over, until the next one to the same peer."""

    def __init__(self) -> None:
        self._free: dict[str, list[tuple[float, Stream]]] = {}  # peer -> since when, s; the newest last

    def put(self, peer: str, stream: Stream) -> None:
        """Keep a stream."""
        kept = self._free.setdefault(peer, [])
        kept.append((time.monotonic(), stream))
        for _, (_, writer) in kept[:-FREE_EACH]:
            writer.transport.abort()
        del kept[:-FREE_EACH]

    def take(self, peer: str) -> Stream | None:
        """The newest one, as far as is known here open yet."""
        while kept := self._free.get(peer):
            _, (reader, writer) = kept.pop()
            if not writer.transport.is_closing() and not reader.at_eof():
                return reader, writer
            writer.transport.abort()
        return None

    def drop(self, peer: str) -> None:
        """Close all to this peer."""
        for _, (_, writer) in self._free.pop(peer, ()):
            writer.transport.abort()

    def tick(self, now: float) -> None:
        """Close those that nobody has needed for long. To be called now and then."""
        for peer, kept in list(self._free.items()):
            while kept and now - kept[0][0] > FREE_FOR:
                kept.pop(0)[1][1].transport.abort()
            if not kept:
                del self._free[peer]

    def close(self) -> None:
        """Close all."""
        for peer in list(self._free):
            self.drop(peer)


class Transport:
    """This process's way to other nodes. Peers are named by their ids in base58.

    :ivar on_message: is given each message: the sender, the bytes
    :ivar lost: done, with words, once p2pd is gone: nothing works any more
    """

    def __init__(
        self,
        daemon: Daemon,
        *,
        access: Access,
        run_key: str,
        max_mbps: float | None,
        bounds: StreamBounds | None,
    ):
        self.on_message: Callable[[str, bytes], None] = lambda peer, data: None
        self.lost = daemon.lost
        self._daemon, self._access = daemon, access
        self._control, self._bulk = protocol(run_key, "control"), protocol(run_key, "bulk")
        rate = max_mbps * 1e6 / 8 if max_mbps else None
        self._line = Line(PaceKeeper(max_mbps), TimeLine(rate), ByteCount(), self._window)
        bounds = bounds or fitting_bounds()
        self._bulk_limits = StreamLimits(bounds)
        most = bounds._replace(per_peer=min(CONTROL_PER_PEER, bounds.per_peer), total=4 * bounds.total)
        self._control_limits = StreamLimits(most)
        self._answers: dict[str, Answer] = {}
        self._channels: dict[asyncio.StreamWriter, Channel] = {}
        self._free = FreeStreams()
        self._banned: set[str] = set()
        self._links: dict[str, Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ground = Ground(
            daemon,
            self._control,
            secrets.token_bytes(8),
            self._line.count,
            self._deliver,
            self._spawn,
            lambda: self._line.up.is_busy,
            Flight(),
            access,
        )

    @classmethod
    async def start(
        cls,
        daemon: str,
        *,
        access: Access | None = None,
        run_key: str,
        max_mbps: float | None = None,
        bounds: StreamBounds | None = None,
    ) -> Transport:
        """Attach to a running p2pd. Raises OSError and P2PDaemonError, also where another process of this p2pd has
        registered for the same run.

        :param daemon: /unix/... of p2pd's control socket
        :param access: who may take part; asked for each stream, both ways, and again while it is open. None: everybody
        :param run_key: peers with another one never meet
        :param max_mbps: Mbit/s of bulk in each direction; None: what the line carries
        :param bounds: of streams that others open; None: what fits to the open files of this process
        """
        link = await Daemon.attach(daemon)
        transport = cls(link, access=access or Access(), run_key=run_key, max_mbps=max_mbps, bounds=bounds)
        try:
            await link.handle(transport._control, transport._take_control)
            await link.handle(transport._bulk, transport._take_bulk)
        except BaseException:
            await link.close()
            raise
        transport._spawn(transport._watch_links())
        return transport

    @property
    def peer_id(self) -> str:
        return self._daemon.peer_id

    @property
    def connected(self) -> frozenset[str]:
        """Peers with an open control stream."""
        return frozenset(peer for peer, link in self._links.items() if link.is_open)

    @property
    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received), with framing."""
        return self._line.count.sent, self._line.count.received

    @property
    def uplink_mbps(self) -> float | None:
        """Mbit/s, measured or `max_mbps`; None: there was never more to send than the line carries."""
        return self._line.up.uplink_mbps

    @property
    def on_measured(self) -> Callable[[float], None]:
        """Is told the uplink in Mbit/s when it has changed."""
        return self._line.up.on_measured

    @on_measured.setter
    def on_measured(self, told: Callable[[float], None]) -> None:
        self._line.up.on_measured = told

    # --- messages ---

    def send(self, peer: str, data: bytes, names: Iterable[str] = ()) -> None:
        """Send a message, in order with those to the same peer. What cannot be sent is dropped: the oldest first, when
        4 MiB wait, and what found no stream within 30 s.

        :param names: peers that the message names; their access tokens go before it
        """
        if len(data) > MAX_MESSAGE:
            logger.error(f"A message of {len(data)} bytes is too long and was not sent")
        elif peer != self.peer_id and self._may_show(peer):
            self._link(peer).send(data, tuple(name for name in names if name != peer))

    def round_trip(self, peer: str) -> float | None:
        """s from a heartbeat to its answer; None: not known."""
        link = self._links.get(peer)
        return None if link is None else link.round_trip

    def forget(self, peer: str) -> None:
        """Close all streams with this peer, and drop what waits for it. It may come back."""
        if (link := self._links.pop(peer, None)) is not None:
            link.close()
        self._free.drop(peer)
        for channel in [channel for channel in self._channels.values() if channel.peer == peer]:
            channel.close()

    def ban(self, peer: str) -> None:
        """As `forget`, and refuse all its streams from now on."""
        self._banned.add(peer)
        self.forget(peer)

    def check_again(self) -> None:
        """Close the streams of those that are not admitted any more. Happens by itself within a second."""
        heard = self.connected | {channel.peer for channel in self._channels.values()}
        for peer in heard | self._links.keys():
            if not (self._may_speak(peer) if peer in heard else self._may_show(peer)):
                self.forget(peer)

    def _may_show(self, peer: str) -> bool:
        return peer not in self._banned and self._access.may_show(peer)

    def _is_let_in(self, token: bytes, peer: str) -> bool:
        why = self._access.show(token, peer)
        if why is not None:
            logger.debug(f"{peer} is not let in: {REASONS[why]}")
        return why is None and peer not in self._banned

    def _may_speak(self, peer: str) -> bool:
        return peer not in self._banned and self._access.admits(peer)

    def _link(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is None:
            while len(self._links) >= MOST_LINKS:
                idle = [other for other, known in self._links.items() if known.is_idle]
                self.forget(min(idle or self._links, key=lambda other: self._links[other].used_at))
            link = self._links[peer] = Link(peer, self._ground)
        return link

    async def _window(self, peer: str, is_wanted: bool) -> tuple[Window, Callable[[], bool]] | None:
        link = self._link(peer)
        is_open = await link.want() if is_wanted else link.is_open
        return (link.window, link.ping) if is_open else None

    def _deliver(self, peer: str, data: bytes) -> None:
        try:
            self.on_message(peer, data)
        except Exception:
            logger.exception(f"A message from {peer} was not handled")

    async def _take_control(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limits = self._control_limits
        if not self._may_show(peer) or not limits.enter(peer, writer):
            writer.transport.abort()
            return
        stream = ControlStream(reader, writer, self._line.count, ours=False)
        try:
            hello = await asyncio.wait_for(stream.read_hello(), limits.bounds.first_message_within)
            limits.spoke(writer)
            if self._is_let_in(hello.token, peer):
                await self._link(peer).accept(stream, hello)
        finally:
            stream.abort()
            limits.leave(peer, writer)

    async def _watch_links(self) -> None:
        due = time.monotonic()
        while True:
            due += TICK
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            lateness = now - due
            if lateness > LATE:
                due = now
            self.check_again()
            self._line.up.tick()
            links = [*self._links.values()]
            for link in links:
                link.tick(now, lateness if lateness > LATE else 0.0)
                if link.window.is_overdue(now):
                    self._line.up.tell_silent(link.peer)
                if link.is_idle and now - link.used_at > FORGOTTEN:
                    self.forget(link.peer)
            self._free.tick(now)
            self._line.up.delay = min((delay for link in links if (delay := link.delay) is not None), default=0.0)

    # --- bulk ---

    def answer(self, name: str, handler: Answer) -> None:
        """Let `handler(peer, head, channel)` answer requests of this name. The channel ends when it returns, and breaks
        where it raises.

        :param name: 64 bytes at most
        """
        self._answers[name] = handler

    async def ask(self, peer: str, name: str, head: bytes, timeout: float) -> Channel:
        """Open a channel to another peer's handler. The caller closes it. Raises Closed where it is not reached, or
        does not take the request, asyncio.TimeoutError, and ValueError for a head above 256 kB.

        :param timeout: s until the other side has taken it
        """
        if not self._may_show(peer):
            raise Closed(f"{peer} is not admitted")

        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        if (free := self._free.take(peer)) is not None:
            try:
                return await self._request(peer, name, head, free, timeout / 2)
            except (Closed, asyncio.TimeoutError):  # it was older than the other side had patience for
                pass
        left = until - loop.time()
        try:
            stream = await self._daemon.open(peer, self._bulk, left)
        except asyncio.TimeoutError:
            raise
        except UNREACHABLE as error:
            raise Closed(f"{peer} cannot be reached: {error}") from error
        self._spawn(self._forget_closed(stream[1]))
        return await self._request(peer, name, head, stream, max(0.0, until - loop.time()))

    async def _request(self, peer: str, name: str, head: bytes, stream: Stream, timeout: float) -> Channel:
        reader, writer = stream

        def show(token: bytes) -> None:
            if not self._is_let_in(token, peer):
                raise Closed(f"{peer} is not admitted")

        def free() -> None:
            self._channels.pop(writer, None)
            self._free.put(peer, stream)

        try:
            asking = request(peer, name, head, reader, writer, self._line, self._access.token, show, free)
            channel = await asyncio.wait_for(asking, timeout)
        except BaseException as error:
            writer.transport.abort()
            if isinstance(error, (OSError, EOFError)) and not isinstance(error, (Closed, asyncio.TimeoutError)):
                raise Closed(f"{peer} does not take the request {name!r}") from error
            raise
        self._channels[writer] = channel
        return channel

    async def _forget_closed(self, writer: asyncio.StreamWriter) -> None:
        try:
            await writer.wait_closed()
        except OSError:
            pass
        finally:
            self._channels.pop(writer, None)

    async def _take_bulk(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        limits = self._bulk_limits
        if not self._may_show(peer) or not limits.enter(peer, writer):
            writer.transport.abort()
            return
        try:
            within = limits.bounds.first_message_within
            while await self._take_request(peer, reader, writer, within):
                limits.rest(writer)
                within = WAITS_FOR
        except (*UNREACHABLE, UnicodeDecodeError) as error:
            logger.debug(f"A request of {peer} ended: {error!r}")
        except Exception:
            logger.exception(f"A request of {peer} was not answered")
        finally:
            self._channels.pop(writer, None)
            writer.transport.abort()
            limits.leave(peer, writer)

    async def _take_request(
        self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, within: float
    ) -> bool:
        """Answer the next request of a stream. :returns: whether another one may follow

        :param within: s, for it to come
        """
        name, head = await asyncio.wait_for(self._read_request(peer, reader), within)
        self._bulk_limits.spoke(writer)
        if name not in self._answers or not self._may_speak(peer):
            return False
        channel = Channel(peer, head, reader, writer, self._line, free=lambda: None)
        self._channels[writer] = channel
        welcome(writer, self._line, self._access.token)
        await self._answers[name](peer, head, channel)
        await channel.finish()
        self._channels.pop(writer, None)
        return channel.is_over

    async def _read_request(self, peer: str, reader: asyncio.StreamReader) -> tuple[str, bytes]:
        """Nothing more is read of who is not admitted."""
        if not self._is_let_in(await read_token_of(reader, self._line), peer):
            raise Closed(f"{peer} is not admitted")
        return await read_request(reader, self._line)

    # --- the end ---

    async def close(self) -> None:
        """End all streams, and leave p2pd."""
        for peer in [*self._links]:
            self.forget(peer)
        for channel in [*self._channels.values()]:
            channel.close()
        self._free.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._daemon.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        # asyncio itself knows a task only weakly
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
