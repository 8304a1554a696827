"""The visible loop and what happens around a step, on a real small model; the swarm is a stand-in in this process."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import pytest
import torch

from tests.alone_trainer import Witness, make_stream, make_trainer, squared_error, until
from volunteer_kit.checkpoint import latest_checkpoint
from volunteer_kit.training.callbacks import SaveCheckpoints
from volunteer_kit.training.replicas import Replicas
from volunteer_kit.training.trainer import EpochMean, LossScale

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
