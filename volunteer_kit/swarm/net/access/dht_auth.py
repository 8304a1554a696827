"""Admit and bound the DHT's calls: the callers, the records that this node keeps, and the length of its answers.

hivemind's own authorizer has each request and answer signed with RSA, and still does not know the caller: two
milliseconds of a core for a proof that libp2p has given already. In a run with an authority a call carries the access
token only. An open run admits everybody, within the same bounds.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from volunteer_kit.swarm.net.access.control import Admission
from volunteer_kit.swarm.net.dht import TimedDHTProtocol, TimedStub
from volunteer_kit.swarm.net.dht_routing import Handover, is_node_id, make_way, may_enter
from volunteer_kit.swarm.net.dht_storage import BoundedStorage
from volunteer_kit.swarm.net.identity import is_peer_id, peer_id_of_owner

MAX_KEYS = 512  # in one call; ours have one to a few dozen
MAX_SUBKEY = 2**11  # bytes; the name of a 4,096-bit key's owner has 750
MAX_VALUE = 2**14  # bytes; ours are under 4 KB
MAX_MARKS = 4  # places where a signature may begin; to look for its end takes time with their square
MAX_HANDED_ON = 32  # records under one key from which on those of unknown keys are no longer taken
MAX_DICTIONARY = 2**20  # bytes under one key; what 2,000 peers say of themselves
MAX_ANSWER = 2**21  # bytes of one answer; p2pd passes on up to 4 MiB
MAX_NEAREST = 64  # nodes that an answer may name for a key; ours name 20
MAX_CALLERS = 4096  # peers that have called lately, of an open run
MAX_STORING = 16  # calls of one peer that wait, with up to 4 MiB each; they are served one after another
TURN = 0.01  # s of checking records before other calls have their turn
LONGEST = 2 * 24 * 3600.0  # s that a value may be kept; leases are remembered for a day
# s for what bears nobody's signature. In the DHT what lives longer wins: one call of an attacker's would otherwise keep
# all of us from finding groups or donors for LONGEST, however soon he is banned
UNSIGNED = 600.0


SIGNATURE_BEGINS = RSASignatureValidator.SIGNATURE_FORMAT.partition(b"_value_")[0]


class AdmittedDHTProtocol(TimedDHTProtocol):
    """hivemind's protocol with the run's admission, and bounds on what a call can make a node keep, send or do."""

    admission = Admission()

    @classmethod
    def set_up(cls, admission: Admission) -> type[AdmittedDHTProtocol]:
        """Set up the class in a DHT's own process, for the one node that lives there. libp2p knows calls by the class's
        name: in an open run they have hivemind's, so plain hivemind nodes understand them."""
        cls.admission = admission
        if admission.is_open:
            cls.__name__ = DHTProtocol.__name__
        return cls

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> AdmittedDHTProtocol:
        """As hivemind's."""
        protocol = await super().create(*args, **kwargs)
        protocol.use_storage(BoundedStorage())
        return protocol

    def use_storage(self, storage: BoundedStorage) -> None:
        """Where what others write is kept. The cache has no accounts, and takes nothing of theirs."""
        self.storage = storage
        self._handover = Handover(self, storage)
        self._callers: OrderedDict[PeerID, None] = OrderedDict()
        self._storing: dict[PeerID, _Queue] = {}

    def get_stub(self, peer: PeerID) -> ShowingStub:
        return ShowingStub(TimedStub(DHTProtocol.get_stub(self, peer)._stub, self._patience), peer, self)

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        self._admit(request, context, "ping")
        return self._signed(await super().rpc_ping(request, context))

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        """Keep what may be kept of up to MAX_KEYS records; nothing of a request of another form, or of one too many."""
        self._admit(request, context, "store")
        self._note_node(request, context)
        storing, response = context.remote_id, dht_pb2.StoreResponse(peer=self.node_info)
        queue = self._storing.setdefault(storing, _Queue())
        if is_whole(request) and queue.waiting >= MAX_STORING:
            response.store_ok.extend([False] * len(request.keys))
        elif is_whole(request):
            try:
                async with queue:
                    turns = _Turns()
                    for index in range(len(request.keys)):
                        response.store_ok.append(await self._keep(request, index, storing, turns))
            finally:
                if not queue.waiting:
                    self._storing.pop(storing, None)
        return self._signed(response)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        """hivemind's, for each of up to MAX_KEYS different keys, and for as many values as MAX_ANSWER has room for; of
        the others it says that they were not found."""
        self._admit(request, context, "find")
        asked = [key if is_node_id(key) else None for key in request.keys[:MAX_KEYS]]
        chosen, room = [], MAX_ANSWER
        for key in dict.fromkeys(asked):
            size = self.storage.bytes_under(DHTID.from_bytes(key)) if key is not None else 0
            if key is not None and size <= room:
                chosen.append(key)
                room -= size
        found = await super().rpc_find(dht_pb2.FindRequest(keys=chosen, peer=request.peer, auth=request.auth), context)
        results = dict(zip(chosen, found.results, strict=True))
        nothing = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        response = dht_pb2.FindResponse(peer=found.peer, results=[results.pop(key, nothing) for key in asked])
        return self._signed(response)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """hivemind's, for the one node id that a peer has; a newcomer is handed its records when it is its turn."""
        table = self.routing_table
        if responded:
            node_id = node_id if node_id is not None else table.get(peer_id=peer_id)
            if node_id is None or not may_enter(table, node_id, peer_id):
                return
            if node_id not in table:
                make_way(table, node_id, peer_id)
                table.add_or_update_node(node_id, peer_id)
                self._handover.greet(node_id, peer_id)
        await super().update_routing_table(node_id, peer_id, responded)

    # --- calls of others ---

    def _admit(self, request: Any, context: P2PContext, call: str) -> None:
        """Raises NotAdmitted."""
        shown = self.admission.show(request.auth.client_access_token.signature, context.remote_id)
        if shown is not None and not (shown == "no_token" and self.admission.is_admitted(context.remote_id)):
            self.admission.refuse(context.remote_id, call, shown)  # without one: a call that hivemind makes of another
        if request.peer.node_id and not is_node_id(request.peer.node_id):
            request.peer.node_id = b""
        self._callers[context.remote_id] = None
        self._callers.move_to_end(context.remote_id)
        if len(self._callers) > MAX_CALLERS:
            self._callers.popitem(last=False)

    def _note_node(self, request: dht_pb2.StoreRequest, context: P2PContext) -> None:
        """A peer that stores something may be a node."""
        if request.peer.node_id:
            node_id = DHTID.from_bytes(request.peer.node_id)
            asyncio.create_task(self.update_routing_table(node_id, context.remote_id))

    # --- what is kept ---

    async def _keep(self, request: dht_pb2.StoreRequest, index: int, storing: PeerID, turns: _Turns) -> bool:
        """One record, or a dictionary of them that another node hands on. :returns: whether something of it is kept"""
        key, subkey, value = request.keys[index], request.subkeys[index], request.values[index]
        await turns.give()
        if subkey != self.IS_DICTIONARY:
            return self._keep_record(key, subkey, value, request.expiration_time[index], storing)
        found, kept = self._read_dictionary(value), []
        for name, (content, expiration) in found.items() if found is not None else ():
            await turns.give()
            kept.append(self._keep_record(key, self.serializer.dumps(name), content, expiration, storing))
        return any(kept)

    def _keep_record(self, key: bytes, subkey: bytes, value: bytes, expiration: float, storing: PeerID) -> bool:
        if not self._is_fine(key, subkey, value, expiration, storing):
            return False
        if not self._validate_record(key, subkey, value, expiration):
            return False
        account = self._account(subkey, storing)
        name = None if subkey == self.IS_REGULAR_VALUE else self.serializer.loads(subkey)
        return self.storage.put(account, DHTID.from_bytes(key), value, expiration, name)

    def _account(self, subkey: bytes, storing: PeerID) -> Hashable:
        """Who answers for the room that a record takes: the peer that signed it, if we know it; else the peer that
        brings it, for anybody can make keys."""
        owner, _ = self._owner_and_peer_named(subkey)
        return owner if owner is not None and (owner == storing or self._knows(owner)) else storing

    def _knows(self, peer: PeerID) -> bool:
        """Is this somebody who takes part, rather than a key that somebody has made?"""
        return peer in self._callers if self.admission.is_open else self.admission.knows(peer)

    def take_out_bad(self, request: dht_pb2.FindRequest, response: dht_pb2.FindResponse) -> None:
        """Of what another node says that it has found; we would believe it."""
        for key, result in zip(request.keys, response.results, strict=False):  # as many or not: hivemind looks
            nodes, peers = result.nearest_node_ids, result.nearest_peer_ids
            if len(nodes) > MAX_NEAREST or len(nodes) != len(peers) or not all(map(is_node_id, nodes)):
                del nodes[:], peers[:]
            if result.type == dht_pb2.FOUND_REGULAR:
                is_fine = self._is_fine(key, self.IS_REGULAR_VALUE, result.value, result.expiration_time, None)
            elif result.type == dht_pb2.FOUND_DICTIONARY:
                fine = self._fine_part(key, result.value)
                is_fine = fine is not None
                result.value, result.expiration_time = fine or (b"", 0.0)
            else:
                continue
            if not is_fine:
                result.type, result.value = dht_pb2.NOT_FOUND, b""

    def _fine_part(self, key: bytes, value: bytes) -> tuple[bytes, float] | None:
        """A dictionary as it came -> what of it may be believed, and when the last of it expires; None: nothing."""
        found = self._read_dictionary(value)
        if found is None:
            return None
        fine = DictionaryDHTValue()
        for subkey, (content, expiration) in found.items():
            if self._is_fine(key, self.serializer.dumps(subkey), content, expiration, None):
                fine.store(subkey, content, expiration)
        if not fine:
            return None
        return value if len(fine) == len(found) else self.serializer.dumps(fine), fine.latest_expiration_time

    def _read_dictionary(self, value: bytes) -> DictionaryDHTValue | None:
        """None: it is none, or too large."""
        found = None
        with suppress(Exception):  # whatever a stranger's bytes make of the serializer
            found = self.serializer.loads(value) if len(value) <= MAX_DICTIONARY else None
        return found if isinstance(found, DictionaryDHTValue) else None

    def _is_fine(self, key: bytes, subkey: bytes, value: bytes, expiration: float, storing: PeerID | None) -> bool:
        """May a record stand under this key, for so long? `storing`: who brings it; None: it is somebody's answer."""
        if len(value) > MAX_VALUE or value.count(SIGNATURE_BEGINS) > MAX_MARKS:
            return False
        if not math.isfinite(expiration) or len(subkey) > MAX_SUBKEY:  # what expires at NaN never does
            return False
        if subkey == self.IS_REGULAR_VALUE:  # as long as the statement says, if it is one: manifests stay for a month
            return self._is_guarded(key) or expiration <= get_dht_time() + UNSIGNED
        owner, named = self._owner_and_peer_named(subkey)
        if owner is None:
            may_say_so = named is not None and storing in (None, named)
            return may_say_so and expiration <= get_dht_time() + UNSIGNED
        if (why := self.admission.why_shut_out(owner)) is not None:
            self.admission.count("record", why)
            return False
        is_made_up = storing not in (None, owner) and not self._knows(owner)
        if is_made_up and self._is_crowded(key):
            return False
        is_brief = is_made_up and not self.admission.is_open  # an open run knows few of those that were here today
        return expiration <= get_dht_time() + (UNSIGNED if is_brief else LONGEST)

    def _is_crowded(self, key: bytes) -> bool:
        """Stand here so many records that there is no room for those of keys that nobody has seen? Anybody can make
        keys, and a dictionary beyond MAX_DICTIONARY would be nobody's answer any more."""
        return self.storage.count_under(DHTID.from_bytes(key)) >= MAX_HANDED_ON

    def _is_guarded(self, key: bytes) -> bool:
        """Do our validators look at what stands here? Then they refuse this."""
        return not self._validate_record(key, self.IS_REGULAR_VALUE, self.IS_REGULAR_VALUE, get_dht_time() + 60)

    def _owner_and_peer_named(self, subkey: bytes) -> tuple[PeerID | None, PeerID | None]:
        """Who has signed what stands under a subkey, or else whose bare peer id it is. So leaders and donors stand:
        libp2p knows who it is that says so, and nobody else may: who is said to live two days as "not looking for a
        group" could not look for one."""
        name = None
        with suppress(Exception):  # whatever a stranger's bytes make of the serializer
            name = self.serializer.loads(subkey)
        if not isinstance(name, bytes):
            return None, None
        return peer_id_of_owner(name), PeerID(name) if is_peer_id(name) else None

    def _signed(self, response: Any) -> Any:
        response.auth.service_access_token.signature = self.admission.own_token
        return response


