"""Twelve members that nobody can connect to, and one that can be: how long do they wait for its line?

    python benchmarks/reducers.py
    python benchmarks/reducers.py --swarm grad_compression=blockwise4 --reducers 3

All are behind lines of 20/20 Mbit/s, twelve of them behind NAT as well (client mode); devices are equally fast, and the
public one trains too. Emulated and dilated as in home_links.py; takes root and iproute2.

The public member's line carries everybody's gradients to it and their averages back, in N bytes for each of 12: rounds
take 12 N / 20 Mbit/s each way: with 4 bits of each gradient twice as long as an epoch, so the run's codec is the sparse
one. `sync_share` is the device time in which nothing was computed because of the network:
between microbatches, less what the optimizer itself computed, of the wall time less contention. `overlap` is the share
of the rounds' time in which devices computed on.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.home_links import CHOSEN, settings
from benchmarks.home_parts import ledger
from benchmarks.home_parts.material import MODELS
from benchmarks.home_parts.trial import HEAD, WORDS, Outcome, Trial, perform
from benchmarks.netlab import Line
from benchmarks.netlab_parts.telling import as_told, end_with

DOWN, UP = 20, 20  # Mbit/s


def figures(outcome: Outcome) -> dict:
    total, rounds = outcome.total, outcome.rounds
    waited = max(0.0, total.waiting - total.own_work)
    return {
        "sync_share": total.share(waited),
        "overlap": max(0.0, 1 - waited / max(1e-9, sum(rounds))) if rounds else 0.0,
        "goodput": outcome.goodput,
        "round_s": ledger.middle(rounds),
        "epoch_s": outcome.trial.epoch_seconds,
        "steps": total.steps,
        "complete_groups": total.complete / max(1, total.steps),
        "failed_steps": total.failed,
        "reducer_mbps_down": 8e-6 * outcome.accounts[0].wire_received / max(1e-9, outcome.accounts[0].wall),
        "reducer_mbps_up": 8e-6 * outcome.accounts[0].wire_sent / max(1e-9, outcome.accounts[0].wall),
        "contention": total.contention / max(1e-9, total.wall),
        "pressure": outcome.pressure,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--reducers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--model", choices=MODELS, default="4m")
    parser.add_argument("--target", type=int, default=4096, help="samples of an epoch")
    parser.add_argument("--dilation", type=float, default=10, help="s of the original that 1 s stands for")
    parser.add_argument("--epoch", type=float, help="s that all devices need for them; the original's, dilated")
    parser.add_argument("--real-every", type=int, default=8)
    parser.add_argument("--swarm", action="append", default=[], metavar="FIELD=VALUE", help="of the run file")
    parser.add_argument("--keep", type=Path, help="folder for all events and logs")
    options = parser.parse_args()
    public, client = Line(DOWN, UP), Line(DOWN, UP, nat=True)
    trial = Trial(
        f"{options.clients} clients, {options.reducers} public", "kit",
        [public] * options.reducers + [client] * options.clients, seconds=options.seconds, model=options.model, ratio=1,
        target_batch_size=options.target, swarm=CHOSEN["5_1"] | settings(options.swarm), epoch=options.epoch,
        dilation=options.dilation, real_every=options.real_every,
    )  # fmt: skip
    print(HEAD, flush=True)
    outcome = perform(trial, options.keep)
    print(outcome.row())
    for failure, times in outcome.failures.items():
        print(f"{'':>8}{times} x {failure[:100]}")
    print(WORDS)
    print(as_told(figures(outcome)))
    return 0


if __name__ == "__main__":
    end_with(main)
