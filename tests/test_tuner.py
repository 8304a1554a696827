"""The tuner on devices made of numbers: how near to the best it comes, how long it takes, how often memory runs out."""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.tuner_parts.cost_device import DEVICES, GB, CostDevice, gap_to_best, seeded, tune
from benchmarks.tuner_parts.real import Bench
from volunteer_kit.device import DEMO, Device, Remembered, Setting, detect_device, plan_device
from volunteer_kit.device.measurements import HEADROOM, Bounds, Measurements
from volunteer_kit.device.remembered import LARGEST_FILE, key_of
from volunteer_kit.model.dalle import PRESETS


def device(**changes) -> CostDevice:
    """A quiet card with room for 57 samples, on which more of them are better."""
    settings = dict(
        name="card", overhead=0.05, a_sample=0.005, total=8 * GB, sample_bytes=0.1 * GB, start=Setting(8), spikes=0.0
    )  # fmt: skip
    return CostDevice(**(settings | changes))


def tried(one: CostDevice, tuner=None) -> list[Setting]:
    """Every microbatch until it has settled."""
    story, run = [], one.run
    one.run = lambda setting: story.append(setting) or run(setting)
    tune(one, tuner)
    return story


@pytest.mark.parametrize("kind", DEVICES, ids=lambda one: one.name)
def test_it_finds_the_best_in_time_whatever_the_noise(kind):
    runs = [(one, tune(one)) for one in (seeded(kind, seed) for seed in range(15))]
    gaps = sorted(gap_to_best(*run) for run in runs)
    assert statistics.median(gaps) <= 0.03 and gaps[-2] <= 0.1
    assert max(one.clock for one, _ in runs) <= 60 and max(one.ooms for one, _ in runs) <= 1
    assert all(tuner.ooms == one.ooms for one, tuner in runs)


def anything(seed: int, **changes) -> CostDevice:
    """Some device, at which a plan would start sensibly though its estimate is wrong."""
    r = random.Random(seed)
    total, a_sample = r.choice([2, 6, 16, 80]) * GB, 10 ** r.uniform(-4, -0.5)
    one = CostDevice(
        f"device {seed}", a_sample * 10 ** r.uniform(-1.5, 1.5), a_sample, total, 10 ** r.uniform(-3, 0.5) * GB,
        Setting(1), idle=r.uniform(0.05, 0.5) * total, fixed=r.uniform(0, 0.1) * total, kept=r.uniform(0.05, 0.6),
        knee=r.choice([10**6, 12, 40]), noise=r.choice([0.01, 0.1]), drift=r.choice([0, 0.1]),
        estimate_off=10 ** r.uniform(-0.2, 0.2), largest=r.choice([16, 512]), seed=seed,
    )  # fmt: skip
    for setting in (Setting(2**k, c) for c in (False, True) for k in range(6, -1, -1)):
        if one.estimate(setting) + one.idle <= 0.8 * total and one.seconds(setting) < 3:
            one = replace(one, start=setting)
            break
    return replace(one, **changes)


def test_where_running_out_of_memory_means_to_be_killed_it_never_does():
    anywhere = [anything(seed, is_host=True) for seed in range(150)]
    able = [one for one in anywhere if one.peak(Setting(1, True)) < one.total]
    assert len(able) > 75, "else nobody could train there"
    for one in able:
        tune(one)  # raises Killed


def test_on_a_card_memory_runs_out_once_at_most_and_what_is_settled_on_leaves_room():
    gaps = []
    for seed in range(150):
        one = anything(seed)
        if not one.allowed(Setting(1, True)):
            continue
        tuner = tune(one)
        assert one.ooms <= 1, one
        assert one.peak(tuner.next()) <= (1 - HEADROOM) * one.total, one
        assert tuner.next().batch_size <= one.largest
        gaps.append(gap_to_best(one, tuner))
    assert statistics.median(gaps) < 0.02 and sorted(gaps)[int(0.9 * len(gaps))] < 0.06


def test_it_starts_at_the_plan():
    for start in (Setting(8), Setting(4, True), Setting(1)):
        assert tried(device(start=start))[0] == start


def test_memory_that_is_left_is_used_though_the_estimate_is_far_too_high():
    assert tune(device(estimate_off=4.0)).next().batch_size >= 52


def test_a_wrong_plan_costs_one_error():
    one = device(start=Setting(512), estimate_off=0.1)
    story = tried(one)
    assert one.ooms == 1 and story[0] == Setting(512) and story[1].batch_size < 80
    assert gap_to_best(one, tune(device(start=Setting(512), estimate_off=0.1))) < 0.03


def test_a_microbatch_does_not_take_long_nor_a_large_part_of_the_swarms():
    slow = device(a_sample=0.15)
    assert 8 <= tune(slow).next().batch_size <= 14
    assert max(each.batch_size for each in tried(device(a_sample=0.15))) < 20, "nor while it looks"
    assert tune(device(largest=12)).next() == (12, False)
    assert max(each.batch_size for each in tried(device(start=Setting(64), largest=12))) == 12


