"""When memory runs out in the loop: the batch is halved, what failed leaves nothing behind, and training goes on."""

from __future__ import annotations

import weakref

import pytest
import torch

from tests.alone_trainer import Witness, hungry, make_trainer, squared_error, until
from volunteer_kit.training.tuning import Halving, Tuning, is_out_of_memory


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
