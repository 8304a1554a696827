"""The arithmetic of dalle-pytorch's layers, over weights that stay in dalle-pytorch's own modules.

A layer adds attention, then a feed-forward network, to its input; before each comes a norm and a shift of some
channels from neighbouring tokens, after each LayerScale (Touvron et al. 2021, https://arxiv.org/abs/2103.17239).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from volunteer_kit.model import upstream
from volunteer_kit.model.attention import attend, attend_to_cache
from volunteer_kit.model.layout import Layout
from volunteer_kit.model.matmul import geglu_feed_forward, linear


class _ShiftTokens(Function):
    """dalle-pytorch's token shift: half of a text token's channels come from the token before it, a quarter of a
    code's from the code above it and a quarter from the one to its left. Moves numbers, so it has nothing to keep."""

    @staticmethod
    def forward(ctx, x: Tensor, text_len: int, fmap: int) -> Tensor:
        ctx.text_len, ctx.fmap = text_len, fmap
        out, half, quarter = torch.empty_like(x), x.shape[-1] // 2, x.shape[-1] // 4
        text, codes, from_text, from_codes = out[:, :text_len], out[:, text_len:], x[:, :text_len], x[:, text_len:]
        text[:, :1, :half] = 0
        text[:, 1:, :half] = from_text[:, :-1, :half]
        codes[:, :fmap, :quarter] = 0
        codes[:, fmap:, :quarter] = from_codes[:, :-fmap, :quarter]
        codes[:, 1:, quarter:half] = from_codes[:, :-1, quarter:half]
        codes[:, ::fmap, quarter:half] = 0
        out[..., half:] = x[..., half:]
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        text_len, fmap = ctx.text_len, ctx.fmap
        d_x, half, quarter = torch.empty_like(grad), grad.shape[-1] // 2, grad.shape[-1] // 4
        text, codes, d_text, d_codes = grad[:, :text_len], grad[:, text_len:], d_x[:, :text_len], d_x[:, text_len:]
        d_text[:, -1:, :half] = 0
        d_text[:, :-1, :half] = text[:, 1:, :half]
        d_codes[:, -fmap:, :quarter] = 0
        d_codes[:, :-fmap, :quarter] = codes[:, fmap:, :quarter]
        d_codes[:, -1:, quarter:half] = 0
        d_codes[:, :-1, quarter:half] = codes[:, 1:, quarter:half]
        d_codes[:, fmap - 1 :: fmap, quarter:half] = 0
        d_x[..., half:] = grad[..., half:]
        return d_x, None, None


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """norm(x), x (..., D)."""
    if x.device.type != "xla":
        return norm(x)
    # torch_xla makes it a batch norm over (1, B * L, D), for which every core fetches all activations of all others
    x = x.float()
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias


def shift_tokens(x: Tensor, text_len: int, fmap: int) -> Tensor:
    """x (B, L, D), the first `text_len` of L text and <bos>, the others codes in reading order -> (B, L, D)."""
    return _ShiftTokens.apply(x, text_len, fmap)


def shift_cached(x: Tensor, layout: Layout, memory: dict[str, Any], key: str) -> Tensor:
    """As shift_tokens while sampling: x (B, L, D) is the whole text, or one code after what `memory` has seen."""
    fmap, half, quarter = layout.fmap, x.shape[-1] // 2, x.shape[-1] // 4
    if layout.offset == 0:
        memory[key] = x.new_zeros(x.shape[0], fmap, half)  # the last `fmap` codes, each at its column
        return shift_tokens(x, layout.text_len, fmap)
    column, seen = (layout.offset - layout.text_len) % fmap, memory[key]
    above = seen[:, column, :quarter].clone()
    left = seen[:, column - 1, quarter:] if column else torch.zeros_like(above)
    seen[:, column] = x[:, 0, :half]
    return torch.cat((above, left, x[:, 0, half:]), dim=-1)[:, None]


@dataclass(frozen=True)
class Layer:
    """One layer's modules, as dalle-pytorch built them; layers may share `attention` and `feed_forward`."""

    index: int
    kind: str
    shifts: bool
    attention_scale: nn.Module  # dalle-pytorch's LayerScale, around its PreNorm
    attention: nn.Module
    feed_forward_scale: nn.Module
    feed_forward: nn.Module

    def attend(self, x: Tensor, layout: Layout, memory: dict[str, Any] | None = None) -> Tensor:
        """x (B, L, D) -> what this layer's attention adds to it."""
        x = self._prepared(x, self.attention_scale, layout, memory, f"attention {self.index}")
        qkv = linear(x, self.attention.to_qkv.weight)  # (B, L, 3 * H * Dh)
        qkv = qkv.unflatten(-1, (3, self.attention.heads, -1))
        if memory is None:
            x = attend(qkv, self.kind, layout)
        else:
            x = attend_to_cache(qkv, self.kind, layout, memory, f"keys {self.index}")
        to_out = self.attention.to_out[0]
        return _scaled(linear, x, (), to_out, self.attention_scale.scale)

    def feed(self, x: Tensor, layout: Layout, memory: dict[str, Any] | None = None) -> Tensor:
        """x (B, L, D) -> what this layer's feed-forward network adds to it."""
        x = self._prepared(x, self.feed_forward_scale, layout, memory, f"feed {self.index}")
        w_in, _, _, w_out = self.feed_forward.net
        return _scaled(geglu_feed_forward, x, (w_in.weight, w_in.bias), w_out, self.feed_forward_scale.scale)

    def _prepared(self, x: Tensor, scale: nn.Module, layout: Layout, memory: dict[str, Any] | None, key: str) -> Tensor:
        x = layer_norm(x, scale.fn.norm)
        if not self.shifts:
            return x
        return shift_tokens(x, layout.text_len, layout.fmap) if memory is None else shift_cached(x, layout, memory, key)


