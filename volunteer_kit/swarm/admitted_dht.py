"""The DHT's calls between admitted peers: each shows the other its access token, and nothing is kept for strangers.

hivemind's own authorizer has each request and answer signed with RSA, and still does not know whose call it is: two
milliseconds of a core for what libp2p has proved already. Here the token alone goes along.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import dht_pb2
from hivemind.utils import get_dht_time

from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.identity import is_peer_id, peer_id_of_owner
from volunteer_kit.swarm.thrifty_dht import TimedDHTProtocol, TimedStub

MAX_KEYS = 512  # in one call; ours have one to a few dozen
MAX_VALUE = 2**14  # bytes; ours are under 4 KB
MAX_HANDED_ON = 32  # records under one key from which on those of unknown keys are no longer taken
MAX_DICTIONARY = 2**20  # bytes under one key; what 2,000 peers say of themselves
LONGEST = 2 * 24 * 3600.0  # s that a value may be kept; leases are remembered for a day
# s for what bears nobody's signature. In the DHT what lives longer wins: one call of an attacker's would otherwise keep
# all of us from finding groups or donors for LONGEST, however soon he is banned
UNSIGNED = 600.0


class AdmittedDHTProtocol(TimedDHTProtocol):
    """hivemind's protocol with the run's admission. The class is set up in the DHT's own process, for the one node
    that lives there."""

    admission = Admission()

    def get_stub(self, peer: PeerID) -> ShowingStub:
        return ShowingStub(TimedStub(DHTProtocol.get_stub(self, peer)._stub, self._patience), peer, self)

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        self._admit(request, context, "ping")
        return self._signed(await super().rpc_ping(request, context))

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        self._admit(request, context, "store")
        fine = [self._may_be_kept(request, i, context) for i in range(len(request.keys))] if is_whole(request) else []
        kept = [i for i, is_fine in enumerate(fine) if is_fine]
        for name in ("keys", "subkeys", "values", "expiration_time", "in_cache"):
            values = getattr(request, name)
            chosen = [values[i] for i in kept]
            del values[:]
            values.extend(chosen)
        response = await super().rpc_store(request, context)
        stored = dict(zip(kept, response.store_ok, strict=True))
        del response.store_ok[:]
        response.store_ok.extend(stored.get(i, False) for i in range(len(fine)))
        return self._signed(response)

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        self._admit(request, context, "find")
        del request.keys[MAX_KEYS:]
        return self._signed(await super().rpc_find(request, context))

    def _admit(self, request: Any, context: P2PContext, call: str) -> None:
        """Raises NotAdmitted."""
        shown = self.admission.show(request.auth.client_access_token.signature, context.remote_id)
        if shown is not None and not (shown == "no_token" and self.admission.is_admitted(context.remote_id)):
            self.admission.refuse(context.remote_id, call, shown)  # without one: a call that hivemind makes of another

    def _may_be_kept(self, request: dht_pb2.StoreRequest, index: int, context: P2PContext) -> bool:
        """No more and for no longer than anything of ours; nothing that a banned peer has written."""
        key, subkey, value = request.keys[index], request.subkeys[index], request.values[index]
        if subkey != self.IS_DICTIONARY:
            is_short = len(value) <= MAX_VALUE
            return is_short and self._is_fine(key, subkey, request.expiration_time[index], context.remote_id)
        fine = self._fine_part(key, value, context.remote_id)  # another node hands on what it has
        if fine is not None:
            request.values[index], request.expiration_time[index] = fine
        return fine is not None

    def take_out_bad(self, request: dht_pb2.FindRequest, response: dht_pb2.FindResponse) -> None:
        """Of what another node says that it has found; we would keep it, and hand it on."""
        for key, result in zip(request.keys, response.results, strict=False):  # as many or not: hivemind looks
            if result.type == dht_pb2.FOUND_REGULAR:
                is_short = len(result.value) <= MAX_VALUE
                is_fine = is_short and self._is_fine(key, self.IS_REGULAR_VALUE, result.expiration_time, None)
            elif result.type == dht_pb2.FOUND_DICTIONARY:
                fine = self._fine_part(key, result.value, None)
                is_fine = fine is not None
                result.value, result.expiration_time = fine or (b"", 0.0)
            else:
                continue
            if not is_fine:
                result.type, result.value = dht_pb2.NOT_FOUND, b""

    def _fine_part(self, key: bytes, value: bytes, teller: PeerID | None) -> tuple[bytes, float] | None:
        """A dictionary as it came -> what of it may be kept, and when the last of it expires; None: nothing."""
        found = None
        with suppress(Exception):  # whatever a stranger's bytes make of the serializer
            found = self.serializer.loads(value) if len(value) <= MAX_DICTIONARY else None
        if not isinstance(found, DictionaryDHTValue):
            return None
        fine = DictionaryDHTValue()
        for subkey, (content, expiration) in found.items():
            if isinstance(content, bytes) and len(content) <= MAX_VALUE and isinstance(expiration, float):
                if self._is_fine(key, self.serializer.dumps(subkey), expiration, teller):
                    fine.store(subkey, content, expiration)
        if not fine:
            return None
        return value if len(fine) == len(found) else self.serializer.dumps(fine), fine.latest_expiration_time

    def _is_fine(self, key: bytes, subkey: bytes, expiration: float, storing: PeerID | None) -> bool:
        """May a record stand under this key, for so long? `storing`: who brings it; None: it is somebody's answer."""
        if not math.isfinite(expiration):  # what expires at NaN never does
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
        is_made_up = storing not in (None, owner) and not self.admission.knows(owner)
        if is_made_up and self._is_crowded(key):
            return False
        return expiration <= get_dht_time() + (UNSIGNED if is_made_up else LONGEST)

    def _is_crowded(self, key: bytes) -> bool:
        """Stand here so many records that there is no room for those of keys that nobody has seen? Anybody can make
        keys, and a dictionary beyond MAX_DICTIONARY would be nobody's answer any more."""
        found = self.storage.get(DHTID.from_bytes(key))
        entries = found.value if found is not None else None
        return isinstance(entries, DictionaryDHTValue) and len(entries) >= MAX_HANDED_ON

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
        return response


def is_whole(request: dht_pb2.StoreRequest) -> bool:
    """As many of each, and not too many."""
    count = len(request.keys)
    others = (request.subkeys, request.values, request.expiration_time, request.in_cache)
    return count <= MAX_KEYS and all(len(one) == count for one in others)
