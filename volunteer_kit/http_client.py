"""Asking over HTTP: the one maker of sessions for what the kit itself asks, and words for a proxy that does not work.

This machine's own addresses are always asked without the environment's proxies: a login for an authority at 127.0.0.1
would otherwise leave the machine in clear, and the proxy's own 127.0.0.1 would be asked.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.utils import get_environ_proxies, select_proxy

CONNECT_WITHIN = 3.0  # s for a proxy to take a connection
SCHEMES = ("http", "https", "all")  # of http_proxy, https_proxy, all_proxy; each also in capitals
KINDS = ("http", "https", "socks4", "socks4a", "socks5", "socks5h")  # of proxies
LOOPBACK = ("localhost", "127.0.0.1", "::1", "127.0.0.0/8")  # for NO_PROXY; each library knows some of these forms


class Proxy(NamedTuple):
    """A proxy of the environment. `variable`: its name, "" where the system's settings have it; `value`: as it stands
    there, with a password perhaps, so it is never printed: `shown` is."""

    variable: str
    value: str

    @property
    def shown(self) -> str:
        """Without the password. A damaged value too gives none away, so all before the last @ counts as a login."""
        before, at, place = self.value.rpartition("@")
        scheme, slashes, login = before.rpartition("://")
        user, colon, _ = login.partition(":")
        text = f"{scheme}{slashes}{user}{':***' * bool(colon)}{at}{place}"
        return "".join(c for c in text if c.isprintable())[:200]

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port; None if the value is no address of a proxy."""
        text = self.value if "://" in self.value else f"http://{self.value}"
        try:
            parts = urlsplit(text)
            default = 1080 if parts.scheme.startswith("socks") else 443 if parts.scheme == "https" else 80
            found = (parts.hostname, parts.port or default) if parts.scheme in KINDS else None
        except ValueError:
            return None
        return found if found is not None and found[0] else None

    def trouble(self, reason: str, url: str) -> str:
        """In one line: `reason` is what the proxy does ("does not answer (Connection refused)")."""
        whose = f"that {self.variable} names" if self.variable else "of the system's settings"
        return f"the proxy {self.shown} {whose} {reason}, and {host_of(url)} would be asked through it"

    def way_out(self, url: str) -> str:
        """What to do, without a number."""
        unset = " ".join(self._names()) if self.variable else ""
        first = f"unset {unset}" if unset else "take it out of the system's settings"
        return f"{first}   (or, for this address alone: export NO_PROXY={host_of(url)})"

    def _names(self) -> list[str]:
        """All spellings of the variable that are set."""
        both = {self.variable.lower(), self.variable.upper()}
        return sorted(name for name in both if os.environ.get(name)) or [self.variable]


class ProxyTrouble(requests.exceptions.ProxyError):
    """The environment's proxy does not work, so nothing can be said of the server behind it. str() has the way out;
    `in_a_line` is for where it stands within a sentence."""

    def __init__(self, proxy: Proxy, reason: str, url: str, **about: Any) -> None:
        said = proxy.trouble(reason, url)
        self.proxy, self.in_a_line = proxy, f"{said}; {proxy.way_out(url)}"
        super().__init__(f"{said[0].upper()}{said[1:]}.\n1. {proxy.way_out(url)}", **about)


class Adapter(HTTPAdapter):
    """Asks this machine's own addresses without a proxy, and tells a proxy's trouble from a server's."""

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        """As HTTPAdapter's. Raises ProxyTrouble, and what HTTPAdapter raises."""
        url = request.url or ""
        proxies = {} if is_on_this_machine(url) else dict(proxies or {})
        value = select_proxy(url, proxies)
        if not value:
            return super().send(request, stream, timeout, verify, cert, proxies)
        proxy = Proxy(_variable_of(url, value), value)
        try:
            answer = super().send(request, stream, timeout, verify, cert, proxies)
        except requests.RequestException as error:
            if reason := _reason_of_proxy(error, proxy):
                raise ProxyTrouble(proxy, reason, url, request=request) from None
            raise
        if answer.status_code == 407:
            answer.close()
            raise ProxyTrouble(proxy, "asks for a login (HTTP 407)", url, request=request)
        return answer


def http_session() -> requests.Session:
    """For what the kit asks: without cookies of others, and without ~/.netrc, whose password a host could ask for.
    REQUESTS_CA_BUNDLE and the environment's proxies hold."""
    session = requests.Session()
    session.auth = no_netrc
    adapter = Adapter()
    session.mount("http://", adapter)
    session.mount("https://", adapter)
    return session


