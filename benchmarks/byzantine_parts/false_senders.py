"""Attackers that send what their samples do not give."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch

from benchmarks.byzantine_parts.attack import Attack, View


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

    def weight(self, samples: int, limit: float) -> float:
        return 1e6


@dataclass
class WeightAtTheBound(SignFlip):
    """Says that its device is as fast as is believed at most, and claims all the samples that it could have done."""

    times: float = 1.0
    names_others: bool = True

    def speed(self, speed: float) -> float:
        return 1e6

    def weight(self, samples: int, limit: float) -> float:
        return float(int(limit))


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
class InsideTheTolerance(Attack):
    """No more than precision and codec could explain: of its own length along the honest mean, backwards."""

    share: float = 0.15

    def gradient(self, view: View) -> torch.Tensor:
        mean = view.honest.mean(0)
        return view.own - self.share * view.own.norm() / mean.norm().clamp_min(1e-30) * mean
