"""Data that a stranger's server or repository gives: tars, tables, codes, pictures, captions."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from PIL import Image

from tests.fuzz.forms import JSON, TAR, Framed, Text
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import folder
from volunteer_kit.data import shards
from volunteer_kit.data.code_shards import (
    CodeIndex,
    ImageTokenizerName,
    MadeFrom,
    dump_index,
    pack_record,
    parse_index,
    unpack_record,
)
from volunteer_kit.data.codes import CodeSource
from volunteer_kit.data.encoding import Coded, Contents, pack, unpack
from volunteer_kit.data.errors import DataError
from volunteer_kit.data.filters import accept
from volunteer_kit.data.laion import LaionSource, decode_image
from volunteer_kit.data.parquet import Table
from volunteer_kit.data.parquet_pages import PageGuard
from volunteer_kit.data.settings import Columns, Filters
from volunteer_kit.data.shards import catalogue_of, expand_shards, shown
from volunteer_kit.data.source import LeftOut, Limits, Raw, SampleName, ShardError
from volunteer_kit.data.table_columns import suits, values_of
from volunteer_kit.data.tar_reader import read_members
from volunteer_kit.data.thrift import ThriftError, read_struct
from volunteer_kit.data.tokenizer import WordTokenizer, load_tokenizer

registry = Registry()
shards.MAX_SHARDS = 10_000  # the run file's million takes seconds, and shows nothing more
LIMITS = Limits(member_bytes=2**20, shard_bytes=2**24)
FILTERS = Filters(min_caption=1, nsfw_allowed=None)


def _image(kind: str, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (24, 16), 120 if mode in ("L", "P") else (200, 100, 50, 90)[: len(mode)]).save(file, kind)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in (
            ("00000.jpg", _image("JPEG")), ("00000.txt", b"a cat"), ("00000.json", b'{"NSFW": "UNLIKELY"}'),
            ("long/" + "n" * 120 + ".txt", b"x"), ("\u00e9.png", _image("PNG")),
        ):  # fmt: skip
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    return file.getvalue()[: 512 * 20] + bytes(1024)


@registry.add(lambda: [_tar()], ShardError, form=TAR, max_bytes=16_384)
def tar(data: bytes) -> bool:
    """The members of a tar."""
    found = 0
    for member in read_members(io.BytesIO(data), LIMITS, lambda name: not name.endswith(".skip")):
        found += len(member.read() or b"")
    return found > 0


@registry.add(lambda: [_tar()], ShardError, form=TAR, max_bytes=16_384)
def image_shard(data: bytes) -> bool:
    """A shard of pictures and captions, read and decoded."""
    path = folder() / "shard.tar"
    path.write_bytes(data)
    source = LaionSource([str(path)], image_size=8, filters=FILTERS, limits=LIMITS, counts=Counter())
    used = 0
    for raw in source.read(str(path), 0, None, 1e18):
        try:
            source.use(raw)
            used += 1
        except LeftOut:
            continue
    return used > 0


@registry.add(
    lambda: [
        _image("JPEG"), _image("PNG"), _image("WEBP"), _image("PNG", "RGBA"), _image("PNG", "P"), _image("JPEG", "CMYK")
    ],
    LeftOut,
    max_bytes=8192,
)  # fmt: skip
def image(data: bytes) -> bool:
    """A picture."""
    return decode_image(data, 8, 4.0).shape == (8, 8, 3)


def _tables() -> Iterator[bytes]:
    rows = pa.table(
        {
            "caption": ["a cat", "a dog", None], "code": [b"\1\0" * 4, b"", None], "list": [[1, 2], [], None],
            "image": [{"bytes": b"x", "path": None}] * 3, "width": [1, 2, 3],
        }
    )  # fmt: skip
    for options in ({"compression": "none"}, {"compression": "gzip", "use_dictionary": False}):
        file = io.BytesIO()
        pq.write_table(rows, file, **options)
        yield file.getvalue()
    file = io.BytesIO()
    pq.write_table(rows.slice(0, 1).select(["caption"]), file, store_schema=False, compression="none")
    yield file.getvalue()


@registry.add(_tables, ShardError, max_bytes=8192, memory_mb=900)
def parquet(data: bytes) -> bool:
    """A table, all of it. pyarrow may pull MAX_PULLED bytes for one batch."""

    def open_range(start: int, stop: int) -> io.BytesIO:
        return io.BytesIO(data[start:stop])

    table = Table(len(data), open_range)
    table.ranges(1)
    columns = [name for name, kind in table.columns.items() if any(suits(kind, k) for k in ("text", "value", "codes"))]
    rows = 0
    for _, batch in table.batches(columns, 0, min(table.num_rows, 1000), open_range):
        rows += batch.num_rows
        for n in range(batch.num_columns):
            values_of(batch.column(n))
    return rows > 0


def _footers() -> Iterator[bytes]:
    for data in _tables():
        yield data[-8 - int.from_bytes(data[-8:-4], "little") : -8]


@registry.add(_footers, ThriftError, IndexError)
def thrift(data: bytes) -> bool:
    """A parquet file's footer."""
    return bool(read_struct(data)[0])


