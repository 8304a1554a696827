"""A device that compiles for one shape gets whole captions, paddings included; the result is the same."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.test_model import SHARED, batch, build

ROADS = {
    "masked": {"padding": "masked"},
    "masked, as the original": {**SHARED, "reversible": True, "padding": "masked"},
    "masked, own embeddings": {"padding": "masked", "rotary_emb": False, "share_input_output_emb": False},
    "dalle-pytorch": {"padding": "dalle-pytorch"},
}


def loss_and_gradients(model, text, codes) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    losses = model(text, codes)
    losses.loss.backward()
    return torch.stack(losses), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changes", ROADS.values(), ids=ROADS)
def test_whole_captions_give_the_same_loss_and_gradients(changes):
    model = build(**changes)
    text, codes = batch(model.config, size=3)
    text[:, 4:] = 0  # columns that nobody sees, which other devices leave out
    text[1] = 0  # and a caption of nothing
    expected, gradients = loss_and_gradients(model, text, codes)
    with mock.patch("volunteer_kit.model.dalle.shapes_are_fixed", lambda _: True):
        found, same = loss_and_gradients(model, text, codes)
    torch.testing.assert_close(found, expected)
    assert same.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(same[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_no_shape_depends_on_the_captions():
    """What the loss is computed over is the same for short captions and long ones."""
    model, seen = build(padding="masked"), []
    text, codes = batch(model.config)
    with (
        mock.patch("volunteer_kit.model.dalle.shapes_are_fixed", lambda _: True),
        mock.patch(
            "volunteer_kit.model.dalle.token_losses",
            lambda weight, bias, *words: seen.append([tuple(one.rows.shape) for one in words]) or (weight.sum(),) * 2,
        ),
    ):
        for words in (0, 1, model.config.text_seq_len):
            short = text.masked_fill(torch.arange(text.shape[1]) >= words, 0)
            model(short, codes)
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2]
