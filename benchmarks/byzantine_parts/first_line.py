"""What the kit believes of its members before any rule: its own functions, with records that every peer has signed.

Its epoch lasts as long as the original run's, so that seconds of slack weigh here what they weigh there. Stand-ins: the
clock is the simulation's, and hivemind's extrapolation of claims between two reports is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from hivemind.optim.progress_tracker import LocalTrainingProgress
from hivemind.p2p import PeerID

from volunteer_kit.swarm.believed_progress import Claims, believed_samples
from volunteer_kit.swarm.believed_speed import Limits, believed_speeds
from volunteer_kit.swarm.credit_bounds import Bounds
from volunteer_kit.swarm.ground import ASTRAY
from volunteer_kit.swarm.plausible import Limits as ClaimLimits
from volunteer_kit.swarm.plausible import is_plausible
from volunteer_kit.swarm.records import PeerRecord
from volunteer_kit.swarm.state_round import OwnSteps, reason_to_keep_own
from volunteer_kit.swarm.told_group import AVOIDED_FOR, is_split

if TYPE_CHECKING:
    from benchmarks.byzantine_parts.swarm import Swarm

EPOCH_SECONDS, MATCHMAKING = 3600 / 26, 15.0  # of the original run
DEVICE, LIFETIME = "Tesla T4", 60.0


def peer_id(peer: int) -> PeerID:
    return PeerID(b"peer %d" % peer)


class FirstLine:
    """As one honest member, the guide, sees the others; all honest ones see the same."""

    def __init__(self, swarm: Swarm):
        self.swarm = swarm
        self.target = sum(swarm.batches)
        self.bounds = Bounds(self.target, microbatch=min(swarm.task.batches))
        self.max_weight = 2.0 * self.target  # swarm/assembly.py
        self._claims, self._claim_limits = Claims(), ClaimLimits(self.target)
        self._speeds: dict[bool, Limits] = {}
        self._avoided: dict[int, float] = {}  # leaders, until this epoch
        self._own_steps = OwnSteps()

    # --- weights ---

    def weight_limit(self, peer: int) -> float | None:
        """What its device can have done since the last round; swarm/optimizer.py, _limit_weights."""
        return self._believed(self.swarm.seconds + MATCHMAKING).of(peer_id(peer))

    def _believed(self, seconds: float) -> Limits:
        attacked = bool(self.swarm.attacking)
        if attacked not in self._speeds:
            records = {peer_id(peer): self._record(peer) for peer in range(len(self.swarm.batches))}
            self._speeds[attacked] = believed_speeds(records, None, self.bounds.max_samples_per_second)
        return self._speeds[attacked].within(seconds, self.bounds)

    def _record(self, peer: int) -> PeerRecord:
        said = self.swarm.conduct(peer).speed(self.swarm.batches[peer] / EPOCH_SECONDS)
        about = {"name": f"peer {peer}", "device": DEVICE, "epoch": 0, "total_samples": 0, "loss": None}
        identity = {"peer_id": peer_id(peer).to_bytes(), "fingerprint": "0" * 8, "client_mode": False}
        return PeerRecord(samples_per_second=float(said), **about, **identity)

    # --- progress ---

    def counted(self, claims: Mapping[int, float], seconds: float) -> float:
        """The swarm's samples, as far as they are believed `seconds` after the epoch began."""
        limits, total = self._believed(seconds), 0.0
        for peer, samples in claims.items():
            if self._is_plausible(peer, int(samples)):
                self._claims.note(peer_id(peer), self.swarm.epoch, samples, samples)
                total += believed_samples(samples, self._claims.share(peer_id(peer)), limits.of(peer_id(peer)))
        return total

    def _is_plausible(self, peer: int, samples: int) -> bool:
        speed = self.swarm.batches[peer] / EPOCH_SECONDS
        told = {"epoch": self.swarm.epoch, "samples_accumulated": samples, "samples_per_second": speed}
        claim = LocalTrainingProgress(peer_id=peer_id(peer).to_bytes(), time=0.0, client_mode=False, **told)
        return is_plausible(claim, self._claim_limits, 0.0, LIFETIME)

    def settle(self, group: Iterable[int], weights: Mapping[int, float]) -> None:
        """What the claims of this epoch were worth in its round."""
        worth = {peer_id(peer): weight for peer, weight in weights.items()}
        self._claims.settle(self.swarm.epoch, [peer_id(peer) for peer in group], worth, self.target)

    # --- leaders ---

    def followed(self, group: Iterable[int]) -> list[int]:
        return [peer for peer in group if self._avoided.get(peer, 0) <= self.swarm.epoch]

    def groups(self, leader: int, told: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Lists whose round is not broken off. An accomplice answers all with the list that they were told."""
        attacking, kept = self.swarm.attacking, []
        for members in dict.fromkeys(told.values()):
            otherwise = sum(told[peer] != members for peer in members if peer not in attacking)
            if is_split(len(members), otherwise):
                self._avoided[leader] = self.swarm.epoch + AVOIDED_FOR / EPOCH_SECONDS
            else:
                kept.append(members)
        return kept

    # --- averaged states ---

    def moved(self, before: torch.Tensor, after: torch.Tensor) -> None:
        self._own_steps.moved([before], [after])

    def keeps_own(self, own: torch.Tensor, average: torch.Tensor, epochs: int) -> str | None:
        bounds = self._own_steps.bounds([own], max(ASTRAY, epochs))
        return reason_to_keep_own([own], [average], bounds)
