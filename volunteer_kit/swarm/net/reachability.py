"""Find out whether other peers can call this machine, from its addresses and from peers of the run that try.

Both are judged for each address family by itself: a global IPv6 address on a card says nothing about a listener of
IPv4, nor about peers that have IPv4 only. A peer that wrongly takes itself for callable costs others their rounds; one
that wrongly takes itself for a client costs the swarm a reducer.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from volunteer_kit.addressing import is_private_name, is_router_name

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
FAMILIES: Mapping[str, str] = {"ip4": "IPv4", "ip6": "IPv6"}  # as multiaddrs name them -> in words
NAMES = {"dns": ("ip4", "ip6"), "dns4": ("ip4",), "dns6": ("ip6",), "dnsaddr": ("ip4", "ip6")}
RESOLVED_WITHIN = 3.0  # s for all names together; a resolver that is away would take half a minute
CARRIER_GRADE_NAT = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598
REACHED, NOT_REACHED = "reached", "not reached"  # what a peer answers that has tried


class Verdict(NamedTuple):
    """`client_mode`: this peer must only dial out; `why`, in words."""

    client_mode: bool
    why: str


class Place(NamedTuple):
    """Where a first peer is. `families`: by which it can be dialled; `is_local`: on this machine or its network."""

    maddr: str
    families: frozenset[str]
    is_local: bool
    is_here: bool = False  # on this machine

    @property
    def peer_id(self) -> str:
        return self.maddr.rpartition("/p2p/")[2]


@dataclass(frozen=True)
class Machine:
    """Families of this machine's addresses, those that lead nowhere (loopback, link-local) left out.

    `has`: there is an address; `calls`: it can call the internet, by IPv4 through any router, by IPv6 from a global
    address only; `listens`: other machines' calls are listened for; `public`: they are, at an address of the internet;
    `is_behind_carrier`: its provider shares one address among many lines.
    """

    has: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset()
    listens: frozenset[str] = frozenset()
    public: frozenset[str] = frozenset()
    is_behind_carrier: bool = False

    @property
    def in_words(self) -> str:
        """The situation, as one looks it up: "a home line with a public IPv6 address"."""
        if not self.has:
            return "a machine without a network"
        if self.is_behind_carrier:
            kind = "a line behind a carrier-grade NAT (100.64.0.0/10)"
            return f"{kind} with a public IPv6 address" if "ip6" in self.public else kind
        if self.has == {"ip6"}:
            return f"a machine with IPv6 only, {'public' if 'ip6' in self.public else 'of a local network'}"
        if "ip4" in self.public:
            return "a machine with a public IPv4 address" + (" and a public IPv6 one" if "ip6" in self.public else "")
        if "ip6" in self.public:
            return "a line with a private IPv4 address, behind a router, and a public IPv6 one"
        return "a machine with a private IPv4 address, behind a router"


# --- what addresses say ---


def families_here() -> frozenset[str]:
    """The address families on this machine's network cards, loopback included."""
    cards = psutil.net_if_addrs().values()
    found = (as_ip(entry.address) for card in cards for entry in card)
    return frozenset(_family(address) for address in found if address is not None)


def look_at_machine(host_maddrs: Sequence[str]) -> Machine:
    """By its network cards, and by where it is to listen."""
    cards = psutil.net_if_addrs().values()
    own = {address for card in cards for entry in card if (address := as_ip(entry.address)) is not None}
    leading = [address for address in own if not (address.is_loopback or address.is_link_local)]
    listened = [address for maddr in host_maddrs if (address := as_ip(host_of(maddr))) is not None]
    wide = {_family(address) for address in listened if address.is_unspecified}
    heard = [address for address in leading if _family(address) in wide or address in listened]
    return Machine(
        has=frozenset(map(_family, leading)),
        calls=frozenset(_family(address) for address in leading if address.version == 4 or address.is_global),
        listens=frozenset(map(_family, heard)),
        public=frozenset(_family(address) for address in heard if address.is_global),
        is_behind_carrier=any(address in CARRIER_GRADE_NAT for address in leading if address.version == 4),
    )


def find_places(maddrs: Iterable[str]) -> list[Place]:
    """Where first peers are. Names are looked up, all at once and within RESOLVED_WITHIN s."""
    maddrs = list(maddrs)
    found = resolve({host_of(maddr) for maddr in maddrs if kind_of(maddr) in NAMES and kind_of(maddr) != "dnsaddr"})
    return [place_of(maddr, found.get(host_of(maddr), ())) for maddr in maddrs]


def place_of(maddr: str, found: Collection[IPAddress] = ()) -> Place:
    """:param found: what its name resolves to; empty: it does not, or there is none

    A name is local if it resolves to local addresses only. One that only networks of their own know is so, too, if it
    does not resolve, or has one local address: its machine may have a global one of IPv6 beside it.
    """
    kind, host = kind_of(maddr), host_of(maddr)
    if kind not in NAMES:
        address = as_ip(host)
        families = frozenset({_family(address)}) if address is not None else frozenset({kind} & FAMILIES.keys())
        is_here = address is not None and address.is_loopback
        return Place(maddr, families, address is not None and not address.is_global, is_here)
    found = [address for address in found if _family(address) in NAMES[kind]]
    families = frozenset(map(_family, found)) or frozenset(NAMES[kind])
    local = [address for address in found if not address.is_global]
    if is_private_name(host) or is_router_name(host):
        is_local = bool(local) or not found
    else:
        is_local = bool(found) and len(local) == len(found)
    is_here = bool(found) and all(address.is_loopback for address in found)
    return Place(maddr, families, is_local, is_here)


