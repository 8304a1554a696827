"""Remember the other peers: when each was heard, its head, its last report, and bans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from volunteer_kit.swarm.sync.entries import Head, Member, Verdict
from volunteer_kit.swarm.sync.messages import Report

MOST_CONTACTS: Final = 4096
LONGEST_AVOIDED: Final = 5  # doublings


@dataclass
class Contact:
    """What this peer knows of another one."""

    member: Member
    heard: float = float("-inf")  # s
    head: Head | None = None
    report: Report | None = None
    reported: float = float("-inf")  # s
    reported_from: bytes = b""  # lineage of the head at which it reported
    sent_items: float = float("-inf")  # s
    asked_items: float = float("-inf")  # s
    avoided_until: float = float("-inf")  # s; its snapshots or items did not hold
    useless: int = 0  # snapshots and items of it that did not hold, one after another
    lost_slices: int = 0  # slices that it reduced wrongly or not at all, one after another
    no_slices_until: float = float("-inf")  # s
    vain: int = 0  # slots in which it had its turn and another leader brought the commit, one after another
    turn_again: int = 0  # epoch from which it has its turn again
    missed: int = 0  # rounds that waited for it in vain, one after another
    waited_again: int = 0  # epoch from which a round waits for it again
    outbids: int = 0  # times that its promise of a higher ballot was heeded
    outbid_again: int = 0  # epoch from which it is heeded again

    def disappointed(self, now: float, seconds: float) -> None:
        """Its snapshot or its items were of no use: avoid it, longer each time."""
        self.useless += 1
        self.avoided_until = now + seconds * 2 ** min(self.useless - 1, LONGEST_AVOIDED)

    def led_in_vain(self, epoch: int) -> None:
        """Another leader had to bring the commit: its next turns are skipped, more each time."""
        self.vain += 1
        self.turn_again = epoch + 2 ** min(self.vain, LONGEST_AVOIDED)

    def missed_round(self, epoch: int) -> None:
        """A round has waited for it in vain: the next ones begin without it, more each time."""
        self.missed += 1
        self.waited_again = epoch + 2 ** min(self.missed, LONGEST_AVOIDED)

    def may_outbid(self, epoch: int) -> bool:
        """Whether its higher promise makes a leader ask anew: once, and seldom if it comes in slot after slot."""
        if epoch < self.outbid_again:
            return False
        if epoch > self.outbid_again + 2**LONGEST_AVOIDED:
            self.outbids = 0
        self.outbids += 1
        self.outbid_again = epoch + 2 ** min(self.outbids, LONGEST_AVOIDED)
        return True

    def lost_slice(self, now: float, epoch_seconds: float) -> None:
        """It reduced a slice wrongly, or not at all: it gets none for some epochs, more each time."""
        self.no_slices_until = now + epoch_seconds * 2 ** min(self.lost_slices, LONGEST_AVOIDED)
        self.lost_slices += 1


class Contacts:
    """Everybody that this peer has heard of.

    :param patience: s without a word, then a contact is not in touch any more
    """

    def __init__(self, patience: float):
        self.patience = patience
        self.banned: dict[str, Verdict] = {}
        self._all: dict[str, Contact] = {}

    def __getitem__(self, peer: str) -> Contact:
        """The contact, new if nothing was known of this peer; then one that was silent for longest may be forgotten."""
        if peer not in self._all:
            if len(self._all) >= MOST_CONTACTS:
                del self._all[min(self._all, key=lambda known: self._all[known].heard)]
            self._all[peer] = Contact(Member(peer, peer, False))
        return self._all[peer]

    def __iter__(self) -> Iterator[tuple[str, Contact]]:
        """Each peer that is not banned; "", which stands for a leader that nobody knows or a checkpoint, is none."""
        return ((peer, contact) for peer, contact in self._all.items() if peer and peer not in self.banned)

    def in_touch(self, now: float) -> list[str]:
        """Peers that were heard just now."""
        return [peer for peer, contact in self if now - contact.heard < self.patience]

    def at(self, lineage: bytes, now: float) -> list[str]:
        """Peers in touch that stand at this head."""
        return [
            peer
            for peer, contact in self
            if now - contact.heard < self.patience and contact.head is not None and contact.head.lineage == lineage
        ]

    def reporting(self, lineage: bytes, now: float) -> list[tuple[Contact, Report]]:
        """Contacts whose report from this head is fresh."""
        return [
            (contact, contact.report)
            for _, contact in self
            if contact.report is not None
            and now - contact.reported < self.patience
            and contact.reported_from == lineage
        ]

    def public(self) -> list[str]:
        """Peers that can be called."""
        return [peer for peer, contact in self if contact.member.public]
