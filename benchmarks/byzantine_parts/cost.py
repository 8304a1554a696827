"""What verified averaging costs a peer at the default setting: time beside its training, bytes beside its gradients.

Time is added up from what one of sixteen peers does in an epoch, each piece measured alone with the kit's functions; a
member's contribution is computed again with the chance that the setting says. Two vectors: the demo's model, told for
its own 256 samples an epoch (16 of each peer) and for the original's 4,096; and one of the original's 125.9 M values,
beside an epoch as long as the original's. Rates of what chance does not draw (contributions that have to be looked at,
cases that a jury judges) are those of honest rounds, played here. Nothing is taken off for what runs beside training.
Bytes are those of an honest round's messages.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hivemind.utils.crypto import RSAPrivateKey
from rich.console import Console
from rich.table import Table

from benchmarks.byzantine_parts.attack import Attack
from benchmarks.byzantine_parts.defences import arrived, pieces_of
from benchmarks.byzantine_parts.demo import DemoDalle
from benchmarks.byzantine_parts.first_line import EPOCH_SECONDS, MATCHMAKING
from benchmarks.byzantine_parts.swarm import PEERS, Plan, Swarm
from benchmarks.byzantine_parts.verified import Verified
from benchmarks.byzantine_parts.wire_cost import extra_bytes, messages
from volunteer_kit.model.dalle import Dalle
from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.robust.rules import rule
from volunteer_kit.robust.sketch import sketch_slices
from volunteer_kit.robust.standing import Settings
from volunteer_kit.runs import load_run
from volunteer_kit.swarm.codec import CODECS, install_codecs
from volunteer_kit.swarm.verified_allreduce import EncodedParts
from volunteer_kit.swarm.verified_exchange import Table as Numbers
from volunteer_kit.swarm.verify_wire import ANSWER_DIGEST, STAGES, Seals, part_digest, seal

SEED, ROUNDS, TRIES = bytes(range(32)), 24, 5
ORIGINAL_BATCH, ORIGINAL_SIZE = 4096, 125_900_000
MICROBATCHES = 8  # of a contribution


class Rates(NamedTuple):
    """Of honest rounds: contributions that one peer computes again a round, and of whole contributions that it judges;
    s that the state machine takes it."""

    forced: float
    judged: float
    machine: float


def measure(console: Console) -> dict[str, Any]:
    """`overhead_pct`, `overhead_pct_original`, `extra_bytes_pct`, printed with what they are made of."""
    torch.set_num_threads(1)
    install_codecs()
    settings, (task, rates) = Settings(), play()
    share = settings.share + rates.forced + rates.judged
    base, train = unverified(task)
    extra = sealing(settings) | once_a_round(task.start(0).params, settings, share, TRIES)
    extra["the state machine"] = rates.machine
    looked = {
        f"drawn by chance, {settings.share:.4f} contributions": settings.share * train,
        f"looked at because they have to be, {rates.forced:.4f}": rates.forced * train,
        f"judged, {rates.judged:.4f}": rates.judged * train,
    }
    show(console, "demo run", {"gradient of 16 samples": train} | base, looked | extra)
    more = ORIGINAL_BATCH // load_run("demo").target_batch_size
    figures = {
        "overhead_pct": 100 * (sum(looked.values()) * more + sum(extra.values())) / (train * more + sum(base.values())),
        "overhead_pct_demo": 100 * (sum(looked.values()) + sum(extra.values())) / (train + sum(base.values())),
    }
    figures["overhead_pct_original"] = original(console, settings, share, rates)
    for name, key in (("dalle-laion", "extra_bytes_pct"), ("demo", "extra_bytes_pct_demo")):
        run = load_run(name)
        with torch.device("meta"):
            shapes = Dalle(run.model)
        figures[key], parts = extra_bytes(run, shapes, PEERS, settings)
        console.print(f"{name}: {parts} parts, {figures[key]:.2f} % more bytes")
    return {key: round(value, 2) for key, value in figures.items()}


def play() -> tuple[DemoDalle, Rates]:
    """Some honest rounds."""
    task = DemoDalle()
    task.batches = (2,)
    defence = Verified()
    Swarm(task, defence, Plan(Attack(), epochs=ROUNDS)).run()
    judged, forced = defence.judged / defence.peer_rounds, defence.forced / defence.peer_rounds
    return task, Rates(forced, judged, defence.machine_seconds / defence.peer_rounds)


def original(console: Console, settings: Settings, share: float, rates: Rates) -> float:
    """In percent of an epoch as long as the original's, of which all but the matchmaking is training."""
    train = EPOCH_SECONDS - MATCHMAKING
    extra = {f"{share:.4f} contributions computed again": share * train} | sealing(settings)
    vector = torch.randn(ORIGINAL_SIZE, generator=torch.Generator().manual_seed(0))
    extra |= once_a_round(vector, settings, share, tries=1)
    extra["the state machine"] = rates.machine
    show(console, "the original's size", {"an epoch": EPOCH_SECONDS}, extra)
    return 100 * sum(extra.values()) / EPOCH_SECONDS


