"""hivemind's reading of what peers send over libp2p, with bounds.

A message of a stream begins with its length in 8 bytes, and hivemind waits until so many have come, in memory. A peer
id is any bytes, and its base58, which is computed at once, takes time with their square: 64 kB take 6 s, 4 MB hours. An
error that a peer answers with becomes an exception's text, whatever its length.
"""

from __future__ import annotations

import asyncio
from functools import wraps

from hivemind.p2p import P2P, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE

from volunteer_kit.swarm.errors import MAX_WORDS

MAX_MESSAGE = DEFAULT_MAX_MSG_SIZE  # bytes; p2pd takes no more in calls of one message
MAX_PEER_ID = 64  # bytes; those of RSA keys have 34, others up to 42


async def receive_bounded(reader: asyncio.StreamReader) -> bytes:
    """One message of a stream. Raises IncompleteReadError, which both sides take for a connection that was closed, for
    one of more than MAX_MESSAGE bytes."""
    length = int.from_bytes(await reader.readexactly(P2P.HEADER_LEN), P2P.BYTEORDER)
    if length > MAX_MESSAGE:
        raise asyncio.IncompleteReadError(b"", length)
    return await reader.readexactly(length)


def bound_messages() -> None:
    """For all of this process, and its forks, from now on."""
    if P2P.receive_raw_data is receive_bounded:
        return
    P2P.receive_raw_data = staticmethod(receive_bounded)
    make_peer_id, make_error = PeerID.__init__, P2PHandlerError.__init__

    @wraps(make_peer_id)
    def of_few_bytes(self: PeerID, peer_id_bytes: bytes) -> None:
        if len(peer_id_bytes) > MAX_PEER_ID:
            raise ValueError(f"a peer id of {len(peer_id_bytes)} bytes")
        make_peer_id(self, peer_id_bytes)

    @wraps(make_error)
    def of_few_words(self: P2PHandlerError, *words: object) -> None:
        make_error(self, *(str(word)[:MAX_WORDS] for word in words))

    PeerID.__init__, P2PHandlerError.__init__ = of_few_bytes, of_few_words
