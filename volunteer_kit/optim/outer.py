"""The outer optimizer of local steps: Nesterov's momentum on what all peers' steps have moved the model by.

DiLoCo: Douillard et al. 2023, arXiv:2311.08105, Algorithm 1; OuterOpt with Nesterov's momentum was their best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .exact_state import ExactStateOptimizer


class OuterNesterov(ExactStateOptimizer):
    """SGD with Nesterov's momentum, whose statistics are there from the start.

    A gradient is how far the peers' mean lies behind the model that they set out from: before minus after.

    :param lr: 1 with no momentum goes all the way to the mean; above that the model overshoots. Lower it first if the
        loss rises after rounds
    :param momentum: share of the last round's direction that is kept; the more, the smoother over few samples
    """

    def __init__(self, params: Any, lr: float = 0.7, momentum: float = 0.9):
        if not 0 < lr or not 0 <= momentum < 1:
            raise ValueError(f"lr is > 0 and momentum in [0, 1); got {lr}, {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """`momentum`: as the parameter, in float32."""
        return {"momentum": torch.zeros_like(param, dtype=torch.float32).detach().requires_grad_(False)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None or not torch.isfinite(param.grad).all():
                    continue
                gradient, velocity = param.grad.float(), self.state[param]["momentum"]
                velocity.mul_(group["momentum"]).add_(gradient)
                param.add_(gradient.add(velocity, alpha=group["momentum"]), alpha=-group["lr"])
        return loss
