"""Who may take part in averaging: the seam at which a run's authority will stand.

hivemind's authorizer guards DHT calls only; join-group, aggregate-part and download-state answer anybody who knows a
peer id. libp2p does authenticate the other side's peer id, so the averager asks `is_admitted` about it on every
incoming and outgoing call. Averagers live in processes of their own: what is passed here must work after a fork.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hivemind.p2p import P2PHandlerError, PeerID

IsAdmitted = Callable[[PeerID], bool]


class NotAdmitted(P2PHandlerError):
    """A call to or from a peer that may not take part. hivemind treats it as that peer's failure, and goes on."""


def admit_everybody(peer_id: PeerID) -> bool:
    """A run without an authority: whoever knows the address may train."""
    return True


class Doorkeeper:
    """Asks `is_admitted` before each call and counts refusals by kind of call.

    :param is_admitted: peer id -> bool; must be quick (it runs in the averager's event loop) and must not raise
    """

    def __init__(self, is_admitted: IsAdmitted = admit_everybody):
        self._is_admitted = is_admitted
        self.refused: Counter[str] = Counter()

    def check(self, peer_id: PeerID, call: str) -> None:
        """Raises NotAdmitted unless `peer_id` may take part in `call`."""
        if not self._is_admitted(peer_id):
            self.refused[call] += 1
            raise NotAdmitted(f"{peer_id} may not take part in this run (refused at {call})")
