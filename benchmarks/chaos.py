"""What is left of a swarm's work when something breaks every 20 seconds?

    python benchmarks/chaos.py --minutes 15

Eight workers behind 20/10 Mbit/s with sparse gradients, first without faults (a third of the time beside), then with
one every 20 s, a quarter each: a worker is killed (SIGKILL, its p2pd and node too), stopped (SIGSTOP, later
SIGCONT), its line is cut, three are parted from the rest. Killed workers are started again from what they stored, by
a stand-in for the supervisor; nothing else is done. Emulated and dilated as in home_links.py; takes root and iproute2.

goodput: seconds of devices whose samples entered an applied step / (seconds of all devices - contention). goodput_kept:
goodput under faults, dead time (from a kill to the first microbatch of the restarted process, at most 20 s) taken off
the seconds, / that without. A stopped device's seconds are not taken off, and are no contention; with them off as well
it is goodput_kept_less_stops.

worst_round_ratio: the longest round of a worker, from its beginning to its certificate there, / the median without
faults. That of a worker that is stopped or cut off ends when it is back, so worst_spared_round_ratio is that of the
workers on whom no fault was meanwhile, and rounds_over_twice the share of their rounds that took more than twice the
median.

Each sample is accounted for (home_parts/accounts.py), and so is each second: goodput and the losses by
cause are 1 together. Beside that stands what the protocol alone keeps under the same faults, by virtual time
(home_parts/simulated.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.home_links import CHOSEN, settings
from benchmarks.home_parts import accounts, ledger
from benchmarks.home_parts.accounts import Seconds
from benchmarks.home_parts.faults import Fault, Faults, Supervisor, settle_kills
from benchmarks.home_parts.material import MODELS
from benchmarks.home_parts.simulated import Kept, simulate, virtual_faults
from benchmarks.home_parts.swarm import HomeSwarm, pressure
from benchmarks.home_parts.trial import WARM_UP, WARM_UP_PATIENCE, Trial
from benchmarks.home_parts.wire import encoded_bytes
from benchmarks.netlab import Line
from benchmarks.netlab_parts.telling import as_told, end_with
from benchmarks.protocol_parts.lines import Speed
from benchmarks.protocol_parts.swarm import Home
from volunteer_kit.runs import load_run
from volunteer_kit.session.node_parts import sync_settings

# what a host would write whose volunteers come and go: short rounds leave the lines to those who catch up
CHOSEN_HERE = CHOSEN["5_1"]
EVERY, LASTING = 20.0, 8.0  # s between faults, and until one is lifted
LONGEST_DEAD_TIME = 20.0  # s that are taken off for one kill
SETTLED = 2.0  # s behind a step; then all who are in touch have taken it, and say so


@dataclass
class Stay:
    """A swarm's work between two of its steps."""

    begin: float  # time.monotonic()
    end: float
    gaps: list[float]  # s between two steps of the swarm
    rounds: list[float]  # s, of each worker
    faults: list[Fault]
    failures: Counter
    applied: float  # s of devices
    contention: float
    account: Seconds = field(default_factory=dict)  # s of devices by where they went
    spared_rounds: list[float] = field(default_factory=list)  # s; no fault was on their worker meanwhile
    crashes: int = 0
    manual_actions: int = 0
    pressure: float = 0.0

    @property
    def wall(self) -> float:
        """s."""
        return self.end - self.begin

    @property
    def dead(self) -> float:
        """s of devices between kills and the restarted processes' first microbatches; of each kill LONGEST_DEAD_TIME at
        most."""
        ends = [(fault.at, min(fault.until or float("inf"), fault.at + LONGEST_DEAD_TIME)) for fault in self.kills]
        return sum(max(0.0, min(until, self.end) - max(at, self.begin)) for at, until in ends)

    @property
    def stopped(self) -> float:
        """s of devices between SIGSTOP and SIGCONT."""
        return sum(fault.until - fault.at for fault in self.faults if fault.kind == "stop" and fault.until)

    @property
    def kills(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.kind == "kill"]

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
        with HomeSwarm(folder, trial.scaled_lines(), trial.settings(folder), each, trial.joins_fast) as swarm:
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
            workers = [[process.events[:] for process in machine] for machine in swarm.workers]
            stay = settle(trial.speeds, workers, begin, end, faults.faults)
            stay.crashes, stay.manual_actions = supervisor.crashes, supervisor.manual_actions
            stay.pressure = pressed / (end - begin)
            return stay


Events = list[dict]


def settle(speeds: Sequence[float], workers: list[list[Events]], begin: float, end: float, faults: list[Fault]) -> Stay:
    """Settle the workers' events by the ledgers of their nodes. Raises SystemExit.

    :param workers: of each the events of each of its processes
    """
    everything = [events for processes in workers for events in processes]
    first, last, gaps = between_steps(everything, begin, end - SETTLED)
    settled = min(SETTLED, median(gaps) / 2)
    first, last = first + settled, last + settled
    account = accounts.sum_of(
        accounts.account_of(
            accounts.lives_of(processes, [fault for fault in faults if number in fault.numbers]), speed, last
        ).between(first, last)
        for number, (speed, processes) in enumerate(zip(speeds, workers, strict=True))
    )
    took_part = [
        (number, [e for e in events if e["event"] == "step" and e["samples"]])
        for number, processes in enumerate(workers)
        for events in processes
    ]
    spared = [(number, [e for e in steps if not was_hit(number, e, faults)]) for number, steps in took_part]
    rounds, spared_rounds = (
        ledger.round_seconds([steps for _, steps in some], first, last) for some in (took_part, spared)
    )
    return Stay(
        first, last, gaps, rounds, faults, spared_rounds=spared_rounds,
        failures=Counter(e["message"] for events in everything for e in events if e["event"] == "warning"),
        applied=account[accounts.COMMITTED], contention=account.get(accounts.CONTENTION, 0.0), account=account,
    )  # fmt: skip


