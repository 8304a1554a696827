"""Train an image tokenizer: `volunteer-kit train-tokenizer`. The shipped ones were made by its recipes."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from volunteer_kit import output
from volunteer_kit.data.laion import LaionSource
from volunteer_kit.data.scenes import all_scenes, check, sample_scene
from volunteer_kit.data.settings import Filters
from volunteer_kit.data.shards import expand_shards
from volunteer_kit.data.source import Limits, ShardError
from volunteer_kit.data.sources import usable_records
from volunteer_kit.model.image_tokenizer import WEIGHTS, PatchVQ, PatchVQConfig, load_image_tokenizer
from volunteer_kit.model.vq_training import measure, train

HELD_OUT_ONE_IN = 20  # of the shards' pictures; the error is measured on them
SHIFT = 5  # pixels; how far pictures of shards are moved at random


class Recipe(NamedTuple):
    """How a shipped tokenizer was trained."""

    config: PatchVQConfig
    steps: int
    batch_size: int = 64
    needs_pictures: bool = False


RECIPES = {
    # 26 shapes of patches in 8 colours on 3 backgrounds are 587 patches; with 192 codes the background is left out
    # of the code where an object lies, and the decoder finds it next door
    "scenes32": Recipe(PatchVQConfig(image_size=32, fmap=8, num_codes=192, hidden=48), 1500),
    "emoji64": Recipe(
        PatchVQConfig(image_size=64, fmap=8, num_codes=512, code_dim=24, hidden=128),
        2000, batch_size=32, needs_pictures=True,
    ),
}  # fmt: skip


class Report(NamedTuple):
    """What a tokenizer keeps of pictures it has not seen; errors are of pixels in [0, 1]."""

    mae: float  # of held-out scenes
    psnr: float  # dB, of held-out scenes
    scenes_right: dict[int, float]  # by level, the held-out scenes whose decoded picture passes the scenes' checker
    pictures_mae: float | None = None  # of held-out pictures of the shards
    pictures_psnr: float | None = None  # dB

    def __str__(self) -> str:
        right = ", ".join(f"{share:.1%} of level {level}" for level, share in self.scenes_right.items())
        text = f"scenes not trained on: MAE {self.mae:.4f}, PSNR {self.psnr:.1f} dB; the checker passes {right}"
        if self.pictures_mae is None:
            return text
        return f"{text}\npictures not trained on: MAE {self.pictures_mae:.4f}, PSNR {self.pictures_psnr:.1f} dB"


def main(name: str = "scenes32", data: str | Sequence[str] | None = None) -> Report:
    """Make a shipped tokenizer anew, in its place in the package."""
    output.keep_up()
    return train_tokenizer(WEIGHTS / f"{name}.safetensors", name, data=data)


def train_tokenizer(
    out: str | Path,
    recipe: str = "scenes32",
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    data: str | Sequence[str] | None = None,
    say: Callable[[str], None] = output.say,
    **sizes: int,
) -> Report:
    """Train a PatchVQ, write it to `out` (safetensors, fp16) and measure it on what it was not trained on.

    Numbers that are not given are those of the recipe; `sizes` are fields of PatchVQConfig. Each batch is of scenes,
    half with one object and half with two; with `data`, five of six images come from those shards. A run uses the
    file with `image_tokenizer: PATH`. Raises ValueError for an unknown recipe, sizes that do not fit each other, a
    recipe that lacks its shards and shards without a usable picture, DataError for shards that cannot be found.
    """
    if recipe not in RECIPES:
        raise ValueError(f"there is no recipe {recipe!r}; choose one of {', '.join(RECIPES)}")
    chosen = RECIPES[recipe]
    if chosen.needs_pictures and not data:
        raise ValueError(f"{recipe} learns from pictures too; name shards with --data 'PATH/{{00000..00003}}.tar'")
    wanted = PatchVQConfig(**{**chosen.config.model_dump(), **sizes})
    steps, batch_size, image_size = steps or chosen.steps, batch_size or chosen.batch_size, wanted.image_size
    started = time.monotonic()
    torch.manual_seed(seed)
    pictures = read_pictures(data, image_size, say) if data else None
    is_held_out = torch.arange(0 if pictures is None else len(pictures)) % HELD_OUT_ONE_IN == 0
    model = PatchVQ(wanted)
    images = _mixture(image_size, batch_size, None if pictures is None else pictures[~is_held_out], seed)
    train(model, images, steps=steps, log=say)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    model.save(out)
    report = evaluate(load_image_tokenizer(out), None if pictures is None else pictures[is_held_out])
    say(str(report))
    say(f"{out}: {out.stat().st_size / 1000:.0f} kB after {time.monotonic() - started:.0f} s")
    return report


def evaluate(tokenizer: PatchVQ, pictures: Tensor | None = None, scenes: int = 300) -> Report:
    """What `tokenizer` keeps of held-out scenes, `scenes` of each level, and of `pictures` (B, 3, S, S)."""
    chosen = {level: all_scenes(level, "held_out") for level in (1, 2)}
    chosen = {level: some[:: -(-len(some) // scenes)] for level, some in chosen.items()}
    images = {level: render(some, tokenizer.config.image_size) for level, some in chosen.items()}
    quality = measure(tokenizer, torch.cat(list(images.values())))
    right = {}
    for level, some in chosen.items():
        decoded = tokenizer.decode(tokenizer.encode(images[level])).permute(0, 2, 3, 1).numpy()  # (B, S, S, 3)
        passed = [check(image, scene.caption).caption_match for image, scene in zip(decoded, some, strict=True)]
        right[level] = float(np.mean(passed))
    seen = measure(tokenizer, pictures) if pictures is not None and len(pictures) else None
    return Report(quality.mae, quality.psnr, right, seen and seen.mae, seen and seen.psnr)


def render(scenes: Sequence, size: int) -> Tensor:
    """Scenes -> (B, 3, size, size) in [0, 1]."""
    return to_float(np.stack([scene.render(size) for scene in scenes]))


def to_float(images: np.ndarray) -> Tensor:
    """uint8 (B, S, S, 3) -> float (B, 3, S, S) in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).float() / 255


