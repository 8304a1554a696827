"""The transformer: equal to dalle-pytorch's own, at the original's size, and able to learn and to draw."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest
import torch
from pydantic import ValidationError

from volunteer_kit.convert.dalle_layout import hparams_of
from volunteer_kit.model import upstream
from volunteer_kit.model.dalle import PRESETS, Dalle, DalleConfig
from volunteer_kit.model.layout import attention_mask
from volunteer_kit.model.sampling import guide, sample

SMALL = dict(
    padding="dalle-pytorch",
    dim=32,
    depth=3,
    heads=2,
    dim_head=16,
    text_seq_len=6,
    num_text_tokens=20,
    image_fmap_size=4,
    num_image_tokens=11,
)
SHARED = dict(
    depth=6, attn_types=("axial_row", "axial_col", "axial_row", "axial_row"), shared_attn_ids=(0, 1, 2, 3),
    shared_ff_ids=(0, 1, 2, 3), last_layer_conv_like=True,
)  # fmt: skip
VARIANTS = {
    "full": {},
    "as the original": {**SHARED, "reversible": True},
    "sparse": {**SHARED, "image_fmap_size": 32, "depth": 5, "dim": 16, "heads": 1},
    "no rotary, own embeddings": dict(
        rotary_emb=False, share_input_output_emb=False, attn_types=("axial_row", "full", "conv_like")
    ),
    "no token shift": dict(shift_tokens=False, attn_types=("conv_like", "axial_col")),
}


def build(**changes) -> Dalle:
    torch.manual_seed(0)
    return Dalle(DalleConfig(**{**SMALL, **changes}))


def batch(config: DalleConfig, size: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(1, config.num_text_tokens, (size, config.text_seq_len), generator=generator)
    text[0, 3:] = 0
    return text, torch.randint(config.num_image_tokens, (size, config.image_seq_len), generator=generator)


def reference(model: Dalle) -> torch.nn.Module:
    """dalle-pytorch's own DALLE with the weights of `model`."""
    c, theirs = model.config, upstream.dalle_reference()
    vae = theirs.DiscreteVAE(
        image_size=2 * c.image_fmap_size, num_tokens=c.num_image_tokens, num_layers=1, codebook_dim=4, hidden_dim=4
    )
    dalle = theirs.DALLE(vae=vae, **hparams_of(c))
    missing, superfluous = dalle.load_state_dict(model.state_dict(), strict=False)
    assert not superfluous and all(name.startswith("vae.") for name in missing)  # the same weight names
    return dalle


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_are_those_of_dalle_pytorch(variant):
    model = build(**VARIANTS[variant])
    theirs = reference(model)
    text, codes = batch(model.config)
    loss = model(text, codes).loss
    expected = theirs(text.clone(), codes, return_loss=True)
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    gradients = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "sparse"])
def test_cached_sampling_draws_what_the_uncached_reference_would(variant):
    model = build(**VARIANTS[variant]).train()
    theirs = reference(model).eval()
    text, _ = batch(model.config)
    drawn = model.generate(text, temperature=0)
    assert model.training
    codes = drawn[:, :0]
    with torch.no_grad():
        for _ in range(model.config.image_seq_len):
            logits = theirs(text.clone(), codes)[:, -1, theirs.num_text_tokens :]
            codes = torch.cat((codes, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(drawn, codes)


def test_cached_sampling_of_sparse_layers():
    """Too many codes for the reference in a test: the drawn codes must be the likeliest under one whole pass."""
    model = build(**VARIANTS["sparse"]).eval()
    text, _ = batch(model.config, size=1)
    drawn = model.generate(text, temperature=0)
    with torch.no_grad():
        logits = reference(model).eval()(text.clone(), drawn)[:, model.config.text_seq_len :, model.num_text :]
    assert (logits.argmax(-1) == drawn).float().mean() > 0.999


def test_the_original_has_its_published_size():
    with torch.device("meta"):
        model = Dalle(PRESETS["original"])
    assert PRESETS["original"].total_tokens == 40_548
    assert round(model.num_parameters() / 1e6, 1) == 125.9
    kinds = PRESETS["original"].layer_kinds
    assert kinds[:5] == ["axial_row", "axial_col", "axial_row", "axial_row", "axial_row"] and kinds[-1] == "conv_like"


def test_mask_lets_each_position_see_what_its_kind_says():
    text_len, fmap = 3, 8
    for kind in ("full", "axial_row", "axial_col", "conv_like"):
        mask = attention_mask(kind, text_len, fmap)
        assert mask.shape == (text_len + fmap**2 - 1,) * 2
        assert not mask.triu(1).any() and mask[text_len:, :text_len].all()
        y, x = 6, 5
        seen = {divmod(i, fmap) for i in mask[text_len + y * fmap + x, text_len:].nonzero()[:, 0].tolist()}
        before = {(v, u) for v, u in product(range(fmap), repeat=2) if (v, u) <= (y, x)}
        near = {
            "full": before,
            "axial_row": {(v, u) for v, u in before if v == y},
            "axial_col": {(v, u) for v, u in before if u == x},
            "conv_like": {(v, u) for v, u in before if y - v < 5 and 0 <= x - u < 5},
        }
        assert seen == near[kind]


def test_paddings_differ_by_position_and_from_bos():
    model = build()
    padded = model._with_unique_padding(torch.zeros(1, 6, dtype=torch.int64))[0]
    assert padded.tolist() == [20, 21, 22, 23, 24, 25]
    assert model.num_text == 26 and model.config.total_tokens == 37


def test_it_learns_which_picture_belongs_to_which_caption():
    model = build(depth=2)
    text = torch.tensor([[1, 2, 0, 0, 0, 0], [1, 3, 0, 0, 0, 0], [4, 2, 5, 0, 0, 0]])
    codes = torch.randint(11, (3, 16), generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    first = model(text, codes)
    for _ in range(60):
        optimizer.zero_grad()
        model(text, codes).loss.backward()
        optimizer.step()
    assert first.image_loss > 2 and model(text, codes).image_loss < 0.1
    assert torch.equal(model.generate(text, temperature=0), codes)
    assert torch.equal(model.generate(text, temperature=0.5, top_k=2, cond_scale=1.5), codes)


def test_sampling_is_repeatable_and_in_range():
    model, text = build(), torch.zeros(4, 6, dtype=torch.int64)
    a, b, c = (model.generate(text, generator=torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert a.shape == (4, 16) and 0 <= a.min() and a.max() < 11


def test_guidance_of_one_changes_nothing_and_zero_ignores_the_caption():
    model = build()
    text, _ = batch(model.config)
    empty = torch.zeros_like(text)
    greedy = {scale: model.generate(text, temperature=0, cond_scale=scale) for scale in (1.0, 0.0, 3.0)}
    assert torch.equal(greedy[0.0], model.generate(empty, temperature=0))
    assert not torch.equal(greedy[1.0], greedy[0.0])
    logits, null = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    assert guide(logits, null, 1.0).tolist() == logits.tolist() and guide(logits, null, 3.0).tolist() == [[4.0, -2.0]]


def test_sample_keeps_to_top_k_and_temperature():
    logits = torch.tensor([[0.0, 3.0, 2.9, -1.0]]).repeat(500, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(sample(logits, 1.0, 2, generator).tolist()) == {1, 2}
    assert set(sample(logits, 0.0).tolist()) == {1}
    assert (sample(logits, 0.01, None, generator) == 1).float().mean() > 0.99
    for wrong in (dict(temperature=-1.0), dict(top_k=0)):
        with pytest.raises(ValueError, match="top_k 1 or more"):
            sample(logits, **wrong)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("reversible", [False, True])
@pytest.mark.parametrize("padding", ["masked", "dalle-pytorch"])
def test_mixed_precision_stays_near_and_returns_fp32(reversible, checkpointing, padding):
    model = build(reversible=reversible, padding=padding)
    model.checkpointing = checkpointing
    text, codes = batch(model.config)
    exact = model(text, codes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(text, codes)
    mixed.loss.backward()
    assert {value.dtype for value in mixed} == {torch.float32}
    assert abs(mixed.loss.item() - exact.loss.item()) < 0.05
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_weights_go_to_another_model_and_foreign_ones_are_refused():
    model, other = build(), build()
    with torch.no_grad():
        model.to_logits[1].weight.add_(1)
    tensors = model.tensors()
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == len(tensors)  # tied weights appear once
    assert sum(tensor.numel() for tensor in tensors.values()) == model.num_parameters()
    other.load_tensors(tensors)
    text, codes = batch(model.config)
    assert torch.equal(model(text, codes).loss, other(text, codes).loss)
    with pytest.raises(ValueError, match=r"to_logits.1.weight is .*, not"):
        build(num_image_tokens=12).load_tensors(tensors)
    with pytest.raises(ValueError, match="is missing"):
        other.load_tensors({})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(attn_types=("full", "axial_row"), shared_attn_ids=(0,)), "the same cycle"),
        (dict(dim=30), "multiple of 4"),
        (dict(shared_ff_ids=()), "empty"),
        (dict(attn_types=("sparse",)), "axial_row"),
        (dict(width=3), "Extra inputs"),
        (dict(depth=0), "greater than 0"),
    ],
)
def test_impossible_configs_are_refused_in_words(changes, says):
    with pytest.raises(ValidationError, match=says):
        DalleConfig(**{**SMALL, **changes})


def test_wrong_shapes_are_refused():
    model = build()
    text, codes = batch(model.config)
    with pytest.raises(ValueError, match=r"reads \(B, 6\) and \(B, 16\)"):
        model(text, codes[:, :8])


def test_importing_leaves_nothing_behind():
    upstream.dalle_reference(), upstream.taming_layers(), upstream.taming_quantize()
    assert not [name for name in sys.modules if name.split(".")[0] in ("dalle_pytorch", "taming")]
    assert upstream.dalle_reference().Transformer is upstream.dalle_transformer().Transformer


def test_a_missing_requirement_of_dalle_pytorch_is_named_too():
    code = (
        "import sys; sys.modules['rotary_embedding_torch'] = None\n"
        "from volunteer_kit.model.dalle import PRESETS, Dalle\nDalle(PRESETS['tiny'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert run.returncode == 1
    assert "MissingDependency" in run.stderr and "'rotary-embedding-torch' is not installed" in run.stderr
    assert "volunteer-kit setup" in run.stderr
