"""What every peer of a run must share about the optimizer; read without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class OptimizerConfig(BaseModel):
    """What every peer must share about the optimizer; the defaults are the original run's.

    An epoch is one optimizer step of the whole swarm (target_batch_size samples).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(2.5e-3, gt=0, allow_inf_nan=False)  # learning rate at the top of the schedule
    betas: tuple[float, float] = (0.9, 0.96)  # decay of the first and second moments
    eps: float = Field(1e-6, gt=0, allow_inf_nan=False)  # added to the denominator
    weight_decay: float = Field(0.045, ge=0, allow_inf_nan=False)  # of matrices and embeddings; norms are spared
    max_grad_norm: float | None = Field(4.0, gt=0, allow_inf_nan=False)  # clips the norm of the averaged gradient
    clamp_value: float = Field(1e4, gt=0, allow_inf_nan=False)  # largest weight norm in the trust ratio
    debias: bool = False  # correct the bias of the moments in early steps, as Adam does
    statistics_bits: Literal[8, 32] = 8  # bits of large moments; 32: 6 bytes a parameter more, in downloads too
    warmup_epochs: int = Field(3125, ge=0)  # epochs in which the learning rate rises to `lr`
    total_epochs: int = Field(31250, ge=1)  # the learning rate is 0 from here on

    @model_validator(mode="after")
    def _possible(self) -> OptimizerConfig:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), not {self.betas}")
        if self.warmup_epochs >= self.total_epochs:
            raise ValueError(
                f"warmup_epochs ({self.warmup_epochs}) must be smaller than total_epochs ({self.total_epochs}): "
                "the rate has to come down again"
            )
        return self
