"""How many examples a Trainer's batches hold, counted where they are drawn.

A collator may put many examples into one row (packing, padding-free, flattening) or two rows into one example
(preference pairs), so the first dimension of a tensor is not their number. The dataloader's collate_fn is handed the
drawn rows of the dataset: their number travels with the batch, out of worker processes too, and is taken off it before
the Trainer sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_pt_utils import find_batch_size

DRAWN = "volunteer_kit_examples_drawn"  # in a batch, from the collator to the Trainer
PACKED = "seq_lengths"  # TRL's column: how long each of the sequences in a packed row is


def examples_in(rows: Sequence[Any]) -> int:
    """Examples that these rows of a dataset hold: one each, and in a packed row all that were put into it."""
    return sum(map(_examples_of_a_row, rows))


def _examples_of_a_row(row: Any) -> int:
    if not isinstance(row, Mapping):
        return 1
    if row.get(PACKED) is not None:
        return max(1, len(row[PACKED]))
    positions = row.get("position_ids")
    if positions is None:
        return 1
    places = torch.as_tensor(positions)
    if places.ndim != 1:  # those of pictures have several numbers each
        return 1
    begins = (places == 0) & (torch.cat([places.new_ones(1), places[:-1]]) != 0)
    return max(1, int(begins.sum()))


class CountingCollator:
    """A collate_fn whose batches say how many examples were drawn for them.

    :param collate: the dataloader's own
    """

    def __init__(self, collate: Callable[[Any], Any]):
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        drawn = examples_in(rows) if isinstance(rows, (list, tuple)) else None  # else batches are made elsewhere
        batch = self.collate(rows)
        if drawn is not None and isinstance(batch, MutableMapping):
            batch[DRAWN] = torch.tensor([drawn])  # accelerate's dispatcher joins tensors only
        return batch


class ExampleCounter:
    """Counts the examples of the batches that a Trainer takes from its dataloader.

    :param dataloader: of this train(); its batches are counted from now on
    """

    def __init__(self, trainer: Trainer, dataloader: Any):
        self._trainer, self._dataloader = trainer, dataloader
        self._base = getattr(dataloader, "base_dataloader", dataloader)  # accelerate's hold the true one
        collate = getattr(self._base, "collate_fn", None)
        if collate is not None and not isinstance(collate, CountingCollator):
            self._base.collate_fn = CountingCollator(collate)
        self._drawn = 0

    def counted(self, batches: Iterator) -> Iterator:
        """The same batches, as the collator made them."""
        for batch in batches:
            self._drawn += self._take_off(batch)
            yield batch

    def take(self) -> int:
        """Examples of the batches that were taken since the last call."""
        drawn, self._drawn = self._drawn, 0
        return drawn

    def of_a_pass(self) -> int:
        """Examples of all of this peer's data once. The Trainer's own number is of rows."""
        dataset = getattr(self._base, "dataset", None)
        batch_size = getattr(getattr(self._base, "batch_sampler", None), "batch_size", None)
        if self._generates and batch_size and hasattr(dataset, "__len__"):
            return len(self._dataloader) * (batch_size // self._slices)  # a row may be drawn several times
        if PACKED in (getattr(dataset, "column_names", None) or ()) and hasattr(dataset, "__len__"):
            return sum(max(1, len(lengths)) for lengths in dataset.with_format(None)[PACKED])
        return self._trainer.num_examples(self._dataloader)

    def steps_of_generating(self, target: int) -> int | None:
        """Steps of `target` examples each in a pass of a Trainer that draws each prompt several times; None: it does
        not. The loader leaves out prompts that fill no batch of this peer's, so that its length goes by that batch:
        counted as with a batch of the whole step, it is the same for all."""
        sampler = getattr(getattr(self._base, "batch_sampler", None), "sampler", None)
        prompts, each = getattr(sampler, "num_samples", None), getattr(sampler, "mini_repeat_count", None)
        if not self._generates or prompts is None or each is None:
            return None
        times = max(1, getattr(sampler, "repeat_count", 1) // self._slices)  # that what was generated is learnt from
        return max(1, prompts * each // target) * times

    @property
    def _generates(self) -> bool:
        return hasattr(self._trainer, "_buffered_inputs")

    @property
    def _slices(self) -> int:
        """TRL's trainers that generate take a batch for several steps from the loader, and one slice of it a step."""
        if not self._generates:
            return 1
        args = self._trainer.args
        return getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps

    def _take_off(self, batch: Any) -> int:
        drawn = batch.pop(DRAWN, None) if isinstance(batch, MutableMapping) else None
        if drawn is None and isinstance(batch, list) and batch and all(isinstance(row, Mapping) for row in batch):
            drawn = examples_in(batch)  # as they were drawn, for a Trainer that collates itself
        if drawn is None:
            drawn = find_batch_size(batch) or self._trainer._train_batch_size
        return max(1, int(drawn) // self._slices)
