"""The emulated swarm of benchmarks/staleness.py: who is late, which parameters it computes on, and what it weighs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from benchmarks.staleness_parts.figures import (
    ALL_RULES,
    RULES,
    Job,
    best,
    common_cells,
    geometric_mean,
    list_jobs,
    ratio,
    summary,
)
from benchmarks.staleness_parts.lateness import (
    DISCOUNTS,
    SPEED_RATIO,
    WORKERS,
    Plan,
    Rule,
    draw_ages,
    draw_workers,
    make_plan,
    speeds,
)
from benchmarks.staleness_parts.samples import Data, Samples, open_run, read_data
from benchmarks.staleness_parts.training import (
    CODECS,
    UNITS,
    Contribution,
    Outcome,
    Setting,
    Size,
    Swarm,
    follow,
    order_rows,
    train,
)
from tests.shard_files import good_shard

TARGET, EPOCHS = 64, 50
SAMPLES = TARGET * EPOCHS
USED = Rule("used")


def plan_of(rule: Rule, seed: int = 0) -> Plan:
    workers = draw_workers(SAMPLES, seed)
    return make_plan(rule, workers, draw_ages(workers, TARGET, rule.ages, seed), TARGET)


def parts_of(plan: Plan) -> list:
    """(epoch of computing, part) of a plan."""
    return [(epoch, part) for epoch, parts in enumerate(plan.parts) for part in parts]


# --- who computes, and who is late ---


def test_workers_compute_by_their_speed():
    assert speeds().sum() == pytest.approx(1) and speeds()[-1] / speeds()[0] == pytest.approx(SPEED_RATIO)
    workers = draw_workers(SAMPLES, seed=3)
    np.testing.assert_allclose(np.bincount(workers, minlength=WORKERS), speeds() * SAMPLES, atol=2)
    np.testing.assert_array_equal(workers, draw_workers(SAMPLES, seed=3))
    assert (workers != draw_workers(SAMPLES, seed=4)).any()


def test_three_contributions_in_ten_are_late_by_every_age():
    workers = draw_workers(64 * 3000, seed=0)
    ages = draw_ages(workers, 64, (2, 4), seed=0)
    assert (ages > 0).mean() == pytest.approx(0.3, abs=0.01)
    late = Counter(ages[ages > 0].tolist())
    assert late.keys() == {2, 3, 4}
    assert all(count / late.total() == pytest.approx(1 / 3, abs=0.02) for count in late.values())


def test_a_contribution_is_late_as_a_whole():
    workers = draw_workers(SAMPLES, seed=1)
    ages = draw_ages(workers, TARGET, (2, 4), seed=1)
    slots = np.arange(SAMPLES) // TARGET
    of_contribution: dict[tuple[int, int], set[int]] = {}
    for slot, worker, age in zip(slots.tolist(), workers.tolist(), ages.tolist(), strict=True):
        of_contribution.setdefault((slot, worker), set()).add(age)
    assert all(len(found) == 1 for found in of_contribution.values())


def test_equal_seeds_have_the_same_late_samples_whatever_their_ages():
    workers = draw_workers(SAMPLES, seed=2)
    near, far = (draw_ages(workers, TARGET, ages, seed=2) for ages in ((2, 4), (2, 8)))
    np.testing.assert_array_equal(near > 0, far > 0)
    assert far.max() == 8


# --- what a rule makes of it ---


def test_without_lateness_every_epoch_is_one_target_batch():
    plan = plan_of(RULES["none"])
    assert plan.epochs == EPOCHS and plan.computed == [TARGET * (epoch + 1) for epoch in range(EPOCHS)]
    assert {(part.age, part.weight) for _, part in parts_of(plan)} == {(0, 1.0)}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", [USED, RULES["undiscounted"], RULES["thrown"]])
def test_an_epoch_that_does_not_wait_is_one_target_batch_too(rule, seed):
    assert plan_of(rule, seed).computed == plan_of(RULES["none"]).computed


@pytest.mark.parametrize("seed", range(3))
def test_a_swarm_that_waits_makes_fewer_epochs_of_equally_many_samples(seed):
    plan = plan_of(RULES["waiting"], seed)
    ages = draw_ages(draw_workers(SAMPLES, seed), TARGET, (2, 4), seed)
    assert plan.epochs == (ages == 0).sum() // TARGET < 0.85 * EPOCHS
    assert SAMPLES - 4 * TARGET < plan.computed[-1] <= SAMPLES
    fresh = Counter()
    for epoch, part in parts_of(plan):
        assert part.age == 0
        fresh[epoch] += len(part.samples)
    assert set(fresh.values()) == {TARGET}


@pytest.mark.parametrize("on_arrival", [False, True])
def test_every_computed_sample_enters_one_step(on_arrival):
    plan = plan_of(Rule("used", on_arrival=on_arrival))
    entered = Counter(sample for _, part in parts_of(plan) for sample in part.samples)
    assert entered.keys() == set(range(plan.computed[-1])) and set(entered.values()) == {1}
    for epoch, part in parts_of(plan):
        assert part.enters_at == epoch + part.age
        assert part.weight == (1.0 if part.age == 0 else 1 / (1 + part.age))


def test_counted_on_arrival_each_step_holds_a_target_batch_whatever_it_weighs():
    plan = plan_of(Rule("used", on_arrival=True))
    held = Counter()
    for _, part in parts_of(plan):
        held[part.enters_at] += len(part.samples)
    whole = [held[epoch] for epoch in range(plan.epochs)]
    assert min(whole) >= TARGET and np.median(whole) == TARGET
    assert len(set(np.diff(plan.computed).tolist())) > 1


def test_what_is_thrown_away_enters_no_step():
    ages = draw_ages(draw_workers(SAMPLES, 0), TARGET, (2, 4), 0)
    entered = sorted(sample for _, part in parts_of(plan_of(RULES["thrown"])) for sample in part.samples)
    assert entered == np.flatnonzero(ages == 0).tolist()


@pytest.mark.parametrize("bound", [2, 4, 8])
def test_older_contributions_than_the_bound_expire(bound):
    plan = plan_of(Rule("bounded", ages=(2, 8), max_staleness=bound))
    assert {part.age for _, part in parts_of(plan)} == {0, *range(2, bound + 1)}
    assert plan.epochs == EPOCHS


def test_discounts_fall_with_age():
    assert DISCOUNTS["1/(1+k)"](3) == 0.25 and DISCOUNTS["1/(1+k)^2"](3) == 1 / 16
    assert DISCOUNTS["1/sqrt(1+k)"](3) == 0.5 and DISCOUNTS["1"](3) == 1.0
    for discount in DISCOUNTS.values():
        weights = [discount(age) for age in range(2, 9)]
        assert weights == sorted(weights, reverse=True)


# --- gradients and steps ---


def test_the_weights_of_a_contribution_add_up():
    fresh, late = torch.tensor([1.0, 2.0]), torch.tensor([4.0, -2.0])
    contribution = Contribution()
    contribution.add([fresh], 6.0)
    contribution.add([late], 2.0 * USED.weight(3))
    assert contribution.weight == 6.5
    torch.testing.assert_close(contribution.mean()[0], (6 * fresh + 0.5 * late) / 6.5)


class VersionedSwarm:
    """Its gradient is the number of steps that its parameters have made."""

    def __init__(self) -> None:
        self.version, self.steps = 0, []

    def place(self, worker: int) -> int:
        return worker

    def gradients(self, samples: Samples) -> list[torch.Tensor]:
        return [torch.tensor(float(self.version), dtype=torch.float64)]

    def step(self, contributions) -> None:
        self.steps.append({worker: (one.mean()[0].item(), one.weight) for worker, one in contributions.items()})
        self.version += 1

    def loss(self, samples: Samples) -> float:
        return float(self.version)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_late_contribution_is_computed_on_the_parameters_of_its_own_epoch(rule):
    plan, swarm = plan_of(rule), VersionedSwarm()
    nothing = Samples(torch.zeros(SAMPLES, 1), torch.zeros(SAMPLES, 1))
    loss, late = follow(plan, swarm, nothing, torch.arange(SAMPLES), nothing)
    expected: list[dict[int, list[float]]] = [{} for _ in range(plan.epochs)]
    for epoch, part in parts_of(plan):
        if part.enters_at < plan.epochs:
            weight = part.weight * len(part.samples)
            total = expected[part.enters_at].setdefault(part.worker, [0.0, 0.0])
            total[0] += weight * epoch
            total[1] += weight
    assert len(swarm.steps) == plan.epochs
    for step, wanted in zip(swarm.steps, expected, strict=True):
        assert step.keys() == wanted.keys()
        for worker, (mean, weight) in step.items():
            assert weight == pytest.approx(wanted[worker][1])
            assert mean == pytest.approx(wanted[worker][0] / wanted[worker][1])
    assert (late > 0) == (rule.is_late and not rule.waits and rule.discount != "0")
    assert 7 / 8 * plan.epochs - 2 < loss <= plan.epochs  # of the last eighth


def swarm_of(codec: str) -> Swarm:
    return Swarm(open_run("scenes", **CODECS[codec]))


def some_gradients(swarm: Swarm, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(param.shape, generator=generator) for param in swarm.params]


def contribution_of(gradients: list[torch.Tensor], weight: float) -> Contribution:
    contribution = Contribution()
    contribution.add(gradients, weight)
    return contribution


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def test_sparse_parts_are_discounted_before_what_is_left_out_is_kept():
    swarm = swarm_of("sparse")
    weights = {0: 4.0, 3: 2.0 * USED.weight(4), 6: 8.0}  # the others bring nothing; worker 3 is late
    brought = {worker: some_gradients(swarm, worker) for worker in weights}
    swarm.step({worker: contribution_of(brought[worker], weight) for worker, weight in weights.items()})
    total = sum(weights.values())
    came = flat(param.grad for param in swarm.params)
    unsent = [swarm.group.unsent(worker) / UNITS for worker in range(WORKERS)]
    to_come = sum(unsent) / total + swarm.group.unanswered()
    wanted = sum(weight * flat(brought[worker]) for worker, weight in weights.items()) / total
    torch.testing.assert_close(came + to_come, wanted, atol=1e-4, rtol=1e-4)
    assert unsent[1].norm() == 0 and to_come.norm() > 0.1  # or nothing of this was tested
    late = unsent[3]  # nothing of it is larger than what the discounted gradient was
    assert 0 < late.abs().max() <= weights[3] * flat(brought[3]).abs().max()


def test_a_worker_that_brings_nothing_keeps_what_it_has_to_say():
    swarm = swarm_of("sparse")
    swarm.step({worker: contribution_of(some_gradients(swarm, worker), 2.0) for worker in (1, 2)})
    before = swarm.group.unsent(1).clone()
    swarm.step({2: contribution_of(some_gradients(swarm, 5), 2.0)})
    assert before.any() and torch.equal(swarm.group.unsent(1), before)


def test_a_dense_step_takes_the_weighted_mean():
    swarm = swarm_of("dense")
    fresh, late = some_gradients(swarm, 1), some_gradients(swarm, 2)
    contribution = contribution_of(fresh, 9.0)
    contribution.add(late, 3.0 * USED.weight(2))
    before = flat(swarm.params).clone()
    swarm.step({0: contribution})
    torch.testing.assert_close(flat(p.grad for p in swarm.params), (9 * flat(fresh) + flat(late)) / 10)
    assert not torch.equal(flat(swarm.params), before)


def test_an_epoch_of_no_weight_moves_the_schedule_only():
    swarm = swarm_of("dense")
    before, rate = flat(swarm.params).clone(), swarm.schedule.get_last_lr()[0]
    swarm.step({})
    assert torch.equal(flat(swarm.params), before)
    assert swarm.schedule.get_last_lr()[0] > rate


def random_data(seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    model = open_run("scenes").model
    text = torch.randint(1, model.num_text_tokens, (12, model.text_seq_len), generator=generator)
    codes = torch.randint(model.num_image_tokens, (12, model.image_seq_len), generator=generator)
    samples = Samples(text, codes)
    return Data(samples.take(torch.arange(8)), samples.take(torch.arange(8, 12)))


@pytest.mark.parametrize("codec", CODECS)
def test_equal_settings_train_equally(codec):
    setting, size = Setting("scenes", codec, 1.0, seed=1), Size(16, 4)
    once, again = (train(setting, USED, size, random_data()) for _ in range(2))
    assert once.loss == again.loss and once.epochs == again.epochs == 4
    assert once.late > 0
    other = train(setting._replace(rate=1 / 3), USED, size, random_data())
    assert other.loss != once.loss


def test_rows_come_again_when_all_have_come():
    rows = order_rows(10, 25, seed=0)
    assert sorted(rows[:10].tolist()) == sorted(rows[10:20].tolist()) == list(range(10))
    assert len(rows) == 25


# --- data ---


def captions(samples: Samples) -> set[tuple[int, ...]]:
    return {tuple(row) for row in samples.text.tolist()}


@pytest.mark.parametrize("name", ["scenes", "emoji"])
def test_nothing_that_is_held_out_is_trained_on(name, tmp_path):
    for number in range(4):  # the last shard repeats captions of the one before
        good_shard(tmp_path / f"{number:05d}.tar", 250, first=250 * min(number, 2))
    data, model = read_data(name, tmp_path), open_run(name).model
    for samples in data:
        assert samples.text.shape == (len(samples.codes), model.text_seq_len)
        assert samples.codes.shape[1] == model.image_seq_len and samples.codes.max() < model.num_image_tokens
    assert len(data.train.text) > 5 * len(data.held_out.text) > 100
    if name == "scenes":
        assert not captions(data.train) & captions(data.held_out)
    pairs = [{(*text, *codes) for text, codes in zip(s.text.tolist(), s.codes.tolist(), strict=True)} for s in data]
    assert not pairs[0] & pairs[1]


# --- figures ---


def outcomes_of(losses: dict[str, float], seeds: int = 1) -> dict[Job, Outcome]:
    """A whole measurement in which each rule ends at `losses`, times a factor of the cell's own."""
    jobs = list_jobs(["scenes", "emoji"], seeds)
    return {
        job: Outcome(losses.get(job.rule, 1.0) * (1 + job.setting.seed) * job.setting.rate, 10, 0.1, 1.0)
        for job in jobs
    }


