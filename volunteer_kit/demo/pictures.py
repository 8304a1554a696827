"""The demo's pictures: what the trained model draws, and how good that is."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from volunteer_kit.checkpoint import Checkpoint
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.scenes import SceneCheck
from volunteer_kit.data.source import Record, ShardError
from volunteer_kit.data.sources import open_source, usable_records
from volunteer_kit.demo.eval import SceneScores, held_out_scenes, reconstruction_error, score_scenes
from volunteer_kit.demo.report import BAD, GOOD, HALF, Picture, draw_grid
from volunteer_kit.generate import generate_images
from volunteer_kit.model.image_tokenizer import ImageTokenizer
from volunteer_kit.run_tokenizers import build_tokenizers, image_identity
from volunteer_kit.runs import RunConfig

COLUMNS, SCENES_SHOWN, SHARDS_SHOWN = 8, 32, 16
READ_AT_MOST, READ_FOR = 2000, 20.0  # records, s: enough to choose from
SCENE_TEMPERATURE = 0.0  # a caption of a scene has one picture: the likeliest codes are the right ones
SHARD_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Shown:
    """The grid's path, and what was measured on the way."""

    path: Path
    scores: SceneScores | None = None
    reconstruction_error: float | None = None


def make_pictures(config: RunConfig, checkpoint: Checkpoint, path: Path, *, threads: int) -> Shown:
    """Draw with the trained model and write the grid to `path`; scenes are checked, shards are compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return (_scenes if config.data.kind == "scenes" else _shards)(config, checkpoint, path)
    finally:
        torch.set_num_threads(before)


def _draw(config: RunConfig, checkpoint: Checkpoint, captions: Sequence[str], temperature: float) -> list[np.ndarray]:
    """One picture a caption, (S, S, 3) uint8."""
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-pictures-") as scratch:
        drawn = generate_images(captions, checkpoint=checkpoint.path, run=config, out=scratch, temperature=temperature)
    return drawn.images


def _scenes(config: RunConfig, checkpoint: Checkpoint, path: Path) -> Shown:
    level = config.data.level
    scenes = held_out_scenes(level)
    images = _draw(config, checkpoint, [scene.caption for scene in scenes], SCENE_TEMPERATURE)
    scores = score_scenes(scenes, images, level)
    pictures = [
        Picture(image, scene.caption, *_verdict(check))
        for image, scene, check in zip(images, scenes, scores.checks, strict=True)
    ]
    title = "Drawn from captions whose combination of words was never trained on, and what the checker says"
    draw_grid(pictures[:SCENES_SHOWN], path, title, columns=COLUMNS)
    return Shown(path, scores)


def _verdict(check: SceneCheck) -> tuple[str, str]:
    if check.caption_match:
        return "as the caption says", GOOD
    return ("right colours only", HALF) if check.colour_match else ("other colours", BAD)


def _shards(config: RunConfig, checkpoint: Checkpoint, path: Path) -> Shown:
    tokenizer = build_tokenizers(config).image
    records = _some_records(config, tokenizer.config.image_size)
    if not records:
        raise DataError("None of the shards can be read any more, so there are no captions to draw pictures from.")
    shown = records[:SHARDS_SHOWN]
    drawn = _draw(config, checkpoint, [record.caption for record in shown], SHARD_TEMPERATURE)
    rows, error = _beside(records, len(shown), tokenizer)
    pictures, sections = [], []
    for start in range(0, len(shown), COLUMNS):
        part = range(start, min(start + COLUMNS, len(shown)))
        pictures += [Picture(drawn[i], shown[i].caption) for i in part]
        pictures += [Picture(row[i], "") for row in rows.values() for i in part]
        sections += [(heading, len(part)) for heading in ("drawn by the model from the caption", *rows)]
    title = f"{config.run_id}, epoch {checkpoint.epoch}: captions that were trained on"
    draw_grid(pictures, path, title, columns=COLUMNS, rows_of=sections)
    return Shown(path, reconstruction_error=error)


def _beside(
    records: list[Record], count: int, tokenizer: ImageTokenizer
) -> tuple[dict[str, np.ndarray], float | None]:
    """What is shown beside the first `count` pictures drawn, uint8 (count, S, S, 3) by heading: what was trained on,
    and before and after its codes where it came as images; and what codes lose, over all records."""
    if records[0].image is None:
        codes = torch.from_numpy(np.stack([record.codes for record in records[:count]]))
        return {"what it was trained on, from its codes": _to_pixels(tokenizer.decode(codes))}, None
    originals = np.stack([record.image for record in records])  # uint8 (B, S, S, 3)
    pixels = torch.from_numpy(originals).permute(0, 3, 1, 2).float() / 255  # (B, 3, S, S)
    rebuilt = torch.cat([tokenizer.decode(tokenizer.encode(part)) for part in pixels.split(64)])
    error = reconstruction_error(pixels, rebuilt)
    there_and_back = f"the original, to codes and back (root mean square error {error:.3f})"
    return {"the original": originals[:count], there_and_back: _to_pixels(rebuilt[:count])}, error


def _to_pixels(images: torch.Tensor) -> np.ndarray:
    """float (B, 3, S, S) in [0, 1] -> uint8 (B, S, S, 3)."""
    return (images.permute(0, 2, 3, 1) * 255).round().to(torch.uint8).numpy()


def _some_records(config: RunConfig, image_size: int) -> list[Record]:
    """Usable records of the run's shards, in an order of chance that is always the same."""
    model, tokenizer = config.model, image_identity(config.image_tokenizer)
    source = open_source(config.data, image_size, model.image_seq_len, model.num_image_tokens, tokenizer, Counter())
    records: list[Record] = []
    deadline = time.monotonic() + READ_FOR
    for shard in source.shards:
        try:
            for record in usable_records(source, shard, deadline):
                records.append(record)
                if len(records) >= READ_AT_MOST or time.monotonic() > deadline:
                    break
        except ShardError:
            continue
        if len(records) >= READ_AT_MOST or time.monotonic() > deadline:
            break
    order = np.random.default_rng(0).permutation(len(records))
    return [records[i] for i in order]
