"""LAMB with 8-bit block-wise statistics on the CPU: a quarter of the memory and of what a joiner downloads.

LAMB: You et al. 2020, arXiv:1904.00962. The statistics: Dettmers et al. 2022, arXiv:2110.02861. bitsandbytes' own
LAMB8bit has no trust ratio: it is Adam.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from .lamb import FUSED_SIZE, Lamb, fused_kernels


class Lamb8bit(Lamb):
    """Lamb whose large tensors hold both statistics in a byte each, scaled by the largest value of 4,096.

    Held of the second is its root, which has half the decades and is rounded to be right on average over the steps.
    Its step needs no memory of a tensor's size, and gives the same bits on every machine and any number of threads.

    :param min_8bit_size: elements; smaller tensors have fp32 statistics, for their few values matter more. Decided by
        size and type alone, so that all peers of a run have states of one structure.
    :param settings: as in Lamb.

    Raises ValueError for a large parameter that is not on the CPU.
    """

    # Overrides: fused_size, non_negative

    non_negative = Lamb.non_negative | {"exp_avg_absmax", "exp_avg_sq_absmax"}

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        *,
        min_8bit_size: int = 65_536,
        **settings: Any,
    ):
        self.min_8bit_size, self.fused_size = min_8bit_size, min(min_8bit_size, FUSED_SIZE)
        super().__init__(params, **settings)

    def new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """step (int); exp_avg, and exp_avg_sq's root, as codes (param's shape, uint8) with an absmax (blocks,) each."""
        if param.numel() < self.min_8bit_size or param.dtype != torch.float32:
            return super().new_state(param, group)
        if not self.is_fused(param):
            raise ValueError(
                f"8-bit LAMB works on contiguous tensors on the CPU; a parameter {tuple(param.shape)} is on "
                f"{param.device}.\n"
                "1. Move it there, or use Lamb (statistics_bits: 32 in the run file)."
            )
        fused = fused_kernels()
        codes = {"exp_avg": fused.ZERO_MEAN, "exp_avg_sq": fused.ZERO_ROOT}
        blocks = math.ceil(param.numel() / fused.BLOCK)
        state: dict[str, Any] = {"step": 0}
        for name, zero in codes.items():
            state[name] = torch.full(param.shape, zero, dtype=torch.uint8)
            state[f"{name}_absmax"] = torch.zeros(blocks, dtype=torch.float32, device="cpu")
        return state
