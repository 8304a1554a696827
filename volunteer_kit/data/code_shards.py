"""The format of code shards: what `volunteer-kit encode` writes and CodeSource reads.

NAME.tar is a plain tar for webdataset; a record is two files that follow each other, KEY.codes (little-endian uint16)
and KEY.json (caption and metadata). NAME.index.json beside it says where each record begins and its CRC-32, so that
one sample is one HTTP range, and checkable.
"""

from __future__ import annotations

import json
import re
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

BLOCK = 512  # bytes, of tar
END = bytes(2 * BLOCK)  # the end mark of a tar
MAX_CODE = 2**16  # different codes that uint16 can tell apart
MAX_RECORD = 2**20  # bytes; the original's 1,024 codes and a caption take 3,584
MAX_RECORDS = 2**18  # of a shard; img2dataset puts 10,000 into one
MAX_INDEX = 8 * 2**20  # bytes of NAME.index.json; a record takes about 20 in it
MAX_VALUE = 200  # characters of a metadata field
NAME = r"[A-Za-z0-9_-]{1,80}"


class ImageTokenizerName(BaseModel):
    """Which image tokenizer made the codes: how people call it, and the hash of its weights."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(max_length=200)
    identity: str = Field(min_length=1, max_length=200)


class MadeFrom(BaseModel):
    """The input shard: its name and a hash of how it begins, by which another one of the same name is noticed."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(max_length=200)
    beginning: str = Field(pattern=r"^[0-9a-f]{32}$")
    size: int | None = Field(None, ge=0)  # bytes; None of one behind a URL


class CodeIndex(BaseModel):
    """NAME.index.json. Unknown fields are passed over, so that later versions may add some."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    records: int = Field(ge=0, le=MAX_RECORDS)
    offsets: list[Annotated[int, Field(ge=0, lt=2**50)]] = Field(min_length=1, max_length=MAX_RECORDS + 1)  # end's too
    size: int = Field(ge=0)  # bytes of the tar
    crc32: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(max_length=MAX_RECORDS)  # of each record's bytes
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # of the tar
    image_tokenizer: ImageTokenizerName
    codes_per_record: int = Field(gt=0, le=MAX_RECORD // 2)
    num_codes: int = Field(gt=1, le=MAX_CODE)
    settings: str = Field(max_length=64)  # a hash of what decided which records are in it
    made_from: MadeFrom

    @model_validator(mode="after")
    def _consistent(self) -> CodeIndex:
        if not len(self.crc32) == len(self.offsets) - 1 == self.records:
            raise ValueError("as many checksums as records, and one offset more")
        sizes = np.diff(self.offsets)
        if self.offsets[0] or not ((sizes >= 4 * BLOCK) & (sizes <= MAX_RECORD)).all():
            raise ValueError("offsets rise from 0, by the size of a record")
        if self.offsets[-1] + len(END) != self.size:
            raise ValueError("the last record ends where the tar's end mark begins")
        return self


class Stored(NamedTuple):
    """The two files of a record."""

    key: str
    codes: bytes  # little-endian uint16
    meta: bytes  # json


def index_name(shard: str) -> str:
    """Where a shard's index lies: PATH/00000.tar -> PATH/00000.index.json; a URL keeps its ?query."""
    place, mark, query = shard.partition("?") if re.match(r"https?://", shard, re.IGNORECASE) else (shard, "", "")
    return f"{place.removesuffix('.tar')}.index.json{mark}{query}"


def parse_index(data: bytes) -> CodeIndex:
    """Raises ValueError with one line that says what is wrong with it."""
    if len(data) > MAX_INDEX:
        raise ValueError(f"more than {MAX_INDEX // 2**20} MiB")
    try:
        return CodeIndex.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from None


def dump_index(index: CodeIndex) -> bytes:
    """The same bytes for the same index, one field a line."""
    fields = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in index.model_dump(mode="json").items())
    return ("{\n" + ",\n".join(fields) + "\n}\n").encode()


def pack_record(key: str, codes: Sequence[int] | np.ndarray, meta: Mapping[str, Any]) -> bytes:
    """A record's bytes in the tar: the same whenever and wherever they are made."""
    text = json.dumps(meta, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")
    return _member(f"{key}.codes", np.asarray(codes, "<u2").tobytes()) + _member(f"{key}.json", text)


def unpack_record(data: bytes) -> Stored:
    """The inverse of pack_record. Raises ValueError for anything else; links, folders and the like included."""
    codes_name, codes, after = _take(data, 0)
    meta_name, meta, after = _take(data, after)
    key = codes_name.removesuffix(".codes")
    if after != len(data) or (codes_name, meta_name) != (f"{key}.codes", f"{key}.json"):
        raise ValueError("no record of codes")
    return Stored(key, codes, meta)


def checksum(record: bytes) -> int:
    """CRC-32, as the index has it."""
    return zlib.crc32(record)


def stored_metadata(meta: Mapping[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """What filters look at, under its original names: plain values of a bounded length."""
    kept = {}
    for column in columns:
        value = meta.get(column)
        if isinstance(value, (bool, int)) or (isinstance(value, float) and abs(value) < float("inf")):
            kept[column] = value
        elif isinstance(value, str) and len(value) <= MAX_VALUE:
            kept[column] = value
    return kept


def _member(name: str, data: bytes) -> bytes:
    header = tarfile.TarInfo(name)  # no time, no owner: equal records have equal bytes
    header.size = len(data)
    return header.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % BLOCK)


def _take(data: bytes, at: int) -> tuple[str, bytes, int]:
    """The file at `at`: name, contents, and where the next one begins. tarfile took longer than all the rest of
    reading a record; here a header is as _member wrote it, which the record's checksum has confirmed."""
    begin = at + BLOCK
    header = data[at:begin]
    if header[257:262] != b"ustar" or header[156:157] != tarfile.REGTYPE or any(header[345:500]):
        raise ValueError("no plain file")
    size = int(header[124:135], 8)
    if not 0 <= size <= len(data) - begin:
        raise ValueError("no plain file")
    end = begin + size
    return header[:100].rstrip(b"\0").decode("ascii"), data[begin:end], end + (-end % BLOCK)
