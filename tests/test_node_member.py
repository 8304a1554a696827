"""The training process's side of a node, against a link of which the test is the other end."""

from __future__ import annotations

import contextlib
import json
import queue
import struct
import threading
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR

from tests.alone_trainer import make_stream, squared_error
from tests.alone_trainer import until as until_epoch
from tests.waiting import wait_until
from volunteer_kit.checkpoint import CheckpointError, latest_checkpoint
from volunteer_kit.optim import Lamb
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.node import member
from volunteer_kit.swarm.node.member import NodeOptimizer
from volunteer_kit.swarm.node.slots import Slots
from volunteer_kit.swarm.node.talk import (
    Broken,
    Check,
    Checked,
    Compute,
    Delivered,
    Downloading,
    Expired,
    Founded,
    Granted,
    Leave,
    Left,
    Load,
    NodeSpec,
    Progress,
    StateWritten,
    Step,
    StepOf,
    Stepped,
    Told,
    WriteState,
)
from volunteer_kit.training.callbacks import SaveCheckpoints
from volunteer_kit.training.trainer import Callback, Trainer

PATIENCE = 60.0  # s, for what comes at once
NAMES = ["weight", "bias"]
ELEMENTS, CELLS = 10, 5
BORN, NEXT, LATER = b"born", b"next", b"later"


