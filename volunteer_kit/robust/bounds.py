"""What one sender's part may weigh in an average by its size: the first line, before any rule.

A part a million times as long as the others' decides every mean, and what it leaves in an optimizer's second moments
stays for hundreds of steps. Honest parts of one round differ by their batches: the norm of a mean gradient over n
samples falls as 1 / sqrt(n) while noise rules it, so a factor of ten for a hundred times the samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from volunteer_kit.robust.median import lower_median

NORM_BOUND = 100.0  # times the median
FEWEST = 3  # senders that gave something; of two nobody can say which one is too long


def bound_norms(
    parts: Sequence[torch.Tensor], weights: Sequence[float], bound: float = NORM_BOUND, owes: bool = False
) -> tuple[list[torch.Tensor], list[int]]:
    """Scale parts down whose L2 norm is more than `bound` times the weighted median of all that are not zero.

    Who gave zeros has nothing to say: where one sender alone met a word, its row of the embedding is not too long. With
    fewer than three that gave something, nothing is bounded.

    :param weights: samples; who has none is neither counted nor in the average
    :param owes: parts hold what was left over of rounds before, in which a sender may have had a thousand times the
        samples that it has now: too long is then only who moves the average too far as well, by weight times norm
    :returns: the parts, in their order, and the places of those that were scaled
    """
    norms = [torch.linalg.vector_norm(part.float(), dtype=torch.float64).item() for part in parts]
    kept = scales(norms, weights, bound)
    if owes:
        moved = [norm * weight for norm, weight in zip(norms, weights, strict=True)]
        kept = [max(pair) for pair in zip(kept, scales(moved, weights, bound), strict=True)]
    too_long = [place for place, scale in enumerate(kept) if scale < 1]
    bounded = list(parts)
    for place in too_long:
        bounded[place] = parts[place].to(torch.float32) * kept[place]
    return bounded, too_long


def scales(norms: Sequence[float], weights: Sequence[float], bound: float = NORM_BOUND) -> list[float]:
    """What each part is multiplied with, by the lengths of all: who checks a reducer knows these, not the parts."""
    given = [(norm, weight) for norm, weight in zip(norms, weights, strict=True) if norm > 0 and weight > 0]
    if len(given) < FEWEST:
        return [1.0] * len(norms)
    limit = bound * lower_median(*zip(*given, strict=True))
    return [min(1.0, limit / norm) if norm > 0 else 1.0 for norm in norms]
