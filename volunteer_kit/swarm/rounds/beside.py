"""Average a second vector beside the gradients: marks of the parameters that had one, and the model's buffers.

A parameter that had no gradient is averaged as zeros. An optimizer that is given zeros decays the parameter and moves
it on by its momentum, where torch skips one without a gradient: members have to know the parameters that nobody used.
And the running statistics of a BatchNorm differ between members as their samples do. Both are few numbers, averaged in
the round of the gradients with the same weights, but uncompressed.

A number x travels as [1, x, 1] and is read as the mean of x over the mean of 1. A reducer that is lost leaves zeros: x
counts only where both ends came, wherever the slice of that reducer began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from volunteer_kit.swarm.codecs.wire import FLOAT32

MOST_COUNTED = 2**30  # a counter that is said to be beyond it has not counted
ENDS = 3  # numbers that one travels as
ROUNDING = 1e-6  # of a mean of equal numbers
VARIANCE = "running_var"  # of all of torch's norms
IS_WEIGHT = "qweight"  # a buffer that holds a quantized weight, as GPTQ's and AWQ's layers have: it is never trained


BUFFERS = "buffers"  # what they are called among the tensors of a checkpoint


def run_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """(full name, module, name in it) of what all peers of a run share: persistent buffers of floating point, and
    counters (single whole numbers). Tables of whole numbers, truth values and all that belongs to a quantized weight
    are each peer's own; so are caches, which are not persistent. A model of shapes alone has the same ones."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        if getattr(module, IS_WEIGHT, None) is not None:
            continue
        for name, buffer in module.named_buffers(recurse=False):
            is_counter = buffer.ndim == 0 and buffer.dtype != torch.bool and not buffer.is_complex()
            is_own = name in module._non_persistent_buffers_set or id(buffer) in seen
            if not is_own and (buffer.is_floating_point() or is_counter):
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, module, name


def shared_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Those of them that are shared where no run file says what the model is: not those with values that are not
    finite."""
    return (place for place in run_buffers(model) if _is_finite(getattr(place[1], place[2])))


def buffer_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    """Those of `run_buffers`, by name."""
    return {name: getattr(module, own).shape for name, module, own in run_buffers(model)}


def initial_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of their values, by name, each (N,) float32 on the CPU. Call before anything has moved them."""
    return {name: _flat(getattr(module, own)).clone() for name, module, own in run_buffers(model)}


class HeldBuffers:
    """The buffers that all peers hold of a model, at one that trains nothing and has no model: a monitor.

    :param numel: values of all together

    `shared`: (N,) float32 on the CPU, all of them one after another; part of the state that a joiner takes.
    """

    def __init__(self, numel: int):
        self.shared = torch.zeros(numel, **FLOAT32)

    @classmethod
    def of_run(cls, model: torch.nn.Module) -> HeldBuffers:
        """:param model: the run's; shapes are enough"""
        return cls(sum(shape.numel() for shape in buffer_shapes(model).values()))

    def __len__(self) -> int:
        """Values of all together."""
        return self.shared.numel()

    def send(self) -> torch.Tensor:
        """(N,) what this peer gives into a round."""
        return self.shared

    def take(self, values: torch.Tensor) -> None:
        """With a step: what all hold from now on."""
        self.shared.copy_(values)

    def arrive(self) -> None:
        """Into the model, where there is one."""


