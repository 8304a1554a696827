"""LAMB: layer-wise adaptive learning rates for large batches (You et al. 2020, arXiv:1904.00962, Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import torch

from volunteer_kit.packages import MissingDependency, setup_command

from .exact_state import ExactStateOptimizer

BATCH_ELEMENTS = 2**18  # small tensors are updated together up to this many, so that temporaries stay in the cache
FUSED_SIZE = 2**16  # elements; from here on a CPU tensor is updated by fused.py, in place
STATISTICS = ("exp_avg", "exp_avg_absmax", "exp_avg_sq", "exp_avg_sq_absmax")


class Lamb(ExactStateOptimizer):
    """LAMB in fp32 with the original run's settings, the global gradient clip inside step().

    Large float32 tensors on the CPU are updated in place by compiled loops; others by torch, a few at a time.

    :param lr: learning rate, relative to each tensor's own norm.
    :param betas: decay of the gradient's mean and of its square; 0.96 forgets within 25 epochs, right for few, large
        steps. Raise the second if the loss is noisy from step to step.
    :param eps: added to the root of the second statistic.
    :param weight_decay: decoupled; recipe.param_groups gives norms, biases and LayerScale none.
    :param max_grad_norm: the gradient of all groups together is scaled down to this L2 norm; None: no clip.
    :param clamp_value: a tensor's norm counts as this at most in the trust ratio.
    :param debias: correct the statistics for their zero start. The original did not: its warm-up covers it.

    Parameters without a gradient are left alone and keep their statistics. A step whose gradient has a non-finite
    norm changes nothing and is counted in `skipped_steps`.
    """

    # Overrides: non_negative

    non_negative = frozenset({"exp_avg_sq"})
    fused_size = FUSED_SIZE

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.96),
        eps: float = 1e-6,
        weight_decay: float = 0.045,
        max_grad_norm: float | None = 4.0,
        clamp_value: float = 1e4,
        debias: bool = False,
    ):
        if not 0 <= lr < math.inf or not 0 <= eps < math.inf or not 0 <= weight_decay < math.inf:
            raise ValueError(f"lr, eps and weight_decay are finite and >= 0; got {lr}, {eps}, {weight_decay}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are in [0, 1); got {betas}")
        if not clamp_value > 0 or not (max_grad_norm is None or max_grad_norm > 0):
            raise ValueError(f"clamp_value and max_grad_norm are > 0; got {clamp_value}, {max_grad_norm}")
        self.max_grad_norm = max_grad_norm
        self.skipped_steps = 0  # steps refused because the gradient's norm was infinite or not a number
        self.last_grad_norm = 0.0  # before clipping
        settings = dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay)
        super().__init__(params, dict(settings, clamp_value=clamp_value, debias=debias))

    def new_state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """step (int), exp_avg and exp_avg_sq (param's shape, fp32 even for a half-precision parameter)."""
        if self.is_fused(param):
            fused_kernels()  # compiled now, ten seconds once on a machine, not in the swarm's first step
        half = param.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else param.dtype
        zeros = {name: torch.zeros_like(param, dtype=dtype) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": 0, **{name: value.detach().requires_grad_(False) for name, value in zeros.items()}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Gradients are read, not changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="lamb") as pool:
            grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
            self.last_grad_norm = self._global_norm(grads, pool)
            if not math.isfinite(self.last_grad_norm):
                self.skipped_steps += 1
                return loss
            scale = 1.0
            if self.max_grad_norm is not None:
                scale = min(1.0, self.max_grad_norm / (self.last_grad_norm + 1e-6))
            for group in self.param_groups:
                with_grad = [param for param in group["params"] if param.grad is not None]
                for param in filter(self.is_fused, with_grad):
                    self._update_fused(param, group, scale, pool)
                for params in _batches(param for param in with_grad if not self.is_fused(param)):
                    self._update(params, group, scale)
        return loss

    def is_fused(self, tensor: torch.Tensor) -> bool:
        """Whether fused.py takes it: large, float32, contiguous and on the CPU."""
        large = tensor.numel() >= self.fused_size and tensor.dtype == torch.float32
        return large and tensor.device.type == "cpu" and tensor.is_contiguous()

    def _global_norm(self, grads: list[torch.Tensor], pool: ThreadPoolExecutor) -> float:
        """L2 norm of all tensors together, wherever they live."""
        if any(grad.is_sparse for grad in grads):
            raise ValueError("Lamb takes no sparse gradients: build the embedding with sparse=False")
        norms = [math.sqrt(fused_kernels().square_sum(pool, grad)) for grad in filter(self.is_fused, grads)]
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for grad in grads:
            if not self.is_fused(grad):
                by_device.setdefault(grad.device, []).append(grad)
        return math.hypot(*norms, *(_norms(some).norm().item() for some in by_device.values()))

    def _update_fused(self, param: torch.Tensor, group: dict[str, Any], scale: float, pool: ThreadPoolExecutor) -> None:
        state, fused = self.state[param], fused_kernels()
        state["step"] += 1
        (beta1, beta2), step = group["betas"], state["step"]
        coefficients = fused.Coefficients(
            scale,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            mean_correction=1 / (1 - beta1**step) if group["debias"] else 1.0,
            root_correction=1 / math.sqrt(1 - beta2**step) if group["debias"] else 1.0,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )
        statistics = [state[name] for name in STATISTICS if name in state]
        grad = param.grad.to(torch.float32).contiguous()
        fused.update(pool, param, grad, statistics, step, coefficients, group["lr"], group["clamp_value"])
        torch.autograd.graph.increment_version(param)  # written past PyTorch; copies on other devices look at it

    def _update(self, params: list[torch.Tensor], group: dict[str, Any], scale: float) -> None:
        states = [self.state[param] for param in params]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        grads = [param.grad.to(mean.dtype) for param, mean in zip(params, means, strict=True)]
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, grads, alpha=(1 - beta1) * scale)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=(1 - beta2) * scale**2)
        del grads
        for state in states:
            state["step"] += 1

        roots = torch._foreach_sqrt(squares)
        if group["debias"]:
            torch._foreach_div_(roots, [math.sqrt(1 - beta2 ** state["step"]) for state in states])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(means, roots)
        del roots
        if group["debias"]:
            torch._foreach_div_(updates, [1 - beta1 ** state["step"] for state in states])
        if group["weight_decay"]:
            torch._foreach_add_(updates, params, alpha=group["weight_decay"])

        weight_norms, update_norms = _norms(params).float(), _norms(updates).float()  # (tensors,)
        trust = weight_norms.clamp(max=group["clamp_value"]) / update_norms
        trust = torch.where((weight_norms > 0) & (update_norms > 0), trust, 1.0)
        torch._foreach_mul_(updates, (-group["lr"] * trust).tolist())
        torch._foreach_add_(params, updates)


def _norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """L2 norms (tensors,), in float64: in float32 processors and thread counts add up in other orders, and the last
    digit of a trust ratio sets peers apart."""
    return torch.stack([torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors])


def fused_kernels() -> ModuleType:
    """fused.py, whose import compiles: only who has large tensors waits for that, and needs numba."""
    try:
        from volunteer_kit.optim import fused
    except ImportError as cause:
        told = f"LAMB of large tensors on the CPU needs numba, which cannot be imported: {cause}"
        raise MissingDependency(f"{told}\n1. Run: {setup_command()}\n2. Then restart the notebook's kernel.") from cause
    return fused


def _batches(params: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters of one device and type, together up to BATCH_ELEMENTS; a larger one is a batch of its own."""
    batches: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for param in params:
        kind = (param.device, param.dtype)
        if kind in batches and sizes[kind] + param.numel() > BATCH_ELEMENTS:
            yield batches.pop(kind)
        if kind not in batches:
            batches[kind], sizes[kind] = [], 0
        batches[kind].append(param)
        sizes[kind] += param.numel()
    yield from batches.values()
