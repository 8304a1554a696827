"""What is compared on the wire: each technique of the original's budget alone, all of it, and what goes further."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.home_parts.material import SPARSE, stepping

UNSHARED = 1_116 / 125.9  # parameters of the original's model without sharing, over those with it
SMALL_BATCH, BATCH = 512, 4096  # samples of a step
BATCHES = 4  # times as many samples still between two rounds
MODEL = "1.5m"  # of home_parts/material.py
EPOCH = 141.0 / 15  # s for BATCH samples, the original's, dilated as home_parts/material.py is
FAST, HOME = (1000.0, 1000.0), (20.0, 10.0)  # Mbit/s down, up

ORIGINAL = {"codec": "uniform8", "average_state_every": 1}
WAITING = {"delay_optimizer_step": False, "delay_grad_averaging": False, "delay_state_averaging": False}


@dataclass(frozen=True)
class Arm:
    """:param is_shared: else its bytes are multiplied by UNSHARED
    :param claimed: in the original's table; `by_count`: what arithmetic allows
    """

    key: str
    words: str
    system: str
    batch: int = BATCH
    is_shared: bool = False
    swarm: dict[str, Any] = field(default_factory=dict)
    stock: dict[str, Any] = field(default_factory=dict)
    line: tuple[float, float] = FAST
    claimed: str = ""
    by_count: str = ""

    @property
    def is_timed(self) -> bool:
        """Its samples a second are compared as well, not its bytes alone."""
        return self.system == "stock"

    @property
    def epoch(self) -> float:
        """s"""
        return EPOCH * self.batch / BATCH


ARMS = (
    Arm("baseline", "fp32 all-reduce at every 512 samples", "ddp", SMALL_BATCH),
    Arm("large_batch", "4096 samples in place of 512", "ddp", claimed="4-16", by_count="8"),
    Arm("sharing", "sharing", "ddp", SMALL_BATCH, is_shared=True, claimed="4-24", by_count="8.87"),
    Arm(
        "compression", "8-bit gradients, 4096", "kit", swarm={"grad_compression": "uniform8", "aggregation": "mean"},
        claimed="4-32", by_count="32",
    ),
    Arm("original_recipe", "all, 8-bit states too", "stock", is_shared=True, stock=ORIGINAL, line=HOME, by_count="142"),
    Arm(
        "original_at_once", "the same, devices wait", "stock", is_shared=True, stock={**ORIGINAL, **WAITING}, line=HOME,
        by_count="142",
    ),
    Arm("sparse", "sparse gradients, shared, 4096", "kit", is_shared=True, swarm=SPARSE),
    Arm(
        "best", "and local steps, rounds every 16384", "kit", BATCHES * BATCH, is_shared=True,
        swarm=stepping(SMALL_BATCH),
    ),
)  # fmt: skip
