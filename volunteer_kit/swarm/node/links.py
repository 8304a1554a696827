"""Keep a control stream between two peers: small messages in order, heartbeats, and a new stream when one breaks.

A frame is a length of four bytes, a kind of one byte, and the content; messages are compressed. The opener of a stream
says `HELLO` first and the other side answers it; the stream is open from then on. In a run with an authority each
`HELLO` shows an access token, and a peer without a valid one is not heard. Both sides may open at once: both streams
are then heard, each side sends on that of the smaller peer id, and the other one ends for its silence.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from statistics import median
from typing import Any

from volunteer_kit.auth.access_token import TokenError
from volunteer_kit.swarm.net.access.token_table import MAX_TOKEN
from volunteer_kit.swarm.node.access import Access
from volunteer_kit.swarm.node.channels import ByteCount
from volunteer_kit.swarm.node.daemon import UNREACHABLE, Closed, Daemon
from volunteer_kit.swarm.node.deflate import Deflater, Inflater, most_deflated
from volunteer_kit.swarm.node.pacing import Flight, Window

MAX_MESSAGE = 2**20  # bytes
MAX_QUEUE = 4 * 2**20  # bytes that wait for a stream to one peer
STALE = 30.0  # s after which a message that found no stream is dropped: who sent it has long sent another
PING_EVERY = 1.5  # s without a word from us
MEASURE_EVERY, MEASURE_BUSY_EVERY = 15.0, 1.0  # s between pings of a stream that is in use, and during bulk
SILENT = 5.0  # s without a word from the other side
OPEN_WITHIN = 15.0  # s for p2pd: it asks the peers that it knows, and dials all addresses that they tell
HELLO_WITHIN = 10.0  # s for the other side's first message
BACKOFF, MAX_BACKOFF = 0.5, 8.0  # s
WANTED_FOR, WANTED_WITHIN = 5.0, 3.0  # s for which bulk has a stream opened, and for which it waits for that
HOPELESS_FOR = 10.0  # s for which it does not wait again
ROOM = 65_536  # bytes that a stream's buffer may hold when the next message is written
KEPT_TIMES = 5  # round trips, of which the median counts
USUAL_FOR = 60.0  # s for which the shortest round trip is remembered at least

_FRAME = struct.Struct(">IB")
_HELLO = struct.Struct(">B8sI8sI")
_TIME = struct.Struct(">d")
VERSION = 2


class Kind(IntEnum):
    """The kinds of frames."""

    HELLO = 0
    MESSAGE = 1
    PING = 2
    PONG = 3
    TOKEN = 4  # a renewed one of the sender, or one of a peer that the next message names


LONGEST = {  # bytes
    Kind.HELLO: _HELLO.size + MAX_TOKEN,
    Kind.MESSAGE: most_deflated(MAX_MESSAGE),
    Kind.PING: _TIME.size,
    Kind.PONG: _TIME.size,
    Kind.TOKEN: MAX_TOKEN,
}


@dataclass(frozen=True)
class Hello:
    """A stream's first message, and the answer to it.

    :param incarnation: drawn anew by each process
    :param number: of this stream, of those that the sender has opened to this peer; 0 in the answer
    :param known: the other side's incarnation, as far as the sender has met it
    :param seen: the highest number of its streams. A peer that opens one has none: all up to this one are dead
    :param token: the sender's, by which it is admitted; empty in an open run
    """

    incarnation: bytes
    number: int = 0
    known: bytes = bytes(8)
    seen: int = 0
    token: bytes = b""

    def encode(self) -> bytes:
        return _HELLO.pack(VERSION, self.incarnation, self.number, self.known, self.seen) + self.token

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Raises Closed for what is none, or another version's."""
        if len(data) < _HELLO.size or data[0] != VERSION:
            raise Closed("no greeting that we know")
        _, incarnation, number, known, seen = _HELLO.unpack_from(data)
        return cls(incarnation, number, known, seen, data[_HELLO.size :])


