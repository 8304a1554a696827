"""The second thing to learn: the demo run's DALL-E on its generated scenes, with the run's own optimizer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.byzantine_parts.digits import State
from volunteer_kit.runs import build_model, build_optimizer, build_param_groups, build_stream, load_run

SAMPLES, HELD_OUT = 8192, 128


class DemoDalle:
    """`volunteer-kit demo`, a fifth of its batch. Score: minus the loss of samples that nobody trains on."""

    batches = (2, 4, 4, 6)
    lost = 0.05
    epochs, attack_from = 80, 10
    is_done = False

    def __init__(self) -> None:
        self._config = load_run("demo")
        self._model = build_model(self._config)
        self._start = parameters_to_vector(self._model.parameters()).detach().clone()
        self.size, self.samples = len(self._start), SAMPLES
        ends = list(accumulate(p.numel() for p in self._model.parameters()))
        self.tensors = [slice(first, end) for first, end in zip([0, *ends], ends, strict=False)]  # one a parameter
        self._stream = build_stream(self._config, peer_seed=0)
        listed = self._stream.next_batch(SAMPLES + HELD_OUT)
        self._names = listed.names  # a name of the benchmark is a place in this list; the stream knows these
        self._text, self._codes = listed.text, listed.codes
        make, schedule = build_optimizer(self._config)
        self._optimizer = make(build_param_groups(self._config, self._model))
        self._rate = schedule(self._optimizer).lr_lambdas[0]
        self._memory = copy.deepcopy(self._optimizer.state_dict())

    def start(self, seed: int) -> State:
        return State(self._start, self._memory)

    def gradient(self, params: torch.Tensor, names: Sequence[int], bf16: bool, flipped: bool = False) -> torch.Tensor:
        """Anybody could read the samples by their names in the run's data; here they are read once."""
        at = torch.as_tensor(names, dtype=torch.long)
        text = self._text[at.roll(1) if flipped else at]
        self._put(params)
        self._model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = self._model(text, self._codes[at]).loss
        loss.backward()
        return parameters_to_vector(p.grad for p in self._model.parameters()).clone()

    def step(self, state: State, gradient: torch.Tensor, epoch: int) -> State:
        self._put(state.params)
        self._optimizer.load_state_dict(copy.deepcopy(state.memory))
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.optimizer.lr * self._rate(epoch)
        first = 0
        for param in self._model.parameters():
            param.grad = gradient[first : first + param.numel()].view_as(param).clone()
            first += param.numel()
        self._optimizer.step()
        params = parameters_to_vector(self._model.parameters()).detach().clone()
        return State(params, copy.deepcopy(self._optimizer.state_dict()))

    @torch.no_grad()
    def score(self, params: torch.Tensor) -> float:
        if not torch.isfinite(params).all():
            return float("-inf")
        self._put(params)
        return -float(self._model(self._text[SAMPLES:], self._codes[SAMPLES:]).loss)

    def _put(self, params: torch.Tensor) -> None:
        with torch.no_grad():  # the parameters become views: of a copy, for the optimizer writes into them
            vector_to_parameters(params.clone(), self._model.parameters())
