"""What one member knows of one round of averaging when it is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hivemind.p2p import PeerID

from volunteer_kit.swarm.agreement import Follow, holders, out_of_step, whom_to_follow


@dataclass
class Round:
    """How one round of averaging went, as this member saw it.

    `received` is the share of values for which an answer arrived; below 1 this member may no longer equal the others.
    `in_agreement`: all members held the same already, nothing had to be sent.
    """

    group: tuple[PeerID, ...] = ()
    round_id: bytes = b""  # the leader's random number, and a digest of what it told
    gathered: dict[PeerID, Any] = field(default_factory=dict)  # what each member told, see agreement.py
    donors: frozenset[PeerID] = frozenset()  # members that share their state
    received: float = 1.0
    refused: dict[str, str] = field(default_factory=dict)  # peer id -> why its part did not enter the average
    remarks: dict[str, str] = field(default_factory=dict)  # peer id -> what is held against it, though it took part
    kept_own: str | None = None  # why our own tensors were not replaced by the averages
    failed_reducers: tuple[str, ...] = ()
    lost: dict[str, str] = field(default_factory=dict)  # peer id -> peer_lost or timeout, see failures.py
    weights: dict[PeerID, float] = field(default_factory=dict)  # senders that entered our slice; none in client mode
    waiting: dict[PeerID, float] = field(default_factory=dict)  # samples of those who are checked before they count
    in_agreement: bool = False
    verdicts: Any = None  # of a verified round: verified_exchange.Verdicts
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0

    def __len__(self) -> int:
        return len(self.group)

    @property
    def is_lost(self) -> bool:
        """Too few answers came for a step: who got most of them is elsewhere, and can give them."""
        return bool(self.group) and self.received <= 0.5

    @property
    def name(self) -> bytes | None:
        """Of this round and what was received of it: equal on members that got the same. None: there was none."""
        if not self.group:
            return None
        missed = (self.received, sorted(self.failed_reducers)) if self.received < 1 else ()
        return repr((self.round_id, *missed)).encode()

    @property
    def delivered(self) -> dict[PeerID, float]:
        """What came of what members had claimed, {} if we reduced nothing and cannot know. Who is on probation has
        samples as well: were its claims not believed, its epochs, in which they count, would end before ours."""
        return {**self.waiting, **self.weights} if self.weights else {}

    def whom_to_follow(self, own_id: PeerID, own_told: Any) -> Follow | None:
        """Whose state is the one that this round's step belongs to, if it is not ours.

        :param own_told: what we hold; what we told may be older, for we can take a state while a group comes together
        """
        return whom_to_follow({**self.gathered, own_id: own_told}, own_id, self.donors)

    def holders(self, own_id: PeerID, own_told: Any) -> int:
        """Members that hold what we hold, ourselves among them."""
        return holders({**self.gathered, own_id: own_told}, own_id)

    def is_shared(self, own_id: PeerID, own_told: Any) -> bool:
        """Does another member hold what we hold?"""
        return self.holders(own_id, own_told) > 1

    def out_of_step(self) -> dict[PeerID, str]:
        """Members whose parts do not enter, with the reason."""
        return out_of_step(self.gathered, self.donors)
