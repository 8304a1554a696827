"""Which addresses this machine connects to for a run that somebody else wrote.

The check is made on the address that is really connected to, after every look-up of a name and on every redirect, so
that a name that resolves to something else the second time (DNS rebinding) gains nothing.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import idna
import psutil

from volunteer_kit.addressing import is_private_name

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address
# Ports from 1024 on that browsers refuse (fetch.spec.whatwg.org, "bad port"): services that speak no HTTP.
BAD_PORTS = frozenset(
    {1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6679, 6697, 10080, *range(6665, 6670)}
)


class AddressRefused(ValueError):
    """An address that a run from a link may not name; the message says which and why, in one line."""


@dataclass(frozen=True)
class AddressPolicy:
    """Which servers may be connected to.

    :ivar allows: "any": the person who runs this chose the addresses; "public": addresses of the internet only;
        "loopback": this machine only
    :ivar endpoint: an IP address and a port that may be connected to although the address is not public
    :ivar is_foreign: somebody else chose the addresses, so that no login of this machine is sent there but the Hub's
        token to the Hub
    """

    allows: Literal["any", "public", "loopback"] = "any"
    endpoint: tuple[str, int] | None = None
    is_foreign: bool = False

    def check_url(self, url: str) -> None:
        """What can be said without a look-up: scheme, login, port, and a host that is an address or a private name.
        Raises AddressRefused."""
        if self.allows == "any":
            return
        host, port = host_and_port(url)
        literal = as_address(host)
        if literal is not None:
            self._require(literal, port, host)
        elif self.allows == "public" and self.endpoint is None and is_private_name(host):  # else the look-up tells
            raise AddressRefused(f"{host} is a name of this machine or its own network")
        is_endpoint = literal is not None and self._is_endpoint(literal, port)
        if self.allows == "public" and not is_web_port(port) and not is_endpoint:
            raise AddressRefused(f"port {port} of {host} is not one of a web server")

    def check_through_proxy(self, url: str) -> None:
        """Of a request that a proxy makes for us, which looks the name up once more: the name has to resolve to
        allowed addresses here, too, where it resolves here at all. Raises AddressRefused."""
        if self.allows == "any":
            return
        self.check_url(url)
        host, port = host_and_port(url)
        try:
            self.resolve(host, port)
        except OSError:  # behind some proxies no name resolves: the proxy alone reaches the internet
            if is_private_name(host) or self.allows == "loopback":
                raise AddressRefused(f"{host} is a name of this machine or its own network") from None

    def resolve(self, host: str, port: int) -> list[str]:
        """The addresses behind a name that may be connected to, the preferred one first. Raises AddressRefused if
        there is none, OSError if the name does not resolve."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        refusals: list[AddressRefused] = []
        allowed = []
        for address in addresses:
            try:
                self._require(ipaddress.ip_address(address), port, host)
                allowed.append(address)
            except AddressRefused as refusal:
                refusals.append(refusal)
        if not allowed:
            raise refusals[0] if refusals else OSError(f"{host} has no address")
        return allowed

    def _require(self, address: IPAddress, port: int, host: str) -> None:
        if self.allows == "any" or self._is_endpoint(address, port):
            return
        shown = host if host == str(address) else f"{host} ({address})"
        if self.allows == "loopback":
            if not _embedded(address).is_loopback:
                raise AddressRefused(f"{shown} is another machine")
        elif not is_public(address):
            raise AddressRefused(f"{shown} is an address of this machine or its own network")

    def _is_endpoint(self, address: IPAddress, port: int) -> bool:
        if self.endpoint is None:
            return False
        return (_embedded(address), port) == (_embedded(ipaddress.ip_address(self.endpoint[0])), self.endpoint[1])


ANY_ADDRESS = AddressPolicy()
PUBLIC_ONLY = AddressPolicy("public", is_foreign=True)


def host_and_port(url: str) -> tuple[str, int]:
    """Of an http(s) address. Raises AddressRefused: another scheme, a login in it, no host, no port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise AddressRefused(f"{url[:80]!r} is no address") from None
    if parts.scheme.lower() not in ("http", "https"):
        raise AddressRefused(f"{url[:80]!r} is not an http(s) address")
    if parts.username is not None or parts.password is not None:
        raise AddressRefused(f"the address of {host} holds a login")
    if not host or "\\" in parts.netloc or any(c <= " " or c == "\x7f" for c in url):
        raise AddressRefused(f"{url[:80]!r} is no address")
    if port is None:
        port = 443 if parts.scheme.lower() == "https" else 80
    return host, port


def without_login(text: str) -> str:
    """A text without the passwords of the addresses in it."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)


