"""The reduction rules: CenteredClip beside a reference written from the paper, and what attackers get out of it."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from volunteer_kit.robust.centered_clip import Clipped, centered_clip, factor, radius_of
from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.robust.median import coordinate_median
from volunteer_kit.robust.rules import RULES, krum, rule, trimmed_mean

KINDS = ("normal", "ties", "zeros", "one peer", "huge", "tiny", "outlier", "two clusters", "offset", "far apart")


# --- the reference: plain loops over the paper's line, float64 ---


def reference(parts: list[np.ndarray], weights: list[float], tau: float | None) -> tuple[np.ndarray, float]:
    """Where the paper's iteration ends, and the radius around the median that it begins at."""
    xs = [part.astype(np.float64) for part in parts]
    weights = weights if sum(weights) > 0 else [1.0] * len(weights)
    v = np.array([middle([x[k] for x in xs], weights) for k in range(len(xs[0]))])
    spread = lower([length(x - v) for x in xs], weights)
    for _ in range(5000):
        radius = lower([length(x - v) for x in xs], weights) if tau is None else tau * math.sqrt(len(v))
        step = np.zeros_like(v)
        for x, weight in zip(xs, weights, strict=True):
            distance = length(x - v)
            step += weight * (x - v) * (min(1.0, radius / distance) if distance > 0 else 1.0)
        v = v + step / sum(weights)
        if length(step) / sum(weights) <= 1e-12 * radius:
            break
    return v, spread


def length(x: np.ndarray) -> float:
    largest = float(np.abs(x).max(initial=0.0))
    return largest * math.sqrt(sum((float(a) / largest) ** 2 for a in x)) if largest else 0.0


def lower(values: list[float], weights: list[float]) -> float:
    reached = 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        reached += weight
        if reached >= sum(weights) / 2 * (1 - 1e-12):
            return value
    raise AssertionError


def middle(values: list[float], weights: list[float]) -> float:
    return (lower(values, weights) - lower([-value for value in values], weights)) / 2


