"""What tests of the encoder encode, with which tokenizer, and what comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from tests.shard_files import picture, record, write_tar
from volunteer_kit.data.settings import Columns, Filters
from volunteer_kit.data.source import Limits
from volunteer_kit.encode.folder import Summary, Target, locked, targets
from volunteer_kit.encode.pool import Done, Plan, Unreadable, encode_shards
from volunteer_kit.encode.settings import Settings
from volunteer_kit.encode.shard import encode_shard
from volunteer_kit.run_tokenizers import image_identity

FAST = Limits(timeout=20, retries=1)
TOY = Settings("toy", "0" * 32, 16, 4, 256, Filters(), Columns(), FAST)
EMOJI = Settings("emoji64", image_identity("emoji64"), 64, 64, 512, Filters(), Columns(), FAST)


def toy_codes(images: torch.Tensor) -> torch.Tensor:
    """A tokenizer of four codes: the red of each corner."""
    red = (images[:, 0] * 255).round().long()  # (B, S, S)
    return torch.stack([red[:, 0, 0], red[:, 0, -1], red[:, -1, 0], red[:, -1, -1]], dim=1)  # (B, 4)


def make(shard: object, out: Path, settings: Settings = TOY, **options: object) -> Summary:
    out.mkdir(exist_ok=True)
    return encode_shard(str(shard), Target.of(str(shard), out), settings, toy_codes, **options)


def tree(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def faults_of(folder: Path, name: str = "00000") -> list[tuple[int, str, str]]:
    report = json.loads((folder / f"{name}.report.json").read_text())
    return [(fault["index"], fault["key"], fault["cause"]) for fault in report["faults"]]


def faulty_shard(path: Path) -> Path:
    """Good and faulty records, more than two batches of them, with duplicates among both."""
    red, green = picture(colour=(200, 0, 0)), picture(colour=(0, 200, 0))
    records = [
        record("000", "first", red),
        record("001", "not safe", green, NSFW="NSFW"),
        record("002", "first again", red),
        record("003", "the picture of one that is left out", green),
        record("004", None),
        record("005", "ab"),
        record("006", "no picture", None),
        record("007", "broken", picture()[:300]),
        record("008", "wide", original_width=999),
        {"009.jpg": picture()},
        {"010.jpg": picture(), "010.txt": b"bad json", "010.json": b"{"},
        *(record(f"{n:03d}", f"picture {n}", picture(colour=(n, n, 0), kind="PNG")) for n in range(11, 150)),
    ]
    return write_tar(path, *records)


class Killed(BaseException):
    """Stands for a kill."""


def killed_at(enough: int) -> Callable[[int, int], None]:
    """Ends the work once there are so many records."""

    def tell(records: int, left_out: int) -> None:
        if records >= enough:
            raise Killed

    return tell


def through(shards: list[Path], out: Path, settings: Settings = EMOJI, workers: int = 1) -> list[Done | Unreadable]:
    with locked(out) as lock:
        events = encode_shards(targets(list(map(str, shards)), out), settings, Plan(workers, 1, "cpu"), lock)
        return [event for event in events if isinstance(event, (Done, Unreadable))]
