"""Attention of axial_row, axial_col and conv_like layers on a CPU, without what their masks would hide.

Codes attend to the text and to a few codes near them: two attentions whose results are joined by the logarithms of
their softmax sums, as FlashAttention joins blocks (Dao et al. 2022, https://arxiv.org/abs/2205.14135). Backward gives
the joined sums back to both, which makes each one's gradient that of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from volunteer_kit.model.layout import CONV_KERNEL, Layout, attention_mask

DENSE_UP_TO = 512  # tokens; up to here one dense masked kernel is as fast
BAND = 4  # rows of codes that a conv_like layer computes together

_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
_flash_backward = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def sparse_pays(qkv: Tensor, kind: str, layout: Layout) -> bool:
    """Whether sparse_attention can compute this and is faster."""
    whole = qkv.shape[1] == layout.text_len + layout.fmap**2 - 1
    fits = whole and qkv.shape[1] > DENSE_UP_TO and kind != "full"
    return fits and qkv.device.type == "cpu" and qkv.dtype == torch.float32 and _flash_backward is not None


def sparse_attention(qkv: Tensor, kind: str, layout: Layout) -> Tensor:
    """qkv (B, L, 3, H, Dh) of a whole sequence, not rotated -> (B, L, H * Dh)."""
    return _Sparse.apply(qkv, kind, layout)


class _Sparse(Function):
    @staticmethod
    def forward(ctx, qkv: Tensor, kind: str, layout: Layout) -> Tensor:
        turns = _as_complex(layout, qkv)
        text, codes = _rotated(qkv, turns, kind, layout)  # (B, T, 3, H, Dh), (B, N, 3, H, Dh)
        causal, seen = _text_masks(layout)
        out_text, sums_text = _attention(text[:, :, 0], text[:, :, 1:], causal, is_causal=causal is None)
        out, sums = _attention(codes[:, :, 0], text[:, :, 1:], seen)  # (B, N, H, Dh), (B, N, H)
        for piece in _pieces(kind, layout.fmap):
            q, kv = piece.queries(codes)[:, :, 0], piece.keys(codes)[:, :, 1:]
            near = _attention(q, kv, piece.mask, is_causal=piece.mask is None)
            _join(piece.queries(out), piece.queries(sums), *near)
        ctx.kind, ctx.layout, ctx.turns = kind, layout, turns
        ctx.save_for_backward(text, codes, out_text, sums_text, out, sums)
        both = out.new_empty(*qkv.shape[:2], *out.shape[2:])  # (B, L, H, Dh)
        both[:, : layout.text_len] = out_text
        for places, ours in _in_order(out, kind, layout):
            both[:, places] = ours
        return both.flatten(2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        kind, layout, (text, codes, out_text, sums_text, out, sums) = ctx.kind, ctx.layout, ctx.saved_tensors
        causal, seen = _text_masks(layout)
        grad = grad.unflatten(-1, out.shape[2:])  # (B, L, H, Dh)
        d_out, d_codes = torch.zeros_like(out), torch.empty_like(codes)
        for places, ours in _in_order(d_out, kind, layout):
            ours.copy_(grad[:, places])
        d_text = _gradients(grad[:, : layout.text_len], text, text, out_text, sums_text, causal, causal is None)
        d_q, *d_kv = _gradients(d_out, codes, text, out, sums, seen, False)
        for i in (0, 1):
            d_text[1 + i].add_(d_kv[i])
        d_codes[:, :, 0], d_codes[:, :, 1:] = d_q, 0
        for piece in _pieces(kind, layout.fmap):
            mine = [piece.queries(t) for t in (d_out, codes)], [piece.queries(t) for t in (out, sums)]
            found = _gradients(*mine[0], piece.keys(codes), *mine[1], piece.mask, piece.mask is None)
            piece.queries(d_codes)[:, :, 0].add_(found[0])
            piece.keys(d_codes)[:, :, 1].add_(found[1])
            piece.keys(d_codes)[:, :, 2].add_(found[2])
        return _rotated_back(d_text, d_codes, ctx.turns, kind, layout), None, None


class _Piece(NamedTuple):
    """Codes that attend to codes near them: cuts out the queries and the keys of a (B, N, ...) tensor, as views."""

    queries: Callable[[Tensor], Tensor]
    keys: Callable[[Tensor], Tensor]
    mask: Tensor | None  # (queries, keys); None: each sees those before it


def _pieces(kind: str, fmap: int) -> Iterator[_Piece]:
    """axial: all rows (or columns: their codes lie in the order of columns) as one batch; conv_like: bands of rows."""
    if kind != "conv_like":

        def lines(t: Tensor) -> Tensor:
            return t.view(-1, fmap, *t.shape[2:])

        yield _Piece(lines, lines, None)
        return
    mask = F.pad(F.pad(attention_mask(kind, 0, fmap), (0, 1)), (0, 0, 0, 1), value=True)  # nobody sees the last code
    for first in range(0, fmap, BAND):
        queries = slice(first * fmap, (first + BAND) * fmap)
        keys = slice(max(0, first - CONV_KERNEL + 1) * fmap, queries.stop)
        yield _Piece(lambda t, at=queries: t[:, at], lambda t, at=keys: t[:, at], mask[queries, keys])


def _attention(q: Tensor, kv: Tensor, mask: Tensor | None, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """q (B, L, H, Dh), kv (B, K, 2, H, Dh) -> attention (B, L, H, Dh), logarithm of each softmax's sum (B, L, H)."""
    k, v = kv.unbind(2)
    out, sums = _flash(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=is_causal, attn_mask=_additive(mask))
    return out.transpose(1, 2), sums.transpose(1, 2)


