"""A sample is an example as it is drawn, however a collator lays examples into rows."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer

from benchmarks.trainer_parts.material import Sentences, pad
from tests.trainers import At, callback_of, make
from volunteer_kit.training.hf_examples import examples_in
from volunteer_kit.training.hf_trainer import SwarmCallback


@pytest.mark.parametrize(
    ("rows", "examples"),
    [
        ([{"input_ids": [1, 2]}, {"input_ids": [3]}], 2),
        ([{"input_ids": [1, 2, 3], "seq_lengths": [2, 1]}, {"input_ids": [4], "seq_lengths": [1]}], 3),
        ([{"input_ids": [1, 2, 3, 4, 5], "position_ids": [0, 1, 0, 1, 2]}], 2),
        ([{"input_ids": [1, 2, 3], "position_ids": torch.tensor([4, 5, 6])}], 1),  # the rest of a cut one
        ([{"input_ids": [1, 2, 3], "position_ids": torch.zeros(3, 3)}], 1),  # places in a picture
        ([{"input_ids": [], "seq_lengths": []}], 1),
        (["text", ("a", "b")], 2),
        ([], 0),
    ],
)
def test_rows_of_a_dataset_hold_as_many_examples_as_were_put_into_them(rows, examples):
    assert examples_in(rows) == examples


def as_lists(row: int) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in Sentences([row])[0].items()}


def packed(rows: int) -> list[dict[str, list[int]]]:
    """Two, three, two, three ... sentences in a row."""
    found, first = [], 0
    for number in range(rows):
        parts = [as_lists(row)["input_ids"] for row in range(first, first + 2 + number % 2)]
        first += len(parts)
        words = sum(parts, [])
        found.append({"input_ids": words, "labels": words, "seq_lengths": [len(part) for part in parts]})
    return found


def unpacked(rows):
    return pad([{name: torch.tensor(row[name]) for name in ("input_ids", "labels")} for row in rows])


def in_pairs(rows):
    """Each example is two rows of the batch, as of those who prefer one to the other."""
    return pad([*rows, *rows])


class OfRows(Trainer):
    """It is given the dataset's rows, and collates them itself."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, pad(inputs), *args, **kwargs)

    def _prepare_inputs(self, inputs):
        return inputs


class Generating(OfRows):
    """As TRL's: the loader's batch is of two steps, and each takes one slice of it."""

    _buffered_inputs = None

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, inputs[::2], *args, **kwargs)


def rows_as_they_are(rows):
    return rows


FLAT = [as_lists(row) for row in range(96)]
KINDS = {
    "flattened, by a worker": (
        dict(data_collator=DataCollatorWithFlattening(), train_dataset=FLAT), dict(dataloader_num_workers=1)
    ),
    "packed": (dict(data_collator=unpacked, train_dataset=packed(60)), {}),
    "pairs": (dict(data_collator=in_pairs), {}),
    "rows": (dict(data_collator=rows_as_they_are), dict(kind=OfRows)),
    "generated": (dict(data_collator=rows_as_they_are), dict(kind=Generating, gradient_accumulation_steps=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_step_holds_the_examples_that_were_drawn(tmp_path, monkeypatch, name):
    """Rows counted, a step of 8 would hold 2 to 3 times as many examples, or half of them."""
    more, settings = KINDS[name]
    held = []
    monkeypatch.setattr(SwarmCallback, "on_report", lambda self, report: held.append(report.samples))
    settings = {"per_device_train_batch_size": 4, **settings}
    make(tmp_path, 8, more=more, max_steps=2, remove_unused_columns=False, **settings).train()
    assert len(held) == 2
    if name == "packed":
        assert all(8 <= samples <= 12 for samples in held), held  # of four rows
    else:
        assert held == [8, 8]


def test_rows_longer_than_the_model_says_it_reads_weigh_as_full_ones(tmp_path):
    swarm, weights = make(tmp_path, 4, max_steps=1), []
    callback = callback_of(swarm)
    callback.on_report = lambda report: weights.extend(
        callback.member.weight_of(*counted) for counted in [(4, 1000.0), (9, 1e6), (9, None), (2, 12.0)]
    )
    swarm.train()
    assert weights == [4.0, 4.0, 4.0, 12.0 / callback_longest(swarm)]


def callback_longest(trainer) -> int:
    return trainer.model.config.max_position_embeddings


class Repeating(torch.utils.data.Sampler):
    """As TRL's of trainers that generate: prompts that fill no batch of this peer's are left out."""

    def __init__(self, prompts: int, each: int, batch: int, repeats: int):
        self.num_samples, self.mini_repeat_count, self.batch_size, self.repeat_count = prompts, each, batch, repeats

    def __iter__(self):
        for first in range(0, self.num_samples - self.batch_size + 1, self.batch_size):
            for _ in range(self.repeat_count):
                for prompt in range(first, first + self.batch_size):
                    yield from [prompt] * self.mini_repeat_count

    def __len__(self):
        return self.num_samples // self.batch_size * self.batch_size * self.mini_repeat_count * self.repeat_count


class Drawing(OfRows):
    """One that generates, two completions of each prompt."""

    _buffered_inputs = None

    def get_train_dataloader(self):
        own = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
        sampler = Repeating(len(self.train_dataset), 2, own // 2, self.args.gradient_accumulation_steps)
        loader = torch.utils.data.DataLoader(self.train_dataset, own, sampler=sampler, collate_fn=rows_as_they_are)
        return self.accelerator.prepare(loader)


def test_peers_of_any_batch_that_generate_take_as_many_steps_in_a_pass(tmp_path):
    """17 prompts, of which batches of 2, 4, 8 and 16 completions leave out 0, 1, 1 and 1: a schedule's end would differ
    from peer to peer, and with it the fingerprint. A plain Trainer of 16 takes two steps."""
    steps, fingerprints = [], set()
    for number, (batch, accumulation) in enumerate([(2, 1), (4, 1), (2, 4), (16, 1)]):
        more = dict(data_collator=rows_as_they_are, train_dataset=Sentences(range(17)))
        trainer = make(
            tmp_path / str(number), 16, more=more, kind=Drawing, remove_unused_columns=False, num_train_epochs=1,
            per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        begun = At(1, lambda control, trainer=trainer: fingerprints.add(callback_of(trainer).member.fingerprint))
        trainer.add_callback(begun)
        trainer.train()
        steps.append(trainer.state.global_step)
    assert steps == [2, 2, 2, 2] and len(fingerprints) == 1
