"""Verified averaging, as a state machine: who cheats is caught, whatever it tries, and nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.verified_group import SIZE, TRUTH, Group, Member
from volunteer_kit.robust.messages import Accusation, Vote
from volunteer_kit.robust.standing import Settings

ALWAYS = Settings(share=1.0, strikes=3, probation=8)


def make(attackers: dict[str, dict], honest: int = 5, rules: Settings = ALWAYS) -> Group:
    members = [Member(f"h{i}", rules, samples=4 + 2 * i) for i in range(honest)]
    return Group([*members, *(Member(peer, rules, **how) for peer, how in attackers.items())], rules)


def verdicts(group: Group, judge: str = "h0") -> dict[str, list[str]]:
    """By an honest one's books: peer -> causes of its strikes."""
    standing = group.members[judge].verifier.standing
    return {peer: [s.cause for s in standing.strikes_of(peer)] for peer in group.members if standing.strikes_of(peer)}


def standing_of(group: Group, *peers: str) -> list[bool]:
    standing = group.members["h0"].verifier.standing
    return [standing.is_trusted(peer) for peer in peers]


def test_honest_members_of_different_precision_are_all_right():
    group = make({"m0": {"precision": 0.02}, "m1": {"precision": 0.05}})
    group.run(12)
    assert verdicts(group) == {}
    verifier = group.members["h0"].verifier
    assert len(verifier.measured) >= 60 and 0.0 < max(verifier.measured) < 0.15
    assert not [event for event in verifier.events if event.kind in ("mismatch", "strike", "ban", "suspended")]


SENDERS = {
    "sign flip": lambda gradient: -gradient,
    "a thousand times": lambda gradient: -1000 * gradient,
    "constant": lambda gradient: torch.ones(SIZE) * gradient.norm() / SIZE**0.5,
    "noise": lambda gradient: torch.randn(SIZE),
    "zeros": lambda gradient: torch.zeros(SIZE),
    "a little": lambda gradient: gradient + 0.5 * gradient.norm() * torch.ones(SIZE) / SIZE**0.5,
}


@pytest.mark.parametrize("attack", SENDERS)
def test_who_sends_what_its_samples_do_not_give_is_banned_by_all(attack):
    group = make({"bad0": {"sends": SENDERS[attack]}, "bad1": {"sends": SENDERS[attack]}})
    group.run(6)
    for peer in ("h0", "h1", "h2", "h3", "h4"):
        assert group.banned_by(peer) == {"bad0", "bad1"}
    assert set(verdicts(group)["bad0"]) == {"gradient"}
    assert torch.nn.functional.cosine_similarity(group.average, TRUTH, dim=0) > 0.9


def test_a_ban_takes_as_many_epochs_as_there_are_strikes_and_two():
    group = make({"bad": {"sends": SENDERS["sign flip"]}})
    group.run(4)
    assert group.banned_by("h0") == set()
    group.run(1)
    assert group.banned_by("h0") == {"bad"}


def test_a_wrong_reducer_is_banned():
    group = make({"bad": {"returns": lambda average: -average}})
    group.run(7)
    assert verdicts(group) == {"bad": ["reducer"] * 3} or set(verdicts(group)["bad"]) == {"reducer"}
    assert group.banned_by("h3") == {"bad"} or len(verdicts(group)["bad"]) >= 1


def test_what_a_reducer_returned_is_not_mended_by_a_false_accusation():
    def accuse(stage, round_, message):
        if stage != 0 or round_.epoch < 1:
            return message
        return replace(message, news=(Accusation(b"round %d" % (round_.epoch - 1), 0, 10),))

    group = make({"bad": {"returns": lambda average: -average, "says": accuse}})
    group.run(8)
    assert set(verdicts(group)) == {"bad"} and {"false_accusation"} <= set(verdicts(group)["bad"])


def test_a_reducer_that_says_it_counted_nobody_or_only_itself_is_not_believed():
    for counts in ((), (6,)):

        def say(stage, round_, message, counts=counts):
            if stage != 1:
                return message
            return replace(message, counted=tuple(c if p in counts else 0 for p, c in enumerate(message.counted)))

        group = make({"fine": {}, "bad": {"returns": lambda average: -average, "says": say}})
        group.run(7)
        assert set(verdicts(group)) == {"bad"} and set(verdicts(group)["bad"]) == {"reducer"}


