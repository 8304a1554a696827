"""Matrix products, and what is built on them with less memory than autograd would keep: linear layer, GEGLU, loss.

On a CPU in fp32 PyTorch multiplies with MKL, which is a quarter slower than oneDNN on AMD's processors; oneDNN is in
every x86 build too, behind the operator that torch.compile uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

INNER_AT_ONCE = 2**22  # elements of a feed-forward network's inner layer in one piece: 16 MB in fp32
LOGITS_AT_ONCE = 2**24  # elements of logits in one piece: 64 MB in fp32


def _find_onednn() -> Any:
    try:
        return torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
    except (AttributeError, RuntimeError):  # ARM and other builds without it
        return None


_onednn = _find_onednn()


def mm(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a (M, K) @ b (K, N) + bias (N,) -> (M, N), without autograd."""
    if _onednn is not None and a.device.type == "cpu" and a.dtype == torch.float32 and a.numel():
        return _onednn(a, b.T, bias, "none", [], "")
    return a @ b if bias is None else torch.addmm(bias, a, b)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """grad (M, O), x (M, I) -> a weight's gradient grad.T @ x (O, I); oneDNN copies its first factor when that is
    transposed, so the narrower of the two goes there."""
    return mm(x.T, grad).T if x.shape[1] < grad.shape[1] else mm(grad.T, x)


def cast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's type, where autocast is on: the functions below compute in the type they are given."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [tensor.to(dtype) for tensor in tensors]


class _Linear(Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return mm(x.flatten(0, -2), weight.T, bias).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        d_x = mm(grad, weight).view_as(x)
        return d_x, outer(grad, x.flatten(0, -2)), grad.sum(0) if ctx.has_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., I), weight (O, I), bias (O,) -> (..., O), as F.linear."""
    if x.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


class _GegluFeedForward(Function):
    """Keeps x and the inner layer before GEGLU; what follows is made again in backward, at no cost beside the products.

    GEGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
        rows, inners = x.flatten(0, -2), []  # (M, D)
        out = rows.new_empty(len(rows), len(w_out))
        for piece in _pieces(rows, len(w_in)):
            inner = mm(rows[piece], w_in.T, b_in)  # (M', 2F)
            value, gate = inner.chunk(2, dim=-1)
            out[piece] = mm(F.gelu(gate).mul_(value), w_out.T, b_out)
            inners.append(inner)
        ctx.save_for_backward(x, w_in, w_out, *inners)
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        x, w_in, w_out, *inners = ctx.saved_tensors
        grad, rows = grad.flatten(0, -2), x.flatten(0, -2)
        d_rows, d_others = torch.empty_like(rows), []
        for piece, inner in zip(_pieces(rows, len(w_in)), inners, strict=True):
            value, gate = inner.chunk(2, dim=-1)
            d_inner = torch.empty_like(inner)
            d_value, d_gate = d_inner.chunk(2, dim=-1)
            gelu, d_product = F.gelu(gate), mm(grad[piece], w_out)  # (M', F)
            torch.mul(d_product, gelu, out=d_value)
            d_gate.copy_(torch.ops.aten.gelu_backward(d_product.mul_(value), gate))
            d_rows[piece] = mm(d_inner, w_in)
            found = outer(d_inner, rows[piece]), d_inner.sum(0), outer(grad[piece], gelu.mul_(value))
            d_others = [a.add_(b) for a, b in zip(d_others, found, strict=True)] if d_others else found
        return d_rows.view_as(x), *d_others, grad.sum(0)


