"""Attacks on verified averaging that were tried on it, one by one: none of them pays."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.verified_group import PIECES, Group, Member
from volunteer_kit.robust.draw import NONCE_SIZE, chances, draw_by_chance
from volunteer_kit.robust.messages import Accusation
from volunteer_kit.robust.reducing import DISTANCE, NORM, SUMS
from volunteer_kit.robust.sketch import sketch
from volunteer_kit.robust.standing import MAX_SILENCES, Settings, Standing, Strike

ALWAYS = Settings(share=1.0, strikes=3, probation=8)
NEVER = replace(ALWAYS, share=0.0)


def make(attackers: dict[str, dict], honest: int = 5, rules: Settings = ALWAYS, **how) -> Group:
    members = [Member(f"h{i}", rules, **how) for i in range(honest)]
    return Group([*members, *(Member(peer, rules, **{**how, **theirs}) for peer, theirs in attackers.items())], rules)


def causes(group: Group, peer: str, judge: str = "h0") -> list[str]:
    return [strike.cause for strike in group.members[judge].verifier.standing.strikes_of(peer)]


def honest_ones(group: Group) -> list[str]:
    return [peer for peer in group.members if peer.startswith("h")]


def trusted_by(group: Group, peer: str) -> set[str]:
    standing = group.members[peer].verifier.standing
    return {other for other in group.members if standing.is_trusted(other)}


def assert_nobody_honest_is_struck(group: Group) -> None:
    assert [(judge, p) for judge in honest_ones(group) for p in honest_ones(group) if causes(group, p, judge)] == []


def events(group: Group, kind: str, judge: str = "h0") -> list[Any]:
    return [event for event in group.members[judge].verifier.events if event.kind == kind]


# --- senders ---


@pytest.mark.parametrize("reduced_by", [5, 6])
def test_what_is_stated_of_an_accomplices_slice_does_not_make_up_for_the_others(reduced_by):
    """It reduces the slice itself, or its accomplice does: nobody accuses it of what it says of that one."""
    true: dict[str, torch.Tensor] = {}

    def sends(gradient: torch.Tensor) -> torch.Tensor:
        true["gradient"] = gradient
        return -gradient

    def says(stage, round_, message):
        if stage != 2 or reduced_by not in round_.trusted:
            return message
        numbers = np.array(message.numbers, np.float64)
        position = sorted(round_.trusted).index(reduced_by) * PIECES
        whole = sketch(true["gradient"], round_.seed, size=ALWAYS.sums)
        numbers[position, SUMS:] += whole - numbers[:, SUMS:].sum(0)
        numbers[position, [NORM, DISTANCE]] = 2 * np.linalg.norm(numbers[position, SUMS:])
        return replace(message, numbers=numbers.astype(np.float32))

    def accuses_nobody(stage, round_, message):
        if stage != 0:
            return message
        return replace(message, news=tuple(news for news in message.news if not isinstance(news, Accusation)))

    group = make({"bad": {"sends": sends, "says": says}, "accomplice": {"says": accuses_nobody}})
    group.run(5)
    assert all(group.banned_by(peer) == {"bad"} for peer in honest_ones(group))
    assert set(causes(group, "bad")) == {"gradient"}


@pytest.mark.parametrize("times", [0.0, 1e-6, 1e6])
def test_no_length_that_is_stated_makes_what_was_sent_fit(times):
    def says(stage, round_, message):
        if stage != 2:
            return message
        numbers = np.array(message.numbers)
        numbers[:, [NORM, DISTANCE]] *= np.float32(times)
        return replace(message, numbers=numbers)

    group = make({"bad": {"sends": lambda g: -g, "says": says}})
    group.run(3)
    assert [event for event in events(group, "mismatch") if event.peer == "bad"]
    assert_nobody_honest_is_struck(group)


def test_who_falls_silent_whenever_its_work_is_drawn_is_struck_for_it():
    rules = Settings(share=1 / 16, probation=2)
    is_on = {"bad": True}

    def says(stage, round_, message):
        looked_at = stage == 2 and round_.own in round_.by_chance & round_.trusted
        return None if looked_at and is_on["bad"] else message

    group = make({"bad": {"says": says, "sends": lambda g: -g}}, 3, rules, samples=2, microbatches=2)
    while group.epoch < 250 and not causes(group, "bad"):
        is_on["bad"] = group.members["h0"].verifier.standing.is_trusted("bad")
        group.members["bad"].sends = (lambda g: -g) if is_on["bad"] else (lambda g: g)
        group.run(1)
    assert causes(group, "bad") == ["silence"], group.epoch
    group.run(1)
    assert all(causes(group, "bad", peer) == ["silence"] for peer in honest_ones(group))
    assert_nobody_honest_is_struck(group)


def test_a_line_that_breaks_at_random_is_nobodys_fault():
    """One round of twenty, a thousand epochs: two hundred volunteers, none is banned, and hardly one has a strike."""
    for share in (1 / 16, 1 / 4, 1.0):
        struck = 0
        for seed in range(200):
            draw, standing = random.Random(seed), Standing(Settings(share=share))
            for epoch in range(1000):
                if draw.random() < 0.05 and standing.fell_silent("a", epoch, draw.random() < share, share):
                    standing.strike(Strike("a", epoch, b"%d" % epoch, "silence", 5, 0, 5))
            assert not standing.is_banned("a")
            struck += bool(standing.strikes_of("a"))
        assert struck <= 10, share


def test_a_line_that_breaks_for_a_year_is_still_judged():
    standing = Standing(Settings(window=10**6))
    assert not any(standing.fell_silent("a", epoch, epoch % 20 == 0, 1 / 16) for epoch in range(3000))
    assert any(standing.fell_silent("a", 3000 + i, True, 1 / 16) for i in range(MAX_SILENCES))


def test_who_claims_far_more_than_the_others_is_looked_at_as_much_more_often():
    assert chances({0: 8, 1: 16, 2: 32}, 1 / 16) == dict.fromkeys(range(3), 1 / 16), "twice the median is usual"
    assert chances({0: 8, 1: 16, 2: 128}, 1 / 16)[2] == 4 / 16
    assert chances({0: 8, 1: 16, 2: 1e9}, 1 / 16)[2] == 1.0
    assert chances({0: 1e-9, 1: 16, 2: 16}, 1 / 16)[2] == 1 / 16, "who claims next to nothing makes nobody a giant"
    assert chances({}, 1 / 16) == {}


def test_whether_one_is_looked_at_does_not_depend_on_its_own_number():
    """It could else withhold it, or choose what to say, once it has seen the others'."""
    draw, drawn, chance_of = random.Random(0), 0, dict.fromkeys(range(9), 1 / 4)
    for _ in range(300):
        nonces, round_id = {place: draw.randbytes(NONCE_SIZE) for place in range(8)}, draw.randbytes(16)
        found = draw_by_chance(round_id, nonces, chance_of)
        drawn += len(found)
        for place in range(9):
            without = {other: nonce for other, nonce in nonces.items() if other != place}
            another = {**without, place: draw.randbytes(NONCE_SIZE)}
            for shown in (without, another):
                assert (place in draw_by_chance(round_id, shown, chance_of)) == (place in found)
    assert drawn == pytest.approx(300 * 9 / 4, rel=0.15)


