"""Image-text shards as img2dataset writes them (KEY.jpg, KEY.txt, KEY.json in tars), with the run's filters.

Only images, captions and json are ever looked at (record_names.py); neighbours of one KEY are a record.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .filters import accept
from .hosts import hosts_of, wait_for_a_host
from .pictures import decode_image
from .record_names import Name, Namer, Role, Rule, key_of
from .settings import Columns, Filters
from .shards import catalogue_of, open_shard
from .source import LeftOut, Limits, Raw, Record, ShardError
from .tar_reader import Member, read_members

Files = dict[Role, bytes | None]  # of a record; None for one that is too large or not needed

MAX_JSON = 2**20  # bytes, of captions too
MAX_KINDS = 20  # of files that are passed over, named in words
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
        self._marks: OrderedDict[tuple[str, int], _Mark] = OrderedDict()  # by shard and record
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
        at, rule = self._marks.get((shard, first), _Mark(0, None))
        first = first if at else 0
        wait_for_a_host(self._hosts, give_up_at)
        try:
            with open_shard(shard, self._limits, give_up_at, at) as stream:
                members = read_members(stream, self._limits, lambda name: True, go_on, at, links=True)
                for group in self._groups(members, Namer(rule), shard, first, start, stop):
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
        if "json" not in files and self._filters.nsfw_allowed is not None:
            raise LeftOut("missing_json")
        meta = metadata_of(files)
        caption = accept(_caption(files, meta, self._columns), meta, self._filters, self._columns)
        if is_duplicate:
            raise LeftOut("duplicate")
        image = _image_bytes(files, self._limits.member_bytes)
        return Record(caption, decode_image(image, self._image_size, self._filters.max_aspect))

    def _groups(
        self, members: Iterator[Member], namer: Namer, shard: str, first: int, start: int, stop: int | None
    ) -> Iterator[_Group]:
        """Records from number `first` up to `stop`; the files of those before `start` are read only if their pictures
        matter. The record in which a shard breaks is kept if it is whole. Raises ShardError, also for a shard without
        any record."""
        group = None
        others: Counter[str] = Counter()  # files that are passed over, by their endings
        try:
            for name, member in namer.named(members):
                at = 0 if group is None else group.index
                if name is None:
                    others[_ending(member, others)] += 1
                    self.counts["other_member"] += at >= start
                    continue
                key = key_of(name, namer.rule)
                if group is None or key != group.key:
                    index = first if group is None else group.index + 1
                    if index == stop:
                        self._mark(shard, stop, _Mark(member.at, namer.rule))
                        break
                    if group is not None:
                        yield group
                    group = _Group(index, key)
                is_needed = group.index >= start or (self._filters.drop_duplicates and name.role == "image")
                if cause := group.add(name, member, is_needed):
                    self.counts[cause] += group.index >= start
        except ShardError:
            if group is not None and group.is_whole:
                yield group  # what a break leaves of another is the shard's fault, which is counted already
            raise
        if group is not None:
            yield group
        elif first == 0:
            raise ShardError("empty_shard", _nothing_in_it(others))

    def _mark(self, shard: str, index: int, mark: _Mark) -> None:
        self._marks[shard, index] = mark
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


class _Mark(NamedTuple):
    """Where a record of a shard begins, and by which rule its names are read there."""

    at: int  # byte
    rule: Rule | None


class _Group:
    """A record's files."""

    def __init__(self, index: int, key: str) -> None:
        self.index, self.key = index, key
        self.files: Files = {}
        self._ranks: dict[Role, tuple[int, int]] = {}

    def add(self, name: Name, member: Member, is_needed: bool) -> str | None:
        """Take a file in. Why one of its role is passed over, if one is: this or the one before."""
        role, rank, earlier = name.role, name.rank, self._ranks.get(name.role)
        if earlier is None or rank < earlier:
            self.files[role] = member.read() if is_needed else None
            self._ranks[role] = rank
        return None if earlier is None else "duplicate_member" if rank == earlier else "other_member"

    @property
    def image(self) -> bytes | None:
        return self.files.get("image")

    @property
    def is_whole(self) -> bool:
        return len(self.files) == 3

    def raw(self, shard: str, is_duplicate: bool) -> Raw:
        if is_duplicate:
            self.files.pop("image")
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


def metadata_of(files: Files) -> dict[str, Any]:
    """What a record's json says; {} where it has none. Raises LeftOut."""
    if "json" not in files:
        return {}
    data = _unpacked(files["json"], MAX_JSON)
    try:
        meta = json.loads(_text(data)) if data is not None and len(data) <= MAX_JSON else None
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise LeftOut("bad_json")
    return meta


def _caption(files: Files, meta: dict[str, Any], columns: Columns) -> Any:
    """The text file's, or the metadata's where that has none."""
    text = _text(_unpacked(files.get("text"), MAX_JSON) or b"", "replace")
    return text if text.strip("\ufeff \r\n\t") else meta.get(columns.caption)


def _image_bytes(files: Files, limit: int) -> bytes:
    if "image" not in files:
        raise LeftOut("missing_image")
    data = _unpacked(files["image"], limit)
    if data is None:
        raise LeftOut("image_too_large")
    return data


def _text(data: bytes, errors: str = "strict") -> str:
    """UTF-8, or UTF-16 where a byte order mark says so; the mark is dropped. Raises ValueError."""
    is_16_bits = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if is_16_bits else "utf-8-sig", errors)


def _unpacked(data: bytes | None, limit: int) -> bytes | None:
    """What is gzipped, unpacked, whatever its name says; None for what has more than `limit` bytes then, b"" for what
    is damaged."""
    if data is None or not data.startswith(b"\x1f\x8b"):
        return data
    try:
        plain = zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(data, limit + 1)
    except zlib.error:
        return b""
    return plain if len(plain) <= limit else None


def _ending(member: Member, known: Counter[str]) -> str:
    """A short name of a file's kind, one of few."""
    if not member.is_file:
        return "links"
    file = member.name.rpartition("/")[2]
    ending = "." + "".join(c if c.isascii() and c.isprintable() else "?" for c in file.rpartition(".")[2][:12])
    if file.startswith(".") or "." not in file:
        ending = "hidden files" if file.startswith(".") else "files without an ending"
    return ending if ending in known or len(known) < MAX_KINDS else "others"


def _nothing_in_it(others: Counter[str]) -> str:
    if not others:
        return "no files in it"
    kinds = ", ".join(f"{kind} {number}" for kind, number in others.most_common(6))
    return f"no picture, caption or metadata among its {sum(others.values())} files ({kinds})"


def _sample_key(shard: str, index: int, key: str) -> str:
    """A name people can read: shard, position, and the key found there without anything unprintable."""
    name = shard.split("?")[0].rstrip("/").rsplit("/", 1)[-1]
    clean = "".join(c if c.isascii() and c.isprintable() else "?" for c in key[:100])
    return f"{name}#{index}:{clean}"
