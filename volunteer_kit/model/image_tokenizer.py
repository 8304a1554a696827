"""A small discrete autoencoder: a picture as fmap x fmap codes, each for one square patch. And how the weights of any
image tokenizer, this one or a Vqgan, are read and written.

The encoder may look no further than its patch, so that the same patch gives the same code wherever it lies: that is
what a transformer learns fastest. The decoder sees neighbouring codes and draws edges across patches. Codes are found
by vector quantization with a moving-average codebook (van den Oord et al. 2017, https://arxiv.org/abs/1711.00937,
appendix A.1) over unit vectors (Yu et al. 2021, https://arxiv.org/abs/2110.04627); unused codes restart at vectors of
the batch (Dhariwal et al. 2020, https://arxiv.org/abs/2005.00341).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from volunteer_kit.model.image_tokenizer_config import (
    PUBLISHED,
    WEIGHTS,
    ImageTokenizerError,
    PatchVQConfig,
    VqganConfig,
    broken_tokenizer,
    image_tokenizer_config,
    image_tokenizer_file,
    published_file,
    read_header,
)
from volunteer_kit.model.vqgan import Vqgan
from volunteer_kit.storage import part_folder, put_in_place

__all__ = [
    "PUBLISHED",
    "WEIGHTS",
    "ImageTokenizer",
    "ImageTokenizerError",
    "PatchVQ",
    "PatchVQConfig",
    "VqganConfig",
    "image_tokenizer_config",
    "image_tokenizer_file",
    "load_image_tokenizer",
    "published_file",
    "save_vqgan",
]


class Reconstruction(NamedTuple):
    """What training needs from one pass."""

    images: Tensor  # (B, 3, S, S), about [0, 1], not clipped
    codes: Tensor  # (B, N) int64
    vectors: Tensor  # (B, N, E) what the encoder said, before rounding
    commitment: Tensor  # scalar: how far the encoder's vectors lie from their codes


class _Block(nn.Module):
    def __init__(self, width: int, reach: int) -> None:
        super().__init__()
        kernel = 2 * reach + 1
        self.net = nn.Sequential(nn.Conv2d(width, width, kernel, padding=reach), nn.GELU(), nn.Conv2d(width, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(F.gelu(x))


class PatchVQ(nn.Module):
    """S = image_size, N = fmap**2 codes of a picture in reading order, K = num_codes, E = code_dim."""

    def __init__(self, config: PatchVQConfig) -> None:
        super().__init__()
        self.config = config
        hidden, patch = config.hidden, config.patch
        self.encoder = nn.Sequential(
            nn.Conv2d(3, hidden, patch, stride=patch),
            *(_Block(hidden, config.encoder_reach) for _ in range(config.encoder_blocks)),
            nn.GELU(),
            nn.Conv2d(hidden, config.code_dim, 1),
        )
        self.decoder = nn.Sequential(
            nn.Conv2d(config.code_dim, hidden, 1),
            *(_Block(hidden, 1) for _ in range(config.decoder_blocks)),
            nn.GELU(),
            nn.Conv2d(hidden, 3 * patch * patch, 1),
            nn.PixelShuffle(patch),
        )
        codebook = torch.empty(config.num_codes, config.code_dim)
        if not codebook.is_meta:  # to draw what has no values loads torch's compiler, which takes a second
            codebook = F.normalize(codebook.normal_(), dim=-1)
        self.register_buffer("codebook", codebook)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """images (B, 3, S, S) float in [0, 1] -> codes (B, N) int64. Raises ValueError for another shape."""
        return self.nearest(self.vectors(images))

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """codes (B, N) int64 -> images (B, 3, S, S) float in [0, 1]. Raises ValueError for codes out of range."""
        if codes.ndim != 2 or codes.shape[1] != self.config.fmap**2:
            raise ValueError(f"codes are {tuple(codes.shape)}; this tokenizer decodes (B, {self.config.fmap**2})")
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.config.num_codes:
            raise ValueError(f"codes must lie in 0..{self.config.num_codes - 1}; are they another tokenizer's?")
        return self._draw(self.codebook[codes]).clamp(0, 1)

    def forward(self, images: Tensor, noise: float | None = None) -> Reconstruction:
        """One differentiable pass; gradients go straight through the choice of codes. With `noise`, vectors are not
        rounded to codes, but shaken by that much."""
        vectors = self.vectors(images)  # (B, N, E)
        codes = self.nearest(vectors.detach())
        chosen = self.codebook[codes]  # (B, N, E)
        if noise is None:
            drawn = vectors + (chosen - vectors).detach()
        else:
            drawn = F.normalize(vectors + noise * torch.randn_like(vectors), dim=-1)
        return Reconstruction(self._draw(drawn), codes, vectors, (vectors - chosen).square().sum(-1).mean())

    def vectors(self, images: Tensor) -> Tensor:
        """images (B, 3, S, S) -> unit vectors (B, N, E), before they are rounded to codes."""
        size = self.config.image_size
        if images.ndim != 4 or images.shape[1:] != (3, size, size):
            raise ValueError(f"images are {tuple(images.shape)}; this tokenizer encodes (B, 3, {size}, {size})")
        return F.normalize(self.encoder(images * 2 - 1).flatten(2).transpose(1, 2), dim=-1)

    def nearest(self, vectors: Tensor) -> Tensor:
        """Unit vectors (..., E) -> the code of the nearest codebook vector (...)."""
        return (vectors @ self.codebook.T).argmax(dim=-1)

    def _draw(self, chosen: Tensor) -> Tensor:
        fmap = self.config.fmap
        grid = chosen.transpose(1, 2).unflatten(2, (fmap, fmap))  # (B, E, fmap, fmap)
        return (self.decoder(grid) + 1) / 2

    def save(self, path: str | Path) -> None:
        """One safetensors file in fp16 with the config in its header; an earlier file stays whole until it is there."""
        _write(path, {name: tensor.half() for name, tensor in self.state_dict().items()}, "patch_vq", self.config)


ImageTokenizer = PatchVQ | Vqgan
KINDS: dict[str, type[PatchVQ] | type[Vqgan]] = {"patch_vq": PatchVQ, "vqgan": Vqgan}


def save_vqgan(path: str | Path, tokenizer: Vqgan) -> None:
    """As PatchVQ.save, in the weights' own type: rounded, they would give other codes."""
    _write(path, tokenizer.state_dict(), "vqgan", tokenizer.config)