def test_weights_that_nobody_believes_make_no_reducer_look_wrong():
    def boast(stage, round_, message):
        return message if stage != 0 else replace(message, weight=1e6)

    group = make({"bad0": {"says": boast}, "bad1": {"says": boast}}, rules=replace(ALWAYS, share=0.0))
    group.refused = {"bad0", "bad1"}
    group.run(6)
    assert set(verdicts(group)) <= {"bad0", "bad1"}
    assert standing_of(group, "h0", "h1", "h2", "h3", "h4", "bad0", "bad1") == [True] * 5 + [False] * 2


def test_a_reducer_is_checked_though_somebody_says_that_it_did_not_answer():
    def deaf(stage, round_, message):
        if stage != 2:
            return message
        numbers = message.numbers.copy()
        numbers[:, 1] = 1e30
        return replace(message, numbers=numbers)

    group = make({"deaf": {"says": deaf}, "bad": {"returns": lambda average: -average}})
    group.run(7)
    assert set(verdicts(group)) == {"bad"}


def test_who_states_other_numbers_than_it_sent_is_banned():
    def lie(stage, round_, message):
        return message if stage != 2 else replace(message, numbers=message.numbers * 1.5)

    group = make({"bad": {"says": lie, "sends": lambda g: g / 1.5}})
    group.run(8)
    assert "bad" in verdicts(group) and set(verdicts(group)) == {"bad"}


def test_a_validator_that_reports_wrong_is_banned_and_not_whom_it_names():
    group = make({"bad": {"reports": lambda duty, totals: [-total for total in totals]}})
    group.run(16)
    assert set(verdicts(group)) == {"bad"} and set(verdicts(group)["bad"]) == {"false_report"}


def test_who_withholds_its_number_or_list_is_not_averaged_and_not_banned():
    def withhold(stage, round_, message):
        return message if stage == 0 else None

    group = make({"quiet": {"says": withhold, "sends": lambda g: 1000 * g}})
    group.run(4)
    latest = group.members["h0"].verifier
    assert not latest.standing.is_trusted("quiet") and not latest.standing.is_banned("quiet")
    assert torch.nn.functional.cosine_similarity(group.average, TRUTH, dim=0) > 0.9


def test_a_number_told_to_some_only_makes_no_round_void():
    def some(stage, round_, message):
        if stage != 1:
            return message
        return lambda hearer: message if hearer in ("h0", "h1", "sly") else None

    group = make({"sly": {"says": some}})
    group.run(6)
    for peer in ("h0", "h2"):
        assert not [event for event in group.members[peer].verifier.events if event.kind == "void"]
    assert verdicts(group) == {} and standing_of(group, "sly") == [False]


def test_a_silent_reducer_gets_no_slice_any_more():
    group = make({"mute": {"answers": False}})
    group.run(1)
    assert bool((group.average == 0).any())
    group.run(2)
    assert not (group.average == 0).any()
    assert verdicts(group) == {}


def test_a_newcomer_counts_once_enough_of_it_was_found_right_and_is_credited_then():
    rules = Settings(share=0.0, strikes=3, probation=8)
    group = make({}, rules=rules)
    group.run(2)
    newcomer = Member("new", rules, samples=6)
    group.members["new"] = newcomer
    group.run(1)
    assert not group.members["h0"].verifier.standing.is_trusted("new")
    group.run(3)
    for peer in ("h0", "h4"):
        verifier = group.members[peer].verifier
        assert verifier.standing.is_trusted("new")
        assert verifier.credits == {"new": 12.0}  # two rounds of four microbatches


def with_monitor(*names: str, rules: Settings, **how) -> Group:
    """A member of weight 0, which has nobody computed for, and others."""
    members = [Member("monitor", rules, samples=0), *(Member(name, rules, **how.get(name, {})) for name in names)]
    return Group(members, rules)


def trusted_by(group: Group, peer: str) -> set[str]:
    standing = group.members[peer].verifier.standing
    return {other for other in group.members if standing.is_trusted(other)}


