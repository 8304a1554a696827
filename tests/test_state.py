"""State between peers: who is asked, what is refused, and that what is adopted equals the donor's to the last bit."""

from __future__ import annotations

import asyncio
import threading
import time
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from hivemind.compression import NoCompression
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import DownloadRequest
from hivemind.utils import ValueWithExpiration

from volunteer_kit.swarm.agreement import BEGINNING, PAST, sketch
from volunteer_kit.swarm.peer import PeerConfig, start_peer
from volunteer_kit.swarm.state import (
    StateRefused,
    SwarmStateAverager,
    digest,
    read_donors,
)

A, B, C, D = (PeerID(b"\x12\x20" + bytes([i]) * 32) for i in range(1, 5))


# --- digest ---

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 0, 3)], ids=str)
def test_a_digest_is_of_the_bytes(dtype, shape):
    tensors = [torch.ones(3), torch.ones(shape).to(dtype)]
    before = digest(tensors)
    assert digest([tensor.clone() for tensor in tensors]) == before and len(before) == 32
    if tensors[1].numel():
        tensors[1].view(-1).view(torch.uint8)[-1] ^= 1  # one bit
        assert digest(tensors) != before


def test_a_digest_sees_what_equality_does_not():
    zeros = torch.tensor([0.0, 1.0])
    minus = torch.tensor([-0.0, 1.0])
    assert torch.equal(zeros, minus) and digest([zeros]) != digest([minus])
    nan = torch.tensor([float("nan")])
    assert digest([nan]) == digest([nan.clone()])
    first, second = torch.ones(2), torch.zeros(2)
    assert digest([first, second]) != digest([second, first])
    assert digest([]) == digest([])


def test_a_digest_is_of_the_values_not_of_the_memory():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert digest([tensor.t()]) == digest([tensor.t().contiguous()])
    assert digest([torch.nn.Parameter(tensor)]) == digest([tensor])
    assert digest([tensor[:, 1]]) == digest([tensor[:, 1].clone()])


# --- donors ---


def test_a_donor_holds_few_copies_at_once(averager, monkeypatch):
    """Each download holds a copy of the whole state until it is sent, and strangers may read slowly."""

    async def ask() -> list[int]:
        downloads = [averager.rpc_download_state(DownloadRequest(), Mock(remote_id=A)) for _ in range(4)]
        begun = [await anext(download, None) for download in downloads]
        await downloads[0].aclose()  # it hangs up
        begun.append(await anext(averager.rpc_download_state(DownloadRequest(), Mock(remote_id=A)), None))
        return [part is not None for part in begun]

    metadata, tensors, infos = averager.get_current_state()
    given = AsyncMock(return_value=(averager.serializer.dumps(metadata), tensors, infos))
    monkeypatch.setattr(averager, "_get_current_state_from_host_process", given)
    assert asyncio.run(ask()) == [True, True, True, False, True]


def test_what_strangers_declare_is_read_with_care():
    declared = {peer.to_bytes(): ValueWithExpiration([5, b"x"], 1e10) for peer in (A, D)}
    records = {
        **declared,
        "words": ValueWithExpiration(9, 1e10),
        B.to_bytes(): ValueWithExpiration(None, 1e10),  # it has left
        C.to_bytes(): 9,
        b"": ValueWithExpiration(9, 1e10),
        b"\xff" * 300: ValueWithExpiration(9, 1e10),
    }
    assert read_donors(records, D) == {A: [5, b"x"]}, "neither ourselves nor what is no donor"
    for nothing in (None, "words", [1], {}):
        assert read_donors(nothing, D) == {}


X, Y = (sketch([torch.full((99,), value)], 5) for value in (1.0, 2.0))


@pytest.mark.parametrize(
    "told, agreed",
    [
        ([[5, X, BEGINNING], [5, X, BEGINNING]], True),
        ([[5, X, BEGINNING], [5, Y, BEGINNING]], False),
        ([[5, X, BEGINNING], [5, X, BEGINNING], [5, Y, BEGINNING]], False),
        ([[5, X, BEGINNING], [4, X, BEGINNING]], False),
        ([[5, X, BEGINNING], None], False),
        ([[5, X, BEGINNING], [5]], False),
        ([[5, X, BEGINNING], [5, {"x": 1}, BEGINNING]], False),
        ([[5, None, BEGINNING], [5, None, BEGINNING]], False),
    ],
)
def test_members_agree_when_all_hold_the_same(averager, told, agreed):
    assert averager.is_in_agreement(dict(zip((A, B, C), told, strict=False))) is agreed


