"""What a monitor does a few times an epoch: fetch the swarm's receipts, find its line, enter what is settled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from hivemind.p2p import PeerID
from hivemind.utils import get_dht_time

from volunteer_kit.swarm.credit import Findings, Step, credit_of_step, line_of, steps_of
from volunteer_kit.swarm.credit_ledger import CreditLedger
from volunteer_kit.swarm.receipts import AccountOf, Receipt, ReceiptBoard, digest_of

LOOK_BACK = 64  # epochs before the present one that are asked for
BATCH = 32  # epochs asked for at once, by a monitor that comes back
FARTHEST = 4096  # epochs that it looks back
AGAIN = 4  # epochs asked for though they are entered: a restart from a checkpoint may be of one of them
TOO_EARLY = 60.0  # s ahead of our clock that a receipt may be; hivemind lets clocks differ by 3


@dataclass
class Collected:
    """What one look came to: rounds entered, by their time, and what was seen that should not be."""

    steps: list[Step] = field(default_factory=list)
    samples: int = 0
    provisional: int = 0
    findings: Findings = field(default_factory=Findings)


class CreditCollector:
    """Several may collect into one ledger or into one each.

    :param account_of: peer id -> account digest, None for one that is not known (yet); None without an authority: every
        peer is an account of its own
    :param username_of: peer id -> name to show
    :param is_monitor: whose single signature is enough
    :param known_peers: peers that may have sent samples without signing a receipt (client mode)
    :param max_samples: that anybody can have in one round, two target batches
    :param settle_after: s from a round on until it is entered, when a later round goes on from it. As long as a cut of
        the network should be able to last without crediting the wrong side
    :param give_up_after: the same, for a round that nobody goes on from: the last of a run, or before a rollback
    :param clock: DHT time, s
    """

    def __init__(
        self,
        board: ReceiptBoard,
        ledger: CreditLedger,
        account_of: AccountOf | None = None,
        username_of: Callable[[PeerID], str | None] = lambda peer: None,
        is_monitor: Callable[[PeerID], bool] = lambda peer: False,
        known_peers: Callable[[], Iterable[PeerID]] = lambda: (),
        *,
        max_samples: float,
        settle_after: float = 45.0,
        give_up_after: float = 300.0,
        clock: Callable[[], float] = get_dht_time,
    ):
        self._board, self.ledger, self._clock = board, ledger, clock
        self._account_of, self._username_of, self._is_monitor = account_of, username_of, is_monitor
        self._known_peers, self._max_samples = known_peers, max_samples
        self._settle_after, self._give_up_after = settle_after, give_up_after
        self._receipts: dict[bytes, Receipt] = {}  # by their bytes
        self._owners, self._names = ledger.machines(), {}
        self._has_looked = False

    def collect(self, epoch: int) -> Collected:
        """Enter what is settled by now. :param epoch: where the swarm is, as the monitor believes it"""
        now = self._clock()
        self._fetch(epoch, now)
        self._learn()
        collected = Collected()
        findings = collected.findings
        steps = steps_of(
            self._receipts.values(), self._owners.get, self._is_monitor, findings, max_samples=self._max_samples
        )
        for step, following in pairwise([*line_of(steps, findings), None]):
            if self._is_due(step, following, now):
                credits = credit_of_step(step, self._owners.get, findings)
                if self.ledger.enter(step, credits, self._owners):
                    collected.steps.append(step)
                    collected.samples += sum(c.samples for c in credits.values() if not c.provisional)
                    collected.provisional += sum(c.samples for c in credits.values() if c.provisional)
        return collected

    def _is_due(self, step: Step, following: Step | None, now: float) -> bool:
        goes_on = following is not None and following.before in step.who_held_after()
        return now - step.time >= (self._settle_after if goes_on else self._give_up_after)

    def _fetch(self, epoch: int, now: float) -> None:
        """Receipts of epochs of which nothing is entered yet, and of those that came again after a restart."""
        oldest = now - self._board.lifetime
        entered = {e for e in self.ledger.epochs_since(oldest) if e <= epoch - AGAIN}
        for batch in self._batches(epoch):
            found = self._read([e for e in batch if e not in entered], oldest, now)
            if not found and min(batch, default=0) < epoch - LOOK_BACK:
                break
        asked: set[int] = set()
        while missing := {r.epoch - 1 for r in self._without_parent() if r.epoch - 1 in entered} - asked:
            asked |= missing
            self._read(missing, oldest, now)
        self._has_looked = True
        self._receipts = {key: receipt for key, receipt in self._receipts.items() if receipt.time >= oldest}

    def _read(self, epochs: Iterable[int], oldest: float, now: float) -> int:
        """:returns: receipts found"""
        receipts = [receipt for those in self._board.fetch(epochs).values() for receipt in those]
        kept = [receipt for receipt in receipts if oldest <= receipt.time <= now + TOO_EARLY]
        self._receipts |= {repr(receipt).encode(): receipt for receipt in kept}
        return len(receipts)

    def _without_parent(self) -> Iterator[Receipt]:
        """Receipts that go on from what is not known here, as when epochs come again after a restart."""
        known = {receipt.after for receipt in self._receipts.values()} | self.ledger.lineages()
        return (receipt for receipt in self._receipts.values() if receipt.before not in known)

    def _batches(self, epoch: int) -> Iterator[range]:
        farthest = LOOK_BACK if self._has_looked else FARTHEST
        for last in range(epoch + 1, max(-1, epoch - farthest), -BATCH):
            yield range(last, max(-1, last - BATCH), -1)

    def _learn(self) -> None:
        """Whose machines they are, for as long as we are told and from then on."""
        peers = {PeerID(receipt.peer_id) for receipt in self._receipts.values()} | set(self._known_peers())
        if self._account_of is None:  # those that we know only by their digests, too
            named = (receipt.samples for receipt in self._receipts.values())
            machines = {digest: digest for digest in {digest_of(peer) for peer in peers}.union(*named)}
        else:
            accounts = {digest_of(peer): self._account_of(peer) for peer in peers}
            machines = {digest: account for digest, account in accounts.items() if account is not None}
        told = {machines.get(digest_of(peer)): self._username_of(peer) for peer in peers}
        names = {account: name for account, name in told.items() if account is not None and name}
        if not machines.items() <= self._owners.items() or not names.items() <= self._names.items():
            self.ledger.learn(machines, names)
            self._owners |= machines
            self._names |= names
