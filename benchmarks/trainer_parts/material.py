"""What the Trainer's benchmark trains: a tiny Llama from a config, sentences of unequal lengths with a rule in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, SHORTEST, LONGEST = 64, 4, 24
IGNORED = -100  # a label that no loss counts


def tiny_llama(hidden: int = 32, layers: int = 2) -> LlamaForCausalLM:
    """The same on every peer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
                num_attention_heads=2, max_position_embeddings=2 * LONGEST,
            )
        )  # fmt: skip


def with_adapters(model: LlamaForCausalLM, rank: int) -> PeftModel:
    """The same on every peer, too: who begins with others' adapters has them to download first."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))


class Sentences(torch.utils.data.Dataset):
    """Row `i` of `rows`: counts up from a word that is `i`'s own, in steps that are as well. No row is another."""

    def __init__(self, rows: Sequence[int]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        row = self.rows[place]
        length = SHORTEST + row * 7 % (LONGEST - SHORTEST)
        start = torch.tensor([row // WORDS % WORDS, row % WORDS])  # its name
        rest = (row + (1 + row % 3) * torch.arange(length)) % WORDS
        words = torch.cat([start, rest])  # (T,)
        return {"input_ids": words, "labels": words.clone()}


def row_of(words: torch.Tensor) -> int:
    return int(words[0]) * WORDS + int(words[1])


def pad(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """-> input_ids, labels, attention_mask (B, T)."""
    ids = [row["input_ids"] for row in rows]
    together = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": together(ids, batch_first=True),
        "labels": together([row["labels"] for row in rows], batch_first=True, padding_value=IGNORED),
        "attention_mask": together([torch.ones_like(one) for one in ids], batch_first=True),
    }
