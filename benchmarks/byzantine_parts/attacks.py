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

from volunteer_kit.robust.messages import Accusation, Commit, Duty, Vote


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

    def constant(self, seed: int = 0) -> torch.Tensor:
        """A random direction as long as an honest gradient, the same for everybody and always."""
        drawn = torch.randn(self.own.shape, generator=torch.Generator().manual_seed(seed))
        return drawn * (self.length / drawn.norm())

    @property
    def length(self) -> float:
        return float(self.honest.norm(dim=1).median())


@dataclass
class Attack:
    """Honest in all things; attacks replace what they falsify."""

    name: str = "none"
    needs_flipped: bool = field(default=False, repr=False)
    needs_late: bool = field(default=False, repr=False)

    def gradient(self, view: View) -> torch.Tensor:
        """What it sends."""
        return view.own

    def weight(self, samples: int) -> float:
        return float(samples)

    def progress(self, samples: int) -> float:
        """How many samples of this epoch it says to have done."""
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

    def weight(self, samples: int) -> float:
        return 1e6


@dataclass
class SilentReducer(Attack):
    def answer(self, average: torch.Tensor, receiver: int) -> torch.Tensor | None:
        return None


@dataclass
class WrongReducer(Attack):
    def answer(self, average: torch.Tensor, receiver: int) -> torch.Tensor | None:
        return -average


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
    def state(self, params: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(params.shape, generator=torch.Generator().manual_seed(len(params)))
        return params + 10 * params.norm() / drawn.norm() * drawn


@dataclass
class InflatedProgress(Attack):
    def progress(self, samples: int) -> float:
        return 1e9


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
    PoisonedState("poisoned state averaging"),
    InflatedProgress("inflated progress"),
    LyingLeader("lying leader"),
    FalseAccusation("false accusation"),
    Vouching("validators vouch for each other"),
)
