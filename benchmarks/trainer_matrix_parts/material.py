"""The matrix trains tiny models of several kinds, with a tokenizer and texts that are made here."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import datasets
import torch
import transformers

from benchmarks.trainer_parts.material import LONGEST, WORDS, Sentences, pad, tiny_llama

__all__ = ["Sentences", "pad", "tiny_llama"]
WORD = "w{}"
SPECIAL = ("<pad>", "<eos>", "<unk>", "<mask>")
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [*SPECIAL, *(WORD.format(number) for number in range(WORDS - len(SPECIAL)))]
    inner = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", mask_token="<mask>"
    )
    made.chat_template = TEMPLATE
    return made


def seeded(make, seed: int = 1):
    """The same on every peer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def of(config: type, model: type, **settings: Any):
    """:returns: a function that makes a tiny model of a kind"""
    small = {
        "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 4 * LONGEST, "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": 1,
    }  # fmt: skip
    return lambda: seeded(lambda: model(config(**{**small, **settings})))


llama = of(transformers.LlamaConfig, transformers.LlamaForCausalLM)
tied = of(transformers.LlamaConfig, transformers.LlamaForCausalLM, tie_word_embeddings=True)
qwen = of(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, num_key_value_heads=1)
mistral = of(transformers.MistralConfig, transformers.MistralForCausalLM, num_key_value_heads=2)
gemma = of(transformers.GemmaConfig, transformers.GemmaForCausalLM, num_key_value_heads=1, head_dim=16)
phi = of(transformers.PhiConfig, transformers.PhiForCausalLM)
neox = of(transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM)
gpt2 = of(
    transformers.GPT2Config, transformers.GPT2LMHeadModel, n_embd=32, n_layer=2, n_head=2, n_positions=4 * LONGEST
)
bert = of(transformers.BertConfig, transformers.BertForMaskedLM)
scorer = of(transformers.LlamaConfig, transformers.LlamaForSequenceClassification, num_labels=1)


@functools.cache
def folder_of(make: Callable[[], transformers.PreTrainedModel]) -> str:
    folder = tempfile.mkdtemp(prefix="matrix-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make().save_pretrained(folder)
    return folder


def stored() -> transformers.PreTrainedModel:
    """`llama`, read from a folder, which TRL reads its reference model from."""
    return transformers.LlamaForCausalLM.from_pretrained(folder_of(llama), trust_remote_code=False)


def classifier():
    return of(transformers.BertConfig, transformers.BertForSequenceClassification, num_labels=3)()


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    return seeded(lambda: transformers.T5ForConditionalGeneration(config))


def vit():
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8,
        num_labels=3,
    )  # fmt: skip
    return seeded(lambda: transformers.ViTForImageClassification(config))


def words(row: int, length: int | None = None) -> str:
    """Text `row`: 4 to 15 words; no two rows are equal."""
    length = 4 + row * 5 % 12 if length is None else length
    return " ".join(WORD.format((row + place * (1 + row % 3)) % (WORDS - len(SPECIAL))) for place in range(length))


def texts(rows: Sequence[int]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": [words(row) for row in rows]})


def completions(rows: Sequence[int]) -> datasets.Dataset:
    return datasets.Dataset.from_dict(
        {"prompt": [words(row, 4) for row in rows], "completion": [" " + words(row + 7) for row in rows]}
    )


def pairs(rows: Sequence[int]) -> datasets.Dataset:
    """Preferences."""
    return datasets.Dataset.from_dict(
        {
            "prompt": [words(row, 4) for row in rows],
            "chosen": [" " + words(row + 3) for row in rows],
            "rejected": [" " + words(row + 11) for row in rows],
        }
    )


def judged(rows: Sequence[int]) -> datasets.Dataset:
    made = completions(rows)
    return made.add_column("label", [row % 2 == 0 for row in rows])


def prompts(rows: Sequence[int]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"prompt": [words(row, 5) for row in rows]})


def pictures(rows: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    return [
        {
            "pixel_values": torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(row)),
            "labels": torch.tensor(row % 3),
        }
        for row in rows
    ]


def classes(rows: Sequence[int]) -> list[dict[str, Any]]:
    return [{"input_ids": Sentences([row])[0]["input_ids"], "labels": row % 3} for row in rows]


class Endless(torch.utils.data.IterableDataset):
    """The sentences again and again, without a length."""

    def __init__(self, rows: Sequence[int]):
        self.rows = rows

    def __iter__(self):
        every = Sentences(self.rows)
        while True:
            yield from (every[place] for place in range(len(every)))


def of_250_words(rows: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    """Longer than tiny_llama says it can read."""
    made = [(row + (1 + row % 3) * torch.arange(250)) % WORDS for row in rows]
    return [{"input_ids": one, "labels": one.clone()} for one in made]
