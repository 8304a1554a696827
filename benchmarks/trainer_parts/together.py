"""A fine-tune as one writes it for oneself; together.py is the same with others."""

from peft import LoraConfig, get_peft_model

from benchmarks.trainer_parts.material import Sentences, pad, tiny_llama
from volunteer_kit import SwarmTrainer as Trainer
from volunteer_kit import SwarmTrainingArguments as TrainingArguments

model = get_peft_model(tiny_llama(), LoraConfig(r=8, target_modules="all-linear"))
trainer = Trainer(
    model=model,
    train_dataset=Sentences(range(512)),
    data_collator=pad,
    args=TrainingArguments(
        "out",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        max_steps=20,
        learning_rate=1e-2,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        hivemind_config={"dht": {}, "opt": {"run_id": "ours", "target_batch_size": 32}},
    ),
)
trainer.train()
