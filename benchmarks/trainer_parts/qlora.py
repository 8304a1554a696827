"""QLoRA with others: a base in 4 bits, which stays as it is, and adapters, of which gradients travel."""

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from benchmarks.trainer_parts.material import Sentences, pad, tiny_llama
from volunteer_kit import SwarmTrainer, SwarmTrainingArguments

tiny_llama(hidden=128).save_pretrained("base")
quantized = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)
base = LlamaForCausalLM.from_pretrained("base", quantization_config=quantized, trust_remote_code=False)
adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
model = get_peft_model(prepare_model_for_kbit_training(base), adapters)
trainer = SwarmTrainer(
    model=model,
    train_dataset=Sentences(range(512)),
    data_collator=pad,
    args=SwarmTrainingArguments(
        "out",
        per_device_train_batch_size=16,
        max_steps=40,
        learning_rate=1e-2,
        optim="paged_adamw_8bit",
        logging_steps=10,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        hivemind_config={"dht": {}, "opt": {"run_id": "qlora", "target_batch_size": 32}},
    ),
)
trainer.train()
