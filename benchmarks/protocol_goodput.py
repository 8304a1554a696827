"""How much of a swarm's work enters a step while something breaks every 20 s: the real SyncCore in virtual time.

    python benchmarks/protocol_goodput.py            within 15 minutes on two cores; takes no root and no network
    python benchmarks/protocol_goodput.py --store    keeps the last line in benchmarks/results/protocol_goodput.json
    python benchmarks/protocol_goodput.py --quick    one seed of each, a few virtual minutes

The schedule is that of chaos.py: 8 peers with devices 16 times apart, epochs of 14.1 s, a fault every 20 s, a quarter
each: a process is killed (a supervisor starts it again, it runs after 7 to 13 s), stopped for 8 s, its line is cut for
8 s, three are parted from the rest for 8 s. 20 to 80 ms from peer to peer; bulk traffic is paced to 85 % of an uplink,
which all transfers of a peer share. A round has 0.2 MB a member: sparse gradients of the original's model, dilated ten
times as there; or 12 MB.

Every device second is in one place, and the places sum to exactly 1 (whole ticks and fractions, no rounding):

    committed            goodput: samples that are in an entry of the branch that all follow, counted from its entries
    dead                 from a kill until the process runs again
    stopped              from SIGSTOP to SIGCONT
    microbatch lost      what a kill, or a peer's end, took of a microbatch
    joining              a newcomer has no state yet; it is 50 MB over one other peer's uplink
    taken along          samples that were in no entry yet when their peer died for good
    idle                 the process runs and has a state, and the core does not let the device compute
    expired: ...         samples that the ledger gave up, by its cause
    pending or in flight and
    microbatch at the end      what was under way at the end, less what was at the beginning

The ceiling is 1 less the first five losses: what the faults cost, whatever the protocol does. No fault of the schedule
lasts as long as an epoch, so nobody is away for longer than `max_staleness` allows, and the ceiling needs no term for
that. `idle` is a share of the time in which the process ran and had a state. A measurement goes from a commit before
the first fault to the first commit behind the last one. Medians over the seeds; losses are of all seeds together.

Silences: `seconds` go from the last departure (or the return) to the next commit, `waiting` is without what the
survivors' devices need to compute an epoch, `epoch_deadline` at most, and without the transfer of a newcomer's state.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.netlab_parts.telling import as_told
from benchmarks.protocol_parts import axes
from benchmarks.protocol_parts.account import Shares, add
from benchmarks.protocol_parts.lines import Speed
from benchmarks.protocol_parts.scenarios import Result, Silence
from benchmarks.protocol_parts.swarm import DENSE, EPOCH, TARGET, Home
from benchmarks.protocol_parts.tasks import Broken, Task, perform_all

RESULT = Path(__file__).with_name("results") / "protocol_goodput.json"
NARROW = Speed(5.0, 1.0)
CROWD = Home(peers=64, public=64, target=8 * TARGET, microbatches=8)


class Row(NamedTuple):
    """A row of the first table."""

    name: str
    key: str  # in the last line
    scenario: str
    home: Home
    seeds: int
    minutes: float


class Effort(NamedTuple):
    """How much is simulated."""

    seeds: int = 8
    minutes: float = 30.0  # virtual
    crowds: int = 2  # seeds of 64 peers
    silences: int = 12  # seeds
    axis_seeds: int = 4
    axis_minutes: float = 10.0
    settings: tuple[str, ...] = tuple(axes.AXES)


QUICK = Effort(
    seeds=1,
    minutes=4.0,
    crowds=1,
    silences=1,
    axis_seeds=1,
    axis_minutes=4.0,
    settings=("max_staleness", "alone_after, six die"),
)
SILENCES = {  # key in the last line -> scenario and words
    "six_leave": ("six leave", "six of eight leave within a second"),
    "six_die": ("six die", "six of eight die within a minute"),
    "public_dies": ("public returns", "three clients; the public peer dies, is back after 3 min"),
    "public_replaced": ("public replaced", "three clients; it dies, another one joins after 3 min"),
}


def rows(effort: Effort) -> list[Row]:
    """What is measured by goodput."""
    seeds, minutes = effort.seeds, effort.minutes
    return [
        Row("20/10", "", "chaos", Home(), seeds, minutes),
        Row("20/10, no faults", "no_faults", "no faults", Home(), 1, minutes / 3),
        Row("5/1", "5_1", "chaos", Home(line=NARROW), seeds, minutes),
        Row("20/10, 12 MB", "12mb", "chaos", Home(size=DENSE), seeds, minutes),
        Row("20/10, 12 MB, 28.2 s", "12mb_long", "chaos", Home(size=DENSE, epoch=2 * EPOCH), seeds, minutes),
        Row("64 peers, 20/10", "64", "crowd", CROWD, effort.crowds, minutes),
        Row("64 peers, 5/1", "64_5_1", "crowd", CROWD._replace(line=NARROW), effort.crowds // 2, minutes),
    ]


def pooled(results: Sequence[Result]) -> Shares:
    """All seeds together."""
    return Shares(add(each.shares.account for each in results))


def print_rows(found: dict[str, list[Result]], table: Sequence[Row]) -> dict[str, Any]:
    """The table of goodput; return its figures.

    :param found: by the row's name
    """
    figures: dict[str, Any] = {}
    print(f"{'':<22}{'goodput':>8}{'least':>8}{'ceiling':>9}{'idle':>8}{'commits/h':>11}{'gap':>7}  losses")
    for row in table:
        results = found.get(row.name)
        if not results:
            continue
        shares = [each.shares for each in results]
        goodput, ceiling, idle = (
            median(getattr(each, name) for each in shares) for name in ("goodput", "ceiling", "idle")
        )
        hours = sum(float(each.shares.seconds) for each in results) / row.home.peers / 3600
        commits = sum(each.commits for each in results) / hours
        gap = median(each.longest_gap for each in results)
        least = min(each.goodput for each in shares)
        words = f"{goodput:>8.3f}{least:>8.3f}{ceiling:>9.3f}{idle:>8.4f}{commits:>11.0f}{gap:>7.0f}"
        losses = ", ".join(f"{name} {float(share):.4f}" for name, share in pooled(results).losses.items())
        print(f"{row.name:<22}{words}  {losses}")
        ending = f"_{row.key}" if row.key else ""
        figures |= {f"goodput{ending}": goodput, f"ceiling{ending}": ceiling, f"idle{ending}": idle}
        if row.scenario == "crowd":
            joined = median(each.goodput / float(1 - each["joining"]) for each in shares)
            figures[f"goodput{ending}_joined"] = joined
            print(f"{'':<22}{joined:>8.3f}  of the time after joining")
        if not row.key:
            figures["losses_sum"] = 1.0 if all(each.losses_sum == Fraction(1) for each in shares) else float("nan")
            figures |= {f"loss_{name}".replace(": ", "_").replace(" ", "_"): float(share)
                        for name, share in pooled(results).losses.items()}  # fmt: skip
        elif any(each.losses_sum != Fraction(1) for each in shares):
            figures["losses_sum"] = float("nan")
    return figures


def print_silences(found: dict[str, list[Silence]]) -> dict[str, Any]:
    """The table of swarms that lose most of their members; return its figures."""
    figures: dict[str, Any] = {}
    print(f"\n{'seconds without a commit':<58}{'to the next':>12}{'waiting':>9}{'worst':>7}{'longest gap':>13}")
    for key, results in found.items():
        seconds, waiting, gap = (
            median(getattr(each, name) for each in results) for name in ("seconds", "waiting", "longest_gap")
        )
        worst = max(each.waiting for each in results)
        print(f"{SILENCES[key][1]:<58}{seconds:>12.1f}{waiting:>9.1f}{worst:>7.1f}{gap:>13.1f}")
        figures |= {f"seconds_{key}": seconds, f"waiting_{key}": waiting, f"gap_{key}": gap}
    return figures


def print_axes(table: list[axes.Axis]) -> dict[str, Any]:
    """The table of settings; return its figures."""
    print("\none setting at a time (* the default); difference to the default on the same seeds +- standard error")
    for axis in table:
        cells = "  ".join(
            f"{cell.value:g}{'*' if cell.is_default else ''}: {cell.measure:.{3 if axis.unit == 'goodput' else 0}f}"
            + ("" if cell.is_default else f" ({cell.difference:+.3f}+-{cell.error:.3f})")
            for cell in axis.cells
        )
        print(f"{axis.name:<26}{axis.unit:<8} {cells}; {axis.verdict}")
    figures: dict[str, Any] = {
        f"goodput_staleness_{cell.value:g}": cell.measure
        for axis in table if axis.name == "max_staleness" for cell in axis.cells
    }  # fmt: skip
    better = [axis for axis in table if axis.better is not None and axis.unit == "goodput"]
    figures["settings_to_change"] = ", ".join(f"{axis.name}={axis.better.value:g}" for axis in better if axis.better)
    return figures


def perform_in_order(tasks: Sequence[Task], processes: int) -> list[Result | Silence | Broken]:
    """The results in the tasks' order. The longest run first, so that all processes end together."""
    order = sorted(range(len(tasks)), key=lambda place: -tasks[place].home.peers * tasks[place].minutes)
    found = dict(zip(order, perform_all([tasks[place] for place in order], processes), strict=True))
    return [found[place] for place in range(len(tasks))]


