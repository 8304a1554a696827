"""The columns: a reduction rule, alone or behind the first line; ours is in verified.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from hivemind.compression import CompressionBase, CompressionInfo

from benchmarks.byzantine_parts.first_line import FirstLine
from volunteer_kit.robust.bounds import bound_norms
from volunteer_kit.robust.rules import rule
from volunteer_kit.swarm.codecs.registry import CODECS, decode

if TYPE_CHECKING:
    from benchmarks.byzantine_parts.swarm import Result, Swarm

CODEC = CODECS["blockwise8"]
PART = 2**17  # values of a part at most


class Sent(NamedTuple):
    """What one member sends."""

    vector: torch.Tensor  # (size,), before the codec
    names: tuple[int, ...]
    weight: float
    true: torch.Tensor  # what its own samples give


class Piece(NamedTuple):
    """A part of the vector, and who reduces it."""

    reducer: int
    place: slice


def pieces_of(size: int, reducers: Sequence[int]) -> list[Piece]:
    """Every reducer has an equal slice, cut into parts."""
    bounds = [size * i // len(reducers) for i in range(len(reducers) + 1)]
    return [
        Piece(reducer, slice(first, min(first + PART, end)))
        for reducer, begin, end in zip(reducers, bounds, bounds[1:], strict=False)
        for first in range(begin, end, PART)
    ]


def arrived(tensor: torch.Tensor, codec: CompressionBase = CODEC) -> torch.Tensor:
    """As it comes out of the real codec at the other end."""
    return decode(codec.compress(tensor, CompressionInfo.from_tensor(tensor))).float()


class Defence:
    """A rule. `first_line`: refuses what cannot be true before the rule sees it; without it, as in stock hivemind."""

    def __init__(self, name: str, rule_name: str, first_line: bool = True):
        self.name, self.reduce, self.first_line = name, rule(rule_name), first_line

    def begin(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.bounds = FirstLine(swarm)  # attackers know it, whether anybody looks at it or not

    # --- what is believed ---

    def counted(self, claims: Mapping[int, float], brought: float) -> float:
        """The swarm's samples as told, or as believed of members that would bring so many."""
        return self.bounds.counted(claims, brought) if self.first_line else sum(claims.values())

    def left_out(self) -> frozenset[int]:
        """Whom nobody averages with any more."""
        return frozenset()

    def is_trusted(self, peer: int) -> bool:
        """Does its work enter?"""
        return True

    def leader(self, group: Sequence[int], draw: int) -> int:
        followed = (self.bounds.followed(group) if self.first_line else ()) or list(group)
        return followed[draw % len(followed)]

    def groups(self, leader: int, told: Mapping[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """With stock hivemind those who were told the same list average; an attacking leader's accomplices are in all
        groups."""
        return self.bounds.groups(leader, told) if self.first_line else list(dict.fromkeys(told.values()))

    def known_directions(self) -> Sequence[torch.Tensor]:
        return ()

    # --- averaging ---

    def average(self, members: Sequence[int], sent: Mapping[int, Sent]) -> dict[int, torch.Tensor]:
        """Return the average that each member ends with. In stock hivemind, a member keeps its own values where a
        reducer answers nothing. In the kit, a step names the bytes of each answer: all members take those that the
        leader has, or zeros."""
        common, own = torch.zeros(self.swarm.task.size), {}
        for piece in pieces_of(self.swarm.task.size, members):
            parts = {peer: arrived(sent[peer].vector[piece.place]) for peer in members}
            average = arrived(self.reduced(piece.reducer, parts, sent))
            common[piece.place] = average
            if piece.reducer not in self.swarm.attacking:
                continue
            if self.first_line:
                answer = self.swarm.conduct(piece.reducer).answer(average, members[0])
                common[piece.place] = torch.zeros_like(average) if answer is None else answer
                continue
            for receiver in members:
                answer = self.swarm.conduct(piece.reducer).answer(average, receiver)
                if answer is not average:
                    other = sent[receiver].vector[piece.place] if answer is None else answer
                    own.setdefault(receiver, []).append((piece.place, other))
        if self.first_line:
            self.settle(members, sent)
        return {peer: _changed(common, own.get(peer, ())) for peer in members}

    def settle(self, members: Sequence[int], sent: Mapping[int, Sent]) -> None:
        """Accounts have spent what they brought."""
        passed = [peer for peer in members if not self.refusal(peer, sent[peer].vector, sent[peer].weight)]
        self.bounds.settle({peer: sent[peer].weight for peer in passed})

    def reduced(self, reducer: int, parts: Mapping[int, torch.Tensor], sent: Mapping[int, Sent]) -> torch.Tensor:
        kept = self.kept(parts, sent) if self.first_line else list(parts)
        kept = self.swarm.conduct(reducer).counts(kept, self.swarm.attackers)
        if not kept:
            return torch.zeros_like(next(iter(parts.values())))
        return self.made_of([parts[peer] for peer in kept], [sent[peer].weight for peer in kept])

    def made_of(self, parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        """The average of these parts; the first line scales down what is far longer than the others'."""
        return self.reduce(bound_norms(parts, weights)[0] if self.first_line else parts, weights)

    def kept(self, parts: Mapping[int, torch.Tensor], sent: Mapping[int, Sent]) -> list[int]:
        """Whose part passes the first line."""
        return [peer for peer in parts if not self.refusal(peer, parts[peer], sent[peer].weight)]

    def refusal(self, peer: int, part: torch.Tensor, weight: float) -> str | None:
        return self.bounds.why_refused(peer, part, weight)

    def average_states(self, states: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Parameters of all members, which stock hivemind averages now and then: a mean that is believed."""
        return dict.fromkeys(states, self.reduce(list(states.values()), [1.0] * len(states)))

    def result(self, score: float) -> Result:
        from benchmarks.byzantine_parts.swarm import Result

        return Result(score)


def _changed(common: torch.Tensor, answers: Sequence[tuple[slice, torch.Tensor]]) -> torch.Tensor:
    if not answers:
        return common
    vector = common.clone()
    for place, values in answers:
        vector[place] = values
    return vector


def rules() -> list[Defence]:
    """The columns without verification."""
    return [
        Defence("mean", "mean", first_line=False),
        Defence("median", "median"),
        Defence("Krum", "krum"),
        Defence("CenteredClip", "centered_clip"),
    ]
