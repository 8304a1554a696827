"""Image-text shards as img2dataset writes them (KEY.jpg, KEY.txt, KEY.json in tars), with the run's filters.

Only images, txt and json are ever looked at; neighbours of one KEY are a record.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from PIL import Image

from .filters import accept, aspect
from .hosts import hosts_of, wait_for_a_host
from .settings import Columns, Filters
from .shards import catalogue_of, open_shard
from .source import LeftOut, Limits, Raw, Record, ShardError
from .tar_reader import Member, read_members

IMAGES = ("jpg", "jpeg", "png", "webp")
MAX_PIXELS = 40_000_000  # of one image; a small file can unpack to gigabytes
MAX_JSON = 2**20  # bytes
MAX_MARKS = 20_000  # places in shards that are remembered, some 5 MB
MAX_PICTURES = 100_000  # of one shard, among which duplicates are looked for
SHARDS_WITH_PICTURES = 4  # whose pictures are remembered, 10 MB each
DEFAULT_COLUMNS = Columns()


class LaionSource:
    """Shards of images and captions as a Source; images are cut to their central square and scaled."""

    def __init__(
        self,
        shards: Sequence[str],
        *,
        image_size: int,
        filters: Filters,
        limits: Limits,
        counts: Counter[str],
        columns: Columns = DEFAULT_COLUMNS,
    ) -> None:
        self.shards = list(shards)
        self.catalogue = catalogue_of("shards", self.shards)
        self.counts = counts
        self._image_size, self._filters, self._limits, self._columns = image_size, filters, limits, columns
        self._hosts = hosts_of(self.shards)
        self._marks: OrderedDict[tuple[str, int], int] = OrderedDict()  # shard, record -> byte where it begins
        self._pictures: OrderedDict[str, _Pictures] = OrderedDict()

    def ranges(self, shard: str, give_up_at: float) -> None:
        """A tar does not say how many records it has."""

    def read(self, shard: str, start: int, stop: int | None, give_up_at: float) -> Iterator[Raw]:
        """See Source.read. Who goes on where the last read of a shard stopped, reads on from there."""
        patience = give_up_at - time.monotonic()

        def go_on() -> None:
            if time.monotonic() > give_up_at:
                raise ShardError("unreachable_shard", f"not one whole record in {patience:.0f} s")

        if stop is not None and start >= stop:
            return
        pictures = self._pictures_of(shard)
        first = start if pictures is None or start <= pictures.known else 0
        at = self._marks.get((shard, first), 0)
        first = first if at else 0
        wait_for_a_host(self._hosts, give_up_at)
        try:
            with open_shard(shard, self._limits, give_up_at, at) as stream:
                members = read_members(stream, self._limits, _is_wanted, go_on, at)
                for group in self._groups(members, shard, first, start, stop):
                    give_up_at = time.monotonic() + patience
                    is_duplicate = pictures is not None and pictures.is_known(group.index, group.image)
                    if group.index >= start:
                        yield group.raw(shard, is_duplicate)
                        give_up_at = time.monotonic() + patience
        except ShardError as error:
            if error.cause == "bad_shard":
                self._marks.pop((shard, first), None)  # it may be another file than then
            raise

    def use(self, raw: Raw) -> Record:
        """See Source.use. A picture that an earlier record of its shard has, used or not, is a duplicate."""
        files, is_duplicate = raw.data
        meta = _metadata(files, required=self._filters.nsfw_allowed is not None)
        caption = accept(_caption(files, meta, self._columns), meta, self._filters, self._columns)
        if is_duplicate:
            raise LeftOut("duplicate")
        return Record(caption, decode_image(_image_bytes(files), self._image_size, self._filters.max_aspect))

    def _groups(
        self, members: Iterator[Member], shard: str, first: int, start: int, stop: int | None
    ) -> Iterator[_Group]:
        """Records from number `first` up to `stop`; the files of those before `start` are read only if their pictures
        matter. The record in which a shard breaks is kept if it is whole."""
        group = None
        try:
            for member in members:
                key, suffix = _key_and_suffix(member.name)
                if group is None or key != group.key:
                    index = first if group is None else group.index + 1
                    if index == stop:
                        self._mark(shard, stop, member.at)
                        break
                    if group is not None:
                        yield group
                    group = _Group(index, key)
                is_needed = group.index >= start or (self._filters.drop_duplicates and suffix in IMAGES)
                if suffix not in group.files:
                    group.files[suffix] = member.read() if is_needed else None
                elif group.index >= start:
                    self.counts["duplicate_member"] += 1
        except ShardError:
            if group is not None and group.is_whole:
                yield group  # what a break leaves of another is the shard's fault, which is counted already
            raise
        if group is not None:
            yield group

    def _mark(self, shard: str, index: int, at: int) -> None:
        self._marks[shard, index] = at
        self._marks.move_to_end((shard, index))
        if len(self._marks) > MAX_MARKS:
            self._marks.popitem(last=False)

    def _pictures_of(self, shard: str) -> _Pictures | None:
        if not self._filters.drop_duplicates:
            return None
        pictures = self._pictures.setdefault(shard, _Pictures())
        self._pictures.move_to_end(shard)
        if len(self._pictures) > SHARDS_WITH_PICTURES:
            self._pictures.popitem(last=False)
        return pictures


class _Group:
    """A record's files, None for one that is too large or not needed."""

    def __init__(self, index: int, key: str) -> None:
        self.index, self.key = index, key
        self.files: dict[str, bytes | None] = {}

    @property
    def image(self) -> bytes | None:
        return next((self.files[suffix] for suffix in IMAGES if suffix in self.files), None)

    @property
    def is_whole(self) -> bool:
        return "txt" in self.files and "json" in self.files and any(suffix in self.files for suffix in IMAGES)

    def raw(self, shard: str, is_duplicate: bool) -> Raw:
        if is_duplicate:
            self.files = {suffix: data for suffix, data in self.files.items() if suffix not in IMAGES}
        size = 500 + sum(len(data or b"") for data in self.files.values())  # with what Python needs for it
        return Raw(self.index, _sample_key(shard, self.index, self.key), (self.files, is_duplicate), size)


