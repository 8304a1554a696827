"""Members of verified rounds in one process: real rules and state machine, the network a dictionary."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from volunteer_kit.robust.btard import Verifier
from volunteer_kit.robust.centered_clip import centered_clip
from volunteer_kit.robust.checks import Part
from volunteer_kit.robust.messages import Samples
from volunteer_kit.robust.reducing import SUMS
from volunteer_kit.robust.sketch import sketch, sketch_slices
from volunteer_kit.robust.standing import Settings

SIZE = 960  # values of the vector
PIECES = 2  # parts of each reducer's slice
TRUTH = torch.sin(torch.arange(SIZE, dtype=torch.float32))


def gradient_of(name: int) -> torch.Tensor:
    """Of one sample, (SIZE,)."""
    return TRUTH + torch.randn(SIZE, generator=torch.Generator().manual_seed(name))


@dataclass
class Member:
    """An honest one; attackers replace what they falsify."""

    peer: str
    settings: Settings
    samples: int = 8
    precision: float = 0.0  # relative error of all that it computes
    sends: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient
    returns: Callable[[torch.Tensor], torch.Tensor] = lambda average: average
    says: Callable[[int, Any, Any], Any] = lambda stage, round_, message: message  # stage: 0 commit, 1 reveal, 2 state
    reports: Callable[[Any, list[np.ndarray]], list[np.ndarray]] = lambda duty, totals: totals
    answers: bool = True  # as a reducer
    verifier: Verifier = field(init=False)

    def __post_init__(self):
        own = random.Random(self.peer)
        self.verifier = Verifier(self.peer, self.settings, random_bytes=own.randbytes)

    def compute(self, name: int) -> torch.Tensor:
        own = torch.Generator().manual_seed(random.Random(f"{self.peer} {name}").randrange(2**31))
        noise = torch.randn(SIZE, generator=own)
        true = gradient_of(name)
        return true + self.precision * true.norm() / SIZE**0.5 * noise

    def work_off_duties(self) -> None:
        duties, self.verifier.duties = self.verifier.duties, []
        for duty in duties:
            totals = []
            for first, last in duty.ranges:
                total = sum((self.compute(name) for name in duty.samples.names[first:last]), torch.zeros(SIZE))
                totals.append(sketch_slices([total], duty.seed, duty.slices, self.settings.sums))
            self.verifier.report(duty, self.reports(duty, totals))


class Group:
    """All of them, and the epochs that they have done. `average` is what the members got last."""

    def __init__(self, members: Iterable[Member], settings: Settings):
        self.members, self.settings = {member.peer: member for member in members}, settings
        self.epoch, self._next_name = 0, 0
        self.averages: list[torch.Tensor] = []
        self.shows = True  # do accusers show the bytes?
        self.refused: set[str] = set()  # whose parts no reducer takes
        self._sent: dict[bytes, tuple] = {}

    @property
    def average(self) -> torch.Tensor:
        return self.averages[-1]

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            self.round()

    def round(self, absent: Sequence[str] = ()) -> None:
        here = {peer: member for peer, member in self.members.items() if peer not in absent}
        group, round_id = tuple(here), b"round %d" % self.epoch
        for member in here.values():
            member.work_off_duties()
        rounds = {peer: member.verifier.begin(round_id, self.epoch, group) for peer, member in here.items()}
        lists, sent = {}, {}
        for peer, member in here.items():
            names = tuple(range(self._next_name, self._next_name + member.samples))
            self._next_name += member.samples
            lists[peer] = Samples(names, microbatches=4)
            mean = sum((member.compute(name) for name in names), torch.zeros(SIZE)) / max(1, len(names))
            sent[peer] = member.sends(mean)
        self._tell(0, rounds, {p: r.commit(float(here[p].samples), lists[p], b"") for p, r in rounds.items()})
        trusted = next(iter(rounds.values())).trusted
        assert all(r.trusted == trusted for peer, r in rounds.items() if peer in here), "all take the same"
        reducers = [place for place in range(len(group)) if place in trusted]
        pieces = torch.arange(SIZE).tensor_split(len(reducers) * PIECES)
        parts = [Part(reducers[i // PIECES], i % PIECES, len(piece)) for i, piece in enumerate(pieces)]
        enter = [place for place in sorted(trusted) if group[place] not in self.refused]
        answers: dict[int, torch.Tensor] = {}
        for position, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            reducer = here[group[part.reducer]]
            values = [sent[group[place]][piece] for place in enter]
            average = centered_clip(values, [float(here[group[place]].samples) for place in enter]).average
            if reducer.answers:
                answers[position] = reducer.returns(average)
        answered = tuple(b"a" if here[peer].answers else b"" for peer in group)
        counted = tuple(PIECES if place in enter else 0 for place in range(len(group)))
        self._tell(1, rounds, {p: r.reveal(answered, counted) for p, r in rounds.items()})
        numbers = {peer: self._numbers(sent[peer], parts, pieces, answers, r.seed) for peer, r in rounds.items()}
        stated = {peer: round_.state(numbers[peer]) for peer, round_ in rounds.items()}
        self._hear_statements(rounds, stated, sent, parts, pieces, answers)
        self._prove(rounds, sent, pieces, answers)
        zeros = torch.zeros(SIZE)
        for position, piece in enumerate(pieces):
            zeros[piece] = answers.get(position, torch.zeros(len(piece)))
        self.averages.append(zeros)
        self.epoch += 1

    def _tell(self, stage: int, rounds: Mapping[str, Any], messages: Mapping[str, Any]) -> None:
        said = {peer: self.members[peer].says(stage, rounds[peer], message) for peer, message in messages.items()}
        said = {peer: message for peer, message in said.items() if message is not None}
        for peer, round_ in rounds.items():
            heard = {other: m(peer) if callable(m) else m for other, m in said.items()}  # callable: tells each its own
            heard = {other: message for other, message in heard.items() if message is not None}
            (round_.hear_commits if stage == 0 else round_.hear_reveals)(heard)

    def _numbers(self, vector, parts, pieces, answers, seed) -> np.ndarray:
        rows = np.zeros((len(parts), SUMS + self.settings.sums), np.float32)
        for position, piece in enumerate(pieces):
            values = vector[piece]
            answer = answers.get(position)
            rows[position, 0] = float(values.norm())
            rows[position, 1] = float((values - answer).norm()) if answer is not None else 0.0
            rows[position, SUMS:] = sketch(values, seed, int(piece[0]), self.settings.sums)
        return rows

    def _hear_statements(self, rounds, stated, sent, parts, pieces, answers) -> None:
        said = {peer: self.members[peer].says(2, rounds[peer], message) for peer, message in stated.items()}
        heard = {peer: message for peer, message in said.items() if message is not None}
        for round_ in rounds.values():
            sums = np.full((len(parts), 1 + self.settings.sums), np.nan)
            for position, answer in answers.items():
                sums[position, 0] = float(answer.norm())
                sums[position, 1:] = sketch(answer, round_.seed, int(pieces[position][0]), self.settings.sums)
            own = [position for position, part in enumerate(parts) if part.reducer == round_.own]
            true = {other: self._numbers(sent[other], parts, pieces, answers, round_.seed)[own] for other in rounds}
            held = {place: true[other] for place, other in enumerate(round_.group)} if own else {}
            round_.hear_statements(heard, parts, sums, held)

    def _prove(self, rounds, sent, pieces, answers) -> None:
        """At once; the bytes are those of the round that is disputed."""
        self._sent[next(iter(rounds.values())).round_id] = (sent, pieces, answers)
        for peer in rounds:
            wanted, self.members[peer].verifier.proofs_wanted = self.members[peer].verifier.proofs_wanted, []
            for before, accuser, sender, part in wanted:
                if not self.shows:
                    before.no_proof(accuser)
                    continue
                vectors, *others = self._sent[before.round_id]
                true = self._numbers(vectors[before.group[sender]], [None] * len(others[0]), *others, before.seed)
                before.prove(accuser, sender, part, true[part])

    def banned_by(self, peer: str) -> set[str]:
        return set(self.members[peer].verifier.standing.banned())
