"""Carry bulk over channels: one request over one stream, in frames, paced together with all others.

Both sides show their access tokens first, a length of two bytes and as many bytes; it is 0 in an open run. A frame is a
length of four bytes and as many bytes. Two lengths that no frame has are marks: `END`, after which a side sends nothing
more (p2pd closes both directions of a stream where one is closed), and `WELCOME`, with which the other side says that
it has taken the request. When both sides have ended, the stream is free for the next request: to open one costs more
than a kilobyte.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from volunteer_kit.swarm.net.access.token_table import MAX_TOKEN
from volunteer_kit.swarm.node.daemon import Closed
from volunteer_kit.swarm.node.pacing import PaceKeeper, TimeLine, Window
from volunteer_kit.swarm.rounds.blobs import Urgency

MAX_FRAME = 2**20  # bytes
MAX_HEAD = 2**18  # bytes of a request's head
MAX_NAME = 64  # bytes of a request's name
WRITE = 16_384  # bytes; a small message waits behind one such write at most
MOST_HELD = WRITE // 2  # bytes that wait for more: a write of its own costs some 140 bytes of headers on the line
SMALL = 65_536  # bytes of a channel that go out without a control stream to pace them by: to open one takes longer
STALLED = 60.0  # s in which the other side took nothing
LINGER = 30.0  # s for the other side to end, once we have
END, WELCOME = 0xFFFFFFFF, 0xFFFFFFFE
_LENGTH = struct.Struct(">I")
_TOKEN = struct.Struct(">H")  # bytes of a token


class Ended(Closed):
    """The other side has sent all that it had, and said so."""


@dataclass
class ByteCount:
    """Bytes of all streams, with their framing."""

    sent: int = 0
    received: int = 0


async def _no_window(peer: str, is_wanted: bool) -> None:
    return None


@dataclass(frozen=True)
class Line:
    """All streams of a process share the pace of each direction and the byte counts.

    :param window: of a peer, and what sends it a heartbeat; None where there is no control stream, or, if the second
        argument is true, where none can be had
    """

    up: PaceKeeper
    down: TimeLine
    count: ByteCount
    window: Callable[[str, bool], Awaitable[tuple[Window, Callable[[], bool]] | None]] = _no_window


class Channel:
    """A request's stream, as either side sees it. One task receives at a time; several may send.

    :param free: called when both sides have ended, and the stream can carry another request; None: it is closed then
    :ivar peer: the other side's id
    :ivar head: the request's
    :ivar urgency: of what this side sends
    """

    def __init__(
        self,
        peer: str,
        head: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: Line,
        free: Callable[[], None] | None = None,
    ):
        self.peer, self.head, self.urgency = peer, head, Urgency.OTHER
        self._reader, self._writer, self._line, self._free = reader, writer, line, free
        writer.transport.set_write_buffer_limits(0)  # `drain` then tells when the system's buffers are full
        self._sending = asyncio.Lock()
        self._written = 0  # bytes
        self._held = b""  # frames that wait for more
        self._length: int | None = None  # of the frame that is being received
        self._owed = 0  # received bytes that have not taken their turn
        self._has_ended = self._is_told = False  # this side, and whether the other one can know
        self._other_has_ended = self._is_over = False

    @property
    def is_over(self) -> bool:
        """Return whether both sides have ended in good order."""
        return self._is_over

    async def send(self, data: bytes | bytearray | memoryview, more: bool = False) -> None:
        """Send one frame, and return when the system has taken it. Raises Closed, and ValueError above MAX_FRAME.

        :param more: whether another frame or the end follows soon: a small one then waits, to travel with it
        """
        view = memoryview(data).cast("B")
        if len(view) > MAX_FRAME:
            raise ValueError(f"a frame has {MAX_FRAME} bytes at most, not {len(view)}")
        async with self._sending:
            if self._has_ended:
                raise Closed("this side has ended")
            held, self._held = self._held, b""
            first = WRITE - len(held) - _LENGTH.size
            begins = b"".join((held, _LENGTH.pack(len(view)), view[:first]))
            if more and len(begins) <= MOST_HELD:
                self._held = begins
                return
            try:
                await self._write(begins)
                for start in range(first, len(view), WRITE):
                    await self._write(view[start : start + WRITE])
            except BaseException as error:  # a frame that was begun cannot be taken back
                self.close()
                if isinstance(error, OSError):
                    raise Closed(f"{self.peer} has closed the channel") from error
                raise

    async def receive(self, timeout: float) -> bytes:
        """The next frame. Raises Ended behind the last one, Closed where the stream broke or what came is no frame,
        and asyncio.TimeoutError; the frame may then still be received.

        :param timeout: s; the wait for our own cap on receiving is not part of it
        """
        if self._other_has_ended:
            raise Ended(f"{self.peer} has ended")
        owed, self._owed = self._owed, 0
        await self._line.down.turn(owed)
        try:
            return await asyncio.wait_for(self._frame(), timeout)
        except (Ended, asyncio.TimeoutError):  # the latter is an OSError since Python 3.11
            raise
        except (OSError, EOFError) as error:
            self.close()
            if isinstance(error, Closed):
                raise
            raise Closed(f"{self.peer} has closed the channel") from error

    async def end(self) -> None:
        """Send nothing more; the other side may. May be called again. Raises Closed."""
        async with self._sending:
            if self._has_ended:
                return
            self._has_ended = True
            try:
                await self._write(self._held + _LENGTH.pack(END))
            except OSError as error:
                raise Closed(f"{self.peer} has closed the channel") from error
            self._is_told = True
        self._settle()

    def _settle(self) -> None:
        """Give up the stream when both sides have ended."""
        if self._is_over or not (self._is_told and self._other_has_ended):
            return
        self._is_over = True
        if self._free is None:
            self._writer.close()
        else:
            self._free()

    def close(self) -> None:
        """End both directions at once; what is on its way may be lost. It does nothing when both have ended."""
        if not self._is_over:
            self._writer.transport.abort()

    async def finish(self) -> None:
        """End, and close when the other side has ended too, or does not within LINGER: to close before would take back
        what is on its way to it."""
        with suppress(OSError, asyncio.TimeoutError):
            await self.end()
            loop = asyncio.get_running_loop()
            until = loop.time() + LINGER
            while not self._other_has_ended:
                await self.receive(max(0.0, until - loop.time()))
            return
        self.close()

    async def _write(self, piece: bytes | memoryview) -> None:
        with self._line.up.writing(self.peer):
            await self._write_in_turn(piece)

    async def _write_in_turn(self, piece: bytes | memoryview) -> None:
        found = await self._line.window(self.peer, self._written >= SMALL)
        self._written += len(piece)
        if found is None:
            await self._write_now(piece, False)
        else:
            window, ping = found
            async with window.turn(len(piece), ping, self.urgency) as has_waited:
                await self._write_now(piece, has_waited)

    async def _write_now(self, piece: bytes | memoryview, blocked: bool) -> None:
        line, writer, transport = self._line, self._writer, self._writer.transport
        await line.up.turn(self.peer, len(piece))
        if transport.is_closing():
            raise Closed(f"{self.peer} has closed the channel")
        writer.write(piece)
        line.count.sent += len(piece)
        if transport.get_write_buffer_size():
            await asyncio.sleep(0)  # uvloop writes at the end of its iteration only
        must_wait = transport.get_write_buffer_size() > 0
        stalled = asyncio.get_running_loop().call_later(STALLED, transport.abort) if must_wait else None
        try:
            await writer.drain()
        finally:
            if stalled is not None:
                stalled.cancel()
        if transport.is_closing():
            raise Closed(f"{self.peer} has closed the channel")
        line.up.wrote(self.peer, len(piece), blocked or must_wait)

    async def _frame(self) -> bytes:
        if self._length is None:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            self._line.count.received += _LENGTH.size
            if length == END:
                self._other_has_ended = True
                self._settle()
                raise Ended(f"{self.peer} has ended")
            if length > MAX_FRAME:
                raise Closed(f"{self.peer} has announced a frame of {length} bytes")
            self._length = length
        data = await self._reader.readexactly(self._length)
        self._line.count.received += self._length
        self._owed, self._length = self._length + _LENGTH.size, None
        return data


async def request(
    peer: str,
    name: str,
    head: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    line: Line,
    token: bytes,
    show: Callable[[bytes], None],
    free: Callable[[], None],
) -> Channel:
    """The asker's channel on a stream that is new or free, once the other side has taken the request. Raises OSError,
    EOFError, and what `show` raises.

    :param token: ours; empty in an open run
    :param show: is given the other side's
    :param free: of Channel
    """
    named = name.encode()
    if len(named) > MAX_NAME or len(head) > MAX_HEAD:
        raise ValueError(f"a request has a name of {MAX_NAME} bytes and a head of {MAX_HEAD} at most")
    size = 1 + len(named) + len(head)
    first = b"".join((_TOKEN.pack(len(token)), token, _LENGTH.pack(size), bytes([len(named)]), named, head))
    writer.write(first)
    await writer.drain()
    (mark,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if mark != WELCOME:
        raise Closed(f"{peer} has not taken the request {name!r}")
    line.count.sent += len(first)
    line.count.received += _LENGTH.size
    show(await read_token_of(reader, line))
    return Channel(peer, head, reader, writer, line, free)


async def read_token_of(reader: asyncio.StreamReader, line: Line) -> bytes:
    """The token that the other side shows. Raises OSError and EOFError."""
    (size,) = _TOKEN.unpack(await reader.readexactly(_TOKEN.size))
    if size > MAX_TOKEN:
        raise Closed(f"a token of {size} bytes")
    line.count.received += _TOKEN.size + size
    return await reader.readexactly(size)


async def read_request(reader: asyncio.StreamReader, line: Line) -> tuple[str, bytes]:
    """The answering side, behind the token: a new stream's request -> (name, head). Raises OSError, EOFError and
    UnicodeDecodeError."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if not 0 < length <= 1 + MAX_NAME + MAX_HEAD:
        raise Closed(f"a request of {length} bytes")
    first = await reader.readexactly(length)
    line.count.received += _LENGTH.size + length
    size = first[0]
    if size > min(MAX_NAME, length - 1):
        raise Closed(f"a request's name of {size} bytes")
    return first[1 : 1 + size].decode(), first[1 + size :]


def welcome(writer: asyncio.StreamWriter, line: Line, token: bytes) -> None:
    """Tell the asker that its request was taken, and show our token."""
    writer.write(_LENGTH.pack(WELCOME) + _TOKEN.pack(len(token)) + token)
    line.count.sent += _LENGTH.size + _TOKEN.size + len(token)
