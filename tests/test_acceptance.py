"""Which states are believed, as tables."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from volunteer_kit.swarm.acceptance import (
    MAX_LOSS_RISE,
    Evidence,
    both_ways,
    distances,
    hear,
    is_near,
    read_testimony,
    reason_to_refuse_distance,
    reason_to_refuse_state,
)
from volunteer_kit.swarm.agreement import FRESH_SIZE, Told, fresh_sketch, sketch

NAN, INF = math.nan, math.inf
NANS = np.full(FRESH_SIZE, NAN, "<f4").tobytes()


def evidence(**words) -> Evidence:
    return Evidence(**{"epoch": 105, "ground": 100, "moved": [1.0], "bounds": [2.0], **words})


@pytest.mark.parametrize(
    "words, reason",
    [
        ({}, None),  # nobody else is here
        ({"moved": [2.0]}, None),
        ({"moved": [2.1]}, "tensor 0"),
        ({"moved": [1.0, 3.0], "bounds": [2.0, 2.0]}, "tensor 1"),
        ({"moved": [NAN]}, "tensor 0"),
        ({"moved": [INF], "bounds": [INF]}, None),
        ({"bounds": [NAN]}, "tensor 0"),
        ({"bounds": None}, "only signed checkpoints"),
        ({"bounds": [2.0, 2.0]}, "another model"),
        ({"confirmed": 1}, None),
        ({"silent": 1}, "no other account"),  # an epoch at which nobody else was
        ({"denied": [1]}, "no other account"),
        ({"confirmed": 1, "denied": [1]}, None),
        ({"confirmed": 1, "denied": [2, 2]}, None),  # the donor counts too
        ({"confirmed": 1, "denied": [3]}, "3 other accounts"),
        ({"confirmed": 1, "silent": 5}, None),
        ({"loss": 4.4, "loss_of_ground": 4.4}, None),
        ({"loss": 4.4 + MAX_LOSS_RISE - 0.01, "loss_of_ground": 4.4}, None),
        ({"loss": 4.4 + MAX_LOSS_RISE + 0.01, "loss_of_ground": 4.4}, "public samples"),
        ({"loss": NAN, "loss_of_ground": 4.4}, "not finite"),
        ({"loss": INF, "loss_of_ground": NAN}, "not finite"),
        ({"loss": 4.4, "loss_of_ground": NAN}, None),  # the ground itself is ruined; its successor need not be
        ({"confirmed": 9, "loss": 9.0, "loss_of_ground": 4.4}, "public samples"),
        # a veteran that missed a little
        ({"is_veteran": True, "silent": 3}, None),
        ({"is_veteran": True, "denied": [1]}, None),
        ({"is_veteran": True, "denied": [1, 1, 1]}, None),  # all of them lost another part
        ({"is_veteran": True, "denied": [2]}, "2 other accounts"),
        ({"is_veteran": True, "loss": 9.0, "loss_of_ground": 4.4}, None),
        ({"is_veteran": True, "moved": [2.1]}, "tensor 0"),
        # and one that missed much
        ({"is_veteran": True, "epoch": 111, "silent": 3}, "no other account"),
        ({"is_veteran": True, "epoch": 111, "loss": 9.0, "loss_of_ground": 4.4}, "public samples"),
    ],
)
def test_what_is_believed(words, reason):
    found = reason_to_refuse_state(evidence(**words))
    assert found is None if reason is None else reason in found


def test_the_distance_alone_is_looked_at_before_others_are_asked():
    assert reason_to_refuse_distance(evidence(denied=[9], loss=NAN, loss_of_ground=1.0)) is None
    assert "tensor 0" in reason_to_refuse_distance(evidence(moved=[3.0]))


def told(value: float, epoch: int = 5, lineage: bytes = b"12345678", order: int = 0) -> Told:
    model = value * torch.randn(999, generator=torch.Generator().manual_seed(0))
    numbers = np.frombuffer(sketch([model], epoch), "<f4").astype(np.float64)
    return Told(epoch, numbers, lineage, order)


def test_accounts_are_counted_by_what_they_held():
    said = {
        b"a": told(1.0),
        b"b": told(1.0 + 1e-6),  # another processor
        b"c": told(2.0),
        b"d": told(2.0),
        b"e": told(1.0, lineage=b"another1"),
        b"f": told(1.0, epoch=4),
        b"g": None,
        b"h": Told(5),
        b"i": told(1.0, order=1),
    }
    here = [b"a", b"b", b"f", b"g"]
    heard = hear(told(1.0), said, near=here)
    assert (heard.confirmed, heard.denied, heard.silent) == (2, [2, 1, 1], 3)
    # a, b: as told, and yet not the model that was downloaded; f, g: elsewhere, and it cannot become what they hold
    heard = hear(told(1.0), said, contradicting=[[b"a", b"b"], [b"f", b"g"], [b"h"]], near=[])
    assert (heard.confirmed, heard.denied, heard.silent) == (0, [2, 2, 2, 1, 1, 1], 3)
    heard = hear(told(1.0), said, near=here, close_by=[b"f", b"g"])
    assert (heard.confirmed, heard.denied, heard.silent) == (4, [2, 1, 1], 1)
    heard = hear(told(1.0), said)  # they say so, and show nothing that could not be made to fit
    assert (heard.confirmed, heard.denied, heard.silent) == (0, [2, 1, 1], 5)


def test_a_model_made_for_a_known_seed_is_seen_with_another():
    """A sketch is linear: whoever knows its seed can change a model as much as it likes and keep the sketch."""
    right = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    step = torch.zeros(4096)
    rows = np.random.PCG64(5).random_raw(4).astype("<u8").view(np.uint8)
    signs = torch.from_numpy(np.unpackbits(rows)[:256].astype(np.float32) * 2 - 1)
    step[0], step[16] = signs[0], -signs[1]  # two rows that cancel out, in the first of the sums
    forged = right + 3 * step

    def known(model: torch.Tensor, seed: int) -> np.ndarray:
        return np.frombuffer(sketch([model], seed), "<f4").astype(np.float64)

    norm = right.norm().item()
    assert is_near(known(forged, 5), known(right, 5), 0.0, norm)
    assert not any(is_near(fresh(forged, seed), fresh(right, seed), 0.0, norm) for seed in range(100, 200))


def fresh(model: torch.Tensor, seed: int) -> np.ndarray:
    return np.frombuffer(fresh_sketch([model], seed), "<f4").astype(np.float64)


@pytest.mark.parametrize(
    "direction",
    [
        torch.randn(2**16, generator=torch.Generator().manual_seed(1)),
        torch.ones(2**16),  # a difference with a pattern: all alike, in one column, in one place
        torch.eye(256)[3].repeat(256),
        torch.nn.functional.one_hot(torch.tensor(5), 2**16).float(),
    ],
    ids=["random", "all", "column", "one"],
)
def test_whatever_the_difference_looks_like_its_size_is_seen(direction):
    right = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    norm, unit = right.norm().item(), direction / direction.norm()
    for seed in range(50):
        for share in (1e-6, 0.01, 0.1):
            moved = right + share * norm * unit
            assert is_near(fresh(right, seed), fresh(moved, seed), share * norm, norm), "so many steps lie between"
            assert is_near(fresh(right, seed), fresh(moved, seed), 0.6 * share * norm, norm) == (share == 1e-6)


def test_testimony_of_strangers_is_read_with_care():
    words = told(1.0).words()
    numbers = fresh(torch.ones(9), 7).astype("<f4").tobytes()
    whole = read_testimony([words, 9, numbers])
    assert whole.told.is_same(told(1.0)) and whole.now == 9 and len(whole.fresh) == FRESH_SIZE
    assert read_testimony([words, 9, words[1]]).fresh is None, "a sketch of a known seed"
    assert read_testimony([None, 9, b""]).told is None and read_testimony([None, 9, b""]).fresh is None
    all_junk = (None, 7, [words], [words, "x", numbers], [words, -1, numbers], {"a": 1}, [7, 7, 7], [words, 9, NANS])
    for junk in all_junk:
        assert read_testimony(junk).fresh is None


def test_distances_are_of_the_values():
    before = [torch.zeros(3, 4), torch.ones(2**20 + 5), torch.zeros(0), torch.tensor(2.0)]
    after = [torch.ones(3, 4), torch.ones(2**20 + 5), torch.zeros(0), torch.tensor(-1.0)]
    assert distances(before, after) == [pytest.approx(math.sqrt(12)), 0.0, 0.0, 3.0]
    assert math.isnan(distances([torch.zeros(2)], [torch.tensor([0.0, NAN])])[0])


@pytest.mark.parametrize("rate", [1e-3, 0.05, 0.2])
def test_two_that_were_one_are_never_farther_apart(rate):
    """Both moved as far as they can, in opposite directions; ours is known only where it is now."""
    for direction in (1, -1):
        ours = theirs = 1.0
        for _ in range(2):
            ours *= 1 + direction * rate
        for _ in range(3):
            theirs *= 1 - direction * rate
        bound = [ours * ((1 + rate) ** steps - 1) for steps in (2, 3)]
        assert abs(ours - theirs) <= both_ways(ours, *bound)
    assert both_ways(0.0, 1.0, 2.0) == 3.0 and both_ways(1.0, 1.0, 1.0) == INF