def web_address(url: str) -> str:
    """Scheme, host and port of an http(s) address that has nothing else, rebuilt in the form that browsers give as an
    origin: a name in lower case and IDNA, no port where it is the scheme's own, no slash at the end.
    Raises AddressRefused with the reason alone; a login in the address is not repeated there."""
    if any(c <= " " or c == "\x7f" for c in url):  # urlsplit() drops some of them
        raise AddressRefused("there is a space in it, or another sign that cannot be seen")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise AddressRefused("a bracket is not closed, or there is no IPv6 address in it") from None
    if parts.scheme not in ("http", "https"):
        raise AddressRefused("it does not begin with https://")
    if "@" in parts.netloc:
        raise AddressRefused("it holds a login, which everybody would see")
    if parts.path.strip("/") or "?" in url or "#" in url:
        raise AddressRefused("something follows the name: a path, a ? or a #")
    found = _NETLOC.fullmatch(parts.netloc)
    if found is None:
        raise AddressRefused("something follows the bracket of its IPv6 address that is no port")
    usual = 443 if parts.scheme == "https" else 80
    host, port = _name(found[1]), usual if found[2] is None else _port(found[2])
    return f"{parts.scheme}://{host}{'' if port == usual else f':{port}'}"


def web_link(url: str) -> str:
    """As web_address(), but a path, a query and a fragment may follow. These stay as they are, and have no spaces,
    quotes, angle brackets or backslashes."""
    start, host_on, rest = url.partition("://")
    end = next((index for index, sign in enumerate(rest) if sign in "/?#"), len(rest))
    if re.search(r"[\s\"<>`\\\x00-\x1f\x7f]", rest[end:]):
        raise AddressRefused("there is a space, a quote, an angle bracket or a backslash in it")
    return web_address(start + host_on + rest[:end]) + rest[end:]


_NETLOC = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::(.*))?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def _port(text: str) -> int:
    """Raises AddressRefused."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise AddressRefused("its port is not a number from 1 to 65535")
    return int(text)


def _name(host: str) -> str:
    """A host for a URL: an IP address, or a name as DNS has it. Raises AddressRefused."""
    if host.startswith("["):
        try:
            return f"[{ipaddress.IPv6Address(host[1:-1] if '%' not in host else '')}]"
        except ValueError:
            raise AddressRefused("there is no IPv6 address between the brackets") from None
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        pass
    try:
        name = (host if host.isascii() else idna.encode(host, uts46=True).decode()).lower().removesuffix(".")
    except idna.IDNAError:
        raise AddressRefused("its name is none that the internet's names (DNS) can hold") from None
    labels = name.split(".")
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)) or re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1]):
        raise AddressRefused("its name has other signs than letters, digits, dots and hyphens, or is no IP address")
    return name


def as_address(host: str) -> IPAddress | None:
    """An IP address in any spelling that a system's resolver takes: 127.0.0.1, 2130706433, 0x7f.1, ::1. None for a
    name. No look-up."""
    try:
        found = socket.getaddrinfo(host.rstrip("."), None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return ipaddress.ip_address(str(found[0][4][0]))
    except (OSError, ValueError, UnicodeError):
        return None


def is_public(address: IPAddress) -> bool:
    """Whether it is a single machine's on the internet, and not this one's. What an IPv6 address holds of IPv4
    (mapped, NAT64, 6to4, Teredo) counts as itself."""
    found = _embedded(address)
    is_odd = found.is_multicast or found.is_reserved or found.is_unspecified or getattr(found, "is_site_local", False)
    return found.is_global and not is_odd and str(found) not in _own_addresses()


def is_web_port(port: int) -> bool:
    """Whether a web server may be there: 80, 443, or a port from 1024 on that no other service is known for."""
    return port in (80, 443) or (1024 <= port <= 65535 and port not in BAD_PORTS)


def _embedded(address: IPAddress) -> IPAddress:
    """The IPv4 address inside an IPv6 one, else the address itself."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _own_addresses() -> set[str]:
    """Of this machine's network cards: a service that a firewall hides from others answers to these."""
    cards = psutil.net_if_addrs().values()
    return {card.address.partition("%")[0] for entries in cards for card in entries}
