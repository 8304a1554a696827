"""The samples of a run, endless and in an order that can be told in advance.

The path of one sample: shards in a seeded order -> open -> read tar -> group -> filter (laion.py, or a drawing by
scenes.py) -> encode the image, tokenize the caption -> shuffle in blocks -> batch. Every step is a pure function of
(seed, peer_seed, shards), so that a position of six numbers is enough to go on where a stream stopped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from .errors import DataError
from .laion import CAUSES, Filters, LaionSource
from .scenes import SceneSource
from .shards import expand_shards
from .source import Limits, Record, ShardError, Source
from .tokenizer import Tokenizer

FIRST_BLOCK = 64  # samples; blocks double from here to shuffle_buffer, so that the first batch comes soon


class DataConfig(BaseModel):
    """Section `data` of a run file. The fields in LOCAL may differ from machine to machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    LOCAL: ClassVar[frozenset[str]] = frozenset(
        {"shards", "shuffle_buffer", "cache_mb", "encode_batch", "timeout", "retries", "patience", "max_member_mb"}
    )

    kind: Literal["scenes", "shards"]
    level: Literal[1, 2] = 1  # of scenes: one object, or two and their relation
    # Paths, folders, globs, brace patterns or http(s) URLs of webdataset shards; None: each machine says its own.
    shards: str | list[str] | None = None
    min_caption: int = Field(3, ge=0, le=10_000)  # characters
    nsfw_allowed: tuple[str, ...] | None = ("UNLIKELY",)  # None takes everything, also what nobody has looked at
    max_aspect: float = Field(2.0, ge=1)  # longer side : shorter side of the original image
    # Samples that are mixed with each other. Raise it when neighbours in a shard are alike; a stream that goes on
    # after a restart reads up to this many again.
    shuffle_buffer: int = Field(1024, ge=1, le=2**20)
    cache_mb: float = Field(256, ge=0, le=2**20)  # MB of memory for encoded samples; later passes read them from there
    encode_batch: int = Field(32, ge=1, le=4096)  # images encoded at once
    timeout: float = Field(10.0, gt=0, le=600)  # s without a byte from a server
    retries: int = Field(4, ge=0, le=100)  # new connections a shard, each goes on where the last one broke
    patience: float = Field(60.0, gt=0, le=86_400)  # s without a single readable record before the stream gives up
    max_member_mb: float = Field(32, gt=0, le=1024)  # of one file in a shard


class Sample(NamedTuple):
    """One text-image pair in integers."""

    key: str
    text: list[int]  # T, 0 is padding
    codes: np.ndarray  # int64 (N,)
    caption: str


class Batch(NamedTuple):
    """Samples side by side; `keys` name them."""

    text: torch.Tensor  # int64 (B, T)
    codes: torch.Tensor  # int64 (B, N)
    keys: list[str]


class Cursor(NamedTuple):
    """The next record to read: the how-many-th pass, the shard's place in that pass, the record in the shard."""

    pass_: int
    shard: int
    index: int


EncodeImages = Callable[[torch.Tensor], torch.Tensor]  # float (B, 3, S, S) in [0, 1] -> integers (B, N)


def open_stream(
    source: DataConfig,
    *,
    tokenizer: Tokenizer,
    encode_images: EncodeImages,
    image_size: int,
    text_seq_len: int,
    seed: int,
    peer_seed: int,
    num_codes: int,
) -> SampleStream:
    """The stream of a run's samples as one peer reads it. `image_size` is what `encode_images` takes, `num_codes`
    the model's vocabulary of image codes. Raises DataError if no shard is named; what cannot be read shows with
    the first batch."""
    counts: Counter[str] = Counter()
    if source.kind == "scenes":
        records: Source = SceneSource(source.level, image_size)
    else:
        records = LaionSource(
            expand_shards(source.shards or []),
            image_size=image_size,
            filters=Filters(source.min_caption, source.nsfw_allowed, source.max_aspect),
            limits=Limits(source.timeout, source.retries, int(source.max_member_mb * 2**20)),
            counts=counts,
        )
    encoder = _Encoder(tokenizer, encode_images, text_seq_len, num_codes, counts)
    return SampleStream(source, records, encoder, seed=seed, peer_seed=peer_seed, counts=counts)


