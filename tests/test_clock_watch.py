"""Causes of one's own are told first: a clock that jumps, a machine that slept, a token that has ended."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from volunteer_kit.doctor.steady_clock import steady_clock, verdict
from volunteer_kit.swarm.net.clock_watch import SET_CLOCK, ClockWatch, in_words
from volunteer_kit.swarm.net.connectivity import NOBODY, Look, Reach, why_anew
from volunteer_kit.swarm.net.same_key import Instance, Sharing, judge

HOUR, DAY = 3600.0, 86_400.0
ADDRESS = "/ip4/10.0.0.1/tcp/1/p2p/A"


class Clocks:
    """The three clocks of a machine, set by a test."""

    def __init__(self) -> None:
        self.wall, self.running, self.awake = 1.8e9, 5000.0, 4000.0

    def watch(self) -> ClockWatch:
        return ClockWatch(lambda: self.wall, lambda: self.running, lambda: self.awake)

    def go(self, seconds: float) -> None:
        self.wall, self.running, self.awake = self.wall + seconds, self.running + seconds, self.awake + seconds

    def sleep(self, seconds: float) -> None:
        self.wall, self.running = self.wall + seconds, self.running + seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.mark.parametrize(
    ("jump", "words"),
    [
        (HOUR, "jumped forward by 1 h"),
        (-HOUR, "jumped back by 1 h"),
        (DAY, "jumped forward by 1 d"),
        (-5.0, "jumped back by 5 s"),
        (2.0, None),  # hivemind allows three
        (0.0, None),
    ],
)
def test_a_jump_is_told_with_its_size_and_way_out(clocks, jump, words):
    watch = clocks.watch()
    clocks.go(100.0)
    clocks.wall += jump
    told = watch.look()
    assert (told is None) is (words is None) and watch.woke is None
    if words:
        assert words in told and "sudo timedatectl set-ntp true" in told and " UTC" in told


@pytest.mark.parametrize(
    ("steps", "is_wrong", "afresh"),
    [
        ([("jump", HOUR), ("go", 5.0), ("jump", -HOUR)], False, False),  # so short that nobody has seen it
        ([("jump", HOUR), ("go", 90.0), ("jump", -HOUR)], False, True),  # what it has dated meanwhile stays
        ([("jump", HOUR), ("heard", -HOUR), ("go", 5.0), ("jump", -HOUR)], False, True),  # and others were asked
        ([("jump", HOUR), ("heard", -HOUR), ("go", 90.0)], True, False),
        ([("jump", HOUR), ("heard", 0.4)], False, False),  # the jump made it right
        ([("jump", HOUR), ("heard", 0.4), ("go", 90.0), ("jump", -HOUR)], True, False),
        ([("heard", -HOUR)], False, False),  # it did not jump: a stranger says anything
        ([("sleep", HOUR)], False, False),
    ],
)
def test_when_it_is_wrong_and_when_the_worker_begins_afresh(clocks, steps, is_wrong, afresh):
    watch = clocks.watch()
    for what, seconds in steps:
        if what == "jump":
            clocks.wall += seconds
        elif what == "heard":
            watch.heard(seconds)
        else:
            getattr(clocks, what)(seconds)
        told = watch.look()
    assert (told is not None) is is_wrong and bool(watch.why_afresh) is afresh


def test_a_sleep_is_told_for_a_minute_and_is_no_jump(clocks):
    watch = clocks.watch()
    clocks.sleep(HOUR)
    assert watch.look() is None and "slept for 1 h" in watch.woke
    clocks.go(61.0)
    assert watch.look() is None and watch.woke is None


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(12, "12 s"), (300, "5 min"), (HOUR, "1 h"), (5400, "1 h 30 min"), (DAY, "1 d"), (2 * DAY + 60, "48 h 1 min")],
)
def test_durations(seconds, words):
    assert in_words(seconds) == words


class NoDht:
    """Answers as it is told, the last one again and again."""

    def __init__(self, initial_peers, *looks: Look):
        self.initial_peers, self.looks = initial_peers, list(looks)

    def run_coroutine(self, coro, return_future):
        return self

    def result(self, timeout):
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


SILENT, REFUSED = Look(silent=[ADDRESS]), Look(refused=True, silent=[])
TOKEN = "This machine's access token has ended."


@pytest.mark.parametrize(
    ("first", "look", "happens", "words"),
    [
        ([ADDRESS], SILENT, None, NOBODY),  # no cause of its own: then it is the line
        ([ADDRESS], SILENT, "jump", "jumped forward by 1 h"),
        ([ADDRESS], SILENT, "sleep", "slept for 1 h"),
        ([ADDRESS], SILENT, "token", TOKEN),
        ([ADDRESS], Look(answered=True, offset=-HOUR), "jump", "jumped forward by 1 h"),  # they ping, and refuse
        ([ADDRESS], Look(answered=True, offset=0.1), "jump", None),  # all jumped, or it was wrong before
        ([], REFUSED, "jump", "jumped forward by 1 h"),  # who began the swarm does not go on alone by that either
        ([], REFUSED, "token", TOKEN),
        ([], REFUSED, None, None),  # the others have gone
    ],
)
def test_a_cause_of_ones_own_is_told_before_the_line_and_nothing_is_stepped(
    clocks, monkeypatch, first, look, happens, words
):
    for period in ("PERIOD", "PERIOD_SILENT"):
        monkeypatch.setattr(f"volunteer_kit.swarm.net.connectivity.{period}", 1e6)
    reach = Reach(NoDht(first, Look(answered=True, offset=0.0), look), clock=clocks.watch())
    try:
        reach._look()
        assert reach.cut_off is None, "all is well, and somebody answers"
        if happens == "jump":
            clocks.wall += HOUR
        elif happens == "sleep":
            clocks.sleep(HOUR)
        elif happens == "token":
            reach.ask_cause = lambda: TOKEN
        for _ in range(3):
            reach._look()
        assert words in reach.cut_off if words else reach.cut_off is None
        assert reach.waits_for_itself is (happens in ("jump", "token") and words is not None)
    finally:
        reach.close()


@pytest.mark.parametrize(
    ("happens", "seconds", "why"),
    [
        ("jump", 90.0, ""),  # it is wrong still
        ("jump and back", 90.0, "is right again"),
        ("sleep", 90.0, ""),  # the others are called anew
        ("", 90.0, ""),
    ],
)
def test_who_leaves_and_comes_back_is_told_why(clocks, monkeypatch, happens, seconds, why):
    for period in ("PERIOD", "PERIOD_SILENT"):
        monkeypatch.setattr(f"volunteer_kit.swarm.net.connectivity.{period}", 1e6)
    reach = Reach(NoDht([ADDRESS], Look(answered=True, offset=0.0)), clock=clocks.watch())
    try:
        assert reach.why_anew == "" and reach.woke is None
        if "jump" in happens:
            clocks.wall += HOUR
        elif happens == "sleep":
            clocks.sleep(HOUR)
        assert reach.why_anew == "" and ("slept for 1 h" in (reach.woke or "")) is (happens == "sleep")
        clocks.go(seconds)
        if "back" in happens:
            clocks.wall -= HOUR
        reach._look()
        assert (why in reach.why_anew) if why else reach.why_anew == ""
    finally:
        reach.close()


@pytest.mark.parametrize(
    ("cut_off", "seconds", "waits", "afresh", "why"),
    [
        (None, 0.0, False, "", ""),
        (NOBODY, 60.0, False, "", ""),
        (NOBODY, 200.0, False, "", NOBODY),  # the line has been dead for long
        ("the clock", 200.0, True, "", ""),  # a new start mends neither a wrong clock nor a lack of a token
        (None, 0.0, False, "it is right again", "it is right again"),
    ],
)
def test_a_peer_begins_anew_only_where_that_mends_something(cut_off, seconds, waits, afresh, why):
    assert why_anew(cut_off, seconds, waits, afresh) == why


def test_the_doctor_says_whether_the_clock_goes_steadily(clocks):
    assert steady_clock()().level == "ok"
    watch = clocks.watch()
    clocks.wall -= HOUR
    found = verdict(watch.look(), watch.woke, SET_CLOCK)
    assert found.level == "problem" and "jumped back by 1 h" in found.text and "set-ntp true" in found.way_out
    assert "set-ntp" not in found.text  # once is enough
    clocks.wall += HOUR
    clocks.sleep(HOUR)
    assert verdict(watch.look(), watch.woke, SET_CLOCK).level == "warning"


def test_every_time_that_is_printed_has_its_zone():
    """A time without one is another time elsewhere."""
    root = Path(__file__).parents[1] / "volunteer_kit"
    places = [(path.name, line) for path in root.rglob("*.py") for line in path.read_text().splitlines()]
    printed = [(name, line) for name, line in places if re.search(r"%H:%M|strftime|ctime\(|localtime\(", line)]
    bare = [(name, line.strip()) for name, line in printed if not re.search(r"UTC|%z|%Z|%SZ", line)]
    assert len(printed) >= 5 and not bare


@pytest.mark.parametrize(
    ("written", "sharing"),
    [
        (HOUR, Sharing.ALONE),  # by the worker before this one, whose clock had jumped
        (-300.0, Sharing.ALONE),  # by the worker before this one
        (1.0, Sharing.LATER),  # by another machine, which is here now
    ],
)
def test_what_a_wrong_clock_has_dated_is_no_other_machine(written, sharing):
    now = 1.8e9
    own, found = Instance(b"own", now - 60.0, now), Instance(b"other", now - 900.0, now + written)
    assert judge(own, found, []) is sharing
