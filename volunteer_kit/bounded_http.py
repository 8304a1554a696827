"""HTTP servers that strangers reach: uvicorn behind a gate with deadlines for every phase of a connection.

uvicorn bounds the size of a request's headers and the idle time of a kept-alive connection, and nothing else: a client
may take forever for its headers, its TLS handshake, its body, or for reading an answer, and 2,000 such clients take
all places. hypercorn's read timeout begins anew with each byte; granian has a deadline for headers only; none of them
bounds the connections of an address. So this module accepts connections itself (asyncio's `sock_accept` and
`connect_accepted_socket`), gives each to uvicorn's own HTTP/1.1 protocol, and closes those that are overdue.

h11 parses, not httptools: h11 always comes with uvicorn, and only it bounds the size of headers.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"127.0.0.1", "::1"})
OTHER_FILES = 256  # descriptors for a database, logs, and connections to the Hub
QUEUE = 2048  # connections that the kernel holds until they are accepted
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
BURST = 2.0  # s of an address's pace that it may use at once
SLICE = 4096  # bytes that the parser gets at once
AT_ONCE = 16  # connections that are accepted before the others have their turn
PAUSE = 0.1  # s without accepting, when the machine has no descriptor left
_KEY = "volunteer_kit.connection"  # where a request's scope has its connection
Speak = Callable[[dict[str, Any]], Any]  # what the scopes of a connection's requests have -> its protocol
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HttpLimits:
    """Deadlines in seconds, sizes in bytes. No bound is on how long an answer streams to a client that reads it.

    :param connections: in total; fewer where the machine allows fewer open files
    :param per_address: connections, and requests under way, of one address (of IPv6, of one /64)
    :param requests_per_s: of one address; after a burst of two seconds' worth, its requests wait for their turn
    :param headers_within: from accept to complete headers, with the TLS handshake; each byte does not begin it anew
    :param body_within: from complete headers to the complete body
    :param keep_alive: that a connection is idle after an answer; its next headers then have `headers_within`
    :param stalled_within: that an answer may lie unread; every `bytes_per_s` bytes of it give one second more
    :param header_bytes: of one request's first line and headers together
    :param unsent_bytes: of answers that wait for their readers, in total
    """

    connections: int = 2000
    per_address: int = 200
    requests_per_s: float = 100.0
    headers_within: float = 10.0
    body_within: float = 20.0
    keep_alive: float = 15.0
    stalled_within: float = 30.0
    bytes_per_s: float = 4096.0
    header_bytes: int = 16_384
    unsent_bytes: int = 64 * 2**20


def household(address: str) -> str:
    """The part of an address that one customer has whole: of IPv6 the /64. "?" if it is no address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "?"
    mapped = getattr(found, "ipv4_mapped", None)
    if found.version == 6 and mapped is None:
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(mapped or found)


class BoundedServer(uvicorn.Server):
    """A uvicorn server for an application that strangers reach. Run it with `run(sockets=[listening])`.

    :param proxies: addresses of reverse proxies. Their connections are many people's, so the bound per address does
        not count them; it counts the requests under way of each address that they name in X-Forwarded-For.
    :param options: of uvicorn.Config
    """

    def __init__(
        self, app: ASGIApp, limits: HttpLimits, *, proxies: frozenset[str] = frozenset(), **options: Any
    ) -> None:
        self._gate = Gate(app, limits, proxies)
        super().__init__(
            uvicorn.Config(
                self._gate.handle,
                http="h11",
                ws="none",
                loop="asyncio",  # uvloop, if some package brought it, would be taken instead
                lifespan="off",
                access_log=False,
                server_header=False,
                proxy_headers=bool(proxies),
                forwarded_allow_ips=",".join(sorted(proxies)),
                interface="asgi3",
                timeout_keep_alive=limits.keep_alive,  # type: ignore[arg-type]  # it may be a part of a second
                h11_max_incomplete_event_size=limits.header_bytes,
                **options,
            )
        )
        self._accepting: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # it shall accept nothing itself
        for listening in sockets or ():
            listening.setblocking(False)
            listening.listen(QUEUE)
            self._accepting.append(asyncio.create_task(self._accept(listening)))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._gate.close()
        await super().shutdown(sockets)

    async def _accept(self, listening: socket.socket) -> None:
        loop, told = asyncio.get_running_loop(), float("-inf")
        for number in itertools.count(1):
            try:
                accepted, address = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    self._gate.drop_idlest()
                    if time.monotonic() - told > 60:
                        told = time.monotonic()
                        _log.error("No connection can be accepted just now: %s.", error.strerror)
                    await asyncio.sleep(PAUSE)
                continue
            self._gate.admit(accepted, str(address[0]), self._speak, self.config.ssl)
            if number % AT_ONCE == 0:  # sock_accept does not wait while there are more
                await asyncio.sleep(0)

    def _speak(self, state: dict[str, Any]) -> Any:
        """uvicorn's protocol for one connection. `state`: what the scope of each of its requests has."""
        how: Any = self.config.http_protocol_class
        return how(config=self.config, server_state=self.server_state, app_state=state)


