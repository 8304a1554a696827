"""The path of one sample: choose a shard -> lease -> read -> shuffle -> filter, encode, tokenize."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .blocks import Block, BlockReader, Cache, shuffled
from .causes import CAUSES, FILES
from .encoding import Coded, Encoder, Sample
from .errors import DataError
from .leases import Lease, Leases, Refusal
from .settings import DataConfig
from .shards import shown
from .source import ShardError, Source

logger = logging.getLogger(__name__)

MOST_REFUSED = 256  # shards in a row that others have, after which a reader begins its next epoch
WINDOW = 256  # shards that may be in work at a time; what is unfinished so far behind is given up in this epoch
VAIN_EPOCHS = 3  # epochs in which others claim everything, after which a reader no longer believes it
LEASE_SECONDS = 60.0  # s of work that a lease should be; a claim costs three calls to the DHT
FIRST_IMAGES = 4  # images encoded at once to begin with; doubles up to encode_batch, so that the first batch is early


class Position(NamedTuple):
    """Where a stream is: all before it is used. `place`: in the epoch's order of shards; before it, all is done."""

    epoch: int
    place: int
    lease: Lease | None = None
    range_: int = 0
    used: int = 0  # records of that range, in its order


class Trail:
    """The places of one epoch's order: `first` is the first that is not known to be done by everybody."""

    def __init__(self, length: int, first: int) -> None:
        self._length, self.first = length, min(first, length)
        self._done: set[int] = set()
        self._left: set[int] = set()  # not for us: they cannot be read

    def ahead(self) -> Iterator[int]:
        """The places worth a look, in order."""
        yield from (p for p in range(self.first, self._length) if p not in self._done and p not in self._left)

    def done(self, place: int) -> None:
        self._done.add(place)
        self.skip_to(self.first)

    def leave(self, place: int) -> None:
        self._left.add(place)

    def taken(self, place: int) -> None:
        self.skip_to(place - WINDOW)

    def skip_to(self, first: int) -> None:
        self.first = max(self.first, min(first, self._length))
        while self.first in self._done:
            self._done.remove(self.first)
            self.first += 1


