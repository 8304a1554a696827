"""What is read: image shards, code shards and a data set of codes, behind a server in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image

from volunteer_kit.data.code_shards import END, CodeIndex, checksum, dump_index, pack_record
from volunteer_kit.data.settings import DataConfig
from volunteer_kit.data.stream import SampleStream, open_stream
from volunteer_kit.data.tokenizer import load_tokenizer

HERE, ROOT = Path(__file__).parents[1], Path(__file__).parents[2]
CODES, NUM_CODES = 1024, 8192  # a sample's image codes, as in the original run
IMAGE_SIZE, TEXT = 256, 256  # pixels, tokens
WORDS = "a large red circle on the left of a grey background beside a small blue square and nothing else".split()
ABOUT = {"NSFW": "UNLIKELY", "original_width": 640, "original_height": 480}
TOKENIZER = "benchmark"


def make(folder: Path, images: int, codes: int, rows: int) -> None:
    """Three repositories below `folder`: `images` pictures, `codes` records in code shards, `rows` of a table."""
    rng = np.random.default_rng(0)
    _image_shards(folder / "images", images, rng)
    _code_shards(folder / "codes", codes, rng)
    _table(folder / "table", rows, rng)


def caption(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, size=12))


def _image_shards(folder: Path, count: int, rng: np.random.Generator, each: int = 500) -> None:
    folder.mkdir(parents=True)
    for number in range(-(-count // each)):
        with webdataset.TarWriter(str(folder / f"{number:05d}.tar"), encoder=False) as tar:
            for n in range(number * each, min(count, (number + 1) * each)):
                text = caption(rng)
                meta = json.dumps({**ABOUT, "caption": text}).encode()
                tar.write({"__key__": f"{n:09d}", "jpg": _photo(rng), "txt": text.encode(), "json": meta})


def _photo(rng: np.random.Generator) -> bytes:
    """Structure on every scale, so that it compresses about as a photograph does: 20 to 30 KB."""
    pixels, data = np.zeros((IMAGE_SIZE, IMAGE_SIZE, 3)), io.BytesIO()
    for level in range(6):
        coarse, size = rng.normal(0, 60 / (level + 1), (4 << level, 4 << level, 3)), 64 >> level
        pixels += np.kron(coarse, np.ones((size, size, 1)))
    Image.fromarray(np.clip(128 + pixels, 0, 255).astype(np.uint8)).save(data, "JPEG", quality=90)
    return data.getvalue()


def _code_shards(folder: Path, count: int, rng: np.random.Generator, each: int = 4000) -> None:
    folder.mkdir(parents=True)
    for number in range(-(-count // each)):
        records = []
        for n in range(number * each, min(count, (number + 1) * each)):
            meta = {"key": f"{n:09d}", "caption": caption(rng), "index": n, **ABOUT}
            records.append(pack_record(f"{n:09d}", rng.integers(NUM_CODES, size=CODES), meta))
        whole = b"".join(records) + END
        index = CodeIndex(
            records=len(records),
            offsets=[0, *np.cumsum([len(r) for r in records]).tolist()],
            size=len(whole),
            crc32=[checksum(record) for record in records],
            sha256=hashlib.sha256(whole).hexdigest(),
            image_tokenizer={"name": TOKENIZER, "identity": TOKENIZER},
            codes_per_record=CODES,
            num_codes=NUM_CODES,
            settings="benchmark",
            made_from={"name": "nothing", "beginning": "0" * 32},
        )
        (folder / f"{number:05d}.tar").write_bytes(whole)
        (folder / f"{number:05d}.index.json").write_bytes(dump_index(index))


def _table(folder: Path, rows: int, rng: np.random.Generator, files: int = 2) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "data").mkdir(parents=True)
    for number in range(files):
        count = rows // files
        codes = rng.integers(NUM_CODES, size=(count, CODES)).astype("<i2")
        columns = {"caption": [caption(rng) for _ in range(count)], "code": [row.tobytes() for row in codes]}
        columns |= {name: [value] * count for name, value in ABOUT.items()}
        file = folder / "data" / f"train-{number:05d}-of-{files:05d}.parquet"
        parquet.write_table(pa.table(columns), file, row_group_size=1000)


# the server


def serve(folder: Path) -> None:
    """Be the server, until stdin ends."""
    sys.path.insert(0, str(ROOT))
    from tests.hub import Hub

    with Hub() as hub:
        for repository in folder.iterdir():
            hub.add("datasets", f"bench/{repository.name}", repository)
        print(hub.url, flush=True)
        sys.stdin.read()


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """The address of a server of what `make` made."""
    command = [sys.executable, HERE / "stream.py", "--serve", folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(20)


def environment(url: str, folder: Path) -> dict[str, str]:
    """Of a process whose Hub the server is."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().endswith("_PROXY")}
    home = {"HF_ENDPOINT": url, "HF_HOME": str(folder.parent / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    return {**kept, **home, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def address(url: str, kind: str) -> str:
    return f"{url}/datasets/bench/{kind}/resolve/main"


# the stream


def shards(url: str, folder: Path, kind: str) -> list[str]:
    return [f"{address(url, kind)}/{path.name}" for path in sorted((folder / kind).glob("*.tar"))]


def no_codes(images: torch.Tensor) -> torch.Tensor:
    """In place of an image tokenizer, whose speed is not the stream's."""
    return torch.zeros(len(images), CODES, dtype=torch.int64)


def stream(kind: str, where: list[str] | None, peer_seed: int = 0, **settings) -> SampleStream:
    """The kit's stream of one of the repositories; nothing is cached."""
    section = {"images": {"kind": "shards", "shards": where}, "codes": {"kind": "codes", "shards": where}}
    section["table"] = {"kind": "hub", "dataset": "bench/table"}
    return open_stream(
        DataConfig(**{"cache_mb": 0, "disk_cache_mb": 0, **section[kind], **settings}),
        tokenizer=load_tokenizer("words"),
        encode_images=no_codes,
        image_size=IMAGE_SIZE,
        text_seq_len=TEXT,
        image_seq_len=CODES,
        num_codes=NUM_CODES,
        image_tokenizer=TOKENIZER,
        seed=0,
        peer_seed=peer_seed,
    )
