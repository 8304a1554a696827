"""What a swarm is doing, from what its peers say of themselves: one liar bends nothing, and is named.

Everything here is pure. Medians with the median absolute deviation (MAD) beside them: half of the peers would have to
lie together to move either (Rousseeuw and Croux 1993, "Alternatives to the Median Absolute Deviation").
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

SIGMA = 1.4826  # MAD -> standard deviation, of a normal distribution
FAR = 6.0  # of those; 1 in 10^9 honest values
ENOUGH = 4  # accounts from which on somebody can be called different from the others
LEAST_LOSS = 0.5  # nats; a few samples of one microbatch differ by as much
LEAST_SPEED = math.log(20)  # a T4 and a TPU are both honest
LEAST_EPOCHS = 60.0  # records are written every 15 s, and a small run makes 4 epochs a second
MEASURED_SLACK = 2.0  # times the measured speed that the sum of claims may have: applied steps lag behind


@dataclass(frozen=True)
class Claim:
    """What one peer says. `account`: whose it is, anything that is equal for peers of one account."""

    peer_id: str
    account: bytes
    epoch: float
    samples_per_second: float
    loss: float | None
    name: str = ""


@dataclass(frozen=True)
class Summary:
    """Of all peers here. None: nobody has said."""

    volunteers: int
    loss: float | None
    samples_per_second: float
    epoch: int | None


@dataclass(frozen=True)
class Outlier:
    """A peer whose claim is far from the others'; what: "loss", "speed" or "epoch"."""

    peer_id: str
    what: str
    value: float
    typical: float

    def in_words(self) -> str:
        value, typical = _short(self.value), _short(self.typical)
        if self.what == "loss":
            return f"it reports a loss of {value}, the others of about {typical}"
        if self.what == "speed":
            return f"it reports {value} samples a second, the others about {typical}"
        return f"it says it is at step {value}, the others are at about {typical}"


def summarize(claims: Iterable[Claim], measured: float | None = None, max_speed: float = 10_000.0) -> Summary:
    """Medians, and a sum of speeds in which nobody counts more than he can be believed.

    :param measured: samples/s that entered applied steps lately, None: not known yet. It needs nobody's word, so that
        no claim lifts the sum above MEASURED_SLACK times it
    :param max_speed: samples/s of any one peer
    """
    claims = list(claims)
    speeds = [speed for claim in claims if (speed := _positive(claim.samples_per_second)) is not None]
    cap = min(max_speed, _highest_speed(speeds))
    total = sum(min(speed, cap) for speed in speeds)
    if measured is not None:
        total = min(total, MEASURED_SLACK * measured)
    losses = _by_account(claims, "loss")
    epochs = _by_account(claims, "epoch")
    return Summary(
        volunteers=len(claims),
        loss=median(losses.values()) if losses else None,
        samples_per_second=total,
        epoch=round(median(epochs.values())) if epochs else None,
    )


def outliers(claims: Iterable[Claim]) -> list[Outlier]:
    """Whose loss, speed or epoch cannot be of the same swarm's. Nobody while there are fewer than ENOUGH accounts."""
    claims, found = list(claims), []
    for what, field, least in (("loss", "loss", LEAST_LOSS), ("epoch", "epoch", LEAST_EPOCHS)):
        typical = _by_account(claims, field)
        for claim in claims:
            value = _number(getattr(claim, field))
            if value is not None and is_far(value, list(typical.values()), least):
                found.append(Outlier(claim.peer_id, what, value, median(typical.values())))
    logs = {claim: math.log(s) for claim in claims if (s := _positive(claim.samples_per_second)) is not None}
    for claim, value in logs.items():  # only too fast: slow machines are welcome
        others = list(_medians({(c.account, i): v for i, (c, v) in enumerate(logs.items())}).values())
        if value > median(others) and is_far(value, others, LEAST_SPEED):
            found.append(Outlier(claim.peer_id, "speed", math.exp(value), math.exp(median(others))))
    return found


def is_far(value: float, values: Sequence[float], least: float) -> bool:
    """Is it farther from the median than FAR deviations, and than `least`? No, where there are too few to say."""
    if len(values) < ENOUGH:
        return False
    middle = median(values)
    deviation = SIGMA * median(abs(other - middle) for other in values)
    return abs(value - middle) > max(FAR * deviation, least)


def _highest_speed(speeds: Sequence[float]) -> float:
    if len(speeds) < ENOUGH:
        return math.inf
    logs = [math.log(speed) for speed in speeds]
    middle = median(logs)
    return math.exp(middle + max(FAR * SIGMA * median(abs(one - middle) for one in logs), LEAST_SPEED))


def _by_account(claims: Sequence[Claim], field: str) -> dict[bytes, float]:
    """Each account has one voice, or fifty machines that do not exist would be the median."""
    return _medians({(c.account, i): v for i, c in enumerate(claims) if (v := _number(getattr(c, field))) is not None})


def _medians(values: Mapping[tuple[bytes, int], float]) -> dict[bytes, float]:
    grouped: dict[bytes, list[float]] = {}
    for (account, _), value in values.items():
        grouped.setdefault(account, []).append(value)
    return {account: median(own) for account, own in grouped.items()}


def _number(value: float | None) -> float | None:
    """What can be true: not negative, finite."""
    return float(value) if value is not None and math.isfinite(value) and value >= 0 else None


def _positive(value: float | None) -> float | None:
    number = _number(value)
    return number if number else None


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