class Link:
    """The test's end: what it says, and what it is told."""

    def __init__(self):
        self._to_member: queue.SimpleQueue = queue.SimpleQueue()
        self._told: queue.SimpleQueue = queue.SimpleQueue()
        self._unheard: list = []
        self.closed = threading.Event()

    def send(self, message):
        self._told.put(message)

    def receive(self, timeout=None):
        try:
            return self._to_member.get(timeout=timeout)
        except queue.Empty:
            return None

    def close(self):
        self.closed.set()

    def say(self, *messages):
        for message in messages:
            self._to_member.put(message)

    def hear(self, kind):
        """The next message of this kind; others are kept for later."""
        while True:
            for place, message in enumerate(self._unheard):
                if isinstance(message, kind):
                    return self._unheard.pop(place)
            self._unheard.append(self._told.get(timeout=PATIENCE))

    def has_said(self):
        """All that the member has said until now, and nobody has heard."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._unheard.append(self._told.get_nowait())
        return self._unheard


class Halves:
    """A layout of CELLS cells, each of two numbers."""

    def cell(self, i: int) -> slice:
        return slice(2 * i, 2 * i + 2)


def decode(cells: int, data: bytes) -> dict[int, torch.Tensor]:
    chosen = [i for i in range(CELLS) if cells >> i & 1]
    values = torch.frombuffer(bytearray(data), dtype=torch.float32)
    return dict(zip(chosen, values.split(2), strict=True))


class Scene:
    """One peer, its model, and the other end of its link."""

    def __init__(self, folder: Path, *, kind=Lamb, dtype=torch.float32, **sync):
        self.folder, self.link = folder, Link()
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        self.model = torch.nn.Linear(4, 2).to(dtype)
        self.slots = Slots(folder / "gradients.bin", ELEMENTS)
        self.slots.ensure(4)
        self.specs: list[NodeSpec] = []
        spec = NodeSpec(
            daemon="/unix/x", identity_path="key", client_mode=False, initial_peers=(), folder=folder, run_key="run",
            sync={"target_batch_size": 16, **sync}, shapes=((2, 4), (2,)), codec=("none", "none", 0, 1.0),
        )  # fmt: skip
        self.new_member = partial(
            NodeOptimizer,
            spec=spec,
            start=lambda spec: self.specs.append(spec) or self.link,
            params=[{"params": list(self.model.parameters())}],
            optimizer=lambda groups: kind(groups, lr=0.1),
            scheduler=lambda optimizer: LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)),
            names=NAMES,
            slots=self.slots,
            layout=Halves(),
            decode=decode,
            reach=SimpleNamespace(cut_off=None, cut_off_for=0.0, waits_for_itself=False, close=lambda: None),
        )
        self.member = self.new_member()

    def found(self, epoch: int = 0) -> None:
        self.link.say(Founded(BORN, epoch), Granted(0), Granted(1))
        assert self.member.join(PATIENCE) is False
        assert self.link.hear(Stepped).lineage == BORN
        self.heard()

    def heard(self) -> None:
        """Wait until the member has taken note of all that was said."""
        noted, before = threading.Event(), self.member.on_told
        self.member.on_told = lambda topic, about: noted.set()
        self.link.say(Told("warning", ""))
        assert noted.wait(PATIENCE)
        self.member.on_told = before

    def microbatch(self, value: float = 1.0, samples: int = 4, scale: float = 1.0, names=None) -> bool:
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, value)
        return self.member.step(samples, scale, names if names is not None else range(samples))

    def train(self) -> None:
        """Until it is told to end: without a slot it waits."""
        while True:
            self.microbatch()

    def reported(self, steps: int) -> None:
        """Wait for the reports of so many steps."""
        wait_until(lambda: len(self.member.reports) >= steps)

    def flat(self) -> torch.Tensor:
        return torch.cat([parameter.detach().float().flatten() for parameter in self.model.parameters()])

    def answer(self, name: str, cells: int, values: torch.Tensor) -> tuple[int, Path]:
        path = self.folder / name
        path.write_bytes(values.numpy().tobytes())
        return cells, path

    def step_of(self, lineage=NEXT, parent=BORN, epoch=1, gradient=None, cells=2**CELLS - 1, **more) -> StepOf:
        gradient = torch.arange(10.0) if gradient is None else gradient
        chosen = torch.cat([gradient[2 * i : 2 * i + 2] for i in range(CELLS) if cells >> i & 1])
        answers = (self.answer(f"{lineage.hex()}", cells, chosen),)
        return StepOf(lineage, parent, 0, epoch, answers, **more)

    def end(self) -> None:
        """All that it still delivers is taken up."""
        self.link.say(*[Granted(0)] * 4)
        self.member.comes_back = True
        self.member.shutdown()


@pytest.fixture
def make(tmp_path):
    made = []

    def make(name: str = "a", **settings) -> Scene:
        made.append(Scene(tmp_path / name, **settings))
        return made[-1]

    yield make
    for scene in made:
        scene.end()


@pytest.fixture
def peer(make) -> Scene:
    scene = make()
    scene.found()
    return scene


def reference(steps: int, gradients=None) -> torch.Tensor:
    """The parameters that a plain optimizer makes of the same gradients."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = Lamb(model.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
    for number in range(steps):
        gradient = torch.arange(10.0) if gradients is None else gradients[number]
        model.weight.grad, model.bias.grad = gradient[:8].view(2, 4).clone(), gradient[8:].clone()
        optimizer.step()
        schedule.step()
    return torch.cat([model.weight.detach().flatten(), model.bias.detach()])


# --- what is computed ---


def test_a_slot_is_delivered_when_the_one_before_is_taken_up(peer):
    assert peer.microbatch(1.0, names=["a", "b", "c", "d"])
    first = peer.link.hear(Delivered)
    assert first == Delivered(0, 4, BORN, ("a", "b", "c", "d"))
    assert torch.equal(peer.slots.view(0), torch.full((ELEMENTS,), 4.0)), "a sum over samples"
    assert peer.microbatch(2.0, samples=2, names=["e", "f"]) and peer.microbatch(3.0, samples=1, names=["g"])
    assert not [each for each in peer.link.has_said() if isinstance(each, Delivered)]
    assert peer.member.progress().own_samples == 3
    peer.link.say(Granted(2))
    assert peer.link.hear(Delivered) == Delivered(1, 3, BORN, ("e", "f", "g"), microbatches=2)
    assert torch.equal(peer.slots.view(1), torch.full((ELEMENTS,), 7.0))


def test_gradients_are_summed_by_true_sizes_without_their_scale(peer):
    peer.microbatch(8.0, samples=3, scale=16.0)
    assert torch.equal(peer.slots.view(peer.link.hear(Delivered).slot), torch.full((ELEMENTS,), 1.5))


