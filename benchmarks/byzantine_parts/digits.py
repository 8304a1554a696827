"""The first thing to learn: scikit-learn's digits, a small network, SGD. And what any task of the benchmark offers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

HIDDEN, CLASSES, LR, MOMENTUM = 96, 10, 0.1, 0.9


class State(NamedTuple):
    """A peer's model as one vector, and what its optimizer remembers. Never changed in place: peers share it."""

    params: torch.Tensor  # float32 (size,)
    memory: Any


class Task(Protocol):
    """A model with named samples: whoever knows names and parameters can compute a gradient again."""

    size: int  # parameters
    samples: int  # to train on; a name is a number below it
    batches: tuple[int, ...]  # samples of a peer's epoch, by turns
    lost: float  # of the score: worse than it is a defence that failed
    epochs: int
    attack_from: int  # epoch
    is_done: bool  # after these epochs, without attack, nothing is left to learn

    def start(self, seed: int) -> State: ...

    def gradient(self, params: torch.Tensor, names: Sequence[int], bf16: bool, flipped: bool = False) -> torch.Tensor:
        """Mean gradient of the named samples (size,), in float32 or bfloat16 autocast; `flipped`: of false labels."""

    def step(self, state: State, gradient: torch.Tensor, epoch: int) -> State: ...

    def score(self, params: torch.Tensor) -> float:
        """On samples that nobody trains on; the higher the better."""


class Digits:
    """1,797 pictures of 8x8, half of them to train on; 10 classes. Score: accuracy on the other half."""

    shapes = ((HIDDEN, 64), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))
    size = sum(torch.Size(shape).numel() for shape in shapes)
    batches = (8, 16, 24, 32)
    lost = 0.02
    epochs, attack_from = 160, 10
    is_done = True

    def __init__(self) -> None:
        pictures, labels = _digits()
        half = len(labels) // 2
        self.samples = half
        self._train, self._test = (pictures[:half], labels[:half]), (pictures[half:], labels[half:])

    def start(self, seed: int) -> State:
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(s, generator=generator) / s[1] ** 0.5 if len(s) > 1 else torch.zeros(s)
                   for s in self.shapes]  # fmt: skip
        return State(torch.cat([tensor.reshape(-1) for tensor in tensors]), torch.zeros(self.size))

    def gradient(self, params: torch.Tensor, names: Sequence[int], bf16: bool, flipped: bool = False) -> torch.Tensor:
        at = torch.as_tensor(names, dtype=torch.long)
        labels = CLASSES - 1 - self._train[1][at] if flipped else self._train[1][at]
        leaf = params.detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = self._logits(leaf, self._train[0][at])
        return torch.autograd.grad(F.cross_entropy(logits.float(), labels), leaf)[0]

    def step(self, state: State, gradient: torch.Tensor, epoch: int) -> State:
        memory = MOMENTUM * state.memory + gradient
        return State(state.params - LR * memory, memory)

    @torch.no_grad()
    def score(self, params: torch.Tensor) -> float:
        said = self._logits(params, self._test[0]).argmax(1)
        return float((said == self._test[1]).float().mean())

    def _logits(self, params: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        w1, b1, w2, b2 = (part.view(s) for part, s in zip(params.split(sizes), self.shapes, strict=True))
        return F.linear(F.relu(F.linear(pictures, w1, b1)), w2, b2)


@cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    pictures = torch.from_numpy(data.data).float()[order] / 8 - 1  # (1797, 64), from -1 to 1
    return pictures, torch.from_numpy(data.target).long()[order]
