"""The samples of a run, endless: leased from the other readers, in an order that can be told in advance.

What is read is decided by leases (leases.py) of ranges of shards; the order inside a range is a pure function of
(seed, epoch, shard, range). So a few numbers are enough to go on where a stream stopped, another reader can go on
where this one died, and anybody can fetch a sample by its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .addresses import ANY_ADDRESS, AddressPolicy
from .ahead import ReadAhead
from .blocks import Cache
from .encoding import EncodeImages, Encoder, Sample
from .errors import DataError, NoSuchSample
from .leases import Lease, Leases, LocalLeases
from .settings import DataConfig
from .source import SampleName, ShardError, Source
from .sources import open_caches, open_source
from .tokenizer import Tokenizer
from .walk import Position, Walk, position_from_dict, position_to_dict


class Batch(NamedTuple):
    """Samples side by side; `names` tell which, `keys` tell people, `leases` how many were read by which lease, and
    `after` is where the stream goes on."""

    text: torch.Tensor  # int64 (B, T)
    codes: torch.Tensor  # int64 (B, N)
    keys: list[str]
    names: list[SampleName]
    leases: dict[Lease, int]
    after: Position | None


def open_stream(
    config: DataConfig,
    *,
    tokenizer: Tokenizer,
    encode_images: EncodeImages,
    image_size: int,
    text_seq_len: int,
    image_seq_len: int,
    num_codes: int,
    image_tokenizer: str,
    seed: int,
    peer_seed: int,
    addresses: AddressPolicy = ANY_ADDRESS,
) -> SampleStream:
    """The stream of a run's samples as one peer reads it. `image_size` is what `encode_images` takes,
    `image_tokenizer` the identity of who makes the codes, `image_seq_len` and `num_codes` how many of how many kinds
    a sample has, `addresses` which servers may be connected to. Raises DataError if no shard is named or a data set
    cannot be listed; what cannot be read shows with the first batch."""
    counts: Counter[str] = Counter()
    source = open_source(config, image_size, image_seq_len, num_codes, image_tokenizer, counts, addresses)
    encoder = Encoder(
        source,
        tokenizer,
        encode_images,
        text_seq_len=text_seq_len,
        num_codes=num_codes,
        memory=int(config.cache_mb * 1e6) if config.kind == "scenes" else 0,
    )
    caches = open_caches(config, source, image_tokenizer)
    return SampleStream(config, source, encoder, caches, seed=seed, peer_seed=peer_seed, counts=counts)


class SampleStream:
    """An endless stream of batches. `counts` says how many records were left out, by cause (causes.CAUSES); records
    from memory are not counted twice. `failures` has the shards of the last try that could not be read, and why."""

    def __init__(
        self,
        config: DataConfig,
        source: Source,
        encoder: Encoder,
        caches: Sequence[Cache] = (),
        *,
        seed: int,
        peer_seed: int,
        counts: Counter[str],
    ) -> None:
        self.counts = counts
        self.failures: dict[str, str] = {}
        self.source = source
        self._config, self._encoder, self._caches = config, encoder, caches
        self._seeds = (seed, peer_seed)
        self._leases: Leases = LocalLeases()
        self._at = Position(0, 0)
        self._reader: Iterator[tuple[Sample, Position]] | None = None
        self._ahead = 0  # samples made ready in the background

    # reading

    def next_batch(self, batch_size: int) -> Batch:
        """The next samples. Raises DataError when nothing can be read any more, and whatever the encoder raises;
        asked again, it tries again, and nothing is lost."""
        if batch_size < 1:
            raise ValueError(f"a batch has 1 sample or more, not {batch_size}")
        at, samples, leases = self._at, [], Counter[Lease]()
        try:
            while len(samples) < batch_size:
                self._reader = self._reader or self._read_on(at)
                sample, at = next(self._reader)
                samples.append(sample)
                leases[at.lease] += 1
        except BaseException:
            self._let_go()  # what was read of this batch is read again
            raise
        self._at = at
        return _batch(samples, leases, at)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        while True:
            yield self.next_batch(batch_size)

    def read_ahead(self, most: int | None = None) -> None:
        """From now on make samples ready in the background, `most` or as many as the settings say. Call it after
        other processes were forked."""
        self._ahead = min(most or self._config.prefetch, self._config.prefetch)
        self._let_go()

    def probe(self) -> None:
        """Read one sample and forget it: raises DataError now rather than when others wait for us."""
        walk = self._walk(LocalLeases(), Counter())
        with contextlib.closing(walk.samples(self._seeds, self._at)) as samples:
            next(samples)

    def fetch(self, names: Sequence[SampleName]) -> Batch:
        """Samples by their names, whoever read them first. Raises NoSuchSample for one that is not there or not
        usable, DataError for what cannot be read now."""
        samples, give_up_at = [], time.monotonic() + self._config.patience
        for name in names:
            try:
                shard = self.source.shards[name.shard]
                raw = next(self.source.read(shard, name.index, name.index + 1, give_up_at), None)
            except IndexError:
                raise NoSuchSample(f"There is no sample {name} in this data.") from None
            except ShardError as error:
                raise DataError(f"The sample {name} cannot be read: {error}.") from None
            coded, _ = self._encoder.code([raw], [0]) if raw is not None else ([], None)
            if not coded:
                raise NoSuchSample(f"There is no usable sample {name} in this data.")
            samples.append(self._encoder.sample(name.epoch, name.shard, coded[0]))
        return _batch(samples, {}, None)

    # leases

    def lease_from(self, leases: Leases) -> None:
        """Share the shards with others from now on."""
        self._leases = leases
        self._let_go()

    def applied(self, at: Position) -> None:
        """All samples before a position (a batch's `after`) are in steps that were taken."""
        if at.lease is not None:
            self._leases.applied(at.lease, at.range_, at.used)

    @property
    def epoch(self) -> int:
        """The stream epoch that is being read: how many times everybody together has been through the data."""
        return self._at.epoch

    # state

    def state_dict(self, at: Position | None = None) -> dict[str, Any]:
        """Where the stream is, after the last batch or at an earlier one's `after`; plain numbers."""
        where = position_to_dict(self._at if at is None else at)
        return {"version": 2, "order": self._order_digest(), "peer_seed": self._seeds[1], **where}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken: no sample is lost or repeated. With other shards, seed or range length than
        then, its position means nothing and the stream starts its next epoch. Raises ValueError for what is no
        state."""
        peer_seed = state.get("peer_seed")
        if state.get("version") != 2 or type(peer_seed) is not int:
            raise ValueError(f"not the state of a sample stream: {str(state)[:200]}")
        at = position_from_dict(state, 2**53)
        self._let_go()
        if state.get("order") != self._order_digest():
            self._at = Position(at.epoch + 1, 0)
            return
        self._at, self._seeds = position_from_dict(state, len(self.source.shards)), (self._seeds[0], peer_seed)

    def close(self) -> None:
        """Let go of threads, files and connections; the stream can still go on from where it is."""
        self._let_go()
        for cache in self._caches:
            cache.close()

    def _read_on(self, at: Position) -> Iterator[tuple[Sample, Position]]:
        samples = self._walk(self._leases, self.counts).samples(self._seeds, at)
        return ReadAhead(samples, self._ahead) if self._ahead else samples

    def _walk(self, leases: Leases, counts: Counter[str]) -> Walk:
        return Walk(self._config, self.source, self._encoder, leases, self._caches, counts, self.failures)

    def _let_go(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _order_digest(self) -> str:
        text = json.dumps([self.source.catalogue, self._seeds[0], self._config.range_length])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _batch(samples: list[Sample], leases: dict[Lease, int], after: Position | None) -> Batch:
    return Batch(
        torch.from_numpy(np.stack([sample.text for sample in samples])),
        torch.from_numpy(np.stack([sample.codes for sample in samples])),
        [sample.key for sample in samples],
        [sample.name for sample in samples],
        leases,
        after,
    )
