"""VQGAN with Gumbel quantization, on taming-transformers' own layers: an image as codes and back.

Esser et al. 2021, https://arxiv.org/abs/2012.09841; Gumbel-softmax: Jang et al. 2016, https://arxiv.org/abs/1611.01144.
Weights have the names of taming's GumbelVQ, so that a published checkpoint fits once it is no pickle any more.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from volunteer_kit.model import upstream
from volunteer_kit.model.image_tokenizer_config import VqganConfig

# pixels in one pass: four images of 256x256; with the published layers their activations take half a GB
PIXELS_AT_ONCE = 4 * 256**2
PARTS = ("encoder.", "decoder.", "quantize.", "quant_conv.", "post_quant_conv.")  # the rest served training only


class Vqgan(nn.Module):
    """S = image_size, N = fmap**2 codes of an image in reading order, K = n_embed, E = embed_dim.

    Encoding is not trained here and draws no noise: a code is the likeliest one, always the same for an image on one
    machine. (Processors that round differently may disagree where two codes are almost equally likely.)
    Raises MissingDependency if taming-transformers is not installed.
    """

    def __init__(self, config: VqganConfig) -> None:
        super().__init__()
        self.config = config
        layers, shape = upstream.taming_layers(), config.model_dump(exclude={"embed_dim", "n_embed"})
        with contextlib.redirect_stdout(io.StringIO()):  # theirs prints, and a worker's events go through stdout
            self.encoder, self.decoder = layers.Encoder(**shape), layers.Decoder(**shape)
        self.quantize = upstream.taming_quantize().GumbelQuantize(config.z_channels, config.embed_dim, config.n_embed)
        self.quant_conv = nn.Conv2d(config.z_channels, config.embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.embed_dim, config.z_channels, 1)
        self.eval().requires_grad_(False)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """images (B, 3, S, S) float in [0, 1] -> codes (B, N) int64. Raises ValueError for another shape."""
        size = self.config.image_size
        if images.ndim != 4 or images.shape[1:] != (3, size, size):
            raise ValueError(f"images are {tuple(images.shape)}; this tokenizer encodes (B, 3, {size}, {size})")
        codes = [images.new_empty((0, self.config.fmap**2), dtype=torch.int64)]
        for part in self._parts(images):
            logits = self.quantize.proj(self.quant_conv(self.encoder(part * 2 - 1)))  # (b, K, fmap, fmap)
            codes.append(logits.argmax(dim=1).flatten(1))  # the quantizer's own forward would draw noise first
        return torch.cat(codes)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """codes (B, N) int64 -> images (B, 3, S, S) float in [0, 1]. Raises ValueError for codes out of range."""
        size, fmap = self.config.image_size, self.config.fmap
        if codes.ndim != 2 or codes.shape[1] != fmap**2:
            raise ValueError(f"codes are {tuple(codes.shape)}; this tokenizer decodes (B, {fmap**2})")
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.config.num_codes:
            raise ValueError(f"codes must lie in 0..{self.config.num_codes - 1}; are they another tokenizer's?")
        images = [self.quantize.embed.weight.new_empty((0, 3, size, size))]
        for part in self._parts(codes):
            vectors = F.embedding(part, self.quantize.embed.weight)  # (b, N, E)
            grid = vectors.transpose(1, 2).unflatten(2, (fmap, fmap))  # (b, E, fmap, fmap)
            drawn = self.decoder(self.post_quant_conv(grid))  # (b, 3, S, S), about [-1, 1]
            images.append(((drawn + 1) / 2).clamp(0, 1))
        return torch.cat(images)

    def _parts(self, batch: Tensor) -> Iterator[Tensor]:
        """The batch in parts of bounded memory; none of an empty batch."""
        return iter(batch.split(max(1, PIXELS_AT_ONCE // self.config.image_size**2)) if len(batch) else ())


def config_of_weights(weights: Mapping[str, Tensor], resolution: int = 256) -> VqganConfig:
    """The config that weights of a GumbelVQ were made with, read from their shapes; only the resolution is in none.

    Raises ValueError (pydantic's) for a shape that no Vqgan has, KeyError for a missing weight.
    """
    levels = _count(weights, "encoder.down.{}.block.0.conv1.weight")
    ch = weights["encoder.conv_in.weight"].shape[0]
    outs = [weights[f"encoder.down.{level}.block.0.conv1.weight"].shape[0] for level in range(levels)]
    attends = [f"encoder.down.{level}.attn.0.q.weight" in weights for level in range(levels)]
    return VqganConfig(
        resolution=resolution,
        ch=ch,
        ch_mult=tuple(out // ch for out in outs),
        num_res_blocks=_count(weights, "encoder.down.0.block.{}.conv1.weight"),
        attn_resolutions=tuple(resolution >> level for level in range(levels) if attends[level]),
        z_channels=weights["encoder.conv_out.weight"].shape[0],
        embed_dim=weights["quantize.embed.weight"].shape[1],
        n_embed=weights["quantize.embed.weight"].shape[0],
    )


def _count(weights: Mapping[str, Tensor], name: str) -> int:
    number = 0
    while name.format(number) in weights:
        number += 1
    return number