@registry.add(lambda: [data[4:400] for data in _tables()], ShardError)
def parquet_pages(data: bytes) -> bool:
    """A column's bytes, as they pass by in pieces."""
    guard = PageGuard(is_repeated=True)
    return guard.pass_by(data[: len(data) // 2]) + guard.pass_by(data[len(data) // 2 :]) > 0


RECORD = pack_record("00000", [1, 2, 3, 4], {"caption": "a cat", "width": 3, "sha256": "0" * 64})


def _index() -> bytes:
    made_from = MadeFrom(name="0.tar", beginning="0" * 32)
    return dump_index(
        CodeIndex(
            records=2, offsets=[0, 2048, 4096], size=5120, crc32=[1, 2], sha256="0" * 64, codes_per_record=4,
            image_tokenizer=ImageTokenizerName(name="t", identity="i"), num_codes=8, settings="s", made_from=made_from,
        )
    )  # fmt: skip


@registry.add(lambda: [_index()], ValueError, form=JSON)
def code_index(data: bytes) -> bool:
    """The index beside a code shard."""
    return parse_index(data).records > 0


_codes = CodeSource(["0.tar"], codes=4, num_codes=8, tokenizer=None, filters=FILTERS, limits=LIMITS, counts=Counter())


@registry.add(lambda: [RECORD], ValueError, LeftOut, form=TAR, max_bytes=8192)
def code_record(data: bytes) -> bool:
    """A record of codes."""
    unpack_record(data)
    return _codes.use(Raw(0, "key", data, len(data))).codes is not None


@registry.add(
    lambda: [json.dumps({"caption": "a cat", "NSFW": "UNLIKELY", "original_width": 30, "similarity": 0.3}).encode()],
    LeftOut,
    form=JSON,
)
def metadata(data: bytes) -> bool:
    """What a record's JSON says, and the filters."""
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(meta, dict):
        return False
    accept(meta.get("caption"), meta, FILTERS, Columns())
    accept(meta.get("caption"), meta, FILTERS._replace(nsfw_allowed=("UNLIKELY",), min_similarity=0.1), Columns())
    return True


@registry.add(
    lambda: [b"http://h/{00000..00003}.tar", b"http://h/{a,b}/x.tar?key=1", b"http://u:p@h/x.tar"],
    DataError,
    form=Text("{", "}", "..", ",", "{0..9}", "{0..99999}", "{a..z}", "{1..9..2}", "%2e", "\\", "http://", "-"),
    max_bytes=300,
)
def shard_pattern(data: bytes) -> bool:
    """A run file's shards behind addresses. Paths are another matter: they are looked up on the disk."""
    found = expand_shards("http://h/" + data.decode("utf-8", "replace").removeprefix("http://h/"))
    catalogue_of("shards", [name for name in found[:3] if shown(name)])
    return len(found) > 0


@registry.add(lambda: [b"0/17/4711"], ValueError, form=Text("/", "0", "9" * 12, "-", "\u0663"))
def sample_name(data: bytes) -> bool:
    """How members name samples to each other."""
    return SampleName.parse(data.decode("utf-8", "replace")).epoch >= 0


_words = WordTokenizer()


@registry.add(lambda: ["a red cat, éß 猫".encode()], max_bytes=8192)
def caption(data: bytes) -> bool:
    """A caption on its way to the model."""
    ids = _words.encode(data.decode("utf-8", "surrogateescape"), 32)
    _words.decode(ids)
    return len(ids) == 32


def _tokenizer_files() -> Iterator[bytes]:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "cat": 1, "[UNK]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    yield made.to_str().encode()
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"c": 0, "a": 1, "ca": 2}, [("c", "a")]))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    yield made.to_str().encode()


@registry.add(_tokenizer_files, DataError, form=JSON, max_bytes=8192)
def tokenizer_file(data: bytes) -> bool:
    """A tokenizer of a Hub repository."""
    path = folder() / "tokenizer.json"
    path.write_bytes(data)
    found = load_tokenizer(f"file:{path}")
    found.encode("a cat", 8)
    return found.vocab_size > 0


def _blocks() -> Iterator[bytes]:
    coded = [Coded(0, 0, "key", "a cat", np.arange(4)), Coded(1, 1, "key", "a dog", np.arange(4))]
    yield pack(Contents(2, True, 2, Counter(nsfw=1), coded))
    yield pack(Contents(0, False, 0, Counter(), []))


@registry.add(_blocks, ValueError, form=Framed("<II"))
def cached_block(data: bytes) -> bool:
    """A block of codes in the cache on the disk."""
    return unpack(data).records >= 0
