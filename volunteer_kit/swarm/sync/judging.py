"""What a peer refuses: rounds and proposals that do not keep the rules. Pure decisions, each with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from volunteer_kit.swarm.sync import leading
from volunteer_kit.swarm.sync.ballots import is_quorum
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Accounts, Contribution, why_refused
from volunteer_kit.swarm.sync.log import Entry, Goodbye, LogItem, Member
from volunteer_kit.swarm.sync.messages import Promise, Propose, Round

MIN_BATCH: Final = 0.5  # of the target: an entry with less is proposed only behind the epoch's deadline
EARLY: Final = 0.5  # of the epoch's deadline: a leader that begins before it, without the samples, lies


@dataclass(frozen=True)
class Judge:
    """Where a peer stands when it judges."""

    config: SyncConfig
    item: LogItem  # its head
    me: Member
    accounts: Accounts
    own: tuple[Contribution, ...]
    reported: int  # samples: the most that this peer reported in this slot
    left: frozenset[str]  # members out of the denominator
    slot_age: float  # s since the last commit

    def is_quorum(self, peers: frozenset[str], left: frozenset[str] = frozenset()) -> bool:
        """Whether these peers decide.

        :param left: members that left, of whom this peer has not heard
        """
        return is_quorum(self.item.membership.electorate, peers, self.left | left)

    def why_not_begin(self, plan: Round) -> str | None:
        """Why this peer takes no part in a round; None: it does."""
        config = self.config
        if plan.slot != self.item.head.lineage or not leading.is_genuine(plan, config.cells):
            return "the round is not of this slot"
        if self.me not in plan.group:
            return "this peer is told wrongly"
        if plan.samples[plan.group.index(self.me)] > self.reported:
            return "this peer's samples are told wrongly"
        if not self.is_quorum(frozenset(member.peer for member in plan.group)):
            return "the group is no quorum"
        if self._is_early(EARLY) and sum(plan.samples) < config.target_batch_size:
            return "the round begins early"
        if plan.exchange_seconds > config.exchange_ceiling or plan.vote_seconds > config.vote_ceiling:
            return "a deadline is beyond the run's"
        return None

    def why_not_accept(self, body: Propose, left: frozenset[str]) -> str | None:
        """Why this peer does not accept a proposal; None: it does, if it believes the weights.

        :param left: members that left, as the proposal shows
        """
        entry = body.entry
        if entry.parent != self.item.head.lineage:
            return "its parent is not this head"
        if body.ballot.turn:
            goodbyes = [each for each in body.goodbyes if not each.leaves(entry.parent)]
            promised = frozenset(peer for peer, _ in body.promises) | {each.peer for each in goodbyes}
            if any(each.ballot != body.ballot for _, each in body.promises) or not self.is_quorum(promised, left):
                return "no quorum has promised"
            bound, _ = self.bound_entry(body.promises, goodbyes, left)
            if bound != entry if bound is not None else entry.birth != body.ballot:
                return "an accepted proposal is passed over"
        elif entry.birth != body.ballot:
            return "it was born at another ballot"
        if entry.birth == body.ballot:
            why = self.why_early(entry, EARLY)
            if why is not None:
                return why
            if self._is_altered(entry):
                return "this peer's contribution was altered"
        return self.why_wrong(entry)

    def bound_entry(
        self, promises: Sequence[tuple[str, Promise]], goodbyes: Sequence[Goodbye], left: frozenset[str] = frozenset()
    ) -> tuple[Entry | None, frozenset[str]]:
        """As `leading.bound_entry`, at this head."""
        electorate = self.item.membership.electorate
        return leading.bound_entry(
            promises, goodbyes, electorate, self.left | left, lambda entry: self.why_wrong(entry) is None
        )

    def why_early(self, entry: Entry, share: float) -> str | None:
        """Why nobody asked for a step like this one; None: it holds enough, or the epoch is old.

        :param share: of the epoch's deadline, before which an entry has to be large
        """
        if entry.sample_cells == 0:
            return "it holds nothing"
        enough = MIN_BATCH * self.config.target_batch_size * self.config.cells
        if entry.sample_cells < enough and self._is_early(share):
            return "it holds too few samples"
        return None

    def why_wrong(self, entry: Entry) -> str | None:
        """Why an entry does not follow this head; None: it does. Every honest peer at this head says the same."""
        head, config = self.item.head, self.config
        if entry.parent != head.lineage or (entry.generation, entry.sequence, entry.epoch) != (*head.order, head.epoch):
            return "its epoch is not this one"
        group = frozenset(member.peer for member in entry.group)
        if not is_quorum(self.item.membership.electorate, group, frozenset(entry.gone)):
            return "the group is no quorum"
        most = config.most_epochs * config.target_batch_size
        brought = {(share.peer, share.number): share.samples for answer in entry.answers for share in answer.shares}
        by_peer: dict[str, int] = {}
        for (peer, _), samples in brought.items():
            by_peer[peer] = by_peer.get(peer, 0) + samples
        if any(samples > most for samples in by_peer.values()):
            return "a member brings more than anybody can"
        return why_refused(entry.answers, self.accounts, head.epoch, group, config.max_staleness, config.cells)

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
