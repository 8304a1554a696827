"""One peer: a core, its disk, its device and its clock. It may die between any two actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.simulation.clock import LocalClock
from tests.simulation.residuals import Residuals
from volunteer_kit.swarm.sync.ballots import Ballot
from volunteer_kit.swarm.sync.certificates import Goodbye
from volunteer_kit.swarm.sync.contributions import LedgerRecord, Slice
from volunteer_kit.swarm.sync.entries import Entry, Member, RollbackOrder, Verdict
from volunteer_kit.swarm.sync.log import LogItem, items_behind
from volunteer_kit.swarm.sync.messages import (
    Adopt,
    AnswersHeld,
    Apply,
    BallotRecord,
    Ban,
    Compute,
    Computed,
    Durable,
    EndExchange,
    Event,
    ExchangeWithout,
    FetchAnswers,
    FetchSnapshot,
    HeadRecord,
    LeaveRequested,
    Measured,
    Message,
    OpeningRecord,
    PeerSeen,
    Persist,
    Promise,
    Propose,
    Proven,
    Received,
    Repair,
    Send,
    SetTimer,
    Sketched,
    Snapshot,
    SnapshotFailed,
    SnapshotTaken,
    Started,
    StartExchange,
    Tell,
    Timer,
    TimerFired,
    Topic,
    Vote,
)
from volunteer_kit.swarm.sync.phases import Phase

if TYPE_CHECKING:
    from tests.simulation.invariants import Branch
    from tests.simulation.liars import Liar, Witness
    from tests.simulation.simulation import Simulation

MODULUS = (1 << 61) - 1
GENESIS_PARAMETERS = 1
PROOF_SECONDS = 0.3
STATE_EVERY = 8  # epochs between the states that members write for others
MOST_EVENTS = 60_000  # of one seed: peers that talk without an end
SIDES = {"vote": Vote, "promise": Promise, "propose": Propose}  # messages upon which a crash can be planned


class Plan(NamedTuple):
    """What a peer is, from the schedule."""

    member: Member
    clock: LocalClock
    speed: float  # samples per second
    uplink: float  # Mbit/s
    microbatch: int  # samples


class State(NamedTuple):
    """Parameters, and what somebody's damage adds to their sketch."""

    parameters: int
    damage: float


def step_parameters(parameters: int, entry: Entry) -> int:
    """The optimizer's step, as a number: the same answers in the same order give the same parameters."""
    for answer in entry.answers:
        parameters = (parameters * 1_000_003 + int.from_bytes(answer.digest[:7], "big") + answer.cells) % MODULUS
    return (parameters * 1_000_003 + 1) % MODULUS


class Upon(NamedTuple):
    """What befalls a peer at the moment when it says something."""

    deed: str  # crash, pause or leave; "crash before": it is not said any more
    said: str  # vote, promise or propose
    seconds: float  # of a pause
    done: list[bool]  # shared by all peers of one fault: it befalls the first of them


class Disk:
    """What survives kill -9."""

    __slots__ = (
        "ballot", "damage", "goodbye", "head", "held", "ledger", "opening", "parameters", "residuals", "served",
    )  # fmt: skip

    def __init__(self, cells: int):
        self.head: HeadRecord | None = None
        self.ballot: BallotRecord | None = None
        self.opening: OpeningRecord | None = None
        self.ledger: LedgerRecord | None = None
        self.goodbye: Goodbye | None = None
        self.held: set[bytes] = set()  # digests of answers
        self.parameters: dict[bytes, int] = {}  # of the last heads, by lineage
        self.residuals = Residuals(cells)
        self.damage = 0.0  # what its sketch is off, since its parameters differ from what the others have
        self.served: tuple[Snapshot, int] | None = None  # its last state on the grid, with the parameters


