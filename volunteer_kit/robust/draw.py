"""What a group draws together: a seed that nobody chose, whose work is looked at, by whom, and who judges a dispute.

Every member commits to a number before anything is sent and shows it afterwards; the seed is a digest of all that were
shown. Whether a member is looked at follows from the others' numbers alone: it cannot get away by withholding its own.

Source: Gorbunov et al. 2021, "Secure Distributed Training at Scale", section 3.1 (MPRNG) and Alg. 2 (validators).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from math import comb
from statistics import median_low
from typing import NamedTuple

NONCE_SIZE = 16  # bytes
SEED_SIZE = 32
FAST = 2.0  # times the median's work; what is usual among volunteers costs no more looks
FORCED = 1 / 4  # of the members at most are looked at because they have to be; beyond it, turns are drawn
MAX_VALIDATORS = 8  # of one member: the more, the likelier that one of them lies
# votes of more than half can be bad with less than this chance
BAD_MAJORITY = 1e-6


class Range(NamedTuple):
    """Samples [first, last) of a member's list, which `validator` (a place in the group) computes again."""

    validator: int
    first: int
    last: int


def commitment(nonce: bytes) -> bytes:
    return hashlib.blake2b(nonce, digest_size=16, person=b"nonce").digest()


def joint_seed(round_id: bytes, nonces: Mapping[int, bytes]) -> bytes:
    """:param nonces: place in the group -> what was shown, each checked against its commitment"""
    shown = b"".join(place.to_bytes(4, "little") + nonces[place] for place in sorted(nonces))
    return hashlib.blake2b(round_id + shown, digest_size=SEED_SIZE).digest()


def uniform(seed: bytes, purpose: bytes, *places: int) -> float:
    """A number in [0, 1) that follows from the seed."""
    words = b"".join(place.to_bytes(4, "little") for place in places)
    drawn = hashlib.blake2b(seed + words, digest_size=8, person=purpose).digest()
    return int.from_bytes(drawn, "little") / 2**64


def chances(weights: Mapping[int, float], share: float) -> dict[int, float]:
    """With which a member's contribution is computed again: `share`, and more for who weighs more than FAST times the
    median, by as much more. Who claims to have done far more than the others does as much harm with it."""
    usual = FAST * median_low(weights.values()) if weights else 1.0
    return {place: min(1.0, share * max(1.0, weight / usual)) for place, weight in weights.items()}


def draw_by_chance(round_id: bytes, nonces: Mapping[int, bytes], chance_of: Mapping[int, float]) -> frozenset[int]:
    """Whose whole contribution is computed again, each with its chance, by the others' numbers."""

    def fate(place: int) -> float:
        others = {other: nonce for other, nonce in nonces.items() if other != place}
        return uniform(joint_seed(round_id, others), b"target", place)

    return frozenset(place for place, chance in chance_of.items() if fate(place) < chance)


def draw_turns(seed: bytes, members: Collection[int], due: Collection[int]) -> frozenset[int]:
    """Of those who have to be looked at (newcomers, who has lost trust), so many that the others have time left to
    train."""
    by_turn = sorted(set(due) & set(members), key=lambda place: uniform(seed, b"turn", place))
    return frozenset(by_turn[: max(1, int(FORCED * len(members)))])


def draw_validators(
    seed: bytes, target: int, samples: int, weights: Mapping[int, float], eligible: Iterable[int]
) -> tuple[Range, ...]:
    """Who computes the samples of `target` again: members in drawn order, until together they have done as many samples
    in this round as there are to do, each a range as large as its own speed; () if nobody is eligible.

    One that can do all of it alone does: with each further one the chance grows that one is in league with the target,
    and makes its number fit.
    """
    order = sorted(set(eligible) - {target}, key=lambda place: uniform(seed, b"validator", target, place))
    chosen: list[int] = []
    for place in order[:MAX_VALIDATORS]:
        if weights.get(place, 0) > 0 or not chosen:
            chosen.append(place)
        if sum(weights.get(one, 0) for one in chosen) >= samples:
            break
    able = [max(weights.get(place, 0), 1.0) for place in chosen]
    ranges, first, done = [], 0, 0.0
    for place, speed in zip(chosen, able, strict=True):
        done += speed
        last = samples if place == chosen[-1] else min(samples, round(samples * done / sum(able)))
        if last > first:
            ranges.append(Range(place, first, last))
        first = last
    return tuple(ranges)


def chance_of_bad_majority(members: int, bad: int, jury: int) -> float:
    """That half or more of `jury` drawn of `members` are among the `bad` ones (hypergeometric)."""
    worst = range((jury + 1) // 2, min(jury, bad) + 1)
    return sum(comb(bad, k) * comb(members - bad, jury - k) for k in worst) / comb(members, jury)


@lru_cache(maxsize=256)
def jury_size(members: int, bad: int, chance: float = BAD_MAJORITY) -> int:
    """How many judge: as few as keep the chance of a bad majority below `chance`, everybody if none do."""
    return next((n for n in range(1, members, 2) if chance_of_bad_majority(members, bad, n) < chance), members)


def draw_jury(seed: bytes, accused: int, electors: Collection[int], bad: int) -> frozenset[int]:
    """Who votes on the accused. `bad`: of the electors at most; the accused may not be one of them."""
    size = jury_size(len(electors), min(bad, len(electors)))
    return frozenset(sorted(electors, key=lambda place: uniform(seed, b"jury", accused, place))[:size])
