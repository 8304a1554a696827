"""Attackers that reduce, lead, vote or tell otherwise than they should."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from benchmarks.byzantine_parts.attack import Attack, View
from benchmarks.byzantine_parts.false_senders import SignFlip
from volunteer_kit.robust.draw import NONCE_SIZE, commitment
from volunteer_kit.robust.messages import Accusation, Commit, Duty, Reveal, Statement, Vote
from volunteer_kit.robust.reducing import SUMS


@dataclass
class SilentReducer(Attack):
    def answer(self, average: torch.Tensor, receiver: int) -> torch.Tensor | None:
        return None


@dataclass
class WrongReducer(Attack):
    times: float = 1.0

    def answer(self, average: torch.Tensor, receiver: int) -> torch.Tensor | None:
        return -self.times * average


@dataclass
class HitAndRun(WrongReducer):
    """Gone before it can be asked; and back when what it did is closed."""

    away: int = 5  # epochs

    def is_here(self, epoch: int) -> bool:
        return epoch % (1 + self.away) == 0


@dataclass
class TwoAverages(Attack):
    """Drives members apart: what the one computes on its model is false to the other."""

    def answer(self, average: torch.Tensor, receiver: int) -> torch.Tensor | None:
        return average if receiver % 2 else -average


@dataclass
class LeavesOut(SignFlip):
    """Averages its accomplices with no more honest members than there are of them."""

    times: float = 1.0

    def counts(self, senders: Sequence[int], attackers: frozenset[int]) -> list[int]:
        accomplices = [sender for sender in senders if sender in attackers]
        honest = [sender for sender in senders if sender not in attackers]
        return sorted(accomplices + honest[: max(1, len(accomplices))])


@dataclass
class InflatedProgress(Attack):
    """As much as is not dropped for being impossible; more than its gradients will weigh."""

    def progress(self, samples: int, target: int) -> float:
        return 4.0 * target


@dataclass
class LyingLeader(SignFlip):
    """Tells half of the honest members that the other half is not there: among the rest attackers are the most."""

    times: float = 1.0

    def lists(self, group: tuple[int, ...], attackers: frozenset[int]) -> dict[int, tuple[int, ...]]:
        honest = [member for member in group if member not in attackers]
        few, many = honest[: len(honest) // 2], honest[len(honest) // 2 :]
        with_few = tuple(member for member in group if member not in many)
        with_many = tuple(member for member in group if member not in few)
        return {member: with_few if member not in many else with_many for member in group}


@dataclass
class FalseAccusation(Attack):
    """Works honestly, and finds every honest member at fault: as validator, as juror and as reducer."""

    def report(self, duty: Duty, totals: list[np.ndarray], sent: np.ndarray | None) -> list[np.ndarray]:
        return [-total for total in totals] if sent is None else totals

    def says(self, stage: str, message: Any, round_: Any, view: Mapping[str, Any], receiver: int) -> Any:
        if stage != "commit" or not view["before"]:
            return message
        before, attackers, me = view["before"], view["attackers"], view["me"]
        own = [position for position, part in enumerate(before.parts) if part.reducer == before.round.own]
        false = [Accusation(before.round.round_id, place, own[0]) for place in before.honest_places if own]
        false += [Vote(before.round.round_id, place, "gradient", True, 9.0) for place in before.honest_places]
        distrusts = frozenset(place for place, peer in enumerate(round_.group) if peer not in attackers)
        kept = tuple(news for news in message.news if not isinstance(news, Vote))
        return replace(message, news=kept + tuple(false), distrusts=distrusts, bans=distrusts) if me >= 0 else message


@dataclass
class Vouching(SignFlip):
    """Sends its gradient backwards, and says of its accomplices that theirs are right."""

    times: float = 1.0

    def report(self, duty: Duty, totals: list[np.ndarray], sent: np.ndarray | None) -> list[np.ndarray]:
        if sent is None:
            return totals
        return [sent * (last - first) for first, last in duty.ranges]

    def says(self, stage: str, message: Any, round_: Any, view: Mapping[str, Any], receiver: int) -> Any:
        if not isinstance(message, Commit):
            return message
        accomplices = [place for place, peer in enumerate(round_.group) if peer in view["attackers"]]
        distrusts = (message.distrusts or frozenset()) - set(accomplices)
        return replace(message, distrusts=distrusts, bans=message.bans - set(accomplices))


@dataclass
class HonestOnProbation(SignFlip):
    """Its gradient backwards while it counts; honest until it counts again."""

    times: float = 1.0

    def gradient(self, view: View) -> torch.Tensor:
        return super().gradient(view) if view.trusted else view.own


@dataclass
class SilentWhenDrawn(HonestOnProbation):
    """Its line breaks when it should say what it computed; it sees the draw before it has to."""

    def says(self, stage: str, message: Any, round_: Any, view: Mapping[str, Any], receiver: int) -> Any:
        has_cheated = round_.own in round_.trusted
        return None if isinstance(message, Statement) and message.opening is not None and has_cheated else message


@dataclass
class LiesInItsOwnSlice(SignFlip):
    """Of what it sent to honest reducers it says the truth; of the rest what makes its sums those of its samples."""

    times: float = 1.0

    def says(self, stage: str, message: Any, round_: Any, view: Mapping[str, Any], receiver: int) -> Any:
        if isinstance(message, Commit):  # it does not accuse those who lie to it
            return replace(message, news=tuple(news for news in message.news if not isinstance(news, Accusation)))
        if not isinstance(message, Statement) or not len(view["accomplices_parts"]):
            return message
        numbers, parts = np.array(message.numbers), view["accomplices_parts"]
        numbers[parts, SUMS:] += view["missing"] / len(parts)
        return replace(message, numbers=numbers)


@dataclass
class AnotherNumber(HonestOnProbation):
    """Promises and shows each member a number of its own, so that no two draw the same."""

    def says(self, stage: str, message: Any, round_: Any, view: Mapping[str, Any], receiver: int) -> Any:
        number = receiver.to_bytes(NONCE_SIZE, "little")
        if isinstance(message, Commit):
            round_.tells_each_its_own = view["counts"]
        if receiver == view["me"] or not round_.tells_each_its_own:
            return message
        if isinstance(message, Commit):
            return replace(message, nonce=commitment(number))
        return replace(message, nonce=number) if isinstance(message, Reveal) else message