def show(console: Console, of: str, base: dict[str, float], extra: dict[str, float]) -> None:
    table = Table("of an epoch of one of 16 peers", "ms", title=f"Cost, {of}")
    for what, seconds in [*base.items(), *extra.items()]:
        table.add_row(("" if what in base else "+ ") + what, f"{1000 * seconds:.1f}")
    console.print(table)


# --- the pieces ---


def unverified(task: DemoDalle) -> tuple[dict[str, float], float]:
    """Seconds of a peer's epoch in a run without verification: the exchange, and its training."""
    batch = load_run("demo").target_batch_size // PEERS
    params, names = task.start(0).params, list(range(batch))
    vector = task.gradient(params, names, False)
    slices = pieces_of(task.size, range(PEERS))
    held = [vector[slices[0].place] + 1e-3 * torch.randn(slices[0].place.stop) for _ in range(PEERS)]
    base = {
        "codec, there and back": timed(lambda: [arrived(vector[piece.place]) for piece in slices for _ in range(2)]),
        "the mean of its slice": timed(lambda: weighted_mean(held, [1.0] * PEERS)),
    }
    return base, timed(lambda: task.gradient(params, names, False))


def once_a_round(vector: torch.Tensor, settings: Settings, share: float, tries: int) -> dict[str, float]:
    """What a vector of this size takes each round. :param share: contributions that a peer computes again"""
    encoded = EncodedParts([vector], CODECS["blockwise8"])
    reducers = [place * PEERS // len(encoded) for place in range(len(encoded))]
    runner: Any = SimpleNamespace(reducers=reducers, first_part=reducers.index, answered=[len(encoded)] * PEERS)
    numbers: list[Numbers] = []

    def answers() -> None:
        numbers[:] = [Numbers(encoded, runner, [vector], SEED, settings.sums)]

    found = {
        "digests of own parts": timed(encoded.digests, tries),
        "digests of the answers": timed(lambda: [part_digest(one, ANSWER_DIGEST) for one in encoded.messages], tries),
        "sketches of the answers": timed(answers, tries),
        "own parts decoded, their lengths, distances and sketches": timed(lambda: numbers[0].of_ours(encoded), tries),
    }
    looked_at = found["own parts decoded, their lengths, distances and sketches"] * settings.share
    found["those of the contributions that are looked at, in its slice"] = looked_at  # 16 share of them, 1/16 of each
    numbers.clear()
    found |= clipping(encoded, tries)
    found["the model's copy that is kept"] = timed(lambda: vector.to("cpu", torch.float32, copy=True), tries)
    sizes = [reducers.count(reducer) * len(vector) // len(encoded) for reducer in range(PEERS)]
    sizes[-1] += len(vector) - sum(sizes)
    sketched = timed(lambda: sketch_slices([vector], SEED, sizes, settings.sums), tries)
    found["sketches of what is computed again"] = share * MICROBATCHES * sketched
    found["the model changed for it, and back"] = share * MICROBATCHES * 4 * found["the model's copy that is kept"]
    return found


def clipping(encoded: EncodedParts, tries: int) -> dict[str, float]:
    """CenteredClip of a slice of 1/16, from one part of it: it takes as long for each value."""
    part, weights, clip = encoded.decoded(0), [1.0] * PEERS, rule("centered_clip")
    held = [part + 0.5 * part.std() * torch.randn(part.shape) for _ in range(PEERS)]
    parts = sum(encoded.sizes) / PEERS / len(part)
    more = timed(lambda: clip(held, weights), tries) - timed(lambda: weighted_mean(held, weights), tries)
    return {"CenteredClip instead of the mean": parts * more}


def sealing(settings: Settings) -> dict[str, float]:
    """Three envelopes of its own, and of each of the others three opened."""
    key, round_id = RSAPrivateKey(), b"round"
    said = messages(load_run("dalle-laion").target_batch_size, 256, PEERS, settings)
    sealed = [seal(key, round_id, stage, message) for stage, message in zip(STAGES, said, strict=True)]

    def open_all() -> None:
        seals, author = Seals(round_id), None
        for stage, envelope in zip(STAGES, sealed, strict=True):
            author, _ = seals.open(envelope, stage, author)

    own = timed(lambda: [seal(key, round_id, stage, one) for stage, one in zip(STAGES, said, strict=True)])
    return {"own envelopes sealed": own, "the others' opened": (PEERS - 1) * timed(open_all)}


def timed(work: Callable[[], Any], tries: int = TRIES) -> float:
    """The processor's time, best of some tries: other processes may run."""
    if tries > 1:
        work()
    best = float("inf")
    for _ in range(tries):
        begun = time.process_time()
        work()
        best = min(best, time.process_time() - begun)
    return best