class Walk:
    """Reads one peer's part of the shards, epoch after epoch.

    :param seeds: of the run and of the peer: the first orders what is in a range, both the shards
    :param failures: shards of the last try that could not be read, and why
    """

    def __init__(
        self,
        config: DataConfig,
        source: Source,
        encoder: Encoder,
        leases: Leases,
        caches: Sequence[Cache],
        counts: Counter[str],
        failures: dict[str, str],
    ) -> None:
        self._config, self._source, self._encoder, self._leases = config, source, encoder, leases
        self._caches, self._counts, self._failures = caches, counts, failures
        self._deadline = time.monotonic() + config.patience
        self._want, self._images = 1, FIRST_IMAGES
        self._useless: set[str] = set()  # shards whose records were of no use, and which were told
        self._has_read, self._begun, self._vain = False, False, 0  # _begun: something of this range was given out

    def samples(self, seeds: tuple[int, int], at: Position) -> Iterator[tuple[Sample, Position]]:
        """The samples after a position, each with the position after it; endless. Raises DataError when nothing can
        be read."""
        self._seeds, epoch, place = seeds, at.epoch, at.place
        if at.lease is not None:
            lease = self._leases.resume(at.lease, at.range_, at.used)
            if lease is not None:
                yield from self._resumed(lease, place)
            place += not self._leases.shared
        while True:
            epoch, place = yield from self._epoch(epoch, place)

    def _resumed(self, lease: Lease, place: int) -> Iterator[tuple[Sample, Position]]:
        """The rest of a lease, if its shard can be opened and is still as long as it was."""
        cuts = self._cuts(lease.shard)
        if cuts is False or (cuts is not None and (lease.last is None or lease.last >= len(cuts))):
            self._leases.ended(lease, lease.first)
        else:
            yield from self._read(lease, cuts, place)

    # an epoch: shards in their order, as far as others leave them

    def _epoch(self, epoch: int, first: int) -> Iterator[tuple[Sample, Position]]:
        """One epoch from the place `first` on, before which all is done; its value: the epoch and place to go on."""
        seeds = self._seeds[:1] if self._leases.shared else self._seeds
        order = shuffled(len(self._source.shards), "shards", *seeds, epoch)
        trail, got, theirs = Trail(len(order), first), first > 0, False
        while True:
            there, others = self._leases.where(epoch, trail.first)
            if there > epoch:
                return there, others
            if there == epoch and others > trail.first:
                trail.skip_to(others)
                theirs = True
            lease, cuts, place, refused = self._find(epoch, order, trail)
            theirs |= refused
            if lease is None:
                break
            for sample, position in self._read(lease, cuts, trail.first):
                got = True
                yield sample, position
            if self._source.shards[lease.shard] in self._failures or not lease.owned:
                trail.leave(place)
            if not self._leases.shared:
                trail.done(place)
            self._check_patience()
        self._end_epoch(got, theirs)
        return epoch + 1, 0

    def _find(
        self, epoch: int, order: np.ndarray, trail: Trail
    ) -> tuple[Lease | None, Sequence[int] | None, int, bool]:
        """The first shard from the trail on that there is a lease of, its cuts and its place; and whether others had
        what came before."""
        refused = 0
        for place in trail.ahead():
            shard = int(order[place])
            if (cuts := self._cuts(shard)) is False:
                trail.leave(place)
                continue
            found = self._claim(epoch, shard, None if cuts is None else len(cuts) - 1)
            if isinstance(found, Lease):
                trail.taken(place)
                return found, cuts, place, refused > 0
            if found == "done":
                trail.done(place)
            if (refused := refused + 1) > MOST_REFUSED:
                break
        return None, None, 0, refused > 0

    def _end_epoch(self, got: bool, theirs: bool) -> None:
        """After an epoch in which nothing was got: others have it all, the servers are away, or nothing is there."""
        if got:
            self._vain = 0
        elif theirs:
            self._vain += 1
        elif self._has_read:
            time.sleep(min(1.0, self._config.patience))  # it worked before: an outage, perhaps a short one
        else:
            shards = len(self._source.shards)
            raise self._nothing(f"Not one usable sample in {shards} shard{'s' * (shards != 1)}")

    def _claim(self, epoch: int, shard: int, ranges: int | None) -> Lease | Refusal:
        if self._vain < VAIN_EPOCHS:
            return self._leases.claim(epoch, shard, ranges, self._want)
        self._vain = 0
        self._counts["unleased"] += 1
        return Lease(epoch, shard, 0, ranges, owned=False)

    def _cuts(self, shard: int) -> Sequence[int] | None | bool:
        """The bounds of a shard's ranges, None if only its end tells, False if it cannot be opened."""
        try:
            return self._source.ranges(self._source.shards[shard], self._deadline)
        except ShardError as error:
            self._fail(shard, error)
            return False

    def _fail(self, shard: int, error: ShardError) -> None:
        self._counts[error.cause] += 1
        self._failures[self._source.shards[shard]] = str(error)
        self._check_patience()

    def _check_patience(self) -> None:
        if time.monotonic() > self._deadline:
            raise self._nothing(f"Nothing could be read for {self._config.patience:g} s")

    # a lease: ranges one after the other, each in the order that its name decides

    def _read(self, lease: Lease, cuts: Sequence[int] | None, place: int) -> Iterator[tuple[Sample, Position]]:
        shard = self._source.shards[lease.shard]
        self._failures.pop(shard, None)
        last = None if cuts is None or lease.last is None else cuts[min(lease.last, len(cuts) - 1)]
        reader = BlockReader(self._source, shard, last, lambda: self._deadline, self._caches)
        range_, used, ended, lost = lease.first, lease.used, False, False
        self._begun = False
        gave, before = False, self._counts.copy()
        try:
            while not ended and reader.failure is None and (lease.last is None or range_ < lease.last):
                if lost := not self._leases.holds(lease):
                    break
                started = time.monotonic()
                ended = yield from self._range(reader, lease, range_, cuts, used, place)
                gave |= self._begun
                if reader.failure is None:
                    range_, used, self._begun = range_ + 1, 0, False
                    self._want = max(1, min(64, int(LEASE_SECONDS / max(time.monotonic() - started, 1e-3))))
        finally:
            reader.close()
        if lost or reader.failure is not None:  # what is left of a range that was begun nobody shuffles as we did
            self._leases.ended(lease, range_ + self._begun)
        else:
            self._leases.ended(lease, None)
        if reader.failure is not None:
            self._fail(lease.shard, reader.failure)
        elif not (gave or lost or used):
            self._warn_of_nothing(shard, self._counts - before)

    def _warn_of_nothing(self, shard: str, counts: Counter[str]) -> None:
        """A lease gave no sample: told once a shard, with the causes."""
        causes = [(cause, number) for cause, number in counts.most_common() if cause not in FILES]
        if causes and shard not in self._useless:
            self._useless.add(shard)
            told = "; ".join(f"{CAUSES.get(cause, cause)}: {number}" for cause, number in causes[:5])
            total = sum(number for _, number in causes)
            logger.warning("Not one of the %d records read of the shard %s can be used. %s", total, shown(shard), told)

    def _range(
        self, reader: BlockReader, lease: Lease, range_: int, cuts: Sequence[int] | None, used: int, place: int
    ) -> Iterator[tuple[Sample, Position]]:
        """One range's samples from the `used`-th record of its order on; its value: whether the shard ended."""
        length = self._config.range_length
        start, stop = (range_ * length, (range_ + 1) * length) if cuts is None else cuts[range_ : range_ + 2]
        passed, ends = 0, False
        for number, block in enumerate(reader.blocks(start, stop)):
            skip, ends = min(max(used - passed, 0), block.records), block.ends
            order = shuffled(block.records, "block", self._seeds[0], lease.epoch, lease.shard, range_, number)
            if skip < block.records:
                for at, coded in self._coded(reader, block, order, skip):
                    sample = self._encoder.sample(lease.epoch, lease.shard, coded)
                    self._has_read, self._begun, self._vain = True, True, 0
                    yield sample, Position(lease.epoch, place, lease, range_, passed + at + 1)
                    self._deadline = time.monotonic() + self._config.patience
            passed += block.records
        return ends

    def _coded(
        self, reader: BlockReader, block: Block, order: np.ndarray, skip: int
    ) -> Iterator[tuple[int, Coded]]:
        """The usable records of a block in `order`, each with its place there."""
        if block.coded is not None:
            self._counts.update(block.left_out)
            found = {coded.at: coded for coded in block.coded}
            yield from ((at, found[i]) for at, i in enumerate(order.tolist()) if at >= skip and i in found)
            return
        whole, left_out, at = list[Coded](), Counter[str](), skip
        while at < len(order):
            chosen = order[at : at + self._images].tolist()
            self._images = min(2 * self._images, self._config.encode_batch)
            coded, faulty = self._encoder.code([block.raws[i] for i in chosen], chosen)
            self._counts.update(faulty)
            left_out.update(faulty)
            place = {i: at + n for n, i in enumerate(chosen)}
            whole += coded
            at += len(chosen)
            if at == len(order) and skip == 0 and reader.failure is None:
                reader.keep(block, whole, left_out)
            yield from ((place[one.at], one) for one in coded)

    def _nothing(self, what: str) -> DataError:
        lines = [f"{what}."]
        lines += [f"  {shown(shard)}: {why}" for shard, why in list(self._failures.items())[:3]]
        left_out = [(cause, n) for cause, n in self._counts.most_common() if not cause.endswith("_shard")]
        lines += [f"  records left out, {CAUSES.get(cause, cause)}: {n}" for cause, n in left_out[:5]]
        return DataError("\n".join([*lines, *_ADVICE[self._config.kind]]))


