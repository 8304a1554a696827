"""What the demo measures at its end, on the volunteers' own checkpoints."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from volunteer_kit.checkpoint import Checkpoint
from volunteer_kit.data.scenes import Scene, SceneCheck, all_scenes, check

CAPTIONS = 64  # to be drawn and checked
MAX_GAP = 1e-5  # relative; peers that received the same bytes differ by nothing at all


@dataclass(frozen=True)
class SceneScores:
    """Shares from 0 to 1 over the drawn pictures, and each picture's own check."""

    colour_match: float  # background and object have the caption's colours
    caption_match: float  # everything is as the caption says
    caption_match_shuffled: float  # the same, each picture beside another picture's caption
    checker_accuracy: float  # of the checker itself, on true pictures
    checks: list[SceneCheck] = field(default_factory=list)


@dataclass(frozen=True)
class Agreement:
    """Whether the volunteers ended with one model. Gaps are relative: max|a - b| / max|a| of the worst tensor."""

    max_param_gap: float  # over all pairs of volunteers; inf if they hold different tensors
    late_gap: float | None  # parameters and optimizer statistics, late joiner and first volunteer; None: nobody late
    epochs: tuple[int, ...]  # that the volunteers ended with
    same_bytes: bool  # no parameter differs anywhere

    @property
    def is_close(self) -> bool:
        return self.max_param_gap <= MAX_GAP and len(set(self.epochs)) == 1


def tensor_gap(first: torch.Tensor, second: torch.Tensor) -> float:
    """max|a - b| / max|a| for the order that makes it larger; 0 for equal, inf for different shapes or NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    if not first.numel() or torch.equal(first, second):
        return 0.0
    a, b = first.double(), second.double()
    difference = (a - b).abs().max().item()
    smaller = min(a.abs().max().item(), b.abs().max().item())
    gap = difference / smaller if smaller > 0 else math.inf
    return gap if math.isfinite(gap) else math.inf


def largest_gap(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> float:
    """The worst tensor_gap of two sets of named tensors; inf if the names differ."""
    if first.keys() != second.keys():
        return math.inf
    return max((tensor_gap(first[name], second[name]) for name in first), default=0.0)


def compare(checkpoints: Mapping[str, Checkpoint], first: str, late: str | None) -> Agreement:
    """Every volunteer's final checkpoint beside every other's. `first` and `late` are names in `checkpoints`."""
    pairs = list(itertools.combinations(checkpoints.values(), 2))
    gaps = [largest_gap(a.model, b.model) for a, b in pairs]
    late_gap = None
    if late is not None:
        late_gap = largest_gap(checkpoints[first].tensors, checkpoints[late].tensors)
    epochs = tuple(checkpoint.epoch for checkpoint in checkpoints.values())
    return Agreement(max(gaps, default=0.0), late_gap, epochs, all(gap == 0 for gap in gaps))


def held_out_scenes(level: int, count: int = CAPTIONS, seed: int = 0) -> list[Scene]:
    """`count` scenes whose combination of words was kept out of training; every one once before one comes again."""
    scenes = all_scenes(level, "held_out")
    rng = np.random.default_rng(seed)
    order: list[int] = []
    while len(order) < count:
        order.extend(rng.permutation(len(scenes)).tolist())
    return [scenes[i] for i in order[:count]]


def derangement(captions: Sequence[str], seed: int = 0) -> list[int]:
    """For each caption the index of another one that says something else; each index once.

    Raises ValueError if there is none that only turns a shuffled list (fewer than two different captions).
    """
    n = len(captions)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        order = rng.permutation(n)
        for shift in range(1, n):
            other = np.empty(n, int)
            other[order] = np.roll(order, shift)
            if all(captions[i] != captions[j] for i, j in enumerate(other)):
                return other.tolist()
    raise ValueError("these captions cannot be exchanged so that each gets a different one")


def score_scenes(scenes: Sequence[Scene], images: Sequence[np.ndarray], level: int) -> SceneScores:
    """`images`: one (S, S, 3) a scene, uint8 or float in [0, 1], drawn from its caption."""
    captions = [scene.caption for scene in scenes]
    others = derangement(captions)
    checks = [check(image, caption) for image, caption in zip(images, captions, strict=True)]
    crossed = [check(image, captions[other]) for image, other in zip(images, others, strict=True)]
    return SceneScores(
        colour_match=_share(c.colour_match for c in checks),
        caption_match=_share(c.caption_match for c in checks),
        caption_match_shuffled=_share(c.caption_match for c in crossed),
        checker_accuracy=checker_accuracy(level),
        checks=checks,
    )


def checker_accuracy(level: int, count: int = 128) -> float:
    """Share of true held-out pictures that the checker accepts with their caption and refuses with another's."""
    scenes = held_out_scenes(level, min(count, len(all_scenes(level, "held_out"))), seed=1)
    others = derangement([scene.caption for scene in scenes], seed=1)
    right = []
    for scene, other in zip(scenes, others, strict=True):
        own, foreign = (check(scene.render(), caption) for caption in (scene.caption, scenes[other].caption))
        right.append(own.caption_match and not foreign.caption_match)
    return _share(right)


def reconstruction_error(originals: torch.Tensor, rebuilt: torch.Tensor) -> float:
    """Root mean square difference of pictures (B, 3, S, S) in [0, 1]: 0.05 is 5 % of the way from black to white."""
    return (originals - rebuilt).square().mean().sqrt().item()


def _share(values) -> float:
    values = [bool(value) for value in values]
    return sum(values) / len(values) if values else 0.0