def read_pictures(shards: str | Sequence[str], size: int, say: Callable[[str], None]) -> Tensor:
    """Every usable picture of some shards, with the filters of a run -> (B, 3, size, size) in [0, 1]."""
    counts: Counter[str] = Counter()
    source = LaionSource(expand_shards(shards), image_size=size, filters=Filters(), limits=Limits(), counts=counts)
    images: list[np.ndarray] = []
    for shard in source.shards:
        try:
            images.extend(record.image for record in usable_records(source, shard, time.monotonic() + 60))
        except ShardError as error:
            counts[error.cause] += 1
    if not images:
        raise ValueError(f"no usable picture in {len(source.shards)} shards; left out: {dict(counts)}")
    say(f"{len(images)} pictures from {len(source.shards)} shards; left out: {dict(counts)}")
    return to_float(np.stack(images))


def _mixture(size: int, batch_size: int, pictures: Tensor | None, seed: int) -> Callable[[int], Tensor]:
    rng = np.random.default_rng(seed)
    from_scenes = batch_size if pictures is None else batch_size // 6

    def next_images(step: int) -> Tensor:
        scenes = [sample_scene(rng, level=1 + k % 2, split="train") for k in range(from_scenes)]
        parts = [render(scenes, size)]
        if pictures is not None:
            chosen = pictures[torch.from_numpy(rng.integers(len(pictures), size=batch_size - from_scenes))]
            parts.append(_moved(chosen, rng))
        return torch.cat(parts)  # (B, 3, S, S)

    return next_images


def _moved(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Mirrored and shifted at random; the border's colour fills what comes in."""
    size = images.shape[-1]
    padded = torch.nn.functional.pad(images, (SHIFT,) * 4, mode="replicate")
    moved = []
    for image in padded:
        x, y = rng.integers(0, 2 * SHIFT + 1, size=2)
        image = image[:, y : y + size, x : x + size]
        moved.append(image.flip(-1) if rng.random() < 0.5 else image)
    return torch.stack(moved)


if __name__ == "__main__":
    main(*sys.argv[1:])
