"""How members share out the work of a round."""

from __future__ import annotations

import pytest
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from volunteer_kit.swarm.line_speed import Answers, LineSpeed, told_step
from volunteer_kit.swarm.shares import LateReducers, believed, in_proportion, late_by_most, name_of
from volunteer_kit.swarm.told_group import read_entry, with_pace

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))


def busiest(fractions, mbps) -> float:
    """Vectors that the busiest line carries, by Mbit/s."""
    total, size = sum(fractions), len(fractions)
    return max((1 + (size - 2) * fraction / total) / speed for fraction, speed in zip(fractions, mbps, strict=True))


@pytest.mark.parametrize(
    "mbps, gain",
    [
        ([10.0] * 7 + [1000.0], 1.2),
        ([10.0] * 4 + [1000.0] * 4, 1.35),
        ([2.0] + [10.0] * 7, 1.7),
        ([10.0] * 8, 1.0),
    ],
    ids=["one is fast", "half are", "one is slow", "all are alike"],
)
def test_measured_lines_are_waited_for_less_than_equal_slices(mbps, gain):
    fractions = load_balance_peers(10**6, in_proportion(mbps))
    equal = busiest([1] * len(mbps), mbps)
    assert equal / busiest(fractions, mbps) >= 0.999 * gain


def test_lines_that_are_nearly_alike_get_equal_slices():
    assert in_proportion([10.0, 7.0, 19.0, 12.0]) == [1.0] * 4
    assert in_proportion([10.0, 10.0, 10.0, 3.0])[3] == 0.3


@pytest.mark.parametrize("size", [4, 5, 8, 16, 64])
def test_a_boaster_does_not_get_most_of_the_work(size):
    fractions = load_balance_peers(10**6, in_proportion([10.0] * (size - 1) + [1e9]))
    assert max(fractions) <= 0.505 * 10**6


def test_a_boaster_whose_slice_was_late_gets_less_than_the_others():
    for claims in ([10.0] * 7 + [1e9], [None] * 8):
        fractions = load_balance_peers(10**6, in_proportion(claims, late={7}))
        assert fractions[7] < min(fractions[:7]), claims


def test_beside_clients_only_reducers_count():
    assert in_proportion([0.0] * 11 + [10.0]) == [0.0] * 11 + [1.0]
    fractions = load_balance_peers(10**6, in_proportion([0.0] * 11 + [None, None], late={11}))
    assert 0 < fractions[11] < fractions[12] and sum(fractions) == 10**6


@given(st.lists(st.one_of(st.none(), st.just(0.0), st.floats(1e-3, 1e12)), min_size=2, max_size=12), st.data())
def test_there_is_always_a_way_to_share_it_out(claims, data):
    late = data.draw(st.sets(st.integers(0, len(claims) - 1)))
    shares = in_proportion(claims, late)
    most = believed(sum(claim != 0 for claim in claims), len(claims))
    assert all(share is None or 0 <= share <= most for share in shares)
    assert [share == 0 for share, claim in zip(shares, claims, strict=True) if claim == 0] == [True] * claims.count(0)


# --- who is late ---


def test_who_is_late_again_is_named():
    late = LateReducers()
    late.note({A: 5.0, B: 5.1, C: 9.0})
    assert late.named == [], "a line may break once"
    late.note({A: 5.0, B: 5.1, C: 9.0})
    assert late.named == [name_of(C)]
    late.note({A: 5.0, B: 5.1}, failed=[D])
    late.note({A: 5.0, B: 5.1}, failed=[D])
    assert late.named == sorted([name_of(C), name_of(D)])
    for _ in range(8):
        late.note({A: 0.1, B: 0.4, C: 0.2}, [])
    assert late.named == [], "in time again; and in rounds so short nobody is late"


def test_only_most_of_the_others_can_call_somebody_late():
    group, c = [A, B, C, D], {name_of(C)}
    assert late_by_most(group, [c, c, set(), set()]) == {2}
    assert late_by_most(group, [c, set(), c, set()]) == frozenset(), "its own word is none"
    assert late_by_most([A, B], [{name_of(B)}, {name_of(A)}]) == {0, 1}, "of two, nobody is hurt"
    assert late_by_most([A, B, C], [{b"x" * 8}] * 3) == frozenset()


# --- our own line ---


def test_a_speed_is_told_in_steps_and_does_not_jitter():
    line = LineSpeed()
    assert line.mbps is None
    told = []
    for mbps in [10.0, 10.4, 9.7, 10.9, 10.1, 9.9, 10.6, 10.3, 10.8, 10.2]:
        line.note(mbps)
        told.append(line.mbps)
    assert told[:2] == [None, None] and len(set(told[2:])) == 1
    assert 9 < told[-1] < 12


