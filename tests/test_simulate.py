"""The simulator's cost model, where arithmetic knows the answer."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace

import numpy as np
import pytest

from benchmarks.simulate import at_sizes, homes
from benchmarks.simulate_parts import fitting, model
from benchmarks.simulate_parts.measured import SCENARIOS, Scenario, complete_only, split
from benchmarks.simulate_parts.model import CODECS, Codec, Constants, Swarm, cut, predict

# nothing but the parts themselves costs anything
PURE = Constants(header=1.0, record=0.0, meeting=0.0, meeting_more=0.0, late=0.0, value_seconds=0.0, pause=0.0)
BYTE = Codec(1.0, 1.0)
MANY = cut(12_500_000, 10_000)  # 12.5 MB with BYTE: 10 s on 10 Mbit/s


def swarm(lines: list[tuple[float, float]], **fields) -> Swarm:
    down, up = np.array(lines, dtype=float).T
    given = {"speed": np.ones(len(up)), "target_batch_size": 100.0, "codec": BYTE, "parts": MANY} | fields
    return Swarm(down=down, up=up, **given)


# --- limits ---


def test_two_equal_peers_send_half_and_answer_half():
    assert predict(swarm([(10, 10)] * 2), PURE).exchange == pytest.approx(10, rel=1e-3)


@pytest.mark.parametrize("n", [4, 16, 100])
def test_equal_peers_wait_for_their_uplinks(n):
    """Each carries (1 - 1/n) vectors as parts and as many as answers."""
    assert predict(swarm([(20, 10)] * n), PURE).exchange == pytest.approx(20 * (1 - 1 / n), rel=0.02)


@pytest.mark.parametrize("clients", [1, 3, 12])
def test_one_public_reducer_carries_everybody(clients):
    """n * bytes / W each way, one way after the other; its clients' lines are idle beside it."""
    n = clients + 1
    one = swarm([(10, 10)] * n, client=np.arange(n) > 0)
    assert predict(one, PURE).exchange == pytest.approx(20 * clients, rel=1e-3)
    assert predict(one, PURE).reducers == 1


def test_answers_come_after_the_last_part():
    """Of one part the answer cannot begin before all have sent it: both ways one after the other."""
    whole = swarm([(10, 10)] * 4, client=np.arange(4) > 0, parts=np.array([12_500_000]))
    assert predict(whole, PURE).exchange == pytest.approx(2 * 30, rel=1e-3)


def test_more_peers_than_parts_is_slower_than_even_slices():
    parts = cut(12_500_000, 10)
    whole, even = (swarm([(20, 10)] * 100, parts=parts, even=even) for even in (False, True))
    assert predict(whole, PURE).reducers == 10
    assert predict(whole, PURE).exchange > 4 * predict(even, PURE).exchange


def test_alone():
    alone = predict(swarm([(10, 10)]), Constants())
    assert alone.round == 0 and alone.bytes_per_sample == 0


@pytest.mark.parametrize("n", [2, 5, 60])
@pytest.mark.parametrize("fields", [{}, {"delayed": False}, {"codec": CODECS["sparse"]}])
def test_wider_lines_are_never_slower(n, fields):
    rounds = [predict(swarm([(2 * up, up)] * n, **fields), Constants()) for up in (1, 2, 5, 20, 100)]
    assert [p.round for p in rounds] == sorted((p.round for p in rounds), reverse=True)
    assert [p.goodput for p in rounds] == sorted(p.goodput for p in rounds)


# --- time ---


def test_while_one_is_late_the_parts_of_the_others_travel():
    late, lines = replace(PURE, late=2.0), [(10, 10)] * 2
    dense, sparse = (swarm(lines, codec=CODECS[name]) for name in ("blockwise8", "sparse"))
    assert predict(dense, late).round == predict(dense, PURE).round > 2.0
    assert predict(sparse, PURE).round < predict(sparse, late).round == 2.0


def test_delayed_averaging_waits_for_the_rest_of_a_round():
    slow, quick = swarm([(10, 10)] * 2, target_batch_size=12.0), swarm([(10, 10)] * 2, target_batch_size=100.0)
    assert predict(slow, PURE).wall == pytest.approx(10, rel=1e-3)  # an epoch of 6 s, a round of 10
    assert predict(slow, PURE).goodput == pytest.approx(0.6, rel=1e-3)
    assert predict(quick, PURE).goodput == 1
    assert predict(replace(quick, delayed=False), PURE).goodput == pytest.approx(50 / 60, rel=1e-3)


