"""The visible loop and what happens around a step, on a real small model; the swarm is a stand-in in this process."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from volunteer_kit.checkpoint import latest_checkpoint
from volunteer_kit.device import Setting, Tuner, search
from volunteer_kit.swarm.options import StepReport
from volunteer_kit.training.callbacks import KeepGoodState, SaveCheckpoints
from volunteer_kit.training.protocol import EVENTS, FinishAt, Leave, WorkerSpec, dump_event, parse_command, parse_event
from volunteer_kit.training.replicas import Replicas
from volunteer_kit.training.trainer import Callback, EpochMean, LossScale, Trainer
from volunteer_kit.training.tuning import Chosen, Halving, Tuning, is_out_of_memory

# --- loss scale ---


@pytest.mark.parametrize(
    "start, finite, expected",
    [
        (1024.0, [True], 1024.0),
        (1024.0, [False], 512.0),
        (1024.0, [False, False, False], 128.0),
        (1.0, [False], 1.0),  # never below what does nothing
        (1.5, [False], 1.0),
        (1024.0, [True] * 4, 2048.0),  # growth_interval is 4 here
        (1024.0, [True] * 3, 1024.0),
        (1024.0, [True] * 8, 4096.0),
        (1024.0, [True] * 3 + [False] + [True] * 3, 512.0),  # in a row
        (1024.0, [True] * 3 + [False] + [True] * 4, 1024.0),
        (2.0**24, [True] * 4, 2.0**24),
        (2.0**23, [True] * 12, 2.0**24),
    ],
)
def test_the_loss_scale_follows_what_is_finite(start, finite, expected):
    scale = LossScale(value=start, growth_interval=4, dynamic=True)
    for was_finite in finite:
        scale.update(was_finite)
    assert scale.value == expected


def test_without_fp16_the_loss_is_not_scaled():
    scale = LossScale()
    for finite in [True] * 2000 + [False]:
        scale.update(finite)
    assert scale.value == 1.0


def test_the_epochs_mean_is_over_samples():
    mean = EpochMean()
    assert mean.take() is None
    mean.add(2.0, 8)
    mean.add(5.0, 4)
    assert mean.take() == pytest.approx(3.0)
    assert mean.take() is None, "taken, it starts anew"
    mean.add(7.0, 1)
    assert mean.take() == 7.0


# --- the loop ---


class Averager:
    """What callbacks know of the state averager: parameters, and a lock around them."""

    def __init__(self, parameters):
        self.main_parameters = parameters
        self.locked = 0

    @contextlib.contextmanager
    def get_tensors(self):
        self.locked += 1
        yield self.main_parameters


class AloneOptimizer:
    """The attributes of SwarmOptimizer that the trainer and callbacks use, with plain SGD and a swarm of one."""

    def __init__(self, parameters, target: int = 16, lr: float = 0.1):
        self.parameters, self.target, self.lr = list(parameters), target, lr
        self.state_averager = Averager(self.parameters)
        self.local_epoch, self.samples = 0, 0
        self.reports: deque[StepReport] = deque()
        self.story: list = []
        self.statistic = torch.zeros(3)
        self.complete = self.only_accumulated = True
        self.broken_at: int | None = None

    def zero_grad(self) -> None:
        self.story.append("zero_grad")
        for parameter in self.parameters:
            parameter.grad = None

    def step(self, batch_size: int, grad_scale: float = 1.0, names=()) -> bool:
        assert len(names) == batch_size
        self.story.append(("step", batch_size, grad_scale))
        grads = [parameter.grad / grad_scale for parameter in self.parameters]
        if not all(torch.isfinite(grad).all() for grad in grads):
            return False
        self.samples += batch_size
        self.only_accumulated = self.samples < self.target
        with torch.no_grad():
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.sub_(self.lr * grad)
        if self.samples >= self.target:
            self.local_epoch += 1
            if self.local_epoch == self.broken_at:
                with torch.no_grad():
                    self.parameters[0].fill_(float("nan"))
            self.reports.append(StepReport(self.local_epoch, self.samples, 3, 1.0, 0.5, 100, 200, {}))
            self.samples = 0
        return True

    def training_state(self) -> list[torch.Tensor]:
        return [*(parameter.detach() for parameter in self.parameters), self.statistic]

    def restore(self, tensors) -> None:
        self.story.append("restore")
        with torch.no_grad():
            for ours, theirs in zip(self.training_state(), tensors, strict=True):
                ours.copy_(theirs)

    def named_state(self, names, certain=False):
        tensors = dict(zip([*names, "optimizer/weight/m"], self.training_state(), strict=True))
        return {name: tensor.clone() for name, tensor in tensors.items()}, {"epoch": self.local_epoch, "numbers": []}


@dataclass
class Samples:
    text: torch.Tensor  # (B, 4); a microbatch is anything that has texts and their names
    y: torch.Tensor  # (B, 2)

    @property
    def names(self) -> range:
        return range(len(self.text))


TRUTH = torch.arange(8.0).reshape(4, 2) / 8


def make_stream(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)

    def next_batch(size: int) -> Samples:
        x = torch.randn(size, 4, generator=generator)
        return Samples(x, x @ TRUTH)

    return next_batch


def squared_error(model, batch: Samples) -> torch.Tensor:
    return (model(batch.text) - batch.y).pow(2).mean()


class Witness(Callback):
    def __init__(self, story: list | None = None):
        self.story = [] if story is None else story

    def on_microbatch(self, trainer, loss, samples):
        self.story.append(("microbatch", samples))

    def on_epoch(self, trainer, report, loss):
        self.story.append(("epoch", report.epoch, loss))


def make_trainer(compute_loss=squared_error, *, callbacks=(), batch_size=8, target=16, precision="fp32", **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2, bias=False)
    optimizer = AloneOptimizer(model.parameters(), target)
    trainer = Trainer(
        model,
        optimizer,
        make_stream(),
        compute_loss,
        batch_size=batch_size,
        precision=precision,
        callbacks=callbacks,
        **options,
    )
    return trainer, optimizer


def until(trainer: Trainer, epochs: int):
    return lambda: trainer.epoch >= epochs


def test_it_trains():
    trainer, optimizer = make_trainer()
    batch = make_stream(seed=99)(64)
    before = squared_error(trainer.model, batch).item()
    trainer.train(until(trainer, 40))
    assert squared_error(trainer.model, batch).item() < 0.1 * before
    assert trainer.epoch == 40 and trainer.samples_per_second > 0


def test_the_order_of_a_step():
    """Callbacks in the order given; on_microbatch before the on_epoch of the step that it completed."""
    trainer, optimizer = make_trainer()
    losses = []

    def compute_loss(model, batch):
        optimizer.story.append("loss")
        loss = squared_error(model, batch)
        losses.append(loss.item())
        return loss

    trainer.compute_loss = compute_loss
    trainer.callbacks = (Witness(optimizer.story), Witness(optimizer.story))
    trainer.train(until(trainer, 1))
    microbatch = ["zero_grad", "loss", ("step", 8, 1.0), ("microbatch", 8), ("microbatch", 8)]
    epoch = ("epoch", 1, pytest.approx(sum(losses) / 2))
    assert optimizer.story == [*microbatch, *microbatch, epoch, epoch]


def test_it_stops_between_microbatches_without_reading_more():
    trainer, optimizer = make_trainer()
    asked, read = [], []
    stream = trainer.next_batch
    trainer.next_batch = lambda size: read.append(size) or stream(size)

    def should_stop():
        asked.append(len(read))
        return len(asked) > 3

    trainer.train(should_stop)
    assert read == [8, 8, 8] and asked == [0, 1, 2, 3]


def test_an_error_of_the_stream_is_not_swallowed():
    trainer, _ = make_trainer()

    def broken(size):
        raise OSError("the shard is gone")

    trainer.next_batch = broken
    with pytest.raises(OSError, match="the shard is gone"):
        trainer.train(lambda: False)


# --- out of memory ---


def hungry(limit: int, in_backward: bool = False):
    """A device that bears `limit` samples."""

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss, size):
            ctx.size = size
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.size > limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return grad, None

    def compute_loss(model, batch):
        if in_backward:
            return Backward.apply(squared_error(model, batch), len(batch.text))
        if len(batch.text) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squared_error(model, batch)

    return compute_loss


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_out_of_memory_halves_the_batch_and_training_goes_on(in_backward):
    witness = Witness()
    trainer, optimizer = make_trainer(hungry(3, in_backward), batch_size=16, target=4, callbacks=[witness])
    trainer.train(until(trainer, 2))
    steps = [word[1] for word in optimizer.story if word[0] == "step"]
    assert steps == [2, 2, 2, 2], "16, 8 and 4 did not fit; never more than what fits is tried again"
    assert trainer.batch_size == 2 and trainer.microbatches_too_large == 3
    assert [word[0] for word in witness.story] == ["microbatch", "microbatch", "epoch"] * 2
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())


def test_gradients_of_a_failed_microbatch_do_not_enter_the_next():
    trainer, optimizer = make_trainer(hungry(4), batch_size=8, target=4)
    for parameter in optimizer.parameters:
        parameter.grad = torch.full_like(parameter, 1e9)
    trainer.train(until(trainer, 1))
    assert all(parameter.abs().max() < 10 for parameter in optimizer.parameters)


def test_a_single_sample_that_does_not_fit_is_told():
    trainer, _ = make_trainer(hungry(0), batch_size=4)
    with pytest.raises(torch.OutOfMemoryError, match="single sample"):
        trainer.train(lambda: False)


def test_activations_are_recomputed_before_a_sample_is_given_up():
    tuning = Tuning(Halving(4, checkpointing=False))
    trainer, optimizer = make_trainer(lambda model, batch: fits(model, batch), tuning=tuning, target=2)
    trainer.model.checkpointing = False

    def fits(model, batch):
        if not model.checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return squared_error(model, batch)

    trainer.train(until(trainer, 1))
    assert trainer.model.checkpointing and trainer.batch_size == 1 and trainer.microbatches_too_large == 3
    assert [word[1] for word in optimizer.story if word[0] == "step"] == [1, 1]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8.02 GB, max allowed: 9.07 GB)"), True),
        (RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: Error allocating device buffer"), True),
        (RuntimeError("XLA:TPU compile permanent error. Ran out of memory in memory space hbm."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x2)"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (OSError("out of memory"), False),
    ],
    ids=lambda value: str(value)[:30],
)
def test_which_errors_mean_that_memory_ran_out(error, expected):
    assert is_out_of_memory(error) is expected
    seen = []

    def compute_loss(model, batch):
        seen.append(len(batch.text))
        if len(seen) == 1:
            raise error
        return squared_error(model, batch)

    trainer, _ = make_trainer(compute_loss)
    if expected:
        trainer.train(until(trainer, 1))
        assert seen[:2] == [8, 4] and trainer.microbatches_too_large == 1
    else:
        with pytest.raises(type(error)):
            trainer.train(until(trainer, 1))
        assert seen == [8]


def test_what_did_not_fit_is_let_go_before_the_next_microbatch():
    held = []

    def compute_loss(model, batch):
        assert all(one() is None for one in held), "activations of the microbatch that failed"
        activations = model(batch.text)
        if not held:
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (activations - batch.y).pow(2).mean()

    trainer, _ = make_trainer(compute_loss)
    trainer.train(until(trainer, 1))
    assert len(held) == 1


# --- elsewhere than on the model's device ---


def test_gradients_may_be_computed_elsewhere():
    calls = []

    def compute_gradients(model, batch, scale=1.0):
        calls.append((len(batch.text), scale, model.weight.grad))
        loss = squared_error(model, batch)
        (loss * scale).backward()
        return loss.detach()

    def no_loss_here(model, batch):
        raise AssertionError("compute_gradients does that")

    alone, _ = make_trainer()
    elsewhere, optimizer = make_trainer(no_loss_here, compute_gradients=compute_gradients)
    for trainer in (alone, elsewhere):
        trainer.train(until(trainer, 3))
    assert torch.equal(alone.model.weight, elsewhere.model.weight)
    assert calls == [(8, 1.0, None)] * 6 and optimizer.story[1] == ("step", 8, 1.0)


def test_several_devices_train_as_one_does():
    class Part(NamedTuple):
        text: torch.Tensor
        y: torch.Tensor
        names: range

    with contextlib.closing(Replicas(("cpu", "cpu"), squared_error, "fp32")) as replicas:
        weights = []
        for options in ({}, {"compute_gradients": replicas}):
            trainer, _ = make_trainer(batch_size=7, **options)
            stream = make_stream()
            trainer.next_batch = lambda size, stream=stream: Part(*vars(stream(size)).values(), range(size))
            trainer.train(until(trainer, 5))
            weights.append(trainer.model.weight)
    assert torch.allclose(*weights, atol=1e-6)


# --- settings that are found while it trains ---


class Script:
    """A tuner that wants one setting after the other, each for two microbatches, and the last for good."""

    why = "as the script says"

    def __init__(self, *settings: tuple[int, bool]):
        self.left = [setting for setting in settings[:-1] for _ in range(2)] + [settings[-1]]
        self.told: list[tuple] = []

    @property
    def settled(self) -> bool:
        return len(self.left) == 1

    def next(self):
        return Chosen(*self.left[0])

    def measured(self, setting, samples, seconds, peak_bytes, limit_bytes, idle_bytes):
        self.told.append((*setting, samples, peak_bytes, limit_bytes, idle_bytes))
        self.left.pop(0)

    def out_of_memory(self, setting):
        self.told.append((*setting, "out of memory"))
        self.left = [(setting.batch_size - 1, setting.checkpointing)]


class Counter:
    """Memory of which one more byte is taken each time that somebody looks."""

    def __init__(self):
        self.begun = self.looks = 0

    def begin(self):
        self.begun += 1

    def peak_bytes(self):
        self.looks += 1
        return self.looks

    def limit_bytes(self):
        return 1000


def test_each_microbatch_is_as_the_tuner_wants_it_and_it_is_told_how_that_went():
    told, tuner, memory = [], Script((2, False), (3, True), (5, False)), Counter()
    tuning = Tuning(tuner, memory, on_plan=lambda setting, why: told.append((*setting, why)))
    seen = []

    def compute_loss(model, batch):
        seen.append((len(batch.text), model.checkpointing))
        return squared_error(model, batch)

    trainer, _ = make_trainer(compute_loss, tuning=tuning, target=22)
    trainer.model.checkpointing = False
    trainer.train(until(trainer, 1))
    assert seen == [(2, False)] * 3 + [(3, True)] * 2 + [(5, False)] * 2
    assert [entry[:3] for entry in tuner.told] == [(2, False, 2)] * 2 + [(3, True, 3)] * 2, "it has settled: no more"
    assert [entry[3:] for entry in tuner.told] == [(2, 1000, 1), (3, 1000, 1), (5, 1000, 4), (6, 1000, 4)]
    assert memory.begun == 2 and told == [(5, False, "as the script says")]


def test_the_kits_tuner_in_the_loop_loses_one_microbatch_at_most(monkeypatch):
    for name in ("BLOCK", "DUEL", "FINAL"):
        monkeypatch.setattr(search, name, 0.05)  # s; how good the choice is, test_tuner.py looks at
    told = []
    tuner = Tuner(Setting(8), largest=512, estimate=lambda setting: setting.batch_size, limit_bytes=1e9)
    tuning = Tuning(tuner, Counter(), on_plan=lambda *plan: told.append(plan))
    trainer, optimizer = make_trainer(hungry(100), tuning=tuning, target=10**9)
    trainer.model.checkpointing = False
    trainer.train(lambda: tuner.settled)
    assert trainer.microbatches_too_large == tuner.ooms <= 1 and trainer.batch_size <= 100
    assert told == [(trainer.tuning.setting, tuner.why)]
    assert {word[1] for word in optimizer.story if word[0] == "step"} > {8, 16}


def test_steps_that_wait_for_others_are_not_measured():
    """Averaging leaves a report; a download in the middle, or an outage, none. One of 40 s would settle the tuner."""
    tuner = Script((4, False), (4, True), (4, False))
    trainer, optimizer = make_trainer(tuning=Tuning(tuner, Counter()), target=8)  # every second one ends an epoch
    trainer.train(until(trainer, 3))
    assert len(tuner.told) == 2, "not the very first one either: it pays for what is loaded once"
    speed, step = trainer.samples_per_second, optimizer.step

    def waits(*arguments, **named):
        taken = step(*arguments, **named)
        optimizer.only_accumulated = False
        return taken

    optimizer.step, optimizer.target = waits, 16
    trainer.train(until(trainer, 4))
    assert len(tuner.told) == 2 and trainer.samples_per_second == speed


def test_hours_later_memory_runs_out_and_the_plan_changes():
    told, tuner = [], Script((8, False))
    tuning = Tuning(tuner, Counter(), on_plan=lambda setting, why: told.append(setting))
    trainer, optimizer = make_trainer(hungry(6), tuning=tuning, target=6)
    trainer.train(until(trainer, 1))
    assert tuner.told == [(8, False, "out of memory"), (7, False, "out of memory")]
    assert [word[1] for word in optimizer.story if word[0] == "step"] == [6] and trainer.batch_size == 6
    assert told == [(8, False), (7, False), (6, False)]


# --- not finite ---


def nan_at(*microbatches: int):
    count = iter(range(10_000))

    def compute_loss(model, batch):
        loss = squared_error(model, batch)
        return loss * float("nan") if next(count) in microbatches else loss

    return compute_loss


def test_a_loss_that_is_not_finite_loses_its_microbatch_only():
    witness = Witness()
    trainer, optimizer = make_trainer(nan_at(1, 2), callbacks=[witness])
    trainer.train(until(trainer, 2))
    assert trainer.microbatches_not_finite == 2
    assert [word[0] for word in witness.story] == ["microbatch", "microbatch", "epoch"] * 2
    assert all(word[2] == word[2] for word in witness.story if word[0] == "epoch"), "no NaN in the epoch's mean"
    assert all(torch.isfinite(parameter).all() for parameter in optimizer.parameters)


def test_fp16_scales_the_loss_and_backs_off():
    trainer, optimizer = make_trainer(nan_at(1), precision="fp16", target=8)
    trainer.train(until(trainer, 3))
    scales = [word[2] for word in optimizer.story if word[0] == "step"]
    assert scales == [2.0**15, 2.0**15, 2.0**14, 2.0**14]


@pytest.mark.parametrize(
    "precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_the_plans_precision_is_what_the_model_computes_in(precision, dtype):
    seen = []

    def compute_loss(model, batch):
        out = model(batch.text)
        seen.append(out.dtype)
        return (out.float() - batch.y).pow(2).mean()

    trainer, _ = make_trainer(compute_loss, precision=precision)
    trainer.train(until(trainer, 1))
    assert set(seen) == {dtype}
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())


# --- the last good state ---


def test_a_broken_model_gets_its_last_good_state_back():
    events = []
    keep = KeepGoodState(lambda event, **fields: events.append((event, fields)), every=2)
    trainer, optimizer = make_trainer(callbacks=[keep])
    optimizer.broken_at = 6
    trainer.train(until(trainer, 5))
    copied_at_5 = optimizer.parameters[0].detach().clone()
    optimizer.statistic.fill_(5.0)  # after the copy: comes back as it was
    trainer.train(until(trainer, 6))
    assert [(event, fields["kind"]) for event, fields in events] == [("warning", "restored")]
    assert "epoch 5" in events[0][1]["message"]
    assert torch.equal(optimizer.parameters[0], copied_at_5), "parameters and statistics together"
    assert optimizer.statistic.tolist() == [0.0] * 3
    trainer.train(until(trainer, 9))
    assert torch.isfinite(optimizer.parameters[0]).all() and len(events) == 1
    assert optimizer.story.count("restore") == 1


def test_a_copy_is_made_every_few_epochs_and_under_the_lock():
    keep = KeepGoodState(lambda *_, **__: None, every=3)
    trainer, optimizer = make_trainer(callbacks=[keep])
    trainer.train(until(trainer, 8))
    assert optimizer.state_averager.locked == 3  # epochs 1, 4 and 7
    kept = keep._good[0]
    trainer.train(until(trainer, 9))
    assert keep._good[0] is kept, "one copy, written over: it costs as much as the model"


def test_broken_before_the_first_copy_is_told():
    events = []
    keep = KeepGoodState(lambda event, **fields: events.append(fields["kind"]))
    trainer, optimizer = make_trainer(callbacks=[keep])
    optimizer.broken_at = 1
    trainer.train(until(trainer, 1))
    assert events == ["not_finite"] and "restore" not in optimizer.story


# --- checkpoints ---


def test_checkpoints_are_saved_in_time_and_the_last_three_kept(tmp_path):
    events = []
    save = SaveCheckpoints(
        tmp_path, ["weight"], {"run_id": "x"}, lambda event, **fields: events.append((event, fields)), every_seconds=0
    )
    trainer, optimizer = make_trainer(callbacks=[save])
    trainer.train(until(trainer, 5))
    assert [(event, fields["epoch"]) for event, fields in events] == [("checkpoint", epoch) for epoch in range(1, 6)]
    checkpoint = latest_checkpoint(tmp_path)
    assert str(checkpoint.path) == events[-1][1]["path"] and len(list(tmp_path.iterdir())) == 3
    assert torch.equal(checkpoint.tensors["weight"], optimizer.parameters[0])
    assert checkpoint.meta["epoch"] == 5 and checkpoint.meta["run_id"] == "x"


def test_between_times_nothing_is_saved(tmp_path):
    save = SaveCheckpoints(tmp_path, ["weight"], {}, lambda *_, **__: None, every_seconds=600)
    trainer, _ = make_trainer(callbacks=[save])
    trainer.train(until(trainer, 3))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_and_training_goes_on(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    events = []
    save = SaveCheckpoints(
        tmp_path / "file",
        ["weight"],
        {},
        lambda event, **fields: events.append((event, fields["kind"])),
        every_seconds=0,
    )
    trainer, _ = make_trainer(callbacks=[save])
    trainer.train(until(trainer, 2))
    assert events == [("warning", "checkpoint")] * 2


# --- the worker's lines ---


def test_an_event_is_one_line_and_comes_back():
    line = dump_event(
        "epoch", epoch=3, samples=8, total_samples=20, loss=1.5, group_size=2, received=1.0, seconds=0.5, sent_bytes=7
    )
    assert "\n" not in line
    event = parse_event(line)
    assert event["event"] == "epoch" and event["loss"] == 1.5 and event["time"] > 1e9
    assert parse_event(dump_event("warning", kind="x", message="two\nlines"))["message"] == "two\nlines"


def test_an_event_that_nobody_could_read_is_an_error_of_ours():
    with pytest.raises(KeyError):
        dump_event("party", cake=1)
    with pytest.raises(ValueError, match="total_samples"):
        dump_event("left", epochs=3)
    with pytest.raises(ValueError):
        dump_event("left", epochs=float("nan"), total_samples=1)  # no JSON


@pytest.mark.parametrize(
    "line", ["", "Downloading: 5%", "{}", "[]", "3", '"epoch"', '{"event": "party"}', '{"event": ["epoch"]}', "{"]
)
def test_a_library_s_print_is_no_event(line):
    assert parse_event(line) is None


def test_commands():
    assert parse_command('{"command": "finish_at", "epoch": 7}') == FinishAt(epoch=7)
    assert parse_command(Leave().model_dump_json()) == Leave()
    for line in (
        "",
        "leave",
        "{}",
        '{"command": "finish_at"}',
        '{"command": "rm"}',
        '{"command": "finish_at", "epoch": "x"}',
    ):
        with pytest.raises(ValueError):
            parse_command(line)


def test_a_spec_crosses_the_pipe_unchanged():
    spec = WorkerSpec(run={"run_id": "x"}, name="a laptop", initial_peers=["/ip4/1.2.3.4/tcp/1/p2p/Qm"], batch_size=4)
    assert WorkerSpec.model_validate_json(spec.model_dump_json()) == spec
    with pytest.raises(ValueError, match="batchsize"):
        WorkerSpec.model_validate(json.loads('{"run": {}, "batchsize": 4}'))
    assert all(isinstance(fields, tuple) for fields in EVENTS.values())
