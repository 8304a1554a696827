"""The matrix's cases: each a Trainer as people make one, of tiny models and data made here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from transformers import Trainer, TrainingArguments

from benchmarks.trainer_matrix_parts import material
from benchmarks.trainer_parts.material import Sentences, pad

QUIET = {
    "report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "seed": 3,
}  # fmt: skip
ARGUMENTS = {"per_device_train_batch_size": 4, "learning_rate": 5e-3, "max_steps": 4}
ROWS = 96  # of each peer
Truth = Callable[[Mapping[str, Any]], int]  # examples in what a loss is computed of


def rows_of(inputs: Mapping[str, Any]) -> int:
    return len(next(one for one in inputs.values() if torch.is_tensor(one) and one.ndim))


def half_of_the_rows(inputs: Mapping[str, Any]) -> int:
    """Each example is two rows, what was chosen and what was rejected."""
    return rows_of(inputs) // 2


def beginnings(inputs: Mapping[str, Any]) -> int:
    """The batch holds sequences that lie in one row."""
    return int((inputs["position_ids"] == 0).sum())


@dataclass(frozen=True)
class Case:
    """How to make a Trainer.

    :param kind: of counting: the key under which examples_counted_right is told, "" for none of these
    :param target: target_batch_size alone; None: what the peer's own step holds
    :param why_not: why one alone is not a plain Trainer to the bit; it must be close all the same
    :param pair_target: of two; 0: it is tried alone only
    """

    name: str
    trainer: type[Trainer] = Trainer
    config: type[TrainingArguments] = TrainingArguments
    model: Callable[[], torch.nn.Module] = material.tiny_llama
    data: Callable[[Sequence[int]], Any] = Sentences
    collator: Callable[[], Any] | None = lambda: pad
    arguments: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[torch.nn.Module], Mapping[str, Any]] = lambda model: {}
    truth: Truth = rows_of
    kind: str = ""
    target: int | None = None
    pair_target: int = 0
    why_not: str = ""
    resume: bool = False  # by halves, the second from a checkpoint

    def make(self, folder: Path, first: int = 0, **changed: Any) -> Trainer:
        """:param first: of the rows; `changed`: arguments"""
        settings = {**QUIET, **ARGUMENTS, **self.arguments, **changed}
        model = self.model()
        more = {"train_dataset": self.data(range(first, first + ROWS)), **self.more(model)}
        if self.collator is not None:
            more["data_collator"] = self.collator()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.trainer(model=model, args=self.config(str(folder), **settings), **more)

    @property
    def own(self) -> int:
        """Rows of a peer's step."""
        settings = {**ARGUMENTS, **self.arguments}
        return settings["per_device_train_batch_size"] * settings.get("gradient_accumulation_steps", 1)


# --- the plain Trainer ---


def optimizer_of(kind: type[torch.optim.Optimizer], **settings: Any) -> Callable[[torch.nn.Module], Mapping[str, Any]]:
    return lambda model: {"optimizers": (kind(model.parameters(), **settings), None)}


def frozen(make: Callable[[], torch.nn.Module], name: str) -> torch.nn.Module:
    model = make()
    for its, parameter in model.named_parameters():
        parameter.requires_grad_(name not in its)
    return model


def evaluated(model: torch.nn.Module) -> Mapping[str, Any]:
    return {"eval_dataset": Sentences(range(200, 208))}


def stopping(model: torch.nn.Module) -> Mapping[str, Any]:
    return {**evaluated(model), "callbacks": [transformers.EarlyStoppingCallback(2)]}


def own_loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    logits, labels = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / (num_items_in_batch or len(labels))


