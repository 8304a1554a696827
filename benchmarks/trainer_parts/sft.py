"""TRL's SFTTrainer with others: a Trainer of another class takes the callback."""

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from benchmarks.trainer_parts.material import WORDS, Sentences, tiny_llama
from volunteer_kit import SwarmCallback

words = Tokenizer(models.WordLevel({f"w{word}": word for word in range(WORDS)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
texts = [" ".join(f"w{word}" for word in row["input_ids"].tolist()) for row in Sentences(range(512))]
trainer = SFTTrainer(
    model=tiny_llama(hidden=128),
    processing_class=PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w0"),
    train_dataset=Dataset.from_dict({"text": texts}),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    args=SFTConfig(
        "out",
        per_device_train_batch_size=16,
        max_steps=40,
        learning_rate=1e-2,
        logging_steps=10,
        save_strategy="no",
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        bf16=False,
    ),
)
trainer.add_callback(SwarmCallback(trainer, {"dht": {}, "opt": {"run_id": "sft", "target_batch_size": 32}}))
trainer.train()
