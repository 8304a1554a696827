"""A `requests` session for servers of strangers: every wait ends, no redirect is followed unasked, and each connection
goes to an address that the session's policy allows."""

from __future__ import annotations

import http.client
import io
import time
from collections.abc import Callable
from typing import Any

import requests
import urllib3
from requests.utils import select_proxy

from volunteer_kit.http_client import Adapter, is_on_this_machine, no_netrc

from .addresses import ANY_ADDRESS, AddressPolicy


class Session(requests.Session):
    """Until `deadline` (time.monotonic()) an answer may take, with its headers. The timeouts of requests begin anew
    with every byte, so that a server that drips its headers, or endless "100 Continue", would hold us for ever.

    :param addresses: which servers may be connected to. Raises AddressRefused, a ValueError, for another one. Through
        a proxy of the environment, which makes the connection itself, the names are looked up and checked here first
    :ivar connected: IP address and port of the last connection; None where a proxy made it
    """

    def __init__(self, addresses: AddressPolicy = ANY_ADDRESS) -> None:
        super().__init__()
        self.deadline = 0.0
        self.addresses = addresses
        self.connected: tuple[str, int] | None = None
        if addresses.allows != "any" or addresses.is_foreign:
            self.auth = no_netrc  # else requests sends what ~/.netrc has for a host that a stranger names
        adapter = _Adapter(self)
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    def get_redirect_target(self, resp: requests.Response) -> None:
        """No redirect is followed here: requests would first read its body, which may have no end, into memory."""


class _Adapter(Adapter):
    def __init__(self, session: Session) -> None:
        self._session = session
        self._pools = _checked_pools(session)
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools

    def proxy_manager_for(self, proxy: str, **kwargs: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **kwargs)
        if not proxy.lower().startswith("socks"):
            manager.pool_classes_by_scheme = self._pools
        return manager

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        url = request.url or ""
        proxies = kwargs.get("proxies") or (args[4] if len(args) > 4 else None)
        if not is_on_this_machine(url) and select_proxy(url, proxies):
            self._session.addresses.check_through_proxy(url)
        else:
            self._session.addresses.check_url(url)
        return super().send(request, *args, **kwargs)


def _checked_pools(session: Session) -> dict[str, type]:
    class Response(http.client.HTTPResponse):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fp = io.BufferedReader(_Timed(self.fp.detach(), session))

    class Http(urllib3.connection.HTTPConnection):
        response_class = Response

        def connect(self) -> None:
            _connect(self, super().connect, session)

    class Https(urllib3.connection.HTTPSConnection):
        response_class = Response

        def connect(self) -> None:
            self.server_hostname = self.server_hostname or self.host  # of the certificate, while host is an address
            _connect(self, super().connect, session)

    class HttpPool(urllib3.HTTPConnectionPool):
        ConnectionCls = Http

    class HttpsPool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Https

    return {"http": HttpPool, "https": HttpsPool}


def _connect(connection: Any, connect: Callable[[], None], session: Session) -> None:
    """Look the host's name up once, and connect to one of those addresses that the policy allows."""
    session.connected = None
    if connection.proxy is not None:  # the volunteer's own; what it is asked for has been checked
        connect()
        return
    if session.addresses.allows == "any":
        connect()
    else:
        _connect_to_allowed(connection, connect, session.addresses)
    if connection.sock is not None:
        session.connected = connection.sock.getpeername()[:2]


def _connect_to_allowed(connection: Any, connect: Callable[[], None], addresses: AddressPolicy) -> None:
    name = connection.host
    try:
        allowed = addresses.resolve(name, connection.port)
    except OSError as error:
        message = f"Failed to resolve {name!r} ({error})"
        raise urllib3.exceptions.NewConnectionError(connection, message) from error
    for address in allowed:
        connection.host = address
        try:
            connect()
            return
        except (urllib3.exceptions.NewConnectionError, urllib3.exceptions.ConnectTimeoutError):
            if address == allowed[-1]:
                raise
        finally:
            connection.host = name  # what is sent as Host


class _Timed(io.RawIOBase):
    """What a socket receives, before the session's deadline."""

    def __init__(self, raw: io.RawIOBase, session: Session) -> None:
        self._raw, self._session = raw, session

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:
        if time.monotonic() > self._session.deadline:
            raise TimeoutError("the answer timed out")
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
