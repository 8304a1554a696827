"""Samples a second, beside bare webdataset and bare datasets; memory over many samples.

Every side reads in the thread that asks, and delivers the same: batches of tokens and codes as tensors, or of tokens
and of pixels as a network takes them, float in [0, 1].
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import torch

from volunteer_kit.data.laion import decode_image
from volunteer_kit.data.tokenizer import load_tokenizer

from .material import IMAGE_SIZE, TEXT, shards, stream

BATCH = 64


def ours(kind: str, where: list[str] | None, in_background: bool = False) -> Iterator[int]:
    """Samples given out, batch by batch."""
    reader = stream(kind, where)
    if in_background:
        reader.read_ahead()
    try:
        while True:
            yield len(reader.next_batch(BATCH).names)
    finally:
        reader.close()


def bare_webdataset(kind: str, where: list[str]) -> Iterator[int]:
    """The same shards, the same decoding: pixels or codes, caption, metadata, tokens."""
    import webdataset

    tokenizer = load_tokenizer("words")

    def images(sample: dict) -> tuple:
        json.loads(sample["json"])
        pixels = decode_image(sample["jpg"], IMAGE_SIZE)
        return tokenizer.encode(sample["txt"].decode(), TEXT), pixels

    def codes(sample: dict) -> tuple:
        meta = json.loads(sample["json"])
        return tokenizer.encode(meta["caption"], TEXT), np.frombuffer(sample["codes"], "<u2").astype(np.int64)

    data = webdataset.WebDataset(where, shardshuffle=False, empty_check=False)
    return _collated(data.map(images if kind == "images" else codes))


def bare_datasets(kind: str, where: None) -> Iterator[int]:
    """The same files through datasets' own streaming, the same decoding."""
    from datasets import load_dataset

    tokenizer = load_tokenizer("words")
    rows = load_dataset("bench/table", split="train", streaming=True)
    return _collated(
        (tokenizer.encode(row["caption"], TEXT), np.frombuffer(row["code"], "<i2").astype(np.int64)) for row in rows
    )


def _collated(samples: Iterable[tuple[list[int], np.ndarray]]) -> Iterator[int]:
    """Batches as tensors, as ours are; their sizes."""
    samples = iter(samples)
    while batch := list(itertools.islice(samples, BATCH)):
        text = torch.from_numpy(np.array([text for text, _ in batch]))  # int64 (B, T)
        other = torch.from_numpy(np.stack([other for _, other in batch]))
        if other.ndim == 4:
            other = torch.empty(len(batch), 3, *other.shape[1:3]).copy_(other.permute(0, 3, 1, 2)).div_(255)
        yield len(text)


def _time(reader: Callable[..., Iterator[int]], kind: str, where: list[str] | None, count: int) -> tuple[float, float]:
    """-> samples a second after the first batch; s to the first batch."""
    started, first, seen = time.perf_counter(), 0.0, 0
    samples = reader(kind, where)
    for some in samples:
        if not seen and not first:
            first, begun, some = time.perf_counter() - started, time.perf_counter(), 0
        seen += some
        if seen >= count:
            break
    seconds = time.perf_counter() - begun
    samples.close()
    return seen / seconds, first


def compare(kind: str, url: str, folder: Path, count: int, rounds: int) -> dict[str, float]:
    """Both sides in turn, medians."""
    where = None if kind == "table" else shards(url, folder, kind)
    theirs = bare_datasets if kind == "table" else bare_webdataset
    speeds: dict[str, list[float]] = {"ours": [], "theirs": [], "ratio": [], "first": []}
    for number in range(rounds):
        sides = [("ours", ours), ("theirs", theirs)]
        found = {side: _time(reader, kind, where, count) for side, reader in sides[:: 1 if number % 2 else -1]}
        speeds["ours"].append(found["ours"][0])
        speeds["theirs"].append(found["theirs"][0])
        speeds["ratio"].append(found["ours"][0] / found["theirs"][0])
        speeds["first"].append(found["ours"][1])
    return {side: median(values) for side, values in speeds.items()} | {"first_slowest": max(speeds["first"])}


def memory(url: str, folder: Path, samples: int) -> dict[str, float]:
    """Growth of this process while it reads so many samples, after as many as a tenth to warm up."""
    process, seen, marks = psutil.Process(), 0, {}
    for some in ours("codes", shards(url, folder, "codes"), in_background=True):
        seen += some
        if "begin" not in marks and seen >= samples / 10:
            marks["begin"] = process.memory_info().rss
        if seen >= samples * 1.1:
            break
    growth = (process.memory_info().rss - marks["begin"]) / 1e6
    return {"growth_mb": growth, "rss_mb": process.memory_info().rss / 1e6, "samples": seen}


