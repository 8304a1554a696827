"""Keep in a node's state the vector that travels beside the gradients: marks of unused parameters, and the model's
buffers.

It is one more parameter of the state, and its gradient is what members give. Its values are the buffers that all peers
hold, so a state that travels has them. No optimizer steps it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch

from volunteer_kit.swarm.codecs.wire import FLOAT32
from volunteer_kit.swarm.rounds.beside import BUFFERS, ENDS, BesideGradients, HeldBuffers
from volunteer_kit.swarm.rounds.weighed import WeighedVector
from volunteer_kit.swarm.sync.config import SyncConfig

Judge = Callable[[Sequence[torch.Tensor], int, Sequence[torch.Tensor], int], "str | None"]

BESIDE: Final = "beside"  # its name among the parameters of a state
# it lies among the parameters, whose norm is the measure of drift: counters of a BatchNorm must not decide that
SMALL: Final = 2.0**-20


class StepBeside:
    """An optimizer as a state's: steps by averaged gradients, and leaves alone what nobody had a gradient of.

    :param behind: the one that steps
    :param beside: (M, 3), its .grad is what came beside the gradients; it keeps the buffers that all peers hold
    """

    def __init__(self, behind: torch.optim.Optimizer, beside: torch.nn.Parameter):
        self.behind, self._beside = behind, beside
        self._parameters = [parameter for group in behind.param_groups for parameter in group["params"]]
        count = len(self._parameters)
        self._held = HeldBuffers(len(beside) - count)
        self._reader = BesideGradients(count, self._held)
        _keep_apart(behind)
        self.state: ChainMap[Any, Any] = ChainMap({}, behind.state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.behind.param_groups

    @property
    def non_negative(self) -> Collection[str]:
        """Names of statistics whose root is taken."""
        return getattr(self.behind, "non_negative", frozenset())

    @torch.no_grad()
    def step(self) -> None:
        came_with = self._beside.grad
        assert came_with is not None
        came_with[:, (0, 2)] = came_with[:, (0, 2)].round()  # ones, but for the rounding of their mean
        self._held.shared.copy_(buffers_in(self._beside, len(self._parameters)))
        came = self._reader.read(came_with)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter, unused in zip(self._parameters, came.unused, strict=True):
            if unused is not False and parameter.grad is not None and not bool(parameter.grad.any()):
                parameter.grad = None
        try:
            self.behind.step()
        finally:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
        if came.buffers is not None:
            self._beside[len(self._parameters) :, 1] = came.buffers * SMALL


def beside_of(count: int, buffers: HeldBuffers) -> torch.nn.Parameter:
    """(M, 3) for a state, with what all peers hold of the buffers.

    :param count: of the parameters, which come first in it
    """
    tensor = torch.zeros(count + len(buffers), ENDS, **FLOAT32)
    tensor[count:, 1] = buffers.shared * SMALL
    return torch.nn.Parameter(tensor)


def vector_with(parameters: Sequence[torch.Tensor], beside: torch.Tensor, rank: int = 0) -> WeighedVector:
    """All that travels: the parameters, then what goes round beside them.

    :param rank: see WeighedVector
    """
    shapes = [tuple(tensor.shape) for tensor in (*parameters, beside)]
    return WeighedVector(shapes, [*(False for _ in parameters), True], SyncConfig.cells, rank)


def buffers_in(beside: torch.Tensor, count: int) -> torch.Tensor:
    """The buffers that all peers hold, (B,).

    :param beside: (M, 3)
    :param count: of the parameters, which come first in it
    """
    return beside.detach()[count:, 1] / SMALL


def for_checkpoint(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Tensors of a state as a run's checkpoints have them: the buffers by their own name, where a model has some.

    :param count: of the parameters
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name != BESIDE:
            found[name] = tensor
        elif len(tensor) > count:
            found[BUFFERS] = buffers_in(tensor, count).clone()
    return found


def from_checkpoint(tensors: Mapping[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Return what `for_checkpoint` gave, as a state takes it. The state that takes it checks the number of buffers."""
    held = tensors.get(BUFFERS, torch.zeros(0, **FLOAT32)).reshape(-1)
    buffers = HeldBuffers(len(held))
    buffers.take(held)
    found = {name: tensor for name, tensor in tensors.items() if name != BUFFERS}
    return {**found, BESIDE: beside_of(count, buffers).detach()}


def judge_trained(judge: Judge, count: int) -> Judge:
    """As NodeOptimizer takes it, for one that knows the model's parameters only.

    :param count: of these; they come first
    """
    return lambda own, epoch, theirs, newer: judge(own[:count], epoch, theirs[:count], newer)


def _keep_apart(optimizer: torch.optim.Optimizer) -> None:
    """Statistics that several parameters share, as tables of 8-bit optimizers, become each one's own: a file of tensors
    refuses them."""
    seen: set[int] = set()
    for state in optimizer.state.values():
        for name, value in state.items():
            if torch.is_tensor(value) and value.numel():
                if value.data_ptr() in seen:
                    state[name] = value = value.clone()
                seen.add(value.data_ptr())
