"""A swarm of real cores in virtual time, whose devices and lines are counted exactly."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from benchmarks.protocol_parts.account import Seconds, Shares, add, less
from benchmarks.protocol_parts.devices import TICKS, Device, State, Watched
from benchmarks.protocol_parts.lines import Lines, Speed
from benchmarks.protocol_parts.traffic import Exchanges, Transfers
from tests.simulation.invariants import Branch
from tests.simulation.process import Process
from tests.simulation.schedule import Fault, PeerPlan, Schedule
from tests.simulation.signatures import Signatures
from tests.simulation.simulation import Simulation, real_core
from volunteer_kit.swarm.sync.contributions import Ledger
from volunteer_kit.swarm.sync.entries import Entry, Member
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.messages import Message
from volunteer_kit.swarm.sync.phases import Phase

EPOCH = 14.1  # s in which all devices compute an epoch; chaos.py's, the original's 141 s dilated ten times
TARGET = 4096  # samples of an epoch, as there
RATIO = 16.0  # between the fastest and the slowest device
MICROBATCHES = 32  # of each device in an epoch, as there
SPARSE = 0.2e6  # bytes of one member's sparse gradients: 2 MB of the original's, dilated
DENSE = 12e6  # bytes
STATE = 50e6  # bytes of parameters and statistics: 500 MB of the original's, dilated
RESTART_AFTER = 1.0  # s; a supervisor's first wait
STARTING = (6.0, 12.0)  # s; then the process runs. Together 10 s, as docs/results.md has it
LATENCY = (0.010, 0.040)  # s of each line: 20 to 80 ms from peer to peer
CLOCK_RATE = 50e-6  # that clocks go wrong


class Home(NamedTuple):
    """What a scenario's peers are like."""

    peers: int = 8
    public: int = 8
    line: Speed = Speed(20.0, 10.0)
    size: float = SPARSE  # bytes
    epoch: float = EPOCH  # s
    ratio: float = RATIO
    target: int = TARGET  # samples
    microbatches: int = MICROBATCHES
    state: float = STATE  # bytes
    settings: Mapping[str, Any] = {}  # of `SyncConfig`, beside its defaults


def speeds_apart(peers: int, ratio: float, total: float) -> list[float]:
    """Samples/s of devices in geometric steps, the fastest `ratio` times the slowest, `total` together."""
    shares = [ratio ** (place / max(1, peers - 1)) for place in range(peers)]
    return [total * share / sum(shares) for share in shares]


def founders(home: Home, rng: random.Random) -> list[PeerPlan]:
    """The peers with which a scenario begins; who is fast and who is public is drawn."""
    speeds = speeds_apart(home.peers, home.ratio, home.target / home.epoch)
    rng.shuffle(speeds)
    return [peer(home, f"p{place:02d}", speed, place < home.public, True, rng) for place, speed in enumerate(speeds)]


def peer(home: Home, name: str, speed: float, public: bool, founder: bool, rng: random.Random) -> PeerPlan:
    """One of them."""
    return PeerPlan(
        member=Member(name, name, public),
        founder=founder,
        speed=speed,
        microbatch=max(1, round(speed * home.epoch / home.microbatches)),
        latency=rng.uniform(*LATENCY),
        uplink=home.line.up,
        ahead=rng.uniform(-100, 100),
        rate=1 + rng.uniform(-CLOCK_RATE, CLOCK_RATE),
    )


class Commits:
    """Stands for the simulator's `Liveness`: writes down when steps were first taken, and judges nothing."""

    def __init__(self) -> None:
        self.at: list[float] = []  # s
        self._lineages: set[bytes] = set()

    def applied(self, process: Process, item: LogItem) -> None:
        """A peer took a step."""
        if isinstance(item.step, Entry) and item.head.lineage not in self._lineages:
            self._lineages.add(item.head.lineage)
            self.at.append(process.sim.clock.now)

    def disturbed(self) -> None:
        """A fault."""

    def quiet(self) -> None:
        """Never."""

    def check(self) -> None:
        """Every few seconds."""

    def at_the_end(self) -> None:
        """The time is over."""

    def after(self, time: float) -> float | None:
        """s from this time to the next commit; None: there was none."""
        return next((at - time for at in self.at if at > time), None)

    def longest_gap(self, begin: float, end: float) -> float:
        """s, the longest without a commit that ends or lasts between these times."""
        before = max((at for at in self.at if at <= begin), default=begin)
        inside = [before, *(at for at in self.at if begin < at < end), end]
        return max(later - earlier for earlier, later in zip(inside, inside[1:], strict=False))


