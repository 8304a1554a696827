"""The protocol's benchmark: where device time goes, lines that are shared, faults, and which settings are better."""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

import pytest

from benchmarks.protocol_goodput import Effort, pooled, run
from benchmarks.protocol_parts import axes
from benchmarks.protocol_parts.account import Shares
from benchmarks.protocol_parts.devices import TICKS, Device, State
from benchmarks.protocol_parts.lines import PACED, Lines, Speed
from benchmarks.protocol_parts.scenarios import (
    EVERY,
    KINDS,
    Result,
    chaos,
    chaos_faults,
    crowd,
    public_dies,
    six_die,
    six_leave,
)
from benchmarks.protocol_parts.swarm import Home, Swarm, founders, speeds_apart
from benchmarks.protocol_parts.tasks import Task, perform
from tests.simulation.clock import Clock
from tests.simulation.network import MEGABIT, Line, Network
from tests.simulation.schedule import Fault
from volunteer_kit.swarm.sync.messages import Computed

SMALL = Home(peers=4, public=4)


# --- accounts ---


def shares(**seconds: int) -> Shares:
    return Shares({name.replace("_", " "): Fraction(value) for name, value in seconds.items()})


def test_the_ceiling_is_what_faults_leave():
    found = shares(committed=80, dead=4, stopped=3, microbatch_lost=1, joining=1, taken_along=1, idle=10)
    assert (found.goodput, found.ceiling) == (0.8, 0.9)
    assert found.losses_sum == 1


def test_idle_is_a_share_of_the_time_in_which_the_process_ran_with_a_state():
    assert shares(committed=40, dead=30, stopped=10, joining=10, idle=10).idle == pytest.approx(10 / 50)


def test_chaos_adds_up_exactly_and_loses_nothing_unnamed():
    found = chaos(Home(), 3, 2.0).shares
    assert found.losses_sum == Fraction(1)
    assert all(isinstance(share, Fraction) for share in found.losses.values())
    assert {"dead", "stopped", "microbatch lost"} <= found.losses.keys()
    assert 0.5 < found.goodput <= 1.05
    assert 0.9 < found.ceiling < 1


def test_a_swarm_without_faults_loses_only_what_is_under_way_at_the_end():
    found = chaos(Home(), 0, 2.0, ()).shares
    assert found.ceiling == 1
    assert found.losses.keys() <= {"idle", "pending or in flight", "microbatch at the end"}
    assert found.goodput == pytest.approx(1, abs=0.02)
    assert found.idle < 0.01


def test_a_run_is_the_same_every_time():
    one, other = (chaos(Home(), 5, 1.0) for _ in range(2))
    assert one.shares.by_name == other.shares.by_name
    assert one[1:] == other[1:]


def test_goodput_is_what_the_entries_hold():
    peers = founders(Home(), random.Random(1))
    swarm = Swarm(Home(), "test", 1, peers, [Fault(40.0, "kill", ("p03",))], 90.0)
    swarm.run()
    account, best = swarm.account(), swarm.best()
    seconds = sum(best.amounts[each.member.peer] / swarm.cells / each.speed for each in peers)
    assert float(account["committed"]) == pytest.approx(seconds, rel=1e-6)
    assert float(sum(account.values())) == pytest.approx(8 * 90.0)


def test_pooled_shares_weigh_seeds_by_their_time():
    some = [
        Result(shares(committed=90, idle=10), 1, 1.0, {}, 1, 1.0),
        Result(shares(committed=100, idle=200), 1, 1.0, {}, 1, 1.0),
    ]
    found = pooled(some)
    assert found["committed"] == Fraction(190, 400)
    assert found.losses_sum == 1


# --- devices ---


class Asked(NamedTuple):
    """Stands for a process."""

    events: list[Computed]
    lineage: bytes = b"here"

    def handle(self, event: Computed) -> None:
        self.events.append(event)


@pytest.fixture
def running() -> tuple[Clock, Device, Asked]:
    """A device that begins microbatches of 2 s at 0 s."""
    clock = Clock()
    device, process = Device(clock, 8, 2.0), Asked([])
    device.started(process, True)  # type: ignore[arg-type]
    device.allow(True)
    return clock, device, process


def seconds(device: Device, state: State) -> float:
    return device.total(state) / TICKS


