"""A few samples that every peer of a run can name, and how well a model does on them.

They are the first usable ones of the first shard, in the order in which the source has them. Who judges a state, worker
or monitor, compares two models on the same ones, so that shards that differ from machine to machine do no harm.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch

from volunteer_kit.data.errors import DataError
from volunteer_kit.data.source import SampleName
from volunteer_kit.data.stream import Batch, SampleStream
from volunteer_kit.optim.recipe import parameter_names
from volunteer_kit.runs import RunConfig, build_model, build_stream

MOST, FEWEST = 64, 4
WORK = 2e12  # multiplications and additions of one look: some 20 s on two cores
TRIES = 4  # records looked at for each sample that is wanted; filters leave many out
AT_ONCE = 8  # samples in one batch


def how_many(config: RunConfig) -> int:
    """Samples, the same number for all peers: many for a small model, few for one whose look takes a minute."""
    model = config.model
    weights = 12 * model.depth * model.dim**2  # of the layers, shared ones counted as often as they are used
    one = 2 * weights * (model.text_seq_len + model.image_seq_len)
    return max(FEWEST, min(MOST, int(WORK / one)))


class PublicSamples:
    """(parameters in the optimizer's order) -> nats. The acceptance's PublicLoss; threads may share one.

    It has a model of its own, made with the first look, beside the one that trains: as many bytes as its parameters.
    """

    def __init__(self, config: RunConfig, batch: Batch, device: torch.device | str = "cpu"):
        self._config, self._batch, self._device = config, batch, torch.device(device)
        self._lock = threading.Lock()
        self._model: torch.nn.Module | None = None

    def __len__(self) -> int:
        return len(self._batch.text)

    @torch.no_grad()
    def __call__(self, parameters: Sequence[torch.Tensor]) -> float:
        with self._lock:
            model = self._with(parameters)
            total = 0.0
            for start in range(0, len(self), AT_ONCE):
                text = self._batch.text[start : start + AT_ONCE].to(self._device)  # (B, T)
                codes = self._batch.codes[start : start + AT_ONCE].to(self._device)  # (B, N)
                total += len(text) * model(text, codes).loss.item()
            return total / len(self)

    def _with(self, parameters: Sequence[torch.Tensor]) -> torch.nn.Module:
        if self._model is None:
            self._model = build_model(self._config).to(self._device).eval()
        own = dict(self._model.named_parameters())
        for name, value in zip(parameter_names(self._model), parameters, strict=True):
            own[name].copy_(value)
        return self._model


def public_samples(
    config: RunConfig, stream: SampleStream | None = None, device: torch.device | str = "cpu"
) -> PublicSamples | None:
    """None where the run's data cannot be read on this machine. Reads over the network, for some seconds.

    :param stream: one that is open already; its place is not changed
    """
    opened = None
    try:
        if stream is None:
            stream = opened = build_stream(config, peer_seed=0)
        return PublicSamples(config, _first(stream, how_many(config)), device)
    except (OSError, ValueError, ImportError):  # OSError includes DataError; ValueError RunError: no shards named here
        return None
    finally:
        if opened is not None:
            opened.close()


def _first(stream: SampleStream, count: int) -> Batch:
    """Raises DataError if there is none."""
    names: list[SampleName] = []
    for index in range(TRIES * count):
        name = SampleName(0, 0, index)
        with contextlib.suppress(DataError):
            stream.fetch([name])
            names.append(name)
        if len(names) == count:
            break
        if not names and index >= count:
            raise DataError("None of the first records of the first shard can be used.")
    return stream.fetch(names)
