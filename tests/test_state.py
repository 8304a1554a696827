"""The state of one averager: what it tells and gives of it and when, what it takes, and what it refuses."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.one_averager import make_averager
from volunteer_kit.swarm.agreement import BEGINNING, PAST, sketch
from volunteer_kit.swarm.state import StateRefused, digest


@pytest.fixture
def averager(peer):
    return make_averager(peer)


def donated(averager):
    metadata, tensors, _ = averager.get_current_state()
    return {**metadata, "epoch": 7}, [tensor.clone() for tensor in tensors]


def test_the_state_is_parameters_and_statistics_in_their_own_types(averager):
    metadata, tensors, infos = averager.get_current_state()
    assert metadata == {"epoch": 0, "lineage": BEGINNING.hex(), "numbers": [0, 0], "past": [averager.told]}
    float32, uint8 = torch.float32, torch.uint8
    assert [tensor.dtype for tensor in tensors] == [float32, float32, uint8, float32, float32, uint8, float32, float32]
    assert [tuple(tensor.shape) for tensor in tensors[2:5]] == [(3, 4), (3, 4), ()]
    assert len(infos) == len(tensors)
    keys = averager.statistic_keys(["weight", "bias"])
    assert keys == [f"optimizer/{name}/{key}" for name in ("weight", "bias") for key in ("codes", "mean", "scale")]
    tensors[0].zero_()
    assert averager.state_tensors()[0].abs().sum() > 0, "what is shared is a copy"


def test_a_state_that_fits_is_taken_and_the_types_stay(averager, peer):
    donor = make_averager(peer, lr=0.7, seed=1)
    for _ in range(3):
        donor.optimizer.step()
    metadata, tensors = donated(donor)
    averager.check_state(metadata, tensors)
    averager.adopt_state(metadata, tensors)

    assert digest(averager.state_tensors()) == digest(donor.state_tensors())
    for parameter in averager.optimizer.param_groups[0]["params"]:
        state = averager.optimizer.state[parameter]
        assert state["codes"].dtype == torch.uint8 and state["mean"].dtype == torch.float32
        assert state["scale"].shape == () and state["scale"].item() == 0.75
        assert state["steps"] == 3
    for ours, theirs in zip(averager.main_parameters, donor.state_tensors(), strict=False):
        assert torch.equal(ours, theirs), "the model on the device follows"
    assert averager.local_epoch == 7 and averager.get_current_state()[0]["epoch"] == 7
    [group] = averager.optimizer.param_groups
    assert group["initial_lr"] == 0.1, "the donor's settings are not adopted"
    assert group["lr"] == pytest.approx(0.1 / 8), "but the schedule follows the epoch"


def change_tensor(index, change):
    def spoil(metadata, tensors):
        tensors[index] = change(tensors[index])

    return spoil


def set_value(index, value):
    def spoil(metadata, tensors):
        tensors[index].view(-1)[0] = value

    return spoil


def set_metadata(**values):
    return lambda metadata, tensors: metadata.update(values)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (set_metadata(epoch=True), "epoch True"),
        (set_metadata(epoch=-1), "epoch -1"),
        (set_metadata(epoch=2**31), "epoch"),
        (set_metadata(epoch=1.0), "epoch"),
        (set_metadata(epoch="7"), "epoch"),
        (set_metadata(epoch=None), "epoch None"),
        (set_metadata(numbers=None), "counters"),
        (set_metadata(numbers=[1]), "counters"),
        (set_metadata(numbers=[1, 2, 3]), "counters"),
        (set_metadata(numbers=[1, "2"]), "counters"),
        (set_metadata(numbers=[1, float("nan")]), "counters"),
        (set_metadata(numbers=[1, float("inf")]), "counters"),
        (set_metadata(numbers=[1, -2]), "counters"),
        (set_metadata(lineage=None), "lineage"),
        (set_metadata(lineage="00" * 7), "lineage"),
        (set_metadata(lineage="xx" * 8), "lineage"),
        (set_metadata(lineage="00" * 10_000), "lineage"),
        (lambda metadata, tensors: tensors.pop(), "7 tensors instead of 8"),
        (lambda metadata, tensors: tensors.append(torch.zeros(1)), "9 tensors"),
        (lambda metadata, tensors: tensors.clear(), "0 tensors"),
        (change_tensor(0, lambda t: t.t()), "tensor 0"),
        (change_tensor(0, lambda t: t[:2]), "tensor 0"),
        (change_tensor(1, lambda t: t.double()), "tensor 1 is torch.float64"),
        (change_tensor(2, lambda t: t.float()), "tensor 2 is torch.float32"),
        (change_tensor(4, lambda t: t.reshape(1)), "tensor 4"),
        (set_value(0, float("nan")), "tensor 0 is not finite"),
        (set_value(1, float("-inf")), "tensor 1 is not finite"),
        (set_value(3, float("nan")), "tensor 3 is not finite"),
        (set_value(4, float("inf")), "tensor 4 is not finite"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(averager, spoil, words):
    metadata, tensors = donated(averager)
    averager.check_state(metadata, tensors)  # unspoilt, it fits
    spoil(metadata, tensors)
    with pytest.raises(StateRefused, match=words):
        averager.check_state(metadata, tensors)


def take_steps(averager, count: int) -> None:
    for _ in range(count):
        averager.step(increment_epoch=True, optimizer_step=True, delay_optimizer_step=False)


def test_who_takes_a_state_learns_which_of_its_own_steps_are_in_it(averager, peer):
    """Two steps together, then one alone that the others did not take, then theirs: two are kept."""
    donor = make_averager(peer)
    for name in (b"first", b"second"):
        for one in (averager, donor):
            one.round_name = name
            take_steps(one, 1)
    take_steps(averager, 1)
    take_steps(donor, 3)
    metadata, tensors, _ = donor.get_current_state()
    averager.adopt_state(metadata, tensors)
    assert averager.kept_until == 2
    assert averager.get_current_state()[0]["past"] == metadata["past"] and len(metadata["past"]) == 6
    averager.adopt_state(*averager.get_current_state()[:2])
    assert averager.kept_until == 5
    averager.adopt_state(averager.metadata(), tensors)  # as of a checkpoint: its past is not known
    assert averager.kept_until == -1


def test_the_lineage_tells_steps_apart_that_the_sketch_does_not(averager, peer):
    """Two who each missed another part of a small step: their models are near, and drift away later."""
    donor, other = make_averager(peer), make_averager(peer)
    for one, name in ((averager, b"round"), (donor, b"round"), (other, b"of which a part was missed")):
        one.round_name = name
        take_steps(one, 1)
    assert averager.told == donor.told and averager.told[:2] == other.told[:2] and averager.told != other.told
    take_steps(averager, 1)
    take_steps(donor, 1)
    assert averager.told[:2] == donor.told[:2] and averager.told != donor.told, "each took it alone"
    averager.adopt_state(*donor.get_current_state()[:2])
    assert averager.told == donor.told and averager.kept_until == 1


def test_what_is_remembered_of_a_state_is_bounded(averager):
    take_steps(averager, PAST + 3)
    past = averager.get_current_state()[0]["past"]
    assert len(past) == PAST and past[-1] == averager.told


@pytest.mark.parametrize("metadata", [None, 7, "words", [], b"x"])
def test_metadata_of_another_kind_is_refused(averager, metadata):
    with pytest.raises(StateRefused):
        averager.check_state(metadata, donated(averager)[1])


def test_a_state_is_of_one_moment(averager):
    """hivemind counts the epoch before the background step that makes it true: FACTS has no trap more expensive."""
    before, start = averager.state_tensors()[0].clone(), averager.told
    averager.optimizer.gate.clear()
    averager.step(increment_epoch=True, optimizer_step=True, delay_optimizer_step=True, delay_averaging=True)
    threading.Timer(0.3, averager.optimizer.gate.set).start()
    metadata, tensors, _ = averager.get_current_state()  # asked for while the step is under way
    assert metadata == {
        "epoch": 1,
        "lineage": averager.told[2].hex(),
        "numbers": [1, 1],
        "past": [start, averager.told],
    }
    assert torch.equal(tensors[0], before - 0.1) and tensors[4].item() == 0.25
    averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)


def test_a_joiner_waits_for_a_step_whose_gradients_are_under_way(averager):
    """The epoch is counted already: what the step has not made yet would be behind on arrival."""
    arrived = threading.Event()
    averager.step(
        increment_epoch=True,
        optimizer_step=True,
        delay_optimizer_step=True,
        delay_averaging=True,
        wait_for_trigger=lambda: arrived.wait(10),
    )
    threading.Timer(0.3, arrived.set).start()
    metadata, tensors, _ = averager.get_current_state()
    assert metadata["epoch"] == 1 and metadata["numbers"] == [1, 1] and tensors[4].item() == 0.25
    averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)


def test_a_copy_for_ourselves_waits_for_no_round(averager):
    """A checkpoint every ten minutes cost a device one round's time each."""
    arrived, held = threading.Event(), [tensor.clone() for tensor in averager.state_tensors()]
    averager.step(
        increment_epoch=True,
        optimizer_step=True,
        delay_optimizer_step=True,
        delay_averaging=True,
        wait_for_trigger=arrived.wait,
    )
    metadata, tensors = averager.state_now()
    assert not averager.is_between_steps and metadata["epoch"] == 0 and digest(tensors) == digest(held)
    arrived.set()
    averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
    assert averager.state_now()[0]["epoch"] == 1