def no_netrc(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """A session's `auth` that adds nothing: without one, requests sends what ~/.netrc has."""
    return request


def host_of(url: str) -> str:
    with suppress(ValueError):
        return (urlsplit(url).hostname or url)[:100]
    return url[:100]


def is_loopback(host: str) -> bool:
    """Is it this machine's own name, or a loopback address?"""
    with suppress(ValueError):
        address = ipaddress.ip_address(host.partition("%")[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback
    return host.rstrip(".").lower() == "localhost"


def is_on_this_machine(url: str) -> bool:
    """Does the address lead to this machine, whatever stands in the environment?"""
    host = host_of(url)
    return is_loopback(host) or host in ("0.0.0.0", "::")


def proxy_for(url: str) -> Proxy | None:
    """Through which proxy of the environment `url` is asked, as requests and httpx see it; None: directly."""
    if is_on_this_machine(url):
        return None
    value = select_proxy(url, get_environ_proxies(url, no_proxy=None))
    return Proxy(_variable_of(url, value), value) if value else None


def proxies_named() -> list[Proxy]:
    """All proxies that the environment names, one a variable."""
    names = [name for scheme in SCHEMES for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY")]
    return [Proxy(name, os.environ[name]) for name in names if os.environ.get(name)]


def why_proxy_fails(proxy: Proxy, error: BaseException | None = None, within: float = CONNECT_WITHIN) -> str | None:
    """What the proxy does ("does not answer (...)"); None: it takes connections, so something else is to blame.

    :param error: what a client raised that was to ask through it
    """
    if proxy.address is None:
        return "is no address of a proxy, such as http://HOST:3128"
    if isinstance(error, ImportError) and "socks" in str(error).lower():
        return "speaks SOCKS, for which this Python lacks a package (pip install 'httpx[socks]' 'requests[socks]')"
    try:
        socket.create_connection(proxy.address, timeout=within).close()
    except OSError as refused:
        return f"does not answer ({_told(refused)})"
    if error is not None and type(error).__name__ == "ProxyError":
        return f"passes nothing on ({_plain(error)})"
    return None


def blamed_on_proxy(url: str, error: BaseException | None = None) -> ProxyTrouble | None:
    """For clients that are not ours, as the Hub's: the trouble of the proxy that `url` is asked through, looked for
    before the line or the server is blamed. It takes up to CONNECT_WITHIN s."""
    if isinstance(error, ProxyTrouble):
        return error
    if type(error).__name__ == "OfflineModeIsEnabled":  # the Hub's client was told not to ask
        return None
    proxy = proxy_for(url)
    reason = why_proxy_fails(proxy, error) if proxy is not None else None
    return ProxyTrouble(proxy, reason, url) if proxy is not None and reason else None


def retry_after(text: str | None, longest: float = 3600.0) -> float | None:
    """s that a server's Retry-After asks for, a number or a date (RFC 9110, 10.2.3), `longest` at most; None: it says
    nothing that could be read."""
    text = (text or "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text[:9]), longest)
    try:
        return max(0.0, min(parsedate_to_datetime(text).timestamp() - time.time(), longest))
    except (ValueError, OverflowError, TypeError):
        return None


def ask_loopback_directly() -> None:
    """In this process and in those that it starts, for libraries with HTTP clients of their own (huggingface_hub,
    datasets, fsspec): NO_PROXY gets this machine's own names, if a proxy is named at all."""
    if not proxies_named():
        return
    before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    there = [part.strip() for part in before.split(",") if part.strip()]
    if "*" not in there:
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys([*there, *LOOPBACK]))


def _variable_of(url: str, value: str) -> str:
    scheme = url.partition(":")[0].lower()
    names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY", "all_proxy", "ALL_PROXY")
    wanted = value.partition("://")[2] or value  # requests puts http:// before a value without a scheme
    found = (name for name in names if (one := os.environ.get(name)) and (one.partition("://")[2] or one) == wanted)
    return next(found, "")


def _reason_of_proxy(error: requests.RequestException, proxy: Proxy) -> str | None:
    is_socks = proxy.value.lower().startswith("socks")
    if isinstance(error, requests.exceptions.InvalidProxyURL) or proxy.address is None:
        return "is no address of a proxy, such as http://HOST:3128"
    if isinstance(error, requests.exceptions.InvalidSchema) and "SOCKS" in str(error):
        return "speaks SOCKS, for which this Python lacks a package (pip install 'requests[socks]')"
    if isinstance(error, requests.exceptions.ConnectTimeout):
        return "does not answer in time"
    if isinstance(error, requests.exceptions.ReadTimeout):
        return "passes no answer on in time"
    if isinstance(error, requests.exceptions.SSLError):
        return None
    if isinstance(error, requests.exceptions.ProxyError) or (is_socks and isinstance(error, requests.ConnectionError)):
        inner = next(_system_errors(error), None)
        tunnel = "tunnel" in str(inner).lower()
        return f"{'passes nothing on' if tunnel else 'does not answer'} ({_told(inner) if inner else _plain(error)})"
    return None


def _system_errors(error: BaseException) -> Iterator[OSError]:
    """Those of the system inside a nested error, the innermost first."""
    seen: list[Any] = [error]
    for one in seen:
        inner = [*getattr(one, "args", ()), getattr(one, "reason", None), getattr(one, "original_error", None)]
        inner += [getattr(one, "__cause__", None), getattr(one, "__context__", None)]
        seen += [each for each in inner if isinstance(each, BaseException) and each not in seen][:10]
        if len(seen) > 40:
            break
    own = (one for one in reversed(seen) if isinstance(one, OSError) and not type(one).__module__.startswith("req"))
    yield from own


def _told(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return error.strerror or _plain(error)


def _plain(error: BaseException) -> str:
    """A clause of an error's text, without what could be a login."""
    text = re.sub(r"\S*@", "", str(error).partition("\n")[0])
    return "".join(c for c in text if c.isprintable())[:120] or type(error).__name__
