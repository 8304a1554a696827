"""Credit accounts with their samples in committed entries.

The collector counts each step once, by its lineage, for the account that the entry names. A step that a rollback order
undoes stays counted: somebody computed it, and it was in everybody's model. When this monitor follows the branch that
won, it takes back the steps of the branch that lost, and says so: the winner holds other samples of the same time, and
a peer could else be paid on both. In a run that verifies, samples of a probation are in no entry: the collector counts
them with the next step after a probation has ended well, and they share that step's fate.

A monitor that was away learns from the log's tail what was committed meanwhile, as far as it goes back. The log's
accounts say which contributions are settled, but not how many samples they had, so nobody gets credit for older steps.
The collector reports them as a number of epochs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from hivemind.p2p import PeerID

from volunteer_kit.swarm.credit.ledger import SHARES_KEPT, CreditLedger, Place
from volunteer_kit.swarm.net.identity import peer_digest
from volunteer_kit.swarm.node.talk import Brought, StepOf

WAITING: Final = 4096  # steps that wait for a sick disk; what is older counts as missed
REMEMBERED: Final = 4096  # lineages


class Heard(NamedTuple):
    """A step, and when this peer learned of it."""

    step: StepOf
    time: float  # s since 1970


class StepFeed:
    """Steps on their way from the node into the ledger; threads share it."""

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock = clock
        self.waiting: deque[Heard] = deque(maxlen=WAITING)
        self._checked: deque[Brought] = deque(maxlen=WAITING)

    def credit(self, checked: Iterable[Brought]) -> None:
        """Samples that were found right, and are in no step; as talk.Verdicts.credits. Returns at once."""
        self._checked.extend(checked)

    def take_checked(self) -> tuple[Brought, ...]:
        """Return what was credited since the last call."""
        taken = []
        while self._checked:
            taken.append(self._checked.popleft())
        return tuple(taken)

    def __call__(self, steps: Iterable[StepOf]) -> None:
        """As NodeOptimizer.on_steps. Returns at once."""
        now = self._clock()
        self.waiting.extend(Heard(step, now) for step in steps)


class EntryCollector:
    """Enters what the node tells; in one thread.

    :param account_of: (account, peer) as an entry has them -> the ledger's account
    :param name_of: of a peer, to show
    :param warn: told in words what could not be counted
    """

    def __init__(
        self,
        feed: StepFeed,
        ledger: CreditLedger,
        account_of: Callable[[str, str], bytes],
        name_of: Callable[[PeerID], str | None] = lambda peer: None,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self._feed, self.ledger = feed, ledger
        self._account_of, self._name_of, self._warn = account_of, name_of, warn
        self._entered = dict.fromkeys(ledger.lineages(REMEMBERED))  # the newest last, as far as they are this stay's
        self._line = ledger.line()  # lineages on the way to the step that was heard last
        self._orders: dict[bytes, tuple[int, int]] = {}  # lineage -> rollback order behind it, as far as it was heard
        self._machines, self._names = ledger.machines(), dict[bytes, str]()
        self._checked: tuple[Brought, ...] = ()  # to be entered with the next step
        self._unnamed: dict[PeerID, bytes] = {}  # peers without a name yet -> their account

    def collect(self, epoch: int) -> int:
        """Enter what is here. :returns: steps that were entered. Raises sqlite3.Error; what was not entered waits."""
        entered = 0
        self._learn(dict(self._unnamed), {})
        while self._feed.waiting:
            heard = self._feed.waiting[0]
            self._follow(heard.step)
            if heard.step.lineage not in self._entered:
                self._checked += self._feed.take_checked()
                shares = (*heard.step.shares, *self._checked)
                self._meet(shares)
                self._enter(heard, shares)
                self._checked = ()
                entered += 1
            if self._feed.waiting[0] is heard:  # else it had to give way to newer ones
                self._feed.waiting.popleft()
        return entered

    def close(self) -> None:
        """Enter what is here, and close the ledger. Raises sqlite3.Error."""
        try:
            self.collect(-1)
        finally:
            self.ledger.close()

    def _enter(self, heard: Heard, shares: tuple[Brought, ...]) -> None:
        step = heard.step
        samples: dict[bytes, float] = {}
        for each in shares:
            digest = peer_digest(PeerID.from_base58(each.peer))
            samples[digest] = samples.get(digest, 0.0) + each.samples
        place = Place(step.epoch, step.lineage, step.parent, step.lineage, heard.time)
        missed = self._missed_before(step)
        if self.ledger.enter_committed(place, samples, self._machines, missed) and missed:
            self._warn(
                f"No monitor was there for {missed} steps before step {step.epoch}, and nobody can tell any more whose "
                "samples they held: they are in nobody's credit."
            )
        self._entered[step.lineage] = None
        while len(self._entered) > REMEMBERED:
            del self._entered[next(iter(self._entered))]

    def _follow(self, step: StepOf) -> None:
        """Follow a step. If it leads on from an earlier one than the last, its branch has won against those behind
        that."""
        order = (step.generation, step.sequence)
        if step.parent in self._line and step.lineage not in self._line:
            behind = self._line[self._line.index(step.parent) + 1 :]
            if behind and self._orders.get(step.parent) == order:
                lost = self.ledger.take_back(behind)
                for lineage in behind:
                    self._entered.pop(lineage, None)
                if lost:
                    self._warn(
                        f"The swarm was cut in two, and {len(behind)} steps are lost with the smaller branch: their "
                        f"{lost} samples are in nobody's model, and in nobody's credit."
                    )
            self._line = self._line[: len(self._line) - len(behind)]
        elif step.parent not in self._line and step.lineage not in self._line:
            self._line = []
        if step.lineage not in self._line:
            self._line = [*self._line, step.lineage][-SHARES_KEPT:]
        self._orders[step.lineage] = order
        for lineage in [*self._orders][: max(0, len(self._orders) - REMEMBERED)]:
            del self._orders[lineage]

    def _missed_before(self, step: StepOf) -> int:
        """Epochs between the last step that was entered and this one."""
        is_genesis = not step.parent
        if is_genesis or step.parent in self._entered:
            return 0
        before = step.epoch - 1 if step.is_step else step.epoch
        return max(0, before - (self.ledger.last_epoch() or 0))

    def _meet(self, shares: Iterable[Brought]) -> None:
        """Whose machines they are, and what to call their owners."""
        owners, names = dict[PeerID, bytes](), dict[bytes, str]()
        for each in shares:
            peer, account = PeerID.from_base58(each.peer), self._account_of(each.account, each.peer)
            owners[peer] = account
            if each.account != each.peer:
                names[account] = each.account
        self._learn(owners, names)

    def _learn(self, owners: dict[PeerID, bytes], names: dict[bytes, str]) -> None:
        for peer, account in owners.items():
            if name := self._name_of(peer):
                names[account] = name
            elif account not in names and account not in self._names:
                self._unnamed[peer] = account
        self._unnamed = {peer: account for peer, account in self._unnamed.items() if account not in names}
        machines = {peer_digest(peer): account for peer, account in owners.items()}
        if not machines.items() <= self._machines.items() or not names.items() <= self._names.items():
            self.ledger.learn(machines, names)
            self._machines |= machines
            self._names |= names
