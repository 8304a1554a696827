"""What is left of a swarm's work when something breaks every 20 seconds?

    python benchmarks/chaos.py --minutes 15

Eight workers behind 20/10 Mbit/s with sparse gradients, first without faults (a third of the time beside), then with
one every 20 s, a quarter each: a worker is killed (SIGKILL, its p2pd and averagers too), stopped (SIGSTOP, later
SIGCONT), its line is cut, three are parted from the rest. Killed workers are started again from their stored state, by
a stand-in for the supervisor; nothing else is done. Emulated and dilated as in home_links.py; takes root and iproute2.

goodput: seconds of devices whose samples entered an applied step / (seconds of all devices - contention). Of a killed
worker's last steps, of which it cannot learn any more whether they counted, one is applied if others made that step for
certain. goodput_kept: goodput under faults, dead time (from a kill to the first microbatch of the restarted process, at
most 20 s) taken off the seconds, / that without. A stopped device's seconds are not taken off; with them off as well it
is goodput_kept_less_stops.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.home_links import CHOSEN, settings
from benchmarks.home_parts import ledger
from benchmarks.home_parts.faults import Fault, Faults, Supervisor, settle_kills
from benchmarks.home_parts.material import MODELS
from benchmarks.home_parts.swarm import HomeSwarm, pressure
from benchmarks.home_parts.trial import REFRESH, WARM_UP, WARM_UP_PATIENCE, Trial
from benchmarks.netlab import Line
from benchmarks.netlab_parts.telling import as_told, end_with

# what a host would write whose volunteers come and go: short rounds leave the lines to those who make up for some
CHOSEN_HERE = CHOSEN["5_1"]
EVERY, LASTING = 20.0, 8.0  # s between faults, and until one is lifted
LONGEST_DEAD_TIME = 20.0  # s that are taken off for one kill


@dataclass
class Stay:
    """A swarm's work between two of its steps."""

    wall: float  # s
    applied: float  # s of devices
    contention: float
    gaps: list[float]  # s between two steps of the swarm
    rounds: list[float]  # s
    unsent: float  # s of devices that were computed by killed processes after their last step
    faults: list[Fault]
    failures: Counter
    crashes: int = 0
    manual_actions: int = 0
    pressure: float = 0.0

    def goodput(self, workers: int, off: float = 0.0) -> float:
        return self.applied / (workers * self.wall - self.contention - off)


def perform(trial: Trial, seconds: float, every: float, lasting: float, keep: Path | None) -> Stay:
    """`every` 0: no faults."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        each = trial.each()
        for number, one in enumerate(each):
            home = folder / f"home-{number}"
            home.mkdir()
            one |= {"folder": str(home / "state"), "identity_path": str(home / "identity.key")}
        with HomeSwarm(folder, trial.scaled_lines(), trial.settings(folder), each) as swarm:
            swarm.go()
            swarm.wait_until(lambda: swarm.slowest() > WARM_UP, WARM_UP_PATIENCE)
            begin, pressed = time.monotonic(), pressure()
            supervisor, faults = Supervisor(swarm), Faults(swarm, every, lasting)
            if every:
                faults.go_on(seconds)
            else:
                time.sleep(seconds)
            end, pressed = time.monotonic(), pressure() - pressed
            supervisor.stop()
            swarm.leave()
            if keep is not None:
                swarm.keep(keep / ("faults" if every else "quiet"))
            settle_kills(swarm, faults.faults)
            stay = settle(trial, swarm, begin, end, faults.faults)
            stay.crashes, stay.manual_actions = supervisor.crashes, supervisor.manual_actions
            stay.pressure = pressed / (end - begin)
            return stay


def settle(trial: Trial, swarm: HomeSwarm, begin: float, end: float, faults: list[Fault]) -> Stay:
    processes = [
        (speed, worker.events[:], worker is not machine[-1])
        for speed, machine in zip(trial.speeds, swarm.workers, strict=True)
        for worker in machine
    ]
    known = {}
    for number, (_, events, _) in enumerate(processes):
        steps = ledger.fates(events)
        decided = {id(step) for step, _ in steps}
        known[number] = steps + [(e, 0) for e in events if e["event"] == "step" and id(e) not in decided]
    certain = {
        step["epoch"] for steps in known.values() for step, samples in steps
        if samples and step["group_size"] > 1 and not step["failure"]
    }  # fmt: skip
    firsts: dict[int, float] = {}  # epoch -> when somebody first had it
    for steps in known.values():
        for step, _ in steps:
            firsts[step["epoch"]] = min(step["at"], firsts.get(step["epoch"], float("inf")))
    times = sorted(at for epoch, at in firsts.items() if epoch in certain and begin <= at <= end)
    if len(times) < 2:
        raise SystemExit("The swarm made no two steps.")
    first, last = times[0], times[-1]
    applied = contention = unsent = 0.0
    for number, (speed, events, was_killed) in enumerate(processes):
        for step, samples in known[number]:
            if was_killed and not samples and not step["failure"] and step["epoch"] in certain:
                samples = step["of"]
            if first < step["at"] <= last:
                applied += samples / speed
        inside = [e for e in events if "computed" in e and first <= e["at"] <= last]
        if inside:
            contention += inside[-1]["contention"] - inside[0]["contention"]
        if inside and was_killed:
            told = [e for e in inside if e["event"] == "step"]
            unsent += inside[-1]["computed"] - (told[-1]["computed"] if told else 0.0)
    every_event = [events for _, events, _ in processes]
    return Stay(
        wall=last - first,
        applied=applied,
        contention=contention,
        gaps=[after - before for before, after in zip(times, times[1:], strict=False)],
        rounds=ledger.round_seconds(every_event, first, last),
        unsent=unsent,
        faults=faults,
        failures=Counter(e["failure"] for events in every_event for e in events if e.get("failure")),
    )


def dead_time(faults: list[Fault]) -> list[float]:
    """s of each kill until the restarted process's first microbatch."""
    return [fault.until - fault.at if fault.until else float("inf") for fault in faults if fault.kind == "kill"]


