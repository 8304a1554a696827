"""I7 and I8: commits come while a quorum can talk, and after the last fault everybody is at one head."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from tests.simulation.invariants import Branch, decides
from tests.simulation.network import CALM
from volunteer_kit.swarm.sync.log import LogItem
from volunteer_kit.swarm.sync.phases import Phase

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.simulation import Simulation

SLACK = 5.0  # s
COMMIT_BOUND = 30.0  # s without a commit while a quorum can talk, beside the epoch's deadline and one failed round
DEAD_LEADER_BOUND = 12.0  # s more for each member that would lead and is dead
COMMITS_AT_THE_END = 3


class Liveness:
    """Looks at all peers every few seconds."""

    def __init__(self, sim: Simulation):
        self._sim = sim
        settings = sim.settings
        self._round_bound: float = settings.exchange_ceiling + settings.gather + settings.vote_ceiling
        self._bounds = {  # s, whatever happens to the network
            Phase.EXCHANGING: settings.exchange_ceiling + SLACK,
            Phase.VOTING: settings.gather + settings.vote_ceiling + SLACK,
        }
        self._commit_bound = COMMIT_BOUND + settings.epoch_deadline + self._round_bound
        self._good_since: float | None = None  # s; since then a quorum can talk
        self._quiet_since: float | None = None
        self._commits_at_quiet = 0
        self._converged = False
        self.last_step: dict[str, float] = {}  # peer -> s

    def applied(self, process: Process, item: LogItem) -> None:
        """A peer took a step."""
        self.last_step[process.name] = self._sim.clock.now

    def disturbed(self) -> None:
        """A fault begins or ends."""
        self._good_since = None

    def quiet(self) -> None:
        """All faults are over."""
        self._good_since = None
        self._quiet_since = self._sim.clock.now
        self._commits_at_quiet = self._sim.invariants.commits

    def check(self) -> None:
        """Look at every bound."""
        sim, now = self._sim, self._sim.clock.now
        for process in sim.processes.values():
            since = process.leaving_since
            if process.active and since is not None and now - since > self._round_bound + SLACK:
                raise sim.invariants.violated("I7", process.name, f"wants to leave for {now - since:.0f} s")
            if process.active and process.liar is None and process.phase is not None:
                bound = self._bounds.get(process.phase)
                if bound is not None and now - process.phase_since > bound:
                    raise sim.invariants.violated(
                        "I7", process.name, f"is {process.phase.value} for {now - process.phase_since:.0f} s"
                    )
        self._check_commits(now)
        if self._quiet_since is not None and self._is_one():
            self._converged = True
            sim.clock.stop()

    def _honest(self) -> list[Process]:
        return [each for each in self._sim.processes.values() if each.up and not each.left and each.liar is None]

    def _best(self, processes: list[Process]) -> Branch | None:
        branches = self._sim.invariants.branches
        heads = [branches.get(process.lineage_on_disk) for process in processes if process.disk.head is not None]
        known = [head for head in heads if head is not None]
        return max(known, key=lambda head: (head.generation, head.sequence, head.cells), default=None)

    # --- I7 ---

    def _check_commits(self, now: float) -> None:
        sim = self._sim
        dead = self._quorum_talks()
        if dead is None:
            self._good_since = None
            return
        if self._good_since is None:
            self._good_since = now
        since = max(self._good_since, sim.invariants.last_commit)
        bound = (self._commit_bound + DEAD_LEADER_BOUND * dead) * (2 if sim.liars else 1)
        if now - since > bound:
            raise sim.invariants.violated("I7", "-", f"no commit for {now - since:.0f} s, though a quorum can talk")

    def _quorum_talks(self) -> int | None:
        """How many of those that may lead are dead; None: no quorum can talk."""
        sim = self._sim
        network = sim.network
        if network.trouble is not CALM:
            return None
        honest = [process for process in self._honest() if not process.paused]
        best = self._best(honest)
        if best is None:
            return None
        branches = sim.invariants.branches
        able = [
            process
            for process in honest
            if process.name in best.electorate
            and process.disk.head is not None
            and process.phase is not Phase.LEAVING
            and not network.slowed.get(process.name)
            and process.lineage_on_disk in branches
            and branches[process.lineage_on_disk].is_on(best)
        ]
        names = [process.name for process in able]
        if not decides(best.electorate, names, ()):
            return None
        if not any(network.lines[name].public for name in names) or not any(each.plan.speed for each in able):
            return None
        for one, other in combinations(names, 2):
            if network.is_cut(one, other) or network.is_cut(other, one):
                return None
        return len([member for member in best.view().values() if member.public and member.peer not in names])

    # --- I8 ---

    def _is_one(self) -> bool:
        sim = self._sim
        honest = self._honest()
        if not honest:
            return not any(not each.left and each.liar is None for each in sim.processes.values())
        if any(not each.up and not each.left for each in sim.processes.values()):
            return False
        best = self._best(honest)
        if best is None:
            return False
        branches = sim.invariants.branches
        for process in honest:
            if process.disk.head is None or process.phase is Phase.JOINING:
                return False
            head = branches.get(process.lineage_on_disk)
            if head is None or not head.is_on(best) or best.depth - head.depth > 1:
                return False
        computing = any(process.plan.speed for process in honest)
        return not computing or sim.invariants.commits - self._commits_at_quiet >= COMMITS_AT_THE_END

    def at_the_end(self) -> None:
        """The time is over.

        :raises Violation: if peers that could be at one head are not
        """
        sim = self._sim
        if self._converged:
            return
        honest = self._honest()
        best = self._best(honest)
        if best is None:
            return  # nobody has anything to go on with
        public = {process.name for process in honest if process.plan.member.public}
        if not public & set(best.view()):
            return  # clients alone, or strangers: nobody can open a branch
        where = [
            f"{process.name} {process.phase.value if process.phase else '?'} at "
            f"{process.lineage_on_disk.hex()[:6] if process.disk.head is not None else 'nothing'}"
            for process in honest
        ]
        commits = sim.invariants.commits - self._commits_at_quiet
        raise sim.invariants.violated("I8", "-", f"{commits} commits since the last fault; " + ", ".join(where))