class ControlStream:
    """One stream's frames.

    :ivar ours: whether this side has opened it
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: ByteCount, ours: bool, number: int = 0
    ):
        self.ours, self.number, self.incarnation = ours, number, b""
        self._reader, self._writer, self._count = reader, writer, count
        self._deflater: Deflater | None = None  # both take memory, so not before the first message
        self._inflater: Inflater | None = None
        self.heard_at = self.said_at = time.monotonic()
        self.pinged_at = -MEASURE_EVERY
        self._shown: dict[str, bytes] = {}  # peer -> its token, as the other side has it

    @property
    def has_room(self) -> bool:
        return self._writer.transport.get_write_buffer_size() < ROOM

    def write(self, kind: Kind, data: bytes) -> None:
        """Hand a whole frame to the system. A stream that has ended loses it."""
        if self._writer.transport.is_closing():
            return
        self._writer.write(_FRAME.pack(len(data), kind) + data)
        self._count.sent += _FRAME.size + len(data)
        self.said_at = time.monotonic()

    def say(self, message: bytes) -> None:
        """Hand a message to the system, as `write`."""
        self._deflater = self._deflater or Deflater()
        self.write(Kind.MESSAGE, self._deflater.deflate(message))

    def greet(self, hello: Hello, me: str) -> None:
        """Say our first message."""
        self._shown[me] = hello.token
        self.write(Kind.HELLO, hello.encode())

    def show(self, access: Access, peers: Iterable[str]) -> None:
        """Let the other side have the tokens of these peers, as far as they are here and new to it."""
        for peer in peers:
            token = access.token_of(peer)
            if token and self._shown.get(peer) != token:
                self._shown[peer] = token
                self.write(Kind.TOKEN, token)

    async def drain(self) -> None:
        """Wait until there is room. Raises OSError."""
        await self._writer.drain()
        if self._writer.transport.is_closing():
            raise Closed("closed")

    async def read(self) -> tuple[Kind, bytes]:
        """The next frame, or the message in it. Raises Closed for what is none, OSError and EOFError."""
        length, number = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
        if number not in LONGEST or length > LONGEST[Kind(number)]:
            raise Closed(f"a frame of kind {number} with {length} bytes")
        data = await self._reader.readexactly(length)
        self._count.received += _FRAME.size + length
        self.heard_at = time.monotonic()
        if number == Kind.MESSAGE:
            self._inflater = self._inflater or Inflater(MAX_MESSAGE)
            data = self._inflater.inflate(data)
        return Kind(number), data

    async def read_hello(self) -> Hello:
        """The other side's first message. Raises as `read`."""
        length, number = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
        if number != Kind.HELLO or length > LONGEST[Kind.HELLO]:
            raise Closed("no greeting")
        hello = Hello.decode(await self._reader.readexactly(length))
        self._count.received += _FRAME.size + length
        self.heard_at = time.monotonic()
        self.incarnation = hello.incarnation
        return hello

    def abort(self) -> None:
        self._writer.transport.abort()


@dataclass
class Ground:
    """The links of one process share this.

    :param access: who is heard
    :param deliver: is given each message: the peer, the bytes
    :param spawn: runs a coroutine in a task that is held
    :param is_bulk_busy: whether bulk goes out
    """

    daemon: Daemon
    protocol: str
    incarnation: bytes
    count: ByteCount
    deliver: Callable[[str, bytes], None]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    is_bulk_busy: Callable[[], bool]
    flight: Flight
    access: Access