_FILTERED = "3. If records are left out by a filter, look at nsfw_allowed, min_caption and the like in the run file."
_ADVICE: dict[str, tuple[str, ...]] = {
    "scenes": (),
    "shards": (
        "1. Look whether these are webdataset shards as img2dataset writes them: tar -tf SHARD | head",
        "2. For http(s) addresses: curl -I ADDRESS",
        _FILTERED,
    ),
    "codes": (
        "1. Look whether each shard has its NAME.index.json beside it, as volunteer-kit encode writes them.",
        "2. For http(s) addresses: curl -I ADDRESS",
        _FILTERED,
    ),
    "hub": (
        "1. Look at the data set's page on the Hub: is it there, and what are its columns called?",
        "2. If it asks for a login: hf auth login",
        _FILTERED,
    ),
}


def position_to_dict(at: Position) -> dict[str, Any]:
    """A position in plain numbers, for a file."""
    lease = at.lease and [at.lease.shard, at.lease.first, at.lease.last, at.lease.owned]
    return {"epoch": at.epoch, "place": at.place, "lease": lease, "range": at.range_, "used": at.used}


def position_from_dict(state: dict[str, Any], shards: int) -> Position:
    """The inverse of position_to_dict. Raises ValueError for what is no position among so many shards."""
    numbers, lease = [state.get(key) for key in ("epoch", "place", "range", "used")], state.get("lease")
    if not all(_is_count(number) for number in numbers):
        raise ValueError(f"not the state of a sample stream: {str(state)[:200]}")
    epoch, place, range_, used = numbers
    if lease is None:
        return Position(epoch, place)
    try:
        shard, first, last, owned = lease
        if not (_is_count(shard) and shard < shards and _is_count(first) and (last is None or _is_count(last))):
            raise TypeError
        return Position(epoch, place, Lease(epoch, shard, first, last, owned=bool(owned)), range_, used)
    except (TypeError, ValueError):
        raise ValueError(f"not the state of a sample stream: {str(state)[:200]}") from None


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53
