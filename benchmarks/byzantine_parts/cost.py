"""What verified averaging costs a peer at the default setting: time beside its training, bytes beside its gradients.

Time is added up from what one of sixteen peers does in an epoch, each piece measured alone with the kit's functions; a
member's contribution is computed again with the chance that the setting says. Two vectors: the demo's model, told for
its own 256 samples an epoch (16 of each peer) and for the original's 4,096; and one of the original's 125.9 M values,
beside an epoch as long as the original's. Words, and how often contributions have to be looked at without having been
drawn by chance, are those of whole honest rounds (nodes.py), of a vector of few values, whose own pieces are taken off.
As a check, whole rounds of the demo's vector are timed too, beside the sum of their pieces. Nothing is taken off for
what runs beside training: words and vectors are the node's process's work. Bytes are those of an honest round's
messages, compressed as they travel, without libp2p's frames.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.byzantine_parts.demo import DemoDalle
from benchmarks.byzantine_parts.first_line import EPOCH_SECONDS
from benchmarks.byzantine_parts.nodes import RULE, Found, Group, Small
from benchmarks.byzantine_parts.swarm import PEERS
from benchmarks.byzantine_parts.wire_cost import extra_bytes_pct, gradient_bytes
from benchmarks.home_parts.wire import layout_of
from volunteer_kit.robust.messages import Duty, Load, Samples
from volunteer_kit.robust.standing import Settings
from volunteer_kit.runs import load_run
from volunteer_kit.session.verification import Recomputation
from volunteer_kit.swarm.codecs.registry import CODECS
from volunteer_kit.swarm.node.recomputing import Recomputing
from volunteer_kit.swarm.node.talk import Recompute, Recomputed
from volunteer_kit.swarm.node.verification import Held
from volunteer_kit.swarm.node.verification import Table as Numbers
from volunteer_kit.swarm.rounds.commitments import Commitments, part_digest
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.reducer import MEAN, SliceReducer, decode_answer
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Accounts, Share

MATCHMAKING = 15.0  # s between two rounds, of the original run
SEED, LINEAGE, TRIES = bytes(range(32)), b"lineage", 5
WORD_ROUNDS, WHOLE_ROUNDS = 48, 16
ORIGINAL_BATCH, ORIGINAL_RUN = 4096, "dalle-laion"
ORIGINAL_MICROBATCHES = 8  # of a contribution; the demo's are of 16 samples
DIGESTS = 5  # times that a member hashes its own part: to commit, and to see at each stage that the list has it


class Rates(NamedTuple):
    """Contributions that a peer computes again in a round: drawn by chance, looked at because they have to be, and
    as a juror."""

    chance: float
    forced: float
    judged: float

    @property
    def all(self) -> float:
        """Return their sum."""
        return sum(self)

    @property
    def looked_at(self) -> float:
        """Return those that validators look at, whose statements their reducers check."""
        return self.chance + self.forced


def measure(console: Console) -> dict[str, Any]:
    """`overhead_pct`, `overhead_pct_original`, `extra_bytes_pct`, printed with what they are made of."""
    torch.set_num_threads(1)
    settings, demo = Settings(), DemoRounds()
    whole = Group(demo, PEERS, settings).play(WHOLE_ROUNDS)
    cells = demo.layout.num_cells
    small = {samples: play_small(cells, samples, settings) for samples in (demo.samples, ORIGINAL_BATCH // PEERS)}
    console.print(
        f"{WHOLE_ROUNDS} honest rounds of {PEERS} members on the demo's model: validators found differences of "
        f"{whole.mismatch:.3f} at most ({settings.tolerance:g} is allowed)"
    )
    figures = demo_figures(console, settings, demo, whole, small)
    run = load_run(ORIGINAL_RUN)
    with torch.device("meta"):
        layout = layout_of(run)
    figures["overhead_pct_original"] = original(console, settings, layout, small[ORIGINAL_BATCH // PEERS])
    figures["extra_bytes_pct"] = extra_bytes_pct(small[ORIGINAL_BATCH // PEERS].word_bytes, layout, PEERS)
    figures["extra_bytes_pct_demo"] = extra_bytes_pct(whole.word_bytes, demo.layout, PEERS)
    show_bytes(console, ORIGINAL_RUN, small[ORIGINAL_BATCH // PEERS], layout)
    show_bytes(console, "demo", whole, demo.layout)
    return {key: round(value, 3) for key, value in figures.items()}


def play_small(cells: int, samples: int, settings: Settings) -> Found:
    """Words of members that bring so many samples. :returns: `seconds` are theirs alone"""
    task = Small(cells, samples, CODECS["blockwise8"])
    found = Group(task, PEERS, settings).play(WORD_ROUNDS)
    vector = task.gradient(task.named(0, 0), 0, 0) / samples
    pieces = Pieces(task.layout, vector, settings, TRIES)
    own = pieces.own_process(Rates(settings.share, found.forced, found.judged)) | pieces.encoding()
    return found._replace(seconds=found.seconds - sum(own.values()))


def show_bytes(console: Console, run: str, found: Found, layout: Layout) -> None:
    gradients = gradient_bytes(layout, PEERS)
    console.print(
        f"Bytes of one of {PEERS} peers in a round of {run}, sent and received: {gradients / 1e6:,.2f} MB of gradients "
        f"and averages, {found.word_bytes / 1e3:.1f} kB of words: "
        f"{extra_bytes_pct(found.word_bytes, layout, PEERS):.3f} % more"
    )


class DemoRounds:
    """The demo's training in whole verified rounds, 32-bit and 16-bit members by turns."""

    def __init__(self) -> None:
        self._task = DemoDalle()
        self.samples = load_run("demo").target_batch_size // PEERS
        self.layout = layout_of(load_run("demo"))
        self._states = [self._task.start(0)] * 2  # before the first round, and behind it

    def named(self, round_number: int, member: int) -> tuple[str, ...]:
        first = (round_number * PEERS + member) * self.samples % (self._task.samples - self.samples)
        return tuple(map(str, range(first, first + self.samples)))

    def gradient(self, names: Sequence[str], epoch: int, member: int) -> torch.Tensor:
        places = [int(name) for name in names]
        return len(places) * self._task.gradient(self._states[epoch].params, places, member % 2 == 1)

    def step(self, average: torch.Tensor) -> None:
        self._states.append(self._task.step(self._states[-1], average, len(self._states) - 2))

    def sample_gradient(self) -> torch.Tensor:
        """The mean gradient of one member's samples, in 32 bits, (elements,)."""
        return self.gradient(self.named(0, 0), 0, 0) / self.samples


