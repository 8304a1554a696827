"""I1 to I6 and I9 of docs/protocol.md, checked from what processes do, with arithmetic of our own.

Nothing here asks a core whether it is right: electorates, accounts and sums are computed again from the entries.
I7 and I8 are in `liveness`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.simulation.signatures import Statement
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.contributions import Accounts, Cause, Ledger, LedgerRecord
from volunteer_kit.swarm.sync.entries import Entry, Member, Opening, RollbackOrder
from volunteer_kit.swarm.sync.log import LogItem

if TYPE_CHECKING:
    from tests.simulation.process import Process

ENOUGH_ENTRIES = 3  # a newcomer votes with its third
ENOUGH_VOTERS = 3
SLOTS_BEFORE = 4
SLACK = 4.0  # times what an account could have computed
SLACK_SECONDS = 20.0
AS_FAR_AS_IT_KNOWS = (Cause.UNKNOWN, Cause.ROLLBACK, Cause.LOST_BRANCH)  # some of it may be on the branch after all


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, name: str, time: float, peer: str, text: str):
        super().__init__(f"{name} at {time:.3f} s by {peer}: {text}")
        self.name, self.time, self.peer, self.text = name, time, peer, text


class Branch:
    """What follows from a history: the view, the accounts, and the parameters that its peers have."""

    __slots__ = (
        "lineage", "parent", "step", "epoch", "generation", "sequence", "groups", "taken", "since", "founders",
        "banned", "masks", "amounts", "cells", "electorate", "depth", "parameters", "accounts", "certificates",
    )  # fmt: skip

    epoch: int
    generation: int
    sequence: int
    groups: tuple[tuple[Member, ...], ...]  # of the last two entries, less those that are gone
    taken: dict[str, int]  # entries that each member took part in
    since: dict[str, int]  # epoch of its first
    founders: frozenset[str]
    banned: frozenset[str]
    masks: dict[str, dict[int, int]]  # peer -> contribution -> cells that entered
    amounts: dict[str, int]  # peer -> sample-cells that entered
    cells: int  # sample-cells of this generation
    electorate: frozenset[str]
    depth: int

    def __init__(self, parent: Branch | None, lineage: bytes):
        self.parent = parent
        self.lineage = lineage
        self.step: Entry | Opening | RollbackOrder | None = None
        self.parameters: int | None = None
        self.accounts: Accounts | None = None
        self.certificates: set[object] = set()  # certificates that were found valid
        if parent is None:
            return
        self.epoch, self.generation, self.sequence = parent.epoch, parent.generation, parent.sequence
        self.groups, self.taken, self.since = parent.groups, parent.taken, parent.since
        self.founders, self.banned = parent.founders, parent.banned
        self.masks, self.amounts, self.cells = parent.masks, parent.amounts, parent.cells
        self.depth = parent.depth + 1

    def slots_before(self) -> set[bytes]:
        """The last slots before the one behind this history: a goodbye may come from one of them."""
        found: set[bytes] = set()
        node = self
        while len(found) < SLOTS_BEFORE and node.parent is not None and not isinstance(node.step, RollbackOrder):
            found.add(node.parent.lineage)
            node = node.parent
        return found

    def view(self) -> dict[str, Member]:
        """Members of the last two entries."""
        return {member.peer: member for group in self.groups for member in group}

    def is_on(self, other: Branch) -> bool:
        """Whether the other one is this one, or comes from it."""
        while other.depth > self.depth and other.parent is not None:
            other = other.parent
        return other is self

    def find_electorate(self) -> frozenset[str]:
        """One voter for each account: the oldest that took part often enough; below three, the oldest newcomers."""
        view = self.view()
        by_age = sorted(view, key=lambda peer: (self.since[peer], peer))
        voters: dict[str, str] = {}
        for peer in by_age:
            if self.taken[peer] >= ENOUGH_ENTRIES and view[peer].account not in voters:
                voters[view[peer].account] = peer
        for peer in by_age:
            if len(voters) < ENOUGH_VOTERS and self.taken[peer] < ENOUGH_ENTRIES:
                voters.setdefault(view[peer].account, peer)
        return frozenset(voters.values())


def decides(electorate: frozenset[str], votes: Iterable[str], left: Iterable[str]) -> bool:
    """More than half of those that have not left, or half with the smallest of them."""
    denominator = sorted(electorate - set(left))
    count = len([peer for peer in denominator if peer in set(votes)])
    return bool(denominator) and (
        2 * count > len(denominator) or (2 * count == len(denominator) and denominator[0] in set(votes))
    )


class Invariants:
    """Raises a `Violation` as soon as an honest peer does what it must not.

    :param cells: of the parameter vector
    :param liars: peers whose own deeds are not checked
    :param speeds: samples/s that the devices of each account can do together
    """

    def __init__(self, cells: int, liars: frozenset[str], speeds: dict[str, float]):
        self.cells = cells
        self._speeds = speeds
        self.liars = liars
        self.now = 0.0
        self.branches: dict[bytes, Branch] = {}
        self.equivocators: set[str] = set()  # signers against which there is proof
        self.commits = 0
        self.samples = 0  # sample-cells in entries
        self.openings = 0
        self.last_commit = 0.0  # s
        self._certified: dict[bytes, bytes] = {}  # slot -> entry
        self._votes: dict[tuple[str, bytes], dict[Ballot, bytes]] = {}
        self._promised: dict[tuple[str, bytes], Ballot] = {}
        self._proposed: dict[tuple[str, bytes], dict[Ballot, bytes]] = {}
        self._stale: dict[tuple[str, int], list[tuple[Branch, int]]] = {}  # (peer, number) -> where, which cells

    def violated(self, name: str, peer: str, text: str) -> Violation:
        """To be raised."""
        return Violation(name, self.now, peer, text)

    # --- the log: I1, I2, I3 ---

    def genesis(self, item: LogItem) -> None:
        """The run begins."""
        branch = Branch(None, item.head.lineage)
        (group,) = item.membership.recent
        branch.epoch = branch.generation = branch.sequence = branch.cells = branch.depth = 0
        branch.groups = (group,)
        branch.taken = {member.peer: ENOUGH_ENTRIES for member in group}
        branch.since = {member.peer: 0 for member in group}
        branch.founders = frozenset(branch.taken)
        branch.banned = frozenset()
        branch.masks, branch.amounts = {}, {}
        branch.electorate = branch.find_electorate()
        self.branches[branch.lineage] = branch

    def step(self, peer: str, item: LogItem) -> Branch:
        """An honest peer has this step in its log."""
        branch = self.branches.get(item.head.lineage)
        if branch is not None:
            if isinstance(branch.step, Entry):
                self._certificate(peer, branch, item)
            return branch
        step = item.step
        if step is None:
            raise self.violated("I2", peer, "another genesis")
        parent = self.branches.get(step.parent)
        if parent is None:
            raise self.violated("I2", peer, f"a step behind {step.parent.hex()[:6]}, which no honest peer ever had")
        if isinstance(step, RollbackOrder):
            branch = self._order(parent, step)
        elif (step.generation, step.sequence, step.epoch) != (parent.generation, parent.sequence, parent.epoch):
            raise self.violated("I2", peer, "a step's generation or epoch does not follow its parent's")
        elif isinstance(step, Entry):
            branch = self._entry(peer, parent, step, item)
        else:
            branch = self._opening(peer, parent, step, item)
        branch.step = step
        branch.electorate = branch.find_electorate()
        head = item.head
        mine = (branch.generation, branch.sequence, branch.epoch, branch.lineage, branch.cells)
        if mine != tuple(head):
            raise self.violated("I5", peer, f"a head says {tuple(head)}, its entries say {mine}")
        if item.membership.electorate != branch.electorate:
            raise self.violated("I5", peer, f"its electorate {sorted(item.membership.electorate)} is wrong")
        self.branches[branch.lineage] = branch
        return branch

    def _order(self, parent: Branch, order: RollbackOrder) -> Branch:
        branch = Branch(parent, order.lineage)
        branch.generation, branch.sequence, branch.epoch = order.generation, order.sequence, order.epoch
        branch.cells = 0
        branch.founders, branch.banned = frozenset(member.peer for member in order.members), frozenset(order.banned)
        branch.since = {}
        self._listed(branch, order.members)
        return branch

    def _opening(self, peer: str, parent: Branch, opening: Opening, item: LogItem) -> Branch:
        view = parent.view()
        listed = {member.peer for member in opening.members}
        known = [member for member in opening.members if view.get(member.peer) == member]
        if listed != item.signers or len(known) not in (0, len(opening.members)):
            raise self.violated("I2", peer, "an opening that not all of its members signed, or with strangers")
        if not any(member.public for member in opening.members):
            raise self.violated("I2", peer, "an opening of clients only")
        branch = Branch(parent, opening.lineage)
        self._listed(branch, opening.members)
        self.openings += 1
        return branch

    @staticmethod
    def _listed(branch: Branch, members: tuple[Member, ...]) -> None:
        group = tuple(sorted(member for member in members if member.peer not in branch.banned))
        branch.since = {member.peer: branch.since.get(member.peer, 0) for member in group}
        branch.groups = (group,)
        branch.taken = {member.peer: ENOUGH_ENTRIES for member in group}

    def _entry(self, peer: str, parent: Branch, entry: Entry, item: LogItem) -> Branch:
        branch = Branch(parent, entry.lineage)
        branch.step = entry
        self._certificate(peer, branch, item)
        other = self._certified.setdefault(entry.parent, entry.lineage)
        if other != entry.lineage and not self.equivocators:
            both = f"{entry.lineage.hex()[:6]} and {other.hex()[:6]}"
            raise self.violated("I1", peer, f"{both} are certified behind {entry.parent.hex()[:6]}")
        if self.liars:
            self._plausible(peer, entry)
        masks, amounts = dict(parent.masks), dict(parent.amounts)
        touched: set[str] = set()
        for answer in entry.answers:
            for share in answer.shares:
                name = share.peer
                if name not in touched:
                    touched.add(name)
                    masks[name] = dict(masks.get(name, {}))
                before = masks[name].get(share.number, 0)
                if share.cells & ~answer.cells or not share.cells:
                    raise self.violated("I2", peer, f"a share of {name} is outside of its slice")
                if before & share.cells:
                    raise self.violated("I3", peer, f"cells of {name}'s contribution {share.number} entered twice")
                masks[name][share.number] = before | share.cells
                amount = share.samples * share.cells.bit_count()
                amounts[name] = amounts.get(name, 0) + amount
                branch.cells += amount
                self.samples += amount
                for where, cells in self._stale.get((name, share.number), ()):
                    if not cells & share.cells or not where.is_on(parent):
                        continue
                    raise self.violated("I4", name, f"its contribution {share.number} is stale, and yet it entered")
        branch.masks, branch.amounts = masks, amounts
        branch.epoch += 1
        branch.banned = parent.banned | {verdict.peer for verdict in entry.verdicts}
        away = branch.banned | set(entry.gone)
        groups = (*parent.groups[-1:], entry.group)
        branch.groups = tuple(tuple(member for member in group if member.peer not in away) for group in groups)
        branch.taken, branch.since = {}, {}
        present = {member.peer for member in branch.groups[-1]}
        for name in branch.view():
            so_far = parent.taken.get(name, ENOUGH_ENTRIES if name in parent.founders else 0)
            branch.taken[name] = min(ENOUGH_ENTRIES, so_far + (1 if name in present else 0))
            branch.since[name] = parent.since.get(name, entry.epoch)
        branch.founders = parent.founders - away
        self.commits += 1
        self.last_commit = self.now
        return branch

    def _plausible(self, peer: str, entry: Entry) -> None:
        """An account brings no more than its devices could have computed since the run began, and some slack."""
        accounts = {member.peer: member.account for member in entry.group}
        shares = {(share.peer, share.number): share.samples for answer in entry.answers for share in answer.shares}
        brought: dict[str, int] = {}
        for (name, _), samples in shares.items():
            account = accounts.get(name, name)
            brought[account] = brought.get(account, 0) + samples
        for account, samples in brought.items():
            most = SLACK * self._speeds.get(account, 0.0) * (self.now + SLACK_SECONDS)
            if samples > most:
                raise self.violated("I9", peer, f"took {samples} samples of {account}, which can do {most:.0f} at most")

    def _certificate(self, peer: str, branch: Branch, item: LogItem) -> None:
        certificate, entry = item.certificate, branch.step
        key = None if certificate is None else (certificate.ballot, frozenset(certificate.voters), certificate.goodbyes)
        if key in branch.certificates:
            return
        assert branch.parent is not None and isinstance(entry, Entry)
        if certificate is None or certificate.entry != entry.lineage:
            raise self.violated("I2", peer, "a step without a certificate")
        left, for_it = set(), set(certificate.voters)
        before = branch.parent.slots_before()
        for goodbye in certificate.goodbyes:
            if goodbye.slot in before:
                left.add(goodbye.peer)
            elif goodbye.slot == entry.parent and goodbye.promised <= certificate.ballot:
                if goodbye.accepted is None:
                    left.add(goodbye.peer)
                elif goodbye.accepted.lineage == entry.lineage:
                    for_it.add(goodbye.peer)
        if not decides(branch.parent.electorate, for_it - left, left):
            electorate = sorted(branch.parent.electorate)
            raise self.violated("I2", peer, f"{sorted(for_it)} are no quorum of {electorate} without {sorted(left)}")
        branch.certificates.add(key)
        for voter in sorted(certificate.voters):
            if self._votes.setdefault((voter, entry.parent), {}).setdefault(certificate.ballot, entry.lineage) != (
                entry.lineage
            ):
                self._contradicts(voter, f"is in two certificates at {certificate.ballot}")

    # --- I4 ---

    def ledger(self, peer: str, ledger: Ledger, computed: int) -> None:
        """The sum is exact.

        :param computed: sample-cells that its device computed, as its process counted them
        """
        live = 0
        for each in ledger.live:
            if each.pending & each.in_flight:
                raise self.violated("I4", peer, f"cells of contribution {each.number} are pending and in flight")
            live += each.samples * (each.pending | each.in_flight).bit_count()
        expired = sum(ledger.expired.values())
        if not ledger.computed == computed == live + ledger.committed + expired:
            raise self.violated(
                "I4",
                peer,
                f"computed {computed}, says {ledger.computed} = live {live} + committed {ledger.committed}"
                f" + expired {expired}",
            )

    def recorded(self, process: Process, before: LedgerRecord | None, after: LedgerRecord) -> None:
        """A ledger was written: what it calls committed is on its branch, what it calls stale is not."""
        if before is None or before is after:
            return
        peer = process.name
        causes_before = dict(before.expired)
        causes = {cause for cause, amount in after.expired if amount != causes_before.get(cause, 0)}
        if not causes and before.committed == after.committed:
            return
        branch = self.branches[process.lineage_on_disk]
        if before.committed != after.committed:
            there = branch.amounts.get(peer, 0)
            if after.committed > there + process.out_of_sight:
                raise self.violated("I4", peer, f"says {after.committed} are committed, its branch has {there}")
            lost = sum(amount for cause, amount in after.expired if cause in AS_FAR_AS_IT_KNOWS)
            if after.committed < there + process.out_of_sight - lost:
                raise self.violated("I4", peer, f"says only {after.committed} are committed, its branch has {there}")
        if causes == {Cause.STALE}:  # a leaver cannot know what becomes of an entry that it voted for
            masks = branch.masks.get(peer, {})
            live = {each.number: each.pending | each.in_flight for each in after.live}
            for each in before.live:
                gone = (each.pending | each.in_flight) & ~live.get(each.number, 0) & ~masks.get(each.number, 0)
                if gone:
                    self._stale.setdefault((peer, each.number), []).append((branch, gone))

    # --- I5 ---

    def at_head(self, peer: str, branch: Branch, parameters: int | None, accounts: Accounts) -> None:
        """Equal lineage, equal state.

        :param parameters: None: somebody damaged them
        """
        if parameters is not None:
            if branch.parameters is None:
                branch.parameters = parameters
            elif branch.parameters != parameters:
                raise self.violated("I5", peer, f"other parameters at {branch.lineage.hex()[:6]}")
        if branch.accounts is None:
            branch.accounts = accounts
        elif branch.accounts is not accounts and branch.accounts != accounts:
            raise self.violated("I5", peer, f"other accounts at {branch.lineage.hex()[:6]}")

    # --- I6 ---

    def said(self, process: Process, statements: Iterable[Statement]) -> None:
        """A peer signed these for the first time; what binds it is on its disk already."""
        for statement in statements:
            if len(statement) == 5:
                self._one_said(process, statement)

    def _one_said(self, process: Process, statement: Statement) -> None:
        kind, peer, slot, ballot, what = statement
        assert isinstance(peer, str) and isinstance(slot, bytes) and isinstance(ballot, Ballot)
        key = (peer, slot)
        record = process.ballot
        if kind == "vote":
            assert isinstance(what, bytes)
            if self._votes.setdefault(key, {}).setdefault(ballot, what) != what:
                self._contradicts(peer, f"voted twice at {ballot}")
            promised = self._promised.get(key)
            if promised is not None and ballot < promised and (slot, ballot, what) not in process.accepted:
                self._contradicts(peer, f"voted at {ballot}, and had promised {promised}")
            entry = process.accepted.get((slot, ballot, what))
            if entry is None:
                self._unwritten(peer, f"voted at {ballot} and had not written it")
            elif not process.held_on_disk.issuperset(answer.digest for answer in entry.answers):
                self._unwritten(peer, "voted and had not written the answers")
        elif kind == "promise":
            assert isinstance(what, tuple)
            voted = [at for at in self._votes.get(key, {}) if at < ballot]
            if voted and (what[1] is None or what[1] < max(voted)):
                self._contradicts(peer, f"promised {ballot} and hid its vote at {max(voted)}")
            if record is None or record.slot != slot or record.promised < ballot:
                self._unwritten(peer, f"promised {ballot} and had not written it")
            self._promised[key] = max(ballot, self._promised.get(key, ballot))
        elif kind == "proposal":
            assert isinstance(what, bytes)
            if self._proposed.setdefault(key, {}).setdefault(ballot, what) != what:
                self._contradicts(peer, f"proposed two entries at {ballot}")
            if record is None or record.slot != slot or record.proposed_at is None or record.proposed_at < ballot:
                self._unwritten(peer, f"proposed at {ballot} and had not written it")

    def _contradicts(self, peer: str, text: str) -> None:
        if peer not in self.liars:
            raise self.violated("I6", peer, text)
        self.equivocators.add(peer)

    def _unwritten(self, peer: str, text: str) -> None:
        if peer not in self.liars:
            raise self.violated("I6", peer, text)
