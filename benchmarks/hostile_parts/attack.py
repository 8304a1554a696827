"""An attack as a row of a table, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Case(NamedTuple):
    """Where an attack is tried, and by whom.

    :param run: "hosted" (authority, monitor and dashboard), "open" (no authority) or "link" (a run file's reader)
    :param who: "stranger" (no token), "member" (a good token), "host" (writes the run file), "machine" (a local fault)
    """

    run: str
    who: str


STRANGER = Case("hosted", "stranger")
MEMBER = Case("hosted", "member")
OPEN = Case("open", "stranger")
LINK = Case("link", "host")
MACHINE = Case("hosted", "machine")


@dataclass(frozen=True)
class Attack:
    """One row.

    :param surface: what the attacker reaches
    :param point: of the issue
    :param perform: of messages: `async (HostilePeer) -> str`; of a machine: `(SwarmRun) -> str`; of a link: a Trap's
    :param seconds: the attack itself is ended after so many
    :param is_heavy: afterwards a newcomer must still come in, and while it holds connections open, too
    :param is_quick: part of `--quick`
    """

    name: str
    surface: str
    point: int
    perform: Callable[..., Any]
    cases: tuple[Case, ...]
    seconds: float = 20.0
    is_heavy: bool = False
    is_quick: bool = False


@dataclass
class Outcome:
    """The effects of an attack on the honest peers; s and MB."""

    attack: Attack
    case: Case
    answer: str = ""
    pause: float = 0.0  # the longest time in which a living process gave no answer
    paused: str = ""  # which
    memory: float = 0.0  # growth of the worst peer since the run's quiet time, when the attack was over
    grown: str = ""  # the process that has grown most
    peak: float = 0.0  # the same at its highest
    died: list[str] = field(default_factory=list)  # processes of honest peers that ended
    stuck: list[str] = field(default_factory=list)  # volunteers that trained no more
    run_stopped: bool = False
    refused: float = 0.0  # the longest time in which the authority or the dashboard gave an honest client no answer
    newcomer: str = ""  # why none could come in; empty: one did, or none was tried
    recovery: float | None = None  # from a kill until all answered and samples counted
    files: list[str] = field(default_factory=list)  # of the volunteer's own, or inner addresses, that were read
    code: list[str] = field(default_factory=list)  # marks that a stranger's code has left

    @property
    def name(self) -> str:
        return f"{self.attack.name} ({self.case.run}, {self.case.who})"

    @property
    def peers_stopped(self) -> int:
        """Honest peers of which a process ended, or whose training stopped."""
        return len({what.partition(":")[0] for what in (*self.died, *self.stuck)})
