"""How a PatchVQ learns: first without rounding, then with a codebook that follows what the encoder says.

Reconstruction is learned by gradients; the codebook by moving averages of the vectors that chose each code, after a
start from k-means (both as in the papers named in image_tokenizer.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from volunteer_kit import output
from volunteer_kit.model.image_tokenizer import PatchVQ

CONTINUOUS_SHARE = 0.35  # of the steps, before vectors are rounded to codes
RESTART_SHARE = 0.7  # of the steps; unused codes restart until then
NOISE = 0.1  # added to unit vectors before there are codes, so that what must be told apart lies apart


class Codebook:
    """The moving averages behind `model.codebook`; one `update` a step keeps every code in use."""

    def __init__(self, model: PatchVQ, vectors: Tensor, decay: float = 0.97) -> None:
        """Start from k-means over unit vectors (M, E)."""
        self.model, self.decay = model, decay
        model.codebook.copy_(spherical_kmeans(vectors, model.config.num_codes))
        self.counts = torch.ones(model.config.num_codes)  # (K,) how often each was chosen a step
        self.sums = model.codebook.clone()  # (K, E)

    @torch.no_grad()
    def update(self, vectors: Tensor, codes: Tensor, restart_below: float) -> int:
        """vectors (M, E), their codes (M,) -> how many codes were chosen too rarely and restarted elsewhere."""
        chosen = F.one_hot(codes, len(self.counts)).to(vectors)  # (M, K)
        self.counts.lerp_(chosen.sum(0), 1 - self.decay)
        self.sums.lerp_(chosen.T @ vectors, 1 - self.decay)
        dead = self.counts < restart_below
        if dead.any():  # far-off vectors first: what is rare has no code of its own yet
            distance = 1 - (vectors * self.model.codebook[codes]).sum(-1)  # (M,)
            fresh = torch.multinomial(distance.clamp(min=1e-6), int(dead.sum()))
            self.sums[dead] = vectors[fresh]
            self.counts[dead] = 1.0
        self.model.codebook.copy_(F.normalize(self.sums, dim=-1))
        return int(dead.sum())


def spherical_kmeans(vectors: Tensor, count: int, rounds: int = 15) -> Tensor:
    """Unit vectors (M, E) -> `count` unit centres (count, E). Starts from the points farthest from each other, and
    counts vectors that are nearly equal once, so that rare kinds get centres too."""
    vectors = vectors[torch.randperm(len(vectors))[:20_000]]
    vectors = F.normalize(torch.unique((vectors * 50).round(), dim=0), dim=-1)  # (M', E)
    index, nearest = [0], vectors @ vectors[0]  # (M',) similarity to the nearest centre
    for _ in range(count - 1):
        index.append(int(nearest.argmin()))
        nearest = torch.maximum(nearest, vectors @ vectors[index[-1]])
    centres = vectors[index]
    for _ in range(rounds):
        members = F.one_hot((vectors @ centres.T).argmax(-1), count).to(vectors)  # (M', count)
        sums = members.T @ vectors
        centres = torch.where(sums.norm(dim=-1, keepdim=True) > 1e-6, F.normalize(sums, dim=-1), centres)
    return centres


class Quality(NamedTuple):
    """Reconstruction error over a set of images, pixels in [0, 1]."""

    mae: float
    psnr: float  # dB
    codes_used: int


def train(
    model: PatchVQ,
    next_images: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float = 3e-3,
    commitment: float = 0.25,
    log: Callable[[str], None] = output.say,
) -> None:
    """`next_images(step)` gives (B, 3, S, S) in [0, 1]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.05)
    codebook, seen, restarted = None, [], 0
    for step in range(steps):
        images = next_images(step)
        if codebook is None and step >= CONTINUOUS_SHARE * steps:
            codebook, seen = Codebook(model, torch.cat(seen)), []
        out = model(images, noise=NOISE if codebook is None else None)
        error = out.images - images
        weight = detail_weight(images, model.config.patch)
        loss = (weight * (error.abs() + 2 * error.square())).mean()
        if codebook is not None:
            loss = loss + commitment * out.commitment
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        vectors = out.vectors.detach().flatten(0, 1)  # (B * N, E)
        if codebook is None:
            seen = [*seen[-7:], vectors]
        else:
            restarted = codebook.update(vectors, out.codes.flatten(), 0.1 if step < RESTART_SHARE * steps else 0.0)
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            mae, mse = error.detach().abs().mean().item(), error.detach().square().mean().item()
            log(f"step {step}: MAE {mae:.4f}, PSNR {-10 * math.log10(mse):.1f} dB, {restarted} codes restarted")


def detail_weight(images: Tensor, patch: int) -> Tensor:
    """(B, 3, S, S) -> (B, 1, S, S), mean about 1: patches with edges count more than plain ones."""
    patches = F.pixel_unshuffle(images.mean(1, keepdim=True), patch)  # (B, patch**2, fmap, fmap)
    detail = patches.std(1, keepdim=True)  # (B, 1, fmap, fmap)
    weight = 0.5 + 0.5 * detail / detail.mean().clamp(min=1e-3)
    return F.interpolate(weight, scale_factor=patch, mode="nearest")


@torch.no_grad()
def measure(model: PatchVQ, images: Tensor) -> Quality:
    """images (B, 3, S, S) in [0, 1] -> how well they survive encode and decode."""
    codes = torch.cat([model.encode(part) for part in images.split(256)])
    decoded = torch.cat([model.decode(part) for part in codes.split(256)])
    error = decoded - images
    mse = max(error.square().mean().item(), 1e-12)
    return Quality(error.abs().mean().item(), -10 * math.log10(mse), len(codes.unique()))
