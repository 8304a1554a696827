"""Where a peer listens by itself, and which names and addresses only a local network has."""

from __future__ import annotations

import socket

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


def everywhere() -> str:
    """Where a server listens for all of this machine's addresses: those of IPv4, or of IPv6 where there is no IPv4."""
    return "::" if loopback() == "::1" else "0.0.0.0"


def loopback_maddr(port: int = 0) -> str:
    """A multiaddr on which this machine listens for itself. :param port: TCP; 0: any that is free"""
    address = loopback()
    return f"/{'ip6' if ':' in address else 'ip4'}/{address}/tcp/{port}"


def in_url(address: str) -> str:
    """An address or a name as a URL has it: IPv6 in brackets."""
    return f"[{address}]" if ":" in address else address


def family_of(address: str) -> socket.AddressFamily:
    """The family of an address or a name that a server is to listen at; "" is all of this machine's IPv4."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def free_port() -> int:
    """A TCP port that is free now on loopback."""
    address = loopback()
    with socket.socket(family_of(address)) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
