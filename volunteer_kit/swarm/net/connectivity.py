"""Find out whether this peer can reach the swarm, and remember addresses to dial when the first peers are gone.

p2pd takes half a minute to notice that a line is dead and never dials again by itself; the DHT forgets peers that do
not answer, and after a longer outage it knows none. So this module asks a peer every few seconds, and while none
answers it dials the first peers and those met since.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from hivemind.dht import DHT
from hivemind.dht.node import DHTNode
from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import read_pbmsg_safe, write_pbmsg
from hivemind.proto import dht_pb2, p2pd_pb2
from hivemind.utils import get_dht_time
from hivemind.utils.logging import get_logger
from hivemind.utils.multiaddr import Multiaddr

from volunteer_kit.addressing import is_private_name
from volunteer_kit.swarm.net.access.control import NotAdmitted
from volunteer_kit.swarm.net.clock_watch import ClockWatch
from volunteer_kit.swarm.net.reachability import as_ip, host_of, kind_of

logger = get_logger(__name__)
PERIOD, PERIOD_SILENT = 5.0, 2.0  # s between looks: while somebody answers, and while nobody does
ANSWER_WITHIN = 4.0  # s; two busy cores and a full home link answer slower than 1 s at times
HANG_UP_AFTER = 4  # looks in a row without an answer: a busy machine alone is slow to answer too
ASKED_AT_ONCE = 4  # peers
DIALLED_AT_ONCE = 8  # addresses
PINGED_AT_ONCE = 16  # peers that are connected, when the DHT knows none of them
MAX_KNOWN = 50  # addresses that are remembered
MAX_ADDRESS = 300  # characters
GIVE_UP_AFTER = 180.0  # s without anybody
NOBODY = "Nobody in the swarm answers, neither its first peers nor any other: is this machine online?"


@dataclass
class Look:
    """What one look found. `answered`: a peer did; `refused`: a machine did whose peer is gone, so our line works;
    `silent`: addresses where nothing did; `known`: addresses of peers that are here now; `offset`: s that the clock of
    one of them is ahead of ours, None if none told its time."""

    answered: bool = False
    refused: bool = False
    silent: list[str] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    offset: float | None = None


class Reach:
    """Looks around in a thread of its own, from the process that trains.

    :param dht: a running DHT; its initial_peers are dialled again after an outage
    :param alone_after: s of silence after which whoever was told of others takes them for gone; None: never
    :param clock: this machine's
    :ivar ask_cause: why others will not have us, if that lies with us (our access token has ended), in words
    """

    def __init__(self, dht: DHT, alone_after: float | None = None, clock: ClockWatch | None = None):
        self.ask_cause: Callable[[], str | None] = lambda: None
        self._clock = clock or ClockWatch()
        self._dht, self._alone_after = dht, alone_after
        self._first = tuple(str(maddr) for maddr in dht.initial_peers or ())
        self._known: dict[str, None] = {}  # addresses of peers met, the latest last
        self._met = bool(self._first)  # anybody, ever: start_peer fails unless one of the first peers answers
        self._answered_at = time.monotonic() if self._first else float("-inf")
        self._waited_until = float("-inf")  # time.monotonic(): until then the cause lay with this machine
        self._silent_looks = 0  # in a row
        self._may_be_alone = not self._first
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="reach", daemon=True)
        self._thread.start()

    @property
    def cut_off(self) -> str | None:
        """Why we are out of the swarm's reach, in words; None if we are not, or nobody is there to be reached."""
        if self._may_be_alone:
            return None
        if wrong := self._wrong_clock:
            return wrong
        if self._silent_looks < 2:
            return None
        return self.local_cause or NOBODY

    @property
    def local_cause(self) -> str | None:
        """Why nobody answers, in words, where the cause is this machine's; looked for before the line is blamed."""
        return self._wrong_clock or self.ask_cause() or self._clock.woke

    @property
    def waits_for_itself(self) -> bool:
        """Is it cut off for what a new start would not mend: a wrong clock, or an authority that gives no token?"""
        return self._wrong_clock is not None or self.ask_cause() is not None

    @property
    def why_afresh(self) -> str:
        """Why the process should begin afresh now, in words; "" while there is no reason."""
        return self._clock.why_afresh if self._met else ""

    @property
    def woke(self) -> str | None:
        """That this machine has slept, in words, for a minute after it; None otherwise."""
        self._clock.look()
        return self._clock.woke if self._met else None

    @property
    def why_anew(self) -> str:
        """Why this peer should leave the swarm and come back, in words; "" where that would mend nothing."""
        return why_anew(self.cut_off, self.cut_off_for, self.waits_for_itself, self.why_afresh)

    @property
    def _wrong_clock(self) -> str | None:
        """In words; whoever has met nobody needs no right clock."""
        return self._clock.look() if self._met else None

    @property
    def cut_off_for(self) -> float:
        """s since somebody last answered, or since the cause no longer lay with this machine; 0 unless cut off."""
        if not self.cut_off:
            return 0.0
        return time.monotonic() - self._silent_since()

    def _silent_since(self) -> float:
        """By time.monotonic()."""
        if self.waits_for_itself:
            self._waited_until = time.monotonic()
        return max(self._answered_at, self._waited_until)

    def is_there(self, peers: Collection[PeerID]) -> bool:
        """Does any of these answer? It takes seconds if none does."""
        if not peers:
            return False
        try:
            asked = partial(does_any_answer, peers=tuple(peers))
            return self._dht.run_coroutine(asked, return_future=True).result(timeout=2 * ANSWER_WITHIN)
        except Exception as e:
            logger.info(f"Could not ask whether they are there: {e!r}")
            return False

    def known_peers(self) -> list[str]:
        """Addresses of peers that were here lately and take calls, the latest first, MAX_KNOWN at most: initial_peers
        for a restart."""
        return list(reversed(self._known))

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(timeout=ANSWER_WITHIN)

    def _run(self) -> None:
        while True:
            self._wake.wait(PERIOD_SILENT if self._silent_looks and not self._may_be_alone else PERIOD)
            self._wake.clear()
            if self._stop.is_set():
                return
            self._look()

    def _look(self) -> None:
        began, found = time.monotonic(), None
        addresses = [*self._first, *reversed(self._known)]
        look = partial(look_around, addresses=addresses, hang_up=self._silent_looks >= HANG_UP_AFTER)
        try:
            found = self._dht.run_coroutine(look, return_future=True).result(timeout=6 * ANSWER_WITHIN)
        except Exception as e:  # it takes too long, or the DHT has ended
            logger.info(f"Could not look around: {e!r}")
        self._take(found, began)

    def _take(self, found: Look | None, began: float) -> None:
        """:param found: None: it was not possible to look, which is no sign that nobody is there"""
        now = time.monotonic()
        could_look, found = found is not None, found or Look()
        if found.answered:
            self._met, self._silent_looks = True, 0
            self._answered_at = began  # as of when it was asked
            if found.offset is not None:
                self._clock.look()
                self._clock.heard(found.offset)
        else:
            self._silent_looks += 1
        there = could_look and (found.refused or not found.silent) and not self.waits_for_itself
        if not found.answered and not self._first:
            self._clock.believe_unless_denied()  # nobody is there who could say that the clock is right
        gone = self._alone_after is not None and now - self._silent_since() > self._alone_after
        gone = gone and not self.waits_for_itself
        self._may_be_alone = not found.answered and (gone or not self._first and (there or not self._met))
        if self._silent_looks == 2 and (why := self.cut_off):
            logger.warning(f"{why} Silent: {', '.join(found.silent)}")
        known = {address: None for address in self._known if address not in found.known}
        known.update(dict.fromkeys(found.known))
        self._known = dict.fromkeys(list(known)[-MAX_KNOWN:])


