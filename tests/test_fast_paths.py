"""Each fast path of the model against the plain one: outputs and gradients, masks included."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.test_model import SHARED, VARIANTS, batch, build
from volunteer_kit.model import matmul, sparse_attention, upstream
from volunteer_kit.model.attention import attend
from volunteer_kit.model.dalle import Dalle
from volunteer_kit.model.layers import run_cached, run_layers, shift_tokens
from volunteer_kit.model.layout import Layout
from volunteer_kit.model.matmul import Words, geglu_feed_forward, linear, outer, token_losses
from volunteer_kit.model.sampling import guide

ORIGINAL = {**SHARED, "reversible": True, "padding": "masked"}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(result: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(result, leaves, torch.linspace(-1, 1, result.numel()).view_as(result)))


def assert_equal_roads(fast, plain, *leaves: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Both functions of the leaves give the same, and the same gradients."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    results = [function(*leaves) for function in (fast, plain)]
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
    for found, expected in zip(*(gradients(result, *leaves) for result in results), strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.norm().item())


# --- attention ---


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["axial_row", "axial_col", "conv_like"]),
    fmap=st.integers(1, 9),
    text=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    half_dim=st.integers(3, 9),
    rotary=st.booleans(),
    masked=st.booleans(),
)
def test_sparse_attention_is_the_masked_one(kind, fmap, text, heads, half_dim, rotary, masked):
    is_text = F.pad(torch.tensor(text), (1, 0), value=True) if masked else None  # <bos> is always seen
    L, turning = 5 + fmap**2 - 1, 2 * (half_dim // 2)
    angles = numbers(L, turning // 2).repeat_interleave(2, dim=-1) if rotary else None
    layout = Layout(5, fmap, angles, is_text)
    qkv = numbers(len(text), L, 3, heads, 2 * half_dim, seed=1)

    def fast(qkv):
        return sparse_attention.sparse_attention(qkv, kind, layout)

    with mock.patch.object(sparse_attention, "DENSE_UP_TO", L):  # attend() takes the plain road up to here
        assert_equal_roads(fast, lambda qkv: attend(qkv, kind, layout), qkv)


@pytest.mark.parametrize("missing", ["sparse_attention._flash_backward", "matmul._onednn"])
def test_a_pytorch_without_these_kernels_computes_the_same(missing):
    model = build(**VARIANTS["sparse"], padding="masked")
    text, codes = batch(model.config)
    expected = model(text, codes).loss
    expected.backward()
    kept = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with mock.patch(f"volunteer_kit.model.{missing}", None):
        loss = model(text, codes).loss
        loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, kept[name], rtol=1e-3, atol=1e-6, msg=name)


# --- matrix products ---


@settings(max_examples=20, deadline=None)
@given(B=st.integers(0, 3), L=st.integers(1, 9), width=st.integers(1, 7), out=st.integers(1, 7), bias=st.booleans())
def test_linear_is_f_linear(B, L, width, out, bias):
    leaves = [numbers(B, L, width), numbers(out, width, seed=1), *([numbers(out, seed=2)] if bias else [])]
    if B:
        assert_equal_roads(linear, F.linear, *leaves)
    assert linear(*leaves).shape == (B, L, out)
    torch.testing.assert_close(outer(numbers(5, out), numbers(5, width)), numbers(5, out).T @ numbers(5, width))


@settings(max_examples=20, deadline=None)
@given(L=st.integers(1, 20), dim=st.integers(1, 6), inner=st.integers(1, 9), at_once=st.sampled_from([1, 40, 2**22]))
def test_feed_forward_is_two_linears_around_geglu(L, dim, inner, at_once):
    def plain(x, w_in, b_in, w_out, b_out):
        value, gate = F.linear(x, w_in, b_in).chunk(2, dim=-1)
        return F.linear(value * F.gelu(gate), w_out, b_out)

    shapes = ((2, L, dim), (2 * inner, dim), (2 * inner,), (dim, inner), (dim,))
    leaves = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    with mock.patch.object(matmul, "INNER_AT_ONCE", at_once):
        assert_equal_roads(geglu_feed_forward, plain, *leaves)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.tuples(st.integers(0, 9), st.integers(1, 9)),
    at_once=st.sampled_from([1, 20, 2**24]),
    seed=st.integers(0, 99),
)
def test_token_losses_are_cross_entropies(rows, at_once, seed):
    spans, dim = ((0, 5), (5, 12)), 4
    labels = [torch.arange(n) * 7 % (end - start) for n, (start, end) in zip(rows, spans, strict=True)]
    shares = [numbers(n, seed=seed).abs() for n in rows]

    def fast(weight, bias, *xs):
        words = [Words(x, y, s, *span) for x, y, s, span in zip(xs, labels, shares, spans, strict=True)]
        return torch.stack(token_losses(weight, bias, *words))

    def plain(weight, bias, *xs):
        losses = []
        for x, y, s, (start, end) in zip(xs, labels, shares, spans, strict=True):
            logits = F.linear(x, weight[start:end], bias[start:end])
            losses.append((F.cross_entropy(logits, y, reduction="none") * s).sum())
        return torch.stack(losses)

    xs = [numbers(n, dim, seed=seed + i) for i, n in enumerate(rows)]
    with mock.patch.object(matmul, "LOGITS_AT_ONCE", at_once):
        assert_equal_roads(fast, plain, numbers(12, dim, seed=7), numbers(12, seed=8), *xs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_token_losses_keep_small_gradients_in_half_precision(dtype):
    """A share of 1e-6 times a probability would vanish in fp16; shares are taken out of the products."""
    weight, bias, x = numbers(50, 8).requires_grad_(), torch.zeros(50), numbers(6, 8, seed=1).requires_grad_()
    words = Words(x, torch.arange(6), torch.full((6,), 1e-7), 0, 50)
    (exact,) = token_losses(weight, bias, words)
    expected = torch.autograd.grad(exact, (weight, x))
    with torch.autocast("cpu", dtype=dtype):
        (loss,) = token_losses(weight, bias, words)
    assert loss.dtype == torch.float32
    for found, want in zip(torch.autograd.grad(loss, (weight, x)), expected, strict=True):
        assert found.dtype == torch.float32 and (found - want).norm() < 0.02 * want.norm()


def test_evaluating_takes_no_gradients():
    model = build()
    with torch.no_grad(), mock.patch.object(matmul, "outer", side_effect=AssertionError):
        assert torch.isfinite(model(*batch(model.config)).loss)


# --- layers ---


@settings(max_examples=25, deadline=None)
@given(text_len=st.integers(1, 6), fmap=st.integers(1, 5), cut=st.integers(1, 3), quarter=st.integers(1, 3))
def test_token_shift_is_dalle_pytorchs(text_len, fmap, cut, quarter):
    L = text_len + max(fmap**2 - cut, 0)
    theirs = upstream.dalle_transformer().PreShiftToken(lambda x, cache=None: x, fmap, text_len + fmap**2 - 1)
    leaf = numbers(2, L, 4 * quarter)
    assert_equal_roads(lambda x: shift_tokens(x, text_len, fmap), lambda x: theirs(x), leaf)


@pytest.mark.parametrize("changes", [ORIGINAL, {**ORIGINAL, "reversible": False}, VARIANTS["sparse"]])
def test_checkpointing_changes_memory_only(changes):
    kept = []
    for checkpointing in (False, True):
        model = build(**changes)
        model.checkpointing = checkpointing
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=saved: into.append(t.numel()) or t, lambda t: t):
            loss = model(*batch(model.config)).loss
        loss.backward()
        kept.append((loss, {name: p.grad for name, p in model.named_parameters()}, sum(saved)))
    (loss, grads, stored), (loss_again, grads_again, stored_again) = kept
    torch.testing.assert_close(loss_again, loss)
    assert stored_again < 0.6 * stored
    for name, grad in grads.items():
        torch.testing.assert_close(grads_again[name], grad, rtol=1e-3, atol=1e-6, msg=name)


# --- paddings that nobody sees ---


def captions() -> torch.Tensor:
    return torch.tensor([[1, 2, 3, 0, 0, 0], [0, 0, 0, 0, 0, 0], [4, 5, 6, 7, 0, 0], [9, 8, 0, 0, 0, 0]])


@pytest.mark.parametrize("changes", [{}, ORIGINAL, dict(rotary_emb=False, share_input_output_emb=False)])
def test_masked_paddings_are_neither_seen_nor_learned(changes):
    model, text = build(**{"padding": "masked", **changes}), captions()
    codes = torch.randint(11, (4, 16), generator=torch.Generator().manual_seed(0))
    whole = model(text, codes)
    whole.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    table = grads["to_logits.1.weight" if model.config.share_input_output_emb else "text_emb.weight"]
    assert not table[20:26].any()  # the paddings' rows
    model.zero_grad()
    alone = [model(text[i : i + 1], codes[i : i + 1]) for i in range(4)]  # each without its neighbours' paddings
    torch.testing.assert_close(whole.loss, torch.stack([one.loss for one in alone]).mean())
    assert alone[1].text_loss == 0  # no caption, nothing to say
    torch.stack([one.loss for one in alone]).mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[name], rtol=1e-3, atol=1e-6, msg=name)


def test_what_stands_at_a_padding_changes_nothing():
    """The plain road: all columns are there, only hidden. Other numbers at the paddings give the same loss."""
    model, text = build(**ORIGINAL), captions()
    codes = torch.randint(11, (4, 16), generator=torch.Generator().manual_seed(0))
    expected = model(text, codes).loss
    laid_out = Dalle._laid_out

    def uncut(self, text):
        _, lengths, _ = laid_out(self, text)
        is_text = F.pad(text != 0, (1, 0), value=True)
        angles = self.transformer.pos_emb[0][: text.shape[1] + self.config.image_seq_len]
        return text, lengths, Layout(1 + text.shape[1], self.config.image_fmap_size, angles, is_text)

    with mock.patch.object(Dalle, "_laid_out", uncut):
        torch.testing.assert_close(model(text, codes).loss, expected)
        with torch.no_grad():
            model.to_logits[1].weight[20:26].add_(1.0)  # other paddings
        torch.testing.assert_close(model(text, codes).loss, expected)


def test_the_memory_of_sampling_is_told_beforehand():
    model, kept = build(**ORIGINAL), []
    with mock.patch(
        "volunteer_kit.model.dalle.run_cached", side_effect=lambda *a, **k: kept.append(a[3]) or run_cached(*a, **k)
    ):
        model.generate(torch.full((3, 6), 5), temperature=0)
    size = sum(t.numel() * 4 for key, t in kept[-1].items() if key.startswith("keys"))
    assert size == 3 * model.sampling_bytes


def draw_without_cache(model: Dalle, text: torch.Tensor, cond_scale: float) -> torch.Tensor:
    """The likeliest codes, everything computed anew for each."""
    codes = text[:, :0]
    for _ in range(model.config.image_seq_len):
        logits = []
        for caption in (text, torch.zeros_like(text)):
            short, lengths, layout = model._laid_out(caption)
            x = model._embed(short, codes)
            x = run_layers(model.layers, x, layout, reversible=model.config.reversible, recompute=False)
            last = x[torch.arange(len(x)), lengths] if codes.shape[1] == 0 else x[:, -1]
            logits.append(model._image_logits(model.to_logits[0](last)))
        codes = torch.cat((codes, guide(*logits, cond_scale).argmax(-1, keepdim=True)), dim=1)
    return codes


@pytest.mark.parametrize("changes", [{}, ORIGINAL, VARIANTS["no rotary, own embeddings"], VARIANTS["no token shift"]])
@pytest.mark.parametrize("cond_scale", [1.0, 2.0])
def test_cached_sampling_of_short_captions_is_the_uncached_one(changes, cond_scale):
    model = build(**{**changes, "padding": "masked"})
    with torch.no_grad():
        expected = draw_without_cache(model, captions(), cond_scale)
    assert torch.equal(model.generate(captions(), temperature=0, cond_scale=cond_scale), expected)