def _gradients(
    d_out: Tensor, queries: Tensor, keys: Tensor, out: Tensor, sums: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q (B, L, H, Dh), k and v (B, K, H, Dh), whose `out` and `sums` may be of more keys than these."""
    q, k, v = (t.transpose(1, 2) for t in (queries[:, :, 0], keys[:, :, 1], keys[:, :, 2]))
    found = _flash_backward(
        d_out.transpose(1, 2), q, k, v, out.transpose(1, 2), sums.transpose(1, 2), 0.0, is_causal,
        attn_mask=_additive(mask),
    )  # fmt: skip
    return tuple(t.transpose(1, 2) for t in found)


def _join(out: Tensor, sums: Tensor, out_near: Tensor, sums_near: Tensor) -> None:
    """Attention over both sets of keys, into `out` (B, L, H, Dh) and `sums` (B, L, H)."""
    total = torch.logaddexp(sums, sums_near)
    out.mul_((sums - total).exp_()[..., None]).addcmul_(out_near, (sums_near - total).exp_()[..., None])
    sums.copy_(total)


def _text_masks(layout: Layout) -> tuple[Tensor | None, Tensor | None]:
    """Which text the text sees (B, 1, T, T), and which the codes see (B, 1, 1, T); None: all."""
    if layout.is_text is None:
        return None, None
    seen, T = layout.is_text[:, None, None], layout.text_len
    return seen & torch.ones(T, T, dtype=torch.bool).tril(), seen


def _additive(mask: Tensor | None) -> Tensor | None:
    """The kernel below scaled_dot_product_attention adds its mask."""
    return None if mask is None else torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))


# --- rotary embedding on the way in and out; axial_col layers hold their codes in the order of columns ---


def _as_complex(layout: Layout, qkv: Tensor) -> Tensor | None:
    """Rotations of all positions as complex numbers (L, 1, 1, Dh / 2); 1 for channels that do not turn."""
    turns = layout.turns(0, qkv.shape[1], qkv.device)
    if turns is None:
        return None
    cos, sin = (t[..., ::2] for t in turns)  # one angle for a pair of channels
    still = qkv.shape[-1] // 2 - cos.shape[-1]
    return torch.complex(F.pad(cos, (0, still), value=1.0), F.pad(sin, (0, still)))


def _in_order(codes: Tensor, kind: str, layout: Layout) -> Iterator[tuple[slice, Tensor]]:
    """Parts of the sequence (B, L, ...) and where `codes` (B, N, ...) holds them, in reading order: all rows but the
    last as (B, (G - 1) * G, ...), then the last row, whose last code is never an input."""
    G, T = layout.fmap, layout.text_len
    grid = codes.view(len(codes), G, G, *codes.shape[2:])
    if kind == "axial_col":
        grid = grid.transpose(1, 2)
    for row in range(G):
        width = G if row < G - 1 else G - 1
        yield slice(T + row * G, T + row * G + width), grid[:, row, :width]


def _rotated(qkv: Tensor, turns: Tensor | None, kind: str, layout: Layout) -> tuple[Tensor, Tensor]:
    T, N = layout.text_len, layout.fmap**2
    text, codes = (qkv.new_empty(len(qkv), size, *qkv.shape[2:]) for size in (T, N))
    codes[:, -1] = 0
    for places, ours in ((slice(0, T), text), *_in_order(codes, kind, layout)):
        _turn(qkv[:, places], turns if turns is None else turns[places], ours)
    return text, codes


def _rotated_back(d_text: Any, d_codes: Tensor, turns: Tensor | None, kind: str, layout: Layout) -> Tensor:
    T = layout.text_len
    d_qkv = d_codes.new_empty(len(d_codes), T + layout.fmap**2 - 1, *d_codes.shape[2:])
    for places, theirs in ((slice(0, T), torch.stack(d_text, dim=2)), *_in_order(d_codes, kind, layout)):
        _turn(theirs, turns if turns is None else turns[places].conj(), d_qkv[:, places])
    return d_qkv


def _turn(source: Tensor, turns: Tensor | None, into: Tensor) -> None:
    """into = source turned; both (B, L, 3, H, Dh)."""
    if turns is None:
        into.copy_(source)
        return
    source, into = (torch.view_as_complex(t.unflatten(-1, (-1, 2))) for t in (source, into))
    torch.mul(source, turns, out=into)
