"""One seed, run: builds the peers of a schedule, does its faults at their times, and watches the invariants."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.simulation.clock import Clock, LocalClock
from tests.simulation.exchange import Exchanges, Transfers
from tests.simulation.history import History
from tests.simulation.invariants import Invariants, Violation
from tests.simulation.liars import Liar, Witness, make_liar
from tests.simulation.liveness import Liveness
from tests.simulation.network import CALM, Line, Network, Trouble
from tests.simulation.process import GENESIS_PARAMETERS, Plan, Process, Upon
from tests.simulation.schedule import Fault, PeerPlan, Schedule
from tests.simulation.signatures import Signatures
from volunteer_kit.swarm.sync.entries import Member, RollbackOrder, Verdict
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import Event, Message, Order
from volunteer_kit.swarm.sync.phases import Phase

MONITOR = "monitor"
SEEN_WITHIN = 2.0  # s until discovery finds a peer
SEEN_AGAIN = 5.0  # s until it tries again through a cut
CHECK_EVERY = 4.0  # s between two looks at liveness

MakeCore = Callable[..., Any]


class Outcome(NamedTuple):
    """What a seed without a violation shows."""

    commits: int
    samples: float  # in entries, per cell
    computed: float  # samples
    seconds: float  # virtual
    events: int
    idle: float  # share of the devices' time that they did not compute


def real_core(*arguments: Any) -> Any:
    """The core of the package."""
    from volunteer_kit.swarm.sync.core import SyncCore

    return SyncCore(*arguments)


def real_config(settings: dict[str, Any]) -> Any:
    """Its settings."""
    from volunteer_kit.swarm.sync.config import SyncConfig

    return SyncConfig(**settings)


class Simulation:
    """All peers of a schedule, in one process and in virtual time.

    :param make_core: called as `SyncCore` is
    :param make_config: called with the schedule's settings
    :param history: where everything that happens is written down; None: nowhere
    """

    def __init__(
        self,
        schedule: Schedule,
        make_core: MakeCore = real_core,
        make_config: Callable[[dict[str, Any]], Any] = real_config,
        history: History | None = None,
    ):
        self.schedule = schedule
        self.make_core = make_core
        self.history = history
        self.cells: int = schedule.settings["cells"]
        self.clock = Clock()
        self.random = random.Random(f"{schedule.mode}-{schedule.seed}-run")
        self.network = Network(self.clock, self.random, self._deliver, self._crash_now)
        self.signatures = Signatures()
        self.liars = frozenset(peer.member.peer for peer in schedule.peers if peer.liar)
        speeds: dict[str, float] = {}
        for peer in schedule.peers:
            speeds[peer.member.account] = speeds.get(peer.member.account, 0.0) + peer.speed
        self.invariants = Invariants(self.cells, self.liars, speeds)
        self.exchanges = Exchanges(self, schedule.size)
        self.transfers = Transfers(self, schedule.size / self.cells, 3 * schedule.size)
        self.processes: dict[str, Process] = {}
        self.plans = {peer.member.peer: peer for peer in schedule.peers}
        self.told: dict[Any, int] = {}
        self.events = 0
        self.orders: list[RollbackOrder] = []
        self.settings = make_config(schedule.settings)
        self.liveness = Liveness(self)
        self._make_config = make_config
        self._down: dict[str, int] = {}  # peer -> life in which it died and is to come back
        self._troubles: list[Trouble] = []
        self._names = 0
        self._downtime: dict[str, float] = {}
        founders = [peer.member for peer in schedule.peers if peer.founder]
        self._genesis = LogItem.genesis(founders)
        self.invariants.genesis(self._genesis)
        self.invariants.branches[self._genesis.head.lineage].parameters = GENESIS_PARAMETERS

    # --- what processes need ---

    def config(self, process: Process) -> Any:
        """A core's settings; some liars have their own."""
        liar = process.liar
        if liar is None or not liar.settings:
            return self.settings
        return self._make_config({**self.schedule.settings, **liar.settings})

    def failed(self, peer: str, event: Event, error: Exception) -> Violation:
        """A core raised an error; or a violation passes through."""
        if isinstance(error, Violation):
            return error
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f"{where.tb_frame.f_code.co_name}:{where.tb_lineno}" if where is not None else "?"
        name = type(event).__name__
        return Violation("error", self.clock.now, peer, f"{type(error).__name__} at {name} in {place}: {error}")

    def checkpoint(self, order: RollbackOrder) -> int:
        """The parameters to which a rollback order leads."""
        parameters = self.invariants.branches[order.parent].parameters
        assert parameters is not None
        return parameters

    def crashed(self, process: Process) -> None:
        """A process died; it comes back after a while."""
        self.liveness.disturbed()
        pause = 0.2 + 9.8 * self.random.random() ** (2 if self.schedule.mode == "broad" else 4)
        self._down[process.name] = process.life
        self.clock.after(pause, self._restart, process, process.life)

    def applied(self, process: Process, item: LogItem) -> None:
        """A peer took a step."""
        self.liveness.applied(process, item)

    def adopted(self, process: Process) -> None:
        """A peer replaced its state."""

    def entered(self, process: Process, phase: Phase) -> None:
        """A peer is in another phase."""
        if phase is Phase.LEAVING:
            self.clock.after(1.0, process.stop_for_good)

    def contradicted(self, process: Process) -> bool:
        """Whether somebody at the same head has parameters that are whole, and says so as a witness."""
        return any(
            other.up and other.disk.head is not None and not other.disk.damage
            and other.lineage_on_disk == process.lineage_on_disk
            for other in self.processes.values()
            if other.liar is None
        )  # fmt: skip

    def prove(self, verdict: Verdict) -> None:
        """There is a proof against somebody."""
        self.signatures.sign_statement(("proof", *verdict))

    # --- the network's side ---

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        process = self.processes[to]
        if not process.up:
            return
        if not self.signatures.hold(sender, message):
            return
        process.receive(sender, message)

    def _crash_now(self, peer: str) -> None:
        process = self.processes[peer]
        if process.up and not process.left and process.liar is None:
            process.crash()

    # --- peers ---

    def _begin(self, plan: PeerPlan) -> None:
        """A peer starts for the first time."""
        name = plan.member.peer
        self.network.lines[name] = Line(plan.latency, plan.uplink, plan.member.public)
        liar: Liar | None = make_liar(plan.liar, self) if plan.liar else None
        witness = Witness(self) if self.liars and liar is None else None
        process = Process(
            self,
            Plan(plan.member, LocalClock(plan.ahead, plan.rate), plan.speed, plan.uplink, plan.microbatch),
            self._genesis if plan.founder else None,
            liar,
            witness,
        )
        self.processes[name] = process
        process.start()
        self._discover(process)

    def _restart(self, process: Process, life: int) -> None:
        if process.up or process.left or process.life != life:
            return
        self._down.pop(process.name, None)
        if process.disk.goodbye is not None:
            process.left = True
            return
        process.start()
        self._discover(process)

    def _discover(self, process: Process) -> None:
        """It finds the others, and they find it."""
        rng = self.random.random
        first = process.life == 1
        for other in list(self.processes.values()):
            if other is process or other.left:
                continue
            self.clock.after(SEEN_WITHIN * rng(), self._see, process, process.life, other)
            if first:
                self.clock.after(SEEN_WITHIN * rng(), self._see, other, other.life, process)

    def _see(self, process: Process, life: int, other: Process) -> None:
        if process.life != life or not process.up or other.left:
            return
        if self.network.is_cut(other.name, process.name):
            self.clock.after(SEEN_AGAIN, self._see, process, life, other)
            return
        process.see(other.plan.member, other.plan.speed)

    # --- faults ---

    def _do(self, fault: Fault) -> None:
        if self.history is not None:
            self.history.add(self.clock.now, "-", fault.describe())
        self.liveness.disturbed()
        getattr(self, f"_do_{fault.kind}")(fault)

    def _named(self, fault: Fault) -> list[Process]:
        return [self.processes[peer] for peer in fault.peers if peer in self.processes]

    def _do_upon(self, fault: Fault) -> None:
        deed, said = fault.what.rsplit(" ", 1)
        upon = Upon(deed, said, fault.seconds, [False])
        for process in self._named(fault):
            if process.up and process.liar is None:
                process.upon.append(upon)

    def _do_crash(self, fault: Fault) -> None:
        for process in self._named(fault):
            if not process.up or process.left:
                continue
            if fault.amount:
                process.crash_after = int(fault.amount)
            else:
                process.crash()

    def _do_pause(self, fault: Fault) -> None:
        for process in self._named(fault):
            if process.up:
                process.pause()
                self.clock.after(fault.seconds, process.resume)

    def _do_cut(self, fault: Fault) -> None:
        one, other = fault.peers
        pairs = [(one, other)] if fault.what == "one way" else [(one, other), (other, one)]
        self.network.cut(pairs)
        self.clock.after(fault.seconds, self.network.mend, pairs)

    def _do_partition(self, fault: Fault) -> None:
        inside = frozenset(fault.peers)
        outside = [peer for peer in self.plans if peer not in inside]
        pairs = [pair for one in fault.peers for other in outside for pair in ((one, other), (other, one))]
        self.network.cut(pairs)
        self.clock.after(fault.seconds, self.network.mend, pairs)

    def _do_slow(self, fault: Fault) -> None:
        for peer in fault.peers:
            self.network.slowed[peer] = fault.amount
            self.clock.after(fault.seconds, self._hurry, peer)

    def _hurry(self, peer: str) -> None:
        self.network.slowed.pop(peer, None)

    def _do_trouble(self, fault: Fault) -> None:
        trouble = Trouble(**{fault.what: fault.amount})
        self._troubles.append(trouble)
        self._sum_troubles()
        self.clock.after(fault.seconds, self._end_trouble, trouble)

    def _end_trouble(self, trouble: Trouble) -> None:
        if trouble in self._troubles:
            self._troubles.remove(trouble)
        self._sum_troubles()

    def _sum_troubles(self) -> None:
        together = Trouble(*(max(values) for values in zip(*self._troubles, strict=True))) if self._troubles else CALM
        self.network.trouble = together

    def _do_leave(self, fault: Fault) -> None:
        for process in self._named(fault):
            if process.up and not process.left:
                process.leave()
            elif not process.left:
                process.left = True

    def _do_join(self, fault: Fault) -> None:
        for peer in fault.peers:
            self._begin(self.plans[peer])

    def _do_damage(self, fault: Fault) -> None:
        for process in self._named(fault):
            process.damage(self.random.uniform(5, 50))

    def _do_order(self, fault: Fault) -> None:
        """The monitor orders a rollback; two orders of one generation if there are two amounts."""
        heads = [process for process in self.processes.values() if process.disk.head is not None]
        if not heads:
            return
        branches = [self.invariants.branches.get(process.lineage_on_disk) for process in heads]
        known = [each for each in branches if each is not None]
        best = max(known, key=lambda each: (each.generation, each.sequence, each.epoch))
        target = best
        for _ in range(int(fault.amount)):
            if target.parent is None or target.parent.parameters is None:
                break
            target = target.parent
        if target.parameters is None:
            return
        epoch = max(each.epoch for each in known)
        members = tuple(
            sorted(
                process.plan.member
                for process in self.processes.values()
                if not process.left and process.liar is None
            )
        )
        for sequence in range(2 if fault.what == "two" else 1):
            listed: tuple[Member, ...] = members
            order = RollbackOrder(best.generation + 1, sequence + 1, epoch + sequence, target.lineage, listed)
            self.signatures.sign_statement(("order", MONITOR, order.lineage))
            self.orders.append(order)
            for place, member in enumerate(members):
                if place % 2 == sequence or fault.what != "two":
                    self.clock.after(3 * self.random.random(), self._tell_order, member.peer, order)

    def _tell_order(self, peer: str, order: RollbackOrder) -> None:
        process = self.processes[peer]
        if process.up:
            process.receive(MONITOR, Message(None, Order(order)))

    # --- the whole seed ---

    def run(self) -> Outcome:
        """Run until everything is over.

        :raises Violation: if an invariant does not hold
        """
        schedule, clock = self.schedule, self.clock
        for plan in schedule.peers:
            if plan.founder:
                self._begin(plan)
        for fault in schedule.faults:
            clock.at(fault.at, self._do, fault)
        clock.after(CHECK_EVERY, self._check)
        clock.at(schedule.quiet_from, self._quiet)
        clock.run(schedule.end)
        self.invariants.now = clock.now
        self.liveness.at_the_end()
        checks = self.invariants
        return Outcome(
            checks.commits,
            checks.samples / self.cells,
            sum(process.computed for process in self.processes.values()) / self.cells,
            clock.now,
            self.events,
            self._idle(),
        )

    def _idle(self) -> float:
        devices = [process for process in self.processes.values() if process.plan.speed > 0]
        seconds = sum(process.up_seconds() for process in devices)
        return 1 - sum(process.busy_seconds for process in devices) / seconds if seconds else 0.0

    def _check(self) -> None:
        self.invariants.now = self.clock.now
        self.liveness.check()
        self.clock.after(CHECK_EVERY, self._check)

    def _quiet(self) -> None:
        """All faults are over: everybody who did not leave comes back, and liars fall silent."""
        if self.history is not None:
            self.history.add(self.clock.now, "-", "all faults are over")
        self.network.trouble = CALM
        self._troubles.clear()
        for process in list(self.processes.values()):
            process.crash_after = None
            process.upon.clear()
            if process.paused:
                process.resume()
            if process.liar is not None:
                process.stop_for_good()
        self.liveness.quiet()