def was_hit(number: int, step: dict, faults: Sequence[Fault]) -> bool:
    """Return whether a fault was on this worker in the round of its step."""
    began, ended = step["at"] - step["seconds"], step["at"]
    return any(
        number in fault.numbers and fault.at < ended and (fault.until is None or fault.until > began)
        for fault in faults
    )


def between_steps(events: Sequence[Events], begin: float, end: float) -> tuple[float, float, list[float]]:
    """When the swarm's first and last steps within these times were taken, and the seconds between all of them."""
    firsts: dict[int, float] = {}  # epoch -> when somebody first had it
    for step in (e for some in events for e in some if e["event"] == "step"):
        firsts[step["epoch"]] = min(step["at"], firsts.get(step["epoch"], float("inf")))
    times = sorted(at for at in firsts.values() if begin <= at <= end)
    if len(times) < 2:
        raise SystemExit("The swarm made no two steps.")
    return times[0], times[-1], [after - before for before, after in zip(times, times[1:], strict=False)]


def simulated(trial: Trial, loud: Stay) -> Kept:
    """The same swarm and the same faults in virtual time."""
    run, line = load_run(trial.run()), trial.scaled_lines()[0]
    settings = {name: value for name, value in sync_settings(run).items() if name != "target_batch_size"}
    home = Home(
        peers=len(trial.lines), public=len(trial.lines), line=Speed(line.down or 1000.0, line.up or 1000.0),
        size=encoded_bytes(run), epoch=trial.epoch_seconds, ratio=trial.ratio, target=trial.target_batch_size,
        microbatches=trial.microbatches, state=trial.state_bytes, settings=settings,
    )  # fmt: skip
    return simulate(home, trial.speeds, virtual_faults(loud.faults, loud.begin, loud.end), loud.wall)


def figures(workers: int, quiet: Stay, loud: Stay) -> dict:
    dead = [fault.until - fault.at if fault.until else float("inf") for fault in loud.kills]
    before = quiet.goodput(workers)
    usual, spared = ledger.middle(quiet.rounds), loud.spared_rounds
    told = {
        "goodput_without_faults": before,
        "goodput_under_faults": loud.goodput(workers),
        "goodput_kept": loud.goodput(workers, loud.dead) / before,
        "goodput_kept_less_stops": loud.goodput(workers, loud.dead + loud.stopped) / before,
        "faults": len(loud.faults),
        "dead_time_s": loud.dead,
        "dead_time_median_s": median(dead) if dead else 0.0,
        "dead_time_worst_s": max(dead, default=0.0),
        "stopped_s": loud.stopped,
        "worst_round_ratio": max(loud.rounds, default=float("nan")) / usual,
        "worst_spared_round_ratio": max(spared, default=float("nan")) / usual,
        "rounds_over_twice": sum(seconds > 2 * usual for seconds in spared) / max(1, len(spared)),
        "round_s": usual,
        "worst_gap_ratio": max(loud.gaps) / median(quiet.gaps),
        "epochs": len(loud.gaps),
        "crashes": loud.crashes,
        "manual_actions": loud.manual_actions,
        "contention": loud.contention / (workers * loud.wall),
        "pressure": loud.pressure,
    }
    lost = accounts.losses(loud.account)
    told |= {f"losses_{name.replace(': ', '_').replace(' ', '_')}": share for name, share in lost.items()}
    return told | {"losses_sum": loud.goodput(workers) + sum(lost.values())}


def print_losses(quiet: Stay, loud: Stay, workers: int) -> None:
    """Print where the devices' time went."""
    found = [accounts.losses(stay.account) for stay in (quiet, loud)]
    print(f"\n{'share of device time':<30}{'quiet':>10}{'faults':>10}")
    print(f"{'goodput':<30}{quiet.goodput(workers):>10.4f}{loud.goodput(workers):>10.4f}")
    for name in sorted({*found[0], *found[1]}, key=lambda name: -found[1].get(name, 0.0)):
        print(f"{name:<30}{found[0].get(name, 0.0):>10.4f}{found[1].get(name, 0.0):>10.4f}")


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
    parser.add_argument("--real-every", type=int, default=8)
    parser.add_argument("--swarm", action="append", default=[], metavar="FIELD=VALUE", help="of the run file")
    parser.add_argument("--keep", type=Path, help="folder for all events and logs")
    options = parser.parse_args()
    trial = Trial(
        "chaos", "kit", [Line(20, 10)] * options.peers, model=options.model, ratio=options.ratio,
        dilation=options.dilation, epoch=options.epoch, target_batch_size=options.target, real_every=options.real_every,
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
    told = figures(options.peers, quiet, loud)
    print_losses(quiet, loud, options.peers)
    kept = simulated(trial, loud)
    print(f"\nin virtual time: without faults {kept.quiet:.3f}, under the same ones {kept.loud:.3f}")
    told |= {"simulated_goodput_kept": kept.kept, "difference": told["goodput_kept"] - kept.kept}
    print(as_told(told))
    return 0


if __name__ == "__main__":
    end_with(main)
