"""What verified averaging costs a peer at the default setting: time beside its training, bytes beside its gradients.

Time is added up from what one of sixteen peers does in an epoch of the demo run, each piece measured alone with the
kit's own functions; a member's contribution is computed again with the chance that the setting says. Bytes are those of
the messages of an honest run. Models of real size pay less of both: samples cost more there, and statements are as many
as parts of half a megabyte.
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
from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.robust.rules import rule
from volunteer_kit.robust.sketch import sketch
from volunteer_kit.robust.standing import Settings
from volunteer_kit.runs import load_run
from volunteer_kit.swarm.codec import install_codecs

SEED, ROUNDS, TRIES = bytes(range(16)), 6, 5


def measure(console: Console) -> dict[str, Any]:
    """`overhead_pct`, `extra_bytes_pct`, printed with what they are made of."""
    torch.set_num_threads(1)
    install_codecs()
    swarm = play()
    defence: Any = swarm.defence
    said = sum(defence.bytes[stage] for stage in ("commit", "reveal", "statement"))
    bytes_pct = 100 * said / defence.bytes["gradients"]
    base, extra = pieces(swarm.task, Settings())
    extra["the state machine"] = defence.machine_seconds / ROUNDS / PEERS
    table = Table("of an epoch of one of 16 peers", "ms", title="Cost, demo run")
    for what, seconds in [*base.items(), *extra.items()]:
        table.add_row(("" if what in base else "+ ") + what, f"{1000 * seconds:.1f}")
    console.print(table)
    overhead = 100 * sum(extra.values()) / sum(base.values())
    return {"overhead_pct": round(overhead, 1), "extra_bytes_pct": round(bytes_pct, 2)}


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
        """Own parts, those held for others, and all answers: lengths, distances, sketches."""
        for piece in slices:
            for _ in range(3):
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