def test_a_line_that_got_worse_is_believed():
    line = LineSpeed()
    for mbps in [100.0] * 20 + [10.0] * 7:
        line.note(mbps)
    assert line.mbps < 12
    line.note(0.0)
    line.note(float("inf"))
    assert line.mbps < 12, "what nobody can have measured"


def test_a_cap_is_what_the_line_has():
    line = LineSpeed(max_mbps=5.0)
    assert line.mbps == 5.0
    for _ in range(5):
        line.note(100.0)
    assert line.mbps == 5.0
    for _ in range(9):
        line.note(2.0)
    assert line.mbps == pytest.approx(2.0)


def test_a_step_stays_within_its_edges():
    assert told_step(8.0, None) == 12 and told_step(9.0, None) == 13
    assert told_step(9.0, 12) == 12 and told_step(9.2, 12) == 13 and told_step(8.4, 13) == 13


def test_the_uplink_is_what_members_wait_for_after_the_last_part():
    now, speeds = [0.0], []
    answers = Answers(4, speeds.append, clock=lambda: now[0])
    for member in (A, B, C, D):
        answers.answer(member, 10**6, is_last=False)  # of the parts before: others kept us waiting for them
    now[0] = 7.0
    answers.hung_up(A)  # it has given up
    for member in (A, B, C, D):
        answers.answer(member, 10**6, is_last=True)
    for member, at in ((A, 7.5), (A, 7.6), (B, 8.0), (C, 9.0)):
        assert speeds == []
        now[0] = at
        answers.hung_up(member)
    assert speeds == [pytest.approx(3 * 8 / 2.0)]
    now[0] = 60.0
    answers.hung_up(D)
    assert len(speeds) == 1, "the slowest is not waited for"


def test_a_moment_is_latency():
    speeds = []
    answers = Answers(1, speeds.append, clock=lambda: 5.0)
    answers.answer(A, 20_000, is_last=True)
    answers.hung_up(A)
    assert speeds == [pytest.approx(1.6)]


def test_a_few_bytes_behind_all_others_on_their_way_say_nothing():
    """What a sparse round's last, small part took was the queue before it: twenty Mbit/s were measured as a thousandth
    of one."""
    now, speeds = [0.0], []
    answers = Answers(12, speeds.append, clock=lambda: now[0])
    for member in range(12):
        answers.answer(member, 70_000, is_last=False)
    for member in range(12):
        answers.answer(member, 46, is_last=True)
    now[0] = 4.0
    for member in range(12):
        answers.hung_up(member)
    assert speeds == []


# --- how it goes round ---


def entry(*more) -> bytes:
    return MSGPackSerializer.dumps([None, 0, MSGPackSerializer.dumps("words"), *more])


@pytest.mark.parametrize("measured, told", [(7.6e-4, 1e-3), (1e13, 1e12), (12.5, 12.5), (0.0, 0.0), (None, None)])
def test_what_nobody_would_believe_is_not_told(measured, told):
    """An entry of the only reducer that the others could not use has ended all rounds, for good."""
    read = read_entry(with_pace(entry(), MSGPackSerializer, measured, None, []), MSGPackSerializer)
    assert read is not None and read.bandwidth == told


def test_what_is_told_is_read():
    data = with_pace(entry(), MSGPackSerializer, 12.5, 8.25, [name_of(A)])
    read = read_entry(data, MSGPackSerializer)
    assert (read.bandwidth, read.words, read.seconds, read.late) == (12.5, "words", 8.25, {name_of(A)})
    assert with_pace(data, MSGPackSerializer, 12.5, 8.25, [name_of(A)]) == data
    assert (read.mark, read.least) == (b"", 0)
    for mark in (b"", bytes(16)):
        read = read_entry(with_pace(data, MSGPackSerializer, 12.5, 8.25, [], mark, least=5), MSGPackSerializer)
        assert (read.seconds, read.mark, read.least) == (8.25, mark, 5)


@pytest.mark.parametrize("least", [-1, True, 2.5, "5", 2**40])
def test_a_number_of_members_that_cannot_be_is_none(least):
    assert read_entry(entry([None, [], b"", least]), MSGPackSerializer).least == 0


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("x",),
        ([],),
        ([1],),
        ([float("nan"), 7],),
        ([-1.0, [b"short", "word", 5]],),
        ([True, {}],),
        ([1e300, b"12345678"],),
        ([None, None, "later kits may tell more"], 5),
    ],
)
def test_nonsense_is_as_if_it_had_not_been_told(more):
    read = read_entry(entry(*more), MSGPackSerializer)
    assert read.words == "words" and read.seconds is None and read.late == frozenset()


def test_nobody_names_everybody():
    names = [bytes([i]) * 8 for i in range(200)]
    assert len(read_entry(entry([None, names]), MSGPackSerializer).late) == 32
