"""Round time, goodput and bytes of swarms that nobody has at hand: a cost model, checked on real ones, to 10,000 peers.

    python benchmarks/simulate.py                          measures, fits, checks, draws; within 25 minutes, as root
    python benchmarks/simulate.py --stored benchmarks/results/simulate_measured.json      from measurements made before
    python benchmarks/simulate.py --stored FILE --peers 200 --clients 0.8 --up 5 --codec sparse --target 65536

The model. n members have lines U_i up and D_i down, devices of s_i samples/s, and vectors of V values in 16 cells:

    epoch    = target_batch_size / sum of s_i
    round    = meeting + max(exchange, late) + work       from an epoch's end to the step
    meeting  = meeting + meeting_more log2(n / 2)         report, begin, proposal and votes
    late     = until the last member has heard of the round; the others' parts travel meanwhile
    exchange = the longer of
                 the busiest line: max over i of (own parts sent + answers given) / U_i', (parts + answers got) / D_i'
                 one after other:  the slowest sending of parts, then the answers
               + 3 round trips
               slices of whole cells, shared out as swarm/sync/leading.py does; bytes as the codec's, times `header`
    U', D'   = the line less the messages: `record` bytes a second; half of the line at most
    work     = `value_seconds` for each value encoded or decoded and summed, times the codec's own factors
    wall     = epoch + pause + round           or with delayed averaging: epoch + pause + max(0, round - epoch)
    goodput  = epoch / wall, less what members lose that leave
    bytes    = those of the exchange, and of the messages

Seven constants (header, record, meeting, meeting_more, late, value_seconds, pause) are fitted by least squares on some
of the netlab's scenarios, and checked on others: `prediction_error` is the mean of |model / measured - 1| of round_s
and goodput over those, `prediction_error_whole` likewise, without what rounds that failed have cost. What it has not
seen: delays and losses of lines, groups of more than 5, rounds that fail (where `failed` is not 0 the model is too
kind), and how long thousands take to vote. "Even slices" are what bandwidths ask for; of whole cells no more than 16
members can have one.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.home_parts.material import EPOCH, ORIGINAL
from benchmarks.netlab_parts.telling import end_with
from benchmarks.simulate_parts import fitting, picture
from benchmarks.simulate_parts.measured import SCENARIOS, measure, read, split
from benchmarks.simulate_parts.model import CODECS, Constants, Prediction, Swarm, cut, predict

RESULTS = Path(__file__).with_name("results")
DOWN, UP = 20.0, 10.0  # Mbit/s
BATCH, PEERS = 4096, 8  # samples of an epoch, and how many devices the original's EPOCH is of
AT = (10, 100, 1000, 10_000)
CODES = ("blockwise8", "sparse")


def homes(peers: int, codec: str, target_batch_size: float, even: bool = False) -> Swarm:
    """Equal ones on 20/10 Mbit/s, as fast as the original's eight would have been, with its model."""
    speed = BATCH / EPOCH / PEERS
    return Swarm(
        np.full(peers, DOWN), np.full(peers, UP), np.full(peers, speed), target_batch_size, CODECS[codec],
        cut(round(ORIGINAL)), even=even,
    )  # fmt: skip


def batch(peers: int, grows: bool) -> float:
    return BATCH / PEERS * peers if grows else BATCH


def curves(peers: Sequence[int], constants: Constants) -> dict[tuple[str, bool, bool], list[Prediction]]:
    """By codec, whether the target batch grows with the swarm, and whether slices are even."""
    return {
        (codec, grows, even): [predict(homes(n, codec, batch(n, grows), even), constants) for n in peers]
        for codec in CODES for grows in (False, True) for even in (False, True)
    }  # fmt: skip


def at_sizes(constants: Constants) -> dict[str, float]:
    """Flat figures of swarms of 10 to 10,000."""
    told = {}
    for (codec, grows, even), predictions in curves(AT, constants).items():
        for n, prediction in zip(AT, predictions, strict=True):
            name = f"{codec}{'_even' if even else ''}_{n}"
            told[f"goodput_{'grown' if grows else 'fixed'}_{name}"] = prediction.goodput
            if grows:
                told[f"round_s_{name}"] = prediction.round
                told[f"kilobytes_per_sample_{name}"] = prediction.bytes_per_sample / 1000
    return told