def load_image_tokenizer(name_or_path: str | Path) -> ImageTokenizer:
    """A shipped tokenizer ("scenes32", "emoji64"), a published one that was converted here ("vqgan-f8-8192"), or a file
    that `train-tokenizer` or `convert` wrote -> PatchVQ or Vqgan, in eval mode.

    Raises ImageTokenizerError; MissingDependency for a Vqgan without taming-transformers.
    """
    path = image_tokenizer_file(name_or_path)
    try:
        with safe_open(path, framework="pt") as file:
            kind, config = read_header(file)
            # copies: tensors that stay mapped to a file crash the process when somebody rewrites that file
            tensors = {name: file.get_tensor(name).to(torch.float32, copy=True) for name in file.keys()}
        with torch.device("meta"):  # draws no random weights
            tokenizer = KINDS[kind](config)
        tokenizer.load_state_dict(tensors, assign=True)
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise ValueError("its weights are not finite")
        if config != PUBLISHED.get(str(name_or_path), config):
            raise ValueError("its sizes are not those of the published one")
    except (SafetensorError, ValidationError, ValueError, RuntimeError) as error:
        raise broken_tokenizer(path, error) from error
    return tokenizer.eval().requires_grad_(False)


def _write(path: str | Path, tensors: dict[str, Tensor], key: str, config: BaseModel) -> None:
    path = Path(path)
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    with part_folder(path) as part:
        written = part / path.name
        # one field only: safetensors writes several in random order, and a run's fingerprint holds the file's hash
        save_file(tensors, written, metadata={key: config.model_dump_json()})
        written.chmod(0o644)  # safetensors writes 0600, which an installed package must not have
        put_in_place(written, path)
