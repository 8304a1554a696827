"""Records -> samples in integers, and encoded samples as bytes for the cache."""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from .source import LeftOut, Raw, Record, SampleName, Source
from .tokenizer import Tokenizer

EncodeImages = Callable[[torch.Tensor], torch.Tensor]  # float (B, 3, S, S) in [0, 1] -> integers (B, N)


class Sample(NamedTuple):
    """One text-image pair in integers."""

    name: SampleName
    key: str
    text: np.ndarray  # int64 (T,), 0 is padding
    codes: np.ndarray  # int64 (N,)
    caption: str


class Coded(NamedTuple):
    """What is left of a record once its image is codes; `at` is its place among the records read with it."""

    at: int
    index: int
    key: str
    caption: str
    codes: np.ndarray  # int64 (N,)


class Encoder:
    """Raw records -> samples: filter, decode, images to codes, many at once, captions to tokens.

    :param memory: bytes for the codes of pictures that sources name (Record.picture)
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        encode_images: EncodeImages,
        *,
        text_seq_len: int,
        num_codes: int,
        memory: int = 0,
    ) -> None:
        self._source, self._tokenizer, self._encode_images = source, tokenizer, encode_images
        self._text_seq_len, self._num_codes = text_seq_len, num_codes
        self._pictures: OrderedDict[str, np.ndarray] = OrderedDict()
        self._room = memory

    def code(self, raws: Sequence[Raw], places: Sequence[int]) -> tuple[list[Coded], Counter[str]]:
        """The usable ones among some records, in their order; and how many were left out, by cause."""
        found: list[tuple[int, Raw, Record]] = []
        left_out: Counter[str] = Counter()
        for at, raw in zip(places, raws, strict=True):
            try:
                found.append((at, raw, self._source.use(raw)))
            except LeftOut as why:
                left_out[str(why)] += 1
        coded = []
        for (at, raw, record), codes in zip(found, self._codes([record for *_, record in found]), strict=True):
            if codes is None:
                left_out["codes_out_of_range"] += 1
            else:
                coded.append(Coded(at, raw.index, raw.key, record.caption, codes))
        return coded, left_out

    def sample(self, epoch: int, shard: int, coded: Coded) -> Sample:
        """A coded record as the sample that (epoch, shard, index) names."""
        text = np.array(self._tokenizer.encode(coded.caption, self._text_seq_len), np.int64)
        return Sample(SampleName(epoch, shard, coded.index), coded.key, text, coded.codes, coded.caption)

    def _codes(self, records: list[Record]) -> list[np.ndarray | None]:
        """int64 (N,) of each record; None where a code is not one of the model's."""
        found = [self._pictures.get(r.picture) if r.codes is None else r.codes.astype(np.int64) for r in records]
        missing = [i for i, codes in enumerate(found) if codes is None]
        if missing:
            images = torch.from_numpy(np.stack([records[i].image for i in missing]))  # uint8 (B, S, S, 3)
            pixels = torch.empty(len(images), 3, *images.shape[1:3])  # (B, 3, S, S)
            pixels.copy_(images.permute(0, 3, 1, 2)).div_(255)
            with torch.no_grad():
                made = self._encode_images(pixels)
            for i, codes in zip(missing, made.detach().cpu().to(torch.int64).numpy(), strict=True):
                found[i] = codes.copy()
                self._remember(records[i].picture, found[i])
        return [c if len(c) and 0 <= c.min() and c.max() < self._num_codes else None for c in found]

    def _remember(self, picture: str | None, codes: np.ndarray) -> None:
        size = codes.nbytes + 300  # of the key and what Python adds
        if picture is not None and self._room >= size:
            self._pictures[picture] = codes
            self._room -= size


_HEAD = struct.Struct("<II")  # bytes of the JSON that follows, codes a sample


class Contents(NamedTuple):
    """A block of a shard, looked through: how many records were read for it, whether the shard ended with it, the
    index where the next begins, what was left out and what was usable."""

    records: int
    ends: bool
    stop: int
    left_out: Counter[str]
    coded: list[Coded]


def pack(contents: Contents) -> bytes:
    """A block for the cache."""
    records, ends, stop, left_out, coded = contents
    about = [[c.at, c.index, c.key, c.caption] for c in coded]
    text = json.dumps([records, ends, stop, left_out, about]).encode()
    width = len(coded[0].codes) if coded else 0
    codes = np.stack([c.codes for c in coded]).astype("<u4").tobytes() if coded else b""
    return _HEAD.pack(len(text), width) + text + codes


def unpack(data: bytes) -> Contents:
    """The inverse of pack. Raises ValueError for anything else."""
    try:
        length, width = _HEAD.unpack_from(data)
        records, ends, stop, left_out, about = json.loads(data[_HEAD.size : _HEAD.size + length])
        codes = np.frombuffer(data, "<u4", offset=_HEAD.size + length).reshape(len(about), width).astype(np.int64)
        rows = zip(about, codes, strict=True)
        coded = [Coded(int(at), int(i), str(key), str(text), c) for (at, i, key, text), c in rows]
        return Contents(int(records), bool(ends), int(stop), Counter(left_out), coded)
    except (struct.error, TypeError) as error:
        raise ValueError(f"not a block of samples: {error}") from None
