"""The last column: CenteredClip, the first line, verified averaging with its real state machine, and bans."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.byzantine_parts.attack import Attack
from benchmarks.byzantine_parts.defences import Defence, Sent, arrived, pieces_of
from benchmarks.byzantine_parts.exchange import Exchange, Held, digests, directions
from volunteer_kit.auth.evidence import is_majority
from volunteer_kit.robust.btard import Verifier
from volunteer_kit.robust.checks import Part
from volunteer_kit.robust.messages import Duty, Samples
from volunteer_kit.robust.reducing import residual
from volunteer_kit.robust.sketch import sketch_slices
from volunteer_kit.robust.standing import Settings
from volunteer_kit.robust.verified_round import VerifiedRound

if TYPE_CHECKING:
    from benchmarks.byzantine_parts.swarm import Result, Swarm

MICROBATCH = 8
REMEMBERED = 8  # rounds whose directions an attacker keeps


@dataclass
class Before:
    """The last round, as an attacker remembers it."""

    round: VerifiedRound
    parts: list[Part]
    honest_places: list[int]


class Verified(Defence):
    """Everybody has a Verifier, attackers too: they use it as it is but for what their attack falsifies."""

    def __init__(self, settings: Settings | None = None):
        super().__init__("ours", "centered_clip")
        self.settings, self.clips = settings or Settings(), True

    def begin(self, swarm: Swarm) -> None:
        super().begin(swarm)
        self.verifiers = {
            peer: Verifier(peer, self.settings, random_bytes=random.Random(f"{swarm.plan.seed} {peer}").randbytes)
            for peer in range(len(swarm.batches))
        }
        self._exchanges: dict[bytes, Exchange] = {}
        self._directions: deque[np.ndarray] = deque(maxlen=REMEMBERED)
        self._before: Before | None = None
        self._out: frozenset[int] = frozenset()
        self.ban_epochs: dict[int, int] = {}
        self.false_bans: set[int] = set()
        self.disagreements = 0
        self.residual_max = self.mismatch_max = 0.0  # of honest answers, of honest contributions

    # --- what is believed ---

    def left_out(self) -> frozenset[int]:
        """Return the peers that most of all others have convicted, as in swarm/verification/convictions.py. Admission
        shuts them out. Attackers convict every honest peer and none of their own."""
        here = [peer for peer in self.verifiers if peer not in self._out]
        bans = {peer: set(self.verifiers[peer].standing.banned()) for peer in here if peer not in self.swarm.attackers}
        enemies = sum(peer in self.swarm.attacking for peer in here)
        for peer in here:
            votes = sum(peer in bans[other] for other in bans.keys() - {peer})
            votes += 0 if peer in self.swarm.attackers else enemies
            if is_majority(votes, len(here) - 1):
                self._out |= {peer}
        return self._out

    def is_trusted(self, peer: int) -> bool:
        return self.verifiers[self.swarm.guide].standing.is_trusted(peer)

    def known_directions(self) -> Sequence[torch.Tensor]:
        return [torch.from_numpy(row) for rows in self._directions for row in rows]

    # --- a round ---

    def average(self, members: Sequence[int], sent: Mapping[int, Sent]) -> dict[int, torch.Tensor]:
        group, epoch = tuple(members), self.swarm.epoch
        self._work_off_duties(group)
        round_id = hashlib.blake2b(repr((epoch, group)).encode(), digest_size=16).digest()
        rounds = {peer: self.verifiers[peer].begin(round_id, epoch, group) for peer in group}
        commits = {}
        for peer, one in rounds.items():
            names = sent[peer].names
            samples = Samples(names, microbatches=max(1, -(-len(names) // MICROBATCH)))
            commits[peer] = one.commit(sent[peer].weight, samples, b"")
        for peer, heard in self._told("commit", rounds, commits).items():
            rounds[peer].hear_commits(heard)
        exchange = self._exchange(group, self._trusted(rounds), sent)
        self._exchanges[round_id] = exchange
        reveals = {peer: one.reveal(*digests(exchange, peer)) for peer, one in rounds.items()}
        for peer, heard in self._told("reveal", rounds, reveals).items():
            rounds[peer].hear_reveals(heard)
        lost = {peer: one.lost({part.reducer for part in exchange.parts}) for peer, one in rounds.items()}
        self._state(rounds, exchange, sent)
        lost = {peer: lost[peer] | one.beyond for peer, one in rounds.items()}
        self._prove(group)
        self._note(rounds, exchange)
        self.settle(group, sent)
        return self._taken(group, exchange, lost)

    def _trusted(self, rounds: Mapping[int, VerifiedRound]) -> frozenset[int]:
        honest = [rounds[peer].trusted for peer in rounds if peer not in self.swarm.attackers]
        self.disagreements += any(one != honest[0] for one in honest)
        return honest[0]

    def _told(
        self,
        stage: str,
        rounds: Mapping[int, Any],
        messages: Mapping[int, Any],
        views: Mapping[int, Mapping[str, Any]] = MappingProxyType({}),
    ) -> dict[int, dict[int, Any]]:
        """What each member hears. Attackers may alter, withhold, or tell each its own. :param views: what more a sender
        knows"""
        heard: dict[int, dict[int, Any]] = {receiver: {} for receiver in rounds}
        for sender, message in messages.items():
            conduct = self.swarm.conduct(sender)
            is_honest = type(conduct).says is Attack.says
            view = {"me": sender, "attackers": self.swarm.attackers, "before": self._before}
            view |= {"counts": self.is_trusted(sender), **views.get(sender, {})}
            for receiver in rounds:
                said = message if is_honest else conduct.says(stage, message, rounds[sender], view, receiver)
                if said is not None:
                    heard[receiver][sender] = said
        return heard

    def _exchange(self, group: tuple[int, ...], trusted: frozenset[int], sent: Mapping[int, Sent]) -> Exchange:
        """Parts to reducers and averages back. Reducers are those whose work enters."""
        reducers = [group[place] for place in sorted(trusted)]
        pieces = pieces_of(self.swarm.task.size, reducers)
        vectors = {peer: torch.cat([arrived(sent[peer].vector[piece.place]) for piece in pieces]) for peer in group}
        parts, counted = [], {reducer: dict.fromkeys(group, 0) for reducer in reducers}
        answers: dict[int, list[torch.Tensor | None]] = {peer: [] for peer in group}
        for piece in pieces:
            index = sum(part.reducer == group.index(piece.reducer) for part in parts)
            parts.append(Part(group.index(piece.reducer), index, piece.place.stop - piece.place.start))
            present = {p: vectors[p][piece.place] for p in reducers if counted[piece.reducer][p] == index}
            kept = self.swarm.conduct(piece.reducer).counts(self.kept(present, sent), self.swarm.attackers)
            for peer in kept:
                counted[piece.reducer][peer] += 1
            weights = [sent[peer].weight for peer in kept]
            average = arrived(self.made_of([present[peer] for peer in kept], weights)) if kept else None
            conduct = self.swarm.conduct(piece.reducer)
            for receiver in group:
                answers[receiver].append(None if average is None else conduct.answer(average, receiver))
        places = {reducer: tuple(count[peer] for peer in group) for reducer, count in counted.items()}
        return Exchange(group, vectors, pieces, parts, answers, places)

    def _state(self, rounds: Mapping[int, VerifiedRound], exchange: Exchange, sent: Mapping[int, Sent]) -> None:
        rows = {one.seed: None for one in rounds.values()}
        rows = {seed: directions(seed, self.swarm.task.size, self.settings.sums) for seed in rows}
        numbers = {peer: exchange.numbers(peer, rows[one.seed]) for peer, one in rounds.items()}
        stated = {peer: one.state(numbers[peer]) for peer, one in rounds.items()}
        views = {p: self._view(exchange, p, sent[p], rows[rounds[p].seed]) for p in rounds if p in self.swarm.attacking}
        for peer, heard in self._told("statement", rounds, stated, views).items():
            one = rounds[peer]
            own = [position for position, part in enumerate(exchange.parts) if part.reducer == one.own]
            held = Held(exchange, rows[one.seed], own) if own else {}
            answered = exchange.answered(peer, rows[one.seed])
            one.hear_statements(heard, exchange.parts, answered, held)
        guide = next(peer for peer in rounds if peer not in self.swarm.attackers)
        self._directions.append(rows[rounds[guide].seed])
        self._note_residuals(exchange, rounds[guide], numbers, rows[rounds[guide].seed], guide)

    def _view(self, exchange: Exchange, peer: int, sent: Sent, rows: np.ndarray) -> dict[str, Any]:
        reducers = [exchange.group[part.reducer] for part in exchange.parts]
        missing = rows @ (sent.true.double().numpy() - exchange.vectors[peer].double().numpy())
        accomplices = [place for place, reducer in enumerate(reducers) if reducer in self.swarm.attackers]
        return {"missing": missing, "accomplices_parts": accomplices}

    def _note_residuals(
        self, exchange: Exchange, one: VerifiedRound, numbers: Mapping[int, np.ndarray], rows: np.ndarray, guide: int
    ) -> None:
        """Of honest reducers' answers, by what those say that they counted: no lie of a sender is in it."""
        answered = exchange.answered(guide, rows)
        for position, (piece, part) in enumerate(zip(exchange.pieces, exchange.parts, strict=True)):
            here = exchange.counted[piece.reducer]
            kept = [place for place, count in enumerate(here) if count > part.index]
            if piece.reducer in self.swarm.attacking or not kept or any(one.commits[p].weight <= 0 for p in kept):
                continue
            lines = np.stack([exchange.line(exchange.group[place], position, guide, rows) for place in kept])
            weights = [one.commits[place].weight for place in kept]
            self.residual_max = max(self.residual_max, residual(lines, weights, answered[position], self.clips))

    def _prove(self, group: Sequence[int]) -> None:
        for peer in group:
            wanted, self.verifiers[peer].proofs_wanted = self.verifiers[peer].proofs_wanted, []
            for before, accuser, sender, part in wanted:
                exchange = self._exchanges[before.round_id]
                rows = directions(before.seed, self.swarm.task.size, self.settings.sums)
                before.prove(accuser, sender, part, exchange.numbers(before.group[sender], rows)[part])

    def _taken(
        self, group: Sequence[int], exchange: Exchange, lost: Mapping[int, frozenset[int]]
    ) -> dict[int, torch.Tensor]:
        """Members that were answered alike have one vector. What nobody answered is zero for all, as is what most were
        answered otherwise: who kept its own there would have a model of its own, and what it computes would look false
        to the others."""
        vectors: dict[tuple, torch.Tensor] = {}
        taken = {}
        for peer in group:
            answers = [
                None if part.reducer in lost[peer] else answer
                for part, answer in zip(exchange.parts, exchange.answers[peer], strict=True)
            ]
            key = tuple(map(id, answers))
            if key not in vectors:
                vectors[key] = torch.cat([
                    torch.zeros(piece.place.stop - piece.place.start) if answer is None else answer
                    for piece, answer in zip(exchange.pieces, answers, strict=True)
                ])  # fmt: skip
            taken[peer] = vectors[key]
        return taken

    # --- duties ---

    def _work_off_duties(self, group: Sequence[int]) -> None:
        for peer in group:
            verifier = self.verifiers[peer]
            duties, verifier.duties = verifier.duties, []
            for duty in duties:
                totals = [self._total(duty, first, last, peer) for first, last in duty.ranges]
                verifier.report(duty, self.swarm.conduct(peer).report(duty, totals, self._accomplices(duty)))

    def _total(self, duty: Duty, first: int, last: int, peer: int) -> np.ndarray:
        gradient = self.swarm.recompute(duty.samples.names[first:last], duty.epoch, peer)
        return sketch_slices([(last - first) * gradient], duty.seed, duty.slices, self.settings.sums)

    def _accomplices(self, duty: Duty) -> np.ndarray | None:
        """The sketches of what the target sent, if it is an attacker's."""
        exchange = self._exchanges[duty.round_id]
        target = exchange.group[duty.target]
        if target not in self.swarm.attackers:
            return None
        return sketch_slices([exchange.vectors[target]], duty.seed, duty.slices, self.settings.sums)

    # --- what came of it ---

    def _note(self, rounds: Mapping[int, VerifiedRound], exchange: Exchange) -> None:
        while len(self._exchanges) > self.settings.patience + 2:
            self._exchanges.pop(next(iter(self._exchanges)))
        places = [place for place, peer in enumerate(exchange.group) if peer not in self.swarm.attackers]
        guide = next(peer for peer in rounds if peer not in self.swarm.attackers)
        self._before = Before(rounds[guide], exchange.parts, places)
        self._note_mismatches(guide)
        for peer in self.left_out() - self.ban_epochs.keys():
            self.ban_epochs[peer] = self.swarm.epoch
        for peer, verifier in self.verifiers.items():
            if peer not in self.swarm.attackers:
                self.false_bans |= set(verifier.standing.banned()) - self.swarm.attackers

    def _note_mismatches(self, guide: int) -> None:
        """Of honest members' contributions that honest ones have computed again."""
        for one in self.verifiers[guide]._rounds.values():
            for check in one.checks.values():
                honest = {one.group[place] for place in (check.target, *(r.validator for r in check.ranges))}
                if check.is_complete and not honest & self.swarm.attackers:
                    found = check.mismatch([check.reports[part] for part in range(len(check.ranges))])
                    self.mismatch_max = max(self.mismatch_max, found)

    def result(self, score: float) -> Result:
        result = super().result(score)
        swarm = self.swarm
        banned = [epoch for peer, epoch in self.ban_epochs.items() if peer in swarm.attackers]
        if len(banned) == len(swarm.attackers):
            result.ban_all = max(banned) - swarm.plan.attack_from + 1
        result.banned, result.false_bans = len(banned), len(self.false_bans)
        result.honest_epochs = swarm.plan.epochs * (len(self.verifiers) - len(swarm.attackers))
        honest = {peer: one for peer, one in self.verifiers.items() if peer not in swarm.attackers}
        known = [one.standing for one in honest.values()]
        strikes = {(peer, s.round_id) for standing in known for peer in honest for s in standing.strikes_of(peer)}
        events = (event for one in honest.values() for event in one.events)
        suspensions = {(event.peer, event.epoch) for event in events if event.kind == "suspended"}
        result.honest_strikes = len(strikes)
        result.honest_suspensions = sum(peer in honest for peer, _ in suspensions)
        result.residual_max = self.residual_max
        result.mismatch_max = self.mismatch_max
        result.said = [event.text for event in self.verifiers[swarm.guide].events]
        return result
