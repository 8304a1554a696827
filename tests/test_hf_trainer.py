"""Alone in its swarm a SwarmTrainer is a plain Trainer, to the last bit, in all that people do with one."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from benchmarks.trainer_parts.material import Sentences, pad, tiny_llama
from tests.trainers import ARGUMENTS, both, differing, logged, make, saved
from volunteer_kit.training.hf_trainer import SwarmTrainer, SwarmTrainingArguments


def with_dropout() -> torch.nn.Module:
    model = tiny_llama()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return model


def with_adapters() -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(tiny_llama(hidden=64), LoraConfig(r=64, lora_dropout=0.1, target_modules="all-linear"))


def sgd_and_two_schedules(model: torch.nn.Module) -> tuple:
    optimizer, kinds = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), torch.optim.lr_scheduler
    parts = [kinds.LinearLR(optimizer, 0.1, total_iters=3), kinds.ExponentialLR(optimizer, 0.8)]
    return optimizer, kinds.SequentialLR(optimizer, parts, milestones=[3])


def all_parameters_though_some_are_frozen(model: torch.nn.Module) -> tuple:
    model.model.embed_tokens.weight.requires_grad_(False)
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1), None


def with_norm_and_unused() -> torch.nn.Module:
    """A BatchNorm before the head, and a parameter that no batch uses."""
    model = tiny_llama()
    norm = torch.nn.BatchNorm1d(32)
    model.model.norm.register_module("batch", norm)
    model.model.norm.register_forward_hook(lambda _, __, out: norm(out.transpose(1, 2)).transpose(1, 2))
    model.spare = torch.nn.Parameter(torch.ones(8))
    return model


class FrozenMidway(TrainerCallback):
    """Momentum would move the layer on."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step >= 3:
            model.model.layers[0].mlp.requires_grad_(False)


def evaluated() -> dict:
    return {"eval_dataset": Sentences(range(200, 208))}


def train(trainer: Trainer):
    torch.manual_seed(7)  # of dropout
    return trainer.train()


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
        return (loss, outputs) if return_outputs else loss


