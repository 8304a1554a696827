"""A run under one attack after another: each is performed and measured, and what it stops is begun anew."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from pathlib import Path

from rich.console import Console

from benchmarks.hostile_parts.attack import Attack, Case, Outcome
from benchmarks.hostile_parts.report import line
from benchmarks.hostile_parts.swarm import Helper, SwarmRun
from tests.hub import Hub

QUIET = 12.0  # s without attacks, in which pauses are measured as later
SETTLE = 120.0  # s in which all volunteers must make another step; a busy machine makes one in half a minute
RECOVERY = 90.0  # s that a recovery may take, to be measured at all
SERVERS = ("authority", "dashboard")
ATTACKER = "benchmarks.hostile_parts.attacker"
RESTARTS, STARTS_IN_VAIN = 60, 3  # of a run at most, and in a row


class Siege:
    """
    :param kind: of the run, "hosted" or "open"
    :param keep: a folder for the logs of a run that was stopped
    :ivar quiet: what was measured without attacks: `pause`, s
    """

    def __init__(self, kind: str, folder: Path, hub: Hub, console: Console, keep: Path | None = None):
        self.kind, self.folder, self.hub, self.console, self.keep = kind, folder, hub, console, keep
        self.quiet: dict[str, float] = {}
        self.untried: list[tuple[Attack, Case]] = []
        self.given_up: list[tuple[Attack, Case]] = []
        self._failures: Counter[str] = Counter()  # of the measurement, by attack
        self._starts = 0

    def perform(self, wanted: list[tuple[Attack, Case]]) -> list[Outcome]:
        """Those that could not be tried are not among the outcomes, but in `untried`."""
        outcomes: list[Outcome] = []
        self.untried, in_vain = list(wanted), 0
        while self.untried and self._starts < RESTARTS and in_vain < STARTS_IN_VAIN:
            self._starts += 1
            with contextlib.ExitStack() as stack:
                try:
                    folder = self.folder / f"{self.kind}-{self._starts}"
                    run = stack.enter_context(SwarmRun(self.kind, folder, self.hub))
                    attacker = stack.enter_context(Helper(ATTACKER, run.folder / "attacker.log"))
                    attacker.wait(90.0, "ready")
                    self._be_quiet(run)
                except (RuntimeError, TimeoutError) as error:
                    self.console.print(f"The {self.kind} run did not start: {error}", markup=False)
                    in_vain += 1
                    continue
                in_vain = 0
                while self.untried:
                    attack, case = self.untried[0]
                    try:
                        outcome = self._try(run, attacker, attack, case)
                    except Exception as error:  # the measurement's own: it is tried again in a fresh run, once
                        self.console.print(f"{attack.name} could not be tried: {error!r}"[:500], markup=False)
                        self._failures[attack.name] += 1
                        if self._failures[attack.name] > 1:
                            self.given_up.append(self.untried.pop(0))
                        break
                    self.untried.pop(0)
                    outcomes.append(outcome)
                    self.console.print(line(outcome), markup=False, highlight=False)
                    if outcome.died or outcome.stuck:
                        self._keep_logs(run, attack)
                        break
        self.untried += self.given_up
        return outcomes

    def _be_quiet(self, run: SwarmRun) -> None:
        began = time.monotonic()
        run.wait_for_answers(began, 60.0)
        began = time.monotonic()
        time.sleep(QUIET)
        found = {name: seconds for name, seconds in run.pauses(began).items() if name not in SERVERS}
        run.take_baseline()
        self.quiet["pause"] = max(self.quiet.get("pause", 0.0), *found.values())
        steps = [one.steps_since(began) for one in run.volunteers]
        largest = max(sum(peer.values()) for peer in run.baseline.values())
        told = f"{self.kind} run {self._starts}: quiet for {QUIET:.0f} s, longest pause {max(found.values()):.2f} s, "
        self.console.print(told + f"{steps} steps, {largest:.0f} MB the largest peer")

    def _try(self, run: SwarmRun, attacker: Helper, attack: Attack, case: Case) -> Outcome:
        outcome = Outcome(attack, case)
        run.peaks.clear()
        if case.who == "machine":
            self._hurt(run, outcome)
        else:
            self._attack(run, attacker, outcome)
        return outcome

    # --- messages ---

    def _attack(self, run: SwarmRun, attacker: Helper, outcome: Outcome) -> None:
        attack, case = outcome.attack, outcome.case
        identity, token = run.person(is_member=case.who == "member")
        began = time.monotonic()
        attacker.order(
            do="perform", name=attack.name, token=token.hex(), identity=str(identity), targets=run.targets(),
            prefix=run.prefix, protocol=run.protocol, authority=run.host.url, dashboard=run.host.dashboard,
        )  # fmt: skip
        event = attacker.wait(attack.seconds + 120.0, "holding", "answer")
        if event["event"] == "holding":
            if attack.is_heavy:
                outcome.newcomer = run.newcomer()
            attacker.order(do="release")
            event = attacker.wait(attack.seconds + 120.0, "answer")
        outcome.answer, over = event["said"], time.monotonic()
        outcome.stuck = run.wait_for_steps(over, SETTLE)
        outcome.died = run.ended()
        if not outcome.died:
            run.wait_for_answers(over, 10.0)
            if attack.is_heavy and not outcome.newcomer:
                outcome.newcomer = run.newcomer()
        self._measure(run, outcome, began)

    def _measure(self, run: SwarmRun, outcome: Outcome, began: float) -> None:
        dead = {what.partition(":")[0] for what in outcome.died}
        outcome.run_stopped = len(outcome.stuck) == len(run.volunteers) and not outcome.died
        outcome.stuck = [name for name in outcome.stuck if not outcome.died or name in dead]
        pauses = run.pauses(began)
        outcome.refused = max((pauses.pop(name, 0.0) for name in SERVERS), default=0.0)
        living = {name: seconds for name, seconds in pauses.items() if name.partition(":")[0] not in dead}
        if living:
            outcome.paused = max(living, key=living.__getitem__)
            outcome.pause = living[outcome.paused]
        outcome.peak = max(run.peaks.values(), default=0.0)
        outcome.memory, outcome.grown = run.growth()

    # --- the machine's own faults ---

    def _hurt(self, run: SwarmRun, outcome: Outcome) -> None:
        peer = outcome.attack.perform(run)
        began = time.monotonic()
        outcome.answer = f"done to {peer.name}"
        before, deadline = set(peer.watched.values()), began + RECOVERY
        volunteer = next((one for one in run.volunteers if one.name == peer.name), None)
        while time.monotonic() < deadline:
            is_whole = peer.is_whole and set(peer.look().values()) != before
            if is_whole and not run.wait_for_answers(time.monotonic(), 3.0, of=f"{peer.name}:"):
                if volunteer is None or volunteer.steps_since(began, least_samples=1):
                    break
            time.sleep(0.2)
        outcome.recovery = time.monotonic() - began
        if outcome.recovery >= RECOVERY:
            outcome.died = [f"{peer.name}: it does not come back"]
        for each in run.honest:
            each.watch()
        waiting = run.wait_for_steps(time.monotonic(), SETTLE)
        outcome.run_stopped = len(waiting) == len(run.volunteers)
        outcome.stuck = waiting
        run.take_baseline()

    def _keep_logs(self, run: SwarmRun, attack: Attack) -> None:
        if self.keep is not None:
            self.keep.mkdir(parents=True, exist_ok=True)
            for log in run.folder.rglob("*.log"):
                shutil.copy(log, self.keep / f"{self.kind}-{attack.name}-{log.name}")