# --- time ---


def demo_figures(
    console: Console, settings: Settings, demo: DemoRounds, whole: Found, small: Mapping[int, Found]
) -> dict[str, float]:
    """`overhead_pct`, at the original's samples an epoch, and `overhead_pct_demo`, at the demo's own."""
    rates = Rates(settings.share, whole.forced, whole.judged)
    vector = demo.sample_gradient()
    train = timed(demo.sample_gradient)
    pieces = Pieces(demo.layout, vector, settings, TRIES)
    exchange = pieces.unverified()
    figures = {}
    for samples, key in ((load_run("demo").target_batch_size, "overhead_pct_demo"), (ORIGINAL_BATCH, "overhead_pct")):
        own = samples // PEERS
        batches = own // demo.samples
        base = {f"training, {own} samples": batches * train} | exchange
        extra = again(rates, batches * train) | pieces.verified(rates, batches) | words(small[own])
        figures[key] = show(console, f"the demo's model, {samples:,} samples", base, extra)
    inside = sum((pieces.own_process(rates) | pieces.encoding() | words(small[demo.samples])).values())
    console.print(
        f"Check: Verification of one peer took {1000 * whole.seconds:.1f} ms of a whole round of the demo; "
        f"its pieces add up to {1000 * inside:.1f} ms"
    )
    return figures


def original(console: Console, settings: Settings, layout: Layout, found: Found) -> float:
    """In percent of an epoch as long as the original's, of which all but the matchmaking is training."""
    rates = Rates(settings.share, found.forced, found.judged)
    train = EPOCH_SECONDS - MATCHMAKING
    vector = torch.randn(layout.elements, generator=torch.Generator().manual_seed(0))
    pieces = Pieces(layout, vector, settings, tries=2)
    extra = again(rates, train) | pieces.verified(rates, ORIGINAL_MICROBATCHES) | words(found)
    base = {"training": train, "matchmaking": MATCHMAKING}
    return show(console, f"the original's {layout.elements / 1e6:.1f} M values", base, extra)