def asked(options: argparse.Namespace) -> Swarm:
    """The swarm that the command line describes."""
    n = options.peers
    speeds = np.full(n, options.speed)
    if options.ratio > 1:
        speeds = options.speed * n * (steps := options.ratio ** np.linspace(0, 1, n)) / steps.sum()
    return Swarm(
        np.full(n, options.down), np.full(n, options.up), speeds, options.target, CODECS[options.codec],
        cut(round(options.parameters)), client=np.arange(n) >= n - round(options.clients * n), rtt=options.rtt,
        delayed=not options.wait, leaves_per_hour=options.leaves, epochs_lost=options.lost, even=options.even,
    )  # fmt: skip


def as_told(value: float) -> float | int | None:
    """None for what nobody knows: JSON has no word for it."""
    if isinstance(value, int):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", type=Path, help="measurements are taken from this file, and stored in it")
    parser.add_argument("--measure-nothing", action="store_true", help="go by what is stored, if it is not all")
    parser.add_argument("--seconds", type=float, default=45, help="of each scenario, measured")
    parser.add_argument("--keep", type=Path, help="folder for all events and logs")
    parser.add_argument("--picture", type=Path, default=RESULTS / "simulate.png")
    one = parser.add_argument_group("one swarm, from stored measurements")
    one.add_argument("--peers", type=int)
    one.add_argument("--down", type=float, default=DOWN, help="Mbit/s of each")
    one.add_argument("--up", type=float, default=UP, help="Mbit/s of each")
    one.add_argument("--rtt", type=float, default=0, help="ms of each line")
    one.add_argument("--clients", type=float, default=0, help="share of members that nobody can connect to")
    one.add_argument("--speed", type=float, default=BATCH / EPOCH / PEERS, help="samples/s of a device, in the mean")
    one.add_argument("--ratio", type=float, default=1, help="between the fastest and the slowest device")
    one.add_argument("--parameters", type=float, default=ORIGINAL)
    one.add_argument("--codec", choices=CODECS, default="blockwise8")
    one.add_argument("--target", type=float, default=BATCH, help="samples of an epoch")
    one.add_argument("--wait", action="store_true", help="no delayed averaging: devices wait for rounds")
    one.add_argument("--leaves", type=float, default=0, help="times an hour that a member leaves")
    one.add_argument("--lost", type=float, default=1, help="epochs of its computing that it loses each time")
    one.add_argument("--even", action="store_true", help="slices as even as bandwidths ask, not whole cells")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    to_fit, _ = split(SCENARIOS)
    only_asked = options.peers is not None
    if only_asked or options.measure_nothing:
        measured = read(options.stored)
    else:
        measured = measure(SCENARIOS, options.seconds, options.stored, options.keep)
    fit_on = [scenario for scenario in to_fit if scenario.name in measured]
    constants = fitting.fit(fit_on, measured) if fit_on else Constants()
    if only_asked:
        told = asdict(predict(asked(options), constants)) | {"fitted_on": len(fit_on)}
    else:
        checks = fitting.check(SCENARIOS, measured, constants)
        print(fitting.HEAD, *(one.row() for one in checks), fitting.WORDS, sep="\n")
        print("constants: " + ", ".join(f"{name} {value:.4g}" for name, value in asdict(constants).items()))
        sizes = np.unique(np.geomspace(2, 10_000, 60).round().astype(int)).tolist()
        about = f"Homes on {DOWN:g}/{UP:g} Mbit/s, {ORIGINAL / 1e6:g} M parameters, delayed averaging: predicted"
        drawn = picture.draw(options.picture, sizes, curves(sizes, constants), about)
        print(f"picture: {options.picture}" if drawn else "no picture: pip install 'matplotlib>=3.8'")
        told = {**fitting.summary(checks), "scenarios_fitted": len(fit_on), **asdict(constants), **at_sizes(constants)}
    print(json.dumps({key: as_told(value) for key, value in told.items()}))
    return 0


if __name__ == "__main__":
    end_with(main)