def test_a_parameter_without_a_gradient_adds_nothing(peer):
    peer.microbatch()
    peer.model.bias.grad = None
    assert peer.member.step(4, 1.0, range(4))
    assert peer.slots.view(1).tolist() == [4.0] * 8 + [0.0] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_lose_their_microbatch_only(peer, value):
    assert peer.microbatch(value) is False
    assert not peer.link.has_said() and torch.equal(peer.slots.view(0), torch.zeros(ELEMENTS))
    assert peer.microbatch(1.0) and peer.link.hear(Delivered).samples == 4


def test_microbatches_of_two_lineages_are_never_in_one_slot(peer):
    peer.microbatch()
    peer.microbatch(samples=3)  # into the second slot, which has to wait
    peer.link.say(Step(peer.step_of()))
    peer.link.hear(Stepped)
    peer.microbatch(samples=2)  # computed before the swap
    assert peer.member.lineage == NEXT
    done = threading.Event()
    threading.Thread(target=lambda: (peer.microbatch(samples=1), done.set()), daemon=True).start()
    peer.link.say(Granted(2))
    assert peer.link.hear(Delivered).lineage == BORN
    second = peer.link.hear(Delivered)
    assert (second.samples, second.lineage) == (5, BORN)
    peer.link.say(Granted(3))
    third = peer.link.hear(Delivered)
    assert (third.samples, third.lineage) == (1, NEXT) and done.wait(PATIENCE)
    assert torch.equal(peer.slots.view(third.slot), torch.ones(ELEMENTS))


def test_whoever_leaves_does_not_wait_for_a_device_that_may_not_compute(peer):
    peer.link.say(Compute(False))
    peer.heard()
    done = threading.Event()
    threading.Thread(target=lambda: (peer.microbatch(), done.set()), daemon=True).start()
    peer.link.hear(Delivered)
    assert not done.is_set()
    peer.link.say(Told("warning", "it goes on hearing"))
    peer.member.stop_waiting()
    assert done.wait(PATIENCE) and not peer.member.only_accumulated


def test_a_device_that_may_not_compute_waits_until_it_may_and_the_step_is_in(peer):
    peer.link.say(Compute(False))
    peer.heard()
    done = threading.Event()
    threading.Thread(target=lambda: (peer.microbatch(), done.set()), daemon=True).start()
    peer.link.hear(Delivered)
    peer.link.say(Step(peer.step_of()), Compute(True))
    assert done.wait(PATIENCE)
    assert torch.equal(peer.flat(), reference(1)) and peer.member.lineage == NEXT


def test_without_overlap_a_round_that_a_microbatch_begins_is_awaited(make):
    peer = make(overlap=False)
    peer.found()
    done = threading.Event()
    threading.Thread(target=lambda: (peer.microbatch(), done.set()), daemon=True).start()
    peer.link.hear(Delivered)
    peer.link.say(Compute(False), Granted(2), Step(peer.step_of()), Compute(True))
    assert done.wait(PATIENCE) and torch.equal(peer.flat(), reference(1))


# --- steps ---


def test_a_step_is_the_optimizers_and_comes_between_two_microbatches(peer):
    before = peer.flat()
    peer.link.say(Step(peer.step_of(), own=4.0))
    told = peer.link.hear(Stepped)
    assert told.lineage == NEXT and abs(told.sketch) < 100
    assert torch.equal(peer.flat(), before) and peer.member.local_epoch == 1
    peer.microbatch()
    assert torch.equal(peer.flat(), reference(1))
    assert peer.link.hear(Delivered).lineage == BORN
    peer.link.say(Step(peer.step_of(LATER, NEXT, 2)))
    peer.link.hear(Stepped)
    peer.microbatch()
    assert torch.equal(peer.flat(), reference(2)), "the schedule goes on, too"