def test_who_needs_minutes_for_a_sample_is_not_kept_waiting():
    story = tried(device(start=Setting(1), overhead=1.0, a_sample=100.0))
    assert story == [Setting(1)]


def test_recomputing_is_tried_where_it_could_pay_and_only_there():
    pays = device(sample_bytes=2.5 * GB, overhead=0.3, start=Setting(2))
    assert tune(pays).next().checkpointing and gap_to_best(pays, tune(pays)) < 0.03
    assert not any(each.checkpointing for each in tried(device()))
    needless = device(start=Setting(8, True))
    assert not tune(needless).next().checkpointing, "memory would do without"
    must = device(sample_bytes=9 * GB, kept=0.2, start=Setting(1))
    assert tune(must).next() == (3, True) and must.ooms <= 1


def test_several_devices_get_equal_parts():
    one = device(total=80 * GB, start=Setting(8))
    story = tried(one, one.tuner(multiple=4))
    assert len(set(story)) > 2 and all(each.batch_size % 4 == 0 for each in story)


def test_what_belongs_to_no_setting_under_way_says_nothing():
    tuner = device().tuner()
    for setting, samples, seconds in ((Setting(9), 9, 1.0), (Setting(8), 5, 1.0), (Setting(8), 8, 0.0)):
        tuner.measured(setting, samples, seconds, 1e9, 8e9, 0)
    assert tuner.next() == (8, False) and not tuner._known.has(Setting(8)) and tuner._known.spent == 0


def test_it_says_why():
    tuner = tune(device())
    assert f"a batch of {tuner.next()}:" in tuner.why and "samples/s, the fastest" in tuner.why and "8: " in tuner.why
    assert tuner.speed == pytest.approx(tuner.next().batch_size / device().seconds(tuner.next()), rel=0.1)


@pytest.mark.slow
def test_on_this_machine_for_real():
    """The kit's own trainer, model and memory; how good the choice is, benchmarks/tuner.py measures."""
    bench = Bench(PRESETS["tiny"], detect_device(prefer="cpu"), target_batch_size=256)
    try:
        chosen, seconds, ooms, why = bench.tune()
        start = min(bench.run(Setting(1), 3))
        assert seconds < 120 and ooms == 0 and 4 <= chosen.batch_size <= 32
        assert chosen.batch_size / min(bench.run(chosen, 3)) > 1.2 / start, why
    finally:
        bench.close()


# --- later ---


def test_in_hour_five_memory_runs_out():
    kept = {}

    class Record:
        def load(self):
            return None

        def save(self, setting, peak_bytes, samples_per_second):
            kept["setting"] = setting

    one = device()
    tuner = tune(one, one.tuner(record=Record()))
    sizes = [tuner.next().batch_size]
    while tuner.next() != (1, False):
        tuner.out_of_memory(tuner.next())
        assert tuner.settled and kept["setting"] == tuner.next() and "memory ran out" in tuner.why
        sizes.append(tuner.next().batch_size)
    assert all(0.5 <= b / a < 0.8 for a, b in zip(sizes, sizes[1:], strict=False))
    tuner.out_of_memory(Setting(1))
    assert tuner.next() == (1, True)
    with pytest.raises(MemoryError):
        tuner.out_of_memory(Setting(1, True))


def test_memory_that_others_take_meanwhile():
    """At any moment: it never gets lost, and goes on with what fits now."""
    for moment in range(0, 120, 3):
        one, run, count = device(noise=0.1, seed=moment), CostDevice.run, iter(range(10**6))

        def meanwhile(setting, one=one, moment=moment, run=run, count=count):
            if next(count) == moment:
                one.total = 3 * GB
            return run(one, setting)

        one.run = meanwhile
        tuner = tune(one)
        while one.peak(tuner.next()) > one.total:
            tuner.out_of_memory(tuner.next())
        assert tuner.settled and tuner.next().batch_size > 4, moment


def test_not_even_one_sample():
    one = device(sample_bytes=100 * GB)
    with pytest.raises(MemoryError):
        tune(one)


# --- remembered ---

T4 = Device("cuda", "Tesla T4", 15.8, 15.0, (7, 5), 1, 2, 12.0)


def record(folder: Path, **changes) -> Remembered:
    plan = plan_device(replace(T4, **changes), DEMO)
    return Remembered(folder, key_of(replace(T4, **changes), plan, DEMO, 512))


def test_the_second_start_begins_at_the_best(tmp_path):
    one = device()
    first = tune(one, one.tuner(record=record(tmp_path)))
    second = one.tuner(record=record(tmp_path))
    assert second.settled and second.next() == first.next() and "last time" in second.why
    assert not one.tuner(record=record(tmp_path, name="NVIDIA L4", capability=(8, 9))).settled
    assert not one.tuner(record=record(tmp_path, memory_gb=12.0)).settled
    assert len(list(tmp_path.iterdir())) == 1


