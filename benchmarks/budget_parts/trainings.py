"""What is trained to compare losses, and which with which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PEERS = 4
SMALL, LARGE = 8, 64  # samples of a step; the wire's 512 and 4096, as much smaller as the model is
SAMPLES = {"scenes": 10_240, "emoji": 5_120}
RATES = {SMALL: 5e-3, LARGE: 1.5e-2}
SPARSE = {"grad_compression": "sparse", "small_compression": "sparse", "aggregation": "mean"}
DENSE = {"grad_compression": "none", "small_compression": "none", "aggregation": "mean"}


@dataclass(frozen=True)
class Training:
    """:param batch: samples of all peers in an epoch
    :param peers: where nothing is left out of a round, the mean of many is that of one with all samples
    """

    key: str
    words: str
    batch: int = LARGE
    swarm: dict[str, Any] = field(default_factory=dict)
    peers: int = PEERS

    def settings(self, data: str, samples: float) -> dict[str, Any]:
        return {
            "peers": self.peers,
            "samples": round(SAMPLES[data] * samples),
            "batch": self.batch,
            "microbatch": self.batch // self.peers,
            "run": {"swarm": self.swarm, "optimizer": {"lr": RATES[self.batch], "betas": [0.9, 0.99]}},
        }


TRAININGS = (
    Training("baseline", "fp32, small batch", SMALL, DENSE, peers=1),
    Training("large_batch", "fp32, large batch", LARGE, DENSE, peers=1),
    Training("codec", "sparse, large batch", LARGE, SPARSE),
    Training("best", "sparse, local steps", LARGE, {**SPARSE, "local_steps": {"batch_size": SMALL // PEERS}}),
)
GAPS = {
    "codec_loss_gap": ("codec", "large_batch"),
    "best_loss_gap_to_baseline": ("best", "baseline"),
    "best_loss_gap_to_large_batch": ("best", "large_batch"),
}