def test_a_device_computes_one_microbatch_after_the_other(running):
    clock, device, process = running
    clock.run(5.0)
    assert process.events == [Computed(8, b"here")] * 2
    assert (seconds(device, State.COMPUTING), device.progress / TICKS) == (4.0, 1.0)


def test_a_kill_takes_the_microbatch(running):
    clock, device, process = running
    clock.run(5.0)
    device.end(State.DEAD)
    clock.run(9.0)
    device.started(process, True)
    assert (device.lost / TICKS, seconds(device, State.DEAD), device.progress) == (1.0, 4.0, 0)
    assert len(process.events) == 2


def test_a_stopped_device_goes_on_with_its_microbatch(running):
    clock, device, process = running
    clock.run(1.5)
    device.stop()
    clock.run(9.5)
    device.resume()
    clock.run(10.1)
    assert len(process.events) == 1
    assert (seconds(device, State.STOPPED), device.lost) == (8.0, 0)


def test_a_device_that_is_not_allowed_finishes_its_microbatch_and_is_idle(running):
    clock, device, process = running
    clock.run(1.0)
    device.allow(False)
    clock.run(10.0)
    assert (len(process.events), seconds(device, State.IDLE)) == (1, 8.0)
    device.allow(True)
    clock.run(12.5)
    assert len(process.events) == 2


def test_all_time_of_a_device_is_somewhere(running):
    clock, device, process = running
    clock.at(3.3, device.stop)
    clock.at(4.1, device.resume)
    clock.at(7.7, device.end, State.DEAD)
    clock.at(9.2, device.started, process, False)
    clock.at(11.0, device.allow, True)
    clock.run(20.0)
    whole = sum(device.total(state) for state in State) + device.lost + device.progress
    assert whole == 20 * TICKS
    assert seconds(device, State.JOINING) == pytest.approx(1.8)


# --- lines ---


@pytest.fixture
def lines() -> tuple[Clock, Network, Lines]:
    """Three peers at 20/10 Mbit/s without latency."""
    clock = Clock()
    network = Network(clock, random.Random(0), lambda *_: None, lambda _: None)
    made = Lines(clock, network, lambda peer: False)
    for peer in "abc":
        network.lines[peer] = Line(0.0, 10.0, True)
        made.speeds[peer] = Speed(20.0, 10.0)
    return clock, network, made


MEGABYTE = 1e6 / (PACED * 10 * MEGABIT)  # s


def test_transfers_share_an_uplink(lines):
    clock, _, made = lines
    arrived: dict[str, float] = {}
    for to in "bc":
        made.send("a", to, 1e6, lambda to=to: arrived.setdefault(to, clock.now))
    clock.run(60.0)
    assert arrived["c"] == pytest.approx(2 * MEGABYTE, rel=0.01)
    assert arrived["b"] == pytest.approx(1.75 * MEGABYTE, rel=0.01)


def test_a_downlink_takes_what_two_uplinks_send(lines):
    clock, _, made = lines
    made.speeds["c"] = Speed(5.0, 10.0)
    arrived = []
    for sender in "ab":
        made.send(sender, "c", 1e6, lambda: arrived.append(clock.now))
    clock.run(60.0)
    assert max(arrived) == pytest.approx(2e6 / (5 * MEGABIT), rel=0.02)


def test_a_transfer_waits_for_its_line_and_others_pass_it(lines):
    clock, network, made = lines
    arrived: dict[str, float] = {}
    network.cut([("a", "b")])
    clock.at(8.0, network.mend, [("a", "b")])
    for to in "bc":
        made.send("a", to, 1e6, lambda to=to: arrived.setdefault(to, clock.now))
    clock.run(60.0)
    assert arrived["c"] == pytest.approx(MEGABYTE, rel=0.01)
    assert 8.0 + MEGABYTE <= arrived["b"] <= 8.5 + MEGABYTE


def test_what_a_dead_peer_sent_and_was_sent_never_arrives(lines):
    clock, _, made = lines
    arrived = []
    for sender, to in ("ab", "ba", "bc"):
        made.send(sender, to, 1e6, lambda pair=(sender, to): arrived.append(pair))
    clock.run(0.3)
    made.end_of("a")
    clock.run(60.0)
    assert arrived == [("b", "c")]


# --- scenarios ---


