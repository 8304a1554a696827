"""Text and codes of the demo's scenes and of the emoji shards, each in a part to train on and a held-out part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from volunteer_kit.data.scenes import all_scenes
from volunteer_kit.data.source import Record
from volunteer_kit.data.sources import usable_records
from volunteer_kit.run_tokenizers import build_stream_tokenizers
from volunteer_kit.runs import RunConfig, build_stream, load_run

EMOJI = Path(os.environ.get("VOLUNTEER_KIT_EMOJI", Path(__file__).parents[3] / "shared/data/emoji"))
HELD_OUT_ONE_IN = 8  # emoji; the scenes have a held-out part of their own, one in ten
RUNS = {"scenes": "demo", "emoji": "emoji"}  # the run file of each data set


class Samples(NamedTuple):
    """Encoded text-image pairs."""

    text: torch.Tensor  # int64 (N, T), 0 is padding
    codes: torch.Tensor  # int64 (N, S)

    def take(self, rows: torch.Tensor) -> Samples:
        """The samples of `rows`, int64 (B,)."""
        return Samples(self.text[rows], self.codes[rows])


class Data(NamedTuple):
    """One data set. No sample of `held_out` is in `train`."""

    train: Samples
    held_out: Samples


def open_run(data: str, emoji: Path = EMOJI, **sections: Any) -> RunConfig:
    """The demo's run for "scenes", the emoji run for "emoji", with fields of its own in some sections.

    :param emoji: the folder of the emoji shards
    """
    values = load_run(RUNS[data]).model_dump(mode="json")
    for section, fields in sections.items():
        values[section] = {**values[section], **fields} if isinstance(fields, dict) else fields
    if data == "emoji":
        values["data"]["shards"] = str(emoji / "{00000..00003}.tar")
    return load_run(values)


def read_data(data: str, emoji: Path = EMOJI) -> Data:
    """Every usable sample of a data set, read once and encoded by the run's own tokenizers.

    :param data: "scenes" (518 to train on, 58 held out) or "emoji" (770 and 110)
    """
    run = open_run(data, emoji)
    if data == "scenes":
        size = build_stream_tokenizers(run).image_size
        parts = [
            [Record(scene.caption, scene.render(size)) for scene in all_scenes(run.data.level, split)]
            for split in ("train", "held_out")
        ]
    else:
        records = list(_emoji_records(run))
        kept = [place % HELD_OUT_ONE_IN == 0 for place in range(len(records))]
        parts = [[r for r, held in zip(records, kept, strict=True) if held is side] for side in (False, True)]
    return Data(*(encode(run, records) for records in parts))


def _emoji_records(run: RunConfig) -> Iterator[Record]:
    """The records that the run's filters let through, in the order of the shards; each caption once."""
    source, seen = build_stream(run, peer_seed=0).source, set()
    for shard in source.shards:
        for record in usable_records(source, shard, float("inf")):
            if record.caption not in seen:
                seen.add(record.caption)
                yield record


def encode(run: RunConfig, records: list[Record]) -> Samples:
    """Records -> the integers that the run's model reads."""
    tokenizers = build_stream_tokenizers(run)
    text = [tokenizers.text.encode(record.caption, run.model.text_seq_len) for record in records]
    codes = []
    for start in range(0, len(records), 64):
        images = torch.from_numpy(np.stack([record.image for record in records[start : start + 64]]))  # (B, S, S, 3)
        with torch.no_grad():
            codes.append(tokenizers.encode_images(images.permute(0, 3, 1, 2).float() / 255).to(torch.int64))
    return Samples(torch.tensor(text), torch.cat(codes))
