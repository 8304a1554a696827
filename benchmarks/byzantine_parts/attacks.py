"""Who attacks, and how: a class each, with one method for everything that a member can falsify.

All of them know everything that is known (the honest members' gradients of this epoch, the model, what was drawn in
earlier rounds) and act together; that is the papers' omniscient attacker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from volunteer_kit.robust.draw import NONCE_SIZE, commitment
from volunteer_kit.robust.messages import Accusation, Commit, Duty, Reveal, Statement, Vote
from volunteer_kit.robust.reducing import SUMS

FEW = ("mean", "CenteredClip", "ours")


@dataclass
class View:
    """What an attacker sees before it sends."""

    me: int
    epoch: int  # since the attack began
    own: torch.Tensor  # the honest gradient of its own samples
    flipped: torch.Tensor  # the same with false labels
    late: torch.Tensor  # the same on the model of long ago
    honest: torch.Tensor  # (honest members, size): what they send
    attackers: frozenset[int]
    known: Sequence[torch.Tensor] = ()  # directions that were drawn in earlier rounds, (size,) each
    others: int = 16  # members in all
    trusted: bool = True  # does what we send enter the average?

    def constant(self, seed: int = 0) -> torch.Tensor:
        """A random direction as long as an honest gradient, the same for everybody and always."""
        drawn = torch.randn(self.own.shape, generator=torch.Generator().manual_seed(seed))
        return drawn * (self.length / drawn.norm())

    @property
    def length(self) -> float:
        return float(self.honest.norm(dim=1).median())


@dataclass
class Attack:
    """Honest in all things; attacks replace what they falsify.

    :param columns: that it makes sense for; () is all
    :param of_states: it needs rounds in which parameters are averaged. RunConfig refuses these with verification: the
        last line of defence is then the column before ours
    :param names_others: it names as many samples as it claims, its own or not
    """

    name: str = "none"
    columns: tuple[str, ...] = field(default=(), repr=False)
    of_states: bool = field(default=False, repr=False)
    names_others: bool = field(default=False, repr=False)
    needs_flipped: bool = field(default=False, repr=False)
    needs_late: bool = field(default=False, repr=False)

    def gradient(self, view: View) -> torch.Tensor:
        """What it sends."""
        return view.own

    def is_here(self, epoch: int) -> bool:
        """Does it come to the round, so many epochs after the attack began?"""
        return True

    def speed(self, speed: float) -> float:
        """What it says of its device, samples/s."""
        return speed

    def weight(self, samples: int, limit: float | None, largest: float) -> float:
        """:param limit: what is believed of its device; :param largest: of anybody"""
        return float(samples)

    def progress(self, samples: int, target: int) -> float:
        """How many samples of this epoch it says to have done. :param target: of the whole swarm"""
        return float(samples)

    def answer(self, average: torch.Tensor, receiver: int) -> torch.Tensor | None:
        """What it returns as a reducer; None: nothing."""
        return average

    def counts(self, senders: Sequence[int], attackers: frozenset[int]) -> list[int]:
        """As a reducer: whose parts it averages, of those that came."""
        return list(senders)

    def state(self, params: torch.Tensor) -> torch.Tensor:
        """What it sends when states are averaged."""
        return params

    def lists(self, group: tuple[int, ...], attackers: frozenset[int]) -> dict[int, tuple[int, ...]]:
        """As leader: whom it tells each member to average with."""
        return dict.fromkeys(group, group)

    def report(self, duty: Duty, totals: list[np.ndarray], sent: np.ndarray | None) -> list[np.ndarray]:
        """As validator or juror. `sent`: the sketch of what an accomplice sent, None for an honest target."""
        return totals

    def says(self, stage: str, message: Any, round_: Any, view: Mapping[str, Any], receiver: int) -> Any:
        """Of a message of verification ("commit", "reveal", "statement"), what `receiver` gets; None: nothing."""
        return message


@dataclass
class SignFlip(Attack):
    times: float = 1000.0

    def gradient(self, view: View) -> torch.Tensor:
        return -self.times * view.own


@dataclass
class LabelFlip(Attack):
    needs_flipped: bool = True

    def gradient(self, view: View) -> torch.Tensor:
        return view.flipped


@dataclass
class ConstantDirection(Attack):
    def gradient(self, view: View) -> torch.Tensor:
        return view.constant()


@dataclass
class Delayed(Attack):
    needs_late: bool = True

    def gradient(self, view: View) -> torch.Tensor:
        return view.late


@dataclass
class InnerProduct(Attack):
    """Xie et al. 2020, "Fall of Empires": a little of the honest mean, backwards."""

    share: float = 0.1

    def gradient(self, view: View) -> torch.Tensor:
        return -self.share * view.honest.mean(0)


@dataclass
class LittleIsEnough(Attack):
    """Baruch et al. 2019, "A Little Is Enough": so far off that enough honest ones are further."""

    def gradient(self, view: View) -> torch.Tensor:
        n, m = view.others, len(view.attackers)
        supporters = n // 2 + 1 - m
        z = NormalDist().inv_cdf((n - m - supporters) / (n - m))
        return view.honest.mean(0) - z * view.honest.std(0)


@dataclass
class Noise(Attack):
    times: float = 10.0

    def gradient(self, view: View) -> torch.Tensor:
        return self.times * view.constant(1000 * view.epoch + view.me)


@dataclass
class NotANumber(Attack):
    def gradient(self, view: View) -> torch.Tensor:
        return torch.full_like(view.own, torch.nan)


@dataclass
class HugeWeight(SignFlip):
    times: float = 1.0

    def weight(self, samples: int, limit: float | None, largest: float) -> float:
        return 1e6


@dataclass
class WeightAtTheBound(SignFlip):
    """Says that its device is as fast as is believed at most, and claims all the samples that it could have done."""

    times: float = 1.0
    names_others: bool = True

    def speed(self, speed: float) -> float:
        return 1e6

    def weight(self, samples: int, limit: float | None, largest: float) -> float:
        return float(int(min(limit, largest)))


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
class KnowsSketches(Attack):
    """Adds what no direction drawn so far shows: the honest mean backwards, orthogonal to all of them."""

    times: float = 3.0

    def gradient(self, view: View) -> torch.Tensor:
        cheat = -self.times * view.honest.mean(0)
        if len(view.known):
            basis = torch.linalg.qr(torch.stack(list(view.known)).T.double())[0]  # (size, directions)
            cheat = (cheat.double() - basis @ (basis.T @ cheat.double())).float()
        return view.own + cheat


@dataclass
class PoisonedState(Attack):
    columns: tuple[str, ...] = ("mean", "median", "Krum", "CenteredClip")
    of_states: bool = True

    def state(self, params: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(params.shape, generator=torch.Generator().manual_seed(len(params)))
        return params + 10 * params.norm() / drawn.norm() * drawn


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
class InsideTheTolerance(Attack):
    """No more than precision and codec could explain: of its own length along the honest mean, backwards."""

    share: float = 0.15

    def gradient(self, view: View) -> torch.Tensor:
        mean = view.honest.mean(0)
        return view.own - self.share * view.own.norm() / mean.norm().clamp_min(1e-30) * mean


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


ATTACKS: tuple[Attack, ...] = (
    SignFlip("sign flip x1000"),
    SignFlip("sign flip of honest norm", times=1.0),
    LabelFlip("label flip"),
    ConstantDirection("constant direction"),
    Delayed("delayed gradients"),
    InnerProduct("inner product 0.1"),
    InnerProduct("inner product 0.6", share=0.6),
    LittleIsEnough("a little is enough"),
    Noise("random noise"),
    NotANumber("NaN"),
    HugeWeight("weight 1e6"),
    SilentReducer("silent reducers"),
    WrongReducer("wrong reducers"),
    TwoAverages("two averages"),
    LeavesOut("honest ones left out"),
    KnowsSketches("knows earlier sketches"),
    WeightAtTheBound("weight at the bound", FEW),
    LiesInItsOwnSlice("lies in its own slice", FEW),
    SilentWhenDrawn("silent when drawn", FEW),
    AnotherNumber("another number to each", FEW),
    HitAndRun("hit and run reducer", FEW),
    WrongReducer("wrong reducers x1e6", FEW, times=1e6),
    InsideTheTolerance("inside the tolerance", FEW),
    HonestOnProbation("honest on probation", FEW),
    PoisonedState("poisoned state averaging"),
    InflatedProgress("inflated progress"),
    LyingLeader("lying leader"),
    FalseAccusation("false accusation"),
    Vouching("validators vouch for each other"),
)
