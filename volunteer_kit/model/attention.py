"""Attention as DALL-E's layers have it: over all that came before, or over text and a row, a column, 5 x 5 codes.

One masked kernel computes any of them. Over long sequences on a CPU most of what it computes is masked away again, so
there rows, columns and neighbourhoods are computed for themselves (sparse_attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from volunteer_kit.model.layout import Layout
from volunteer_kit.model.sparse_attention import sparse_attention, sparse_pays


def attend(qkv: Tensor, kind: str, layout: Layout) -> Tensor:
    """qkv (B, L, 3, H, Dh), not rotated -> (B, L, H * Dh)."""
    if sparse_pays(qkv, kind, layout):
        return sparse_attention(qkv, kind, layout)
    L = qkv.shape[1]
    q, k, v = rotate(qkv, layout.turns(0, L, qkv.device)).permute(2, 0, 3, 1, 4)  # (B, H, L, Dh)
    if kind == "full" and layout.is_text is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mask = layout.mask(kind, q.device)[..., :L, :L]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def attend_to_cache(qkv: Tensor, kind: str, layout: Layout, memory: dict[str, Any], key: str) -> Tensor:
    """attend() while sampling: qkv (B, L, 3, H, Dh) of positions offset : offset + L -> (B, L, H * Dh)."""
    start, end = layout.offset, layout.offset + qkv.shape[1]
    q, k, v = rotate(qkv, layout.turns(start, end, qkv.device)).permute(2, 0, 3, 1, 4)  # (B, H, L, Dh)
    if key not in memory:
        B, H, _, Dh = k.shape
        memory[key] = k.new_empty(2, B, H, layout.text_len + layout.fmap**2 - 1, Dh)
    kept = memory[key]
    kept[:, :, :, start:end] = torch.stack((k, v))
    mask = layout.mask(kind, q.device)[..., start:end, :end]
    out = F.scaled_dot_product_attention(q, kept[0, :, :, :end], kept[1, :, :, :end], attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


def rotate(qkv: Tensor, turns: tuple[Tensor, Tensor] | None) -> Tensor:
    """Rotary embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) of qkv (B, L, 3, H, Dh), values too, as in
    dalle-pytorch: the first R channels in neighbouring pairs, by Layout.turns; the rest passes."""
    if turns is None:
        return qkv
    cos, sin = turns  # (L, 1, 1, R)
    R = cos.shape[-1]
    turned, rest = qkv[..., :R], qkv[..., R:]
    pairs = turned.unflatten(-1, (R // 2, 2))
    crossed = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)  # (B, L, 3, H, R)
    return torch.cat(((turned * cos + crossed * sin).to(qkv.dtype), rest), dim=-1)
