"""A training state out and back through the optimizer: checkpoints, earlier states, and what became of its steps."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tests.lone_optimizer import GIVEN_UP, NAMES, A, B, train
from volunteer_kit.checkpoint import load_checkpoint, save_checkpoint
from volunteer_kit.optim.lamb import Lamb
from volunteer_kit.swarm import following
from volunteer_kit.swarm.agreement import Follow
from volunteer_kit.swarm.believed_progress import Claims
from volunteer_kit.swarm.making_up import AGAIN_AND_AGAIN
from volunteer_kit.swarm.optimizer import SwarmOptimizer, SwarmOptions
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.state import StateRefused, digest

HOURS = itertools.count(time.monotonic(), 3600.0)  # s; one optimizer for all tests, whose waits are over in each


@pytest.fixture(scope="module")
def optimizer(lone):
    return lone


def test_a_checkpoint_brings_back_every_bit(optimizer, tmp_path):
    train(optimizer, 2)
    saved, told = digest(optimizer.training_state()), optimizer.state_averager.told
    tensors, metadata = optimizer.named_state(NAMES)
    assert set(NAMES) < set(tensors) and metadata["epoch"] == optimizer.local_epoch
    assert all(name.split("/")[0] == "optimizer" and name.split("/")[1] in NAMES for name in set(tensors) - set(NAMES))
    path = save_checkpoint(tmp_path, tensors, {"run": "x", **metadata})
    epoch = optimizer.local_epoch
    train(optimizer, 1)
    assert digest(optimizer.training_state()) != saved

    checkpoint = load_checkpoint(path)
    optimizer.load_named_state(NAMES, checkpoint.tensors, checkpoint.meta)
    assert digest(optimizer.training_state()) == saved and optimizer.local_epoch == epoch
    assert optimizer.state_averager.told == told, "its lineage, too"
    parameters = optimizer.state_averager.main_parameters
    assert torch.equal(parameters[0], tensors["weight"]), "the model that trains, too"
    train(optimizer, 1)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(optimizer):
    tensors, metadata = optimizer.named_state(NAMES)
    before = digest(optimizer.training_state())
    without = {name: tensor for name, tensor in tensors.items() if name != "bias"}
    with pytest.raises(StateRefused, match="lacks bias"):
        optimizer.load_named_state(NAMES, without, metadata)
    with pytest.raises(StateRefused, match="tensor 0"):
        optimizer.load_named_state(NAMES, {**tensors, "weight": torch.zeros(4, 7)}, metadata)
    with pytest.raises(StateRefused, match="not finite"):
        optimizer.load_named_state(NAMES, {**tensors, "bias": torch.full((4,), float("nan"))}, metadata)
    with pytest.raises(StateRefused, match="epoch"):
        optimizer.load_named_state(NAMES, tensors, {**metadata, "epoch": -1})
    assert digest(optimizer.training_state()) == before


def test_an_earlier_state_comes_back_and_the_epoch_goes_on(optimizer):
    """The swarm's epoch is a maximum of claims: going back in number would be undone by the next peer."""
    good = [tensor.clone() for tensor in optimizer.training_state()]
    train(optimizer, 2)
    epoch = optimizer.local_epoch
    optimizer.grad_averager.local_samples_accumulated = 8
    optimizer.restore(good)
    assert digest(optimizer.training_state()) == digest(good)
    assert optimizer.local_epoch == epoch and optimizer.grad_averager.local_samples_accumulated == 0
    assert optimizer.settle() == digest(good)


def test_alone_every_step_is_reported_with_its_samples(optimizer):
    optimizer.reports.clear()
    train(optimizer, 2)
    reports = list(optimizer.reports)
    assert [report.epoch for report in reports] == [optimizer.local_epoch - 1, optimizer.local_epoch]
    for report in reports:
        assert report.group_size == 1 and report.failure is None and report.received == 1.0
        assert report.samples == report.counted == 16 and report.uncertain
        assert report.bytes_sent == 0


def test_steps_taken_alone_are_given_up_with_the_state_and_kept_at_the_end(optimizer, monkeypatch):
    train(optimizer, 1)
    optimizer.reports.clear()

    def taken(**_) -> bool:
        optimizer.state_averager.kept_until = -1
        return True

    with monkeypatch.context() as patch:  # somebody gives us another state
        patch.setattr(optimizer.state_averager, "load_state_from_peers", taken)
        assert optimizer.load_state_from_peers()
    train(optimizer, 1)
    (report,) = optimizer.reports
    assert report.uncertain and report.kept_until == -1
    optimizer.settle()  # nobody else is here
    assert optimizer.uncertain_steps.kept_until() == optimizer.local_epoch