# --- the averager: its own tensors in their own types ---


class Counting(torch.optim.Optimizer):
    """Statistics of many types, as an 8-bit optimizer has."""

    def __init__(self, params, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.gate = threading.Event()
        self.gate.set()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {
                    "codes": torch.zeros(parameter.shape, dtype=torch.uint8),
                    "mean": torch.zeros_like(parameter),
                    "scale": torch.zeros(()),
                    "steps": 0,
                }

    @torch.no_grad()
    def step(self):
        self.gate.wait(10)
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                parameter.sub_(group["lr"])
                state["codes"].add_(1)
                state["mean"].sub_(0.5)
                state["scale"].add_(0.25)
                state["steps"] += 1


def make_averager(
    peer, *, start: bool = False, lr: float = 0.1, seed: int = 0, period: float = 5.0, prefix: str = "state",
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch)),
) -> SwarmStateAverager:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 4), (5,)]]
    return SwarmStateAverager(
        dht=peer.dht,
        prefix=prefix,
        params=params,
        optimizer=lambda groups: Counting(groups, lr=lr),
        scheduler=scheduler,
        offload_optimizer=True,
        custom_gradients=True,
        client_mode=False,
        state_compression=NoCompression(),
        declare_state_period=period,
        min_matchmaking_time=1.0,
        next_chunk_timeout=10.0,
        start=start,
    )


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
    assert astray.take_back_lone_steps() and astray.local_epoch == 2
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


# --- through the network ---


def seen_donors(peer, prefix: str = "state") -> dict[PeerID, int]:
    """Donor -> the epoch that it declares."""
    found = peer.dht.get(f"{prefix}.all_averagers", latest=True)
    return {PeerID(key): entry.value[0] for key, entry in found.value.items()} if found else {}


def test_a_donor_is_seen_all_the_time(peer):
    """hivemind's declaration expires before the next one is stored: who doubts its state then finds nobody better."""
    donor = make_averager(peer, start=True, period=1.0, prefix="seen")
    try:
        deadline = time.monotonic() + 20
        while peer.peer_id not in seen_donors(peer, "seen"):
            assert time.monotonic() < deadline
        until = time.monotonic() + 3.5
        while time.monotonic() < until:
            assert peer.peer_id in seen_donors(peer, "seen")
    finally:
        donor.shutdown()


def test_a_newcomer_equals_its_donor_to_the_last_bit(peer):
    """Download over libp2p; a donor with a broken state is refused and the next one asked."""
    others = [
        start_peer(PeerConfig(initial_peers=peer.visible_maddrs(), host_maddrs=["/ip4/127.0.0.1/tcp/0"]))
        for _ in range(2)
    ]
    averagers = []
    try:
        donor, broken = make_averager(peer, start=True, seed=1), make_averager(others[0], start=True, seed=2)
        averagers += [donor, broken]
        for averager, epoch in [(donor, 3), (broken, 9)]:
            for _ in range(epoch):
                averager.step(increment_epoch=True, optimizer_step=True)
        broken.state_tensors()[1][2] = float("nan")
        newcomer = make_averager(others[1], start=True)
        averagers.append(newcomer)
        deadline = time.monotonic() + 20
        while not seen_donors(others[1]).items() >= {peer.peer_id: 3, others[0].peer_id: 9}.items():
            assert time.monotonic() < deadline, seen_donors(others[1])
            time.sleep(0.05)

        assert newcomer.load_state_from_peers(timeout=30.0) is True
        assert newcomer.last_donor == str(peer.peer_id), "the broken one was asked first, and refused"
        assert digest(newcomer.state_tensors()) == digest(donor.state_tensors())
        assert newcomer.local_epoch == 3
        assert newcomer.optimizer.state[newcomer.optimizer.param_groups[0]["params"][0]]["steps"] == 3

        assert newcomer.told == donor.told and newcomer.told[0] == 3, "and says so"

        newcomer.local_epoch = 4  # nobody that fits is as far as we are
        assert newcomer.load_state_from_peers(timeout=30.0) is False
        assert newcomer.local_epoch == 4
        newcomer.local_epoch = 3
        assert newcomer.load_state_from_peers(timeout=30.0, at_least=4) is False, "nor as far as was asked for"
        assert newcomer.load_state_from_peers(timeout=30.0, donors=[others[0].peer_id]) is False, "only who was named"
        assert newcomer.load_state_from_peers(timeout=30.0, donors=[peer.peer_id]) is True
    finally:
        for averager in averagers:
            averager.shutdown()
        for other in others:
            other.shutdown()