def test_missing_cells_are_zero(peer):
    gradient = torch.arange(1.0, 11.0)
    peer.link.say(Step(peer.step_of(gradient=gradient, cells=0b10101, missing=0b01010, received=0.6)))
    peer.link.hear(Stepped)
    peer.microbatch()
    gradient[[2, 3, 6, 7]] = 0.0
    assert torch.equal(peer.flat(), reference(1, [gradient]))
    peer.link.say(Step(peer.step_of(LATER, NEXT, 2, gradient=torch.ones(10))))
    peer.link.hear(Stepped)
    peer.microbatch()
    assert torch.equal(peer.flat(), reference(2, [gradient, torch.ones(10)])), "nothing is left of the step before"


def test_openings_and_steps_without_answers_change_the_lineage_only(peer):
    before = peer.flat()
    peer.link.say(Step(StepOf(NEXT, BORN, 0, 1)), Step(StepOf(LATER, NEXT, 1, 1, is_step=False)))
    assert [peer.link.hear(Stepped).lineage for _ in range(2)] == [NEXT, LATER]
    peer.microbatch()
    assert torch.equal(peer.flat(), before) and peer.member.lineage == LATER
    assert [report.epoch for report in peer.member.reports] == [1]


def test_a_step_that_does_not_follow_ends_the_stay(peer):
    peer.link.say(Step(peer.step_of(LATER, NEXT, 2)))
    with pytest.raises(SwarmError, match="does not follow") as caught:
        peer.train()
    assert caught.value.kind == "broken"


def test_reports_count_whole_samples_and_carry_the_rest(peer):
    peer.microbatch(names=["a", "b", "c", "d"])
    peer.microbatch(names=["e", "f", "g", "h"])
    peer.link.say(Progress("collecting", 0, 8, 12, 3, False, 0.0, 100, 200))
    one = peer.step_of(received=0.8, group_size=3)
    peer.link.say(Step(one, 2.4, (), 1.5, 10, 20), Step(peer.step_of(LATER, NEXT, 2), 1.6, ("a", "b", "c", "d")))
    peer.reported(2)
    first, second = peer.member.reports
    assert (first.epoch, first.samples, first.names, first.group_size, first.received) == (1, 2, (), 3, 0.8)
    assert (first.seconds, first.bytes_sent, first.bytes_received) == (1.5, 10, 20)
    assert first.cause == "incomplete" and first.waiting == frozenset("abcdefgh")
    assert (second.samples, second.names, second.waiting) == (2, ("a", "b", "c", "d"), frozenset("efgh"))
    assert second.cause is None
    assert peer.member.traffic() == (100, 200)
    progress = peer.member.progress()
    assert (progress.num_peers, progress.swarm_samples, progress.own_samples) == (3, 16, 12)


def test_names_are_given_back_as_they_came_and_wait_no_longer_than_they_can_count(make):
    peer = make(max_staleness=1)
    peer.found()
    peer.microbatch(names=[(0, 1), (0, 2)], samples=2)
    parent = BORN
    for epoch in range(1, 4):
        lineage = bytes([epoch])
        names = ("(0, 1)",) if epoch == 1 else ()
        peer.link.say(Step(peer.step_of(lineage, parent, epoch), 1.0, names))
        peer.link.hear(Stepped)
        parent = lineage
    peer.reported(3)
    assert [report.names for report in peer.member.reports] == [((0, 1),), (), ()]
    assert [report.waiting for report in peer.member.reports] == [{(0, 2)}, {(0, 2)}, frozenset()]


def test_what_expires_is_counted_by_cause(peer):
    peer.microbatch(names=["a", "b", "c", "d"])
    peer.link.say(Expired(1.5, "stale"), Expired(2.5, "stale"), Expired(4.0, "left", ("a", "b", "c", "d")))
    peer.heard()
    assert peer.member.expired == {"stale": 4.0, "left": 4.0}


# --- states ---


def written(peer: Scene, name: str = "state.safetensors") -> StateWritten:
    peer.link.say(WriteState(peer.folder / name))
    return peer.link.hear(StateWritten)