def run(effort: Effort, processes: int) -> dict[str, Any]:
    """Everything, printed; return the figures of the last line."""
    begin = time.monotonic()
    broken: list[str] = []
    count = 0

    def perform(groups: dict[Any, list[Task]]) -> dict[Any, list[Any]]:
        """The results of each group; of runs that broke an invariant only the words."""
        nonlocal count
        results = iter(perform_in_order([task for some in groups.values() for task in some], processes))
        found: dict[Any, list[Any]] = {key: [next(results) for _ in some] for key, some in groups.items()}
        for text in [each.text for some in found.values() for each in some if isinstance(each, Broken)]:
            print(f"VIOLATION {text}")
            broken.append(text)
        count += sum(map(len, groups.values()))
        return found

    def whole(found: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
        kept = {key: [each for each in some if not isinstance(each, Broken)] for key, some in found.items()}
        return {key: some for key, some in kept.items() if some}

    table = rows(effort)
    runs = {row.name: [Task(row.scenario, row.home, seed, row.minutes) for seed in range(row.seeds)] for row in table}
    figures = print_rows(whole(perform(runs)), table)
    silences = {
        key: [Task(name, Home(), seed) for seed in range(effort.silences)] for key, (name, _) in SILENCES.items()
    }
    figures |= print_silences(whole(perform(silences)))
    settings = perform(axes.tasks(effort.settings, effort.axis_seeds, effort.axis_minutes))
    measures = {key: [axes.measure(each) for each in some] for key, some in settings.items()}
    figures |= print_axes(axes.axes(effort.settings, measures))
    return figures | {"violations": len(broken), "runs": count, "minutes": (time.monotonic() - begin) / 60}


def main() -> int:
    """Print tables, and as the last line the figures as flat JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed of each, a few virtual minutes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--store", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    figures = run(QUICK if options.quick else Effort(), options.processes)
    told = as_told(figures)
    if options.store:
        RESULT.write_text(json.dumps(json.loads(told), indent=1) + "\n")
    print(told)
    return 1 if figures["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
