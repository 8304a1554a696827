"""Where peers and servers listen by themselves, and which names and addresses only a local network has."""

from __future__ import annotations

import errno
import os
import socket

EVERYWHERE = "::"  # all of this machine's addresses, IPv4 ones as well
LOCALHOST = "localhost"  # this machine's loopback addresses, of both families
LACKS_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)  # this machine has no address of a family
ATTEMPTS = 16  # to find a port that is free for both families
# both, since a machine that lacks one of them listens on the other without a word
LISTEN = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
# Names that no public server has (RFC 6761, 6762, 8375, and what routers and companies use).
PRIVATE_SUFFIXES = (
    "localhost", "local", "internal", "intranet", "lan", "home", "corp", "private", "localdomain", "home.arpa",
    "test", "invalid", "onion", "alt",
)  # fmt: skip
# Names under public endings by which home routers answer themselves, and what is beneath them.
ROUTER_NAMES = (
    "fritz.box", "fritz.nas", "speedport.ip", "easy.box", "o2.box", "kabel.box", "vodafone.box", "congstar.box",
    "arcor.easybox", "giga.cube", "routerlogin.net", "tplinkwifi.net", "router.asus.com", "orbilogin.com",
)  # fmt: skip


def is_private_name(host: str) -> bool:
    """Whether a name can be none of the internet's: without a dot, or under a name that is reserved for networks."""
    name = host.rstrip(".").lower()
    return "." not in name or name.endswith(tuple(f".{suffix}" for suffix in PRIVATE_SUFFIXES))


def is_router_name(host: str) -> bool:
    """Whether home routers answer to it themselves, or give it to what is connected to them. Elsewhere it may be
    anybody's: what it resolves to decides."""
    name = "." + host.rstrip(".").lower()
    return name.endswith(tuple(f".{known}" for known in ROUTER_NAMES))


def loopback() -> str:
    """This machine's address for itself: 127.0.0.1, or ::1 where there is no IPv4."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError:
        return "::1"
    return "127.0.0.1"


def loopback_maddr(port: int = 0) -> str:
    """A multiaddr on which this machine listens for itself. :param port: TCP; 0: any that is free"""
    address = loopback()
    return f"/{'ip6' if ':' in address else 'ip4'}/{address}/tcp/{port}"


def in_url(address: str) -> str:
    """An address or a name as a URL has it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def shown(host: str) -> str:
    """Where this machine's own browser finds a server that listens at `host`, as a URL has it."""
    return in_url(loopback() if host in ("", "0.0.0.0", EVERYWHERE, LOCALHOST) else host)


def family_of(address: str) -> socket.AddressFamily:
    """The family of an address; of a name that of IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(host: str, port: int, backlog: int = 128) -> list[socket.socket]:
    """Sockets at which a server listens from now on, one for each address.

    IPv4 and IPv6 have sockets of their own, so that those who call by IPv4 are known by their IPv4 addresses, and not
    by ::ffff:127.0.0.1, which is no loopback address to Python before 3.13.

    :param host: an address of this machine, or a name of it; EVERYWHERE (or ""): all its addresses; LOCALHOST
    :param port: 0: any that is free, the same for all
    Raises OSError, unless one address at least can be listened at and no other program has the port of another one;
    OverflowError for what is no port.
    """
    for _ in range(ATTEMPTS if port == 0 else 1):
        listening: list[socket.socket] = []
        try:
            missing = None
            for address in addresses_of(host):
                at = listening[0].getsockname()[1] if listening else port
                try:
                    listening.append(_listen(address, at, backlog))
                except OSError as error:
                    if error.errno not in LACKS_FAMILY:
                        raise
                    missing = error
            if listening:
                return listening
            raise missing or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        except OSError as error:
            for one in listening:
                one.close()
            if not (listening and port == 0 and error.errno == errno.EADDRINUSE):
                raise
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def addresses_of(host: str) -> list[str]:
    """The addresses at which a server listens that is told `host`. Raises OSError for a name that is not known."""
    if host in ("", EVERYWHERE):
        return ["0.0.0.0", EVERYWHERE]
    if host == LOCALHOST:
        return ["127.0.0.1", "::1"]
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(place[0]) for _, _, _, _, place in found))


def _listen(address: str, port: int, backlog: int) -> socket.socket:
    family = family_of(address)
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address, port))
        listening.listen(backlog)
    except BaseException:
        listening.close()
        raise
    return listening


def free_port() -> int:
    """A TCP port that is free now on loopback."""
    address = loopback()
    with socket.socket(family_of(address)) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