def test_a_state_goes_to_another_peer_and_its_steps_are_taken_again(make):
    one, other = make("one"), make("other")
    one.found()
    one.link.say(Step(one.step_of()))
    state = written(one)
    assert (state.lineage, state.error) == (NEXT, "") and len(state.digest) == 32
    assert set(load_file(state.path)) == {"weight", "bias"} | {
        f"optimizer/{name}/{statistic}" for name in NAMES for statistic in ("exp_avg", "exp_avg_sq")
    }
    later = one.step_of(LATER, NEXT, 2, gradient=torch.ones(10))
    one.link.say(Step(later))
    with torch.no_grad():
        other.model.weight.zero_()
    told = []
    other.member.on_download = lambda done, total: told.append((done, total))
    other.link.say(Downloading(1, 2), Load(NEXT, 1, state.path, (later,), "joined"), Granted(0))
    assert other.member.join(PATIENCE) is True
    assert other.link.hear(Stepped) == [one.link.hear(Stepped) for _ in range(2)][-1]
    one.microbatch()
    assert torch.equal(one.flat(), other.flat()) and torch.equal(
        one.flat(), reference(2, [torch.arange(10.0), torch.ones(10)])
    )
    one.link.say(Granted(2))
    assert one.member.settle() == other.member.settle(), "statistics and counters, too"
    assert other.member.local_epoch == 2 and not other.member.reports
    assert written(one).digest == written(other).digest


def test_a_state_of_an_earlier_epoch_takes_the_schedule_back(peer):
    state = written(peer)
    peer.link.say(Step(peer.step_of()), Step(peer.step_of(LATER, NEXT, 2)))
    peer.link.say(Load(BORN, 0, state.path, (), "rollback"), Step(peer.step_of(b"other", BORN, 1)))
    while peer.link.hear(Stepped).lineage != b"other":
        pass
    peer.microbatch()
    assert torch.equal(peer.flat(), reference(1))


def test_a_disk_that_refuses_a_state_is_told(peer):
    (peer.folder / "file").write_text("")
    assert "could not be kept" in written(peer, "file/state").error


def damaged(path: Path, how: str) -> None:
    tensors, about = load_file(path), {"state": json.dumps({"epoch": 1, "lineage": NEXT.hex(), "numbers": [1, 1]})}
    if how == "another name":
        tensors["weights"] = tensors.pop("weight")
    elif how == "one more":
        tensors["more"] = torch.zeros(1)
    elif how == "another shape":
        tensors["weight"] = tensors["weight"].t().contiguous()
    elif how == "another type":
        tensors["weight"] = tensors["weight"].view(torch.int32)
    elif how == "not finite":
        tensors["bias"][1] = float("nan")
    elif how == "a negative root":
        tensors["optimizer/bias/exp_avg_sq"][0] = -1.0
    elif how == "no counters":
        about["state"] = json.dumps({"epoch": 1, "lineage": NEXT.hex(), "numbers": []})
    elif how == "counters of text":
        about["state"] = json.dumps({"epoch": 1, "lineage": NEXT.hex(), "numbers": ["1", True]})
    elif how == "an epoch of text":
        about["state"] = json.dumps({"epoch": "1", "lineage": NEXT.hex(), "numbers": [1, 1]})
    elif how == "deep":
        about["state"] = "[" * 3000
    elif how == "no words":
        about = {}
    save_file(tensors, path, about)
    data = path.read_bytes()
    if how == "cut off":
        path.write_bytes(data[:-1])
    elif how == "too long":
        path.write_bytes(data + bytes(8))
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "a huge header":
        path.write_bytes(struct.pack("<Q", 2**40) + data[8:])
    elif how == "no header":
        path.write_bytes(data[:8] + b"x" * (len(data) - 8))


DAMAGES = [
    "another name", "one more", "another shape", "another type", "not finite", "a negative root", "no counters",
    "counters of text", "an epoch of text", "deep", "no words", "cut off", "too long", "empty", "a huge header",
    "no header",
]  # fmt: skip


