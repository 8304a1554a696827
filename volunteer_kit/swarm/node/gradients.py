"""Keep track of the slot of the mapped file that holds each contribution.

The training process fills slots that it was granted. A delivered slot becomes a contribution's, or is added to one:
into a third slot, so that after a kill the contribution is one sum or the other, as the table in the store says.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.talk import Delivered, Expired, Granted
from volunteer_kit.swarm.sync.contributions import Cause, Contribution, Ledger
from volunteer_kit.swarm.sync.core import SyncCore

GRANTED: Final = 2  # slots that the training process may hold: one that it fills, one that it has delivered
NO_LONGER: Final = "no longer of use"


class Gradients:
    """The slots of one node.

    :param table: contribution -> slot, as the store has it
    :param tell: hands a message to the training process
    :param largest: samples of a contribution to which nothing is added any more
    :param expired: sample-cells by cause, of earlier lives
    :param keeps_ways: a way that is settled stays in its slot until the training process has taken it off its model
    :ivar life: of the model that deliveries come from, see `Delivered`
    :param names: of the samples of contributions, of earlier lives
    """

    def __init__(
        self,
        slots: Slots,
        table: dict[int, int],
        tell: Callable[[Any], None],
        cells: int,
        largest: int,
        expired: Mapping[Cause, int],
        keeps_ways: bool = False,
        names: Mapping[int, tuple[str, ...]] | None = None,
    ):
        self._slots, self.table, self._tell = slots, table, tell
        self._cells, self._largest = cells, largest
        self._samples: dict[int, int] = {}  # of each contribution, also of those that were just settled
        self._names = dict(names or {})  # of its samples, as the training process calls them
        self._microbatches: dict[int, int] = {}
        self._granted: set[int] = set()
        self._borrowed: dict[int, int] = {}  # slot -> exchanges that read it
        self._coming: set[int] = set()  # slots of the delivery in hand
        self._expired = dict(expired)  # sample-cells that were told
        self._one_by_one = asyncio.Lock()
        self._delivery: tuple[Delivered, int | None, dict[int, int]] | None = None
        self._keeps_ways, self.life = keeps_ways, 0
        self._ahead: dict[int, int] = {}  # contribution -> cells in which the model of this life is ahead by its way
        self._ended: list[tuple[int, int]] = []  # (slot, cells) that expired, with the slots borrowed
        self._reading: deque[tuple[bytes, tuple[int, ...]]] = deque()  # slots that are read until this lineage is there

    # --- slots ---

    def _take(self) -> int:
        """A slot that nothing uses."""
        used = {*self.table.values(), *self._granted, *self._borrowed, *self._coming}
        slot = next(each for each in range(len(used) + 1) if each not in used)
        self._slots.ensure(slot + 1)
        return slot

    def grant(self) -> None:
        """Give the training process slots to fill."""
        while len(self._granted) < GRANTED:
            slot = self._take()
            self._slots.zero(slot)
            self._granted.add(slot)
            self._tell(Granted(slot))

    def borrow(self, numbers: Iterable[int]) -> dict[int, int]:
        """Contribution -> slot; nothing else comes into these slots before `give_back`, whatever becomes of the
        contributions meanwhile."""
        slots = {number: self.table[number] for number in numbers}
        for slot in slots.values():
            self._hold(slot)
        return slots

    def give_back(self, slots: Mapping[int, int]) -> None:
        """These are not read any more."""
        for slot in slots.values():
            self._release(slot)

    def _hold(self, slot: int) -> None:
        self._borrowed[slot] = self._borrowed.get(slot, 0) + 1

    def _release(self, slot: int) -> None:
        self._borrowed[slot] -= 1
        if not self._borrowed[slot]:
            del self._borrowed[slot]

    def named(self, number: int) -> tuple[tuple[str, ...], int]:
        """Names of a contribution's samples, and microbatches that they came in, as far as they are known."""
        return self._names.get(number, ()), self._microbatches.get(number, 1)

    @property
    def names(self) -> dict[int, tuple[str, ...]]:
        """The names of the samples of all contributions, by the contribution's number."""
        return {number: self._names[number] for number in self.table if number in self._names}

    # --- deliveries ---

    async def take_delivery(self, delivery: Delivered, core: SyncCore, count: Callable[[Delivered], None]) -> None:
        """Take what the training process computed.

        :param count: hands the core its event; the core's first write calls `place`
        """
        async with self._one_by_one:
            self._granted.discard(delivery.slot)
            self._coming.add(delivery.slot)
            try:
                total = None if self.is_apart(delivery) else await self._add(delivery, core)
                before = {each.number: each.samples for each in core.ledger.live}
                self._delivery = (delivery, total, before)
                if core.log is not None:
                    count(delivery)
                self._follow_life(delivery)
                self.place(core.ledger)  # if nothing was written: this peer has left
            finally:
                self._delivery = None
                self._coming.clear()
                self.grant()

    def is_apart(self, delivery: Delivered) -> bool:
        """Return whether this delivery is added to no contribution, since its model was begun anew."""
        return delivery.life != self.life

    def _follow_life(self, delivery: Delivered) -> None:
        if self.is_apart(delivery):
            self.life = delivery.life
            self._ahead.clear()
            for slot, _ in self._ended:
                self._release(slot)
            self._ended.clear()

    async def _add(self, delivery: Delivered, core: SyncCore) -> int | None:
        """The slot with the sum of a delivery and the contribution that it is added to; None: it is a new one."""
        target = self._open_contribution(core, delivery.lineage)
        if target is None:
            return None
        total = self._take()
        self._coming.add(total)
        parts = self._slots.view(self.table[target.number]), self._slots.view(delivery.slot)
        out = self._slots.view(total)
        await asyncio.get_running_loop().run_in_executor(None, lambda: torch.add(*parts, out=out))
        if self._open_contribution(core, delivery.lineage) != target:  # a round has begun with it meanwhile
            return None
        return total

    def _open_contribution(self, core: SyncCore, lineage: bytes) -> Contribution | None:
        """The contribution that a microbatch of this lineage is added to; the ledger decides by the same rule."""
        if core.log is None or lineage not in core.log:
            return None
        birth = core.log.item(lineage).head.epoch
        for each in core.ledger.live:
            if each.birth == birth and not each.sealed and each.samples < self._largest:
                return each
        return None

    def place(self, ledger: Ledger) -> None:
        """The core has counted the delivery in hand: from now on its slot is a contribution's, or nobody's."""
        if self._delivery is None:
            return
        (delivery, total, before), self._delivery = self._delivery, None
        self._follow_life(delivery)
        for each in ledger.live:
            if each.samples != before.get(each.number):
                if self._keeps_ways:
                    self._ahead[each.number] = (1 << self._cells) - 1
                self.table[each.number] = delivery.slot if total is None else total
                self._names[each.number] = (*self._names.get(each.number, ()), *delivery.names)
                self._microbatches[each.number] = self._microbatches.get(each.number, 0) + delivery.microbatches
                return
        if self._keeps_ways:
            self._end(delivery.slot, (1 << self._cells) - 1)
        self._tell(Expired(0.0, NO_LONGER, delivery.names))  # the ledger tells the samples

    # --- what became of them ---

    def note(self, ledger: Ledger) -> None:
        """Forget contributions that are settled or expired, and tell what expired."""
        live = {each.number: each.samples for each in ledger.live}
        self._samples.update(live)
        for number in [number for number in self.table if number not in live]:
            self._microbatches.pop(number, None)
            slot = self.table.pop(number)
            if cells := self._ahead.pop(number, 0):  # it expired
                self._end(slot, cells)
            if names := self._names.pop(number, ()):  # some of its cells were not settled
                self._tell(Expired(0.0, NO_LONGER, names))
        for cause, cells in ledger.expired.items():
            more = cells - self._expired.get(cause, 0)
            if more > 0:
                self._tell(Expired(more / self._cells, cause.value))
            self._expired[cause] = cells
        if len(self._samples) > 2 * len(live) + 64:
            self._samples = live

    def settled(self, own: Iterable[tuple[int, int]], ledger: Ledger) -> tuple[float, tuple[str, ...]]:
        """Samples of ours that an entry settled, and the names of those that are applied whole by now.

        :param own: (contribution, cells)
        """
        live = {each.number for each in ledger.live}
        samples = 0
        names: list[str] = []
        for number, cells in own:
            samples += self._samples.get(number, 0) * cells.bit_count()
            if number not in live:
                names += self._names.pop(number, ())
        return samples / self._cells, tuple(names)

    # --- ways of local steps ---

    def _end(self, slot: int, cells: int) -> None:
        self._hold(slot)
        self._ended.append((slot, cells))

    def done(self, own: Iterable[tuple[int, int]], lineage: bytes) -> tuple[tuple[int, int], ...]:
        """Ways as (slot, cells), by which the training process's model is ahead no longer: they are in the step that
        leads to `lineage`, or expired. Their slots are held until that lineage is `reached`.

        :param own: (contribution, cells) that the step settled
        """
        found, self._ended = self._ended, []
        for number, cells in own:
            if settled := self._ahead.get(number, 0) & cells:
                self._ahead[number] &= ~settled
                self._hold(self.table[number])
                found.append((self.table[number], settled))
        if found or self._reading:
            self._reading.append((lineage, tuple(slot for slot, _ in found)))
        return tuple(found)

    def reached(self, lineage: bytes) -> None:
        """The training process is at this lineage: it has read what steps up to it named, or needs it no more."""
        if any(lineage == each for each, _ in self._reading):
            last = b""
            while last != lineage:
                last, slots = self._reading.popleft()
                for slot in slots:
                    self._release(slot)