class SampleStream:
    """An endless stream of batches. `counts` says how many records were left out, by cause (laion.CAUSES); records
    from memory are not counted twice. `failures` has the shards of the last try that could not be read, and why."""

    def __init__(
        self, config: DataConfig, source: Source, encoder: _Encoder, *, seed: int, peer_seed: int, counts: Counter[str]
    ) -> None:
        self.counts = counts
        self.failures: dict[str, str] = {}
        self._config, self._source, self._encoder = config, source, encoder
        self._seeds = (seed, peer_seed)
        self._cache = _Cache(int(config.cache_mb * 1e6))
        self._deadline, self._has_read = 0.0, False
        self._restart(Cursor(0, 0, 0), block=0)

    def next_batch(self, batch_size: int) -> Batch:
        """The next samples; `batch_size` may change from call to call. Raises DataError if nothing can be read for
        `patience` seconds, or in the whole first pass; a later call tries again from there."""
        if batch_size < 1:
            raise ValueError(f"a batch has 1 sample or more, not {batch_size}")
        self._deadline = time.monotonic() + self._config.patience
        while len(self._ready) - self._offset < batch_size:
            self._ready += self._next_block()
        samples = self._ready[self._offset : self._offset + batch_size]
        self._offset += batch_size
        return Batch(
            torch.tensor([sample.text for sample in samples], dtype=torch.int64),
            torch.from_numpy(np.stack([sample.codes for sample in samples])),
            [sample.key for sample in samples],
        )

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Batches of one size, without end."""
        while True:
            yield self.next_batch(batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream is, ready for JSON: the block in use and how many of its samples are given out."""
        self._forget_used_blocks()
        if self._starts and self._offset < self._starts[0].length:
            cursor, block, offset = self._starts[0].cursor, self._starts[0].block, self._offset
        else:
            cursor, block, offset = self._cursor, self._block, self._to_skip
        return {
            "version": 1,
            "order": self._order_digest(),
            **{"pass": cursor.pass_, "shard": cursor.shard, "index": cursor.index},
            **{"block": block, "offset": offset},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: no sample is lost or repeated. With other shards or seeds than then, its
        position means nothing and the stream starts its next pass. Raises ValueError for what is no state."""
        numbers = [state.get(key) for key in ("version", "pass", "shard", "index", "block", "offset")]
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers) or numbers[0] != 1:
            raise ValueError(f"not the state of a sample stream: {str(state)[:200]}")
        _, pass_, shard, index, block, offset = numbers
        if state.get("order") != self._order_digest():
            self._restart(Cursor(pass_ + 1, 0, 0), block)
            return
        self._restart(Cursor(pass_, shard, index), block)
        self._to_skip = offset

    def close(self) -> None:
        """Let go of open files and connections; the stream can still go on from where it is."""
        self._restart_reader()

    # blocks: what is shuffled together, and where it began

    def _restart(self, cursor: Cursor, block: int) -> None:
        self._cursor, self._block = cursor, block
        self._ready: list[Sample] = []  # samples of the blocks in _starts, shuffled block by block
        self._starts: list[_BlockStart] = []
        self._offset = 0  # of _ready, given out
        self._to_skip = 0  # samples of the next block given out before a restart
        self._restart_reader()

    def _restart_reader(self) -> None:
        self._reader = self._read_pass(self._cursor)

    def _forget_used_blocks(self) -> None:
        while len(self._starts) > 1 and self._offset >= self._starts[0].length:
            used = self._starts.pop(0).length
            del self._ready[:used]
            self._offset -= used

    def _next_block(self) -> list[Sample]:
        """The next samples up to the end of a block or pass, shuffled; may be empty at the end of a pass."""
        self._forget_used_blocks()
        start, number = self._cursor, self._block
        size = min(self._config.shuffle_buffer, FIRST_BLOCK << min(number, 24))
        samples: list[Sample] = []
        try:
            for sample, after in islice(self._reader, size):
                samples.append(sample)
                self._cursor = after
        except BaseException:
            self._cursor = start  # what was read of this block is read again, so that its order stays the same
            self._restart_reader()
            raise
        if len(samples) < size:
            self._cursor = Cursor(self._cursor.pass_ + 1, 0, 0)
            self._restart_reader()
        if not samples:
            return []
        order = _permutation(len(samples), "block", *self._seeds, number)
        self._starts.append(_BlockStart(start, number, len(samples)))
        self._block = number + 1
        self._offset += min(self._to_skip, len(samples))
        self._to_skip = 0
        return [samples[i] for i in order]

    # one pass: shards in their order, records in theirs

    def _read_pass(self, start: Cursor) -> Iterator[tuple[Sample, Cursor]]:
        shards = self._source.shards
        order = _permutation(len(shards), "shards", *self._seeds, start.pass_)
        nothing = start.shard == start.index == 0
        for place in range(start.shard, len(order)):
            first = start.index if place == start.shard else 0
            for index, sample in self._read_shard(shards[order[place]], first):
                nothing, self._has_read = False, True
                self._deadline = time.monotonic() + self._config.patience
                yield sample, Cursor(start.pass_, place, index + 1)
            if time.monotonic() > self._deadline:
                raise self._nothing(f"Nothing could be read for {self._config.patience:g} s")
        if nothing and self._has_read and time.monotonic() < self._deadline:
            time.sleep(min(1.0, self._config.patience))  # it worked before: an outage, perhaps a short one
        elif nothing:
            raise self._nothing(f"Not one usable sample in {len(shards)} shard{'s' * (len(shards) != 1)}")

    def _read_shard(self, shard: str, start: int) -> Iterator[tuple[int, Sample]]:
        if (kept := self._cache.get(shard)) is not None:
            yield from ((index, sample) for index, sample in kept if index >= start)
            return
        self.failures.pop(shard, None)
        records = self._records(shard, start)
        kept: list[tuple[int, Sample]] | None = [] if start == 0 and self._cache.has_room else None
        while batch := list(islice(records, self._config.encode_batch)):
            for index, sample in self._encoder(batch):
                if kept is not None:
                    kept.append((index, sample))
                yield index, sample
        if kept is not None and shard not in self.failures:
            self._cache.put(shard, kept)

    def _records(self, shard: str, start: int) -> Iterator[Record]:
        """The shard's records; a shard that cannot be read further ends here and is counted."""
        try:
            yield from self._source.read(shard, start, self._deadline)
        except ShardError as error:
            self.counts[error.cause] += 1
            self.failures[shard] = str(error)

    def _order_digest(self) -> str:
        text = json.dumps([self._seeds, list(self._source.shards), self._config.shuffle_buffer])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def _nothing(self, what: str) -> DataError:
        lines = [f"{what}."]
        lines += [f"  {shard}: {why}" for shard, why in list(self.failures.items())[:3]]
        left_out = [(cause, n) for cause, n in self.counts.most_common() if not cause.endswith("_shard")]
        lines += [f"  records left out, {CAUSES.get(cause, cause)}: {n}" for cause, n in left_out[:5]]
        lines += [
            "1. Look whether these are webdataset shards as img2dataset writes them: tar -tf SHARD | head",
            "2. For http(s) addresses: curl -I ADDRESS",
            "3. If records are left out by a filter, look at min_caption, nsfw_allowed and max_aspect in the run file.",
        ]
        return DataError("\n".join(lines))


class _BlockStart(NamedTuple):
    cursor: Cursor
    block: int
    length: int  # samples


class _Encoder:
    """Records -> samples: images to codes, many at once, and captions to tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode_images: EncodeImages,
        text_seq_len: int,
        num_codes: int,
        counts: Counter[str],
    ) -> None:
        self._tokenizer, self._encode_images = tokenizer, encode_images
        self._text_seq_len, self._num_codes, self._counts = text_seq_len, num_codes, counts

    def __call__(self, records: list[Record]) -> Iterator[tuple[int, Sample]]:
        images = torch.from_numpy(np.stack([record.image for record in records]))  # uint8 (B, S, S, 3)
        with torch.no_grad():
            codes = self._encode_images(images.permute(0, 3, 1, 2).float() / 255)
        codes = codes.detach().cpu().to(torch.int64)  # (B, N)
        good = ((codes >= 0) & (codes < self._num_codes)).all(dim=1)  # (B,)
        for record, row, is_good in zip(records, codes.numpy(), good.tolist(), strict=True):
            if not is_good:
                self._counts["codes_out_of_range"] += 1
                continue
            text = self._tokenizer.encode(record.caption, self._text_seq_len)
            yield record.index, Sample(record.key, text, row.copy(), record.caption)


class _Cache:
    """Encoded samples of whole shards, as many shards as fit into `room` bytes."""

    def __init__(self, room: int) -> None:
        self._room, self._shards = room, {}

    @property
    def has_room(self) -> bool:
        return self._room > 0

    def get(self, shard: str) -> list[tuple[int, Sample]] | None:
        return self._shards.get(shard)

    def put(self, shard: str, samples: list[tuple[int, Sample]]) -> None:
        size = sum(400 + s.codes.nbytes + 8 * len(s.text) + len(s.caption) + len(s.key) for _, s in samples)
        if size <= self._room:
            self._shards[shard] = samples
            self._room -= size


def _permutation(length: int, use: str, *numbers: int) -> list[int]:
    """A shuffled range(length), the same on every machine and release: RandomState's stream is frozen, while a
    numpy Generator's may change."""
    digest = hashlib.blake2b(json.dumps([use, *numbers]).encode(), digest_size=16).digest()
    return np.random.RandomState(np.frombuffer(digest, "<u4").astype(np.uint32)).permutation(length).tolist()