def _pieces(rows: Tensor, width: int) -> list[slice]:
    """On a CPU, rows in pieces that stay in its cache, and in memory that need not be asked for each time."""
    step = max(1, INNER_AT_ONCE // width) if rows.device.type == "cpu" else max(1, len(rows))
    return [slice(start, start + step) for start in range(0, len(rows), step)]


def geglu_feed_forward(x: Tensor, w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Tensor:
    """x (..., D), w_in (2F, D), w_out (D, F) -> (..., D): Linear, GEGLU, Linear."""
    return _GegluFeedForward.apply(*cast(x, w_in, b_in, w_out, b_out))


class Words(NamedTuple):
    """What R places should say, out of rows `start:end` of a vocabulary."""

    rows: Tensor  # (R, D)
    labels: Tensor  # (R,) int64, counted from `start`
    share: Tensor  # (R,) fp32, how much each counts
    start: int
    end: int


class _TokenLoss(Function):
    """Takes the gradient in forward, piece by piece: neither all logits nor a copy of them exists at any time."""

    @staticmethod
    def forward(ctx, weight: Tensor, bias: Tensor, dtype: torch.dtype, wanted: bool, *words: Any) -> tuple[Tensor, ...]:
        every = [Words(*words[i : i + 5]) for i in range(0, len(words), 5)]
        d_weight = torch.zeros_like(weight) if wanted else None
        d_bias = torch.zeros_like(bias) if wanted else None
        losses, saved = [], []
        for one in every:
            part = slice(one.start, one.end)
            into = (d_weight[part], d_bias[part]) if wanted else None
            loss, d_rows = _cross_entropy(one, weight[part].to(dtype), bias[part].to(dtype), into)
            losses.append(loss)
            saved.append(d_rows)
        ctx.spans = [(one.start, one.end) for one in every]
        ctx.save_for_backward(d_weight, d_bias, *saved)
        return tuple(losses)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_weight, d_bias, *d_rows = ctx.saved_tensors
        d_words: list[Tensor | None] = []
        for grad, (start, end), rows in zip(grads, ctx.spans, d_rows, strict=True):
            d_weight[start:end].mul_(grad)
            d_bias[start:end].mul_(grad)
            d_words += [rows.mul_(grad), None, None, None, None]
        return d_weight, d_bias, None, None, *d_words


def _cross_entropy(
    words: Words, weight: Tensor, bias: Tensor, into: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor | None]:
    """(sum of share * cross-entropy, its gradient with respect to the rows); adds weight's and bias's to `into`."""
    loss = words.share.new_zeros(())
    if not len(words.rows):
        return loss, torch.zeros_like(words.rows) if into else None
    d_rows = torch.empty_like(words.rows) if into else None
    most = words.share.max().clamp(min=torch.finfo(torch.float32).tiny)  # in fp16 shares would vanish: they come last
    whole = words.rows.device.type == "xla"  # pieces of what lies on several cores would be computed one after another
    step = len(words.rows) if whole else max(1, LOGITS_AT_ONCE // len(weight))
    for start in range(0, len(words.rows), step):
        piece = slice(start, start + step)
        rows, labels, share = words.rows[piece].to(weight.dtype), words.labels[piece, None], words.share[piece, None]
        log_p = F.log_softmax(mm(rows, weight.T, bias).float(), dim=-1)  # (R, V)
        loss = loss - (log_p.gather(1, labels) * share).sum()
        if into is None:
            continue
        d_logits = log_p.exp_().scatter_add_(1, labels, log_p.new_full((1, 1), -1.0).expand_as(labels))
        d_logits = d_logits.mul_(share / most)
        into[1].add_(d_logits.sum(0))
        d_logits = d_logits.to(weight.dtype)
        into[0].add_(outer(d_logits, rows))
        d_rows[piece] = mm(d_logits, weight)
    if into is not None:
        for d in (*into, d_rows):
            d.mul_(most)
    return loss, d_rows


def token_losses(weight: Tensor, bias: Tensor, *words: Words) -> tuple[Tensor, ...]:
    """weight (V, D), bias (V,) -> for each of `words` its sum of share * cross-entropy, fp32, over its own vocabulary.

    The spans of the vocabularies must not overlap.
    """
    kind = weight.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (weight, bias, *(one.rows for one in words)))
    flat = [value for one in words for value in one]
    return _TokenLoss.apply(weight, bias, dtype, wanted, *flat)