def resolve(names: Collection[str], within: float = RESOLVED_WITHIN) -> dict[str, list[IPAddress]]:
    """Addresses of each name, in all families. A name that does not resolve in time is left out."""
    found: dict[str, list[IPAddress]] = {}

    def look_up(name: str) -> None:
        try:
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        addresses = {as_ip(str(entry[4][0])) for entry in entries}
        found[name] = [address for address in addresses if address is not None]

    threads = [threading.Thread(target=look_up, args=(name,), daemon=True) for name in names]
    until = time.monotonic() + within
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(found)


def by_addresses(machine: Machine, places: Sequence[Place]) -> Verdict:
    """What is to be taken for true while nobody has tried."""
    if is_local_swarm(machine, places):
        if machine.has and not machine.listens and not any(place.is_here for place in places):
            return Verdict(True, "this machine listens at no address that others could call")
        return Verdict(False, "the swarm is on this machine or its local network")
    needed = needed_family(machine, places)
    if needed in machine.public:
        return Verdict(False, f"this machine has a public address ({FAMILIES[needed]})")
    if machine.is_behind_carrier and needed == "ip4":
        return Verdict(True, "this machine is behind a carrier-grade NAT: it calls others, they cannot call it")
    if needed == "ip6" and needed in machine.calls:
        return Verdict(True, "the run is called by IPv6, and this machine does not listen there: it calls others")
    return Verdict(True, "this machine is behind a router: it calls others, they cannot call it")


def is_local_swarm(machine: Machine, places: Sequence[Place]) -> bool:
    """Are all first peers that this machine can call on local addresses? A home's first peer may have a public one of
    IPv6 beside them, which says nothing to a machine without."""
    callable_ = [place for place in places if place.is_local or place.families & machine.calls]
    return all(place.is_local for place in callable_ or places)


def needed_family(machine: Machine, places: Sequence[Place]) -> str:
    """By which this machine has to be callable: IPv4 where the run's first peers and this machine have it, for then
    many volunteers have nothing else (Colab's and Kaggle's machines have no IPv6)."""
    of_run = frozenset().union(*(place.families for place in places if not place.is_local))
    return "ip4" if "ip4" in of_run and (machine.calls != {"ip6"} or "ip6" not in of_run) else "ip6"


# --- what peers answer ---


def by_answers(
    guess: Verdict, machine: Machine, places: Sequence[Place], answers: Mapping[str, Sequence[str]]
) -> Verdict:
    """The verdict once peers have tried.

    :param answers: family -> what each asked peer said: REACHED, NOT_REACHED, or why it did not try
    """
    found = {family: majority(said) for family, said in answers.items()}
    if found.get("ip4"):
        return Verdict(False, "a peer of the run reached this machine by IPv4")
    if found.get("ip6"):
        if everybody_has(places, "ip6"):
            return Verdict(False, "a peer of the run reached this machine by IPv6")
        return Verdict(True, "others reach this machine by IPv6 only, and not all of this run have that")
    needed = needed_family(machine, places)
    if found.get(needed) is False:
        said = f"peers of the run tried to call this machine ({FAMILIES[needed]}) and did not reach it"
        return guess if guess.client_mode else Verdict(True, f"{said}: it calls others")
    return guess


def majority(answers: Sequence[str]) -> bool | None:
    """Whether more of those that tried reached this machine than did not. None: as many, or nobody tried; then its
    addresses decide. One that lies is outvoted, and alone costs no more than a wrong guess does."""
    reached, not_reached = answers.count(REACHED), answers.count(NOT_REACHED)
    return None if reached == not_reached else reached > not_reached


def summary(answers: Sequence[str]) -> str:
    """REACHED or NOT_REACHED, as most say; else why nobody tried."""
    found = majority(answers)
    if found is None:
        return next((said for said in answers if said not in (REACHED, NOT_REACHED)), "they contradict each other")
    return REACHED if found else NOT_REACHED


def everybody_has(places: Sequence[Place], family: str) -> bool:
    """Can each of the first peers be dialled by this family?"""
    peers = {place.peer_id for place in places if not place.is_local}
    return peers == {place.peer_id for place in places if not place.is_local and family in place.families}


# --- addresses ---


def kind_of(maddr: str) -> str:
    """The protocol of its host: ip4, ip6, dns4 ..."""
    parts = _without_zone(maddr)
    return parts[1] if len(parts) > 1 else ""


def host_of(maddr: str) -> str:
    """The address or the name that it begins with."""
    parts = _without_zone(maddr)
    return parts[2] if len(parts) > 2 else ""


def _without_zone(maddr: str) -> list[str]:
    """/ip6zone/eth0/ip6/fe80::1/... names a card first."""
    parts = maddr.split("/")
    return ["", *parts[3:]] if parts[1:2] == ["ip6zone"] else parts


def as_ip(text: str) -> IPAddress | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _family(address: IPAddress) -> str:
    return f"ip{address.version}"
