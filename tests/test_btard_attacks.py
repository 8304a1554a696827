"""Attacks on verified averaging that were tried on it, one by one: none of them pays."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.verified_group import PIECES, Group, Member
from volunteer_kit.robust.draw import NONCE_SIZE, chances, commitment, draw_by_chance
from volunteer_kit.robust.messages import Accusation, Report, Reveal, Statement, Vote
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


# --- telling each something else ---


def other_nonce(hearer: str) -> bytes:
    return hashlib.blake2b(hearer.encode(), digest_size=NONCE_SIZE).digest()


def another_nonce_for_each(stage, round_, message) -> Any:
    """Each commitment is kept: no hearer can see by itself that something is wrong."""
    if stage == 0:
        return lambda hearer: replace(message, nonce=commitment(other_nonce(hearer)))
    return (lambda hearer: replace(message, nonce=other_nonce(hearer))) if stage == 1 else message


def another_nonce_for_some(stage, round_, message) -> Any:
    """For two of five: they are too few for it to be wrong alone."""
    told = another_nonce_for_each(stage, round_, message)
    return (lambda hearer: told("h1" if hearer in ("h1", "h2") else "others")) if stage < 2 else message


def told_to_some(stage_of_it: int, *deaf: str) -> Callable:
    def says(stage, round_, message):
        if stage != stage_of_it or round_.epoch != 1:
            return message
        return lambda hearer: None if hearer in deaf else message

    return says


def test_another_number_for_each_hearer_makes_one_round_void_and_no_more():
    group = make({"sly": {"says": another_nonce_for_each, "sends": lambda g: -g}}, honest=9)
    group.run(8)
    for peer in honest_ones(group):
        assert [event.epoch for event in events(group, "void", peer)] == [0]
        assert trusted_by(group, peer) == set(honest_ones(group))
        assert group.banned_by(peer) == {"sly"}


@pytest.mark.parametrize("deaf", [("h1",), ("h1", "h2"), ("h1", "h2", "h3", "h4")])
def test_a_number_told_to_some_only_takes_one_honest_member_with_it_and_its_author_goes_too(deaf):
    group = make({"sly": {"says": told_to_some(1, *deaf)}}, honest=9, rules=NEVER)
    rounds = [group.round() for _ in range(3)][-1]
    for peer in honest_ones(group):
        trusted = {group_peer for place, group_peer in enumerate(group.members) if place in rounds[peer].trusted}
        assert "sly" not in trusted
        assert len(set(honest_ones(group)) - trusted) <= 1
    assert_nobody_honest_is_struck(group)


def test_a_commitment_told_to_some_only_takes_one_honest_member_with_it_at_most():
    group = make({"sly": {"says": told_to_some(0, "h1", "h2", "h3")}}, honest=9, rules=NEVER)
    group.may_split = True
    rounds = [group.round() for _ in range(3)][-1]
    trusted = {peer for place, peer in enumerate(group.members) if place in rounds["h0"].trusted}
    assert "sly" not in trusted and len(set(honest_ones(group)) - trusted) <= 1


@pytest.mark.parametrize(("to_it", "to_most"), [(8.0, 0.0), (64.0, 8.0)])
def test_another_weight_told_to_one_reducer_does_not_make_its_answer_look_wrong(to_it, to_most):
    def says(stage, round_, message):
        if stage != 0 or round_.epoch != 1:
            return message
        return lambda hearer: replace(message, weight=to_it if hearer == "h0" else to_most)

    group = make({"bad": {"says": says, "sends": lambda g: -g}}, rules=NEVER)
    group.may_split = True
    group.run(4)
    assert_nobody_honest_is_struck(group)


def test_other_numbers_stated_to_all_but_a_reducer_do_not_make_its_answer_look_wrong():
    """It knows what it was sent, hears nothing false, and accuses nobody; to the others its answer looks wrong."""

    def says(stage, round_, message):
        if stage != 2 or round_.epoch != 1:
            return message
        numbers = np.array(message.numbers)
        numbers[:PIECES, SUMS:] *= -1
        return lambda hearer: message if hearer == "h0" else replace(message, numbers=numbers)

    group = make({"bad": {"says": says}}, rules=NEVER)
    group.run(4)
    assert_nobody_honest_is_struck(group)


def test_two_of_seven_who_commit_to_some_only_ban_nobody():
    rules = replace(NEVER, strikes=1)
    deaf = {1: ("h3", "h4"), 2: ("h2",), 3: ("h1",)}

    def splits(stage, round_, message):
        if stage == 0 and round_.epoch in deaf:
            return lambda hearer: None if hearer in deaf[round_.epoch] else message
        return slanders(stage, round_, message)

    def slanders(stage, round_, message):
        if stage != 0 or round_.epoch != 5:
            return message
        return replace(message, news=tuple(Vote(b"round 4", place, "gradient", True, 1.0) for place in range(5)))

    group = make({"bad0": {"says": splits}, "bad1": {"says": slanders}}, rules=rules)
    group.may_split = True
    group.run(7)
    assert_nobody_honest_is_struck(group)


@pytest.mark.parametrize("stage_of_it", [1, 2])
def test_an_author_on_probation_that_tells_different_things_costs_no_trusted_member_its_standing(stage_of_it):
    rules = replace(ALWAYS, probation=10_000)

    def says(stage, round_, message):
        if stage_of_it == 2:
            return (
                (lambda hearer: replace(message, seed=bytes(32)) if hearer in ("h1", "h2") else None)
                if stage == 2
                else message
            )
        return another_nonce_for_some(stage, round_, message)

    group = make({}, rules=rules)
    group.run(1)
    group.members["sly"] = Member("sly", rules, says=says)
    group.run(6)
    for peer in honest_ones(group):
        assert trusted_by(group, peer) == set(honest_ones(group))
        assert events(group, "void", peer) == events(group, "suspended", peer) == []


def test_two_of_five_who_come_back_sooner_than_those_they_took_with_them_ban_nobody():
    """Each says that it heard another commitment of an honest one; and of honest ones it reports nothing."""
    rules = replace(NEVER, strikes=1)

    def says(stage, round_, message):
        if stage == 0:
            before = [b"round %d" % (round_.epoch - ago) for ago in (1, 2)]
            news = [one for one in message.news if not (isinstance(one, Report) and one.target < 3)]
            news += [Vote(known, place, "gradient", True, 1.0) for place in range(3) for known in before]
            return replace(message, news=tuple(news))
        liars, victims = sorted(round_.trusted & {3, 4}), sorted(round_.trusted & {0, 1, 2})
        if stage != 1 or round_.own not in liars or liars.index(round_.own) >= len(victims):
            return message
        victim = victims[liars.index(round_.own)]
        return replace(message, heard=tuple(b"other" if p == victim else one for p, one in enumerate(message.heard)))

    group = make({"bad0": {"says": says}, "bad1": {"says": says}}, 3, rules, samples=4)
    group.may_split = True
    group.run(40)
    assert_nobody_honest_is_struck(group)


def test_an_author_on_probation_that_tells_some_only_does_not_keep_an_honest_newcomer_out():
    """Its number comes to the newcomer alone, which then thinks that it is another's turn, and opens nothing."""

    def says(stage, round_, message):
        return (lambda hearer: message if hearer[0] in "ns" else None) if stage == 1 else message

    group = make({}, rules=NEVER)
    group.run(2)
    group.members["new"] = Member("new", NEVER)
    group.members.update({f"sly{i}": Member(f"sly{i}", NEVER, says=says) for i in range(3)})
    group.run(12)
    assert not [event for event in events(group, "suspended") if event.peer == "new"]
    assert "new" in trusted_by(group, "h0")


