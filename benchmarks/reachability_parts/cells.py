"""Machines as volunteers have them, in network namespaces, and what each has to find out about itself."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.netlab import Line, Netlab
from benchmarks.netlab_parts.kernel import hosts_of, ip, run

# Classic BPF programs on what arrives at a router that lets nobody in: a call (TCP's SYN without ACK) and all of UDP
# are dropped (2), all else goes on (-1).
CLOSED = {
    "ip4": (
        "11,40 0 0 12,21 0 8 2048,48 0 0 23,21 5 0 17,21 0 5 6,177 0 0 14,80 0 0 27,84 0 0 18,21 0 1 2,6 0 0 2,"
        "6 0 0 4294967295"
    ),
    "ip6": (
        "10,40 0 0 12,21 0 6 34525,48 0 0 20,21 5 0 17,21 0 3 6,48 0 0 67,84 0 0 18,21 1 0 2,"
        "6 0 0 4294967295,6 0 0 2"
    ),
}
HOMES = ("192.168.0.0/16", "100.64.0.0/10")
PORT = 4001  # of a cell's first machine


@dataclass(frozen=True)
class House:
    """One machine. `addresses` with their prefixes, all on one card; `routes` lead onto it; `closed`: families in which
    nobody can call it; `client_mode`: what it has to find; `has_ip4`: it has, be it on loopback only."""

    addresses: tuple[str, ...]
    routes: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()
    client_mode: bool = False
    has_ip4: bool = True


@dataclass(frozen=True)
class Cell:
    """A run: the first house has its first peer. Others are told its addresses: `first`, without port and id."""

    name: str
    words: str
    houses: tuple[House, ...]
    first: tuple[str, ...]
    names: Mapping[str, str] = field(default_factory=dict)  # of the network's own -> address


HOST4 = House(("45.77.0.1/24",), HOMES)
HOST = House(("45.77.0.1/24", "2a01:4f8:0:1::1/64"), (*HOMES, "2a01:4f8::/32"))
CELLS = (
    Cell(
        "dual_stack",
        "a dual-stack home behind a router, another whose router lets IPv6 in",
        (
            HOST,
            House(("192.168.31.2/24", "2a01:4f8:0:31::2/64"), ("45.77.0.0/24", "2a01:4f8::/32"), ("ip6",), True),
            House(("192.168.32.2/24", "2a01:4f8:0:32::2/64"), ("45.77.0.0/24", "2a01:4f8::/32")),
        ),
        ("/ip4/45.77.0.1", "/ip6/2a01:4f8:0:1::1"),
    ),
    Cell(
        "two_homes",
        "two dual-stack homes and a public host with IPv4 only",
        (
            HOST4,
            House(("192.168.31.2/24", "2a01:4f8:0:31::2/64"), ("45.77.0.0/24",), client_mode=True),
            House(("192.168.32.2/24", "2a01:4f8:0:32::2/64"), ("45.77.0.0/24",), client_mode=True),
        ),
        ("/ip4/45.77.0.1",),
    ),
    Cell(
        "local_names",
        "a home swarm whose first peer is known as server.local",
        tuple(House((f"192.168.1.{number}/24",)) for number in (10, 20, 21)),
        ("/dns4/server.local",),
        {"server.local": "192.168.1.10"},
    ),
    Cell(
        "ipv6_only",
        "machines without any IPv4, one of them behind a firewall",
        (
            House(("2a01:4f8:0:1::1/64",), ("2a01:4f8::/32",), has_ip4=False),
            House(("2a01:4f8:0:31::2/64",), ("2a01:4f8::/32",), ("ip6",), True, has_ip4=False),
            House(("2a01:4f8:0:32::2/64",), ("2a01:4f8::/32",), has_ip4=False),
        ),
        ("/ip6/2a01:4f8:0:1::1",),
    ),
    Cell(
        "carrier_grade_nat",
        "two lines behind a carrier-grade NAT and a public host",
        (
            HOST4,
            House(("100.64.7.2/24",), ("45.77.0.0/24",), client_mode=True),
            House(("100.64.9.2/24",), ("45.77.0.0/24",), client_mode=True),
        ),
        ("/ip4/45.77.0.1",),
    ),
    Cell(
        "firewall",
        "two machines on public addresses, one of them behind a firewall",
        (HOST4, House(("45.77.0.2/24",), closed=("ip4",), client_mode=True), House(("45.77.0.3/24",))),
        ("/ip4/45.77.0.1",),
    ),
)


@contextlib.contextmanager
def machines(cell: Cell) -> Iterator[list[str]]:
    """The namespaces of a cell's houses. Raises NoNetlab on entering."""
    with Netlab([Line()] * len(cell.houses)) as lab:
        try:
            for number, house in enumerate(cell.houses, start=1):
                _furnish(lab, number, house, cell.names)
            yield lab.machines
        finally:
            for name in lab.machines:
                shutil.rmtree(hosts_of(name).parent, ignore_errors=True)


def _furnish(lab: Netlab, number: int, house: House, names: Mapping[str, str]) -> None:
    name = lab.machines[number - 1]
    ip("-n", name, "addr", "flush", "dev", "line")
    if not house.has_ip4:
        ip("-n", name, "addr", "del", "127.0.0.1/8", "dev", "lo")
    for address in house.addresses:
        ip("-n", name, "addr", "add", address, "dev", "line", *(["nodad"] if ":" in address else []))
    for route in house.routes:
        ip("-n", name, *(["-6"] if ":" in route else []), "route", "replace", route, "dev", "line")
    if house.closed:
        run("tc", "-n", name, "qdisc", "add", "dev", "line", "clsact")
    for priority, family in enumerate(house.closed, start=1):
        only = ["bpf", "direct-action", "bytecode", CLOSED[family]]
        run("tc", "-n", name, "filter", "add", "dev", "line", "ingress", "prio", str(priority), *only)
    if names:
        own = hosts_of(name)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in names.items()))