def why_anew(cut_off: str | None, seconds: float, waits_for_itself: bool, why_afresh: str) -> str:
    """Why a new start would mend what parts a peer from its swarm, in words; "" if it would not.

    :param cut_off: as Reach has it; `seconds`: cut_off_for; `waits_for_itself`, `why_afresh` as well
    """
    if why_afresh:
        return why_afresh
    is_long = seconds > GIVE_UP_AFTER and not waits_for_itself
    return (cut_off or "Nobody in the swarm has answered for minutes.") if is_long else ""


# --- in the DHT's process ---


async def look_around(dht: DHT, node: DHTNode, addresses: Sequence[str], hang_up: bool = False) -> Look:
    """Ask those who are connected; if none answers, dial `addresses` (multiaddrs with peer ids, best first).

    :param hang_up: what p2pd still takes for connections are dead; with them all calls end that use them
    """
    connected = [info.peer_id for info in await node.p2p.list_peers()]
    asked = random.sample(connected, min(ASKED_AT_ONCE, len(connected)))
    offsets: list[float] = []
    if await _first_true(answers(node, peer, offsets) for peer in asked):
        await _remember_somebody(node, connected, addresses)
        known = await _dialable(node, connected)
        return Look(answered=True, known=known, offset=sorted(offsets)[len(offsets) // 2] if offsets else None)
    tried = random.sample(addresses[DIALLED_AT_ONCE // 2 :], min(DIALLED_AT_ONCE // 2, max(0, len(addresses) - 4)))
    tried = [*addresses[: DIALLED_AT_ONCE // 2], *tried]
    ends = dict(zip(tried, await asyncio.gather(*(_dial(node, address, hang_up) for address in tried)), strict=True))
    found = Look(answered="answered" in ends.values(), refused=is_refused(ends))
    found.silent = [address for address in tried if ends[address] == "silent"]
    if found.answered:
        await _fill_routing_table(node)
    return found


async def _remember_somebody(node: DHTNode, connected: Sequence[PeerID], addresses: Sequence[str]) -> None:
    """The DHT forgets whoever was too late with an answer. Who was suspended for some seconds had them all too late: it
    is connected to everybody then, and asks nobody any more.

    :param addresses: of those that take its calls, as far as we have met them; most of the connected may be clients
    """
    remembered = node.protocol.routing_table.uid_to_peer_id.values()
    if any(peer not in node.blacklist for peer in remembered):
        return
    takes_calls = {split_address(address)[2]["p2p"] for address in addresses}
    asked = [peer for peer in connected if peer.to_base58() in takes_calls][:PINGED_AT_ONCE]
    nodes = await asyncio.gather(*(node.protocol.call_ping(peer) for peer in asked))
    answered = [peer for peer, node_id in zip(asked, nodes, strict=True) if node_id is not None]
    for peer in answered:
        node.blacklist.register_success(peer)
    if answered:
        await _fill_routing_table(node)


async def _fill_routing_table(node: DHTNode) -> None:
    """It has been emptied by calls that nobody took."""
    with suppress(Exception):
        await asyncio.wait_for(node.find_nearest_nodes([node.node_id]), ANSWER_WITHIN)


async def does_any_answer(dht: DHT, node: DHTNode, peers: Sequence[PeerID]) -> bool:
    return any(await asyncio.gather(*(answers(node, peer) for peer in peers)))


async def answers(node: DHTNode, peer: PeerID, offsets: list[float] | None = None) -> bool:
    """Does it say anything, if only that it takes no calls (client mode)?

    :param offsets: gets how far its clock is ahead of ours, s, if it tells its time
    """
    request = dht_pb2.PingRequest(peer=node.protocol.node_info, validate=False)
    try:
        asked = get_dht_time()
        said = await asyncio.wait_for(node.protocol.get_stub(peer).rpc_ping(request), ANSWER_WITHIN)
        if offsets is not None and said.dht_time:
            offsets.append(said.dht_time - (asked + get_dht_time()) / 2)
    except P2PHandlerError as e:  # one that lets us in no longer, or that we do not, is nobody of our swarm
        return not isinstance(e, NotAdmitted) and NotAdmitted.__name__ not in str(e)
    except P2PDaemonError as e:
        return "not supported" in str(e)
    except Exception:
        return False
    return True


async def _first_true(attempts: Iterable) -> bool:
    """The rest end by themselves: to cancel a call is one more call to p2pd."""
    tasks = {asyncio.ensure_future(attempt) for attempt in attempts}
    while tasks:
        done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if any(task.result() for task in done):
            return True
    return False


async def _dial(node: DHTNode, address: str, hang_up: bool) -> str:
    """Call a peer anew. :returns: "answered", "refused" (its machine is there) or "silent"."""
    host, port, maddr = split_address(address)
    if port is not None:  # p2pd waits longer after each vain attempt; so it is only asked for what can succeed
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), ANSWER_WITHIN)
            writer.close()
        except ConnectionRefusedError:
            return "refused"
        except (OSError, asyncio.TimeoutError):
            return "silent"
    peer = PeerID.from_base58(maddr["p2p"])
    try:
        await asyncio.wait_for(_connect(node, peer, maddr, hang_up), ANSWER_WITHIN)
    except Exception as e:
        return "refused" if port is not None or "refused" in str(e) else "silent"
    node.blacklist.register_success(peer)
    return "answered" if await node.protocol.call_ping(peer, validate=False, strict=False) else "refused"


async def _connect(node: DHTNode, peer: PeerID, maddr: Multiaddr, hang_up: bool) -> None:
    if hang_up:
        with suppress(Exception):
            await node.p2p._client.disconnect(peer)
    await node.p2p._client.connect(peer, [maddr.decapsulate(Multiaddr(f"/p2p/{peer}"))])


async def _dialable(node: DHTNode, connected: Sequence[PeerID]) -> list[str]:
    """Addresses, as they announce them, of peers here that take the DHT's calls."""
    nodes = set(node.protocol.routing_table.uid_to_peer_id.values())
    chosen = [peer for peer in connected if peer in nodes]
    chosen = random.sample(chosen, min(ASKED_AT_ONCE, len(chosen)))
    found = await asyncio.gather(*(_announced(node, peer) for peer in chosen), return_exceptions=True)
    return [address for addresses in found if isinstance(addresses, list) for address in addresses]


async def _announced(node: DHTNode, peer: PeerID) -> list[str]:
    """What p2pd knows of a connected peer's addresses; hivemind's list_peers tells where its calls come from."""
    reader, writer = await node.p2p._client.control.daemon_connector.open_connection()
    try:
        question = p2pd_pb2.DHTRequest(type=p2pd_pb2.DHTRequest.FIND_PEER, peer=peer.to_bytes(), timeout=1)
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.DHT, dht=question))
        response = p2pd_pb2.Response()
        await asyncio.wait_for(read_pbmsg_safe(reader, response), ANSWER_WITHIN)
    finally:
        writer.close()
    addresses = [str(Multiaddr(raw)) for raw in response.dht.peer.addrs[:16]]
    local = is_local(await node.get_visible_maddrs())
    usable = [a for a in addresses if len(a) < MAX_ADDRESS and (local or not is_loopback(a))]
    best = {kind_of(address): address for address in sorted(usable, key=is_private, reverse=True)}
    return [f"{address}/p2p/{peer}" for address in sorted(best.values(), key=is_private)[:2]]


def is_refused(ends: Mapping[str, str]) -> bool:
    """Does a machine refuse our call, so that our own line works? One of the home's network says nothing about the line
    into the world, and an address like it may be anybody's."""
    world = [address for address in ends if not is_private(address)]
    return any(ends[address] == "refused" for address in world or ends)


def split_address(address: str) -> tuple[str, int | None, Multiaddr]:
    """A multiaddr with a peer id -> host, TCP port (None: another transport), itself parsed."""
    maddr = Multiaddr(address)
    parts = address.split("/")
    port = int(parts[4]) if len(parts) > 4 and parts[3] == "tcp" and parts[1] != "unix" else None
    return parts[2], port, maddr


def is_loopback(address: str) -> bool:
    """Could only this machine dial it?"""
    found = as_ip(host_of(address))
    return found is not None and found.is_loopback


def is_private(address: str) -> bool:
    """Is it an address of a home, an office or a provider's own network?"""
    host = host_of(address)
    found = as_ip(host)
    return is_private_name(host) if found is None else not found.is_global


def is_local(own: Iterable[Multiaddr]) -> bool:
    """Do we ourselves listen on this machine only? Then a swarm on this machine is what we are in."""
    return all(is_loopback(str(maddr)) for maddr in own)
