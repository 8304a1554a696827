"""Section `data` of a run file."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

DATASET = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95}(@[A-Za-z0-9_./-]{1,100})?$"


class Filters(NamedTuple):
    """What is kept. The default is the original run's: captions of 3 characters and more, NSFW == "UNLIKELY", aspect
    ratio up to 2. A record that lacks what an active filter looks at is left out."""

    min_caption: int = 3
    nsfw_allowed: tuple[str, ...] | None = ("UNLIKELY",)  # None: not looked at
    max_aspect: float = 2.0
    min_size: int = 0  # 0: not looked at
    min_similarity: float | None = None
    languages: tuple[str, ...] | None = None
    drop_duplicates: bool = False


class Columns(BaseModel):
    """What a table's columns, or the keys of a record's json, are called; by default as LAION and img2dataset do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    caption: str = "caption"  # the caption, text
    code: str = "code"  # the picture's codes, int16 bytes or lists of integers; used where there is such a column
    image: str = "image"  # the picture, bytes or the Hub's {"bytes": ...}; used where there is no column of codes
    nsfw: str = "NSFW"  # the safety mark
    width: str = "original_width"  # width of the original, pixels
    height: str = "original_height"  # height of the original, pixels
    similarity: str = "similarity"  # similarity of caption and picture, by CLIP
    language: str = "LANGUAGE"  # the caption's language


class DataConfig(BaseModel):
    """Where samples come from and which are used. The fields in LOCAL may differ from machine to machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    LOCAL: ClassVar[frozenset[str]] = frozenset(
        {"shards", "cache_mb", "disk_cache_mb", "cache_dir", "prefetch", "encode_batch", "timeout", "retries"}
        | {"patience", "max_member_mb"}
    )

    # Source of samples: scenes are generated, shards are webdataset files of images, codes are shards of codes, hub is
    # a data set on the Hub.
    kind: Literal["scenes", "shards", "codes", "hub"]
    level: Literal[1, 2] = 1  # for scenes: one object, or two and their relation
    # For shards (images, as img2dataset writes them) and codes (as `volunteer-kit encode` writes them): paths, folders,
    # globs, brace patterns, or URLs by http(s), hf, s3, gs. Without it each machine names its own, by --data.
    shards: str | list[str] | None = None
    dataset: str | None = Field(None, pattern=DATASET)  # for hub: a data set of parquet files, org/name[@revision]
    subset: str | None = Field(None, max_length=200)  # its subset (configuration), if it has several
    split: str = Field("train", max_length=200)  # its split
    columns: Columns = Columns()  # names of its columns

    min_caption: int = Field(3, ge=0, le=10_000)  # characters that a caption has to have
    # Safety marks that are allowed. `null` takes everything, also records that were never rated.
    nsfw_allowed: tuple[str, ...] | None = ("UNLIKELY",)
    max_aspect: float = Field(2.0, ge=1)  # longer side : shorter side of the original image, at most
    min_size: int = Field(0, ge=0, le=100_000)  # pixels that the original's shorter side has to have
    min_similarity: float | None = Field(None, ge=-1, le=1)  # least similarity of caption and picture; LAION: 0.3
    languages: tuple[str, ...] | None = None  # languages that are kept, as the data set writes them, such as en
    drop_duplicates: bool = False  # leave out pictures that an earlier record of the same shard has too

    # Records that are leased together and mixed with each other. Raise it when neighbours in a shard are alike.
    range_length: int = Field(512, ge=1, le=2**20)

    cache_mb: float = Field(256, ge=0, le=2**20)  # MB of memory for encoded samples that may be needed again
    disk_cache_mb: float = Field(1024, ge=0, le=2**24)  # MB of disk for the same; 0: none
    # Folder of the cache. Default: $VOLUNTEER_KIT_HOME, or ~/.cache/volunteer_kit.
    cache_dir: str | None = Field(None, max_length=4000)
    prefetch: int = Field(256, ge=1, le=2**16)  # samples made ready in the background
    encode_batch: int = Field(32, ge=1, le=4096)  # images encoded at once
    timeout: float = Field(10.0, gt=0, le=600)  # seconds without a byte from a server
    retries: int = Field(4, ge=0, le=100)  # new connections a shard; each goes on where the last one broke
    patience: float = Field(60.0, gt=0, le=86_400)  # seconds without a readable record until it gives up
    max_member_mb: float = Field(32, gt=0, le=1024)  # MB that one file in a shard may have

    @model_validator(mode="after")
    def _possible(self) -> DataConfig:
        if (self.kind == "hub") != (self.dataset is not None):
            raise ValueError("`dataset: org/name` belongs to `kind: hub`, and `kind: hub` needs it")
        if self.kind in ("scenes", "hub") and self.shards is not None:
            raise ValueError(f"`kind: {self.kind}` reads no shards: leave `shards` out, or set kind: shards or codes")
        return self

    @property
    def filters(self) -> Filters:
        return Filters(**{name: getattr(self, name) for name in Filters._fields})