def _scaled(function: Any, x: Tensor, inner: tuple[Tensor, ...], last: nn.Linear, scale: Tensor) -> Tensor:
    """LayerScale folded into the last matrix: one pass over the weights in place of one over the tokens, and nothing
    to keep. Not in half precision, where a scale of 1e-6 would leave nothing of the weights."""
    if torch.is_autocast_enabled(x.device.type):
        return function(x, *inner, last.weight, last.bias) * scale
    scale = scale.flatten()
    return function(x, *inner, last.weight * scale[:, None], last.bias * scale)


def layers_of(transformer: nn.Module, kinds: Sequence[str]) -> list[Layer]:
    """The layers of dalle-pytorch's `Transformer`, in order."""
    reversible = hasattr(transformer.layers, "blocks")
    found = []
    for index, kind in enumerate(kinds):
        pair = transformer.layers.blocks[index] if reversible else transformer.layers.layers[index]
        first, second = (pair.f.net, pair.g.net) if reversible else pair
        inner, shifts = _unwrapped(first.fn.fn)
        found.append(Layer(index, kind, shifts, first, inner, second, _unwrapped(second.fn.fn)[0]))
    return found


def _unwrapped(module: nn.Module) -> tuple[nn.Module, bool]:
    """The attention or feed-forward module inside dalle-pytorch's wrappers, and whether a token shift is among them."""
    theirs, shifts = upstream.dalle_transformer(), False
    while isinstance(module, (theirs.CachedAs, theirs.NonCached, theirs.PreShiftToken)):
        shifts = shifts or isinstance(module, theirs.PreShiftToken)
        module = module.fn
    return module, shifts


def run_layers(layers: Sequence[Layer], x: Tensor, layout: Layout, *, reversible: bool, recompute: bool) -> Tensor:
    """x (B, L, D) -> (B, L, D).

    :param recompute: keep no activations but each layer's input (of a reversible model only the last layer's output)
        and compute them again in backward: a third slower, for a fraction of the memory
    """
    if reversible:
        if recompute and torch.is_grad_enabled():
            x1, x2 = _Reversible.apply(x, layers, layout)
        else:
            x1, x2 = x, x
            for layer in layers:
                x1, x2 = _step(layer, x1, x2, layout)
        return (x1 + x2) / 2
    for layer in layers:
        if recompute and torch.is_grad_enabled():
            x = _add_recomputed(layer, x, layout)
        else:
            x = _add(layer, x, layout)
    return x


def run_cached(
    layers: Sequence[Layer], x: Tensor, layout: Layout, memory: dict[str, Any], *, reversible: bool
) -> Tensor:
    """run_layers while sampling: x (B, L, D) is what follows what `memory` has seen."""
    if not reversible:
        for layer in layers:
            x = x + layer.attend(x, layout, memory)
            x = x + layer.feed(x, layout, memory)
        return x
    x1, x2 = x, x
    for layer in layers:
        x1 = x1 + layer.attend(x2, layout, memory)
        x2 = x2 + layer.feed(x1, layout, memory)
    return (x1 + x2) / 2


def _add(layer: Layer, x: Tensor, layout: Layout) -> Tensor:
    x = x + layer.attend(x, layout)
    return x + layer.feed(x, layout)


def _add_recomputed(layer: Layer, x: Tensor, layout: Layout) -> Tensor:
    if x.device.type == "xla":  # its compiler would find the same computation twice, and keep the first one's result
        from torch_xla.utils.checkpoint import checkpoint as checkpoint_on_xla

        return checkpoint_on_xla(_add, layer, x, layout, preserve_rng_state=False)
    return checkpoint(_add, layer, x, layout, use_reentrant=False, preserve_rng_state=False)


def _step(layer: Layer, x1: Tensor, x2: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    x1 = x1 + layer.attend(x2, layout)
    return x1, x2 + layer.feed(x1, layout)


class _Reversible(Function):
    """Gomez et al. 2017, https://arxiv.org/abs/1707.04585: a layer's input is computed back from its output.

    As dalle-pytorch's, it adds to the parameters' .grad while it goes back, so gradients of shared weights are never
    there twice; torch.autograd.grad does not see them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, layers: Sequence[Layer], layout: Layout) -> tuple[Tensor, Tensor]:
        kind = x.device.type
        ctx.layers, ctx.layout = layers, layout
        ctx.autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        x1, x2 = x, x
        with torch.no_grad():
            for layer in layers:
                x1, x2 = _step(layer, x1, x2, layout)
        ctx.save_for_backward(x1, x2)
        return x1, x2

    @staticmethod
    def backward(ctx, d1: Tensor, d2: Tensor) -> tuple[Tensor, None, None]:
        y1, y2 = ctx.saved_tensors
        kind, dtype, enabled = ctx.autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            for layer in reversed(ctx.layers):
                y2, d1 = _back(layer.feed, y1, y2, d1, d2, ctx.layout)
                y1, d2 = _back(layer.attend, y2, y1, d2, d1, ctx.layout)
        return d1 + d2, None, None


def _back(branch: Any, inner: Tensor, outer: Tensor, d_inner: Tensor, d_outer: Tensor, layout: Layout):
    """Undo outer = before + branch(inner) -> (before, gradient of inner)."""
    with torch.enable_grad():
        inner = inner.detach().requires_grad_()
        added = branch(inner, layout)
    torch.autograd.backward(added, d_outer.to(added.dtype))
    return outer - added.detach(), d_inner + inner.grad
