"""A swarm that is plagued for 20 minutes: lines cut, workers killed, machines suspended, memory running out, the host
dead. Nobody does anything about it.

    python benchmarks/endurance.py --minutes 20

A host and three volunteers, the real join_swarm(), each on a network namespace of its own (needs root and iproute2).
Two are plagued in turn; the third is left in peace, and its memory is watched. A fault counts as recovered when
samples of the plagued one have entered a global step again after it was over. samples_lost: samples that a volunteer
was shown as counted and that were gone later, from his screen, from his totals, or because the model that the swarm
ended with does not come of the step that held them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

RECOVER_WITHIN = 180.0  # s after a fault is over
BREATHER = 12.0  # s of peace between two faults
FAULTS = 12  # at least
SETTLED = 240.0  # s from which on memory is watched
KINDS = ("cut 20 s", "kill", "memory", "host dead 60 s", "suspend 30 s", "cut 75 s", "kill without host")


@dataclass
class Fault:
    kind: str
    victim: int
    seconds: float = 0.0  # from its end to the next sample that counted
    recovered: bool = False


def main(minutes: float) -> int:
    from endurance_parts.ledger import judge
    from endurance_parts.memory import Watch
    from endurance_parts.swarm import Host, Volunteer, wait_until

    from tests.network import Network
    from volunteer_kit.runs import load_run

    console, faults = Console(), []
    with tempfile.TemporaryDirectory(prefix="volunteer-kit-endurance-") as folder, Network(4) as net:
        scratch, run = Path(folder), Path(folder) / "run.yaml"
        values = load_run("demo").model_dump(mode="json") | {"run_id": "endurance", "captions": []}
        values["optimizer"] |= {"total_epochs": 100_000, "lr": 1e-3}
        run.write_text(json.dumps(values))
        host = Host(net, run, scratch)
        volunteers = [Volunteer(net, number, run, scratch) for number in (2, 3, 4)]
        try:
            run.write_text(json.dumps(values | {"initial_peers": [host.start()]}))
            for volunteer in volunteers:
                volunteer.start()
            if not wait_until(lambda: all(v.shown["samples"] for v in volunteers)):
                sys.exit(f"The swarm did not start: {[v.shown for v in volunteers]}; logs were in {scratch}")
            console.print("Three volunteers train. The faults begin.")
            watch = Watch(volunteers[2], after=min(SETTLED, 15 * minutes))
            ends = time.monotonic() + 60 * minutes
            while time.monotonic() < ends or len(faults) < FAULTS:
                kind, victim = KINDS[len(faults) % len(KINDS)], volunteers[len(faults) % 2]
                fault = Fault(kind, victim.number)
                faults.append(fault)
                found_back = strike(kind, net, host, victim)
                over, had = time.monotonic(), victim.shown["samples"]
                counts = wait_until(lambda v=victim, n=had: v.shown["samples"] > n, RECOVER_WITHIN)
                fault.recovered, fault.seconds = found_back and counts, time.monotonic() - over
                how = f"back after {fault.seconds:.0f} s" if fault.recovered else f"NOT back: {victim.states[-3:]}"
                console.print(f"{len(faults):2d}. volunteer {victim.number - 1}: {kind}: {how}")
                time.sleep(BREATHER)
            watch.stop()
            manual = sum(volunteer.has_ended for volunteer in volunteers)
            for volunteer in volunteers:
                volunteer.end()
            lost = 0
            verdicts = judge([volunteer.home / "ledger.jsonl" for volunteer in volunteers])
            for volunteer, verdict in zip(volunteers, verdicts, strict=True):
                for why, samples in losses(volunteer, verdict).items():
                    console.print(f"[red]volunteer {volunteer.number - 1} lost {samples} samples: {why}")
                    lost += samples
            counted = {v.number - 1: v.shown["samples"] for v in volunteers}
        finally:
            for machine in (*volunteers, host):
                machine.signal_all(signal.SIGCONT)
                machine.end(20)
    return report(console, faults, lost, manual, counted, watch)


def strike(kind: str, net, host, victim) -> bool:
    """One fault, from its beginning to its end. :returns: whether the victim got over what it had to get over alone"""
    found_back = True
    if kind.startswith("cut"):
        net.cut(victim.number)
        time.sleep(float(kind.split()[1]))
        net.mend(victim.number)
    elif kind == "suspend 30 s":
        victim.signal_all(signal.SIGSTOP)
        time.sleep(30)
        victim.signal_all(signal.SIGCONT)
    elif kind == "memory":
        return run_out_of_memory(victim)
    elif kind == "kill":
        kill_worker(victim)
    else:  # the host dies; one worker may be killed meanwhile, and has to find back without it
        host.signal_all(signal.SIGKILL)
        if kind == "kill without host":
            kill_worker(victim)
            had = victim.shown["samples"]
            time.sleep(90)
            found_back = victim.shown["samples"] > had
        else:
            time.sleep(60)
        host.start()
    return found_back


def signal_worker(victim, number: int) -> int:
    """:returns: the pid"""
    from endurance_parts.swarm import wait_until

    wait_until(lambda: victim.shown["pid"] is not None)
    pid = victim.shown["pid"]
    os.kill(pid, number)
    return pid


def run_out_of_memory(victim) -> bool:
    """:returns: whether the same worker lost a microbatch and went on"""
    from endurance_parts.swarm import wait_until

    def lost() -> int:
        began = max(event["at"] for event in victim.events("starting"))
        told = [event for event in victim.events("skipped") if event["at"] >= began]
        return told[-1]["counts"].get("out_of_memory", 0) if told else 0

    before, pid = lost(), signal_worker(victim, signal.SIGUSR1)
    return wait_until(lambda: lost() > before, RECOVER_WITHIN) and victim.shown["pid"] == pid


def kill_worker(victim) -> None:
    """SIGKILL, and wait until it is seen: what was counted before is no sign of recovery."""
    from endurance_parts.swarm import wait_until

    pid = signal_worker(victim, signal.SIGKILL)
    wait_until(lambda: victim.shown["pid"] != pid)


def losses(volunteer, verdict) -> dict[str, int]:
    """Samples that were counted and are in nobody's model, by what became of them."""
    saved = json.loads((volunteer.home / "totals.json").read_text())["samples"]
    lost = {f"in epoch {epoch}, which the swarm's model does not contain": n for epoch, n in verdict.lost.items()}
    lost |= {"in steps of which the ledgers do not tell whether anybody has them": verdict.unknown}
    lost |= {"shown, and in no ledger": volunteer.shown["samples"] - verdict.counted}
    lost |= {"gone from the screen": volunteer.lost, "not in totals.json": volunteer.shown["samples"] - saved}
    return {why: samples for why, samples in lost.items() if samples > 0}