def again(rates: Rates, train: float) -> dict[str, float]:
    """s of others' contributions that are computed again.

    :param train: s that a contribution takes
    """
    found = {f"computed again, drawn by chance: {rates.chance:.4f} contributions": rates.chance * train}
    if rates.forced:
        found[f"computed again, because it has to be: {rates.forced:.4f}"] = rates.forced * train
    if rates.judged:
        found[f"computed again, as a juror: {rates.judged:.4f}"] = rates.judged * train
    return found


def words(found: Found) -> dict[str, float]:
    return {"words: written, signed, compressed, read, checked; draws, verdicts": found.seconds}


def show(console: Console, of: str, base: Mapping[str, float], extra: Mapping[str, float]) -> float:
    """:returns: what verification adds, in percent of an epoch without it"""
    title = f"Time of one of {PEERS} peers in an epoch: {of}"
    whole = sum(base.values())
    table = Table("", "ms", "% of the epoch without it", title=title)
    for columns in table.columns[1:]:
        columns.justify = "right"
    for what, seconds in base.items():
        table.add_row(what, f"{1000 * seconds:,.1f}", f"{100 * seconds / whole:.2f}")
    table.add_section()
    for what, seconds in extra.items():
        table.add_row("+ " + what, f"{1000 * seconds:,.1f}", f"{100 * seconds / whole:.2f}")
    table.add_section()
    added = sum(extra.values())
    table.add_row("verification, all together", f"{1000 * added:,.1f}", f"{100 * added / whole:.2f}")
    console.print(table)
    return 100 * added / whole


# --- the pieces ---


