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

    caption: str = "caption"
    code: str = "code"  # int16 bytes or lists of integers; used where there is such a column
    image: str = "image"  # bytes, or the Hub's {"bytes": ...}; used where there is no column of codes
    nsfw: str = "NSFW"
    width: str = "original_width"  # pixels
    height: str = "original_height"
    similarity: str = "similarity"  # of caption and picture, CLIP's
    language: str = "LANGUAGE"


class DataConfig(BaseModel):
    """Where samples come from and which are used. The fields in LOCAL may differ from machine to machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    LOCAL: ClassVar[frozenset[str]] = frozenset(
        {"shards", "cache_mb", "disk_cache_mb", "cache_dir", "prefetch", "encode_batch", "timeout", "retries"}
        | {"patience", "max_member_mb"}
    )

    kind: Literal["scenes", "shards", "codes", "hub"]
    level: Literal[1, 2] = 1  # of scenes: one object, or two and their relation
    # Of shards (images, as img2dataset writes them) and codes (as `volunteer-kit encode` writes them): paths, folders,
    # globs, brace patterns or http(s) URLs. None: each machine says its own.
    shards: str | list[str] | None = None
    # Of hub: a data set of parquet files, org/name or org/name@revision; what it calls its columns.
    dataset: str | None = Field(None, pattern=DATASET)
    subset: str | None = Field(None, max_length=200)
    split: str = Field("train", max_length=200)
    columns: Columns = Columns()

    min_caption: int = Field(3, ge=0, le=10_000)  # characters
    nsfw_allowed: tuple[str, ...] | None = ("UNLIKELY",)  # None takes everything, also what nobody has looked at
    max_aspect: float = Field(2.0, ge=1)  # longer side : shorter side of the original image
    min_size: int = Field(0, ge=0, le=100_000)  # pixels of the original image's shorter side
    min_similarity: float | None = Field(None, ge=-1, le=1)  # of caption and picture; LAION-400M took 0.3
    languages: tuple[str, ...] | None = None  # as the data set writes them: [en]
    drop_duplicates: bool = False  # pictures that an earlier record of the same shard has too

    # Records that are leased together and mixed with each other. Raise it when neighbours in a shard are alike.
    range_length: int = Field(512, ge=1, le=2**20)

    cache_mb: float = Field(256, ge=0, le=2**20)  # MB of memory for encoded samples that may be needed again
    disk_cache_mb: float = Field(1024, ge=0, le=2**24)  # MB of disk for the same; 0: none
    cache_dir: str | None = Field(None, max_length=4000)  # None: $VOLUNTEER_KIT_HOME or ~/.cache/volunteer_kit
    prefetch: int = Field(256, ge=1, le=2**16)  # samples made ready in the background
    encode_batch: int = Field(32, ge=1, le=4096)  # images encoded at once
    timeout: float = Field(10.0, gt=0, le=600)  # s without a byte from a server
    retries: int = Field(4, ge=0, le=100)  # new connections a shard, each goes on where the last one broke
    patience: float = Field(60.0, gt=0, le=86_400)  # s without a single readable record before the stream gives up
    max_member_mb: float = Field(32, gt=0, le=1024)  # of one file in a shard

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