class _Pictures:
    """The pictures of a shard, by their hash, and which record had each first."""

    def __init__(self) -> None:
        self.known = 0  # records from the shard's beginning
        self._first: dict[int, int] = {}

    def is_known(self, index: int, picture: bytes | None) -> bool:
        """Whether a record before number `index` has this picture; the records come in order."""
        found = index
        if picture is not None:
            digest = int.from_bytes(hashlib.blake2b(picture, digest_size=8).digest(), "little")
            found = self._first.get(digest, index)
            if len(self._first) < MAX_PICTURES:
                self._first.setdefault(digest, index)
        self.known = max(self.known, index + 1)
        return found < index


def decode_image(data: bytes, size: int, max_aspect: float = math.inf) -> np.ndarray:
    """JPEG, PNG or WebP bytes -> the central square, scaled: uint8 (size, size, 3); transparency becomes white."""
    try:
        image = Image.open(io.BytesIO(data), formats=("JPEG", "PNG", "WEBP"))
    except Image.DecompressionBombError:
        raise LeftOut("image_too_large") from None
    except Exception:  # Pillow's readers raise whatever broken bytes lead them to
        raise LeftOut("bad_image") from None
    with image:
        width, height = image.size
        if width * height > MAX_PIXELS:
            raise LeftOut("image_too_large")
        if aspect(width, height) > max_aspect:
            raise LeftOut("aspect")
        try:
            image.draft("RGB", (2 * size, 2 * size))  # lets the JPEG decoder skip what would be scaled away
            image.load()
            return np.asarray(_square(_on_white(image), size))
        except Exception:
            raise LeftOut("bad_image") from None


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


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Of "folder/000017.seg.JPG": "folder/000017" and "seg.jpg"."""
    folder, slash, file = name.rpartition("/")
    key, _, suffix = file.partition(".")
    return folder + slash + key, suffix.lower()


def _is_wanted(name: str) -> bool:
    return _key_and_suffix(name)[1] in (*IMAGES, "txt", "json") and not name.rpartition("/")[2].startswith(".")


def _metadata(files: dict[str, bytes | None], required: bool) -> dict[str, Any]:
    if "json" not in files:
        if required:
            raise LeftOut("missing_json")
        return {}
    data = files["json"]
    try:
        meta = json.loads(data.decode("utf-8")) if data is not None and len(data) <= MAX_JSON else None
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise LeftOut("bad_json")
    return meta


def _caption(files: dict[str, bytes | None], meta: dict[str, Any], columns: Columns) -> Any:
    """The txt file's, or the metadata's where that has none."""
    text = (files.get("txt") or b"").decode("utf-8", "replace")
    return text if text.strip() else meta.get(columns.caption)


def _image_bytes(files: dict[str, bytes | None]) -> bytes:
    present = [suffix for suffix in IMAGES if suffix in files]
    if not present:
        raise LeftOut("missing_image")
    data = files[present[0]]
    if data is None:
        raise LeftOut("image_too_large")
    return data


def _sample_key(shard: str, index: int, key: str) -> str:
    """A name people can read: shard, position, and the key found there without anything unprintable."""
    name = shard.split("?")[0].rstrip("/").rsplit("/", 1)[-1]
    clean = "".join(c if c.isascii() and c.isprintable() else "?" for c in key[:100])
    return f"{name}#{index}:{clean}"
