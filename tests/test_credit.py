"""What signed receipts come to, and whose rounds are the swarm's."""

from __future__ import annotations

import itertools
import random

import pytest

from tests.credited import NAME_OF, X, is_monitor, lineage, made, owner, peer_of, signed
from volunteer_kit.swarm.agreement import BEGINNING
from volunteer_kit.swarm.credit import Findings, credit_of_epoch, credit_of_step, line_of, steps_of
from volunteer_kit.swarm.receipts import digest_of


def by_name(credits) -> dict[str, tuple[int, bool]]:
    return {NAME_OF[digest]: tuple(credit) for digest, credit in credits.items()}


# --- one round ---

ALL = dict(a=10, b=20, c=30)


@pytest.mark.parametrize(
    "receipts, credited, why",
    [
        ([], {}, "nobody signed"),
        (
            [("a", ALL), ("b", ALL), ("c", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False)},
            "each by two others",
        ),
        (
            [("a", ALL), ("b", ALL)],
            {"a": (10, True), "b": (20, True), "c": (30, False)},
            "of two who reduce, one other",
        ),
        ([("a", ALL)], {"a": (10, True), "b": (20, True), "c": (30, True)}, "alone, its word is provisional"),
        (
            [("a", ALL), ("b", ALL), ("c", {**ALL, "a": 7})],
            {"a": (7, False), "b": (20, False), "c": (30, False)},
            "the lowest counts",
        ),
        (
            [("a", {**ALL, "a": 999}), ("b", ALL), ("c", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False)},
            "nobody's word about himself",
        ),
        (
            [("a", {**ALL, "d": 50}), ("b", ALL), ("c", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False)},
            "a friend whom most have not seen",
        ),
        (
            [("a", {**ALL, "d": 50}), ("b", {**ALL, "d": 50}), ("c", ALL), ("e", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False), "d": (50, True)},
            "two of four are not most, nor few",
        ),
        (
            [("a", dict(a=9, a2=90)), ("b", dict(a=9, a2=0)), ("c", dict(a=9)), ("a2", dict(a2=90))],
            {"a": (9, False)},
            "a second machine that only the first one saw",
        ),
        (
            [("a", ALL), ("a2", ALL), ("b", ALL)],
            {"a": (10, True), "b": (20, True), "c": (30, False)},
            "two machines of one account are one voice",
        ),
        (
            [("a", dict(a=10, a2=20)), ("a2", dict(a=10, a2=20))],
            {"a": (10, True), "a2": (20, True)},
            "one account alone in the swarm",
        ),
        (
            [("m", ALL), ("a", ALL)],
            {"a": (10, False), "b": (20, False), "c": (30, False)},
            "a monitor is enough",
        ),
        (
            [("m", ALL), ("a", dict(b=12, c=14)), ("b", ALL), ("c", ALL)],
            {"a": (10, False), "b": (12, False), "c": (30, False)},
            "beside a monitor the lowest counts as far as half of its own",
        ),
        ([("m", dict(b=20)), ("a", ALL)], {"b": (20, False), "c": (30, True)}, "a monitor that did not see it"),
        ([("a", dict(b=0)), ("c", dict(b=0))], {}, "nothing is nothing"),
    ],
)
def test_credit_of_a_round(receipts, credited, why):
    written = [signed(signer, **samples) for signer, samples in receipts]
    assert by_name(credit_of_epoch(written, owner, is_monitor)) == credited, why
    assert by_name(credit_of_epoch(reversed(written), owner, is_monitor)) == credited, "their order does not matter"


def test_who_signs_less_for_others_than_they_did_is_named():
    receipts = [signed("a", **ALL), signed("b", **ALL), signed("c", **ALL), signed("d", a=1, b=1, c=1)]
    findings, [step] = Findings(), steps_of(receipts, owner)
    credits = credit_of_step(step, owner, findings)
    assert by_name(credits) == {"a": (1, False), "b": (1, False), "c": (1, False)}
    assert findings.understated == {peer_of("d")}
    [step] = steps_of([*receipts, signed("m", **ALL)], owner, is_monitor)
    credits = credit_of_step(step, owner, findings)
    assert by_name(credits) == {"a": (10, False), "b": (20, False), "c": (30, False)}, "and not believed"


def test_who_signs_two_things_of_one_round_or_what_cannot_be_is_not_heard():
    two = [signed("a", **ALL), signed("a", **{**ALL, "b": 21}), signed("b", **ALL), signed("c", **ALL)]
    findings = Findings()
    [step] = steps_of([*two, signed("d", a=10, b=513)], owner, findings=findings, max_samples=512)
    assert set(step.receipts) == {digest_of(peer_of("b")), digest_of(peer_of("c"))}
    assert findings.contradictions == {peer_of("a")} and findings.implausible == {peer_of("d")}
    assert len(steps_of([two[0], two[0]], owner)[0].receipts) == 1, "the same twice is no contradiction"


def test_a_signer_or_a_sender_whose_account_nobody_knows():
    stranger = signed("a", **ALL).copy(update={"peer_id": peer_of("z").to_bytes()})
    assert steps_of([stranger], owner) == []
    receipts, findings = [signed("a", z=5, **ALL), signed("b", z=5, **ALL)], Findings()
    [step] = steps_of(receipts, owner)
    assert "z" not in by_name(credit_of_step(step, owner, findings))
    assert findings.unknown == {digest_of(peer_of("z"))}


