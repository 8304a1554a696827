"""What the kit believes of its members before any rule: its own functions, with records that every peer has signed.

Its epoch lasts as long as the original run's, so that seconds of slack weigh here what they weigh there. Stand-ins: the
clock is the simulation's; votes are counted by who was told the same, without messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from hivemind.p2p import PeerID

from volunteer_kit.swarm.records.device_speeds import MAX_SAMPLES_PER_SECOND, believed_speeds
from volunteer_kit.swarm.records.peer_record import PeerRecord
from volunteer_kit.swarm.sync.beliefs import REDUCER_SLACK, Beliefs
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Share
from volunteer_kit.swarm.sync.entries import Member
from volunteer_kit.swarm.sync.judging import MIN_BATCH

if TYPE_CHECKING:
    from benchmarks.byzantine_parts.swarm import Swarm

EPOCH_SECONDS = 3600 / 26  # of the original run
DEVICE = "Tesla T4"


def peer_id(peer: int) -> PeerID:
    return PeerID(b"peer %d" % peer)


def member(peer: int) -> Member:
    """Each is an account of its own."""
    return Member(str(peer), str(peer), True)


class FirstLine:
    """As one honest member, the guide, sees the others; all honest ones see the same."""

    def __init__(self, swarm: Swarm):
        self.swarm = swarm
        self._beliefs = Beliefs(SyncConfig(sum(swarm.batches)).max_staleness + 1, cells=1)
        self._saw: bool | None = None  # the records as they are while nobody, or somebody, attacks
        self._shut_out: set[int] = set()

    # --- weights ---

    def weight_limit(self, peer: int) -> float:
        """Samples that its account is believed to bring, by what its devices can do and what it has saved up."""
        self._look()
        return self._beliefs.limit(str(peer), self._now, EPOCH_SECONDS, REDUCER_SLACK)

    @property
    def _now(self) -> float:
        return self.swarm.epoch * EPOCH_SECONDS + self.swarm.seconds

    def _look(self) -> None:
        """The records of all peers."""
        if self._saw == bool(self.swarm.attacking):
            return
        self._saw = bool(self.swarm.attacking)
        records = {peer_id(peer): self._record(peer) for peer in range(len(self.swarm.batches))}
        speeds = believed_speeds(records, None, MAX_SAMPLES_PER_SECOND)
        for peer in range(len(self.swarm.batches)):
            self._beliefs.saw(member(peer), speeds.of(peer_id(peer)) or 0.0)

    def _record(self, peer: int) -> PeerRecord:
        said = self.swarm.conduct(peer).speed(self.swarm.batches[peer] / EPOCH_SECONDS)
        about = {"name": f"peer {peer}", "device": DEVICE, "epoch": 0, "total_samples": 0, "loss": None}
        identity = {"peer_id": peer_id(peer).to_bytes(), "fingerprint": "0" * 8, "client_mode": False}
        return PeerRecord(samples_per_second=float(said), **about, **identity)

    # --- progress ---

    def counted(self, claims: Mapping[int, float], brought: float) -> float:
        """The swarm's samples, as far as they are believed. A round that brings too few comes to no step."""
        if brought < MIN_BATCH * sum(self.swarm.batches):
            return 0.0
        return sum(min(samples, self.weight_limit(peer)) for peer, samples in claims.items())

    def settle(self, weights: Mapping[int, float]) -> None:
        """A step holds so many samples of each member."""
        shares = [Share(str(peer), 0, 0, int(weight), 1) for peer, weight in weights.items() if weight >= 1]
        group = tuple(member(peer) for peer in weights)
        self._beliefs.committed(
            SimpleNamespace(group=group, answers=[SimpleNamespace(shares=shares)]), self._now, EPOCH_SECONDS
        )  # fmt: skip

    def why_refused(self, peer: int, part: torch.Tensor, weight: float) -> str | None:
        """Return why a reducer refuses a part; None: it takes it."""
        if not torch.isfinite(part).all():
            return "values that are not finite"
        limit = self.weight_limit(peer)
        return None if 0 <= weight <= limit else f"{weight:g} samples, of which {limit:g} are believed"

    # --- leaders ---

    def followed(self, group: Iterable[int]) -> list[int]:
        return [peer for peer in group if peer not in self._shut_out]

    def groups(self, leader: int, told: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return the lists of members that come to a step: more than half of all members vote for each. A member that
        votes for two contradicts itself by its own signature, as the leader does, and its vote does not count."""
        lists, attacking = list(dict.fromkeys(told.values())), self.swarm.attacking
        if len(lists) == 1:
            return lists
        self._shut_out.add(leader)
        votes = {members: sum(peer not in attacking and told[peer] == members for peer in members) for members in lists}
        return [members for members, count in votes.items() if 2 * count > len(self.swarm.batches)]
