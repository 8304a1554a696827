"""The model on several equal devices of one machine, in one process: one peer for the swarm.

Each device computes its part of the microbatch in a thread of its own; the gradients are summed on the first, weighted
so that they are those of the whole microbatch's mean loss.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

ComputeLoss = Callable[[torch.nn.Module, Any], torch.Tensor]


def parameter_version(model: torch.nn.Module) -> int:
    """A number that grows with every in-place change of the model's parameters, whoever makes it."""
    return sum(parameter._version for parameter in model.parameters())


def parts_of(batch: Any, count: int) -> list[tuple[Any, int]]:
    """A NamedTuple of tensors (B, ...) and of other things -> at most `count` of them, with how many samples each has.

    Sizes differ by one at most; a device for which no sample is left gets no part. What is no tensor stays whole.
    """
    samples = len(batch.text)
    ends = [samples * number // count for number in range(count + 1)]
    parts = []
    for start, end in zip(ends, ends[1:], strict=False):
        if end > start:
            tensors = {name: value[start:end] for name, value in batch._asdict().items() if torch.is_tensor(value)}
            parts.append((batch._replace(**tensors), end - start))
    return parts


class Replicas:
    """`compute_gradients` of a Trainer, over several devices; the first is the one that its model is on.

    :param devices: of torch, all of a kind: ("cuda:0", "cuda:1"), as in DevicePlan.devices
    :param compute_loss: (model, batch) -> scalar mean loss; moves the batch to the model's device
    :param precision: "fp32", "bf16" or "fp16"
    """

    def __init__(self, devices: Sequence[str | torch.device], compute_loss: ComputeLoss, precision: str = "fp32"):
        self.devices = tuple(torch.device(device) for device in devices)
        self._compute_loss, self._precision = compute_loss, precision
        self._copies: list[torch.nn.Module] = []  # on all devices but the first
        self._copied = -1  # parameter_version of what the copies hold
        self._threads: ThreadPoolExecutor | None = None  # begun late: processes may be forked before

    def __call__(self, model: torch.nn.Module, batch: Any, scale: float = 1.0) -> torch.Tensor:
        """Set .grad of the model's parameters. :returns: the microbatch's mean loss, on the first device"""
        copies, parts = self._up_to_date(model), parts_of(batch, len(self.devices))
        samples = sum(size for _, size in parts)
        work = [(each, part, size / samples, scale) for each, (part, size) in zip(copies, parts, strict=False)]
        losses = self._side_by_side(work)
        with torch.no_grad():
            for each, *_ in work[1:]:
                _add_gradients(model, each)
            return torch.stack([loss.to(losses[0].device) for loss in losses]).sum()

    def close(self) -> None:
        """End the threads and forget the copies."""
        if self._threads is not None:
            self._threads.shutdown()
        self._threads, self._copies, self._copied = None, [], -1

    def _up_to_date(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        """The model and its copies, equal in parameters, without gradients in the copies."""
        if not self._copies:
            gradients = [parameter.grad for parameter in model.parameters()]
            model.zero_grad(set_to_none=True)  # deepcopy would copy them along
            self._copies = [copy.deepcopy(model).to(device) for device in self.devices[1:]]
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
        version = parameter_version(model)
        for each in self._copies:
            each.zero_grad(set_to_none=True)
            if hasattr(model, "checkpointing"):
                each.checkpointing = model.checkpointing
            if version != self._copied:
                with torch.no_grad():
                    torch._foreach_copy_(list(each.parameters()), list(model.parameters()))
        self._copied = version
        return [model, *self._copies]

    def _side_by_side(self, work: list[tuple]) -> list[torch.Tensor]:
        """Every part at once, the first in this thread. Waits for all, then raises what one of them raised."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(max(1, len(self.devices) - 1), thread_name_prefix="replica")
        others = [self._threads.submit(self._one, *each) for each in work[1:]]
        first: Future = Future()
        try:
            first.set_result(self._one(*work[0]))
        except BaseException as error:
            first.set_exception(error)
        errors = [error for error in (each.exception() for each in (first, *others)) if error is not None]
        for error in errors:
            traceback.clear_frames(error.__traceback__)  # they hold the activations of a part that did not fit
        if errors:
            for model, *_ in work[1:]:
                model.zero_grad(set_to_none=True)
            raise errors[0]
        return [each.result() for each in (first, *others)]

    def _one(self, model: torch.nn.Module, part: Any, share: float, scale: float) -> torch.Tensor:
        """Forward and backward of one part. Autocast and the current device belong to a thread."""
        device = next(model.parameters()).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            with self._autocast(device):
                loss = self._compute_loss(model, part) * share
            (loss * scale).backward()
        return loss.detach()

    def _autocast(self, device: torch.device):
        if self._precision == "fp32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.float16 if self._precision == "fp16" else torch.bfloat16)


def _add_gradients(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Add the other's gradients to the model's, on the model's device."""
    ours, theirs = [], []
    for parameter, another in zip(model.parameters(), other.parameters(), strict=True):
        if another.grad is None:
            continue
        found = another.grad.to(parameter.device, non_blocking=True)
        if parameter.grad is None:
            parameter.grad = found.clone()
        else:
            ours.append(parameter.grad)
            theirs.append(found)
    if ours:
        torch._foreach_add_(ours, theirs)