def figures(workers: int, quiet: Stay, loud: Stay) -> dict:
    dead = dead_time(loud.faults)
    off = sum(min(LONGEST_DEAD_TIME, seconds) for seconds in dead)
    stopped = sum(fault.until - fault.at for fault in loud.faults if fault.kind == "stop" and fault.until)
    before = quiet.goodput(workers)
    return {
        "goodput_without_faults": before,
        "goodput_under_faults": loud.goodput(workers),
        "goodput_kept": loud.goodput(workers, off) / before,
        "goodput_kept_less_stops": loud.goodput(workers, off + stopped) / before,
        "faults": len(loud.faults),
        "dead_time_s": off,
        "dead_time_median_s": median(dead) if dead else 0.0,
        "dead_time_worst_s": max(dead, default=0.0),
        "stopped_s": stopped,
        "unsent_s": loud.unsent,
        "worst_round_ratio": max(loud.rounds, default=float("nan")) / ledger.middle(quiet.rounds),
        "worst_gap_ratio": max(loud.gaps) / median(quiet.gaps),
        "epochs": len(loud.gaps),
        "crashes": loud.crashes,
        "manual_actions": loud.manual_actions,
        "contention": loud.contention / (workers * loud.wall),
        "pressure": loud.pressure,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="with faults")
    parser.add_argument("--quiet-minutes", type=float, help="without; a third of them")
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--every", type=float, default=EVERY, help="s between faults")
    parser.add_argument("--lasting", type=float, default=LASTING, help="s until a fault is lifted")
    parser.add_argument("--model", choices=MODELS, default="4m")
    parser.add_argument("--ratio", type=float, default=16)
    parser.add_argument("--target", type=int, default=4096)
    parser.add_argument("--dilation", type=float, default=10, help="s of the original that 1 s stands for")
    parser.add_argument("--epoch", type=float, help="s that all devices need for them; the original's, dilated")
    parser.add_argument("--refresh", type=float, default=REFRESH, help="s between looks at the others' progress")
    parser.add_argument("--real-every", type=int, default=8)
    parser.add_argument("--swarm", action="append", default=[], metavar="FIELD=VALUE", help="of the run file")
    parser.add_argument("--keep", type=Path, help="folder for all events and logs")
    options = parser.parse_args()
    trial = Trial(
        "chaos", "kit", [Line(20, 10)] * options.peers, model=options.model, ratio=options.ratio,
        dilation=options.dilation, refresh_period=options.refresh, epoch=options.epoch,
        target_batch_size=options.target, real_every=options.real_every,
        swarm=CHOSEN_HERE | settings(options.swarm),
    )  # fmt: skip
    minutes = options.quiet_minutes if options.quiet_minutes is not None else options.minutes / 3
    quiet = perform(trial, 60 * minutes, 0, 0, options.keep)
    print(f"without faults: goodput {quiet.goodput(options.peers):.3f} in {len(quiet.gaps)} epochs", flush=True)
    loud = perform(trial, 60 * options.minutes, options.every, options.lasting, options.keep)
    for fault in loud.faults:
        took = f"{fault.until - fault.at:6.1f} s" if fault.until else "  never over"
        print(f"{fault.at - loud.faults[0].at:7.1f} s  {fault.kind:<10}{took}  workers {fault.numbers}")
    for failure, times in loud.failures.most_common():
        print(f"{times:>6} x {failure[:100]}")
    print(as_told(figures(options.peers, quiet, loud)))
    return 0


if __name__ == "__main__":
    end_with(main)