def report(console: Console, faults: list[Fault], lost: int, manual: int, counted: dict, watch) -> int:
    table = Table("fault", "times", "recovered", "back after (median)", title="Faults")
    for kind in KINDS:
        those = [fault for fault in faults if fault.kind == kind]
        if those:
            seconds = sorted(fault.seconds for fault in those)[len(those) // 2]
            good = sum(fault.recovered for fault in those)
            table.add_row(kind, str(len(those)), str(good), f"{seconds:.0f} s")
    console.print(table)
    slope, low, high = watch.slope()
    console.print(f"Samples counted: {counted}; memory of the third: {watch.last / 1e6:,.0f} MB at the end")
    figures = {
        "faults": len(faults),
        "recovered_all": all(fault.recovered for fault in faults),
        "samples_lost": lost,
        "manual_actions": manual,
        "rss_slope_mb_per_h": round(slope, 1),
        "rss_slope_low": round(low, 1),
        "rss_slope_high": round(high, 1),
        "slowest_recovery_s": round(max(fault.seconds for fault in faults), 1),
    }
    print(json.dumps(figures))
    good = figures["recovered_all"] and len(faults) >= FAULTS and not lost and not manual
    return 0 if good else 1


if __name__ == "__main__":
    from benchmarks.netlab_parts.descendants import end_descendants_with_us

    end_descendants_with_us()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves nothing behind
    sys.exit(main(parser.parse_args().minutes))