def test_every_step_waits_for_a_round_that_finds_another_with_it(optimizer):
    """A line that is cut in the middle of a round: it ends without an error, and nobody has our part; or we have all of
    it, and the others have not."""
    train(optimizer, 1)
    optimizer.reports.clear()
    optimizer.uncertain_steps.kept_until()
    ours = optimizer.state_averager.told
    theirs = [ours[0], bytes(len(ours[1])), ours[2]]
    epoch = optimizer.local_epoch
    report = {"epoch": epoch, "samples": 16, "names": (), "told": ours, "started": 0.0, "num_peers": 2}
    for told, failure in ((ours, None), (ours, None), (theirs, None), (ours, "left out"), (ours, None)):
        optimizer._finish_report(report, Round(group=(A, B), gathered={B: told}), failure)
    found = [(report.uncertain, report.kept_until, report.counted) for report in optimizer.reports]
    assert found == [
        (True, epoch, 16),  # of the step before
        (True, epoch, 16),
        (True, None, 16),  # ours prevails, but if we go now nobody has it
        (False, None, 0),
        (True, epoch, 16),
    ]


@pytest.mark.parametrize(("attends", "group", "value", "is_taken"), [
    (False, (A, B), 1.0, True),
    (False, (A, B), 0.0, False),  # newcomers and the monitor, whose samples do not count
    (False, (), 0.0, True),
    (True, (A, B), 1.0, True),
    (True, (), 0.0, False),
])  # fmt: skip
def test_an_epoch_without_gradients_makes_no_step(optimizer, monkeypatch, attends, group, value, is_taken):
    """Zeros would turn the model by their momentum, and every optimizer's differently."""
    train(optimizer, 1)
    before = digest(optimizer.state_averager.main_parameters)
    with optimizer.grad_averager.get_tensors() as gradients:
        for gradient in gradients:
            gradient.fill_(value)
    monkeypatch.setattr(optimizer, "_attends", attends)
    monkeypatch.setattr(optimizer, "_times_postponed", AGAIN_AND_AGAIN)
    monkeypatch.setattr(optimizer, "_await_round", lambda control: Round(group=group))
    monkeypatch.setattr(optimizer, "_follow", None)
    epoch = optimizer.local_epoch + 1
    optimizer._report = {"epoch": epoch, "samples": 16, "weight": 16.0, "names": (), "num_peers": 2, "started": 0.0,
                         "averaged": True, "swarm_epoch": 4, "told": optimizer.state_averager.told}  # fmt: skip
    optimizer._average_gradients_and_load_into_optimizer(GIVEN_UP)
    optimizer.state_averager.step(increment_epoch=True, optimizer_step=True)
    assert optimizer.local_epoch == epoch
    assert (digest(optimizer.state_averager.main_parameters) != before) is is_taken
    optimizer._follow = None


def test_what_a_newcomer_claimed_counts_while_it_is_checked(optimizer, monkeypatch):
    """Its weight does not enter; were its claims not believed for that, its epochs would end before the others'."""
    settled = []
    monkeypatch.setattr(optimizer.tracker, "settle_round", lambda epoch, group, weights: settled.append(weights))
    report = {"epoch": 4, "samples": 16, "weight": 32.0}  # two things to a sample
    optimizer._settle_claims(report, Round(group=(A, B), weights={A: 32.0}, waiting={B: 64.0}))
    optimizer._settle_claims(report, Round(group=(A, B), waiting={B: 64.0}))
    assert settled == [{A: 16.0, B: 32.0}, {}], "who reduced nothing knows nothing"


def test_who_has_no_samples_learns_from_the_others_what_one_weighs(optimizer, monkeypatch):
    """A fine-tune's monitor took honest members for liars, as their samples weigh less than 1; it believed an eighth of
    their progress, and came to each round when it was over."""
    settled, report = [], {"epoch": 4, "samples": 0, "weight": 0.0}
    monkeypatch.setattr(optimizer.tracker, "settle_round", lambda epoch, group, weights: settled.append(weights))
    monkeypatch.setattr(optimizer.tracker, "claims", Claims())
    for peer, samples in ((A, 64), (B, 32)):
        optimizer.tracker.claims.note(peer, 3, samples, samples)
    optimizer._settle_claims(report, Round(group=(A, B), weights={A: 16.0, B: 9.0}))
    monkeypatch.setattr(optimizer, "weights_are_samples", False)
    optimizer._settle_claims(report, Round(group=(A, B), weights={A: 16.0, B: 9.0}))
    assert settled == [{A: 16.0, B: 9.0}, {A: 64.0, B: 36.0}]


@pytest.mark.parametrize("is_behind", [False, True])
def test_a_round_of_another_epoch_says_nothing_of_what_we_heard_claimed(optimizer, monkeypatch, is_behind):
    """Else who came late once would believe honest members less from then on, and come late again."""
    settled, own_id = [], optimizer.dht.peer_id
    monkeypatch.setattr(optimizer.tracker, "settle_round", lambda epoch, group, weights: settled.append(epoch))
    monkeypatch.setattr(optimizer, "_await_round", lambda control: Round(group=(A, own_id), weights={A: 16.0}))
    late = {own_id: "at epoch 4, the others at 5"} if is_behind else {}
    monkeypatch.setattr(Round, "out_of_step", lambda outcome: late)
    monkeypatch.setattr(optimizer, "_follow", None)
    optimizer._report = {"epoch": 5, "samples": 16, "weight": 16.0, "names": (), "num_peers": 2, "started": 0.0,
                         "averaged": True, "swarm_epoch": 4, "told": optimizer.state_averager.told}  # fmt: skip
    optimizer._average_gradients_and_load_into_optimizer(GIVEN_UP)
    assert settled == ([] if is_behind else [4])
    optimizer._follow = None