# --- newcomers, and who votes ---


def test_probation_is_not_shorter_for_who_says_that_its_samples_came_in_many_microbatches():
    rules, rounds = replace(ALWAYS, probation=16), {}
    for microbatches in (8, 64):
        group = make({}, rules=rules)
        group.run(2)
        group.members["new"] = Member("new", rules, samples=64, microbatches=microbatches)
        while "new" not in trusted_by(group, "h0"):
            group.run(1)
        rounds[microbatches] = group.epoch
    assert rounds[8] == rounds[64]
    standing = Standing(ALWAYS)
    standing.meet(["a"], ["a"])
    standing.found_right("new", 2**20, 1.0)
    assert not standing.is_trusted("new")


def test_one_who_claims_to_know_in_a_run_that_begins_does_not_decide_alone():
    def knows(stage, round_, message):
        if stage != 0 or round_.epoch:
            return message
        return replace(message, distrusts=frozenset(range(5)), bans=frozenset(range(5)), due=frozenset(range(5)))

    group = make({"sly": {"says": knows}}, rules=NEVER)
    rounds = group.round()
    for peer in honest_ones(group):
        assert rounds[peer].trusted >= set(range(5))
        assert trusted_by(group, peer) >= set(honest_ones(group))
        assert events(group, "ban", peer) == []


def test_eight_peers_of_one_account_have_one_vote():
    def slanders(stage, round_, message):
        everybody = frozenset(range(5))
        if stage == 0 and round_.epoch > 0:
            before = b"round %d" % (round_.epoch - 1)
            votes = tuple(Vote(before, p, cause, True, 1.0) for p in range(5) for cause in ("gradient", "silence"))
            return replace(message, news=votes, distrusts=everybody, bans=everybody, due=everybody)
        return message

    rules = replace(NEVER, strikes=1)
    group = make({f"sly{i}": {"says": slanders, "account": "one"} for i in range(8)}, rules=rules)
    group.run(4)
    assert_nobody_honest_is_struck(group)
    for peer in honest_ones(group):
        assert group.banned_by(peer) & set(honest_ones(group)) == set()
        assert trusted_by(group, peer) >= set(honest_ones(group))


