"""The authority as a process that serves: its socket, its certificate, its end."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from volunteer_kit.addressing import LOCALHOST, listen, shown
from volunteer_kit.auth.authority.settings import AuthorityError, is_loopback
from volunteer_kit.bounded_http import LOOPBACK, BoundedServer, HttpLimits

LIMITS = HttpLimits(header_bytes=32_768)
GRACE = 5  # s that requests under way have when it is ended
LOOKED_AT = 10  # ticks of 0.1 s after which a renewed certificate is noticed
_log = logging.getLogger(__name__)


def serve(
    app: FastAPI,
    *,
    host: str = LOCALHOST,
    port: int = 0,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    behind_proxy: bool = False,
    limits: HttpLimits = LIMITS,
    on_ready: Callable[[str], None] = lambda url: None,
    stop: threading.Event | None = None,
) -> None:
    """Until SIGTERM, Ctrl-C or `stop`; `on_ready` gets the address where it listens. Raises AuthorityError.

    `host`: as of addressing.listen.

    `behind_proxy`: one on this machine does TLS and tells who asks; without it, whoever asks is who is connected, for
    headers can be made up. A certificate that is renewed in its files is taken up while it serves.
    """
    is_tls = bool(tls_cert or tls_key)
    if is_tls and not (tls_cert and tls_key):
        raise AuthorityError("A certificate and its key go together: give both --tls-cert and --tls-key.")
    if not is_loopback(host) and not is_tls and not behind_proxy:
        raise AuthorityError(
            f"At {host} the authority would be reached over lines that are not encrypted, and logins pass there.\n"
            "1. Give it a certificate: --tls-cert FILE --tls-key FILE\n"
            "2. Or let a proxy on this machine do TLS, and say so: --behind-proxy"
        )
    listening = _listen(host, port)
    server = _Server(
        app,
        limits,
        on_ready=lambda: on_ready(url),
        stop=stop or threading.Event(),
        proxies=LOOPBACK if behind_proxy else frozenset(),
        log_config=_log_config(),
        timeout_graceful_shutdown=GRACE,
        ssl_certfile=str(tls_cert) if is_tls else None,
        ssl_keyfile=str(tls_key) if is_tls else None,
    )
    try:
        server.config.load()
    except (OSError, ssl.SSLError) as error:
        for one in listening:
            one.close()
        raise AuthorityError(f"The certificate {tls_cert} or its key {tls_key} cannot be used ({error}).") from None
    url = f"{'https' if is_tls else 'http'}://{shown(host)}:{listening[0].getsockname()[1]}"
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again when all is done
        server.run(sockets=listening)


class _Server(BoundedServer):
    def __init__(
        self, app: FastAPI, limits: HttpLimits, *, on_ready: Callable[[], None], stop: threading.Event, **options: Any
    ) -> None:
        super().__init__(app, limits, **options)
        config = self.config
        self._on_ready, self._stop = on_ready, stop
        self._files = (config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else ()
        self._loaded = _state(self._files)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def on_tick(self, counter: int) -> bool:
        if self._files and counter % LOOKED_AT == 0:
            self._renew()
        return await super().on_tick(counter) or self._stop.is_set()

    def _renew(self) -> None:
        state = _state(self._files)
        if state == self._loaded or state is None:  # None: a file is just being replaced
            return
        self._loaded = state
        try:
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.config.ssl):
                # the first is a trial: a certificate without its key would leave the one in use with neither
                context.load_cert_chain(*self._files, password="")  # or it would be asked for on the terminal
        except (OSError, ssl.SSLError) as error:
            _log.error("The renewed certificate %s cannot be used (%s): the old one stays.", self._files[0], error)
        else:
            _log.info("The certificate %s has been renewed.", self._files[0])


def _state(files: Sequence[str]) -> list[tuple[int, ...]] | None:
    """Differs once one of the files has been written or replaced; None if one is not there."""
    try:
        found = [os.stat(file) for file in files]
    except OSError:
        return None
    return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]


def _listen(host: str, port: int) -> list[socket.socket]:
    try:
        return listen(host, port)
    except OSError as error:
        raise AuthorityError(
            f"The authority cannot listen at {host}, port {port} ({error.strerror or error}).\n"
            "1. Look what has the port: ss -ltnp\n2. Choose another one: --port"
        ) from None


def _log_config() -> dict[str, object]:
    """uvicorn's, without a line for each request, good or bad: the Hub's answer to a sign-in stands in an address, and
    whoever sends garbage must not fill the host's disk. access_log=False alone leaves the lines to the root's handler.
    """
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["loggers"]["uvicorn.access"] = {"handlers": [], "level": logging.CRITICAL, "propagate": False}
    config["loggers"]["uvicorn.error"]["level"] = logging.ERROR
    return config
