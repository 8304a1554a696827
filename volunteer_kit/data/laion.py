"""Image-text shards as img2dataset writes them (KEY.jpg, KEY.txt, KEY.json in tars), with the original run's filters.

What is left out is counted by cause. Only images, txt and json are ever looked at; webdataset groups them.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from .shards import open_shard
from .source import Limits, Record, ShardError
from .tar_reader import Member, read_members

IMAGES = ("jpg", "jpeg", "png", "webp")
MAX_PIXELS = 40_000_000  # of one image; a small file can unpack to gigabytes
MAX_JSON = 2**20  # bytes
CAUSES: dict[str, str] = {
    "missing_shard": "no such file or address",
    "unreachable_shard": "no connection, no permission, or a server that is too slow",
    "empty_shard": "a shard without files",
    "bad_shard": "not a tar, or damaged",
    "cut_shard": "a shard that ends too early; what came before is used",
    "duplicate_member": "a second file of the same name in one record; the first is used",
    "missing_json": "no metadata, so that nobody knows whether it is safe",
    "bad_json": "metadata that cannot be read",
    "missing_caption": "no caption",
    "short_caption": "a caption shorter than the run allows",
    "nsfw": "not marked as safe for work",
    "aspect": "too wide or too high",
    "missing_image": "no image",
    "image_too_large": "an image of too many bytes or pixels",
    "bad_image": "an image that cannot be read to its end",
    "codes_out_of_range": "image codes outside the model's vocabulary",
}


class Filters(NamedTuple):
    """What the original run kept: captions of 3 characters and more, NSFW == "UNLIKELY", aspect ratio up to 2."""

    min_caption: int = 3
    nsfw_allowed: tuple[str, ...] | None = ("UNLIKELY",)  # None: not looked at
    max_aspect: float = 2.0


class _LeftOut(Exception):
    """A record that is not used; its argument is the cause."""


class LaionSource:
    """Shards of images and captions as a Source; images are cut to their central square and scaled."""

    def __init__(
        self, shards: Sequence[str], *, image_size: int, filters: Filters, limits: Limits, counts: Counter[str]
    ) -> None:
        self.shards = list(shards)
        self._image_size, self._filters, self._limits, self._counts = image_size, filters, limits, counts

    def read(self, shard: str, start: int, give_up_at: float) -> Iterator[Record]:
        """The usable records of one shard, see Source.read; what is left out goes into `counts`."""
        with open_shard(shard, self._limits, give_up_at) as stream:
            patience = give_up_at - time.monotonic()

            def go_on() -> None:
                if time.monotonic() > give_up_at:
                    raise ShardError("unreachable_shard", f"not one usable record in {patience:.0f} s")

            members = read_members(stream, self._limits, _is_wanted, go_on)
            for index, group in enumerate(self._group(members)):
                if index < start:
                    continue
                try:
                    caption, image = self._use(group)
                except _LeftOut as why:
                    self._counts[str(why)] += 1
                    continue
                yield Record(index, _sample_key(shard, index, group["__key__"]), caption, image)
                give_up_at = time.monotonic() + patience

    def _group(self, members: Iterator[Member]) -> Iterator[dict[str, Any]]:
        """Members that share a key, as one dict of suffix -> bytes. Those before a shard breaks are not lost."""
        from webdataset.tariterators import group_by_keys

        broken: list[ShardError] = []

        def files() -> Iterator[dict[str, Any]]:
            try:
                for member in members:
                    yield {"fname": member.name, "data": member.data, "__url__": ""}
            except ShardError as error:
                broken.append(error)

        def count_duplicate(error: Exception) -> bool:
            self._counts["duplicate_member"] += 1
            return True

        whole = None
        for group in group_by_keys(files(), handler=count_duplicate):
            if whole is not None:
                yield whole
            whole = group
        if whole is not None and (not broken or _is_whole(whole)):
            yield whole  # what a break left of a record is the shard's fault, which is counted already
        if broken:
            raise broken[0]

    def _use(self, group: dict[str, Any]) -> tuple[str, np.ndarray]:
        """The caption and the picture of a record. Raises _LeftOut with the first cause that applies."""
        filters = self._filters
        meta = _metadata(group, required=filters.nsfw_allowed is not None)
        caption = _caption(group, meta)
        if len(caption) < filters.min_caption:
            raise _LeftOut("short_caption")
        if filters.nsfw_allowed is not None and meta.get("NSFW") not in filters.nsfw_allowed:
            raise _LeftOut("nsfw")
        width, height = meta.get("original_width"), meta.get("original_height")
        if _is_size(width) and _is_size(height) and _aspect(width, height) > filters.max_aspect:
            raise _LeftOut("aspect")
        return caption, decode_image(_image_bytes(group), self._image_size, filters.max_aspect)


def decode_image(data: bytes, size: int, max_aspect: float = math.inf) -> np.ndarray:
    """JPEG, PNG or WebP bytes -> the central square, scaled: uint8 (size, size, 3); transparency becomes white."""
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
    except Image.DecompressionBombError:
        raise _LeftOut("image_too_large") from None
    except Exception:  # Pillow's readers raise whatever broken bytes lead them to
        raise _LeftOut("bad_image") from None
    with image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise _LeftOut("image_too_large")
        if _aspect(width, height) > max_aspect:
            raise _LeftOut("aspect")
        try:
            image.draft("RGB", (2 * size, 2 * size))  # lets the JPEG decoder skip what would be scaled away
            image.load()
            return np.asarray(_square(_on_white(image), size))
        except Exception:
            raise _LeftOut("bad_image") from None


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _square(image: Image.Image, size: int) -> Image.Image:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.crop((left, top, left + side, top + side))
    return square.resize((size, size), Image.Resampling.BICUBIC)


def _is_wanted(name: str) -> bool:
    from webdataset.tariterators import base_plus_ext

    suffix = base_plus_ext(name)[1]
    return suffix is not None and suffix.lower() in (*IMAGES, "txt", "json")


def _is_whole(group: dict[str, Any]) -> bool:
    return "txt" in group and "json" in group and any(suffix in group for suffix in IMAGES)


def _metadata(group: dict[str, Any], required: bool) -> dict[str, Any]:
    if "json" not in group:
        if required:
            raise _LeftOut("missing_json")
        return {}
    data = group["json"]
    try:
        meta = json.loads(data.decode("utf-8")) if data is not None and len(data) <= MAX_JSON else None
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise _LeftOut("bad_json")
    return meta


def _caption(group: dict[str, Any], meta: dict[str, Any]) -> str:
    """The txt file's, or the metadata's where that has none."""
    for found in ((group.get("txt") or b"").decode("utf-8", "replace"), meta.get("caption")):
        if isinstance(found, str) and (caption := " ".join(found.split())):
            return caption
    raise _LeftOut("missing_caption")


def _image_bytes(group: dict[str, Any]) -> bytes:
    present = [suffix for suffix in IMAGES if suffix in group]
    if not present:
        raise _LeftOut("missing_image")
    data = group[present[0]]
    if data is None:
        raise _LeftOut("image_too_large")
    return data


def _is_size(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _aspect(width: float, height: float) -> float:
    return max(width, height) / max(min(width, height), 1e-9)


def _sample_key(shard: str, index: int, key: str) -> str:
    """A name people can read: shard, position, and the key found there without anything unprintable."""
    name = shard.split("?")[0].rstrip("/").rsplit("/", 1)[-1]
    clean = "".join(c if c.isascii() and c.isprintable() else "?" for c in key[:100])
    return f"{name}#{index}:{clean}"