class HonestSignatures(Signatures):
    """Nobody lies here, so nothing is checked or kept."""

    def hold(self, sender: str, message: Message) -> bool:
        return True


class Swarm(Simulation):
    """A schedule with exact devices and lines that are shared.

    More faults: `kill` (the supervisor restarts it), `away` (later: s), `die` (for good), `stop` (s).
    """

    def __init__(
        self, home: Home, name: str, seed: int, peers: Iterable[PeerPlan], faults: Iterable[Fault], end: float
    ):
        cells = dict(home.settings).get("cells", 16)
        settings = {"cells": cells, **home.settings, "target_batch_size": home.target}
        schedule = Schedule(
            name, seed, tuple(peers), tuple(sorted(faults)), settings, home.size, quiet_from=2 * end, end=end
        )
        self.devices: dict[str, Device] = {}
        super().__init__(schedule, make_core=self._make_core)
        self.commits = Commits()
        self.liveness = self.commits  # type: ignore[assignment]
        self.signatures = HonestSignatures()
        self.lines = Lines(self.clock, self.network, lambda peer: self.processes[peer].paused)
        self.lines.speeds = {plan.member.peer: home.line for plan in schedule.peers}
        self.exchanges: Exchanges = Exchanges(self, self.lines, home.size)  # type: ignore[assignment]
        self.transfers = Transfers(self, self.lines, home.size / self.cells, home.state)  # type: ignore[assignment]
        self.cells_of: dict[bytes, int] = {}  # digest of an answer -> its cells
        self.disbelieved = 0  # parts that a reducer left out because their samples were not believed
        self.starts = random.Random(f"{name}-{seed}-starts")
        self.all_events = 0
        self._away: dict[str, float] = {}  # s until the supervisor starts a peer again
        self._awaited: dict[str, float] = {}
        self._moments: dict[str, Seconds] = {}

    # --- what the simulator asks ---

    def _make_core(self, config: Any, me: Member, durable: Any, genesis: Any, now: float) -> Any:
        core = real_core(config, me, durable, genesis, now)
        device = self.devices.get(me.peer)
        if device is None:
            plan = self.plans[me.peer]
            device = self.devices[me.peer] = Device(self.clock, plan.microbatch, plan.microbatch / plan.speed)
        device.started(self.processes[me.peer], core.head is not None)
        return Watched(core, device)

    def crashed(self, process: Process) -> None:
        """A process died; the supervisor starts it again, unless it died for good."""
        self.devices[process.name].end(State.GONE if process.left else State.DEAD)
        if not process.left:
            pause = RESTART_AFTER + self.starts.uniform(*STARTING)
            self.clock.after(self._away.pop(process.name, pause), self._restart, process, process.life)

    def entered(self, process: Process, phase: Phase) -> None:
        """A peer is in another phase."""
        super().entered(process, phase)
        if phase is Phase.LEAVING:
            self.devices[process.name].end(State.GONE)

    def applied(self, process: Process, item: LogItem) -> None:
        """A peer took a step."""
        before = len(self.commits.at)
        super().applied(process, item)
        if len(self.commits.at) > before:
            self.clock.after(0.0, self._committed)

    def _committed(self) -> None:
        for moment, after in list(self._awaited.items()):
            if self.clock.now > after:
                del self._awaited[moment]
                self._note(moment)
                if moment == "end":
                    self.clock.stop()

    def _check(self) -> None:
        self.all_events += self.events
        self.events = 0  # the simulator's bound is for seeds of a minute or two
        super()._check()

    # --- faults ---

    def _do_kill(self, fault: Fault) -> None:
        for process in self._named(fault):
            if process.up and not process.left:
                process.crash()

    def _do_away(self, fault: Fault) -> None:
        self._away |= dict.fromkeys(fault.peers, fault.seconds)
        self._do_kill(fault)

    def _do_die(self, fault: Fault) -> None:
        for process in self._named(fault):
            process.left = True
            if process.up:
                process.crash()
            else:
                self.devices[process.name].end(State.GONE)

    def _do_stop(self, fault: Fault) -> None:
        for process in self._named(fault):
            if process.active and not process.left:
                process.pause()
                self.devices[process.name].stop()
                self.clock.after(fault.seconds, self._resume, process, process.life)

    def _resume(self, process: Process, life: int) -> None:
        if process.life == life and process.up:
            self.devices[process.name].resume()
            process.resume()

    # --- accounts ---

    def measure(self, begin: float, end: float) -> None:
        """Take the accounts of the first commit behind `begin` and the first one behind `end`, where it stops.

        Between two commits, so that an epoch that is half computed falsifies nothing.
        """
        self._awaited = {"begin": begin, "end": end}

    def _note(self, moment: str) -> None:
        self._moments[moment] = self.account()

    def shares(self) -> Shares:
        """Where the time that was measured went."""
        if "end" not in self._moments:
            self._note("end")  # no commit came any more
        return Shares(less(self._moments["end"], self._moments["begin"]))

    def account(self) -> Seconds:
        """Where all devices' time went until now."""
        best = self.best()
        return add(self._account_of(name, device, best) for name, device in sorted(self.devices.items()))

    def seconds_to_epoch(self) -> float:
        """s that the devices of those that are here need until they have an epoch's samples together, `epoch_deadline`
        at most."""
        here = [process for process in self.processes.values() if process.up and not process.left]
        samples = sum(process.core.ledger.pending_samples for process in here)
        speed = sum(process.plan.speed for process in here)
        slot_age = self.clock.now - max(self.commits.at, default=0.0)
        seconds = max(0.0, self.schedule.settings["target_batch_size"] - samples) / speed
        return float(min(seconds, max(0.0, self.settings.epoch_deadline - slot_age)))

    def best(self) -> Branch:
        """The branch with the most samples; at the end all follow it."""
        branches = self.invariants.branches
        heads = [process.lineage_on_disk for process in self.processes.values() if process.disk.head is not None]
        return max((branches[head] for head in heads), key=lambda each: (each.generation, each.sequence, each.cells))

    def _account_of(self, name: str, device: Device, best: Branch) -> Seconds:
        process = self.processes[name]
        ledger = process.core.ledger if process.up else Ledger(self.cells, process.disk.ledger)
        account = {
            "idle": Fraction(device.total(State.IDLE)),
            "joining": Fraction(device.total(State.JOINING)),
            "stopped": Fraction(device.total(State.STOPPED)),
            "dead": Fraction(device.total(State.DEAD)),
            "microbatch lost": Fraction(device.lost),
            "microbatch at the end": Fraction(device.progress),
        }
        cells = self._cells_by_fate(name, ledger, best, process.left)
        computed = device.totals[State.COMPUTING]
        if ledger.computed:
            for fate, amount in cells.items():
                account[fate] = account.get(fate, Fraction(0)) + Fraction(computed) * amount / ledger.computed
        return {name: ticks / TICKS for name, ticks in account.items()}

    def _cells_by_fate(self, name: str, ledger: Ledger, best: Branch, gone: bool) -> dict[str, int]:
        """Sample-cells of a peer: what its ledger says, set right by the entries of the branch that all follow."""
        fates = {f"expired: {cause.value}": amount for cause, amount in ledger.expired.items()}
        waiting = ledger.computed - ledger.committed - sum(fates.values())
        fates["committed"] = best.amounts.get(name, 0)
        unheard = fates["committed"] - ledger.committed  # it is in entries that this peer has not seen yet
        if unheard < 0:
            fates["expired: lost branch"] = fates.get("expired: lost branch", 0) - unheard
            unheard = 0
        for fate in ("", *(fate for fate in sorted(fates) if fate.startswith("expired"))):
            known = waiting if not fate else fates[fate]
            moved = min(unheard, known)
            unheard -= moved
            if fate:
                fates[fate] -= moved
            else:
                waiting -= moved
        assert not unheard, "more was committed than was computed"
        fates["taken along" if gone else "pending or in flight"] = waiting
        return fates