@dataclass
class Link:
    """The way to one peer: its streams, of which there is one as a rule, and what waits for them."""

    peer: str
    ground: Ground
    used_at: float = field(default_factory=time.monotonic)
    _streams: list[ControlStream] = field(default_factory=list)
    _queue: deque[tuple[float, bytes, tuple[str, ...]]] = field(default_factory=deque)
    _queued: int = 0  # bytes
    window: Window = field(init=False)
    _times: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))  # s, round trips
    # s, the shortest round trip of this period and of the one before; the period's end
    _shortest: tuple[float, float] = (SILENT, SILENT)
    _period_end: float = 0.0
    _opened: int = 0  # streams by us
    _known: bytes = bytes(8)  # the other side's incarnation
    _seen: int = 0  # the last of its streams
    _wanted_at: float = -math.inf  # monotonic s, when bulk to this peer last found no stream
    _hopeless_until: float = 0.0  # monotonic s; until then bulk does not wait for a stream
    _tried: asyncio.Event = field(default_factory=asyncio.Event)  # a stream is here, or could not be had
    _not_before: float = 0.0  # monotonic s, of the next attempt
    _backoff: float = BACKOFF
    _reaching: asyncio.Task[None] | None = None
    _pumping: asyncio.Task[None] | None = None
    _disconnecting: asyncio.Task[None] | None = None
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.window = Window(self.ground.flight)

    @property
    def is_open(self) -> bool:
        return bool(self._streams)

    @property
    def is_idle(self) -> bool:
        """Whether it has no stream, and wants none."""
        return not self._streams and not self._queue

    @property
    def round_trip(self) -> float | None:
        """s, of late."""
        return median(self._times) if self._times and self._streams else None

    @property
    def delay(self) -> float | None:
        """s that the last round trip took longer than usual, or the one that is not over yet."""
        if not self._times or not self._streams:
            return None
        unanswered = self.window.unanswered_since
        last = self._times[-1] if unanswered is None else max(self._times[-1], time.monotonic() - unanswered)
        return last - min(self._shortest)

    def ping(self) -> bool:
        """Send a heartbeat, if there is a stream with room."""
        if not self._streams or not (stream := self._sending()).has_room:
            return False
        stream.pinged_at = time.monotonic()
        stream.write(Kind.PING, _TIME.pack(stream.pinged_at))
        self.window.mark(stream.pinged_at)
        return True

    # --- sending ---

    def send(self, data: bytes, names: tuple[str, ...] = ()) -> None:
        """Send it now, or when there is a stream with room; the oldest give way when too much waits.

        :param names: peers whose tokens the other side needs to understand it
        """
        if self._is_closed:
            return
        self.used_at = time.monotonic()
        if self._streams and not self._queue and (stream := self._sending()).has_room:
            stream.show(self.ground.access, names)
            stream.say(data)
            return
        self._queue.append((self.used_at, data, names))
        self._queued += len(data)
        while self._queued > MAX_QUEUE:
            self._queued -= len(self._queue.popleft()[1])
        self._go_on()

    def _sending(self) -> ControlStream:
        """Both sides choose the same: that of the smaller peer id."""
        ours_first = self.ground.daemon.peer_id < self.peer
        return min(self._streams, key=lambda stream: stream.ours != ours_first)

    async def want(self) -> bool:
        """Return whether there is a stream; open one if there is none. Bulk to this peer is paced by its heartbeats.

        A peer that did not take a stream just now is not waited for again.
        """
        if self._streams:
            return True
        self.used_at = self._wanted_at = time.monotonic()
        is_hopeless = self.used_at < self._hopeless_until
        if not is_hopeless:
            self._tried.clear()
        self._go_on()
        if not is_hopeless:
            try:
                await asyncio.wait_for(self._tried.wait(), WANTED_WITHIN)
            except asyncio.TimeoutError:
                self._hopeless_until = time.monotonic() + HOPELESS_FOR
        return self.is_open

    @property
    def _is_wanted(self) -> bool:
        return bool(self._queue) or time.monotonic() - self._wanted_at < WANTED_FOR

    def _go_on(self) -> None:
        """Let what waits be sent, or a stream be opened for it."""
        if self._is_closed:
            return
        if self._streams:
            if self._queue and (self._pumping is None or self._pumping.done()):
                self._pumping = self.ground.spawn(self._pump())
        elif self._is_wanted and (self._reaching is None or self._reaching.done()):
            self._reaching = self.ground.spawn(self._reach())

    async def _pump(self) -> None:
        while self._queue and self._streams:
            stream = self._sending()
            since, data, names = self._queue.popleft()
            self._queued -= len(data)
            if time.monotonic() - since > STALE:
                continue
            stream.show(self.ground.access, names)
            stream.say(data)
            try:
                await stream.drain()
            except OSError:
                self._remove(stream)

    # --- opening ---

    async def _reach(self) -> None:
        while self._is_wanted and not self._streams and not self._is_closed:
            await asyncio.sleep(max(0.0, self._not_before - time.monotonic()))
            while self._queue and time.monotonic() - self._queue[0][0] > STALE:
                self._queued -= len(self._queue.popleft()[1])
            if self._is_wanted and not self._streams and not await self._open():
                self._hopeless_until = time.monotonic() + HOPELESS_FOR
                self._tried.set()
                self._not_before = time.monotonic() + random.uniform(0.5, 1.0) * self._backoff
                self._backoff = min(MAX_BACKOFF, 2 * self._backoff)

    async def _open(self) -> bool:
        ground = self.ground
        try:
            if self._disconnecting is not None:
                await asyncio.wait({self._disconnecting})
            reader, writer = await ground.daemon.open(self.peer, ground.protocol, OPEN_WITHIN)
        except UNREACHABLE:
            return False
        if self._streams or self._is_closed:  # the other side was faster
            writer.transport.abort()
            return True
        self._opened += 1
        stream = ControlStream(reader, writer, ground.count, True, self._opened)
        try:
            token = ground.access.token
            hello = Hello(ground.incarnation, self._opened, self._known, self._seen, token)
            stream.greet(hello, ground.daemon.peer_id)
            hello = await asyncio.wait_for(stream.read_hello(), HELLO_WITHIN)
        except asyncio.TimeoutError:  # p2pd holds a connection for alive that is not
            stream.abort()
            self._disconnect()
            return False
        except (OSError, EOFError):
            stream.abort()
            return False
        except asyncio.CancelledError:
            stream.abort()
            raise
        if ground.access.show(hello.token, self.peer) is not None:
            stream.abort()
            return False
        self._add(stream, hello)
        ground.spawn(self._listen(stream))
        return True

    async def accept(self, stream: ControlStream, hello: Hello) -> None:
        """Listen to a stream that the other side has opened, until it ends. It has shown its token."""
        stream.number = hello.number
        ground = self.ground
        stream.greet(Hello(ground.incarnation, token=ground.access.token), ground.daemon.peer_id)
        self._add(stream, hello)
        await self._listen(stream)

    def _add(self, stream: ControlStream, hello: Hello) -> None:
        """A newer stream takes the place of an older one by the same side, and of those that its opener has lost."""
        if self._is_closed:
            stream.abort()
            return
        mine = self.ground.incarnation
        for other in [*self._streams]:
            is_lost = other.ours and not stream.ours and hello.known == mine and other.number <= hello.seen
            if other.ours == stream.ours or other.incarnation != hello.incarnation or is_lost:
                other.abort()
                self._streams.remove(other)
        if self._known != hello.incarnation:
            self._known, self._seen = hello.incarnation, 0
        if not stream.ours:
            self._seen = hello.number
        self._streams.append(stream)
        self.window.reset()
        self._tried.set()
        self._backoff, self._not_before = BACKOFF, 0.0
        self.used_at = time.monotonic()
        self._go_on()

    # --- receiving ---

    async def _listen(self, stream: ControlStream) -> None:
        try:
            while True:
                kind, data = await stream.read()
                if kind is Kind.MESSAGE:
                    self.ground.deliver(self.peer, data)
                elif kind is Kind.PING:
                    if stream.has_room:
                        stream.write(Kind.PONG, data)
                elif kind is Kind.PONG:
                    self._note_round_trip(data)
                elif kind is Kind.TOKEN:
                    self._hear_token(data)
                else:
                    raise Closed("a second greeting")
        except (OSError, EOFError):
            pass
        finally:
            self._remove(stream)

    def _hear_token(self, token: bytes) -> None:
        try:
            self.ground.access.hear(token)
        except TokenError as error:
            raise Closed(f"a token that does not hold: {error}") from error

    def _note_round_trip(self, data: bytes) -> None:
        if len(data) != _TIME.size:
            return
        (sent_at,), now = _TIME.unpack(data), time.monotonic()
        if not 0.0 <= now - sent_at < 2 * HELLO_WITHIN:
            return
        self._times.append(now - sent_at)
        if now > self._period_end:
            self._shortest, self._period_end = (SILENT, self._shortest[0]), now + USUAL_FOR
        self._shortest = (min(self._shortest[0], now - sent_at), self._shortest[1])
        self.window.passed(sent_at, now - sent_at - min(self._shortest))

    def _remove(self, stream: ControlStream) -> None:
        stream.abort()
        if stream in self._streams:
            self._streams.remove(stream)
            self.window.reset()
            if not self._streams:  # both sides see the end at once
                self._tried.clear()
                self._not_before = time.monotonic() + random.uniform(0.0, BACKOFF)
        self._go_on()

    # --- the heartbeat ---

    def tick(self, now: float, lateness: float) -> None:
        """To be called several times a second.

        :param lateness: s that this call comes late: what others said meanwhile has not been read yet
        """
        self.window.write_off(now)
        for stream in self._streams:
            stream.heard_at += lateness
            stream.show(self.ground.access, (self.ground.daemon.peer_id,))
        if not self._streams:
            return
        sending = self._sending()
        for stream in [*self._streams]:
            if stream is not sending and now - stream.heard_at > SILENT:
                self._remove(stream)
        if now - sending.heard_at > SILENT:
            for stream in [*self._streams]:
                self._remove(stream)
            self._disconnect()
            return
        measure_every = MEASURE_BUSY_EVERY if self.ground.is_bulk_busy() else MEASURE_EVERY
        if now - sending.said_at >= PING_EVERY or now - sending.pinged_at >= measure_every:
            self.ping()

    def _disconnect(self) -> None:
        """Make p2pd drop the connection: it sees a cut line after half a minute only, and new streams wait."""

        async def disconnect() -> None:
            try:
                await self.ground.daemon.disconnect(self.peer)
            except UNREACHABLE:
                pass

        self._disconnecting = self.ground.spawn(disconnect())

    def close(self) -> None:
        """End its streams, and open none any more."""
        self._is_closed = True
        self._queue.clear()
        self._queued = 0
        for task in (self._reaching, self._pumping):
            if task is not None:
                task.cancel()
        for stream in [*self._streams]:
            self._remove(stream)