class Pieces:
    """Measure each piece of a round alone: the time that a vector of this size takes one of the peers.

    :param vector: a mean gradient, (elements,) float32
    """

    def __init__(self, layout: Layout, vector: torch.Tensor, settings: Settings, tries: int):
        self._layout, self._vector, self._settings, self._tries = layout, vector, settings, tries
        self._cells = range(layout.num_cells)
        self._encoded = self._encode()
        self._slice = [cell for cell in self._cells if cell % PEERS == 0]  # that one peer reduces
        self._all = (1 << layout.num_cells) - 1

    def unverified(self) -> dict[str, float]:
        """s of the exchange of a run that does not verify."""
        return {
            **self.encoding(),
            "its slice: parts read, averaged, and encoded": self._reduced(MEAN, self._tries),
            "answers read": self._timed(self._averages),
        }

    def encoding(self) -> dict[str, float]:
        """s of what each run does, before the exchange or in it."""
        return {"own part encoded": self._timed(self._encode)}

    def verified(self, rates: Rates, microbatches: int) -> dict[str, float]:
        """s that verification adds, by what it is.

        :param microbatches: of a contribution
        """
        digests = b"".join(map(part_digest, self._encoded.values()))
        averages = self._averages()
        others = Commitments(b"", {}, {"peer": digests}, frozenset(), [float("inf")] * len(self._cells))

        def compare() -> None:
            for cell, data in self._encoded.items():
                assert others.is_committed("peer", cell, data)

        return {
            **self.own_process(rates),
            "parts of its slice compared with what was promised": self._timed(compare) * (PEERS - 1) / PEERS,
            "lengths of the answers": self._timed(lambda: others.is_too_long(averages)),
            "CenteredClip instead of the mean": self._clipping(),
            **self._recomputing(rates, microbatches),
        }

    def own_process(self, rates: Rates) -> dict[str, float]:
        """The part of them that is done beside the exchange, in the node."""
        digests = DIGESTS * self._timed(lambda: [part_digest(data) for data in self._encoded.values()])
        read = self._timed(lambda: [
            torch.linalg.vector_norm(self._layout.decode_cell(cell, data), dtype=torch.float64)
            for cell, data in self._encoded.items()
        ])  # fmt: skip
        numbers: list[Numbers] = []

        def read_answers() -> None:
            numbers[:] = [Numbers(self._layout, self._averages(), SEED, self._settings.sums)]

        answers = self._timed(read_answers)
        own = self._timed(lambda: numbers[0].of_ours(self._encoded))
        part = {0: {cell: self._encoded[cell] for cell in self._slice}}
        looked_at = self._timed(lambda: Held(numbers[0], self._slice, part).prepare([0]))
        return {
            f"digests of its own part, {DIGESTS} times": digests,
            "its own part read back, for its length": read,
            "answers read again, their lengths and sketches": answers,
            "its own part read again, distances and sketches": own,
            "the same of those who are looked at, in its slice": PEERS * rates.looked_at * looked_at,
        }

    # --- how ---

    def _timed(self, work: Callable[[], Any]) -> float:
        return timed(work, self._tries)

    def _encode(self) -> dict[int, bytes]:
        return {cell: self._layout.encode_cell(cell, self._vector[self._layout.cell(cell)]) for cell in self._cells}

    def _averages(self) -> dict[int, torch.Tensor]:
        """Those of an answer with all cells, whose values are the part's."""
        data = b"".join(len(each).to_bytes(4, "little") + each for each in self._encoded.values())
        return decode_answer(self._layout, self._all, data)

    def _clipping(self) -> float:
        """s more than the mean takes."""
        return self._reduced(RULE, self._tries) - self._reduced(MEAN, self._tries)

    def _reduced(self, rule: str, tries: int) -> float:
        """s of a slice: all parts read, and their average."""
        spread = 0.5 * float(self._vector.std())
        generator = torch.Generator().manual_seed(1)
        parts = []
        for _ in range(PEERS):
            values = {cell: self._vector[self._layout.cell(cell)] for cell in self._slice}
            noisy = {cell: v + spread * torch.randn(v.shape, generator=generator) for cell, v in values.items()}
            parts.append({cell: self._layout.encode_cell(cell, v) for cell, v in noisy.items()})
        mask = sum(1 << cell for cell in self._slice)
        peers = [f"peer {place}" for place in range(PEERS)]
        limits = dict.fromkeys(peers, 1.0)

        def reduce() -> None:
            reducer = SliceReducer(
                self._layout, mask, "us", epoch=0, max_staleness=0, limits=limits, spent=Accounts(), rule=rule
            )
            for peer, data in zip(peers, parts, strict=True):
                part = reducer.begin(peer, (Share(peer, 0, 0, 1, mask),))
                for cell in part.weights:
                    reducer.read(part, cell, data[cell])
                reducer.take(part)
            reducer.close()
            assert reducer.reduce() is not None

        return timed(reduce, tries)

    def _recomputing(self, rates: Rates, microbatches: int) -> dict[str, float]:
        """In the training process, beside the gradients themselves, which cost nothing here."""
        answered: list[Recomputed] = []
        recomputing = Recomputing(
            4 * self._layout.elements, SyncConfig.max_staleness, self._settings.sums, answered.append
        )
        model = [self._vector]
        kept = self._timed(lambda: recomputing.keep(LINEAGE, model))
        recomputing.recompute = _without_gradients(self._vector)
        slices = tuple(self._layout.cell(cell).stop - self._layout.cell(cell).start for cell in self._cells)
        duty = Duty(
            "check", b"round", 0, 1, Samples(("0/0/0",)), ((0, 1),), SEED, slices, loads=(Load(0, 1, 1.0, self._all),)
        )  # fmt: skip

        def compute() -> None:
            recomputing.ask(Recompute(duty, (LINEAGE,)))
            while not answered:
                recomputing.work_off(0.0)
            assert np.isfinite(answered.pop().totals[0]).all()

        batches = rates.all * microbatches
        each = self._timed(compute)
        return {
            "a copy of the model that is kept": kept,
            f"for what is computed again: model put in and back, sketches, {batches:.2f} batches": batches * each,
        }


def _without_gradients(vector: torch.Tensor) -> Recomputation:
    """The session's part in it, of a trainer whose gradients are there already."""
    own = torch.nn.Parameter(vector.clone())

    def give(model: Any, batch: Any, scale: float) -> None:
        own.grad = vector

    model = SimpleNamespace(zero_grad=lambda set_to_none: setattr(own, "grad", None))
    trainer = SimpleNamespace(batch_size=1, loss_scale=SimpleNamespace(value=1.0), compute_gradients=give)
    stream = SimpleNamespace(fetch=lambda names: names)
    session: Any = SimpleNamespace(trainer=trainer, model=model, stream=stream)
    return Recomputation(session, [own])


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
