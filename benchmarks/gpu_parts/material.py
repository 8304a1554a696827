"""Material that the parts train on and encode: the original's run, full or tiny, and image shards made here."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import torch
import webdataset
from PIL import Image

from volunteer_kit.model.dalle import PRESETS
from volunteer_kit.model.image_tokenizer import save_vqgan
from volunteer_kit.model.vqgan import Vqgan, VqganConfig
from volunteer_kit.runs import RunConfig, load_run

WORDS = "a large red circle on the left of a grey background beside a small blue square and nothing else".split()
TINY_VQGAN = VqganConfig(
    resolution=32, ch=32, ch_mult=(1, 1, 2, 2), num_res_blocks=1, attn_resolutions=(4,), z_channels=32, embed_dim=32,
    n_embed=64,
)  # fmt: skip
TINY_MODEL = PRESETS["original"].model_copy(
    update=dict(
        dim=64, depth=5, heads=2, dim_head=32, text_seq_len=16, num_text_tokens=512, image_fmap_size=4,
        num_image_tokens=64,
    )
)  # fmt: skip


def original(tiny: bool, home: Path) -> RunConfig:
    """The run dalle-laion with words that ship with the kit, and a VQGAN of random weights, which is written into
    `home`, the folder that VOLUNTEER_KIT_HOME names. `tiny`: with the same layers, some of each, narrow."""
    torch.manual_seed(0)
    run = load_run("dalle-laion").model_copy(update={"text_tokenizer": "words"})
    if not tiny:
        save_vqgan(home / f"{run.image_tokenizer}.safetensors", Vqgan(VqganConfig()))
        return run
    path = home / "tiny.safetensors"
    save_vqgan(path, Vqgan(TINY_VQGAN))
    return run.model_copy(update={"model": TINY_MODEL, "image_tokenizer": str(path)})


def image_shards(folder: Path, count: int, each: int = 250, size: int = 256, seed: int = 0) -> list[Path]:
    """`count` pictures with captions in tar files as img2dataset writes them, `each` in a file."""
    folder.mkdir(parents=True)
    rng, shards = np.random.default_rng(seed), []
    for first in range(0, count, each):
        shards.append(folder / f"{len(shards):05d}.tar")
        with webdataset.TarWriter(str(shards[-1]), encoder=False) as tar:
            for number in range(first, min(count, first + each)):
                caption = " ".join(rng.choice(WORDS, size=12))
                about = {"caption": caption, "NSFW": "UNLIKELY", "original_width": 640, "original_height": 480}
                files = {"jpg": photo(rng, size), "txt": caption.encode(), "json": json.dumps(about).encode()}
                tar.write({"__key__": f"{number:09d}", **files})
    return shards


def photo(rng: np.random.Generator, size: int) -> bytes:
    """Coarse noise, scaled up: a JPEG of some 10 KB that is another each time."""
    coarse, data = Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)), io.BytesIO()
    coarse.resize((size, size), Image.Resampling.BICUBIC).save(data, "JPEG", quality=90)
    return data.getvalue()
