"""Bound the peer ids and errors that hivemind makes of bytes from other peers.

A peer id is any bytes, and hivemind computes its base58 at once, in time that grows with their square: 64 kB take 6 s,
4 MB hours. An error in a peer's answer becomes an exception's text, whatever its length.
"""

from __future__ import annotations

from functools import wraps

from hivemind.p2p import P2PHandlerError, PeerID

from volunteer_kit.swarm.errors import MAX_WORDS

MAX_PEER_ID = 64  # bytes; those of RSA keys have 34, others up to 42


def bound_names() -> None:
    """For all of this process, and its forks, from now on."""
    if getattr(PeerID.__init__, "is_bounded", False):
        return
    make_peer_id, make_error = PeerID.__init__, P2PHandlerError.__init__

    @wraps(make_peer_id)
    def of_few_bytes(self: PeerID, peer_id_bytes: bytes) -> None:
        if len(peer_id_bytes) > MAX_PEER_ID:
            raise ValueError(f"a peer id of {len(peer_id_bytes)} bytes")
        make_peer_id(self, peer_id_bytes)

    @wraps(make_error)
    def of_few_words(self: P2PHandlerError, *words: object) -> None:
        make_error(self, *(str(word)[:MAX_WORDS] for word in words))

    of_few_bytes.is_bounded = True
    PeerID.__init__, P2PHandlerError.__init__ = of_few_bytes, of_few_words
