"""A minority says anything at any time, and hypothesis looks for what it can gain by it.

What holds, by the code, while three members or more are honest, and no more than 7/16 (Settings.bad_share) are not:

- Nobody honest is struck in a round more than half of whose trusted voices are honest (`is_safe`): a strike takes more
  than half of a jury of those voices. Attackers who take honest ones with them, and come back sooner, can end that: see
  test_two_of_five_who_come_back_sooner_than_those_they_took_with_them_ban_nobody.
- A round costs an attacker that takes honest members with it its own standing, and in one round it can be in one pair
  for what was told and in one for what was sent (disputes.at_fault): so on each honest member's books no more than two
  honest ones lose standing for each time that an attacker does.
- Whom all trust follows from the commitments alone. Members that heard the same ones trust the same.
- Once the attackers are gone, whoever lost standing wins it back: as many looks as its microbatches need, a quarter of
  the group at a time.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.verified_group import Group, Member
from volunteer_kit.robust.draw import NONCE_SIZE, commitment
from volunteer_kit.robust.messages import Accusation, Report, Samples, Vote
from volunteer_kit.robust.standing import CAUSES, Settings

MOST = 13  # places: more than 7 honest ones and 5 attackers

PLACES = st.integers(0, MOST)  # one beyond the largest group too
SETS = st.frozensets(PLACES, max_size=MOST)
DIGESTS = st.sampled_from([b"", b"b", b"b" * 8])
SCALES = st.sampled_from([0.0, -1.0, 0.5, 2.0, 1e-20, 1e6, 1e30, float("nan"), float("inf")])
NEWS = st.one_of(
    st.builds(
        lambda ago, *rest: (ago, Vote(b"", *rest)),
        st.integers(0, 4),
        PLACES,
        st.sampled_from([*CAUSES]),
        st.booleans(),
        st.sampled_from([0.0, 1.0, float("inf"), float("nan")]),
        SETS,
        st.integers(-1, MOST),
    ),
    st.builds(
        lambda ago, target, part, sums, value: (ago, Report(b"", target, part, np.full(8 * sums, value))),
        st.integers(0, 4),
        PLACES,
        st.integers(0, 8),
        st.integers(0, MOST),
        st.sampled_from([0.0, 1.0, -1e9, float("nan")]),
    ),
    st.builds(
        lambda ago, sender, part: (ago, Accusation(b"", sender, part)), st.integers(0, 4), PLACES, st.integers(0, 30)
    ),
)
BY_PLACE = lambda values: st.dictionaries(PLACES, values, max_size=MOST)  # noqa: E731
ROWS = st.tuples(st.integers(0, 30), st.sampled_from(["norm", "distance", "sums", "all"]), SCALES)
FIELDS: dict[int, dict[str, st.SearchStrategy]] = {  # by stage: what of a message can be false
    0: {
        "weight": st.sampled_from([0.0, 1.0, 7.0, 9.0, 1e9]),
        "samples": DIGESTS,
        "nonce": DIGESTS,
        "distrusts": st.none() | SETS,
        "bans": SETS,
        "due": SETS,
        "news": st.lists(NEWS, max_size=8),
    },
    1: {
        "nonce": DIGESTS,
        "answers": BY_PLACE(DIGESTS),
        "counted": BY_PLACE(st.integers(0, 3)),
        "heard": BY_PLACE(DIGESTS),
    },
    2: {
        "seed": st.sampled_from([b"", bytes(32)]),
        "numbers": st.lists(ROWS, min_size=1, max_size=4) | st.integers(0, 3),
        "heard": BY_PLACE(DIGESTS),
        "opening": st.sampled_from(["closed", "others", "twice", "stale", "microbatches"]),
    },
}
LIES = st.one_of(
    st.tuples(st.sampled_from([0, 1, 2]), st.just("silence"), st.none()),
    st.tuples(st.just(0), st.just("a number for each"), st.none()),
    *(st.tuples(st.just(stage), st.just(name), values) for stage in FIELDS for name, values in FIELDS[stage].items()),
)
FACTORS = st.sampled_from([1.0, 1.0, -1.0, 0.5, 0.0, 1000.0, 1e20])


@dataclass(frozen=True)
class Plan:
    """What one attacker does in one round.

    :param lies: (stage, field, value); :param hearers: places of those who are lied to, the others hear the truth
    """

    lies: tuple = ()
    hearers: frozenset[int] = frozenset(range(MOST))
    sends: float = 1.0
    returns: float | None = 1.0  # None: no answer
    returns_to: frozenset[int] = frozenset(range(MOST))
    reports: float = 1.0
    shows: bool = True


ALL = st.just(frozenset(range(MOST)))
PLANS = st.builds(
    Plan,
    st.lists(LIES, max_size=3).map(tuple),
    ALL | SETS,
    FACTORS,
    FACTORS | st.none(),
    ALL | SETS,
    st.sampled_from([1.0, 1.0, -1.0, 3.0, float("nan")]),
    st.booleans(),
)


def falsified(stage: int, name: str, value: Any, round_: Any, message: Any, hearer: str) -> Any:
    """`message` with one field false."""
    if name == "silence":
        return None
    if name == "a number for each":
        own = hashlib.blake2b(hearer.encode(), digest_size=NONCE_SIZE).digest()
        return replace(message, nonce=commitment(own) if stage == 0 else own)
    true = getattr(message, name)
    if name in ("answers", "counted", "heard"):
        value = tuple(value.get(place, one) for place, one in enumerate(true))
    elif name == "news":
        value = tuple(replace(news, round_id=b"round %d" % (round_.epoch - ago)) for ago, news in value)
    elif name == "opening":
        value = false_list(true, value)
    elif name == "numbers" and isinstance(value, int):
        value = true[:value]
    elif name == "numbers":
        numbers, columns = np.array(true, np.float64), {"norm": [0], "distance": [1], "sums": slice(2, None)}
        for row, which, scale in value:
            if len(numbers):
                numbers[row % len(numbers), columns.get(which, slice(None))] *= scale
        with np.errstate(over="ignore"):
            value = numbers.astype(np.float32)
    return replace(message, **{name: value})


def false_list(true: Samples | None, how: str) -> Samples | None:
    if how == "closed" or true is None:
        return None
    names = {"others": tuple(name + 10**6 for name in true.names), "twice": true.names[:1] * len(true.names)}
    changed = {"stale": {"stale": 1}, "microbatches": {"microbatches": 1}}.get(how, {})
    return replace(true, names=names.get(how, true.names), **changed)


@dataclass
class Attacker:
    """Does as planned, round by round."""

    plan: Plan = field(default_factory=Plan)
    group: tuple[str, ...] = ()  # of all members, in order

    def lies_to(self, hearers: frozenset[int], hearer: str) -> bool:
        return self.group.index(hearer) in hearers

    def says(self, stage: int, round_: Any, message: Any) -> Any:
        plan = self.plan
        lies = [lie for lie in plan.lies if lie[0] == stage or (lie[1] == "a number for each" and stage == 1)]

        def tell(hearer: str) -> Any:
            told = message
            for _, name, value in lies:
                if told is not None and self.lies_to(plan.hearers, hearer):
                    told = falsified(stage, name, value, round_, told, hearer)
            return told

        return tell if lies else message

    def returns(self, average: torch.Tensor) -> Any:
        plan = self.plan
        return lambda hearer: (plan.returns or 1.0) * average if self.lies_to(plan.returns_to, hearer) else average


class Run(RuleBasedStateMachine):
    """One run with its members; each rule is a round."""

    group: Group | None = None

    @initialize(
        honest=st.integers(3, 7),
        attackers=st.integers(1, 5),
        share=st.sampled_from([0.0, 1 / 16, 1.0]),
        strikes=st.sampled_from([1, 3]),
        probation=st.sampled_from([0, 8]),
        late=st.booleans(),
    )
    def begin(self, honest: int, attackers: int, share: float, strikes: int, probation: int, late: bool) -> None:
        """:param late: do the attackers come when the others know each other?"""
        rules = Settings(share=share, strikes=strikes, probation=probation)
        about = {"samples": 4, "microbatches": 4}
        self.honest = [f"h{i}" for i in range(honest)]
        group = Group([Member(peer, rules, **about) for peer in self.honest], rules)
        group.may_split = True
        self.attackers = {f"bad{i}": Attacker() for i in range(min(attackers, 7 * honest // 9))}
        members = {
            peer: Member(
                peer,
                rules,
                **about,
                says=one.says,
                sends=lambda gradient, one=one: one.plan.sends * gradient,
                returns=one.returns,
                reports=lambda duty, totals, one=one: [one.plan.reports * total for total in totals],
            )
            for peer, one in self.attackers.items()
        }
        for one in self.attackers.values():
            one.group = (*self.honest, *members)
        if late:
            group.round()
        group.members.update(members)
        self.group, self.is_safe, self.holds = group, True, True

    @precondition(lambda self: self.group is not None and self.group.epoch < 8)
    @rule(plans=st.lists(PLANS, min_size=1, max_size=6), absent=st.frozensets(PLACES, max_size=3))
    def round(self, plans: list[Plan], absent: frozenset[int]) -> None:
        """:param absent: attackers only, by number"""
        self.holds = False
        away = [peer for number, peer in enumerate(self.attackers) if number in absent]
        for number, (peer, one) in enumerate(self.attackers.items()):
            one.plan = plans[number % len(plans)]
            self.group.members[peer].answers = one.plan.returns is not None
            self.group.members[peer].shows = one.plan.shows
        rounds = self.group.round(absent=away)
        views = [rounds[peer] for peer in self.honest]
        same = len({repr(sorted(view.commits.items(), key=lambda one: one[0])) for view in views}) == 1
        assert not same or len({view.trusted for view in views}) == 1
        for view in views:
            kept = [view.group[place] in self.honest for place in view.trusted if view.commits[place].weight > 0]
            self.is_safe &= 2 * sum(kept) > len(kept)
        self.check()
        self.holds = True

    def check(self) -> None:
        for peer in self.honest:
            verifier = self.group.members[peer].verifier
            if self.is_safe:
                assert not [strike for other in self.honest for strike in verifier.standing.strikes_of(other)], peer
            lost = [event.peer for event in verifier.events if event.kind in ("suspended", "strike")]
            honest = [one for one in lost if one in self.honest]
            assert len(honest) <= 2 * (len(lost) - len(honest)), (peer, lost)

    def teardown(self) -> None:
        """The attackers leave."""
        if self.group is None or not self.is_safe or not self.holds:
            return
        for peer in self.attackers:
            self.group.members.pop(peer)
        lost = max(
            (member.verifier.standing._needed(p) for member in self.group.members.values() for p in self.honest),
            default=0,
        )
        self.group.round()
        for _ in range(4 * (lost // 4 + 1) * len(self.honest)):
            rounds = self.group.round()
            if all(len(view.trusted) == len(self.honest) for view in rounds.values()):
                break
        else:
            raise AssertionError({peer: sorted(view.trusted) for peer, view in rounds.items()})
        self.check()


@pytest.mark.slow
def test_no_sequence_of_messages_bans_an_honest_majority():
    few = settings(max_examples=50, stateful_step_count=6, deadline=None, derandomize=True, print_blob=True,
                   suppress_health_check=list(HealthCheck))  # fmt: skip
    run_state_machine_as_test(Run, settings=few)
