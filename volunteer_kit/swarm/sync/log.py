"""The log: the entries of a peer, each with its proof, its head and its membership."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

from volunteer_kit.swarm.sync.certificates import Certificate, Membership
from volunteer_kit.swarm.sync.entries import Entry, Head, Member, Opening, RollbackOrder


@dataclass(frozen=True)
class LogItem:
    """One step of the log with what proves it, and where it leads."""

    step: Entry | Opening | RollbackOrder | None  # None: the genesis
    certificate: Certificate | None  # of an entry
    signers: frozenset[str]  # of an opening
    head: Head
    membership: Membership

    @staticmethod
    def genesis(members: Iterable[Member], epoch: int = 0, state: bytes = b"") -> LogItem:
        """Where a run begins.

        :param epoch: of the state that the founders bring along
        :param state: hash of that state; none: the initial parameters, which every peer of the run can make
        """
        group = tuple(sorted(members))
        content = ["genesis", group] + ([epoch, state.hex()] if epoch or state else [])
        lineage = hashlib.sha256(json.dumps(content).encode()).digest()
        return LogItem(None, None, frozenset(), Head(0, 0, epoch, lineage, 0), Membership.genesis(group))

    def after_entry(self, entry: Entry, certificate: Certificate) -> LogItem:
        """The next item behind this one."""
        head = self.head
        total = head.sample_cells + entry.sample_cells
        return LogItem(
            entry,
            certificate,
            frozenset(),
            Head(head.generation, head.sequence, head.epoch + 1, entry.lineage, total),
            self.membership.after(entry),
        )

    def after_opening(self, opening: Opening, signers: frozenset[str]) -> LogItem:
        """The next item behind this one: the epoch stays, the lineage changes."""
        head = self.head._replace(lineage=opening.lineage)
        return LogItem(opening, None, signers, head, self.membership.opened(opening))

    def after_order(self, order: RollbackOrder) -> LogItem:
        """Where a rollback order leads: whatever came before, everybody has the same membership behind it."""
        head = Head(order.generation, order.sequence, order.epoch, order.lineage, 0)
        membership = replace(Membership.genesis(order.members), banned=frozenset(order.banned))
        return LogItem(order, None, frozenset(), head, membership)

    def leads_to(self, item: LogItem) -> bool:
        """Whether `item` is a proven step behind this one (invariant I2)."""
        step = item.step
        if step is None or step.parent != self.head.lineage:
            return False
        if (step.generation, step.sequence, step.epoch) != (*self.head.order, self.head.epoch):
            return False
        if isinstance(step, Entry):
            certificate = item.certificate
            return (
                certificate is not None
                and self.membership.certifies(certificate, step)
                and self.after_entry(step, certificate) == item
            )
        if isinstance(step, Opening):
            return self.may_open(step, item.signers) and self.after_opening(step, item.signers) == item
        return False

    def may_open(self, opening: Opening, signers: frozenset[str]) -> bool:
        """Whether the opening is whole: every member signed, one of them can be called, and all are of the view, or
        nobody is."""
        view = self.membership.view
        known = sum(view.get(each.peer) == each for each in opening.members)
        return (
            {each.peer for each in opening.members} == signers
            and known in (0, len(opening.members))
            and any(each.public for each in opening.members)
        )


class Log:
    """The last items, oldest first, at most `kept` of them."""

    def __init__(self, items: Iterable[LogItem], kept: int):
        self.items = tuple(items)
        self.kept = kept
        self._places = {item.head.lineage: place for place, item in enumerate(self.items)}

    @property
    def last(self) -> LogItem:
        """Where this peer is."""
        return self.items[-1]

    def __contains__(self, lineage: object) -> bool:
        return lineage in self._places

    def item(self, lineage: bytes) -> LogItem:
        """:raises KeyError: if the log does not have it, or no longer"""
        return self.items[self._places[lineage]]

    def behind(self, lineage: bytes) -> tuple[LogItem, ...]:
        """The items behind this one.

        :raises KeyError: if the log does not have it, or no longer
        """
        return self.items[self._places[lineage] + 1 :]

    def extended(self, item: LogItem) -> Log:
        """The log with one item more."""
        return Log((*self.items, item)[-self.kept :], self.kept)

    def last_common(self, lineages: Iterable[bytes]) -> bytes | None:
        """The newest of these lineages, newest first, that the log has."""
        return next((lineage for lineage in lineages if lineage in self._places), None)


def is_chain(items: tuple[LogItem, ...]) -> bool:
    """Whether each item leads to the next one; a rollback order may follow anything."""
    return all(
        before.after_order(after.step) == after if isinstance(after.step, RollbackOrder) else before.leads_to(after)
        for before, after in zip(items, items[1:], strict=False)
    )


def items_behind(items: tuple[LogItem, ...], lineage: bytes) -> tuple[LogItem, ...] | None:
    """The items behind this lineage; None: it is not among them, or no steps lead from it to the last one."""
    places = [place for place, item in enumerate(items) if item.head.lineage == lineage]
    behind = items[places[0] + 1 :] if places else None
    return None if behind is None or any(isinstance(item.step, RollbackOrder) for item in behind) else behind