@pytest.mark.parametrize("how", ["well", *DAMAGES])
def test_what_a_stranger_wrote_is_looked_at(peer, how):
    peer.link.say(Step(peer.step_of()))
    state = written(peer)
    damaged(state.path, how)
    before = peer.member.settle()
    peer.link.say(Check(state.path))
    checked = peer.link.hear(Checked)
    assert checked.path == state.path and bool(checked.error) is (how != "well")
    assert peer.member.states_asked_in_vain == (how != "well") and peer.member.settle() == before


def test_a_newcomer_asks_what_a_strangers_state_is_worth_and_a_member_does_not(make):
    giver, newcomer = make("giver"), make("newcomer")
    giver.found()
    giver.link.say(Step(giver.step_of()))
    state, asked = written(giver), []

    def judge(own, own_epoch, newer, epoch):
        asked.append((own_epoch, epoch))
        is_same = all(torch.equal(one, other) for one, other in zip(own, newer, strict=True))
        return None if is_same else "it is another model"

    newcomer.member = newcomer.new_member(judge=judge)
    newcomer.link.say(Check(state.path))
    joining = threading.Thread(target=newcomer.member.join, args=(PATIENCE,))
    joining.start()
    assert newcomer.link.hear(Checked).error == "it is another model" and asked == [(0, 1)]
    newcomer.link.say(Founded(BORN, 0))
    joining.join()
    newcomer.link.say(Check(state.path))
    assert newcomer.link.hear(Checked).error == "" and asked == [(0, 1)]


@pytest.mark.parametrize("lineage, epoch", [(LATER, 1), (NEXT, 2)])
def test_a_state_of_another_moment_is_not_taken(peer, lineage, epoch):
    peer.link.say(Step(peer.step_of()))
    state = written(peer)
    before = peer.member.settle()
    peer.link.say(Load(lineage, epoch, state.path, (), "behind"))
    with pytest.raises(SwarmError, match="epoch 1"):
        peer.train()
    assert peer.member.settle() == before


def test_a_sketch_is_equal_up_to_rounding_and_shows_damage(make):
    peers = [make(name) for name in ("well", "rounded", "damaged", "broken")]
    with torch.no_grad():
        peers[1].member.training_state()[0].mul_(1 + 1e-6)
        peers[2].member.training_state()[0][0, 0] += 0.1
        peers[3].member.training_state()[0][0, 0] = float("nan")
    sketches = []
    for peer in peers:
        peer.link.say(Founded(BORN, 0))
        peer.member.join(PATIENCE)
        sketches.append(peer.link.hear(Stepped).sketch)
    well, rounded, damaged, broken = sketches
    assert abs(well - rounded) < 1e-4 and abs(well - damaged) > 1e-2 and abs(well - broken) > 1e6


# --- a stay ---


def test_a_checkpoint_is_brought_along(make, tmp_path):
    old, new, fresh = make("old"), make("new"), make("fresh")
    old.found()
    old.link.say(Step(old.step_of()))
    old.link.hear(Stepped)
    saver = SaveCheckpoints(tmp_path / "checkpoints", NAMES, {"run_id": "x"}, lambda *_, **__: None)
    assert saver.save(old.member) is not None
    found = latest_checkpoint(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match="not of this run"):
        new.member.load_named_state(NAMES, {**found.tensors, "weight": torch.zeros(1)}, found.meta)
    new.member.load_named_state(NAMES, found.tensors, found.meta)
    new.link.say(Founded(LATER, 1))
    assert new.member.join(PATIENCE) is False
    assert torch.equal(new.flat(), reference(1)) and new.member.settle() == old.member.settle()
    assert new.specs[0].origin == 1 and len(new.specs[0].state_digest) == 32
    fresh.found()
    assert (fresh.specs[0].origin, fresh.specs[0].state_digest) == (0, b"")


def test_parameters_that_others_cannot_make_are_named_from_the_beginning(make):
    """Two Trainers' adapters are drawn at random: one would train on with its own beside the other's."""
    peer = make("random")
    peer.member = peer.new_member(begins_alike=False)
    peer.found()
    assert peer.specs[0].origin == 0 and len(peer.specs[0].state_digest) == 32