class Process:
    """Executes a core's actions in their order.

    :param name: a peer id; a peer that left and comes back has another one
    """

    def __init__(
        self, sim: Simulation, plan: Plan, genesis: LogItem | None, liar: Liar | None, witness: Witness | None
    ):
        self.sim = sim
        self.plan = plan
        self.name = plan.member.peer
        self.genesis = genesis
        self.liar = liar
        self.witness = witness
        self.disk = Disk(sim.cells)
        self.accepted: dict[tuple[bytes, Ballot, bytes], Entry] = {}  # every vote that it ever wrote
        self.core: Any = None
        self.up = False
        self.left = False
        self.leaving_since: float | None = None  # s
        self.paused = False
        self.life = 0  # counts restarts
        self.computed = 0  # sample-cells that the core was told
        self.out_of_sight = 0  # sample-cells committed by entries that no longer count, in a log that forgot them
        self.busy_seconds = 0.0  # that its device computed
        self._up_seconds = 0.0
        self._started = 0.0  # s
        self.crash_after: int | None = None  # actions
        self.upon: list[Upon] = []  # what is planned for the moment when it says something
        self.phase: Phase | None = None
        self.phase_since = 0.0  # s of true time
        self._entered = 0.0  # s of the core's clock
        self.banned: set[str] = set()
        self._executing = False
        self._events: deque[Event] = deque()
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] = []  # what comes while it is paused
        self._timers: dict[Timer, int] = {}
        self._timer_count = 0
        self.held: set[bytes] = set()  # digests of answers in memory
        self._judged: tuple[bytes, frozenset[Slice]] = (b"", frozenset())  # at a head, to be decoded
        self.lineage = b""
        self.parameters = 0
        self.received: dict[bytes, State] = {}  # parameters that came with snapshots, by lineage
        self.computing = False
        self._busy = False
        self._own: tuple[bytes, int] | None = None  # the last step that was written, and what it settled of ours
        self._dirty = False  # the ledger may have changed
        self._execute: dict[type, Callable[[Any], None]] = {
            Persist: self._persist,
            Send: self._send,
            SetTimer: self._set_timer,
            StartExchange: self._start_exchange,
            EndExchange: self._end_exchange,
            ExchangeWithout: self._exchange_without,
            FetchAnswers: self._fetch_answers,
            FetchSnapshot: self._fetch_snapshot,
            Apply: self._apply,
            Adopt: self._adopt,
            Repair: self._repair,
            Compute: self._compute,
            Ban: self._ban,
            Tell: self._tell,
        }

    # --- life ---

    @property
    def ballot(self) -> BallotRecord | None:
        """As it is on the disk."""
        return self.disk.ballot

    @property
    def held_on_disk(self) -> set[bytes]:
        """Digests of the answers whose bytes survive."""
        return self.disk.held

    @property
    def lineage_on_disk(self) -> bytes:
        """Of the head that was written last."""
        assert self.disk.head is not None
        return self.disk.head.snapshot.head.lineage

    @property
    def now(self) -> float:
        """What its own clock shows."""
        return self.plan.clock.read(self.sim.clock.now)

    @property
    def active(self) -> bool:
        """Whether it runs and is not paused."""
        return self.up and not self.paused

    def start(self) -> None:
        """Start the process, from what its disk has."""
        disk, sim = self.disk, self.sim
        self.life += 1
        self._started = sim.clock.now
        self.leaving_since = None
        self.up, self.paused = True, False
        self.crash_after = None
        self.upon.clear()
        self.phase = None
        self.held = set(disk.held)
        self.received = {}
        self.computing = self._busy = False
        self._own = None
        self._timers = {}
        self._waiting.clear()
        if disk.head is not None:
            self.lineage = self.lineage_on_disk
            self.parameters = disk.parameters[self.lineage]
        elif self.genesis is not None:
            self.lineage, self.parameters = self.genesis.head.lineage, GENESIS_PARAMETERS
            disk.parameters[self.lineage] = GENESIS_PARAMETERS
        else:
            self.lineage = b""
        self.computed = disk.ledger.computed if disk.ledger is not None else 0
        durable = Durable(disk.head, disk.ballot, disk.opening, disk.ledger, frozenset(disk.held))
        genesis = self.genesis if disk.head is None else None
        if sim.history is not None:
            sim.history.add(sim.clock.now, self.name, "starts" if self.life == 1 else "starts again")
        self.core = sim.make_core(sim.config(self), self.plan.member, durable, genesis, self.now)
        self.handle(Measured(self.plan.uplink))
        self.handle(Started())
        self.see(self.plan.member, self.plan.speed)

    def crash(self) -> None:
        """Die now. What was not written is gone."""
        if not self.up:
            return
        if self.sim.history is not None:
            self.sim.history.add(self.sim.clock.now, self.name, "dies")
        self._stop()
        self.sim.crashed(self)

    def up_seconds(self) -> float:
        """How long it has run, in all its lives."""
        return self._up_seconds + (self.sim.clock.now - self._started if self.up else 0.0)

    def _stop(self) -> None:
        self._up_seconds = self.up_seconds()
        self.up = False
        self._events.clear()
        self._waiting.clear()
        self.sim.network.disconnect(self.name)
        self.sim.exchanges.died(self.name)

    def leave(self) -> None:
        """The volunteer wants to go; the wish is gone if the process dies before its goodbye."""
        self.leaving_since = self.sim.clock.now
        self.handle(LeaveRequested())

    def stop_for_good(self) -> None:
        """The process ends after its goodbye."""
        if self.up:
            self._stop()
        self.left = True

    def pause(self) -> None:
        """Nothing runs, and messages wait."""
        self.paused = True

    def _befallen(self, said: type) -> bool:
        """Do what was planned for the moment when it says this.

        :returns: whether it dies before it is said
        """
        for plan in list(self.upon):
            if plan.done[0]:
                self.upon.remove(plan)
            elif said is SIDES[plan.said]:
                plan.done[0] = True
                if plan.deed == "pause":  # what is sent from here on leaves when it runs again
                    self.sim.network.stalled[self.name] = self.sim.clock.now + plan.seconds
                    self.pause()
                    self.sim.clock.after(plan.seconds, self.resume)
                elif plan.deed == "leave":
                    self.sim.clock.after(0.0, self.leave)
                elif plan.deed == "crash before":
                    self.crash()
                    return True
                else:
                    self.crash_after = 0
        return False

    def resume(self) -> None:
        """Everything that waited comes at once."""
        if not self.paused:
            return
        self.paused = False
        self.phase_since = self.sim.clock.now
        if self.leaving_since is not None:
            self.leaving_since = self.sim.clock.now
        waiting, self._waiting = self._waiting, []
        for call, arguments in waiting:
            call(*arguments)

    # --- events ---

    def receive(self, sender: str, message: Message) -> None:
        """A message arrives."""
        if not self.up or sender in self.banned:
            return
        if self.paused:
            self._waiting.append((self.receive, (sender, message)))
            return
        if self.liar is not None and self.core.head is not None:
            self.liar.hear(self, sender, message)
        if self.witness is not None:
            for verdict in self.witness.see(sender, message):
                self.prove(verdict)
        self.handle(Received(sender, message))

    def prove(self, verdict: Verdict) -> None:
        """A proof is found; checking it takes a moment, in which the core goes on."""
        self.sim.clock.after(PROOF_SECONDS, self.handle, Proven(verdict))

    def see(self, member: Member, speed: float) -> None:
        """Discovery finds a peer."""
        self.handle(PeerSeen(member, speed))

    def handle(self, event: Event) -> None:
        """Hand the core an event, and do what it says."""
        if not self.up:
            return
        if self.paused:
            self._waiting.append((self.handle, (event,)))
            return
        self._events.append(event)
        if self._executing:
            return
        self._executing = True
        try:
            while self._events and self.up:
                self._one(self._events.popleft())
        finally:
            self._executing = False

    def _one(self, event: Event) -> None:
        sim = self.sim
        now = sim.clock.now
        sim.events += 1
        if sim.events > MOST_EVENTS:
            raise sim.invariants.violated("I7", self.name, f"{MOST_EVENTS} events, the last one {type(event).__name__}")
        checks = sim.invariants
        checks.now = now
        core = self.core
        history = sim.history
        if history is not None:
            history.event(now, self.name, event)
        if type(event) is Computed and core.phase is not Phase.LEAVING:  # a leaver has closed its books
            self.computed += event.samples * sim.cells
            self._dirty = True
        life = self.life
        execute = self._execute
        try:
            actions = core.handle(event, self.plan.clock.read(now))
        except Exception as error:
            raise sim.failed(self.name, event, error) from error
        if self.liar is not None:
            actions = self.liar.change(self, actions)
        for action in actions:
            if self.crash_after is not None:
                self.crash_after -= 1
                if self.crash_after < 0:
                    self.crash()
                    return
            if history is not None:
                history.action(now, self.name, action)
            execute[type(action)](action)
            if not self.up or self.life != life:
                return
        if core.phase_entered != self._entered:
            self._entered, self.phase_since = core.phase_entered, now
        if core.phase is not self.phase:
            if history is not None:
                history.add(now, self.name, f"is {core.phase.value}")
            self.phase, self.phase_since = core.phase, now
            sim.entered(self, core.phase)
        if self._dirty and self.liar is None:
            self._dirty = False
            checks.ledger(self.name, core.ledger, self.computed)
        head = core.head
        if head is not None and head.lineage != self.lineage and self.liar is None:
            raise checks.violated("I5", self.name, "its head is not where its parameters are")

    # --- actions: the disk ---

    def _persist(self, action: Persist) -> None:
        disk = self.disk
        ledger_before = disk.ledger
        head_changed = False
        for record in action.records:
            if isinstance(record, BallotRecord):
                disk.ballot = record
                if record.accepted is not None and record.accepted_at is not None:
                    digests = [answer.digest for answer in record.accepted.answers]
                    disk.held.update(digest for digest in digests if digest in self.held)
                    self.accepted[record.slot, record.accepted_at, record.accepted.lineage] = record.accepted
            elif isinstance(record, HeadRecord):
                self._write_head(record)
                head_changed = True
            elif isinstance(record, LedgerRecord):
                disk.ledger = record
                self._dirty = True
            elif isinstance(record, OpeningRecord):
                disk.opening = record
            else:
                disk.goodbye = record
        if self.liar is not None:
            return
        if disk.ledger is not None and disk.head is not None:
            self.sim.invariants.recorded(self, ledger_before, disk.ledger)
        if head_changed:
            assert disk.head is not None
            snapshot = disk.head.snapshot
            branch = self.sim.invariants.branches[snapshot.head.lineage]
            parameters = None if disk.damage else disk.parameters[snapshot.head.lineage]
            self.sim.invariants.at_head(self.name, branch, parameters, snapshot.accounts)

    def _write_head(self, record: HeadRecord) -> None:
        disk, items = self.disk, record.snapshot.items
        checks, honest = self.sim.invariants, self.liar is None
        last = items[-1]
        lineage = last.head.lineage
        before = disk.head.snapshot.head.lineage if disk.head is not None else None
        new: list[LogItem] = []  # newest first
        known: int | None = None
        base = b""
        for item in reversed(items):
            base = item.head.lineage
            known = disk.parameters.get(base)
            if known is None and base in self.received:
                known = self.received[base].parameters
            if known is not None:
                break
            if isinstance(item.step, RollbackOrder):
                known = self.sim.checkpoint(item.step)
                new.append(item)
                break
            new.append(item)
        if known is None:
            raise checks.violated("I5", self.name, f"wrote the head {lineage.hex()[:6]} without having its parameters")
        new.reverse()
        if honest and before != lineage:
            for item in items if base != before else new:
                if item.head.lineage not in checks.branches or item in new:
                    checks.step(self.name, item)
        parameters = known
        for item in new:
            if isinstance(item.step, Entry):
                missing = [a.digest for a in item.step.answers if a.digest not in self.held]
                if missing:
                    raise checks.violated("I6", self.name, f"wrote a head and lacks {len(missing)} of its answers")
                disk.held.update(answer.digest for answer in item.step.answers)
                parameters = step_parameters(parameters, item.step)
            disk.parameters[item.head.lineage] = parameters
        disk.parameters[lineage] = parameters
        if before is not None and before != lineage and honest:
            self._settle(before, new, base)
        disk.head = record
        if last.head.epoch % STATE_EVERY == 0:
            disk.served = record.snapshot, parameters
        if len(disk.parameters) > 12:
            for old in list(disk.parameters)[:-6]:
                if old != lineage:
                    del disk.parameters[old]

    def _settle(self, before: bytes, new: list[LogItem], base: bytes) -> None:
        """Residuals of cells that entered count now.

        What a branch that is left behind had committed, and its log has forgotten, is out of its ledger's sight.
        """
        branches, disk = self.sim.invariants.branches, self.disk
        assert disk.head is not None
        old: Branch | None = branches.get(before)
        if old is not None and base != before:
            now = branches[new[-1].head.lineage if new else base]
            in_log = {item.head.lineage for item in disk.head.snapshot.items}
            while old.parent is not None and not old.is_on(now):
                if old.lineage not in in_log:
                    self.out_of_sight += old.amounts.get(self.name, 0) - old.parent.amounts.get(self.name, 0)
                old = old.parent
        residuals = disk.residuals
        for item in new:
            if isinstance(item.step, Entry):
                settled, why = residuals.settle(item.step.fingerprint, item.step.answers, self.name)
                if why is not None and not self.sim.liars:
                    raise self.sim.invariants.violated("I4", self.name, why)
                self._own = (item.head.lineage, settled)
        residuals.drop_rounds()
        fault = residuals.fault()
        if fault is not None:
            raise self.sim.invariants.violated("I4", self.name, fault)

    # --- actions: time and messages ---

    def _set_timer(self, action: SetTimer) -> None:
        self._timer_count = count = self._timer_count + 1
        self._timers[action.timer] = count
        if action.at is not None:
            self.sim.clock.at(self.plan.clock.when(action.at), self._fire, action.timer, count)

    def _fire(self, timer: Timer, count: int) -> None:
        if self.up and self._timers.get(timer) == count:
            if self.paused:
                self._waiting.append((self._fire, (timer, count)))
            else:
                self.handle(TimerFired(timer))

    def _send(self, action: Send) -> None:
        sim = self.sim
        message = action.message
        if action.to in self.banned:
            return
        if self.upon and self._befallen(type(message.body)):
            return
        new = sim.signatures.sign(self.name, message)
        if new:
            sim.invariants.said(self, new)
        sim.network.send(self.name, action.to, message)

    # --- actions: rounds ---

    def _start_exchange(self, action: StartExchange) -> None:
        if self.liar is None:
            self.disk.residuals.send(action.round.fingerprint, action.shares)
        self.sim.exchanges.start(self, action)
        self.phase_since = self.sim.clock.now  # it may come from one round into the next within one event
        self._dirty = True

    def _exchange_without(self, action: ExchangeWithout) -> None:
        self.sim.exchanges.without(self, action.fingerprint, action.silent)

    def _end_exchange(self, action: EndExchange) -> None:
        self.sim.exchanges.end(self, action.fingerprint)

    def fetched(self, life: int, digests: frozenset[bytes]) -> None:
        """Answers arrive that were asked for."""
        if self.life == life and self.up:
            self.held.update(digests)
            self.has(digests)

    def has(self, digests: frozenset[bytes]) -> None:
        """They are here, and those that were to be judged fit."""
        head, judged = self._judged
        self.handle(AnswersHeld(digests, frozenset(each for each in judged if each.digest in digests), head))

    def _fetch_answers(self, action: FetchAnswers) -> None:
        if action.judged and self.core.head is not None:
            here, judged = self._judged
            before = judged if here == self.core.head.lineage else frozenset()
            self._judged = (self.core.head.lineage, before | {answer.slice for answer in action.judged})
        self.sim.transfers.answers(self, action.digests, action.sources)

    # --- actions: state ---

    def _apply(self, action: Apply) -> None:
        item = action.item
        checks = self.sim.invariants
        if self.liar is None:
            if self.disk.head is None or self.lineage_on_disk != item.head.lineage:
                raise checks.violated("I4", self.name, "took a step that it had not written with its accounts")
            step = item.step
            if not isinstance(step, RollbackOrder) and (step is None or step.parent != self.lineage):
                raise checks.violated("I2", self.name, "took a step that does not follow its parameters")
            if self._own is not None and self._own[0] == item.head.lineage:
                self._check_own(action)
        if isinstance(item.step, RollbackOrder):
            self.disk.damage = 0.0
        self.lineage = item.head.lineage
        self.parameters = self.disk.parameters[self.lineage]
        self._dirty = True
        self.sim.applied(self, item)
        self._sketch()

    def _check_own(self, action: Apply) -> None:
        assert self._own is not None
        told = sum(cells.bit_count() for _, cells in action.own)
        if told != self._own[1]:
            raise self.sim.invariants.violated(
                "I4", self.name, f"settled {told} cells of its contributions where {self._own[1]} entered"
            )

    def _adopt(self, action: Adopt) -> None:
        head = action.snapshot.head
        if self.disk.head is None or self.lineage_on_disk != head.lineage:
            raise self.sim.invariants.violated("I4", self.name, "adopted a state that it had not written")
        taken = self.received.get(head.lineage)
        self.disk.damage = taken.damage if taken is not None else 0.0
        self.lineage = head.lineage
        self.parameters = self.disk.parameters[self.lineage]
        self._dirty = True
        self.sim.adopted(self)
        self._sketch()

    def _repair(self, action: Repair) -> None:
        """The parameters of a snapshot, and the steps behind it once more."""
        taken = self.received.get(action.snapshot.head.lineage)
        missing = [
            answer.digest
            for item in action.items
            if isinstance(item.step, Entry)
            for answer in item.step.answers
            if answer.digest not in self.held
        ]
        if taken is None or missing:
            raise self.sim.invariants.violated("I6", self.name, "repairs its parameters without what that takes")
        self.disk.damage = taken.damage
        self._sketch()

    def _sketch(self) -> None:
        self._events.append(Sketched(self.lineage, 100 + self.parameters % 1000 / 10 + self.disk.damage))

    def damage(self, by: float) -> None:
        """A bit flips in its parameters."""
        if self.up and self.lineage:
            self.disk.damage = by
            self.handle(Sketched(self.lineage, 100 + self.parameters % 1000 / 10 + by))

    def snapshot(self, fork: bytes) -> tuple[Snapshot, State] | None:
        """The state that it serves: its last one on the grid, or its head if no steps lead from there to it or it is
        not behind the fork; None: nothing, or witnesses contradict it.
        """
        disk = self.disk
        if disk.head is None or self.phase in (Phase.JOINING, Phase.LEAVING):
            return None
        if disk.damage and self.sim.contradicted(self):
            return None
        if disk.served is not None:
            snapshot, parameters = disk.served
            items = disk.head.snapshot.items
            kept = {item.head.lineage for item in items}
            behind = items_behind(items, fork)
            fits = behind is None or snapshot.head.lineage in {item.head.lineage for item in behind}
            if fits and items_behind(items, snapshot.head.lineage) is not None:
                # as the log is now: it may have forgotten some of the state's own items
                inside = tuple(item for item in snapshot.items if item.head.lineage in kept)
                return Snapshot(inside, snapshot.accounts), State(parameters, disk.damage)
        return disk.head.snapshot, State(disk.parameters[self.lineage_on_disk], disk.damage)

    def _fetch_snapshot(self, action: FetchSnapshot) -> None:
        self.sim.transfers.snapshot(self, action.source, action.fork)

    def snapshot_came(self, life: int, source: str, found: tuple[Snapshot, State] | None) -> None:
        """The end of a transfer."""
        if self.life != life or not self.up:
            return
        if found is None:
            self.handle(SnapshotFailed(source))
            return
        snapshot, state = found
        self.received[snapshot.head.lineage] = state
        self.handle(SnapshotTaken(snapshot))

    # --- actions: the device and people ---

    def _compute(self, action: Compute) -> None:
        self.computing = action.on
        if action.on and not self._busy:
            self._microbatch()

    def _microbatch(self) -> None:
        plan = self.plan
        if not self.lineage or plan.speed <= 0:
            return
        self._busy = True
        samples = plan.microbatch if self.liar is None else self.liar.samples(plan.microbatch)
        self.sim.clock.after(plan.microbatch / plan.speed, self._computed, self.life, samples, self.lineage)

    def _computed(self, life: int, samples: int, lineage: bytes) -> None:
        if life != self.life or not self.up:
            return
        if self.paused:
            self._waiting.append((self._computed, (life, samples, lineage)))
            return
        self._busy = False
        self.busy_seconds += self.plan.microbatch / self.plan.speed
        self.handle(Computed(samples, lineage))
        if self.up and self.life == life and self.computing and not self._busy:
            self._microbatch()

    def _ban(self, action: Ban) -> None:
        verdict: Verdict = action.verdict
        if verdict.peer not in self.sim.liars:
            raise self.sim.invariants.violated("I9", self.name, f"bans {verdict.peer}, which is honest")
        self.banned.add(verdict.peer)

    def _tell(self, action: Tell) -> None:
        self.sim.told[action.topic] = self.sim.told.get(action.topic, 0) + 1
        if action.topic is Topic.LEFT:
            self.sim.clock.after(0.0, self.stop_for_good)
