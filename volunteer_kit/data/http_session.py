"""A `requests` session for servers that nobody vouches for: every wait ends, and no redirect is followed unasked."""

from __future__ import annotations

import http.client
import io
import time
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter


class Session(requests.Session):
    """Until `deadline` (time.monotonic()) an answer may take, with its headers. The timeouts of requests begin anew
    with every byte, so that a server that drips its headers, or endless "100 Continue", would hold us for ever."""

    def __init__(self) -> None:
        super().__init__()
        self.deadline = 0.0
        adapter = _Adapter(self)
        self.mount("http://", adapter)
        self.mount("https://", adapter)

    def get_redirect_target(self, resp: requests.Response) -> None:
        """No redirect is followed here: requests would first read its body, which may have no end, into memory."""


class _Adapter(HTTPAdapter):
    def __init__(self, session: Session) -> None:
        self._pools = _timed_pools(session)
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = self._pools


def _timed_pools(session: Session) -> dict[str, type]:
    class Response(http.client.HTTPResponse):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.fp = io.BufferedReader(_Timed(self.fp.detach(), session))

    class Http(urllib3.connection.HTTPConnection):
        response_class = Response

    class Https(urllib3.connection.HTTPSConnection):
        response_class = Response

    class HttpPool(urllib3.HTTPConnectionPool):
        ConnectionCls = Http

    class HttpsPool(urllib3.HTTPSConnectionPool):
        ConnectionCls = Https

    return {"http": HttpPool, "https": HttpsPool}


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
