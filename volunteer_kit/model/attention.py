"""The attention of dalle-pytorch's layers, computed with one fused kernel and with a cache of keys and values.

The weights stay in dalle-pytorch's own modules; only the arithmetic between `to_qkv` and `to_out` is done here. It
equals theirs, and a test keeps it so. Their sparse layers need the whole sequence at every step of sampling; with a
mask for each kind of layer every layer can be cached.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from volunteer_kit.model import upstream

CONV_KERNEL = 5  # dalle-pytorch's conv_like layers look back 5 x 5 positions
DENSE_UP_TO = 512  # tokens; below it one dense masked kernel is faster than dalle-pytorch's sparse einsums


@lru_cache(maxsize=16)
def attention_mask(kind: str, text_len: int, fmap: int) -> Tensor:
    """Which position sees which, bool (S, S) with S = text_len + fmap**2 - 1 (the last code is never an input).

    `text_len` counts <bos>. Text sees text before it; an image position sees all text and, among the image positions
    up to its own, all (full), those of its row or column (axial_row, axial_col), or 5 x 5 of them (conv_like).
    """
    size = text_len + fmap * fmap
    position = torch.arange(size)
    sees = position[:, None] >= position[None, :]  # (S + 1, S + 1)
    place = torch.arange(fmap * fmap)
    down = (place // fmap)[:, None] - (place // fmap)[None, :]  # (N, N) rows between query and key
    right = (place % fmap)[:, None] - (place % fmap)[None, :]
    near = {
        "full": torch.ones_like(down, dtype=torch.bool),
        "axial_row": down == 0,
        "axial_col": right == 0,
        "conv_like": (down >= 0) & (down < CONV_KERNEL) & (right >= 0) & (right < CONV_KERNEL),
    }[kind]
    sees[text_len:, text_len:] &= near
    return sees[:-1, :-1].contiguous()


class Attend(nn.Module):
    """Stands where dalle-pytorch puts its own wrapper around an attention module, with the same weight names."""

    def __init__(self, fn: nn.Module, cache_key: str, kind: str, text_len: int, fmap: int) -> None:
        super().__init__()
        self.fn = fn
        self.cache_key = cache_key
        self.kind = kind
        self.text_len, self.fmap = text_len, fmap
        self.sparse = kind != "full" and text_len + fmap * fmap > DENSE_UP_TO

    def forward(self, x: Tensor, rotary_pos_emb: Tensor | None = None, cache: dict[str, Any] | None = None) -> Tensor:
        """x (B, L, D) -> (B, L, D). With a cache, x holds only the positions after the cached ones."""
        if self.sparse and cache is None:
            return self.fn(x, rotary_pos_emb=rotary_pos_emb)
        B, L, _ = x.shape
        offset = cache.get("offset", 0) if cache is not None else 0
        qkv = self.fn.to_qkv(x).view(B, L, 3, self.fn.heads, -1).permute(2, 0, 3, 1, 4)  # (3, B, H, L, Dh)
        if rotary_pos_emb is not None:  # dalle-pytorch rotates the values too
            qkv = rotate(qkv, rotary_pos_emb[0, offset : offset + L])
        q, k, v = qkv.unbind(0)
        if cache is not None:
            if self.cache_key in cache:
                old_k, old_v = cache[self.cache_key]
                k, v = torch.cat((old_k, k), dim=2), torch.cat((old_v, v), dim=2)
            cache[self.cache_key] = k, v
        out = F.scaled_dot_product_attention(q, k, v, **self._mask(offset, L, x.device), scale=self.fn.scale)
        return self.fn.to_out(out.transpose(1, 2).reshape(B, L, -1))

    def _mask(self, offset: int, length: int, device: torch.device) -> dict[str, Any]:
        if self.kind == "full":
            return {"is_causal": length > 1}
        mask = attention_mask(self.kind, self.text_len, self.fmap)
        return {"attn_mask": mask[offset : offset + length, : offset + length].to(device)}


def rotate(t: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of t (..., L, Dh) by angles (L, R), R <= Dh even, in neighbouring pairs; the rest passes."""
    R = angles.shape[-1]
    turned, rest = t[..., :R], t[..., R:]
    pairs = turned.unflatten(-1, (R // 2, 2))
    crossed = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)  # (..., L, R)
    return torch.cat(((turned * angles.cos() + crossed * angles.sin()).to(t.dtype), rest), dim=-1)


def replace_attention(transformer: nn.Module, kinds: list[str], fmap: int) -> None:
    """Put an Attend around every attention module of dalle-pytorch's `Transformer`; layers sharing one keep sharing."""
    theirs = upstream.dalle_transformer()
    text_len = transformer.seq_len - fmap * fmap + 1
    reversible = hasattr(transformer.layers, "blocks")
    layers = transformer.layers.blocks if reversible else transformer.layers.layers
    for index, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        pre_norm = (layer.f.net if reversible else layer[0]).fn
        inner = pre_norm.fn.fn  # with token shift a PreShiftToken around the attention's wrapper, else the attention
        holder = inner if isinstance(inner, theirs.PreShiftToken) else pre_norm
        holder.fn = Attend(holder.fn.fn, f"attn_{index}", kind, text_len, fmap)
