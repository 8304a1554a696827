"""Contributions: account for the gradients of a peer from its accumulator to an entry of the log.

The parameter vector is cut once and for all into cells. A contribution is one gradient sum of one peer. Each of its
cells is *pending*, then *in flight* in a round, then *committed* by an entry, or it *expires* with a cause. A set of
cells is an int, one bit per cell. Samples are counted per cell, so that a sum is exact when a round loses some slices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Final, NamedTuple

EXPIRED_KEPT: Final = 32  # contributions that expired last
ACCOUNT_SWEEP: Final = 16  # epochs between two sweeps through the accounts of peers that bring nothing any more


class Share(NamedTuple):
    """Cells of the contribution `number` of `peer`, as they travel in a round or entered a slice."""

    peer: str
    number: int
    birth: int  # epoch of the parameters that its gradients were computed on
    samples: int
    cells: int  # a bit per cell


class Slice(NamedTuple):
    """Bytes, by their hash, that are to be the average of these cells. Other cells may have as many values."""

    digest: bytes
    cells: int  # a bit per cell


class Answer(NamedTuple):
    """The average of one slice: the same bytes for every member, known by their hash.

    A member's part is one tensor, the sum of its shares: all of its shares entered, or none.
    """

    cells: int  # a bit per cell
    reducer: str
    digest: bytes  # of the answer's bytes
    shares: tuple[Share, ...]  # sorted

    @property
    def slice(self) -> Slice:
        """Which bytes stand for which cells."""
        return Slice(self.digest, self.cells)


class Cause(Enum):
    """Why a sample-cell expired."""

    STALE = "stale"  # older than `max_staleness`
    LOST_BRANCH = "lost branch"  # its branch lost against another
    ROLLBACK = "rollback"  # a rollback order undid its epoch
    UNKNOWN = "unknown"  # the peer was away so long that nobody can tell
    LEFT = "left"  # the peer left
    PROBATION = "probation"  # the others checked it before the peer's work counts


def discount(age: int) -> float:
    """The factor on the weight of a contribution that is `age` epochs old; `benchmarks/staleness.py` measures it."""
    return 1.0 / (1 + age)


class Contribution(NamedTuple):
    """One gradient sum of this peer that is not settled yet."""

    number: int
    birth: int
    samples: int
    pending: int  # cells that wait for a round
    in_flight: int  # cells that travel in the round of this slot
    sealed: bool  # nothing is added to it any more: it has travelled once, or what comes is of another kind


class Settled(NamedTuple):
    """Cells of a contribution of this peer that an entry committed."""

    number: int
    samples: int
    cells: int

    @property
    def sample_cells(self) -> int:
        """Samples of each cell, summed over the cells."""
        return self.samples * self.cells.bit_count()


class LedgerRecord(NamedTuple):
    """What a ledger writes: its contributions and its totals in sample-cells, in one piece."""

    live: tuple[Contribution, ...]
    next_number: int
    computed: int
    committed: int
    expired: tuple[tuple[Cause, int], ...]
    lately: tuple[tuple[Cause, Settled], ...]  # what expired last: another branch may hold it
    counted: tuple[tuple[bytes, tuple[Settled, ...]], ...]  # lineage of an entry -> what it settled of ours
    slot: bytes  # in which it sent something last
    rounds: tuple[bytes, ...]  # fingerprints of that slot's rounds: it never sends in one again


class Ledger:
    """This peer's contributions, and what became of every sample-cell that it ever computed (invariant I4).

    :param largest: samples of a contribution to which nothing is added any more, so that a limit never excludes it
    """

    def __init__(self, cells: int, record: LedgerRecord | None = None, largest: float = float("inf")):
        self.cells = cells
        self._largest = largest
        self._all = (1 << cells) - 1
        self._live: dict[int, Contribution] = {}
        self._next = 0
        self.computed = self.committed = 0
        self.expired: dict[Cause, int] = {}
        self._lately: list[tuple[Cause, Settled]] = []
        self._counted: dict[bytes, tuple[Settled, ...]] = {}
        self._slot = b""
        self._rounds: tuple[bytes, ...] = ()
        if record is not None:
            self._next, self.computed, self.committed = record.next_number, record.computed, record.committed
            self.expired, self._counted = dict(record.expired), dict(record.counted)
            self._lately = list(record.lately)
            self._slot, self._rounds = record.slot, record.rounds
            self._live = {  # the round that was in flight is over for a process that starts anew
                each.number: each._replace(pending=each.pending | each.in_flight, in_flight=0, sealed=True)
                for each in record.live
            }

    def record(self) -> LedgerRecord:
        """Everything, to be written in one piece."""
        return LedgerRecord(
            tuple(self._live.values()),
            self._next,
            self.computed,
            self.committed,
            tuple(self.expired.items()),
            tuple(self._lately),
            tuple(self._counted.items()),
            self._slot,
            self._rounds,
        )

    @property
    def live(self) -> tuple[Contribution, ...]:
        """Contributions with cells that are pending or in flight."""
        return tuple(self._live.values())

    @property
    def pending_samples(self) -> int:
        """Samples that a round could take now, late ones in full."""
        return sum(each.samples * each.pending.bit_count() for each in self._live.values()) // self.cells

    def add(self, samples: int, birth: int, expired: Cause | None = None) -> None:
        """Add a microbatch whose gradients were computed on the parameters of epoch `birth`.

        :param expired: why they are of no use; None: they are
        """
        self.computed += samples * self.cells
        if expired is not None:
            self._expire(expired, Settled(-1, samples, self._all))
            return
        for each in self._live.values():
            if each.birth == birth and not each.sealed and each.samples < self._largest:
                self._live[each.number] = each._replace(samples=each.samples + samples)
                return
        self._live[self._next] = Contribution(self._next, birth, samples, self._all, 0, False)
        self._next += 1

    def seal(self) -> None:
        """Add to none of these contributions any more."""
        self._live = {number: each._replace(sealed=True) for number, each in self._live.items()}

    def rounds(self, slot: bytes) -> tuple[bytes, ...]:
        """Fingerprints of the rounds of this slot in which something was sent."""
        return self._rounds if slot == self._slot else ()

    def send(self, peer: str, slot: bytes, fingerprint: bytes, limit: float = float("inf")) -> tuple[Share, ...]:
        """Put pending cells in flight, the oldest contributions first; return them as shares.

        :param limit: samples that are believed; what is above it stays pending
        """
        self._slot, self._rounds = slot, (*self.rounds(slot), fingerprint)
        sent = []
        for each in sorted(self._live.values(), key=lambda each: (each.birth, each.number)):
            if each.pending and each.samples <= limit:
                limit -= each.samples
                self._live[each.number] = each._replace(pending=0, in_flight=each.in_flight | each.pending, sealed=True)
                sent.append(Share(peer, each.number, each.birth, each.samples, each.pending))
        return tuple(sent)

    def return_all(self) -> None:
        """Cells in flight are pending again: their round is over, as far as this peer knows."""
        for each in list(self._live.values()):
            if each.in_flight:
                self._live[each.number] = each._replace(pending=each.pending | each.in_flight, in_flight=0)

    def commit(self, lineage: bytes, peer: str, answers: Iterable[Answer]) -> tuple[Settled, ...]:
        """The entry with this lineage is on our branch; return what it settled of ours, and of what had expired on a
        branch that this peer has left."""
        if lineage in self._counted:
            return ()
        cells = cells_of(peer, answers)
        settled = self._unexpire(cells)
        for number, entered in sorted(cells.items()):
            each = self._live.get(number)
            if each is None or not (mask := entered & (each.pending | each.in_flight)):
                continue
            self._live[number] = each._replace(
                pending=each.pending & ~mask, in_flight=each.in_flight & ~mask, sealed=True
            )
            settled.append(Settled(number, each.samples, mask))
        self._count(lineage, settled)
        self._drop_settled()
        return tuple(settled)

    def switch(
        self, lost: Iterable[bytes], gained: Iterable[tuple[bytes, Iterable[Answer]]], peer: str, cause: Cause
    ) -> None:
        """Our branch changes: what the lost entries committed expires, unless the gained ones hold it too.

        What expired on the lost branch may be committed on the other one as well.
        """
        for lineage in lost:
            for each in self._counted.pop(lineage, ()):
                self.committed -= each.sample_cells
                self._lately.append((cause, each))
                self.expired[cause] = self.expired.get(cause, 0) + each.sample_cells
        for lineage, answers in gained:
            self.commit(lineage, peer, answers)
        del self._lately[:-EXPIRED_KEPT]

    def _unexpire(self, entered: Mapping[int, int]) -> list[Settled]:
        """Take back what expired lately, where these cells of contributions hold it."""
        found = []
        for place, (why, each) in enumerate(self._lately):
            again = each._replace(cells=each.cells & entered.get(each.number, 0))
            if again.cells:
                self.expired[why] -= again.sample_cells
                self._lately[place] = (why, each._replace(cells=each.cells & ~again.cells))
                found.append(again)
        self._lately = [(why, each) for why, each in self._lately if each.cells]
        return found

    def _count(self, lineage: bytes, settled: Sequence[Settled]) -> None:
        self.committed += sum(each.sample_cells for each in settled)
        if settled:
            self._counted[lineage] = tuple(settled)

    def forget_entries(self, kept: set[bytes]) -> None:
        """Entries that left the log can no longer be lost."""
        if len(self._counted) > len(kept):
            self._counted = {lineage: settled for lineage, settled in self._counted.items() if lineage in kept}

    def expire_born(self, before: int | None, after: int | None, cause: Cause) -> None:
        """Expire what was born before epoch `before`, or after epoch `after`; None: no bound on that side."""
        for each in list(self._live.values()):
            if (before is not None and each.birth < before) or (after is not None and each.birth > after):
                self._expire(cause, Settled(each.number, each.samples, each.pending | each.in_flight))
                del self._live[each.number]

    def expire(self, numbers: Iterable[int], cause: Cause) -> None:
        """Expire what is left of these contributions."""
        for number in numbers:
            each = self._live.pop(number, None)
            if each is not None:
                self._expire(cause, Settled(number, each.samples, each.pending | each.in_flight))

    def _expire(self, cause: Cause, what: Settled) -> None:
        if what.cells:
            self.expired[cause] = self.expired.get(cause, 0) + what.sample_cells
            if what.number >= 0:
                self._lately = [*self._lately[1 - EXPIRED_KEPT :], (cause, what)]

    def _drop_settled(self) -> None:
        for each in list(self._live.values()):
            if not each.pending | each.in_flight:
                del self._live[each.number]


def cells_of(peer: str, answers: Iterable[Answer]) -> dict[int, int]:
    """Cells of each contribution of a peer that entered."""
    masks: dict[int, int] = {}
    for answer in answers:
        for share in answer.shares:
            if share.peer == peer:
                masks[share.number] = masks.get(share.number, 0) | share.cells
    return masks


class AccountsRecord(NamedTuple):
    """What accounts consist of, in order."""

    settled: tuple[tuple[str, tuple[tuple[int, int, int], ...]], ...]  # peer, its (number, cells, birth)
    floors: tuple[tuple[str, int], ...]  # peer, the first number that is not settled for ever


class Accounts:
    """For each peer, which cells of which contributions are committed: a function of the log alone (invariant I3).

    Immutable. A number below a peer's floor is settled for ever, so the memory is bounded by `max_staleness`.
    """

    def __init__(
        self,
        settled: Mapping[str, Mapping[int, tuple[int, int]]] | None = None,
        floors: Mapping[str, int] | None = None,
    ):
        self._settled = settled or {}  # peer -> number -> (cells, birth)
        self._floors = floors or {}  # peer -> the first number that is not settled for ever

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Accounts):
            return NotImplemented
        return self._settled == other._settled and self._floors == other._floors

    __hash__ = None  # type: ignore[assignment]

    def as_record(self) -> AccountsRecord:
        """Everything; equal accounts have equal records."""
        settled = tuple(
            (peer, tuple((number, cells, birth) for number, (cells, birth) in sorted(numbers.items())))
            for peer, numbers in sorted(self._settled.items())
        )
        return AccountsRecord(settled, tuple(sorted(self._floors.items())))

    @staticmethod
    def from_record(record: AccountsRecord) -> Accounts:
        """The accounts that have this record.

        :raises ValueError: if a peer or a number is in it twice
        """
        settled: dict[str, dict[int, tuple[int, int]]] = {}
        for peer, numbers in record.settled:
            settled[peer] = {number: (cells, birth) for number, cells, birth in numbers}
            if len(settled[peer]) < len(numbers):
                raise ValueError("a contribution is told twice")
        floors = dict(record.floors)
        if len(settled) < len(record.settled) or len(floors) < len(record.floors):
            raise ValueError("a peer is told twice")
        return Accounts(settled, floors)

    def committed(self, peer: str, number: int) -> int:
        """The cells of this contribution that are committed."""
        if number < self._floors.get(peer, 0):
            return -1  # all of them
        cells, _ = self._settled.get(peer, {}).get(number, (0, 0))
        return cells

    def after(self, answers: Iterable[Answer], epoch: int, max_staleness: int) -> Accounts:
        """The accounts behind an entry that leads to `epoch`."""
        settled, floors = dict(self._settled), dict(self._floors)
        touched: dict[str, dict[int, tuple[int, int]]] = {}
        for answer in answers:
            for share in answer.shares:
                if share.peer not in touched:
                    touched[share.peer] = dict(settled.get(share.peer, {}))
                cells, birth = touched[share.peer].get(share.number, (0, share.birth))
                touched[share.peer][share.number] = (cells | share.cells, birth)
        if epoch % ACCOUNT_SWEEP == 0:
            touched = {peer: dict(numbers) for peer, numbers in settled.items()} | touched
        for peer, numbers in touched.items():
            for number in [number for number, (_, birth) in numbers.items() if birth < epoch - max_staleness]:
                del numbers[number]
                floors[peer] = max(floors.get(peer, 0), number + 1)
            if numbers:
                settled[peer] = numbers
            else:
                settled.pop(peer, None)
        return Accounts(settled, floors)


def why_refused(
    answers: Sequence[Answer], accounts: Accounts, epoch: int, group: frozenset[str], max_staleness: int, cells: int
) -> str | None:
    """Why the shares of an entry do not add up; None: they do.

    :param epoch: of the parent, so the age of a share is `epoch - birth`
    """
    covered = 0
    known: dict[tuple[str, int], tuple[int, int]] = {}
    entered: dict[tuple[str, int], int] = {}
    for answer in answers:
        if answer.cells & covered or not 0 < answer.cells < 1 << cells:
            return "slices overlap"
        covered |= answer.cells
        if answer.reducer not in group:
            return "a reducer is not in the group"
        for share in answer.shares:
            key, told = (share.peer, share.number), (share.birth, share.samples)
            if known.setdefault(key, told) != told:
                return "one contribution is told in two ways"
            if not share.cells or share.cells & ~answer.cells or share.cells & entered.get(key, 0):
                return "a share is counted twice"
            entered[key] = entered.get(key, 0) | share.cells
            if share.peer not in group or share.samples < 1:
                return "a share has no member"
            if not 0 <= epoch - share.birth <= max_staleness:
                return "a share has an age that is not allowed"
            if accounts.committed(share.peer, share.number) & share.cells:
                return "a share is committed already"
    return None
