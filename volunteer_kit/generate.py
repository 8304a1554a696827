"""From captions to pictures with a trained checkpoint: text -> image codes -> pixels -> files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

from volunteer_kit import packages
from volunteer_kit.checkpoint import Checkpoint, CheckpointError, latest_checkpoint, load_checkpoint
from volunteer_kit.run_tokenizers import build_tokenizers
from volunteer_kit.runs import RunConfig, RunError, build_model, load_run, require_pictures

CELL = 192  # pixels of one picture in the grid, whatever its own size
AT_ONCE = 32  # captions in one batch, fewer where their keys and values would take more than
MEMORY = 2 * 2**30  # bytes


@dataclass(frozen=True)
class Generated:
    """What was drawn: `images` are (S, S, 3) uint8, in the order of `captions`."""

    captions: list[str]
    images: list[np.ndarray]
    epoch: int  # of the checkpoint
    paths: list[Path]  # of the pictures
    grid: Path


def generate_images(
    captions: Sequence[str],
    *,
    checkpoint: str | Path,
    run: str | Path | RunConfig = "demo",
    out: str | Path = "out",
    copies: int = 1,
    seed: int = 0,
    temperature: float = 1.0,
    top_k: int | None = None,
    cond_scale: float = 1.0,
) -> Generated:
    """Draw every caption `copies` times and write pictures and a grid into the folder `out`.

    `checkpoint` is one checkpoint or a folder of them (the newest good one is taken). Lower `temperature` or `top_k`
    when pictures look torn, raise them when all look alike. Equal seeds give equal pictures on one machine.
    Raises RunError, CheckpointError, MissingDependency.
    """
    captions = [caption for caption in captions for _ in range(copies) if caption.strip()]
    if not captions:
        raise RunError('There is no caption to draw.\n1. Give one: volunteer-kit generate "a large red circle ..."')
    config = run if isinstance(run, RunConfig) else load_run(run)
    packages.require("train")
    require_pictures(config)
    found = _open(Path(checkpoint))
    model, tokenizers = build_model(config), build_tokenizers(config)
    try:
        model.load_tensors(found.model)
    except ValueError as error:
        raise CheckpointError(
            f"The checkpoint {found.path} does not fit the run {config.run_id!r}: {error}.\n"
            f"1. Name the run that it was trained in with --run (it says: {found.meta.get('run_id') or 'nothing'})."
        ) from None
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    images: list[np.ndarray] = []
    at_once = max(1, min(AT_ONCE, MEMORY // (model.sampling_bytes * (1 if cond_scale == 1 else 2))))
    for start in range(0, len(captions), at_once):
        part = captions[start : start + at_once]
        text = torch.tensor([tokenizers.text.encode(caption, config.model.text_seq_len) for caption in part])  # (B, T)
        with torch.no_grad():
            codes = model.generate(
                text, temperature=temperature, top_k=top_k, cond_scale=cond_scale, generator=generator
            )  # (B, N)
            pixels = tokenizers.image.decode(codes)  # (B, 3, S, S)
        images += [*(pixels.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()]  # (S, S, 3) each
    return _write(captions, images, found, Path(out))


def _open(path: Path) -> Checkpoint:
    if (path / "meta.json").is_file():
        return load_checkpoint(path)
    found = latest_checkpoint(path)
    if found is None:
        raise CheckpointError(
            f"There is no checkpoint in {path}.\n"
            "1. Train one: volunteer-kit demo\n2. Then give the folder that it prints with --checkpoint."
        )
    return found


def _write(captions: list[str], images: list[np.ndarray], found: Checkpoint, out: Path) -> Generated:
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{number:03d}.png" for number in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        _scaled(image).save(path)
    grid = out / "grid.png"
    draw_grid(images, captions).save(grid)
    return Generated(captions, images, found.epoch, paths, grid)


def draw_grid(images: Sequence[np.ndarray], captions: Sequence[str], columns: int = 4) -> Image.Image:
    """Pictures side by side, each above its caption."""
    columns = min(columns, len(images))
    lines = [textwrap.wrap(caption, CELL // 7)[:4] for caption in captions]  # the default font is about 6 pixels wide
    height = CELL + 14 * max(len(part) for part in lines) + 12
    sheet = Image.new("RGB", (columns * (CELL + 12) + 12, -(-len(images) // columns) * height + 12), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (image, part) in enumerate(zip(images, lines, strict=True)):
        x, y = 12 + number % columns * (CELL + 12), 12 + number // columns * height
        sheet.paste(_scaled(image), (x, y))
        pen.text((x, y + CELL + 2), "\n".join(part), fill="black")
    return sheet


def _scaled(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image).resize((CELL, CELL), Image.Resampling.NEAREST)