RATES = {
    "of the epoch": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
    "of the one before": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
}


@pytest.mark.parametrize("rate", RATES)
def test_who_goes_back_goes_on_at_the_rates_of_those_epochs(peer, rate):
    """By equal steps to an equal model: with the later rate it would be another one, under the same name."""

    def step(averager, *names):
        for averager.round_name in names:
            averager.step(increment_epoch=True, optimizer_step=True)

    straight, astray = (make_averager(peer, scheduler=RATES[rate]) for _ in range(2))
    step(straight, b"1", b"2", b"3", b"4", b"5")
    step(astray, b"1", b"2")
    astray.is_shared = True
    step(astray, b"alone", b"alone again")
    assert astray.go_back_to_last_shared() and astray.local_epoch == 2
    step(astray, b"3", b"4", b"5")
    assert digest(astray.state_tensors()) == digest(straight.state_tensors())
    assert astray.lineage == straight.lineage and astray.local_epoch == 5


def test_a_step_that_takes_longer_is_not_told_before_it_is_true(averager, monkeypatch):
    monkeypatch.setattr("volunteer_kit.swarm.state.STEP_PATIENCE", 0.005)
    averager._step_done.clear()
    averager.local_epoch = 1
    assert averager.get_current_state()[0]["epoch"] == 0


def test_what_is_told_is_what_is_held(averager):
    """A round that began before the step would otherwise tell the others a model that is no more."""
    before = averager.told
    assert before == [0, sketch(averager.state_tensors()[:2], 0), BEGINNING]
    averager.optimizer.gate.clear()
    averager.step(increment_epoch=True, optimizer_step=True, delay_optimizer_step=True, delay_averaging=True)
    assert averager.told == before and not averager.is_between_steps
    averager.optimizer.gate.set()
    averager.step(wait_for_delayed_updates=True, apply_delayed_updates=True)
    assert averager.is_between_steps and averager.told[:2] == [1, sketch(averager.state_tensors()[:2], 1)]
    metadata, tensors = donated(averager)
    averager.adopt_state(metadata, tensors)
    assert averager.told[:2] == [7, sketch(averager.state_tensors()[:2], 7)]