class SharedBuffers(HeldBuffers):
    """A model's buffers, and what all peers hold of them: the mean of the members of the last round, weighted as their
    gradients; of a counter the whole number next to it.

    :param since: of a run from a file, `initial_buffers` of its model: what is shared is how far they have moved since.
        The monitor has no base, and begins with zeros. None: what is shared is their values
    """

    def __init__(self, model: torch.nn.Module, since: Mapping[str, torch.Tensor] | None = None):
        places = shared_buffers(model) if since is None else run_buffers(model)
        self._places = [place for place in places if since is None or place[0] in since]
        first = [torch.zeros(n, **FLOAT32) if since is None else since[p[0]] for p, n in self._with_sizes()]
        self._first = torch.cat([torch.empty(0, **FLOAT32), *first])
        self._stays = ~self._first.isfinite()  # masks of infinities, which nobody moves
        self._first[self._stays] = 0.0
        super().__init__(self._first.numel())
        self.shared.copy_(torch.nan_to_num(self._read(), 0.0, 0.0, 0.0))
        self._sent = self._before = self._arrived = self.shared.clone()
        self._is_of_a_round = False  # what has not arrived yet

    @property
    def shapes(self) -> list[tuple[str, list[int]]]:
        """Name and shape of each, which must be equal on all peers."""
        return [(name, list(getattr(module, own).shape)) for name, module, own in self._places]

    def send(self) -> torch.Tensor:
        """(N,) what the model's own are now."""
        self._sent = self._read()
        return self._sent

    def gave(self, values: torch.Tensor) -> None:
        """Before `take`: what a round has of us, where that is a mean of several that were sent, (N,)."""
        self._sent = values

    def take(self, values: torch.Tensor) -> None:
        super().take(values)
        self._before, self._is_of_a_round = self._sent, True

    @torch.no_grad()
    def arrive(self) -> None:
        """Into the model. What its own have moved since they were sent, while the round was on its way, stays on top;
        that of a peer which is alone is what it sent, and is left as it is. A variance is never negative, whatever a
        member or a donor sent."""
        if torch.equal(self.shared, self._arrived):
            return
        sizes = [size for _, size in self._with_sizes()]
        tensors = (self.shared, self._before, self._read(), self._first, self._stays)
        parts = (torch.split(tensor, sizes) for tensor in tensors)
        for (_, module, name), new, sent, now, first, stays in zip(self._places, *parts, strict=True):
            own = getattr(module, name)
            if not torch.allclose(new, sent, rtol=ROUNDING, atol=0.0):  # a constant stays what it is
                moved = first + (new + (now - sent) if not torch.equal(now, sent) and self._is_of_a_round else new)
                moved = torch.where(stays, _flat(own), moved.clamp(min=0.0) if name == VARIANCE else moved)
                own.copy_(_fitting(moved, own).view(own.shape))
        self._arrived = self._before = self.shared.clone()
        self._is_of_a_round = False

    def _with_sizes(self) -> Iterator[tuple[tuple[str, torch.nn.Module, str], int]]:
        return ((place, getattr(place[1], place[2]).numel()) for place in self._places)

    def _read(self) -> torch.Tensor:
        read = [_flat(getattr(module, name)) for _, module, name in self._places]
        moved = torch.cat([torch.empty(0, **FLOAT32), *read]) - self._first
        moved[self._stays] = 0.0
        return moved


def put_buffers(tensors: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """How far a run's buffers have moved, by a checkpoint's `tensors`, into its model as it began."""
    if BUFFERS in tensors:
        buffers = SharedBuffers(model, initial_buffers(model))
        buffers.take(tensors[BUFFERS])
        buffers.arrive()


def _flat(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().reshape(-1).to(**FLOAT32)


def _is_finite(buffer: torch.Tensor) -> bool:
    return buffer.device.type == "meta" or bool(buffer.detach().float().isfinite().all())


def _fitting(values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return values if buffer.is_floating_point() else values.round().clamp(-MOST_COUNTED, MOST_COUNTED)


@dataclass(frozen=True)
class CameBeside:
    """What a step has to know of its round beside the gradients.

    :param unused: of each parameter, whether nobody had a gradient; None: its number was lost with a reducer; () where
        that is not told
    :param buffers: (N,) means of the model's; None: they are not shared
    """

    unused: tuple[bool | None, ...] = ()
    buffers: torch.Tensor | None = None


class BesideGradients:
    """One more tensor of a round, (M, 3): of each parameter whether this peer had a gradient of it, then its buffers.

    :param num_parameters: in the optimizer's order
    :param buffers: of the model, if they are shared
    """

    def __init__(self, num_parameters: int, buffers: HeldBuffers | None = None):
        self._used, self._buffers = torch.zeros(num_parameters, dtype=torch.bool, device="cpu"), buffers

    def make_tensor(self) -> torch.Tensor:
        count = len(self._used) + (len(self._buffers) if self._buffers is not None else 0)
        return torch.zeros(count, ENDS, **FLOAT32)

    def note(self, had_gradient: Sequence[bool]) -> None:
        """Note which parameters had a gradient in a microbatch that is accumulated."""
        self._used |= torch.tensor(had_gradient, dtype=torch.bool, device="cpu")

    def forget(self) -> None:
        self._used.zero_()

    def fill(self, tensor: torch.Tensor) -> None:
        """What we give into a round."""
        own = [self._used.to(tensor.dtype), *([] if self._buffers is None else [self._buffers.send()])]
        tensor.fill_(1.0)
        tensor[:, 1] = torch.cat(own)
        tensor[~tensor[:, 1].isfinite()] = 0.0  # not given, or the whole would be refused: the others' mean counts

    def read(self, tensor: torch.Tensor) -> CameBeside:
        """Read the average of a round. Lost buffers stay as they were."""
        came, values = _read(tensor)
        count, buffers = len(self._used), None
        if self._buffers is not None and len(self._buffers):
            is_new = came[count:] & values[count:].isfinite()
            buffers = torch.where(is_new, values[count:], self._buffers.shared)
        told = zip(came[:count].tolist(), (values == 0)[:count].tolist(), strict=True)
        return CameBeside(tuple(is_unused if is_told else None for is_told, is_unused in told), buffers)


def _read(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(M, 3) -> which came, (M,); and the numbers, (M,)."""
    first, values, last = tensor.detach().unbind(1)
    return (first > 0) & (first == last), values / first