def test_each_rule_is_trained_with_each_seed_and_the_others_with_the_first():
    jobs = list_jobs(["scenes", "emoji"], 3)
    assert len(set(jobs)) == len(jobs)
    cells = common_cells({job: None for job in jobs}, tuple(RULES))
    assert len(cells) == 2 * 2 * 2 * 3
    assert {job.setting.seed for job in jobs if job.rule not in RULES} == {0}
    assert {job.rule for job in jobs} == set(ALL_RULES)
    assert list(dict.fromkeys(job.setting for job in jobs)) == [job.setting for job in jobs if job.rule == "none"]


def test_ratios_are_geometric_means_over_cells():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    outcomes = outcomes_of({"used": 1.2, "waiting": 2.4, "thrown": 1.5}, seeds=3)
    assert ratio(outcomes, "used", "waiting") == pytest.approx(0.5)
    told = summary(outcomes)
    assert told["used_vs_waiting"] == pytest.approx(0.5) and told["used_vs_thrown"] == pytest.approx(0.8)
    assert told["none_vs_waiting"] == pytest.approx(1 / 2.4)
    assert told["cells"] == 24 and told["seeds"] == 3
    assert told["ratio_thrown"] == pytest.approx(1.5) and told["used_vs_thrown_sparse"] == pytest.approx(0.8)


def test_the_best_rule_has_the_least_loss():
    outcomes = outcomes_of(
        {"used": 1.2, "square": 1.1, "root": 1.3, "undiscounted": 2.0, "thrown": 1.4, "bound_4": 0.9}
    )
    assert best(outcomes, ("used", "root", "square"))[0] == "square"
    told = summary(outcomes)
    assert told["best_discount"] == "square" and told["best_bound"] == "bound_4"
    assert told["discount_ratio_root"] == pytest.approx(1.3) and told["bound_ratio_4"] == pytest.approx(0.9)
