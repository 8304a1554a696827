"""An averager's calls between admitted peers: who may call here, whom we call, and what members tell their group.

hivemind asks for a token in the DHT only: a group, its parts and our state would be open to anybody who knows our peer
id.
"""

from __future__ import annotations

import asyncio
import time
from multiprocessing.context import ForkProcess
from typing import Any, AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

from hivemind.averaging import DecentralizedAverager
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import auth_pb2, averaging_pb2

from volunteer_kit.swarm.admission import Admission
from volunteer_kit.swarm.introduction import IntroducedStub, Introductions
from volunteer_kit.swarm.told_group import read_entry

# s; p2pd resets a stream that the answering side closes first, and what the other has not read by then is lost: one
# answer in a few hundred, with it a slice of the average or a place in the group. Who answers waits to be hung up on.
LINGER = 5.0
TOKEN_PATIENCE = 5.0  # s that a member's part may come before the group's list with its token
MAX_WAITING = 256  # strangers that wait for that at once


class AdmittedAverager(ForkProcess, DecentralizedAverager):
    """hivemind's averager with admission on every call. It is forked whatever the program's start method is, as the
    DHT is; hivemind leaves that to the program.

    :param admission: who may take part; asked on incoming and outgoing calls, in the averager's process
    """

    doorkeeper = Admission()  # of this process: run() sets the real one in the averager's own
    introductions = Introductions(doorkeeper)

    def __init__(self, *args, admission: Admission | None = None, **kwargs):
        self._admission = admission or Admission()
        self._awaited: set[PeerID] = set()  # strangers whose token may be on its way
        super().__init__(*args, **kwargs)

    def run(self) -> None:
        type(self).doorkeeper = self._admission  # a process of our own: nobody shares the class
        type(self).introductions = Introductions(self._admission)
        super().run()

    # --- what others call here, and whom we call ---

    async def rpc_introduce(self, request: auth_pb2.AccessToken, context: P2PContext) -> auth_pb2.AccessToken:
        """Somebody shows its access token before it calls us; ours is the answer."""
        reason = self.doorkeeper.show(request.signature, context.remote_id)
        if reason is not None:
            self.doorkeeper.refuse(context.remote_id, "introduce", reason)
        return auth_pb2.AccessToken(signature=self.doorkeeper.own_token)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        self.doorkeeper.check(context.remote_id, "join_group")
        if not self._can_be_told_on(request.gather, context.remote_id):
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in super().rpc_join_group(request, context):
            yield message
        await asyncio.sleep(LINGER)

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        self.doorkeeper.check(context.remote_id, "download_state")
        async for message in super().rpc_download_state(request, context):
            yield message

    async def _let_in_sender(self, peer_id: PeerID) -> None:
        """Raises NotAdmitted for whom we take no parts from."""
        await self._token_may_come(peer_id)
        self.doorkeeper.check(peer_id, "aggregate_part")

    async def _token_may_come(self, peer_id: PeerID) -> None:
        """A fast member's part can be here before the leader's word who is in the group."""
        deadline = time.monotonic() + TOKEN_PATIENCE
        if len(self._awaited) >= MAX_WAITING or peer_id in self._awaited:
            return
        self._awaited.add(peer_id)
        try:
            while self.doorkeeper.reason_to_refuse(peer_id) in ("no_token", "expired") and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
        finally:
            self._awaited.discard(peer_id)

    @classmethod
    def get_stub(cls, p2p: P2P, peer: PeerID, *, namespace: str | None = None):
        stub, admission = super().get_stub(p2p, peer, namespace=namespace), cls.doorkeeper
        if (why := admission.why_shut_out(peer)) is not None:
            admission.refuse(peer, "outgoing", why)
        if admission.is_open:
            return stub
        return IntroducedStub(stub, peer, admission, cls.introductions)

    # --- what goes round a group ---

    def to_tell(self, told: Any) -> list:
        """What goes round a group: `told`, and our access token, that all members may know each other."""
        return [told, self._admission.own_token]

    def _can_be_told_on(self, gathered: bytes, peer_id: PeerID) -> bool:
        """May what a follower tells go to the whole group? Junk of one would break the round for all."""
        entry = read_entry(gathered, self.serializer)
        if entry is None or self.doorkeeper.is_open:
            return entry is not None
        return _has_token(entry.words) and self.doorkeeper.show(entry.words[1], peer_id) is None

    def _read_words(self, peer_id: PeerID, words: Any) -> Any:
        """What a member told, as a stranger says it; its token is noted."""
        if not _has_token(words):
            return None
        self.doorkeeper.show(words[1], peer_id)
        return words[0]


def _has_token(words: Any) -> bool:
    return isinstance(words, (list, tuple)) and len(words) == 2 and isinstance(words[1], bytes)