def test_nobody_who_gives_the_model_is_told_and_leaving_ends_the_wait(make):
    with pytest.raises(SwarmError) as caught:
        make("one").member.join(0.01)
    assert caught.value.kind == "dead_peers"
    other = make("other")
    other.member.stop_waiting()
    assert other.member.join(PATIENCE) is False and other.member.lineage is None


def test_a_download_that_its_volunteer_leaves_raises_in_the_loop(make):
    class Gone(Exception):
        pass

    def leave(done, total):
        raise Gone

    peer = make()
    peer.member.on_download = leave
    peer.link.say(Downloading(1, 10))
    with pytest.raises(Gone):
        peer.member.join(PATIENCE)


def test_nothing_stays_behind_when_a_volunteer_leaves(peer):
    peer.microbatch()
    peer.microbatch(samples=3)
    ended = threading.Thread(target=peer.member.shutdown, daemon=True)
    ended.start()
    assert peer.link.hear(Delivered).samples == 4
    peer.link.say(Granted(2))
    assert peer.link.hear(Delivered).samples == 3
    peer.link.say(Granted(3))
    peer.link.hear(Leave)
    peer.link.say(Left())
    ended.join(PATIENCE)
    assert peer.link.closed.is_set()


def test_who_comes_back_at_once_says_no_goodbye(peer):
    peer.end()
    assert peer.link.closed.is_set() and not [each for each in peer.link.has_said() if isinstance(each, Leave)]


@pytest.mark.parametrize("others", [{}, {"bob": "his record"}])
def test_who_is_alone_needs_no_goodbye_and_keeps_its_key(make, others):
    peer = make("alone")
    peer.member = peer.new_member(
        discover=lambda link: SimpleNamespace(others=others, uncallable=0, close=lambda: None)
    )
    peer.found()
    peer.link.say(Progress("collecting", 0, 0, 0, 1, False, 0.0, 0, 0), *[Granted(0)] * 4, Left())
    peer.heard()
    peer.member.shutdown()
    assert bool([each for each in peer.link.has_said() if isinstance(each, Leave)]) == bool(others)


@pytest.mark.parametrize("waits", [False, True])
def test_a_node_that_ends_ends_the_loop(peer, waits):
    if waits:
        peer.link.say(Compute(False))
        peer.heard()
    caught = []

    def train():
        try:
            while True:
                peer.microbatch()
        except SwarmError as error:
            caught.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    peer.link.hear(Delivered)
    peer.link.say(Broken("p2pd is gone."))
    thread.join(PATIENCE)
    assert [error.kind for error in caught] == ["broken"] and "p2pd is gone." in str(caught[0])
    peer.member.settle()


def test_who_has_lost_the_quorum_is_told(peer):
    peer.link.say(Progress("isolated", 0, 0, 0, 1, True, 12.0, 0, 0))
    peer.heard()
    assert "More than half" in peer.member.cut_off and peer.member.cut_off_for == 12.0
    told, rounds = [], queue.SimpleQueue()
    peer.member.on_round, peer.member.on_told = rounds.put, lambda *news: told.append(news)
    peer.link.say(Told("drifted", "x"), *[Progress("exchanging", 0, 0, 0, 3, False, 0.0, 0, 0)] * 2)
    assert rounds.get(timeout=PATIENCE) == 3 and told == [("drifted", "x")]
    assert peer.member.cut_off is None and peer.member.cut_off_for == 0.0


def test_a_peer_that_decides_alone_is_cut_off_by_a_wrong_clock_only(peer):
    peer.member.reach.cut_off, peer.member.reach.cut_off_for = "Nobody answers", 30.0
    assert peer.member.cut_off == "Nobody answers" and peer.member.cut_off_for == 30.0
    peer.link.say(Progress("counting", 0, 0, 0, 1, False, 0.5, 0, 0, decides_alone=True))
    peer.heard()
    assert peer.member.cut_off is None and peer.member.cut_off_for == 0.0
    peer.member.reach.waits_for_itself = True
    assert peer.member.cut_off == "Nobody answers" and peer.member.cut_off_for == 30.0