def with_bias(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of one class each."""
    batch = pad([{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows])
    return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}


PLAIN: dict[str, dict[str, Any]] = {
    "adamw": {"kind": "lm", "pair_target": 16},
    "adamw, betas and decay": dict(arguments=dict(adam_beta1=0.8, adam_beta2=0.95, weight_decay=0.1), pair_target=16),
    "adamw fused": dict(arguments=dict(optim="adamw_torch_fused")),
    "sgd": dict(arguments=dict(optim="sgd"), pair_target=16),
    "sgd with momentum": dict(arguments=dict(optim="sgd", optim_args="momentum=0.9")),
    "adafactor": dict(arguments=dict(optim="adafactor"), pair_target=16),
    "adagrad": dict(arguments=dict(optim="adagrad")),
    "rmsprop": dict(arguments=dict(optim="rmsprop")),
    "lion": dict(arguments=dict(optim="lion_32bit", learning_rate=1e-3)),
    "adamw of 8 bits": dict(arguments=dict(optim="adamw_bnb_8bit"), pair_target=16),
    "nadam, passed in": dict(more=optimizer_of(torch.optim.NAdam, lr=5e-3)),
    "adamax, passed in": dict(more=optimizer_of(torch.optim.Adamax, lr=5e-3)),
    "radam, passed in": dict(more=optimizer_of(torch.optim.RAdam, lr=5e-3)),
    "rprop, passed in": dict(more=optimizer_of(torch.optim.Rprop, lr=1e-3)),
    "amsgrad, passed in": dict(more=optimizer_of(torch.optim.AdamW, lr=5e-3, amsgrad=True)),
    "constant": dict(arguments=dict(lr_scheduler_type="constant")),
    "constant after warm-up": dict(arguments=dict(lr_scheduler_type="constant_with_warmup", warmup_steps=2)),
    "cosine": dict(arguments=dict(lr_scheduler_type="cosine", warmup_steps=1), pair_target=16),
    "cosine with restarts": dict(
        arguments=dict(lr_scheduler_type="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 2})
    ),
    "cosine to a floor": dict(
        arguments=dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-4})
    ),
    "polynomial": dict(arguments=dict(lr_scheduler_type="polynomial")),
    "inverse square root": dict(arguments=dict(lr_scheduler_type="inverse_sqrt", warmup_steps=2)),
    "warm-up, stable, decay": dict(
        arguments=dict(
            lr_scheduler_type="warmup_stable_decay", warmup_steps=1,
            lr_scheduler_kwargs={"num_stable_steps": 1, "num_decay_steps": 2},
        )
    ),
    "accumulation of 3": dict(
        arguments=dict(gradient_accumulation_steps=3, per_device_train_batch_size=2), pair_target=24
    ),
    "accumulation of 4": dict(
        arguments=dict(gradient_accumulation_steps=4, per_device_train_batch_size=2), pair_target=32
    ),
    "batches of 1": dict(arguments=dict(per_device_train_batch_size=1), pair_target=8),
    "two epochs": dict(arguments=dict(num_train_epochs=2, max_steps=-1, per_device_train_batch_size=16)),
    "rows that are no multiple": dict(
        data=lambda rows: Sentences(rows[:10]), arguments=dict(num_train_epochs=3, max_steps=-1)
    ),
    "drop_last": dict(
        data=lambda rows: Sentences(rows[:10]),
        arguments=dict(num_train_epochs=3, max_steps=-1, dataloader_drop_last=True),
    ),
    "accumulation of 3, rows that are no multiple": dict(
        data=lambda rows: Sentences(rows[:26]),
        arguments=dict(
            num_train_epochs=2, max_steps=-1, gradient_accumulation_steps=3, per_device_train_batch_size=2
        ),
    ),
    "workers": dict(kind="workers", arguments=dict(dataloader_num_workers=2), pair_target=16),
    "persistent workers": dict(
        arguments=dict(dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_prefetch_factor=2)
    ),
    "without an end": dict(kind="iterable", data=material.Endless, pair_target=16),
    "without an end, dispatched": dict(
        kind="iterable", data=material.Endless, arguments=dict(accelerator_config={"dispatch_batches": True})
    ),
    "by length": dict(
        data=lambda rows: [Sentences(rows)[place] for place in range(len(rows))],
        arguments=dict(train_sampling_strategy="group_by_length"),
    ),
    "in order": dict(arguments=dict(train_sampling_strategy="sequential")),
    "flattened": dict(
        kind="flattening", collator=lambda: transformers.DataCollatorWithFlattening(), truth=beginnings, pair_target=16,
        data=lambda rows: [
            {name: values.tolist() for name, values in Sentences(rows)[place].items()} for place in range(len(rows))
        ],
    ),
    "rows of 250 words": dict(data=material.of_250_words, pair_target=16),
    "bf16 autocast": dict(arguments=dict(bf16=True), pair_target=16),
    "a model of bf16": dict(
        model=lambda: material.tiny_llama().bfloat16(),
        why_not="a model of 16 bits is stepped in 32 bits, which keeps what 16 round away",
    ),
    "gradient checkpointing": dict(arguments=dict(gradient_checkpointing=True)),
    "label smoothing": dict(arguments=dict(label_smoothing_factor=0.1)),
    "clipped at 0.1": dict(arguments=dict(max_grad_norm=0.1), pair_target=16),
    "not clipped": dict(arguments=dict(max_grad_norm=0.0)),
    "neftune": dict(arguments=dict(neftune_noise_alpha=5.0)),
    "evaluated": dict(more=evaluated, arguments=dict(eval_strategy="steps", eval_steps=2)),
    "the best is loaded": dict(
        more=evaluated,
        arguments=dict(
            eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True
        ),
    ),
    "stopped early": dict(
        more=stopping,
        arguments=dict(
            eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True
        ),
    ),
    "resumed": dict(resume=True, arguments=dict(save_strategy="steps", save_steps=2)),
    "words counted": dict(arguments=dict(include_num_input_tokens_seen="all")),
    "a loss of one's own": dict(more=lambda model: {"compute_loss_func": own_loss}),
    "frozen embeddings": dict(model=lambda: frozen(material.tiny_llama, "embed_tokens"), pair_target=16),
    "tied embeddings": dict(model=material.tied),
    "gpt2": dict(model=material.gpt2),
    "qwen": dict(model=material.qwen, pair_target=16),
    "mistral": dict(model=material.mistral),
    "gemma": dict(model=material.gemma),
    "phi": dict(model=material.phi),
    "gpt-neox": dict(model=material.neox),
    "classes": dict(model=material.classifier, data=material.classes, collator=lambda: with_bias, pair_target=16),
    "masked words": dict(
        model=material.bert, data=lambda rows: [{"input_ids": row["input_ids"]} for row in map(
            Sentences(rows).__getitem__, range(len(rows)))],
        collator=lambda: transformers.DataCollatorForLanguageModeling(material.tokenizer(), mlm_probability=0.3),
    ),
    "from words to words": dict(
        trainer=transformers.Seq2SeqTrainer, config=transformers.Seq2SeqTrainingArguments, model=material.t5,
        pair_target=16,
    ),
    "pictures": dict(
        model=material.vit, data=material.pictures, collator=None, arguments=dict(remove_unused_columns=False),
        pair_target=16,
    ),
}  # fmt: skip

# --- PEFT ---


def adapted(config: peft.PeftConfig, base: Callable[[], torch.nn.Module] = material.tiny_llama) -> torch.nn.Module:
    return material.seeded(lambda: peft.get_peft_model(base(), config), seed=2)


def lora_plus(model: torch.nn.Module) -> Mapping[str, Any]:
    from peft.optimizers import create_loraplus_optimizer

    made = create_loraplus_optimizer(model, torch.optim.AdamW, lr=5e-3, loraplus_lr_ratio=4.0)
    return {"optimizers": (made, None)}


LINEAR, TASK = {"target_modules": ["q_proj", "v_proj"]}, {"task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
    "LoRA with dropout": lambda: peft.LoraConfig(r=4, lora_dropout=0.1, **LINEAR),
    "DoRA": lambda: peft.LoraConfig(r=4, use_dora=True, **LINEAR),
    "rsLoRA": lambda: peft.LoraConfig(r=4, use_rslora=True, **LINEAR),
    "LoRA and a head": lambda: peft.LoraConfig(r=4, modules_to_save=["lm_head"], **LINEAR),
    "LoRA and biases": lambda: peft.LoraConfig(r=4, bias="all", **LINEAR),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": lambda: peft.LoHaConfig(r=4, **LINEAR),
    "LoKr": lambda: peft.LoKrConfig(r=4, **LINEAR),
    "VeRA": lambda: peft.VeraConfig(r=4, **LINEAR),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=8, **LINEAR),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **TASK),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **TASK),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, **TASK),
}
ADAPTERS_OF_TWO = ("LoRA", "DoRA", "IA3", "LoKr", "prompt tuning", "LoRA and a head")
PEFT: dict[str, dict[str, Any]] = {
    name: dict(model=partial(lambda make: adapted(make()), make), pair_target=16 * (name in ADAPTERS_OF_TWO))
    for name, make in ADAPTERS.items()
}
PEFT["LoRA+"] = dict(model=lambda: adapted(ADAPTERS["LoRA"]()), more=lora_plus)


# --- TRL ---


def length_of(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(set(one.split()))) for one in completions]


def trl_cases() -> dict[str, dict[str, Any]]:
    import trl

    def read(model: torch.nn.Module) -> Mapping[str, Any]:
        return {"processing_class": material.tokenizer()}

    def rewarded(model: torch.nn.Module) -> Mapping[str, Any]:
        made = material.tokenizer()
        made.padding_side = "left"
        return {"processing_class": made, "reward_funcs": length_of}

    def with_lora(model: torch.nn.Module) -> Mapping[str, Any]:
        return {**read(model), "peft_config": peft.LoraConfig(r=4, **LINEAR)}

    def rewarded_lora(model: torch.nn.Module) -> Mapping[str, Any]:
        return {**rewarded(model), "peft_config": peft.LoraConfig(r=4, **LINEAR)}

    alike = {"model": material.stored, "collator": None, "more": read}
    sft = {**alike, "trainer": trl.SFTTrainer, "config": trl.SFTConfig, "data": material.texts}
    dpo = {
        **alike, "trainer": trl.DPOTrainer, "config": trl.DPOConfig, "data": material.pairs,
        "truth": half_of_the_rows, "kind": "dpo",
    }  # fmt: skip
    kto = {**alike, "trainer": trl.KTOTrainer, "config": trl.KTOConfig, "data": material.judged, "kind": "kto"}
    reward = {
        **alike, "trainer": trl.RewardTrainer, "config": trl.RewardConfig, "data": material.pairs,
        "model": material.scorer, "truth": half_of_the_rows, "kind": "reward",
    }  # fmt: skip
    grpo = {
        **alike, "trainer": trl.GRPOTrainer, "config": trl.GRPOConfig, "data": material.prompts, "more": rewarded,
        "kind": "grpo",
    }  # fmt: skip
    plain, short = {"bf16": False}, {"bf16": False, "max_length": 64}
    drawn = {"bf16": False, "num_generations": 2, "max_completion_length": 6}
    packed = {**short, "per_device_train_batch_size": 2, "packing": True}
    return {
        "SFT": dict(sft, kind="lm", arguments=short, pair_target=16),
        "SFT, packing": dict(
            sft, kind="packing", arguments={**packed, "max_length": 32}, truth=beginnings, target=2, pair_target=32
        ),
        "SFT, packing, wrapped": dict(
            sft, arguments={**packed, "packing_strategy": "wrapped", "max_length": 32}, kind="packing", pair_target=8
        ),
        "SFT, padding-free": dict(
            sft, kind="padding_free", arguments={**plain, "padding_free": True, "max_length": None}, truth=beginnings,
            pair_target=16,
        ),
        "SFT, completions": dict(sft, data=material.completions, arguments=short, kind="lm"),
        "SFT, LoRA": dict(sft, more=with_lora, arguments=short, pair_target=16),
        "SFT, accumulation of 2": dict(sft, arguments={**short, "gradient_accumulation_steps": 2}, kind="lm"),
        "DPO": dict(dpo, arguments=short, pair_target=16),
        "DPO, LoRA": dict(dpo, more=with_lora, arguments=short, pair_target=16),
        "DPO, ipo": dict(dpo, arguments={**short, "loss_type": "ipo"}),
        "DPO, hinge": dict(dpo, arguments={**short, "loss_type": "hinge", "beta": 0.3}),
        "reward": dict(reward, arguments=short, pair_target=16),
        "KTO": dict(kto, arguments=short, pair_target=16),
        "KTO, LoRA": dict(kto, more=with_lora, arguments=short),
        "GRPO": dict(grpo, arguments=drawn, pair_target=16),
        "GRPO, accumulation of 2": dict(grpo, arguments={**drawn, "gradient_accumulation_steps": 2}, pair_target=32),
        "GRPO, one generation for 4 steps": dict(grpo, arguments={**drawn, "steps_per_generation": 4}),
        "GRPO, LoRA": dict(grpo, more=rewarded_lora, arguments=drawn),
        "GRPO, an epoch": dict(
            grpo, arguments={**drawn, "max_steps": -1, "num_train_epochs": 1}, data=lambda r: material.prompts(r[:8])
        ),
        "RLOO": dict(
            grpo, trainer=trl.RLOOTrainer, config=trl.RLOOConfig, arguments=drawn, kind="rloo",
        ),
        "reward, no gradient checkpointing": dict(reward, arguments={**plain, "gradient_checkpointing": False}),
    }  # fmt: skip


def all_cases() -> dict[str, Case]:
    return {name: Case(name, **settings) for name, settings in {**PLAIN, **PEFT, **trl_cases()}.items()}
