"""What is trained to compare losses, and which with which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PEERS = 4
SMALL, LARGE = 2, 16  # samples of a step; as far apart as the wire's 512 and 4096
SAMPLES = {"scenes": 10_240, "emoji": 5_120}
RATES = {SMALL: 3e-3, LARGE: 8e-3}  # of a step of this optimizer on so many samples
MODEL = {"dim": 32, "depth": 2, "heads": 2}  # as small as it can be: thousands of rounds are to be made in a minute
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

    @property
    def step(self) -> int:
        """Samples of one step of the optimizer whose rate the run file gives: the inner one's, if there is one."""
        return SMALL if "local_steps" in self.swarm else self.batch

    def settings(self, data: str, samples: float) -> dict[str, Any]:
        return {
            "peers": self.peers,
            "samples": round(SAMPLES[data] * samples),
            "batch": self.batch,
            "microbatch": self.batch // self.peers,
            "run": {"model": MODEL, "swarm": self.swarm, "optimizer": {"lr": RATES[self.step], "betas": [0.9, 0.99]}},
        }


TRAININGS = (
    Training("baseline", "fp32, small batch", SMALL, DENSE, peers=1),
    Training("large_batch", "fp32, large batch", LARGE, DENSE, peers=1),
    Training("codec", "sparse, large batch", LARGE, SPARSE),
    Training("best", "sparse, local steps", LARGE, {**SPARSE, "local_steps": {"batch_size": SMALL}}),
)
GAPS = {
    "codec_loss_gap": ("codec", "large_batch"),
    "best_loss_gap_to_baseline": ("best", "baseline"),
    "best_loss_gap_to_large_batch": ("best", "large_batch"),
}
