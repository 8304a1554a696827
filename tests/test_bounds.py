"""How long a sender's part may be, beside the others'."""

from __future__ import annotations

import pytest
import torch

from volunteer_kit.robust.bounds import NORM_BOUND, bound_norms


def vectors(*norms: float) -> list[torch.Tensor]:
    """In directions of their own."""
    found = []
    for seed, norm in enumerate(norms):
        vector = torch.randn(50, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found.append((vector * norm / vector.norm()).float())
    return found


@pytest.mark.parametrize(
    "norms, weights, bounded, why",
    [
        ([1.0, 1.1, 0.9, 1e6], [1, 1, 1, 1], [3], "a million times as long"),
        ([1.0, 1.1, 0.9, 99.0], [1, 1, 1, 1], [], "as different as batches can be"),
        ([1.0, 1.0, 1.0, 1e6, 1e7], [1, 1, 1, 1, 1], [3, 4], "two of five"),
        ([0.0, 0.0, 0.0, 1e6], [1, 1, 1, 1], [], "a lone sparse sender"),
        ([0.0, 0.0, 1.0, 1e6], [1, 1, 1, 1], [], "of two nobody can say which is too long"),
        ([1.0, 1e6], [1, 1], [], "of two nobody can say which is too long"),
        ([1.0, 1.0, 1e6], [0, 0, 1], [], "the others have no samples"),
        ([1e-3, 1.0, 1.0, 1.0], [50, 1, 1, 1], [1, 2, 3], "who has most of the samples sets the measure"),
        ([1.0, 1.0, 1.0, 1e30], [1, 1, 1, 1], [3], "whose square is not finite in float32"),
        ([0.0, 0.0, 0.0], [1, 1, 1], [], "nobody gave anything"),
    ],
)
def test_who_is_scaled_down(norms, weights, bounded, why):
    parts = vectors(*norms)
    found, places = bound_norms(parts, [float(weight) for weight in weights])
    assert places == bounded, why
    for place, (before, after) in enumerate(zip(parts, found, strict=True)):
        if place not in bounded:
            assert after is before
        else:
            same_way = torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=0)
            assert same_way > 1 - 1e-6 and after.norm() < before.norm(), "in its own direction"
    if bounded and why.startswith("a million"):
        assert found[3].norm().item() == pytest.approx(NORM_BOUND * 1.0, rel=1e-5)
    assert torch.isfinite(torch.stack(found)).all()


@pytest.mark.parametrize(
    "norms, weights, bounded, why",
    [
        ([1.0, 1.0, 1.0, 500.0], [256, 256, 256, 1], [], "it had 256 samples when that was left over"),
        ([1.0, 1.0, 1.0, 500.0], [256, 256, 256, 256], [3], "it has as many samples as the others"),
        ([1.0, 1.0, 1.0, 1e6], [256, 256, 256, 1], [3], "more than could be left over"),
        ([1.0, 1.0, 1.0, 1.0], [1, 1, 1, 4096], [], "much work is no lie"),
    ],
)
def test_what_was_left_over_is_long_for_who_has_few_samples_now(norms, weights, bounded, why):
    _, places = bound_norms(vectors(*norms), [float(weight) for weight in weights], owes=True)
    assert places == bounded, why