def test_an_epoch_is_the_batch_by_all_speeds():
    one = swarm([(10, 10)] * 3, speed=np.array([1.0, 2.0, 7.0]), target_batch_size=200.0)
    assert predict(one, PURE).epoch == 20


def test_bytes_of_a_sample():
    """Two vectors' halves each way between two, for 100 samples."""
    assert predict(swarm([(10, 10)] * 2), PURE).bytes_per_sample == pytest.approx(2 * 12.5e6 / 100, rel=1e-3)


def test_who_leaves_loses_its_computing():
    leaving = swarm([(10, 10)] * 2, leaves_per_hour=3.6, epochs_lost=0.5)
    assert predict(leaving, PURE).goodput == pytest.approx(1 - 0.001 * 0.5 * 50)


def test_each_round_trip_counts():
    near, far = swarm([(10, 10)] * 2), swarm([(10, 10)] * 2, rtt=50.0)
    more = predict(far, PURE).round - predict(near, PURE).round
    assert more == pytest.approx(model.HANDSHAKES * 0.1)


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("codec", ["blockwise8", "sparse"])
def test_ten_thousand_peers_take_a_moment(codec, even):
    began = time.process_time()
    found = predict(homes(10_000, codec, 4096 * 1250, even), Constants())
    assert time.process_time() - began < 5
    assert all(math.isfinite(value) for value in asdict(found).values())


def test_figures_are_flat_and_finite():
    assert all(math.isfinite(value) for value in at_sizes(Constants()).values())


# --- fitting ---


def test_what_made_the_measurements_is_found_again(monkeypatch):
    """And the scenarios that are left for checking are then predicted without error."""
    made = Constants(header=1.2, record=4000.0, meeting=0.6, meeting_more=0.2, late=1.6, value_seconds=4e-8, pause=0.3)
    shapes = (cut(1_400_000), cut(1_400_000) * 1.2)
    monkeypatch.setattr(fitting, "parts_of", lambda scenario: shapes)
    measured = {}
    for scenario in SCENARIOS:
        found = fitting.compared(predict(fitting.swarm_of(scenario), made))
        whole = {fitting.COMPLETE + name: value for name, value in found.items()}
        measured[scenario.name] = {**found, **whole, "complete": 1.0, "failed": 0, "steps": 1, "pressure": 0.0}
    to_fit, held = split(SCENARIOS)
    assert len(to_fit) >= 4 and len(held) >= 4
    checks = fitting.check(SCENARIOS, measured, fitting.fit(to_fit, measured))
    assert fitting.summary(checks)["prediction_error"] < 0.04
    assert fitting.summary(checks)["scenarios_checked"] == len(held)
    assert all(one.row().startswith(one.scenario.name) for one in checks)


def test_a_scenario_without_rounds_is_not_predicted():
    """It must not pass for a good prediction."""
    scenario = Scenario("none", ((10, 10),) * 2)
    nothing = dict.fromkeys(fitting.compared(predict(swarm([(10, 10)] * 2), PURE)), math.nan)
    nothing |= {fitting.COMPLETE + name: 0.0 for name in nothing}
    bad = fitting.Check(scenario, nothing, predict(swarm([(10, 10)] * 2), PURE))
    told = fitting.summary([bad])
    assert told["prediction_error"] == told["prediction_error_whole"] == math.inf


# --- measurements ---


def step(at: float, size: int = 2, samples: int = 40, **fields) -> dict:
    counted = {"at": at, "contention": 0.1 * at, "wire_sent": int(1000 * at)}
    told = {"event": "step", "group_size": size, "failure": None, "samples": samples, "seconds": 3.0}
    return {**told, **counted, **fields}


def test_whole_steps_are_those_of_all_after_another_such():
    warm = [step(1.0), step(2.0)]
    good = [*warm, step(10.0), step(20.0), step(30.0)]
    bad = [*warm, step(10.0), step(20.0, size=1, failure="nobody"), step(30.0), step(40.0, failure="late"), step(50.0)]
    found = complete_only([good, bad], speeds=[5.0, 5.0])
    assert found["complete_rounds"] == 2
    assert found["complete_goodput"] == pytest.approx(2 * 8 / (2 * 9))
    assert found["complete_bytes_per_sample"] == pytest.approx(250)
    assert found["complete_round_s"] == 3
    assert math.isnan(complete_only([bad, bad], [1.0, 1.0])["complete_goodput"])
