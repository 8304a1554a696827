"""Words that cannot both be true: who loses standing, and how it is won back."""

from __future__ import annotations

from dataclasses import replace

from tests.test_btard import ALWAYS, make, standing_of, verdicts
from volunteer_kit.robust.disputes import at_fault
from volunteer_kit.robust.messages import Accusation
from volunteer_kit.robust.standing import Settings, Standing


def test_who_is_at_odds_with_most_is_wrong_alone_and_the_others_lose_one_each():
    assert at_fault(set(), 15, 15) == []
    assert at_fault({(9, r) for r in range(8)}, 15, 15) == [{9}], "a sender that most reducers have not heard"
    assert at_fault({(m, 3) for m in range(4, 12)}, 15, 15) == [{3}]
    assert at_fault({(9, r) for r in range(7)}, 15, 15) == [{9, 0}], "it takes one with it, not seven"
    pairs = at_fault({(m, r) for m in range(7) for r in range(9, 16)}, 15, 15)
    assert len(pairs) == 7 and all(len(pair) == 2 for pair in pairs) and len(frozenset().union(*pairs)) == 14
    assert at_fault({(0, 1)}, 1, 1) == [{0}, {1}] and at_fault({(2, 2)}, 15, 15) == []


def test_a_reducer_that_leaves_senders_out_loses_standing_with_one_of_them():
    def say(stage, round_, message):
        if stage != 1 or round_.epoch > 0:
            return message
        return replace(message, counted=tuple(0 if place in (1, 2) else c for place, c in enumerate(message.counted)))

    group = make({"bad": {"says": say}}, rules=replace(ALWAYS, share=0.0))
    group.run(1)
    assert standing_of(group, "h0", "h1", "h2", "h3", "h4", "bad") == [True, False, True, True, True, False]
    told = next(e.text for e in group.members["h3"].verifier.events if e.peer == "h1")
    assert told.startswith("it and another member disagree")
    assert verdicts(group) == {}
    group.run(8)
    assert standing_of(group, "h1", "bad") == [True, True]


def test_who_says_that_it_was_answered_otherwise_takes_one_reducer_with_it_and_not_all():
    def say(others):
        def lie(stage, round_, message):
            if stage != 1 or round_.epoch > 0:
                return message
            return replace(message, answers=tuple(b"b" if p in others else a for p, a in enumerate(message.answers)))

        return lie

    for others, expected in (((0, 1), 5), ((0, 1, 2, 3), 6)):
        group = make({"sly": {"says": say(others)}}, honest=6, rules=replace(ALWAYS, share=0.0))
        group.run(1)
        assert standing_of(group, *(f"h{i}" for i in range(6))).count(True) == expected
        assert standing_of(group, "sly") == [False] and verdicts(group) == {}


def test_a_reducer_that_says_it_answered_nothing_or_otherwise_than_it_did():
    for own, causes in ((b"", {}), (b"b", {"bad": ["equivocation"]})):

        def say(stage, round_, message, own=own):
            if stage != 1 or round_.epoch > 0:
                return message
            return replace(message, answers=(*message.answers[:5], own))

        group = make({"bad": {"says": say}}, rules=replace(ALWAYS, share=0.0))
        group.run(2)
        assert standing_of(group, "bad") == [False] and verdicts(group) == causes


def test_answers_that_most_have_not_had_do_not_count():
    group = make({"bad": {}})
    group.run(1)
    this = next(iter(group.members["h0"].verifier._rounds.values()))
    reducers, reveals = set(range(6)), dict(this.reveals)

    def lost(own: int, answers: dict[int, bytes]) -> set[int]:
        """`answers`: what each had of reducer 5."""
        for place, answer in answers.items():
            this.reveals[place] = replace(reveals[place], answers=(*reveals[place].answers[:5], answer))
        this.own = own
        return set(this.lost(reducers))

    assert lost(0, {}) == set()
    to_each_its_own = {place: b"%d" % place for place in range(5)}
    assert [lost(own, to_each_its_own) for own in range(6)] == [{5}] * 6, "all drop it, and stay equal"
    to_one_another = {place: b"a" for place in range(6)} | {1: b"x"}
    assert [lost(own, to_one_another) for own in range(6)] == [set(), {5}, set(), set(), set(), set()]
    to_two_nothing = to_one_another | {1: b"", 2: b""}
    assert [lost(own, to_two_nothing) for own in range(4)] == [set(), {5}, {5}, set()]
    for place in range(1, 6):
        del this.reveals[place]
    assert lost(0, {}) == set(), "of one it cannot be told"


def test_a_reducer_is_not_excused_by_an_accusation_that_it_does_not_prove():
    def accuse(stage, round_, message):
        if stage != 0 or round_.epoch != 1:
            return message
        return replace(message, news=(Accusation(b"round 0", 0, 10),))

    group = make({"bad": {"returns": lambda average: -average, "says": accuse}}, rules=replace(ALWAYS, share=0.0))
    group.shows = False
    group.run(4)
    assert "reducer" in verdicts(group)["bad"]


def test_trust_that_was_lost_for_a_line_that_breaks_is_won_back():
    """A volunteer whose line breaks once an hour must not wait longer each time."""
    standing = Standing(Settings(probation=8))
    standing.meet(["a"], ["a"])

    def needed() -> int:
        standing.suspend("a")
        count = 0
        while not standing.is_trusted("a"):
            standing.found_right("a", 1, 1.0)
            count += 1
        return count

    def find_right(times: int) -> None:
        for _ in range(times):
            standing.found_right("a", 1, 1.0)

    assert [needed() for _ in range(3)] == [8, 16, 32]
    find_right(32)
    find_right(16)
    assert needed() == 16