class _Queue(asyncio.Lock):
    """Calls of one peer. :ivar waiting: how many are here, the one that is served among them"""

    waiting = 0

    async def __aenter__(self) -> None:
        self.waiting += 1
        try:
            await super().__aenter__()
        except BaseException:
            self.waiting -= 1
            raise

    async def __aexit__(self, *error: object) -> None:
        self.waiting -= 1
        await super().__aexit__(*error)


class _Turns:
    """Lets other calls go on after each TURN s of work."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def give(self) -> None:
        if time.perf_counter() - self._began >= TURN:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


class ShowingStub:
    """A stub whose calls show our token, and whose answers count if they come with one."""

    def __init__(self, stub: StubBase | TimedStub, peer: PeerID, protocol: AdmittedDHTProtocol):
        self._stub, self._peer, self._protocol, self._admission = stub, peer, protocol, protocol.admission

    async def rpc_ping(self, request: dht_pb2.PingRequest, timeout: float | None = None) -> dht_pb2.PingResponse:
        return await self._call("rpc_ping", request, timeout)

    async def rpc_store(self, request: dht_pb2.StoreRequest, timeout: float | None = None) -> dht_pb2.StoreResponse:
        return await self._call("rpc_store", request, timeout)

    async def rpc_find(self, request: dht_pb2.FindRequest, timeout: float | None = None) -> dht_pb2.FindResponse:
        response = await self._call("rpc_find", request, timeout)
        self._protocol.take_out_bad(request, response)
        return response

    async def _call(self, name: str, request: Any, timeout: float | None) -> Any:
        """Raises NotAdmitted: what a stranger answers is not looked at."""
        if (why := self._admission.why_shut_out(self._peer)) is not None:
            self._admission.refuse(self._peer, "outgoing", why)
        request.auth.client_access_token.signature = self._admission.own_token
        response = await getattr(self._stub, name)(request, timeout=timeout)
        shown = self._admission.show(response.auth.service_access_token.signature, self._peer)
        if shown is not None:
            self._admission.refuse(self._peer, "outgoing", shown)
        if response.peer.node_id and not is_node_id(response.peer.node_id):
            response.peer.node_id = b""
        return response


def is_whole(request: dht_pb2.StoreRequest) -> bool:
    """As many of each, not too many, and nothing for the cache."""
    count = len(request.keys)
    others = (request.subkeys, request.values, request.expiration_time, request.in_cache)
    is_even = count <= MAX_KEYS and all(len(one) == count for one in others)
    return is_even and all(map(is_node_id, request.keys)) and not any(request.in_cache)
