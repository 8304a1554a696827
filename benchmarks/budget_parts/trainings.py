"""What is trained to compare losses, and which with which."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.home_parts.material import SPARSE, stepping

PEERS = 4
SMALL, LARGE, LARGER = 2, 16, 64  # samples of an epoch; as far apart as the wire's 512, 4096 and 16384
SAMPLES = {"scenes": 16_384, "emoji": 5_120}  # of the 880 emoji six times each
MODEL = {"dim": 32, "depth": 2, "heads": 2}  # as small as it can be: thousands of rounds are to be made in a minute
DENSE = {"grad_compression": "none", "small_compression": "none", "aggregation": "mean"}


@dataclass(frozen=True)
class Training:
    """Rates are the best of those tried for each, factors of 1.3 to 2 apart, with seed 0. What a codec leaves out for
    later is a momentum: with the first of `betas` at 0.9 the sparse one ended half as high again, or worse.

    :param batch: samples of all peers in an epoch
    :param peers: where nothing is left out of a round, the mean of many is that of one with all samples
    """

    key: str
    words: str
    batch: int
    lr: dict[str, float]  # by data
    betas: tuple[float, float] = (0.9, 0.99)
    swarm: dict[str, Any] = field(default_factory=dict)
    peers: int = PEERS

    def settings(self, data: str, samples: float) -> dict[str, Any]:
        return {
            "peers": self.peers,
            "samples": round(SAMPLES[data] * samples),
            "batch": self.batch,
            "microbatch": SMALL if "local_steps" in self.swarm else self.batch // self.peers,
            "run": {"model": MODEL, "swarm": self.swarm, "optimizer": {"lr": self.lr[data], "betas": list(self.betas)}},
        }


TRAININGS = (
    Training("baseline", "fp32, small batch", SMALL, {"scenes": 6e-3, "emoji": 1e-2}, swarm=DENSE, peers=1),
    Training("large_batch", "fp32, large batch", LARGE, {"scenes": 1.6e-2, "emoji": 1.6e-2}, swarm=DENSE, peers=1),
    Training("codec", "sparse, large batch", LARGE, {"scenes": 3e-2, "emoji": 4e-2}, (0.5, 0.99), SPARSE),
    Training("best", "sparse, local steps", LARGER, {"scenes": 1.2e-2, "emoji": 2e-2}, (0.8, 0.99), stepping(SMALL)),
)
GAPS = {
    "codec_loss_gap": ("codec", "large_batch"),
    "best_loss_gap_to_baseline": ("best", "baseline"),
    "best_loss_gap_to_large_batch": ("best", "large_batch"),
}