class Gate:
    """The connections of a server: who may come in, and who has to go. Belongs to one event loop.

    A connection is *waiting* while it has no complete request: before and in its TLS handshake, its headers and its
    body, and after an answer. Only those have a deadline, and when there is no room, the one that waits longest goes.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits, proxies: frozenset[str] = frozenset()) -> None:
        self.limits = limits
        self.connections = min(limits.connections, max(8, _raise_file_limit(limits.connections) - OTHER_FILES))
        self._app, self._proxies = app, proxies
        self._all: set[Connection] = set()
        self._by_household: dict[str, set[Connection]] = {}
        self._waiting: dict[Connection, None] = {}  # the one that waits longest is first
        self._unsent: dict[Connection, None] = {}  # with an answer that has not been read
        self._under_way: Counter[str] = Counter()  # requests, by the household that asks
        self._due: dict[str, float] = {}  # monotonic s, when a household would be done if it kept its pace
        self._sweeping: asyncio.TimerHandle | None = None

    def admit(self, accepted: socket.socket, address: str, speak: Speak, tls: ssl.SSLContext | None = None) -> None:
        """Serve a connection that was just accepted; close it if its address has too many that are all busy."""
        home = "" if address in self._proxies else household(address)
        if not self._make_room(home):
            accepted.close()
            return
        connection = Connection(self, accepted, home, speak)
        self._all.add(connection)
        self._by_household.setdefault(home, set()).add(connection)
        self.waits(connection, self.limits.headers_within)
        connection.open(tls)
        if self._sweeping is None:
            self._sweep()

    def _make_room(self, home: str) -> bool:
        mine = self._by_household.get(home, set())
        if home and len(mine) >= self.limits.per_address:
            idlest = min((one for one in mine if one in self._waiting), key=lambda one: one.since, default=None)
            if idlest is None:
                return False
            idlest.abort()
        if len(self._all) >= self.connections:
            self.drop_idlest()  # if all are busy, the newcomer's request is answered with 503
        return True

    def drop_idlest(self) -> None:
        """Close the connection that has been without a complete request for longest."""
        if self._waiting:
            next(iter(self._waiting)).abort()

    def close(self) -> None:
        """End the connections that are not uvicorn's yet."""
        for connection in list(self._waiting):
            if connection.transport is None:
                connection.abort()

    # --- what a connection reports ---

    def waits(self, connection: Connection, within: float) -> None:
        """From now on; it goes unless a complete request is there in time."""
        if connection not in self._all:
            return
        self._waiting.pop(connection, None)
        self._waiting[connection] = None
        connection.since = time.monotonic()
        connection.deadline = connection.since + within

    def is_busy(self, connection: Connection) -> None:
        """It has a complete request, which takes as long as it takes."""
        self._waiting.pop(connection, None)

    def leaves(self, connection: Connection) -> None:
        if connection not in self._all:
            return
        self._all.remove(connection)
        mine = self._by_household[connection.home]
        mine.remove(connection)
        if not mine:
            del self._by_household[connection.home]
        self._waiting.pop(connection, None)
        self._unsent.pop(connection, None)

    def wrote(self, connection: Connection, size: int) -> None:
        """`size` more bytes of an answer were handed to the transport."""
        if connection not in self._unsent:
            if not connection.unsent or connection not in self._all:
                return
            connection.unsent_since, connection.written = time.monotonic(), 0
            self._unsent[connection] = None
        connection.written += size
        if size > 4096:
            self._bound_unsent()

    def _bound_unsent(self) -> None:
        """The answers that lie unread for longest go first."""
        total = sum(one.unsent for one in self._unsent)
        for connection in list(self._unsent):
            if total <= self.limits.unsent_bytes:
                return
            total -= connection.unsent
            connection.abort()

    def _sweep(self) -> None:
        """Close what is overdue; again in a moment, while there are connections."""
        now, limits = time.monotonic(), self.limits
        for connection in list(self._unsent):
            if not connection.unsent:
                del self._unsent[connection]
                if connection in self._waiting:  # its answer was still on the way
                    self.waits(connection, limits.keep_alive + limits.headers_within)
            elif now - connection.unsent_since > limits.stalled_within + connection.written / limits.bytes_per_s:
                connection.abort()
        for connection in list(self._waiting):
            if connection not in self._unsent and now > connection.deadline:
                connection.abort()
        self._due = {home: due for home, due in self._due.items() if due > now}
        self._sweeping = None
        if self._all:
            shortest = min(limits.headers_within, limits.body_within, limits.keep_alive, limits.stalled_within)
            self._sweeping = asyncio.get_running_loop().call_later(min(1.0, shortest / 4), self._sweep)

    # --- ASGI ---

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, which notes how far each request is."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request = _Request(self, scope["state"].pop(_KEY), scope)
        home = household(scope["client"][0] if scope["client"] else "")
        is_full = len(self._all) - len(self._waiting) > self.connections
        if is_full or self._under_way[home] >= self.limits.per_address:
            return await _too_many(request.sender(send))
        scope["headers"] = list(_cheap(scope["headers"]))
        self._under_way[home] += 1
        try:
            await self._turn(home)
            await self._app(scope, request.receiver(receive), request.sender(send))
        finally:
            request.is_answered()
            self._under_way[home] -= 1
            if not self._under_way[home]:
                del self._under_way[home]

    async def _turn(self, home: str) -> None:
        """Wait until the address may ask again: the generic cell rate algorithm (ITU-T I.371)."""
        now = time.monotonic()
        due = max(now, self._due.get(home, now)) + 1 / self.limits.requests_per_s
        self._due[home] = due
        if (early := due - now - BURST) > 0:
            await asyncio.sleep(early)


