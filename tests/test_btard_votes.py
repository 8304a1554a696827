"""Who is trusted, and whose word counts: newcomers and accounts of many peers decide nothing by their number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.test_btard_attacks import (
    ALWAYS,
    NEVER,
    assert_nobody_honest_is_struck,
    causes,
    events,
    honest_ones,
    make,
    trusted_by,
)
from tests.verified_group import Group, Member
from volunteer_kit.robust.messages import Reveal, Statement, Vote
from volunteer_kit.robust.standing import Standing


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