def test_faults_come_every_20_s_a_quarter_of_each_kind():
    names = [f"p{place}" for place in range(8)]
    faults = chaos_faults(names, 60.0, 60.0 + 8 * EVERY, random.Random(0), KINDS)
    assert Counter((fault.kind, len(fault.peers)) for fault in faults) == {
        ("kill", 1): 2, ("stop", 1): 2, ("partition", 1): 2, ("partition", 3): 2,
    }  # fmt: skip
    assert [later.at - earlier.at for earlier, later in zip(faults, faults[1:], strict=False)] == [EVERY] * 7


def test_devices_are_as_far_apart_as_told_and_fill_an_epoch():
    speeds = speeds_apart(8, 16.0, 290.0)
    assert max(speeds) / min(speeds) == pytest.approx(16)
    assert sum(speeds) == pytest.approx(290)


def test_newcomers_take_the_places_of_those_that_go():
    home = Home(peers=8, public=8, microbatches=4)
    found = crowd(home, 2, 8.0).shares
    assert found.losses_sum == 1
    assert found["joining"] > 0
    assert found.goodput > 0.5


@pytest.mark.parametrize("scenario", [six_leave, six_die])
def test_a_swarm_goes_on_when_most_leave_or_die(scenario):
    found = scenario(Home(), 0)
    assert found.seconds < float("inf")
    assert found.longest_gap >= found.seconds - 1e-6 or found.waiting <= found.seconds


@pytest.mark.parametrize("returns", [True, False])
def test_clients_go_on_when_somebody_can_be_called_again(returns):
    found = public_dies(Home(), 0, returns)
    assert found.seconds < float("inf")
    assert found.longest_gap > 180


def test_a_task_gives_what_its_scenario_gives():
    assert perform(Task("six leave", Home(), 1)) == six_leave(Home(), 1)


# --- settings ---


def axis(default: float, other: float, error: float, unit: str) -> axes.Axis:
    cells = (axes.Cell(1.0, True, default, 0.0, 0.0), axes.Cell(2.0, False, other, other - default, error))
    return axes.Axis("a_setting", unit, cells)


@pytest.mark.parametrize(
    ("default", "other", "error", "unit", "verdict"),
    [
        (0.96, 0.95, 0.001, "goodput", "the default is the best"),
        (0.96, 0.97, 0.01, "goodput", "the default is within the noise of the best"),
        (0.96, 0.961, 0.0001, "goodput", "the default is within the noise of the best"),  # of no use
        (0.96, 0.97, 0.001, "goodput", "2 is better"),
        (60.0, 30.0, 5.0, "seconds", "2 is 30 s sooner"),
        (60.0, 90.0, 5.0, "seconds", "the default is the best"),
        (60.0, 58.0, 5.0, "seconds", "the default is within the noise of the best"),
    ],
)
def test_a_value_is_better_only_if_it_is_clearly_so(default, other, error, unit, verdict):
    assert axis(default, other, error, unit).verdict == verdict


def test_every_axis_has_the_default_among_its_values():
    for name, values in axes.GOODPUT_AXES.items():
        assert axes.default(name) in values
    for name, (_, values) in axes.SILENCE_AXES.items():
        assert axes.default(name) in values


def test_differences_are_taken_on_the_same_seeds():
    names = ("max_staleness",)
    measures = {key: [0.9, 0.8, 0.7] for key in axes.tasks(names, 1, 1.0)}
    measures["max_staleness", 0.0] = [0.8, 0.7, 0.6]
    (row,) = axes.axes(names, measures)
    worst = row.cells[0]
    assert (worst.difference, worst.error) == (pytest.approx(-0.1), pytest.approx(0.0))
    assert row.cells[3].is_default


def test_the_last_line_is_flat(capsys):
    effort = Effort(
        seeds=1, minutes=0.5, crowds=0, silences=1, axis_seeds=1, axis_minutes=0.5, settings=("alone_after, six die",)
    )
    figures = run(effort, 1)
    assert figures["losses_sum"] == 1
    wanted = ("goodput ceiling idle goodput_5_1 goodput_12mb seconds_six_leave seconds_six_die seconds_public_dies"
              " minutes violations")  # fmt: skip
    assert set(wanted.split()) <= figures.keys()
    assert all(isinstance(value, (int, float, str)) for value in figures.values())
    json.dumps(figures)
    assert "six of eight leave" in capsys.readouterr().out