CASES = {
    "adamw": dict(
        target=16, model=with_dropout, gradient_accumulation_steps=4, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False}, max_grad_norm=0.5, max_steps=10, warmup_steps=3,
        lr_scheduler_type="cosine", weight_decay=0.1, logging_first_step=True, logging_steps=2,
        more=evaluated, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, save_total_limit=2,
        load_best_model_at_end=True,
    ),
    "passed in": dict(target=4, optimizers=sgd_and_two_schedules, bf16=True, max_steps=8),
    "epochs": dict(
        target=4, kind=OwnLoss, optim="adafactor", rows=24, num_train_epochs=2, more=evaluated,
        logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch",
    ),
    "adapters": dict(
        target=8, model=with_adapters, optim="paged_adamw_8bit", gradient_accumulation_steps=2, max_steps=6,
        weight_decay=0.1,
    ),
    "frozen": dict(target=4, optimizers=all_parameters_though_some_are_frozen, fp16=True, max_steps=6),
    "rows left over": dict(target=12, rows=26, gradient_accumulation_steps=3, num_train_epochs=2, weight_decay=0.1),
    "rows dropped": dict(target=8, rows=15, gradient_accumulation_steps=2, num_train_epochs=2.5,
                         dataloader_drop_last=True, per_device_eval_batch_size=2),
    "without gradients": dict(
        target=8, model=with_norm_and_unused, gradient_accumulation_steps=2, max_steps=6, weight_decay=0.1,
        callbacks=lambda: [FrozenMidway()],
    ),
    "stopped": dict(
        target=4, optim="sgd", learning_rate=1e-9, max_steps=20, more=evaluated, eval_strategy="steps", eval_steps=2,
        save_strategy="best", metric_for_best_model="eval_loss", load_best_model_at_end=True,
        callbacks=lambda: [EarlyStoppingCallback(2, early_stopping_threshold=0.1)],
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Paged optimizers")
@pytest.mark.parametrize("name", CASES)
def test_alone_it_is_a_plain_trainer(tmp_path, name):
    plain, swarm = both(tmp_path, **CASES[name])
    done = [train(trainer) for trainer in (plain, swarm)]
    assert differing(plain, swarm) == []
    assert logged(swarm) == logged(plain)
    assert done[1].global_step == done[0].global_step
    assert done[1].training_loss == pytest.approx(done[0].training_loss, rel=1e-6)
    assert saved(swarm) == saved(plain)
    best = [trainer.state.best_global_step for trainer in (plain, swarm)]
    assert best[0] == best[1] and swarm.state.epoch == plain.state.epoch
    assert swarm.args.max_grad_norm == plain.args.max_grad_norm
    assert swarm.evaluate(Sentences(range(8)))["eval_loss"] == plain.evaluate(Sentences(range(8)))["eval_loss"]
    assert (swarm.predict(Sentences(range(2))).predictions == plain.predict(Sentences(range(2))).predictions).all()


def test_several_steps_of_a_peer_make_one_of_the_swarm(tmp_path):
    """As gradient accumulation in a plain Trainer: rates, steps, evaluations and checkpoints are counted alike."""
    settings = dict(
        more=evaluated(), max_steps=9, warmup_steps=3, max_grad_norm=0.5, eval_strategy="steps", eval_steps=4,
        save_strategy="steps", save_steps=4, logging_steps=2,
    )  # fmt: skip
    plain = make(tmp_path / "plain", gradient_accumulation_steps=4, **settings)
    swarm = make(tmp_path / "swarm", 16, **settings)
    for trainer in (plain, swarm):
        trainer.train()
    for name in ("step", "epoch", "learning_rate"):
        assert logged(swarm, name) == logged(plain, name)
    for name in ("grad_norm", "eval_loss"):
        assert [e[name] for e in logged(swarm, name)] == pytest.approx([e[name] for e in logged(plain, name)], rel=1e-3)
    # a plain one's is a mean over words, of all batches; ours over the batches' means
    assert [e["loss"] for e in logged(swarm, "loss")] == pytest.approx(
        [e["loss"] for e in logged(plain, "loss")], rel=1e-2
    )
    assert saved(swarm) == saved(plain) == ["checkpoint-4", "checkpoint-8", "checkpoint-9"]
    for ours, theirs in zip(swarm.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    [last] = [entry for entry in swarm.state.log_history if "train_loss" in entry]
    assert last["train_samples_per_second"] == pytest.approx(9 * 16 / last["train_runtime"], rel=1e-2)
    assert last["train_steps_per_second"] == pytest.approx(9 / last["train_runtime"], rel=1e-2)
    [entry] = [entry for entry in swarm.state.log_history if entry["step"] == 8 and "loss" in entry]
    assert (entry["swarm_peers"], entry["group_size"], entry["own_samples"]) == (1, 1, 8 * 16)


def test_a_pass_of_several_steps_ends_with_the_samples_that_are_left(tmp_path):
    """As a plain Trainer's whose batch is the swarm's: 12, 12 and 2 of 26."""
    swarm = make(tmp_path, 12, rows=26, num_train_epochs=2)
    assert swarm.train().global_step == 2 * 3
    assert [e["own_samples"] for e in logged(swarm, "own_samples")] == [12, 24, 26, 38, 50, 52]


def test_a_script_may_train_in_a_thread_and_with_a_default_type_of_its_own(tmp_path):
    """As a web interface does; and as one that loads large models in 16 bits."""

    def in_16_bits() -> torch.nn.Module:
        return tiny_llama().to(torch.bfloat16)

    swarm = make(tmp_path, 4, model=in_16_bits, max_steps=2, opt={"grad_compression": "sparse"})
    torch.set_default_dtype(torch.bfloat16)
    try:
        thread = threading.Thread(target=swarm.train)
        thread.start()
        thread.join()
    finally:
        torch.set_default_dtype(torch.float32)
    assert swarm.state.global_step == 2
    assert {p.dtype for p in swarm.model.parameters()} == {torch.bfloat16}


def test_a_model_of_16_bits_is_rounded_once_a_step_from_a_copy_of_32(tmp_path):
    """A plain Trainer adds each step to the rounded model, and steps below its last bit are lost."""

    def in_16_bits() -> torch.nn.Module:
        return tiny_llama().to(torch.bfloat16)

    settings = dict(model=in_16_bits, max_steps=8, optim="sgd", learning_rate=1e-3, max_grad_norm=0.0)
    plain, swarm = both(tmp_path, 4, **settings)
    exact = make(tmp_path / "exact", **{**settings, "model": lambda: in_16_bits().float()})
    for trainer in (plain, swarm, exact):
        trainer.train()

    def away(trainer: Trainer) -> float:
        pairs = zip(trainer.model.parameters(), exact.model.parameters(), strict=True)
        return sum((a.float() - b).square().sum().item() for a, b in pairs)

    assert differing(plain, swarm) and away(swarm) < away(plain)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit"])
def test_a_checkpoint_is_gone_on_from_to_the_last_bit(tmp_path, optim):
    """In the middle of a pass; from one of a plain Trainer, too."""
    settings = dict(
        model=lambda: tiny_llama(hidden=64), optim=optim, max_steps=12, rows=40, save_strategy="steps", save_steps=7
    )
    plain = make(tmp_path / "plain", **settings)
    plain.train()
    checkpoint = tmp_path / "plain/checkpoint-7"
    if optim == "adamw_torch":
        swarm = make(tmp_path / "swarm", 4, **settings)
        swarm.train()
        assert differing(plain, swarm) == []
        checkpoint = tmp_path / "swarm/checkpoint-7"
    resumed = make(tmp_path / "resumed", 4, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert differing(plain, resumed) == [] and logged(resumed) == logged(plain)
    losses = [entry["loss"] for entry in logged(plain, "loss")]
    [train_loss] = logged(resumed, "train_loss")
    assert train_loss["train_loss"] == pytest.approx(sum(losses[7:]) / 5, rel=1e-4)


class Stream(torch.utils.data.IterableDataset):
    """Data without a length that tells what was read of it."""

    def __init__(self, rows: int):
        self.rows, self.read = Sentences(range(rows)), []

    def __iter__(self):
        for row in range(len(self.rows)):
            self.read.append(row)
            yield self.rows[row]


def test_data_without_a_length_are_read_to_their_end_and_then_anew(tmp_path):
    """transformers takes max_steps of this peer's steps for a pass over them; the swarm's take four times as many."""
    settings = dict(max_steps=6, save_strategy="steps", save_steps=4)
    whole, short, resumed = Stream(400), Stream(40), Stream(400)
    swarm = make(tmp_path / "a", 16, more={"train_dataset": whole}, **settings)
    swarm.train()
    assert whole.read[: 6 * 16] == list(range(6 * 16))
    again = make(tmp_path / "b", 16, more={"train_dataset": resumed}, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "a/checkpoint-4"))
    assert differing(swarm, again) == [] and resumed.read == whole.read
    assert logged(again, "loss", "epoch") == logged(swarm, "loss", "epoch")
    make(tmp_path / "c", 16, more={"train_dataset": short}, **settings).train()
    assert short.read[: 6 * 16] == [row % 40 for row in range(6 * 16)]


class Overflowing(Trainer):
    """A gradient of its third step is infinite, as those of half precision are at times."""

    def training_step(self, model, *args, **kwargs):
        loss = super().training_step(model, *args, **kwargs)
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 3:
            next(model.parameters()).grad[0] = math.inf
        return loss


def test_an_infinite_gradient_costs_one_microbatch_and_halves_the_loss_scale(tmp_path):
    """A plain Trainer counts the step that it did not take, the swarm does not."""
    settings = dict(kind=Overflowing, lr_scheduler_type="constant", fp16=True)  # no scaler for a CPU
    plain = make(tmp_path / "plain", max_steps=9, **settings)
    swarm = make(tmp_path / "swarm", 4, max_steps=8, **settings)
    for trainer in (plain, swarm):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # no powers of 2 lose bits
        trainer.accelerator.native_amp = True
        trainer.train()
        assert trainer.accelerator.scaler.get_scale() == 512.0
    assert differing(plain, swarm) == [] and swarm.calls == plain.calls == 9


def test_a_smaller_batch_is_tried_when_memory_runs_out(tmp_path):
    class Small(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            if len(inputs["input_ids"]) > 4:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    swarm = make(tmp_path, 8, kind=Small, per_device_train_batch_size=5, auto_find_batch_size=True, max_steps=3)
    assert swarm.train().global_step == 3 and swarm._train_batch_size <= 4


def test_train_may_be_called_again(tmp_path):
    """Statistics and rates are the Trainer's own in between; a schedule that was passed in goes on."""

    def adamw(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    plain, swarm = both(tmp_path, 4, optimizers=adamw, max_steps=4)
    for trainer in (plain, swarm):
        trainer.train()
    for ours, theirs in zip(swarm.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        assert ours["lr"] == theirs["lr"]
    ours, theirs = ([*trainer.optimizer.state.values()] for trainer in (swarm, plain))
    assert all(torch.equal(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) for key in b)
    for trainer in (plain, swarm):
        trainer.train()
    assert differing(plain, swarm) == [] and logged(swarm) == logged(plain)


def test_without_a_swarm_it_is_a_plain_trainer(tmp_path):
    plain = make(tmp_path / "plain", max_steps=3)
    args = SwarmTrainingArguments(str(tmp_path / "swarm"), max_steps=3, **ARGUMENTS)
    swarm = SwarmTrainer(model=tiny_llama(), args=args, train_dataset=plain.train_dataset, data_collator=pad)
    for trainer in (plain, swarm):
        trainer.train()
    assert differing(plain, swarm) == [] and logged(swarm) == logged(plain)