def test_a_half_precision_model_has_parameters_of_float32_beside_it(make):
    peer = make(dtype=torch.bfloat16)
    peer.found()
    state = peer.member.training_state()
    assert {tensor.dtype for tensor in state} == {torch.float32} and peer.member.num_parameters == 2
    peer.microbatch(0.5)
    assert torch.equal(peer.slots.view(0), torch.full((ELEMENTS,), 2.0))
    peer.link.say(Step(peer.step_of()))
    peer.link.hear(Stepped)
    peer.microbatch()
    assert torch.equal(peer.model.weight, state[0].to(torch.bfloat16)), "rounded from what the optimizer holds"


# --- with the loop ---


def commit_alone(peer: Scene, target: int, ended: threading.Event) -> None:
    """A node whose peer is the whole swarm."""
    total, samples, names, epoch, lineage = torch.zeros(ELEMENTS), 0, (), 0, BORN
    while not ended.is_set():
        try:
            delivered = peer.link.hear(Delivered)
        except queue.Empty:
            return
        total, samples, names = (
            total + peer.slots.view(delivered.slot),
            samples + delivered.samples,
            names + delivered.names,
        )
        peer.slots.zero(delivered.slot)
        if samples >= target:
            epoch, parent, lineage = epoch + 1, lineage, bytes([epoch + 1])
            peer.link.say(Step(peer.step_of(lineage, parent, epoch, total / samples), float(samples), names))
            total, samples, names = torch.zeros(ELEMENTS), 0, ()
        peer.link.say(Granted(delivered.slot))


def test_a_trainer_trains_and_every_sample_counts_once(make):
    peer = make()
    peer.found()
    stream, read, counted = make_stream(), [], []

    def next_batch(size):
        batch = stream(size)
        names = [f"{len(read)}.{i}" for i in range(size)]
        read.extend(names)
        return SimpleNamespace(text=batch.text, y=batch.y, names=names)

    class Count(Callback):
        def on_epoch(self, trainer, report, loss):
            assert report.samples == len(report.names)
            counted.extend(report.names)

    trainer = Trainer(peer.model, peer.member, next_batch, squared_error, batch_size=8, callbacks=[Count()])
    test = make_stream(seed=99)(64)
    before, ended = squared_error(peer.model, test).item(), threading.Event()
    node = threading.Thread(target=commit_alone, args=(peer, 16, ended), daemon=True)
    node.start()
    trainer.train(until_epoch(trainer, 30))
    peer.member.settle()
    trainer.tell_steps()
    ended.set()
    assert squared_error(peer.model, test).item() < before
    assert len(set(counted)) == len(counted) and set(counted) <= set(read)
    assert trainer.epoch >= 30 and trainer.samples_per_second > 0


@pytest.mark.parametrize("epoch, is_too_slow", [(2.0, True), (4.0, False), (0.0, False)])
def test_a_device_whose_work_comes_too_late_is_told(peer, monkeypatch, epoch, is_too_slow):
    """Five microbatches of 8 s; steps may be 4 epochs late, and half a microbatch more is needed to travel."""
    ahead = 0.0
    monkeypatch.setattr(member, "time", SimpleNamespace(monotonic=lambda: monotonic() + ahead))
    peer.found()
    peer.link.say(Progress("collecting", 9, 0, 0, 3, False, 0.0, 0, 0, epoch_seconds=epoch))
    peer.heard()
    for number in range(6):
        assert not peer.member.why_too_slow, "it is not known yet"
        peer.microbatch()
        peer.link.say(Granted(number % 2))
        peer.heard()
        ahead += 8.0
    assert peer.member.progress().epoch_seconds == epoch
    assert bool(peer.member.why_too_slow) == is_too_slow
    if is_too_slow:
        assert "--batch-size 2" in peer.member.why_too_slow and "4 steps late" in peer.member.why_too_slow
