"""Judge rounds and proposals: pure decisions that refuse those against the rules, each with its reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from volunteer_kit.swarm.sync import leading
from volunteer_kit.swarm.sync.ballots import Ballot, is_quorum, leader_order, may_lead
from volunteer_kit.swarm.sync.certificates import Goodbye
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Accounts, Contribution, Share, Slice, why_refused
from volunteer_kit.swarm.sync.entries import Entry, Member
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import Ask, Begin, Body, CommitmentsHeard, Lead, Promise, Propose, Report, Round

MIN_BATCH: Final = 0.5  # of the target: an entry with less is proposed only behind the epoch's deadline
MOST: Final = 1e9  # of any number in a report
LARGEST_GROUP: Final = 2048  # members
EARLY: Final = 0.5  # of the epoch's deadline: a leader that begins before it, without the samples, lies


def why_malformed(sender: str, body: Body) -> str | None:
    """Why a message makes no sense, whatever the head; None: it does."""
    if isinstance(body, Report):
        numbers = (body.samples, body.bandwidth, body.round_seconds or 0.0, body.vote_seconds or 0.0, body.alone_for)
        if body.member.peer != sender:
            return "it speaks for another peer"
        if not all(0 <= number < MOST for number in numbers):
            return "a number makes no sense"
    if isinstance(body, (Lead, Ask, Begin, Propose)):
        ballot = body.round.ballot if isinstance(body, Begin) else body.ballot
        if ballot.leader != sender:
            return "it leads for another peer"
    if isinstance(body, Begin) and not 0 < len(body.round.group) <= LARGEST_GROUP:
        return "the group has no size that makes sense"
    return None


@dataclass(frozen=True)
class Judge:
    """Where a peer stands when it judges."""

    config: SyncConfig
    item: LogItem  # its head
    me: Member
    accounts: Accounts
    own: tuple[Contribution, ...]
    reported: int  # samples: the most that this peer reported in this slot
    goodbyes: tuple[Goodbye, ...]  # that this peer knows
    slot_age: float  # s since the last commit
    commitments: CommitmentsHeard | None = None  # of the slot's last round
    refused_answers: frozenset[Slice] = frozenset()

    def is_quorum(self, peers: frozenset[str], ballot: Ballot) -> bool:
        """Whether these peers decide at this ballot."""
        return is_quorum(self.item.membership.electorate, peers, self._left(self.goodbyes, ballot))

    def _left(self, goodbyes: Iterable[Goodbye], ballot: Ballot) -> frozenset[str]:
        return self.item.membership.left(goodbyes, self.item.head.lineage, ballot)

    def why_not_begin(self, plan: Round) -> str | None:
        """Why this peer takes no part in a round; None: it does."""
        config = self.config
        if plan.slot != self.item.head.lineage or not leading.is_genuine(plan, config.cells):
            return "the round is not of this slot"
        if self.me not in plan.group:
            return "this peer is told wrongly"
        if plan.samples[plan.group.index(self.me)] > self.reported:
            return "this peer's samples are told wrongly"
        if not self.is_quorum(frozenset(member.peer for member in plan.group), plan.ballot):
            return "the group is no quorum"
        if self._is_early(EARLY) and sum(plan.samples) < config.target_batch_size:
            return "the round begins early"
        if not (0 < plan.exchange_seconds <= config.exchange_ceiling and 0 < plan.vote_seconds <= config.vote_ceiling):
            return "a deadline is beyond the run's"
        return None

    def why_not_accept(self, body: Propose) -> str | None:
        """Why this peer does not accept a proposal; None: it does, if it believes the weights."""
        entry, ballot = body.entry, body.ballot
        if entry.parent != self.item.head.lineage:
            return "its parent is not this head"
        if ballot.turn:
            bound, _ = self.bound_entry(body.promises, body.goodbyes, ballot)
            if bound != entry if bound is not None else entry.birth != ballot:
                return "an accepted proposal is passed over"
            if not self.has_promises(body.promises, body.goodbyes, ballot, bound):
                return "no quorum has promised"
        elif entry.birth != ballot:
            return "it was born at another ballot"
        if entry.birth == ballot:
            why = self.why_early(entry, EARLY)
            if why is not None:
                return why
            if self._is_altered(entry):
                return "this peer's contribution was altered"
            why = self.why_not_committed(entry)
            if why is not None:
                return why
        return self.why_wrong(entry)

    def has_promises(
        self,
        promises: Sequence[tuple[str, Promise]],
        goodbyes: Sequence[Goodbye],
        ballot: Ballot,
        entry: Entry | None,
    ) -> bool:
        """Whether a quorum has promised this ballot to a leader that proposes `entry`; None: a new one."""
        if any(each.ballot != ballot for _, each in promises):
            return False
        slot = self.item.head.lineage
        known = (*self.goodbyes, *goodbyes)
        agreeing = {peer for peer, _ in promises}
        agreeing |= {each.peer for each in known if entry is not None and each.agrees(slot, ballot, entry)}
        left = self._left(known, ballot)
        return is_quorum(self.item.membership.electorate, agreeing - left, left)

    def bound_entry(
        self, promises: Sequence[tuple[str, Promise]], goodbyes: Sequence[Goodbye], ballot: Ballot
    ) -> tuple[Entry | None, frozenset[str]]:
        """As `leading.bound_entry`, at this head."""
        membership, slot = self.item.membership, self.item.head.lineage
        order = leader_order(self.item.head.seed, membership.public)
        told = [
            (peer, each)
            for peer, each in promises
            if peer in membership.electorate
            and (each.accepted_at is None or (each.accepted_at < ballot and may_lead(each.accepted_at, order)))
        ]
        known = {each.peer: each for each in (*self.goodbyes, *goodbyes)}
        leavers = [each for each in known.values() if each.slot == slot and each.accepted is not None]
        left = self._left(known.values(), ballot)
        return leading.bound_entry(
            told, leavers, membership.electorate, left, lambda entry: self.why_wrong(entry) is None
        )

    def why_early(self, entry: Entry, share: float) -> str | None:
        """Why nobody asked for a step like this one; None: it holds enough, or the epoch is old.

        :param share: of the epoch's deadline, before which an entry has to be large
        """
        if entry.sample_cells == 0:
            return "it holds nothing"
        enough = MIN_BATCH * self.config.target_batch_size * self.config.cells
        if self._brought(entry) < enough and self._is_early(share):
            return "it holds too few samples"
        return None

    def _brought(self, entry: Entry) -> float:
        """Sample-cells that the members brought for an entry, also those that have to be checked first."""
        heard = self.commitments
        if heard is not None and heard.digest == entry.commitments:
            return entry.sample_cells + heard.disregarded
        return float("inf") if entry.commitments else entry.sample_cells  # those who heard the list know

    def why_wrong(self, entry: Entry) -> str | None:
        """Why an entry does not follow this head; None: it does. Every honest peer at this head says the same."""
        head, config = self.item.head, self.config
        if entry.parent != head.lineage or (entry.generation, entry.sequence, entry.epoch) != (*head.order, head.epoch):
            return "its epoch is not this one"
        group = frozenset(member.peer for member in entry.group)
        membership = self.item.membership
        if not is_quorum(membership.electorate, group, frozenset(entry.gone)):
            return "the group is no quorum"
        bringing = {share.peer for answer in entry.answers for share in answer.shares}
        if group - membership.view.keys() - bringing - membership.may_observe(entry.group):
            return "a newcomer brings nothing"
        if len(group) < len(entry.group):
            return "a member is told twice"
        most = config.most_epochs * config.target_batch_size
        brought = {(share.peer, share.number): share.samples for answer in entry.answers for share in answer.shares}
        by_peer: dict[str, int] = {}
        for (peer, _), samples in brought.items():
            by_peer[peer] = by_peer.get(peer, 0) + samples
        if any(samples > most for samples in by_peer.values()):
            return "a member brings more than anybody can"
        return why_refused(entry.answers, self.accounts, head.epoch, group, config.max_staleness, config.cells)

    def why_not_committed(self, entry: Entry) -> str | None:
        """Say why an entry of the round that this peer is in is not what the members committed to; None: it is.

        One that was born at another ballot, where others may have accepted it, binds this peer whatever it was told.
        """
        if any(answer.slice in self.refused_answers for answer in entry.answers):
            return "it holds an answer that was refused"
        heard = self.commitments
        if heard is None or heard.fingerprint != entry.fingerprint:
            return None
        if heard.digest != entry.commitments:
            return "this peer was told other commitments"
        told: dict[tuple[str, int], Share] = {(share.peer, share.number): share for share in heard.shares}
        for answer in entry.answers:
            for share in answer.shares:
                promised = told.get((share.peer, share.number))
                if promised is None or share != promised._replace(cells=promised.cells & answer.cells):
                    return "a share enters that its member has not committed to, or that has to be checked first"
        return None

    def _is_altered(self, entry: Entry) -> bool:
        own = {each.number: each for each in self.own}
        for answer in entry.answers:
            for share in answer.shares:
                mine = own.get(share.number) if share.peer == self.me.peer else None
                if mine is not None and (mine.birth, mine.samples) != (share.birth, share.samples):
                    return True
        return False

    def _is_early(self, share: float) -> bool:
        return self.slot_age < share * self.config.epoch_deadline