class Connection(asyncio.Protocol):
    """One accepted socket: it passes all on to uvicorn's protocol, and can be closed in any phase."""

    def __init__(self, gate: Gate, accepted: socket.socket, home: str, speak: Speak) -> None:
        self.home = home
        self.transport: asyncio.Transport | None = None
        self.since = self.deadline = 0.0  # monotonic s, while it is waiting
        self.unsent_since, self.written = 0.0, 0
        self._gate, self._accepted = gate, accepted
        self._inner = speak({_KEY: self})
        self._opening: asyncio.Task[Any] | None = None

    @property
    def unsent(self) -> int:
        """Bytes of answers that the other side has not taken."""
        return self.transport.get_write_buffer_size() if self.transport else 0

    def open(self, tls: ssl.SSLContext | None) -> None:
        # asyncio refuses the timeout without TLS; with it, its own default is a minute
        handshake = {"ssl": tls, "ssl_handshake_timeout": self._gate.limits.headers_within} if tls else {}
        loop = asyncio.get_running_loop()
        opening = loop.connect_accepted_socket(lambda: self, self._accepted, **handshake)
        self._opening = loop.create_task(opening)
        self._opening.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception():  # it was dropped, speaks no TLS, or not in time
            self._gate.leaves(self)
            self._accepted.close()

    def abort(self) -> None:
        """Close it now; what was not sent is lost."""
        self._gate.leaves(self)
        if self.transport is not None:
            self.transport.abort()
        elif self._opening is not None:
            self._opening.cancel()

    def is_idle(self) -> None:
        """It has its answer, and may ask again."""
        self._gate.waits(self, self._gate.limits.keep_alive + self._gate.limits.headers_within)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        # h11 bounds the headers that are not complete yet; of a read of 256 kB it would take all of them at once.
        for begin in range(0, len(data), SLICE):
            if not self.transport.is_closing():
                self._inner.data_received(data[begin : begin + SLICE])

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leaves(self)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class _Request:
    """How far one request is: its body, and its answer."""

    def __init__(self, gate: Gate, connection: Connection, scope: Scope) -> None:
        self._gate, self._connection, self._answered = gate, connection, False
        names = dict(scope["headers"])
        if names.get(b"content-length", b"0").strip(b"0") or b"transfer-encoding" in names:
            gate.waits(connection, gate.limits.body_within)
        else:
            gate.is_busy(connection)

    def receiver(self, receive: Receive) -> Receive:
        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body") and not self._answered:
                self._gate.is_busy(self._connection)
            return message

        return received

    def sender(self, send: Send) -> Send:
        async def sent(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body":
                self._gate.wrote(self._connection, len(message.get("body", b"")))
                if not message.get("more_body"):
                    self.is_answered()

        return sent

    def is_answered(self) -> None:
        """The connection is idle again, if it is still there."""
        if not self._answered:
            self._answered = True
            self._connection.is_idle()


def _cheap(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Without what takes a time that grows with the square of its length, and what no page of the kit needs: ranges
    (old Starlettes, CVE-2025-62727), and quoted cookies (Python before 3.12.6, CVE-2024-7592: 30 kB took 5 s, in which
    nobody else was served)."""
    for name, value in headers:
        if name == b"cookie" and b'"' in value:
            yield name, b";".join(one for one in value.split(b";") if b'"' not in one)
        elif name != b"range":
            yield name, value


async def _too_many(send: Send) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"retry-after", b"5"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": b"Too many requests at once from this address.\n"})


def _raise_file_limit(connections: int) -> int:
    """Let this process open as many files as it needs, or as it may. :returns: how many it may"""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