def test_a_shrunk_batch_is_what_the_next_start_begins_with(tmp_path):
    one = device()
    tuner = tune(one, one.tuner(record=record(tmp_path)))
    tuner.out_of_memory(tuner.next())
    assert one.tuner(record=record(tmp_path)).next() == tuner.next()


def test_what_does_not_fit_today_is_measured_anew(tmp_path):
    one = device()
    tune(one, one.tuner(record=record(tmp_path)))
    for today in ({"limit_bytes": 3 * GB}, {"largest": 10}):
        tuner = one.tuner(record=record(tmp_path), **today)
        assert not tuner.settled and tuner.next() == (8, False)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "3", "[" * 100_000, "{}", '{"batch_size": 8}',
        '{"batch_size": "8", "checkpointing": false, "peak_bytes": 1}',
        '{"batch_size": true, "checkpointing": false, "peak_bytes": 1}',
        '{"batch_size": 0, "checkpointing": false, "peak_bytes": 1}',
        '{"batch_size": 8, "checkpointing": 0, "peak_bytes": 1}',
        '{"batch_size": 8, "checkpointing": false, "peak_bytes": NaN}',
        '{"batch_size": 8, "checkpointing": false, "peak_bytes": "much"}',
        '{"batch_size": 8, "checkpointing": false, "peak_bytes": 1, "key": {}}',
        "\udcff",
    ],
    ids=lambda text: text[:24],
)  # fmt: skip
def test_a_damaged_file_counts_as_none(tmp_path, text):
    one, kept = device(), record(tmp_path)
    kept.save(Setting(16), 1e9, 100.0)
    (path,) = tmp_path.iterdir()
    path.write_text(text, errors="surrogateescape")
    assert record(tmp_path).load() is None and not one.tuner(record=record(tmp_path)).settled
    kept.save(Setting(16), 1e9, 100.0)
    assert record(tmp_path).load() == ((16, False), 1e9), "and is replaced"


def test_what_is_old_is_measured_anew(tmp_path):
    record(tmp_path).save(Setting(16), 1e9, 100.0)
    (path,) = tmp_path.iterdir()
    for days, known in ((13, True), (15, False)):
        os.utime(path, (time.time() - days * 86400,) * 2)
        assert (record(tmp_path).load() is not None) == known


def test_the_file_is_small_and_can_be_read_by_people(tmp_path):
    record(tmp_path).save(Setting(16, True), 2e9, 123.4567)
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert (found["batch_size"], found["checkpointing"], found["samples_per_second"]) == (16, True, 123.457)
    assert found["key"]["device"] == "Tesla T4" and found["key"]["precision"] == "fp16"
    assert path.stat().st_size < LARGEST_FILE / 5


def test_a_folder_that_cannot_be_written_to_does_not_stop_anybody(tmp_path):
    (tmp_path / "file").touch()
    record(tmp_path / "file" / "folder").save(Setting(16), 1e9, 1.0)
    assert record(tmp_path / "file" / "folder").load() is None


# --- what is expected ---


def known(careful: bool = False) -> Measurements:
    bounds = Bounds(largest=512, seconds=2.0, careful=careful)
    return Measurements(bounds, estimate=lambda s: s.batch_size * 1e8 + 1e9, limit=10e9, idle=1e9)


def test_memory_is_expected_along_a_line():
    for careful, alone in ((True, 1.05), (False, 0.5)):  # from idle, or as steep as the estimate
        one = known(careful)
        one[Setting(10)].peak = 3e9
        assert one.expected_bytes(Setting(20)) == pytest.approx(3e9 + alone * 2e9)
        one[Setting(20)].peak = 4e9
        assert one.expected_bytes(Setting(15)) == pytest.approx(3.5e9)
        assert one.expected_bytes(Setting(40)) == pytest.approx(4e9 + 1.05 * 20 * 1e8)
    one[Setting(20)].peak = 3e9  # the memory that the first one left was enough
    assert one.expected_bytes(Setting(40)) == pytest.approx(3e9)
    careful = known(careful=True)
    careful[Setting(10)].peak = careful[Setting(20)].peak = 3e9
    assert careful.expected_bytes(Setting(40)) > 3.9e9, "where it is the end, nobody relies on that"


def test_sizes_are_round_and_near_to_each_other():
    bounds = Bounds(512, 2.0)
    sizes = sorted({bounds.rounded(size) for size in range(1, 513)})
    assert sizes[:32] == [*range(1, 33)] and {34, 62, 64, 68, 136, 512} < set(sizes) and len(sizes) < 100
    assert all(b / a <= 1.07 for a, b in zip(sizes[15:], sizes[16:], strict=False))
    assert [Bounds(512, 2.0, multiple=3).rounded(size) for size in (1, 2, 3, 5, 35)] == [1, 2, 3, 3, 33]