def test_an_account_takes_one_honest_member_with_it_however_many_peers_it_brings():
    """Its first trusted peer says that it heard another commitment; once that is not trusted, the next one does."""

    def says(stage, round_, message):
        if stage == 0:
            before = b"round %d" % (round_.epoch - 1)
            return replace(message, news=tuple(Vote(before, place, "gradient", True, 1.0) for place in range(5)))
        speaks = round_.own == min(round_.trusted - set(range(5)), default=-1)
        if stage != 1 or not speaks or not round_.trusted & set(range(5)):
            return message
        victim = min(round_.trusted)
        return replace(message, heard=tuple(b"other" if p == victim else one for p, one in enumerate(message.heard)))

    many = {f"sly{i}": {"says": says, "account": "one"} for i in range(8)}
    group = make(many, rules=replace(NEVER, strikes=1))
    lost = set()
    for _ in range(6):
        rounds = group.round()
        lost |= {peer for place, peer in enumerate(honest_ones(group)) if place not in rounds["h0"].trusted}
    assert_nobody_honest_is_struck(group)
    times = {event.epoch for event in events(group, "suspended", "h4") if event.peer.startswith("sly")}
    assert len(lost) <= len(times), "all of its peers go with each"


def with_peers_of_one_account(count: int, says: Callable, are_trusted: bool = False) -> Group:
    """Three rounds of five members, and of others of one account; they come later, if not `are_trusted`."""
    group = make({}, rules=NEVER)
    if not are_trusted:
        group.run(2)
    group.members.update({f"sly{i}": Member(f"sly{i}", NEVER, says=says, account="one") for i in range(count)})
    group.run(3)
    return group


def test_newcomers_of_one_account_cannot_say_that_nobody_was_answered():
    def says(stage, round_, message):
        return replace(message, answers=tuple(b"" for _ in message.answers)) if stage == 1 else message

    group = with_peers_of_one_account(6, says)
    assert not [event for event in events(group, "suspended") if event.peer in honest_ones(group)]


def test_newcomers_of_one_account_that_state_nothing_make_no_round_void():
    group = with_peers_of_one_account(6, lambda stage, round_, message: None if stage == 2 else message)
    assert events(group, "void") == []


def test_peers_of_one_account_that_tell_one_member_nothing_go_with_it():
    def says(stage, round_, message):
        return (lambda hearer: None if hearer == "h1" else message) if stage == 1 and not round_.epoch else message

    group = with_peers_of_one_account(8, says, are_trusted=True)
    lost = [event.peer for event in events(group, "suspended")]
    assert "h1" not in lost or any(peer.startswith("sly") for peer in lost)


def test_validators_who_vouch_for_their_accomplice_and_judge_it_too_do_not_save_it():
    def vouches(duty, totals):
        return [-total for total in totals] if duty.target == 5 else totals

    accomplices = {f"sly{i}": {"reports": vouches} for i in range(3)}
    group = make({"bad": {"sends": lambda g: -g}, **accomplices}, samples=4)
    while group.epoch < 30 and "bad" not in group.banned_by("h0"):
        group.run(1)
    group.run(1)
    assert all(group.banned_by(peer) >= {"bad"} for peer in honest_ones(group)), "unless only accomplices look at it"
    assert_nobody_honest_is_struck(group)


def test_a_validator_that_judges_its_own_false_report_does_not_outvote_the_others():
    group = make(
        {"bad": {"reports": lambda duty, totals: [3 * total for total in totals]}}, rules=replace(ALWAYS, strikes=1)
    )
    while group.epoch < 10 and not causes(group, "bad"):
        group.run(1)
    assert causes(group, "bad") == ["false_report"]
    cases = [c for r in group.members["h0"].verifier._rounds.values() for c in r.docket.cases.values() if c.closed]
    assert any(5 in case.jury and case.votes[5].guilty and case.innocent > case.guilty for case in cases)
    assert_nobody_honest_is_struck(group)


@pytest.mark.parametrize("stage_of_it", [1, 2])
def test_a_message_of_another_length_than_the_group_is_none(stage_of_it):
    """Of `heard`, members read by place."""

    def short(stage, round_, message: Reveal | Statement):
        return message if stage != stage_of_it else replace(message, heard=message.heard[:2])

    group = make({"bad": {"says": short}}, rules=NEVER)
    group.run(2)
    assert trusted_by(group, "h0") == set(honest_ones(group))