# --- the line ---


def line_found(receipts) -> list[str]:
    """Of LINE and EPOCH, in order; the same whatever the order of receipts."""
    found = []
    for seed in range(4):
        random.Random(seed).shuffle(receipts)
        found.append([step.after.decode().strip("-") for step in line_of(steps_of(receipts, owner, is_monitor))])
    assert all(one == found[0] for one in found)
    return found[0]


def names(line: str, epochs) -> list[str]:
    return [f"{line}{epoch}" for epoch in epochs]


def test_a_swarm_that_nothing_happened_to():
    assert line_found(X(range(1, 9))) == names("x", range(1, 9))
    assert line_found([]) == []


def test_a_minority_that_went_its_own_way_for_a_while():
    fork = made([4], "y", "e f", since="x", at=41.0) + made([5, 6], "y", "e f")
    together = made(range(7, 9), "x", "a b c d e f")
    assert line_found(X(range(1, 7)) + fork + together) == names("x", range(1, 9))
    assert line_found(X(range(1, 7)) + fork) == names("x", range(1, 7)), "and while they are apart"


def test_a_majority_that_came_to_follow_the_few():
    """Not how many signed then, but what is gone on from."""
    fork = made([4], "y", "e f", since="x", at=41.0) + made([5, 6], "y", "e f")
    assert line_found(X(range(1, 7)) + fork + made([7], "y", "a b c d e f")) == [
        *names("x", [1, 2, 3]),
        *names("y", [4, 5, 6, 7]),
    ]


def test_an_epoch_without_receipts_loses_only_itself():
    assert line_found(X([1, 2, 3, 5, 6])) == names("x", [1, 2, 3, 5, 6])
    fork = made([3], "y", "e", since="x", at=31.0)
    assert line_found(X([1, 2, 3, 5, 6]) + fork) == names("x", [1, 2, 3, 5, 6])
    assert line_found(X([1, 2, 3]) + made([5, 6], "x", "a b c")) == names("x", [1, 2, 3, 5, 6]), "most went on"
    assert line_found(X([1, 2, 3]) + made([5, 6], "x", "a b")) == names("x", [1, 2, 3]), "half may be made up"


def test_after_a_restart_from_a_checkpoint_those_who_are_gone_do_not_hold_the_line():
    again = [r for e in range(3, 6) for r in made([e], "n", "a b", since="x" if e == 3 else None, at=900.0 + 10 * e)]
    assert line_found(X(range(1, 6)) + again) == names("x", range(1, 6)), "two of four: it may be made up"
    assert line_found(X(range(1, 6)) + again + made([6], "n", "a b", at=1000.0)) == [
        *names("x", [1, 2]),
        *names("n", [3, 4, 5, 6]),
    ]


def test_a_rollback_begins_a_lineage_anew_and_the_epoch_goes_on():
    again = [r.copy(update={"before": BEGINNING}) for r in made([5], "n", "a b c d")]
    assert line_found(X([1, 2, 3, 4]) + again + made([6, 7], "n", "a b c d")) == [
        *names("x", [1, 2, 3, 4]),
        *names("n", [5, 6, 7]),
    ]


def test_a_member_that_missed_a_slice_saw_the_round_all_the_same():
    receipts = X([1, 2]) + [signed("e", 2, a=1, b=2, e=3).copy(update={"after": b"elsewhere"[:8]})] + X([3])
    assert line_found(receipts) == names("x", [1, 2, 3])
    steps = steps_of(receipts, owner)
    assert max(len(step.receipts) for step in steps) == 5


@pytest.mark.parametrize("when", [35.0, 65.0, 9.0])
def test_two_who_make_up_a_round_are_not_on_the_line(when):
    """Beside the swarm's, claiming that the swarm went on from it; before all and after all it is credited as what it
    is: provisional."""
    made_up = [r.copy(update={"after": lineage("x", 3)}) for r in made([3], "z", "e f", at=when)]
    found = line_found(X(range(1, 7)) + made_up)
    assert [name for name in found if name != "x3"] == names("x", [1, 2, 4, 5, 6])
    keys = [step.key for step in line_of(steps_of(X(range(1, 7)) + made_up, owner))]
    assert (3, lineage("Rz", 3)) not in keys or when < 10 or when > 60


def test_whatever_few_sign_the_others_keep_their_credit_and_the_few_gain_nothing_final():
    """Random lies of two of six, in all fields that they choose."""
    rng = random.Random(7)
    honest = [signed(s, e, a=10, b=10, c=10, d=10, e=10) for e in range(1, 6) for s in "abcd"]
    for _ in range(200):
        lies = []
        for signer, epoch in itertools.product("ef", range(1, 6)):
            lie = signed(
                signer,
                epoch,
                rng.choice("xyz"),
                since=rng.choice("xyz"),
                **{n: rng.choice([10, 500]) for n in "abcdefgh"},
            )
            lies.append(lie.copy(update={"time": lie.time + rng.choice([-30.0, 0.0, 1.0, 30.0])}))
        line = line_of(steps_of([*honest, *lies], owner))
        credits = {step.epoch: by_name(credit_of_step(step, owner)) for step in line if step.after[:1] == b"x"}
        for epoch in range(1, 6):
            assert all(credits[epoch][name] == (10, False) for name in "abcde"), credits
        final = [c for step in line for n, c in by_name(credit_of_step(step, owner)).items() if n in "fgh" and not c[1]]
        assert not final
