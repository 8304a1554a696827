"""A few real synchronization cores with hand-made delivery: no process, no network, and no clock but the test's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from volunteer_kit.swarm.sync.ballots import leader_order
from volunteer_kit.swarm.sync.certificates import Goodbye
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Answer, Share
from volunteer_kit.swarm.sync.core import SyncCore
from volunteer_kit.swarm.sync.entries import Head, Member
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import (
    Action,
    Adopt,
    AnswersHeld,
    Apply,
    Body,
    Computed,
    EndExchange,
    Event,
    ExchangeEnded,
    FetchAnswers,
    FetchSnapshot,
    LeaveRequested,
    Message,
    PeerSeen,
    Received,
    Repair,
    Round,
    Send,
    SetTimer,
    Sketched,
    Snapshot,
    SnapshotTaken,
    Started,
    StartExchange,
    Tell,
    Timer,
    TimerFired,
    Topic,
)

Passes = Callable[[str, str, Body], bool]  # sender, receiver, body
CELLS: Final = 4
ALL_CELLS: Final = (1 << CELLS) - 1
SPEED: Final = 10.0  # samples/s that each device is believed to do
MOST_EVENTS: Final = 100_000  # in one delivery; more is a loop


def everything(sender: str, to: str, body: Body) -> bool:
    """Every message passes."""
    return True


def among(peers: Iterable[str]) -> Passes:
    """Messages pass among these peers only."""
    some = frozenset(peers)
    return lambda sender, to, body: {sender, to} <= some


def without(*kinds: type) -> Passes:
    """Every message passes but these kinds."""
    return lambda sender, to, body: not isinstance(body, kinds)


class Swarm:
    """Cores with the same genesis. A test delivers what they send, ends their exchanges, and lets seconds pass.

    :param names: a letter for each founder
    :param clients: founders that nobody can call
    """

    def __init__(self, names: str = "abcde", *, target: int = 8, clients: str = "", **settings: Any):
        self.config = SyncConfig(target_batch_size=target, cells=CELLS, **settings)
        self.members = tuple(Member(name, name, name not in clients) for name in names)
        self.genesis = LogItem.genesis(self.members)
        self.now = 0.0
        self.cores: dict[str, SyncCore] = {}
        self.queue: list[tuple[str, str, Message | Event]] = []
        self.stopped: list[tuple[str, str, Message]] = []  # by `passes`
        self.actions: list[tuple[str, Action]] = []
        self.rounds: dict[bytes, tuple[Round, dict[str, tuple[Share, ...]]]] = {}  # with what each member sends
        self.passes: Passes = everything
        self.had: Callable[[bytes], tuple[Answer, ...]] = lambda fingerprint: ()  # when an exchange was ended early
        self.ends_exchanges = True  # of each round, in the second in which it begins
        self.serves_answers = True
        self.snapshot_seconds: float | None = 0.0  # None: nobody serves one
        self.damaged: set[str] = set()  # their sketches are wrong until they are repaired
        self._ended: set[bytes] = set()
        self._snapshots: list[tuple[float, str, Snapshot]] = []
        self._timers: dict[str, dict[Timer, float | None]] = {}
        for member in self.members:
            self.add(member, self.genesis)
        self.discover()

    def add(self, member: Member, genesis: LogItem | None = None) -> SyncCore:
        """A process starts; without a genesis it is a newcomer."""
        self.cores[member.peer] = SyncCore(self.config, member, None, genesis, self.now)
        self._timers[member.peer] = {}
        self.happen(member.peer, Started())
        return self.cores[member.peer]

    def discover(self) -> None:
        """Everybody learns of everybody."""
        for core in list(self.cores.values()):
            for peer in self.cores:
                self.happen(peer, PeerSeen(core.me, SPEED))

    def __getitem__(self, peer: str) -> SyncCore:
        return self.cores[peer]

    # --- to look at ---

    @property
    def order(self) -> tuple[str, ...]:
        """Peers in the order of their turns in the founders' slot."""
        return leader_order(self.genesis.head.seed, self.genesis.membership.public)

    @property
    def epochs(self) -> int:
        """Epochs that every peer has."""
        return min(core.head.epoch for core in self.cores.values() if core.head is not None)

    def last_round(self) -> Round:
        """The round that began last."""
        return next(reversed(self.rounds.values()))[0]

    def done(self, peer: str, kind: type) -> list[Any]:
        """Actions of this kind that this peer took."""
        return [action for who, action in self.actions if who == peer and isinstance(action, kind)]

    def said(self, peer: str, kind: type) -> list[Any]:
        """Bodies of this kind that this peer sent."""
        return [each.message.body for each in self.done(peer, Send) if isinstance(each.message.body, kind)]

    def told(self, peer: str, topic: Topic) -> list[str]:
        """News of this topic on this peer."""
        return [each.about for each in self.done(peer, Tell) if each.topic is topic]

    def applied(self, peer: str) -> list[LogItem]:
        """Steps that this peer took."""
        return [each.item for each in self.done(peer, Apply)]

    def snapshot(self, peer: str) -> Snapshot:
        """A snapshot of this peer."""
        log = self.cores[peer].log
        assert log is not None
        return Snapshot(log.items, self.cores[peer].accounts)

    # --- events ---

    def happen(self, peer: str, event: Event) -> list[Action]:
        """An event on one peer; what it sends waits in the queue."""
        actions = self.cores[peer].handle(event, self.now)
        for action in actions:
            self.actions.append((peer, action))
            self._do(peer, action)
        return actions

    def _do(self, peer: str, action: Action) -> None:
        if isinstance(action, Send):
            self.queue.append((peer, action.to, action.message))
        elif isinstance(action, SetTimer):
            self._timers[peer][action.timer] = action.at
        elif isinstance(action, StartExchange):
            self.rounds.setdefault(action.round.fingerprint, (action.round, {}))[1][peer] = action.shares
        elif isinstance(action, EndExchange):
            self.queue.append((peer, peer, ExchangeEnded(action.fingerprint, self.had(action.fingerprint))))
        elif isinstance(action, FetchAnswers) and self.serves_answers:
            fitting = frozenset(answer.slice for answer in action.judged if answer.digest in action.digests)
            self.queue.append((peer, peer, AnswersHeld(action.digests, fitting, self.cores[peer].head.lineage)))
        elif isinstance(action, FetchSnapshot) and action.source in self.cores and self.snapshot_seconds is not None:
            self._snapshots.append((self.now + self.snapshot_seconds, peer, self.snapshot(action.source)))
        elif isinstance(action, (Adopt, Repair)):
            self.damaged.discard(peer)

    def say(self, sender: str, to: str, body: Body, head: Head | None = None) -> None:
        """A message arrives; if nothing else is said, its sender is where the receiver is."""
        self.happen(to, Received(sender, Message(head or self.cores[to].head, body)))

    def everybody_hears(self, sender: str, body: Body) -> None:
        """A message arrives at everybody."""
        for peer in list(self.cores):
            self.say(sender, peer, body)

    def deliver(self, passes: Passes | None = None) -> None:
        """Deliver what is in the queue, and what follows from it."""
        may_pass = passes or self.passes
        for _ in range(MOST_EVENTS):
            if not self.queue:
                return
            sender, to, what = self.queue.pop(0)
            if not isinstance(what, Message):
                self.happen(to, what)
            elif to in self.cores and may_pass(sender, to, what.body):
                self.happen(to, Received(sender, what))
            else:
                self.stopped.append((sender, to, what))
        raise AssertionError("the peers talk for ever")

    def take_stopped(self, kind: type, to: str | None = None) -> list[tuple[str, str, Message]]:
        """Messages of this kind that were stopped, to be delivered late."""
        return [each for each in self.stopped if isinstance(each[2].body, kind) and to in (None, each[1])]

    def deliver_late(self, messages: Iterable[tuple[str, str, Message]]) -> None:
        """Messages arrive that were stopped before."""
        for sender, to, message in messages:
            self.happen(to, Received(sender, message))

    def leave(self, peers: Iterable[str]) -> list[Goodbye]:
        """These peers leave, hearing nobody while their rounds end; return what they say."""
        for peer in peers:
            self.happen(peer, LeaveRequested())
        self.passes = lambda sender, to, body: False
        self.wait(60, peers)
        return [self.said(peer, Goodbye)[0] for peer in peers]

    def compute(self, samples: int, peers: Iterable[str] | None = None) -> None:
        """Each device that may compute brings so many samples."""
        for peer in self.cores if peers is None else peers:
            head = self.cores[peer].head
            if self.cores[peer].computes and head is not None:
                self.happen(peer, Computed(samples, head.lineage))

    def sketch(self) -> None:
        """Each process sketches its parameters."""
        for peer, core in self.cores.items():
            if core.head is not None:
                self.happen(peer, Sketched(core.head.lineage, 7.0 if peer in self.damaged else 1.0))

    def answers(self, plan: Round) -> tuple[Answer, ...]:
        """The answers of honest reducers to a round's parts."""
        shares = [share for sent in self.rounds[plan.fingerprint][1].values() for share in sent]
        found = []
        for reducer, cells in plan.slices:
            inside = tuple(sorted(each._replace(cells=each.cells & cells) for each in shares if each.cells & cells))
            if inside:
                digest = hashlib.sha256(repr((plan.fingerprint, inside)).encode()).digest()
                found.append(Answer(cells, reducer, digest, inside))
        return tuple(found)

    def end_exchange(
        self, plan: Round, answers: tuple[Answer, ...] | None = None, peers: Iterable[str] | None = None
    ) -> None:
        """Its members have these answers, all if nothing else is said."""
        self._ended.add(plan.fingerprint)
        here = self.answers(plan) if answers is None else answers
        for peer in list(self.rounds[plan.fingerprint][1]) if peers is None else peers:
            self.happen(peer, ExchangeEnded(plan.fingerprint, here))

    def wait(self, seconds: int, peers: Iterable[str] | None = None) -> None:
        """Seconds pass; timers fire on these peers, all if nothing else is said."""
        awake = list(self.cores if peers is None else peers)
        for _ in range(seconds):
            self.now += 1.0
            for peer in awake:
                for timer in Timer:
                    at = self._timers[peer].get(timer)
                    if at is not None and at <= self.now:
                        self._timers[peer][timer] = None
                        self.happen(peer, TimerFired(timer))
            arrived = [(peer, snapshot) for due, peer, snapshot in self._snapshots if due <= self.now]
            self._snapshots = [each for each in self._snapshots if each[0] > self.now]
            for peer, snapshot in arrived:
                self.happen(peer, SnapshotTaken(snapshot))
            self.deliver()
            if self.ends_exchanges:
                for plan, _ in list(self.rounds.values()):
                    if plan.fingerprint not in self._ended:
                        self.end_exchange(plan)
                self.deliver()

    def train(
        self,
        seconds: int,
        samples: int = 1,
        peers: Iterable[str] | None = None,
        attack: Callable[[], None] | None = None,
    ) -> None:
        """Devices compute, seconds pass, and an attacker may do something in each of them."""
        awake = list(self.cores if peers is None else peers)
        for _ in range(seconds):
            self.compute(samples, awake)
            if attack is not None:
                attack()
            self.wait(1, awake)
