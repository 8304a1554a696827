"""Make the DHT cheap on a home line: few messages for each record, and short waits for nodes that do not answer.

hivemind looks for the nodes nearest to a key before each store, asks twenty of them, and each answers with all records
under the key: a record of a kilobyte cost 57 kB with eight peers, and several a second are more than a line of 1 Mbit/s
carries. The nearest nodes change only when peers come and go, so this node remembers them meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from volunteer_kit.swarm.sync.timing import Deadline

REMEMBERED = 30.0  # s that the nodes nearest to a key are taken for the nearest; a new one is told what it should know
MAX_REMEMBERED = 1024  # keys
# nodes that are asked what stands under a key: the replicas, and one that may know of nearer ones. Of hivemind's twenty
# the others have nothing
ASKED = 6
LEAST_SECONDS = 2.0  # for an answer, however fast they usually are; a line that is full with a round needs as much
# the cache serves who is content with old words; all of ours ask for the latest, and each store to a cached key would
# fetch all that stands there
OPTIONS = {"cache_locally": False, "cache_on_store": False, "cache_nearest": 0, "cache_refresh_before_expiry": 0}

# calls in vain, in a row, after which a node that calls us is asked again at once; hivemind leaves it out for 5 s after
# the first and for 10 after the second. More, and it is one that can call and not be called
FORGIVEN = 3

Found = Callable[[DHTID, list[DHTID], set[DHTID]], Awaitable[None]]


class ThriftyDHTNode(DHTNode):
    """hivemind's node, which remembers who is nearest to a key. Who has not answered lately is not among them, until it
    is heard again: after an outage of some seconds the swarm would be in parts for as long as it was, and longer."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._nearest: dict[DHTID, tuple[float, dict[DHTID, PeerID]]] = {}  # until when, and who

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> ThriftyDHTNode:
        node = await super().create(*args, **kwargs)
        if isinstance(node.protocol, TimedDHTProtocol):
            node.protocol.on_heard = node._hear
        return node

    def _hear(self, peer: PeerID) -> None:
        if peer in self.blacklist and self.blacklist.ban_counter[peer] <= FORGIVEN:
            del self.blacklist.banned_peers[peer]  # the calls in vain are counted on until one is answered

    async def find_nearest_nodes(
        self,
        queries: Collection[DHTID],
        *,
        node_to_peer_id: dict[DHTID, PeerID] | None = None,
        exclude_self: bool = False,
        found_callback: Found | None = None,
        **options: Any,
    ) -> dict[DHTID, dict[DHTID, PeerID]]:
        """hivemind's, for a store (which has a `found_callback`) without looking where it has just been found."""
        options |= {"node_to_peer_id": node_to_peer_id, "exclude_self": exclude_self}
        if found_callback is None or node_to_peer_id is None:
            return await super().find_nearest_nodes(queries, **options)
        known, unknown, again = self._nearest, [], []

        async def note(query: DHTID, nearest: list[DHTID], visited: set[DHTID]) -> None:
            while len(known) >= MAX_REMEMBERED:
                del known[next(iter(known))]
            known[query] = (time.monotonic() + REMEMBERED, {node: node_to_peer_id[node] for node in nearest})
            await found_callback(query, nearest, visited)

        for query in queries:
            until, nodes = known.get(query, (0.0, {}))
            alive = self._filter_blacklisted(nodes)
            if time.monotonic() > until or len(alive) < min(len(nodes), self.num_replicas) or not alive:
                known.pop(query, None)
                unknown.append(query)
            else:
                node_to_peer_id.update(alive)
                again.append(found_callback(query, list(alive), set(alive)))
        looked, *_ = await asyncio.gather(super().find_nearest_nodes(unknown, found_callback=note, **options), *again)
        return looked

    async def get_many_by_id(self, key_ids: Collection[DHTID], *args: Any, **kwargs: Any) -> dict[DHTID, Any]:
        return await super().get_many_by_id(key_ids, *args, **{"beam_size": ASKED, **kwargs})


class TimedDHTProtocol(DHTProtocol):
    """hivemind's protocol, whose calls wait as long as calls usually take, and some more.

    A laptop that was closed answers nothing, and is asked by everybody until its records are over: with five seconds
    for each call, all that went on around it took ten. Its own `wait_timeout` is the longest that anything is awaited.
    """

    on_heard: Callable[[PeerID], None] | None = None  # told who calls us, or answers
    _patience: Deadline | None = None
    _most = 5.0  # s

    @property
    def wait_timeout(self) -> float:
        return self._most if self._patience is None else self._patience.seconds

    @wait_timeout.setter
    def wait_timeout(self, seconds: float) -> None:
        self._most, self._patience = seconds, Deadline(seconds, floor=min(seconds, LEAST_SECONDS))

    def get_stub(self, peer: PeerID) -> Any:
        return TimedStub(super().get_stub(peer), self._patience)

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """hivemind's, whose `validate` refuses to start where `peer` cannot call us back. It could: over the connection
        of our call. It called another program under our key, which same_key.py finds, or an earlier one of ours."""
        try:
            return await super().call_ping(peer, validate, strict)
        except ValidationError as error:
            if "can't access this node" not in str(error):
                raise
            return await super().call_ping(peer)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        if responded and self.on_heard is not None:
            self.on_heard(peer_id)
        await super().update_routing_table(node_id, peer_id, responded)


TimedDHTProtocol.__name__ = DHTProtocol.__name__  # libp2p knows calls by it: those of a plain hivemind node as well


class TimedStub:
    """A stub that notes how long answers take. One peer that is gone does not make the others be waited for longer:
    each answer takes back what a call in vain has added."""

    def __init__(self, stub: Any, patience: Deadline | None):
        self._stub, self._patience = stub, patience

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._stub, name)

        async def timed(request: Any, timeout: float | None = None) -> Any:
            began = time.monotonic()
            try:
                answer = await call(request, timeout=timeout)
            except asyncio.TimeoutError:
                if self._patience is not None:
                    self._patience.failed()
                raise
            if self._patience is not None:
                self._patience.succeeded(time.monotonic() - began)
            return answer

        return timed
