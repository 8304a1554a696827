"""Members of verified rounds in one process: real rules and state machine, the network a dictionary."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from volunteer_kit.robust.btard import Verifier
from volunteer_kit.robust.centered_clip import centered_clip
from volunteer_kit.robust.checks import Part
from volunteer_kit.robust.messages import Samples
from volunteer_kit.robust.reducing import DISTANCE, NORM, SUMS, UNKNOWN
from volunteer_kit.robust.sketch import sketch, sketch_slices
from volunteer_kit.robust.standing import Settings

SIZE = 960  # values of the vector
MAX_WEIGHT = 1000  # samples that a member can have computed in a round
PIECES = 2  # parts of each reducer's slice
TRUTH = torch.sin(torch.arange(SIZE, dtype=torch.float32))


@lru_cache(maxsize=4096)
def gradient_of(name: int) -> torch.Tensor:
    """Of one sample, (SIZE,)."""
    return TRUTH + torch.randn(SIZE, generator=torch.Generator().manual_seed(name))


@dataclass
class Member:
    """An honest one; attackers replace what they falsify."""

    peer: str
    settings: Settings
    samples: int = 8
    microbatches: int = 4  # that its samples come in
    account: Hashable = None  # whose peer it is; None: its own
    precision: float = 0.0  # relative error of all that it computes
    sends: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: gradient
    returns: Callable[[torch.Tensor], Any] = lambda average: average  # a callable: answers each its own
    says: Callable[[int, Any, Any], Any] = lambda stage, round_, message: message  # stage: 0 commit, 1 reveal, 2 state
    reports: Callable[[Any, list[np.ndarray]], list[np.ndarray]] = lambda duty, totals: totals
    answers: bool = True  # as a reducer
    shows: bool = True  # as an accuser, the bytes
    verifier: Verifier = field(init=False)

    def __post_init__(self):
        own = random.Random(self.peer)
        self.verifier = Verifier(self.peer, self.settings, random_bytes=own.randbytes)

    def compute(self, name: int) -> torch.Tensor:
        if not self.precision:
            return gradient_of(name)
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


@dataclass(frozen=True)
class Exchange:
    """What one member has of a round's exchange. Members that trust others cut the vector otherwise, and can exchange
    nothing."""

    parts: tuple[Part, ...]
    pieces: tuple[torch.Tensor, ...]  # indices of each part
    enter: tuple[int, ...]  # places of whose work its own reducer averages
    answers: dict[int, torch.Tensor]  # by position of the part

    def digest(self, reducer: int) -> bytes:
        mine = [self.answers[i].numpy().tobytes() for i, part in enumerate(self.parts) if part.reducer == reducer
                and i in self.answers]  # fmt: skip
        return hashlib.blake2b(b"".join(mine), digest_size=16).digest() if mine else b""


class Group:
    """All of them, and the epochs that they have done. `average` is what the first member got last."""

    def __init__(self, members: Iterable[Member], settings: Settings):
        self.members, self.settings = {member.peer: member for member in members}, settings
        self.epoch, self._next_name = 0, 0
        self.averages: list[torch.Tensor] = []
        self.shows = True  # do accusers show the bytes?
        self.may_split = False  # may members differ about whom they trust?
        self.refused: set[str] = set()  # whose parts no reducer takes
        self._sent: dict[bytes, tuple] = {}
        self._sketches: dict[tuple, np.ndarray] = {}

    @property
    def average(self) -> torch.Tensor:
        return self.averages[-1]

    def account_of(self, peer: str) -> Hashable:
        account = self.members[peer].account if peer in self.members else None
        return peer if account is None else account

    def run(self, epochs: int) -> None:
        for _ in range(epochs):
            self.round()

    def round(self, absent: Sequence[str] = ()) -> dict[str, Any]:
        """:returns: the members' rounds"""
        here = {peer: member for peer, member in self.members.items() if peer not in absent}
        group, round_id = tuple(here), b"round %d" % self.epoch
        for member in here.values():
            member.verifier.account_of = self.account_of
            member.work_off_duties()
        rounds = {peer: member.verifier.begin(round_id, self.epoch, group) for peer, member in here.items()}
        lists, sent = {}, {}
        for peer, member in here.items():
            names = tuple(range(self._next_name, self._next_name + member.samples))
            self._next_name += member.samples
            lists[peer] = Samples(names, microbatches=member.microbatches)
            mean = sum((member.compute(name) for name in names), torch.zeros(SIZE)) / max(1, len(names))
            sent[peer] = member.sends(mean)
        self._tell(0, rounds, {p: r.commit(float(here[p].samples), lists[p], b"") for p, r in rounds.items()})
        assert self.may_split or len({r.trusted for r in rounds.values()}) == 1, "all take the same"
        exchanges = self._exchange(rounds, sent)
        reveals = {}
        for peer, round_ in rounds.items():
            own = exchanges[peer]
            counted = tuple(PIECES if place in own.enter else 0 for place in range(len(group)))
            reveals[peer] = round_.reveal([own.digest(place) for place in range(len(group))], counted)
        self._tell(1, rounds, reveals)
        self._sketches.clear()
        numbers = {peer: self._numbers(sent[peer], exchanges[peer], r.seed) for peer, r in rounds.items()}
        self._hear_statements(rounds, {p: r.state(numbers[p]) for p, r in rounds.items()}, sent, exchanges)
        self._sent[round_id] = (sent, exchanges)
        self._prove(rounds)
        zeros, first = torch.zeros(SIZE), exchanges[group[0]]
        for position, answer in first.answers.items():
            zeros[first.pieces[position]] = answer
        self.averages.append(zeros)
        self.epoch += 1
        return rounds

    def _exchange(self, rounds: Mapping[str, Any], sent: Mapping[str, torch.Tensor]) -> dict[str, Exchange]:
        """Of members that trust the same."""
        group, found = tuple(rounds), {}
        for trusted in dict.fromkeys(round_.trusted for round_ in rounds.values()):
            like_minded = [peer for peer, round_ in rounds.items() if round_.trusted == trusted]
            pieces = torch.arange(SIZE).tensor_split(len(trusted) * PIECES)
            reducers = [place for place in sorted(trusted) for _ in range(PIECES)]
            parts = tuple(Part(reducers[i], i % PIECES, len(piece)) for i, piece in enumerate(pieces))
            enter = {peer: self._taken_by(rounds[peer], like_minded) for peer in like_minded}
            answers: dict[str, dict[int, torch.Tensor]] = {peer: {} for peer in like_minded}
            for position, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
                reducer = self.members[group[part.reducer]]
                taken = enter.get(reducer.peer)
                if not reducer.answers or not taken:
                    continue
                values = [sent[group[place]][piece] for place in taken]
                average = centered_clip(values, [rounds[reducer.peer].commits[place].weight for place in taken]).average
                answer = reducer.returns(average)
                for peer in like_minded:
                    answers[peer][position] = answer(peer) if callable(answer) else answer
            found.update({peer: Exchange(parts, pieces, enter[peer], answers[peer]) for peer in like_minded})
        return found

    def _taken_by(self, round_: Any, like_minded: Sequence[str]) -> tuple[int, ...]:
        """Places of senders that it averages: a part's weight must be the one that its sender has committed to, and one
        that it can have earned."""
        here = [place for place in sorted(round_.trusted) if round_.group[place] in like_minded]
        weights = {place: round_.commits[place].weight for place in here if round_.group[place] not in self.refused}
        return tuple(place for place, weight in weights.items() if 0 < weight <= MAX_WEIGHT)

    def _tell(self, stage: int, rounds: Mapping[str, Any], messages: Mapping[str, Any]) -> None:
        for peer, heard in self._heard(stage, rounds, messages).items():
            (rounds[peer].hear_commits if stage == 0 else rounds[peer].hear_reveals)(heard)

    def _heard(self, stage: int, rounds: Mapping[str, Any], messages: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        said = {peer: self.members[peer].says(stage, rounds[peer], message) for peer, message in messages.items()}
        heard = {}
        for peer in rounds:
            each = {other: m(peer) if callable(m) else m for other, m in said.items()}  # callable: tells each its own
            heard[peer] = {other: message for other, message in each.items() if message is not None}
        return heard

    def _numbers(self, vector: torch.Tensor, exchange: Exchange, seed: bytes) -> np.ndarray:
        """Of all its parts, float32 (parts, 2 + sums)."""
        rows = np.zeros((len(exchange.parts), SUMS + self.settings.sums), np.float32)
        for position, piece in enumerate(exchange.pieces):
            values, answer = vector[piece], exchange.answers.get(position)
            rows[position, NORM] = float(values.double().norm())
            rows[position, DISTANCE] = (
                float((values.double() - answer.double()).norm()) if answer is not None else UNKNOWN
            )
            key = (vector, seed, int(piece[0]), len(piece))  # a tensor's hash is its identity
            if key not in self._sketches:
                self._sketches[key] = sketch(values, seed, int(piece[0]), self.settings.sums)
            rows[position, SUMS:] = self._sketches[key]
        return rows

    def _hear_statements(self, rounds, stated, sent, exchanges) -> None:
        heard = self._heard(2, rounds, stated)
        for peer, round_ in rounds.items():
            mine = exchanges[peer]
            sums = np.full((len(mine.parts), 1 + self.settings.sums), np.nan)
            for position, answer in mine.answers.items():
                first = int(mine.pieces[position][0])
                sums[position, 0] = float(answer.double().norm())
                key = (answer, round_.seed, first, len(answer))
                if key not in self._sketches:
                    self._sketches[key] = sketch(answer, round_.seed, first, self.settings.sums)
                sums[position, 1:] = self._sketches[key]
            own = [position for position, part in enumerate(mine.parts) if part.reducer == round_.own]
            like_minded = [p for p, other in enumerate(round_.group) if exchanges[other].parts == mine.parts]
            true = {p: self._numbers(sent[round_.group[p]], mine, round_.seed)[own] for p in like_minded if own}
            round_.hear_statements(heard[peer], mine.parts, sums, true)

    def _prove(self, rounds) -> None:
        """At once; the bytes are those of the round that is disputed."""
        for peer in rounds:
            wanted, self.members[peer].verifier.proofs_wanted = self.members[peer].verifier.proofs_wanted, []
            for before, accuser, sender, part in wanted:
                if not (self.shows and self.members[before.group[accuser]].shows):
                    before.no_proof(accuser)
                    continue
                sent, exchanges = self._sent[before.round_id]
                true = self._numbers(sent[before.group[sender]], exchanges[peer], before.seed)
                before.prove(accuser, sender, part, true[part])

    def banned_by(self, peer: str) -> set[str]:
        return set(self.members[peer].verifier.standing.banned())
