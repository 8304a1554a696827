"""From logits to the next code: temperature, top-k, classifier-free guidance. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor


def guide(with_caption: Tensor, without: Tensor, cond_scale: float) -> Tensor:
    """Logits moved away from what the model would draw without a caption; all (B, C)."""
    return without + (with_caption - without) * cond_scale


def sample(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, generator: torch.Generator | None = None
) -> Tensor:
    """logits (B, C) -> (B,) int64. temperature 0: the likeliest. Raises ValueError for settings without meaning."""
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature must be 0 or more and top_k 1 or more, not {temperature} and {top_k}")
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k is not None and top_k < logits.shape[-1]:
        kept, index = logits.topk(top_k, dim=-1)  # (B, K)
        logits = torch.full_like(logits, float("-inf")).scatter(-1, index, kept)
    probabilities = (logits / temperature).softmax(dim=-1)
    device = generator.device if generator is not None else logits.device
    return torch.multinomial(probabilities.to(device), 1, generator=generator)[:, 0].to(logits.device)
