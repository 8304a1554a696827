"""Where a device's time goes, tick by tick."""

from __future__ import annotations

from enum import Enum
from typing import Any

from tests.simulation.clock import Clock
from tests.simulation.process import Process
from volunteer_kit.swarm.sync.contributions import Ledger
from volunteer_kit.swarm.sync.messages import Action, Compute, Computed, Event
from volunteer_kit.swarm.sync.phases import Phase

TICKS = 1 << 30  # of a second; whole numbers, so that sums are exact


class State(Enum):
    """What a device does."""

    COMPUTING = "computing"
    IDLE = "idle"  # its process runs and has a state, and the core does not let it compute
    JOINING = "joining"  # its process has no state of the run yet
    STOPPED = "stopped"  # SIGSTOP
    DEAD = "dead"  # from a kill until the process starts again
    GONE = "gone"  # for good


class Device:
    """One peer's device. A killed process loses its microbatch; one that is stopped goes on with it later.

    :param microbatch: samples
    :param seconds: of one microbatch
    """

    def __init__(self, clock: Clock, microbatch: int, seconds: float):
        self.microbatch = microbatch
        self.seconds = seconds
        self.state = State.GONE
        self.totals = dict.fromkeys(State, 0)  # ticks; COMPUTING: of microbatches that came to their end
        self.lost = 0  # ticks of microbatches that a kill or the end of the process took
        self.process: Process | None = None
        self._clock = clock
        self._since = self._now  # ticks
        self._progress = 0  # ticks of this microbatch
        self._token = 0
        self._due = self._left = 0.0  # s
        self._before = State.IDLE  # it was stopped
        self._allowed = False
        self._lineage = b""

    @property
    def _now(self) -> int:
        return round(self._clock.now * TICKS)

    def _enter(self, state: State) -> None:
        now = self._now
        if self.state is State.COMPUTING:
            self._progress += now - self._since
        else:
            self.totals[self.state] += now - self._since
        self.state, self._since = state, now

    @property
    def progress(self) -> int:
        """Ticks of the microbatch that is not over yet."""
        return self._progress + (self._now - self._since if self.state is State.COMPUTING else 0)

    def total(self, state: State) -> int:
        """Ticks in this state until now."""
        running = self._now - self._since if self.state is state and state is not State.COMPUTING else 0
        return self.totals[state] + running

    def started(self, process: Process, has_state: bool) -> None:
        """Its process starts."""
        self.process = process
        self._allowed = False
        self._enter(State.IDLE if has_state else State.JOINING)

    def allow(self, on: bool) -> None:
        """The core says whether to compute. A microbatch that has begun is finished."""
        self._allowed = on
        if on:
            self._clock.after(0.0, self._go, self._token)

    def _go(self, token: int) -> None:
        if self._allowed and token == self._token and self.state in (State.IDLE, State.JOINING):
            self._begin()

    def _begin(self) -> None:
        assert self.process is not None
        self._lineage = self.process.lineage
        self._enter(State.COMPUTING)
        self._run(self.seconds)

    def _run(self, seconds: float) -> None:
        self._token += 1
        self._due = self._clock.now + seconds
        self._clock.at(self._due, self._done, self._token)

    def _done(self, token: int) -> None:
        if token != self._token or self.state is not State.COMPUTING:
            return
        assert self.process is not None
        self._enter(State.IDLE)
        self.totals[State.COMPUTING] += self._progress
        self._progress = 0
        self.process.handle(Computed(self.microbatch, self._lineage))
        if self._allowed and token == self._token and self.state is State.IDLE:
            self._begin()

    def stop(self) -> None:
        """SIGSTOP."""
        self._before, self._left = self.state, self._due - self._clock.now
        self._token += 1
        self._enter(State.STOPPED)

    def resume(self) -> None:
        """SIGCONT."""
        if self.state is not State.STOPPED:
            return
        self._enter(self._before)
        if self._before is State.COMPUTING:
            self._run(self._left)
        elif self._allowed:
            self._begin()

    def end(self, state: State) -> None:
        """Its process ended: DEAD or GONE. The microbatch is lost."""
        self._enter(state)
        self._token += 1
        self._allowed = False
        self.lost += self._progress
        self._progress = 0


class Watched:
    """The real core, whose word on computing goes to a `Device`."""

    def __init__(self, core: Any, device: Device):
        self._core = core
        self._device = device
        self._computes = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    @property
    def phase(self) -> Phase:
        """As the core says."""
        phase: Phase = self._core.phase
        return phase

    @property
    def ledger(self) -> Ledger:
        """The core's."""
        ledger: Ledger = self._core.ledger
        return ledger

    def handle(self, event: Event, now: float) -> list[Action]:
        """What the core says, less what the device is told."""
        core = self._core
        actions: list[Action] = core.handle(event, now)
        if core.computes != self._computes:
            self._computes = core.computes
            self._device.allow(self._computes)
        return [action for action in actions if type(action) is not Compute]
