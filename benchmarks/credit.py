"""Is credit work? Six peers that come and go, and people who want credit for nothing.

    python benchmarks/credit.py
    python benchmarks/credit.py --only churn --seconds 240

Real peers on loopback with a model that is a mark: every machine's gradient has columns of its own, so that the
averages themselves tell who entered them. A monitor enters the steps into a ledger and is killed, too. Each machine's
contribution is counted by its own node: its samples that are in steps, and of an attacker's only those that it
computed. `max_error_pct` is of the account that is worst off; `gained_pct` is what an account was credited beyond what
it did, in percent of that, and of a fair share if it did nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

TARGET = 1536  # samples; six machines of 32/s do them in 8 s
PAUSE = 0.5  # s of a microbatch of 16
CHURN_SECONDS, ATTACK_SECONDS = 240.0, 60.0


@dataclass
class Scenario:
    """`accounts`: one a machine, in order; `attacks`: of machines by place; `ghosts`: accounts that never come."""

    name: str
    accounts: list[str]
    attacks: dict[int, dict] = field(default_factory=dict)
    churns: bool = False
    ghosts: list[str] = field(default_factory=list)


HONEST = ["ada", "bob", "cleo", "dan"]
SCENARIOS = [
    Scenario("churn", ["ada", "ada", "bob", "cleo", "dan", "eve"], churns=True),
    Scenario("inflated_weight", [*HONEST, "mal"], {4: {"attack": "inflated"}}),
    Scenario("inflated_weight_common_device", [*HONEST, "mal"], {4: {"attack": "inflated_alike"}}),
    Scenario("idle_peer", [*HONEST, "mal"], {4: {"attack": "idle"}}),
    Scenario("idle_peer_inventive", [*HONEST, "mal"], {4: {"attack": "inventive"}}),
    Scenario("self_credit", [*HONEST, "mal"], {4: {"attack": "generous", "friends": ["mal"]}}),
    Scenario(
        "colluding_pair",
        [*HONEST, "mal", "mel"],
        {n: {"attack": "generous", "friends": ["mal", "mel", "ghost"]} for n in (4, 5)},
        ghosts=["ghost"],
    ),
]
IDLE = ("idle_peer", "idle_peer_inventive")


@dataclass
class Result:
    """Samples by account: what they gave, and what they were credited."""

    scenario: Scenario
    truth: dict[str, int]
    credited: dict[str, int]
    steps: int
    partial: int
    unmarked: int
    kills: int = 0

    def error(self, account: str) -> float:
        return 100.0 * abs(self.credited.get(account, 0) - self.truth[account]) / max(1, self.truth[account])

    @property
    def honest(self) -> list[str]:
        liars = {self.scenario.accounts[place] for place in self.scenario.attacks}
        return [account for account in self.truth if account not in liars]

    def gained(self) -> float:
        """Of the account that gained most, of those that attack; with nobody else's name, the first."""
        if self.scenario.name in IDLE:
            fair = sum(self.truth.values()) / len(self.honest)
            return 100.0 * self.credited.get("mal", 0) / fair
        accounts = {self.scenario.accounts[place] for place in self.scenario.attacks} or {self.scenario.accounts[0]}
        gains = [100.0 * (self.credited.get(a, 0) / max(1, self.truth.get(a, 0)) - 1) for a in accounts]
        fair = sum(self.truth.values()) / max(1, len(self.truth))
        gains += [100.0 * self.credited.get(ghost, 0) / fair for ghost in self.scenario.ghosts]
        return max(gains)


def main(only: list[str], seconds: float | None) -> int:
    console, results = Console(width=130), []
    for scenario in SCENARIOS:
        if not only or scenario.name in only:
            with tempfile.TemporaryDirectory(prefix="volunteer-kit-credit-") as folder:
                lasts = seconds or (CHURN_SECONDS if scenario.churns else ATTACK_SECONDS)
                results.append(run(scenario, Path(folder), lasts, console))
                gave, credited = results[-1].truth, results[-1].credited
                console.print(f"  gave {gave}, credited {credited}", style="dim")
    return report(console, results)


def run(scenario: Scenario, folder: Path, seconds: float, console: Console) -> Result:
    from credit_parts.swarm import Swarm

    swarm = Swarm(scenario, folder, TARGET, PAUSE)
    kills = 0
    try:
        swarm.start()
        console.print(f"[bold]{scenario.name}[/]: {len(swarm.machines)} machines train")
        ends = time.monotonic() + seconds
        if scenario.churns:
            kills = churn(swarm, ends, console)
        else:
            swarm.wait(ends)
        swarm.end()
    finally:
        swarm.kill()
    truth, credited = swarm.judge()
    by_account = {account: 0 for account in dict.fromkeys(scenario.accounts)}
    for slot, samples in truth.samples.items():
        by_account[scenario.accounts[slot]] += samples
    counts = {"steps": truth.steps, "partial": truth.partial, "unmarked": truth.unmarked}
    return Result(scenario, by_account, credited, **counts, kills=kills)


def churn(swarm, ends: float, console: Console) -> int:
    """Machines and the monitor are killed, one after another, and come back; one goes properly now and then.
    :returns: kills"""
    rng, kills = random.Random(1), 0
    while time.monotonic() < ends - 30:
        swarm.wait(time.monotonic() + rng.uniform(8, 16))
        machine = rng.choice(swarm.machines)
        what = rng.choice(["kill", "kill", "leave", "monitor"])
        console.print(f"  {what} {'' if what == 'monitor' else machine.account}")
        if what == "leave":
            machine.leave()
        else:
            (swarm.monitor if what == "monitor" else machine).kill()
            kills += 1
        swarm.wait(time.monotonic() + rng.uniform(2, 8))
        (swarm.monitor if what == "monitor" else machine).start()
    swarm.wait(ends)
    return kills


def report(console: Console, results: list[Result]) -> int:
    table = Table("scenario", "account", "gave", "credited", "error or gain", title="Samples")
    figures: dict = {}
    for result in results:
        name = result.scenario.name
        for account in [*result.truth, *result.scenario.ghosts]:
            gave, credited = result.truth.get(account, 0), result.credited.get(account, 0)
            difference = f"{100.0 * (credited - gave) / gave:+.2f} %" if gave else f"{credited:+,}"
            table.add_row(name, account, f"{gave:,}", f"{credited:,}", difference)
        table.add_section()
        figures[f"honest_error_pct_{name}"] = round(max(result.error(account) for account in result.honest), 3)
        if result.scenario.churns:
            figures |= {"max_error_pct": round(max(map(result.error, result.truth)), 3), "kills": result.kills}
        else:
            figures[f"gained_pct_{name}"] = round(result.gained(), 2)
        console.print(f"{name}: {result.steps} steps, {result.partial} marks in part, {result.unmarked} without one")
    console.print(table)
    figures["steps"] = sum(result.steps for result in results)
    print(json.dumps(figures))
    return 0 if figures.get("max_error_pct", 0.0) <= 0.1 else 1


if __name__ == "__main__":
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], choices=[scenario.name for scenario in SCENARIOS])
    parser.add_argument("--seconds", type=float, help="of each swarm")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
    arguments = parser.parse_args()
    sys.exit(main(arguments.only, arguments.seconds))
