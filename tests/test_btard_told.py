"""Attackers that tell one member this and another member that gain nothing by it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.test_btard_attacks import (
    ALWAYS,
    NEVER,
    assert_nobody_honest_is_struck,
    events,
    honest_ones,
    make,
    trusted_by,
)
from tests.verified_group import PIECES, Member
from volunteer_kit.robust.draw import NONCE_SIZE, commitment
from volunteer_kit.robust.messages import Report, Vote
from volunteer_kit.robust.reducing import SUMS


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