def random_case(seed: int) -> tuple[list[np.ndarray], list[float], float | None]:
    """Parts, weights and tau; ten kinds in turn."""
    rng, kind = np.random.default_rng(seed), KINDS[seed % len(KINDS)]
    n, d = (1 if kind == "one peer" else int(rng.integers(2, 18))), int(rng.choice([1, 2, 7, 40]))
    x = rng.normal(size=(n, d))
    some = rng.permutation(n)[: max(1, n // 3)]
    scale = {"huge": 1e30, "tiny": 1e-30}.get(kind, 10.0 ** rng.integers(-3, 4))
    if kind == "ties":
        x = np.round(x)
    elif kind == "zeros":
        x[some] = 0
    elif kind == "outlier":
        x[some[0]] *= 1e20
    elif kind == "two clusters":
        x = 1e-4 * x + (rng.permutation(n) * 5 < 2 * n)[:, None]
    elif kind == "offset":
        x += 1e4
    elif kind == "far apart":
        x *= 10.0 ** rng.integers(-4, 5, size=(n, 1))
    weights = [1.0] * n if rng.random() < 0.5 else rng.integers(0, 64, size=n).astype(float).tolist()
    tau = None if rng.random() < 0.6 else float(scale * 10 ** rng.uniform(-1, 1))
    return list((scale * x).astype(np.float32)), weights, tau


def tensors(parts: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(part) for part in parts]


@pytest.mark.parametrize("seed", range(200))
def test_centered_clip_is_the_papers(seed: int):
    parts, weights, tau = random_case(seed)
    expected, spread = reference(parts, weights, tau)
    found = centered_clip(tensors(parts), weights, tau)
    assert found.average.dtype == torch.float32
    assert torch.isfinite(found.average).all()
    rounded = expected.astype(np.float32)  # the answer is float32: nearer than that nobody can be
    scale = spread if tau is None else max(spread, tau * math.sqrt(len(expected)))
    error = np.abs(found.average.numpy().astype(np.float64) - rounded)
    assert np.all(error <= 1e-6 * scale + np.spacing(np.abs(rounded))), (error.max() / scale, KINDS[seed % 10])


def test_a_fixed_point_says_how_it_was_found():
    torch.manual_seed(0)
    parts = [torch.randn(4, 25) for _ in range(13)] + [100 + torch.randn(4, 25) for _ in range(3)]
    found = centered_clip(parts, [1.0] * 16)
    distances = [(part - found.average).norm().item() for part in parts]
    radius = radius_of(distances, [1.0] * 16)
    assert found.average.shape == (4, 25)
    assert found.tau == pytest.approx(radius / 10, rel=1e-5), "per square root of an element"
    assert found.n_clipped == sum(distance > radius * 1.00001 for distance in distances) == 8
    assert found.step_norm <= 1e-9 * radius
    pulls = [(part - found.average) * factor(d, radius) for part, d in zip(parts, distances, strict=True)]
    assert torch.stack(pulls).sum(0).norm() <= 1e-4 * radius


def test_a_given_tau_is_per_square_root_of_an_element():
    one, four = torch.tensor([0.0, 0.0, 8.0]), torch.zeros(3, 4)
    four[2] = 8.0  # the same three peers in a part four times as long
    narrow = centered_clip(list(one[:, None]), [1.0] * 3, tau=0.5).average
    wide = centered_clip(list(four), [1.0] * 3, tau=0.5).average
    assert narrow.item() == pytest.approx(0.25)  # 2 v = 0.5
    assert wide.tolist() == pytest.approx([0.25] * 4)


def test_a_tau_beyond_all_parts_is_the_mean_and_a_tiny_one_ends_too():
    torch.manual_seed(1)
    parts, weights = [torch.randn(50) for _ in range(9)], [float(i) for i in range(9)]
    assert torch.allclose(centered_clip(parts, weights, tau=1e6).average, weighted_mean(parts, weights), atol=1e-6)
    tiny = centered_clip(parts, weights, tau=1e-4)
    assert tiny.n_clipped == 8, "all that have weight"
    assert tiny.step_norm <= 1e-6 * tiny.tau


def test_a_majority_of_equal_parts_is_the_answer():
    same = torch.linspace(-1, 1, 33)
    found = centered_clip([same] * 9 + [same + 1e6] * 7, [1.0] * 16)
    assert torch.equal(found.average, same)
    assert (found.tau, found.step_norm, found.n_clipped) == (0.0, 0.0, 7)


def test_two_peers_meet_in_the_middle():
    found = centered_clip([torch.tensor([1.0, -1.0]), torch.tensor([3.0, -5.0])], [1.0, 1.0])
    assert found.average.tolist() == [2.0, -3.0]
    assert coordinate_median([torch.tensor([1.0, -1.0]), torch.tensor([3.0, -5.0])], [1.0, 1.0]).tolist() == [2.0, -3.0]


def test_a_part_of_nothing_has_an_average():
    assert centered_clip([torch.zeros(0, 3)] * 4, [1.0] * 4).average.shape == (0, 3)


def test_what_has_no_answer_is_refused():
    part = torch.zeros(2)
    for parts, weights in (([], []), ([part], []), ([part, torch.zeros(3)], [1.0, 1.0]), ([part], [-1.0])):
        for reduce in (centered_clip, coordinate_median, trimmed_mean, krum):
            with pytest.raises(ValueError):
                reduce(parts, weights)
    for tau in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="tau"):
            centered_clip([part], [1.0], tau)


# --- properties ---


def clipped(parts: torch.Tensor, weights: list[float]) -> Clipped:
    return centered_clip(list(parts), weights)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_order_of_peers_shift_and_scale_change_nothing_else(seed: int):
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(3, 18)), int(rng.integers(1, 30))
    x = torch.from_numpy(rng.normal(size=(n, d))).float()
    weights = rng.integers(1, 20, size=n).astype(float)
    plain = clipped(x, weights.tolist())
    order = torch.from_numpy(rng.permutation(n))
    shuffled = clipped(x[order], weights[order.numpy()].tolist())
    assert torch.allclose(shuffled.average, plain.average, atol=1e-5)
    assert torch.allclose(clipped(-64 * x, weights.tolist()).average, -64 * plain.average, atol=64e-5)
    assert torch.allclose(clipped(x + 8, (3 * weights).tolist()).average, plain.average + 8, atol=1e-4)


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=12, max_size=60),
    n=st.integers(1, 12),
    weights=st.lists(st.floats(0, 1e300), min_size=12, max_size=12),
)
def test_finite_parts_never_become_nan(values: list[float], n: int, weights: list[float]):
    parts = list(torch.tensor(values[: len(values) // n * n], dtype=torch.float32).view(n, -1))
    for name in ("centered_clip", "median", "trimmed_mean", "krum"):
        result = rule(name)(parts, weights[:n])
        assert torch.isfinite(result).all(), name
        lowest, highest = torch.stack(parts).amin(0), torch.stack(parts).amax(0)
        slack = 1e-6 * torch.maximum(lowest.abs(), highest.abs())
        assert ((result >= lowest - slack) & (result <= highest + slack)).all(), f"{name} left what the parts span"


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    distance=st.floats(0, 1e20),
    together=st.booleans(),
    d=st.sampled_from([1, 3, 20, 200]),
)
def test_seven_of_sixteen_move_it_by_a_multiple_of_the_honest_spread(seed, distance, together, d):
    """Nine honest parts within R of their mean: at D from it they pull back by 9 r (D - R)/(D + R) at least, and seven
    others push by 7 r at most. So D <= 8 R, wherever they are."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(size=(9, d)) * 10.0 ** rng.integers(-2, 3, size=(9, 1))
    away = rng.normal(size=(1 if together else 7, d))
    away /= np.linalg.norm(away, axis=1, keepdims=True)
    x = np.concatenate([honest, honest.mean(0) + distance * np.broadcast_to(away, (7, d))])[rng.permutation(16)]
    moved = np.linalg.norm(clipped(torch.from_numpy(x).float(), [1.0] * 16).average.numpy() - honest.mean(0))
    assert moved <= 8.001 * np.linalg.norm(honest - honest.mean(0), axis=1).max()


def test_seven_who_pull_as_one_gain_one_and_a_quarter_of_a_gradients_noise():
    """In many dimensions all honest parts are about R off: 9 D = 7 sqrt(D^2 + R^2), so D = 7/sqrt(32) R."""
    rng, d = np.random.default_rng(0), 4000
    honest, away = rng.normal(size=(9, d)), np.zeros((7, d))
    away[:, 0] = 1e9
    found = clipped(torch.from_numpy(np.concatenate([honest, away])).float(), [1.0] * 16).average.numpy()
    off = np.linalg.norm(found - honest.mean(0)) / np.linalg.norm(honest - honest.mean(0), axis=1).mean()
    assert off == pytest.approx(7 / math.sqrt(32), rel=0.03)


# --- the rules beside it ---


def test_the_median_by_weight():
    parts = [torch.tensor([float(i), -float(i)]) for i in (1, 2, 3, 10)]
    assert coordinate_median(parts, [1, 1, 1, 1]).tolist() == [2.5, -2.5]
    assert coordinate_median(parts, [1, 1, 1, 4]).tolist() == [10.0, -10.0]
    assert coordinate_median(parts, [1, 2, 3, 0]).tolist() == [2.5, -2.5]
    assert coordinate_median(parts, [0, 0, 0, 0]).tolist() == [2.5, -2.5], "nobody has samples: one voice each"


@pytest.mark.parametrize("seed", range(30))
def test_the_median_of_every_coordinate_is_that_of_its_numbers(seed: int):
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(1, 20)), int(rng.choice([1, 5, 4097, 9000]))
    x = np.round(rng.normal(size=(n, d)), 1).astype(np.float32) * np.float32(10.0 ** rng.integers(-30, 30))
    weights = rng.integers(0, 5, size=n).astype(float).tolist() if seed % 2 else [1.0] * n
    found = coordinate_median(tensors(list(x)), weights).numpy()
    for k in range(0, d, max(1, d // 40)):
        expected = middle([float(value) for value in x[:, k]], weights if sum(weights) else [1.0] * n)
        assert found[k] == pytest.approx(expected, rel=1e-6, abs=1e-44)


def test_the_trimmed_mean_cuts_weight_off_both_sides():
    parts = [torch.tensor([value]) for value in (-1e9, 1.0, 2.0, 6.0, 1e9)]
    assert trimmed_mean(parts, [1.0] * 5, trimmed=0.2).item() == pytest.approx(3.0)
    assert trimmed_mean(parts, [1.0] * 5, trimmed=0.3).item() == pytest.approx((0.5 * 1 + 2 + 0.5 * 6) / 2)
    assert trimmed_mean(parts, [0.0, 1.0, 3.0, 0.0, 0.0], trimmed=0.25).item() == pytest.approx(2.0)
    assert trimmed_mean(parts[1:4], [1.0, 2.0, 1.0], trimmed=0.0).item() == pytest.approx(2.75)
    with pytest.raises(ValueError, match="trimmed"):
        trimmed_mean(parts, [1.0] * 5, trimmed=0.5)


@pytest.mark.parametrize("seed", range(20))
def test_krum_is_the_papers(seed: int):
    rng = np.random.default_rng(seed)
    n, attackers = int(rng.integers(5, 12)), 1
    x = rng.normal(size=(n, 6)).astype(np.float32)
    neighbours = n - attackers - 2
    scores = [
        min(sum(length(x[i] - x[j]) ** 2 for j in near) for near in combinations(set(range(n)) - {i}, neighbours))
        for i in range(n)
    ]
    best = np.argsort(scores)
    assert torch.equal(krum(tensors(list(x)), [1.0] * n, attackers), torch.from_numpy(x[best[0]]))
    several = krum(tensors(list(x)), [1.0] * n, attackers, chosen=3)
    assert torch.allclose(several, torch.from_numpy(x[best[:3]].mean(0)), atol=1e-6)


def test_krum_chooses_nobody_without_weight():
    parts = [torch.tensor([value]) for value in (0.0, 0.0, 0.0, 5.0, 5.1)]
    assert krum(parts, [0, 0, 0, 1, 1]).item() in (5.0, pytest.approx(5.1))


def test_every_rule_has_a_name_and_leaves_one_peer_alone():
    part = torch.randn(3, 5)
    for name in RULES:
        assert torch.equal(rule(name)([part], [2.0]), part), name
        assert torch.equal(rule(name)([part.half()], [0.0]), part.half().float()), name
    with pytest.raises(ValueError, match="no reduction rule 'average'.*centered_clip"):
        rule("average")
