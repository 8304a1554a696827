"""Bound the DHT's routing table and the cost of its newcomers, so that a stranger cannot claim many node ids.

hivemind takes every node id that a peer claims, keeps replacements without end, and for each new one walks over all
records in one go, to find those that the newcomer should have. Here a peer has one node id, which no other peer can
take, and this node serves newcomers one after another, in slices.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID, RoutingTable
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID

from volunteer_kit.swarm.net.dht_storage import BoundedStorage

NODE_ID_BYTES = DHTID.HASH_NBYTES
MAX_REPLACEMENTS = 64  # nodes of a bucket that wait for a place in it; a dead one is replaced by one of them
MAX_WAITING = 64  # newcomers that wait for their records
SLICE = 32  # keys looked at before others have their turn
BATCH = 2**19  # bytes of records in one call


def is_node_id(raw: bytes) -> bool:
    """Of a length that a node id has; a longer one would be turned into a number of millions of digits."""
    return len(raw) == NODE_ID_BYTES


def may_enter(table: RoutingTable, node_id: DHTID, peer_id: PeerID) -> bool:
    """Is this node id free for this peer?"""
    return node_id != table.node_id and table.get(node_id=node_id, default=peer_id) == peer_id


def make_way(table: RoutingTable, node_id: DHTID, peer_id: PeerID) -> None:
    """Take out the peer's former node id, and the oldest replacement of a bucket that has too many."""
    former = table.get(peer_id=peer_id)
    if former is not None and former != node_id:
        del table[former]
    waiting = table.buckets[table.get_bucket_index(node_id)].replacement_nodes
    if len(waiting) >= MAX_REPLACEMENTS and node_id not in waiting:
        del table[next(iter(waiting))]


class Handover:
    """Hands newcomers the records that they are nearest to, as Kademlia asks: one newcomer at a time, in slices."""

    def __init__(self, protocol: DHTProtocol, storage: BoundedStorage):
        self._protocol, self._storage = protocol, storage
        self._waiting: OrderedDict[PeerID, DHTID] = OrderedDict()
        self._task: asyncio.Task[None] | None = None

    def greet(self, node_id: DHTID, peer_id: PeerID) -> None:
        """Remember a newcomer. If too many wait, it gets its records from their writers, which renew them."""
        if len(self._waiting) < MAX_WAITING and len(self._storage):
            self._waiting[peer_id] = node_id
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._hand_over())

    async def _hand_over(self) -> None:
        while self._waiting:
            peer_id, node_id = self._waiting.popitem(last=False)
            batch, size = [], 0
            for at, key in enumerate(list(self._storage.data)):
                if at % SLICE == SLICE - 1:
                    await asyncio.sleep(0)
                found = self._storage.get(key) if self._is_for(node_id, key) else None
                if found is None:
                    continue
                if batch and size + self._storage.bytes_under(key) > BATCH:
                    await self._send(peer_id, batch)
                    batch, size = [], 0
                batch.append((key, found.value, found.expiration_time))
                size += self._storage.bytes_under(key)
            if batch:
                await self._send(peer_id, batch)

    def _is_for(self, newcomer: DHTID, key: DHTID) -> bool:
        """Should the newcomer have this key, and is it ours to say so?"""
        protocol = self._protocol
        near = protocol.routing_table.get_nearest_neighbors(key, protocol.num_replicas, exclude=newcomer)
        distances = [node.xor_distance(key) for node, _ in near]
        if not distances:
            return True
        is_near = len(distances) < protocol.num_replicas or newcomer.xor_distance(key) < distances[-1]
        return is_near and protocol.node_id.xor_distance(key) < distances[0]

    async def _send(self, peer_id: PeerID, batch: list[tuple[DHTID, bytes | DictionaryDHTValue, float]]) -> None:
        await self._protocol.call_store(peer_id, *zip(*batch, strict=True), in_cache=False)
