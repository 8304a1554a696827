"""What verified averaging costs a peer at the default setting: time beside its training, bytes beside its gradients.

Time is added up from what one of sixteen peers does in an epoch, each piece measured alone with the kit's own functions
on the demo's model; a member's contribution is computed again with the chance that the setting says. What is there once
a round, whatever it averages, is told for the demo's own 256 samples an epoch (16 of each peer) and for the original's
4,096. Bytes are those of an honest round's messages, for the demo's 0.2 M parameters and for the original's 125.9 M.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.byzantine_parts.attacks import Attack
from benchmarks.byzantine_parts.defences import arrived, pieces_of
from benchmarks.byzantine_parts.demo import DemoDalle
from benchmarks.byzantine_parts.swarm import PEERS, Plan, Swarm
from benchmarks.byzantine_parts.verified import Verified
from benchmarks.byzantine_parts.wire_cost import extra_bytes
from volunteer_kit.model.dalle import Dalle
from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.robust.rules import rule
from volunteer_kit.robust.sketch import sketch
from volunteer_kit.robust.standing import Settings
from volunteer_kit.runs import load_run
from volunteer_kit.swarm.codec import install_codecs

SEED, ROUNDS, TRIES = bytes(range(16)), 6, 5
ORIGINAL_BATCH = 4096


def measure(console: Console) -> dict[str, Any]:
    """`overhead_pct`, `extra_bytes_pct`, printed with what they are made of."""
    torch.set_num_threads(1)
    install_codecs()
    swarm = play()
    defence: Any = swarm.defence
    base, extra = pieces(swarm.task, Settings())
    extra["the state machine"] = defence.machine_seconds / ROUNDS / PEERS
    table = Table("of an epoch of one of 16 peers", "ms", title="Cost, demo run")
    for what, seconds in [*base.items(), *extra.items()]:
        table.add_row(("" if what in base else "+ ") + what, f"{1000 * seconds:.1f}")
    console.print(table)
    recomputed, *once = extra.values()
    train, *exchange = base.values()
    more = ORIGINAL_BATCH // load_run("demo").target_batch_size
    figures = {
        "overhead_pct": 100 * (recomputed * more + sum(once)) / (train * more + sum(exchange)),
        "overhead_pct_demo": 100 * sum(extra.values()) / sum(base.values()),
    }
    for name, key in (("dalle-laion", "extra_bytes_pct"), ("demo", "extra_bytes_pct_demo")):
        run = load_run(name)
        with torch.device("meta"):
            shapes = Dalle(run.model)
        figures[key], parts = extra_bytes(run, shapes, PEERS, Settings())
        console.print(f"{name}: {parts} parts, {figures[key]:.2f} % more bytes")
    return {key: round(value, 2) for key, value in figures.items()}


def play() -> Swarm:
    """Some honest rounds."""
    task = DemoDalle()
    task.batches = (2,)
    swarm = Swarm(task, Verified(), Plan(Attack(), epochs=ROUNDS))
    swarm.run()
    return swarm


def pieces(task: Any, settings: Settings) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of a peer's epoch without verification, and what comes to it."""
    batch = load_run("demo").target_batch_size // PEERS
    params, names = task.start(0).params, list(range(batch))
    vector = task.gradient(params, names, False)
    slices = pieces_of(task.size, range(PEERS))
    own = [vector[piece.place] for piece in slices if piece.reducer == 0]
    held = [[part + 1e-3 * torch.randn(part.shape) for _ in range(PEERS)] for part in own]
    weights, clip = [float(batch)] * PEERS, rule("centered_clip")
    train = seconds(lambda: task.gradient(params, names, False))
    mean = seconds(lambda: [weighted_mean(parts, weights) for parts in held])

    def state() -> None:
        """Own parts and all answers: lengths, distances, sketches. Others' parts are looked at when they are drawn."""
        for piece in slices:
            for _ in range(2):
                part = vector[piece.place]
                part.norm(), (part - part).norm(), sketch(part, SEED, piece.place.start, settings.sums)

    base = {
        "gradient of 16 samples": train,
        "codec, there and back": seconds(lambda: [arrived(vector[piece.place]) for piece in slices for _ in range(2)]),
        "the mean of its slice": mean,
    }
    extra = {
        f"a contribution computed again ({settings.share:.3f} of them)": settings.share * train,
        "CenteredClip instead of the mean": seconds(lambda: [clip(parts, weights) for parts in held]) - mean,
        "statements": seconds(state),
    }
    return base, extra


def seconds(work: Callable[[], Any]) -> float:
    """The processor's time, best of some tries: other processes may run."""
    work()
    best = float("inf")
    for _ in range(TRIES):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best