def test_who_withholds_its_number_is_drawn_as_if_it_had_shown_it():
    def withhold(stage, round_, message):
        return None if stage == 1 else message

    group = make({"bad": {"says": withhold}})
    rounds = group.round()
    assert 5 in rounds["h0"].by_chance and "bad" not in trusted_by(group, "h0")


def test_who_was_drawn_by_chance_and_does_not_open_its_samples_is_guilty():
    """Everybody who states the draw's seed knows that it was drawn: that is no broken line."""

    def closed(stage, round_, message):
        return replace(message, opening=None) if stage == 2 else message

    group = make({"bad": {"says": closed}})
    group.run(2)
    assert causes(group, "bad") == ["gradient"]
    strike = group.members["h0"].verifier.standing.strikes_of("bad")[0]
    assert strike.measure == float("inf") and strike.votes_for == strike.electors
    assert "inf" not in events(group, "strike")[0].text
    waits = make({}, rules=NEVER)
    waits.run(1)
    waits.members["new"] = Member("new", NEVER, says=closed)  # drawn since it has to be: nobody else would know
    waits.run(6)
    assert causes(waits, "new") == [] and "new" not in trusted_by(waits, "h0")


# --- reducers ---


def test_a_reducer_that_answers_falsely_and_stays_away_is_struck_while_it_is_away():
    lies = {"now": False}
    group = make({"bad": {"returns": lambda average: -average if lies["now"] else average}})
    group.run(1)
    lies["now"] = True
    group.round()
    for _ in range(5):
        group.round(absent=("bad",))
    assert all(causes(group, "bad", peer) == ["reducer"] for peer in honest_ones(group))


def test_an_answer_longer_than_any_average_is_beyond_and_an_honest_one_is_not():
    for times, expected in ((1e20, {5}), (12.0, {5}), (1.0, set())):
        group = make({"bad": {"returns": lambda average, times=times: times * average}}, rules=NEVER)
        rounds = group.round()
        assert all(rounds[peer].beyond == expected for peer in honest_ones(group)), times


def test_an_answer_so_long_that_its_distance_is_not_finite_is_beyond():
    group = make({"bad": {"returns": lambda average: torch.full_like(average, 3.3e38)}}, rules=NEVER)
    rounds = group.round()
    assert all(rounds[peer].beyond == {5} for peer in honest_ones(group))
    group.run(3)
    assert group.average.abs().max() < 10 and "bad" not in trusted_by(group, "h0")


@pytest.mark.parametrize("times", [0.0, 1e-20, 1e-3, 1e20])
def test_lengths_that_a_minority_states_falsely_put_no_honest_answer_beyond(times):
    def says(stage, round_, message):
        if stage != 2:
            return message
        numbers = np.array(message.numbers, np.float64)
        numbers[:, NORM] *= times
        return replace(message, numbers=numbers.astype(np.float32))

    group = make({f"bad{i}": {"says": says} for i in range(4)}, rules=NEVER)
    rounds = group.round()
    assert all(rounds[peer].beyond == set() for peer in honest_ones(group))


def test_a_weight_that_nobody_can_have_puts_no_honest_answer_beyond():
    def says(stage, round_, message):
        if stage == 0:
            return replace(message, weight=1e9)
        return replace(message, numbers=message.numbers * np.float32(1e-9)) if stage == 2 else message

    group = make({"bad": {"says": says}}, rules=NEVER)
    group.refused = {"bad"}
    rounds = group.round()
    assert all(rounds[peer].beyond == set() for peer in honest_ones(group))
