"""One image shard -> one code shard: read -> filter and decode -> batch -> encode -> write."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from volunteer_kit.data.code_shards import MadeFrom, stored_metadata
from volunteer_kit.data.hosts import hosts_of, wait_for_a_host
from volunteer_kit.data.laion import LaionSource, metadata_of
from volunteer_kit.data.shards import open_shard
from volunteer_kit.data.source import LeftOut, Raw, ShardError
from volunteer_kit.encode.folder import Summary, Target, finished, summary_of
from volunteer_kit.encode.part import Fault, Part
from volunteer_kit.encode.settings import BATCH, Settings

BEGINNING = 64 * 1024  # bytes of a shard that tell it from another one of its name
AHEAD = 32  # records decoded ahead of the batch, with several threads
MENDABLE = ("missing_shard", "unreachable_shard")  # the same shard may be whole another time


class Decoded(NamedTuple):
    """A record of the input whose turn has come; without an image if it is left out, for `cause`."""

    index: int
    key: str
    cause: str | None = None
    image: np.ndarray | None = None  # uint8 (S, S, 3)
    meta: dict[str, Any] = {}


def encode_shard(
    shard: str,
    target: Target,
    settings: Settings,
    encode_images: Callable[[Tensor], Tensor],
    *,
    threads: Executor | None = None,
    tell: Callable[[int, int], None] = lambda records, left_out: None,
) -> Summary:
    """Make the code shard `target` of `shard`, or what is still missing of it; `encode_images` maps float
    (B, 3, S, S) in [0, 1] to codes (B, N). `threads` decode images; `tell` hears of every batch.

    Raises ShardError where the shard cannot be read now: what was made stays for the next attempt. DataError if the
    folder holds something else under these names; OSError.
    """
    try:
        made_from = _made_from(shard, settings)
    except ShardError:
        if done := finished(target, settings, None):
            return done
        raise
    if done := finished(target, settings, made_from):
        return done
    reader = _Reader(shard, settings, threads)
    with closing(Part(target, settings, made_from)) as part:
        tell(part.records, len(part.faults))
        for batch in reader.batches(part.next):
            _encode(batch, part, settings, encode_images)
            tell(part.records, len(part.faults))
        shard_counts = dict(reader.counts)
        if reader.ended_early:
            shard_counts[reader.ended_early] = 1
        return summary_of(part.finish(shard_counts, reader.ended_early))


class _Reader:
    """The decoded records of a shard in batches that are always cut at the same places."""

    def __init__(self, shard: str, settings: Settings, threads: Executor | None) -> None:
        self.counts: Counter[str] = Counter()  # faults that are no single record's
        self.ended_early: str | None = None
        self._shard, self._settings, self._threads = shard, settings, threads
        self._source = LaionSource(
            [shard],
            image_size=settings.image_size,
            filters=settings.filters._replace(drop_duplicates=False),  # they are marked
            limits=settings.limits,
            counts=self.counts,
            columns=settings.columns,
        )

    def batches(self, first: int) -> Iterator[list[Decoded]]:
        """From the record `first` on. Raises ShardError where another attempt may get further."""
        batch: list[Decoded] = []
        for record in _map(self._decode, self._records(first), self._threads):
            if batch and batch[-1].index // BATCH != record.index // BATCH:
                yield batch
                batch = []
            batch.append(record)
        if batch:
            yield batch

    def _records(self, first: int) -> Iterator[_Seen]:
        """Always read from the shard's beginning, so that what is counted on the way is counted once."""
        pictures: dict[str, int] = {}  # hash of an image -> the first record that has it
        found = False
        try:
            for raw in self._source.read(self._shard, 0, None, math.inf):
                found = True
                seen = _Seen(raw, image := _image_hash(raw), pictures.setdefault(image, raw.index))
                if raw.index >= first:
                    yield seen
        except ShardError as error:
            # a local file that breaks off will do so the next time too; what came before is used
            if not found or error.cause in MENDABLE or not os.path.isfile(self._shard):
                raise
            self.ended_early = error.cause

    def _decode(self, seen: _Seen) -> Decoded:
        raw, columns = seen.raw, self._settings.columns
        key = raw.key.partition(f"#{raw.index}:")[2]
        try:
            record = self._source.use(raw)
        except LeftOut as why:
            return Decoded(raw.index, key, str(why))
        files, _ = raw.data
        meta = stored_metadata(
            metadata_of(files),
            (columns.nsfw, columns.width, columns.height, columns.similarity, columns.language),
        )
        meta |= {"caption": record.caption, "key": key, "index": raw.index, "sha256": seen.image}
        if seen.first < raw.index:
            meta["duplicate_of"] = seen.first
        return Decoded(raw.index, key, image=record.image, meta=meta)


class _Seen(NamedTuple):
    """A record, the hash of its image's bytes, and the first record of the shard, used or not, with the same."""

    raw: Raw
    image: str
    first: int


def _image_hash(raw: Raw) -> str:
    """SHA-256; of a record without an image, a text that no other record has."""
    files, _ = raw.data
    image = files.get("image")
    return f"none {raw.index}" if image is None else hashlib.sha256(image).hexdigest()


def _encode(batch: list[Decoded], part: Part, settings: Settings, encode_images: Callable[[Tensor], Tensor]) -> None:
    """Add a batch to the shard."""
    faults = [Fault(record.index, record.key, record.cause) for record in batch if record.cause]
    good = [record for record in batch if record.image is not None]
    codes = _codes(good, encode_images) if good else ()
    for record, row in zip(good, codes, strict=True):
        if row.min() < 0 or row.max() >= settings.num_codes:
            faults.append(Fault(record.index, record.key, "codes_out_of_range"))
            continue
        part.add(record.index, record.key, row, record.meta)
    part.commit(sorted(faults), batch[-1].index + 1)


def _codes(records: list[Decoded], encode_images: Callable[[Tensor], Tensor]) -> np.ndarray:
    images = torch.from_numpy(np.stack([record.image for record in records]))  # uint8 (B, S, S, 3)
    with torch.no_grad():
        return encode_images(images.permute(0, 3, 1, 2).float() / 255).cpu().numpy()  # (B, N)


def _map(work: Callable[[_Seen], Decoded], items: Iterable[_Seen], threads: Executor | None) -> Iterator[Decoded]:
    """As map, in order, with a few items under way at once."""
    if threads is None:
        yield from map(work, items)
        return
    waiting: deque[Future[Decoded]] = deque()
    for item in items:
        waiting.append(threads.submit(work, item))
        if len(waiting) > AHEAD:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _made_from(shard: str, settings: Settings) -> MadeFrom:
    wait_for_a_host(hosts_of([shard]), math.inf)
    with open_shard(shard, settings.limits, math.inf, 0, BEGINNING) as stream:
        try:
            beginning = stream.read(BEGINNING)
        except OSError as error:
            raise ShardError("unreachable_shard", error.strerror or str(error)) from None
    name = shard.split("?")[0].rstrip("/").rsplit("/", 1)[-1]
    size = os.path.getsize(shard) if os.path.isfile(shard) else None
    return MadeFrom(name=name, beginning=hashlib.blake2b(beginning, digest_size=16).hexdigest(), size=size)