def test_who_leaves_while_apart_does_not_count_on_his_last_step(optimizer, monkeypatch):
    train(optimizer, 1)
    optimizer.reports.clear()
    optimizer.uncertain_steps.shared()
    optimizer.uncertain_steps.kept_until()
    epoch = optimizer.local_epoch
    report = {"epoch": epoch, "samples": 16, "names": (), "told": [], "started": 0.0, "num_peers": 2}
    optimizer._finish_report(report, Round(group=(A, B)), None)
    monkeypatch.setattr(optimizer, "_follow", Follow(epoch + 1, (B,), "our model is not the others'"))
    optimizer._finish_report({**report, "epoch": epoch + 1}, Round(group=(A, B)), None)
    optimizer.uncertain_steps.leaving()
    assert optimizer.uncertain_steps.kept_until() == epoch


def test_a_microbatch_of_nan_is_told_and_not_counted(optimizer):
    before = digest(optimizer.training_state())
    samples = optimizer.grad_averager.local_samples_accumulated
    for parameter in optimizer.state_averager.main_parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    assert optimizer.step(batch_size=8) is False
    assert optimizer.grad_averager.local_samples_accumulated == samples
    assert digest(optimizer.training_state()) == before


def test_who_catches_up_with_somebody_fast_lets_itself_be_seen(optimizer, monkeypatch):
    """It would otherwise download for ever: nobody waits for whom it does not know."""
    there = {"epoch": optimizer.local_epoch + 10}
    monkeypatch.setattr(type(optimizer.tracker), "global_epoch", property(lambda self: there["epoch"]))
    monkeypatch.setattr(optimizer.tracker, "look_again", lambda timeout: None)
    monkeypatch.setattr(optimizer, "_take_state", lambda **which: True)
    attended = []

    def attend(epoch):
        attended.append(epoch)
        there["epoch"] = optimizer.local_epoch  # the fast one has seen us, and waits

    monkeypatch.setattr(optimizer.tracker, "attend", attend)
    assert optimizer.join(patience=20.0)
    assert attended == [optimizer.local_epoch]


@pytest.mark.parametrize(("given", "is_there"), [(5, True), (4, False), (None, False)])
def test_a_claimed_epoch_is_reached_only_with_a_state(optimizer, monkeypatch, given, is_there):
    """Peers whose last epoch a dead one claimed had stopped training, and asked each other for a state for ever."""
    train(optimizer, 1)
    own, asked, now = optimizer.local_epoch, [], [next(HOURS)]

    def give(**which) -> bool:
        asked.append(which["at_least"])
        if given is None:
            return False
        monkeypatch.setattr(type(optimizer), "local_epoch", property(lambda self: own + given))
        return True

    def is_claimed(epoch: int) -> None:
        monkeypatch.setattr(type(optimizer.tracker), "global_epoch", property(lambda self: epoch))

    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(following, "time", clock)
    monkeypatch.setattr(optimizer.state_averager, "load_state_from_peers", give)
    samples = optimizer.grad_averager.local_samples_accumulated = 8
    is_claimed(own + 4)
    assert optimizer.come_to(own) and not optimizer.come_to(own + 5) and not asked, "nobody claims that one"
    is_claimed(own + 5)
    assert optimizer.come_to(own + 5) is is_there
    assert optimizer.come_to(own + 5) is is_there and asked == [own + 5], "others are not asked at every microbatch"
    now[0] += 2 * optimizer.matchmaking_time
    assert optimizer.come_to(own + 5) is is_there and len(asked) == (1 if is_there else 2)
    if given is None:
        assert optimizer.grad_averager.local_samples_accumulated == samples, "and we go on"


def test_an_optimizer_that_cannot_be_made_leaves_nothing_running(peer, monkeypatch):
    """A thread that is left waits for its averager for ever, and the program with it."""

    def fail(self):
        begun.extend([self.state_averager, self.grad_averager])
        raise RuntimeError("no memory")

    begun: list = []
    monkeypatch.setattr(SwarmOptimizer, "_compute_schema_hash", fail)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no memory"):
        SwarmOptimizer(
            peer=peer, options=SwarmOptions(run_key="failing", target_batch_size=16, matchmaking_time=1.0),
            params=[torch.nn.Parameter(torch.zeros(3))], optimizer=lambda params: Lamb(params, lr=0.02),
        )  # fmt: skip
    assert len(begun) == 2 and not any(averager.is_alive() for averager in begun)
    deadline = time.monotonic() + 60
    while left := [t for t in threading.enumerate() if t not in before and not t.daemon]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