def test_who_comes_when_all_but_the_monitor_have_left_need_not_wait_for_them():
    for names in (("bob",), ("bob", "eve")):
        group = with_monitor("ada", rules=ALWAYS)
        group.run(2)
        del group.members["ada"]
        for name in names:
            group.members[name] = Member(name, ALWAYS)
            group.run(1)
            assert bool(group.average.any()), "somebody's work enters"
        group.run(6)
        assert trusted_by(group, "monitor") == ({*names, "monitor"} if len(names) > 1 else {"monitor"})
        assert verdicts(group, "monitor") == {}


def test_who_counted_for_want_of_others_does_not_vouch_for_itself_when_they_are_back():
    """A group of two would else be a tie, and it would never be on probation."""
    rules = replace(ALWAYS, probation=10_000)
    group = with_monitor("ada", rules=rules)
    group.run(2)
    group.members["bob"] = Member("bob", rules, sends=lambda gradient: 1000 * gradient)
    group.round(absent=("ada",))
    assert group.average.norm() > 10_000
    for absent in ((), ("monitor",)):
        group.round(absent=absent)
        assert group.average.norm() < 100


def test_who_counts_for_want_of_others_is_credited_once():
    group = with_monitor("ada", rules=ALWAYS)
    group.run(2)
    del group.members["ada"]
    group.members["bob"] = Member("bob", ALWAYS)
    group.run(2)
    group.members["eve"] = Member("eve", ALWAYS)
    group.run(12)
    assert trusted_by(group, "monitor") == {"monitor", "bob", "eve"}
    credits = group.members["monitor"].verifier.credits
    assert credits["bob"] == 0.0, "its samples were in the rounds' own weights"
    assert credits["eve"] == 0.0


def test_a_line_that_breaks_does_not_leave_a_run_with_newcomers_alone():
    """Ada, who checks bob, misses a stage: nobody is left who could check either of them."""

    def late(stage, round_, message):
        return None if stage == 2 and round_.epoch == 2 else message

    group = with_monitor("ada", rules=ALWAYS, ada={"says": late})
    group.run(2)
    group.members["bob"] = Member("bob", ALWAYS)
    group.run(1)
    assert trusted_by(group, "monitor") == {"monitor"}
    group.run(1)
    assert bool(group.average.any())
    group.run(8)
    assert trusted_by(group, "monitor") == {"monitor", "ada", "bob"}


def test_a_monitor_that_was_silent_reduces_again_after_some_rounds_and_may_not_train_unseen():
    group = with_monitor("ada", "bob", rules=ALWAYS)
    monitor = group.members["monitor"]
    group.run(1)
    monitor.answers = False
    group.run(1)
    monitor.answers = True
    for name in ("ada", "bob"):
        assert trusted_by(group, name) == {"ada", "bob"}
    group.run(ALWAYS.probation)
    for name in group.members:
        assert trusted_by(group, name) == {"ada", "bob", "monitor"}
    monitor.answers = False
    group.run(1)
    monitor.answers, monitor.samples = True, 8
    group.run(1)
    monitor.samples = 0
    group.run(2 * ALWAYS.probation)
    assert trusted_by(group, "ada") == {"ada", "bob"}


def test_one_mismatch_costs_standing_and_not_membership():
    once = iter([True])
    group = make({"odd": {"sends": lambda g: -g if next(once, False) else g}})
    group.run(10)
    assert verdicts(group) == {"odd": ["gradient"]}
    standing = group.members["h0"].verifier.standing
    assert standing.is_trusted("odd") and not standing.is_banned("odd")


def test_a_juror_that_left_bans_nobody():
    """Seven of sixteen accuse an honest one while some honest ones are away: no majority, no verdict."""
    rules = replace(ALWAYS, strikes=1)

    def slander(stage, round_, message):
        if stage != 0 or round_.epoch < 1:
            return message
        vote = Vote(b"round 2", 0, "gradient", True, 1.0)
        return replace(message, news=(vote,))

    group = make({f"bad{i}": {"says": slander} for i in range(7)}, honest=9, rules=rules)
    group.run(3)
    group.round(absent=("h4", "h5", "h7", "h8"))
    for peer in ("h1", "h2", "h6"):
        assert "h0" not in group.banned_by(peer)
