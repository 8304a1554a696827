"""Hold the parameters, statistics and schedule of a peer at one lineage, step them, and save them as a file."""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from volunteer_kit.checkpoint import OPTIMIZER
from volunteer_kit.storage import part_folder, put_in_place
from volunteer_kit.swarm.codecs.wire import FLOAT32
from volunteer_kit.swarm.errors import brief
from volunteer_kit.swarm.state.agreement import sketch

MAX_EPOCH: Final = 2**31
MAX_NUMBER: Final = 2**53  # of a statistic that is a plain number
NOT_FINITE: Final = -1e9  # the sketch of parameters that are not finite; those of others lie near 0
CODEC: Final = f"{OPTIMIZER}gradient_codec/"  # names of what the codec of gradients goes by begin with this
ABOUT: Final = "state"  # the one field beside the tensors: several would be written in random order
HEADER_BASE, HEADER_TENSOR, HEADER_NUMBER = 4096, 256, 32  # bytes of a header, and for each entry beside its name


class UnusableState(ValueError):
    """A file is no state of this run, or not whole, or not finite."""


class StepCodec(Protocol):
    """The codec that decodes answers, where it follows from the steps before: rounds.layout.Layout. It never changes;
    each step has its own."""

    def state_tensors(self) -> dict[str, torch.Tensor]: ...

    def with_state(self, tensors: Mapping[str, torch.Tensor]) -> StepCodec: ...

    def at_beginning(self) -> StepCodec: ...

    def after(self, answers: Iterable[tuple[int, bytes]]) -> StepCodec: ...


class About(NamedTuple):
    """What a state's file says beside its tensors."""

    lineage: bytes
    epoch: int
    numbers: list[float]


class TrainingState:
    """float32 copies of the trainable parameters on the CPU, with the optimizer that steps them.

    One thread changes it. Whoever has two keeps readers away while it does.

    :param params: the model's parameters, or groups of them
    :param optimizer: parameter groups -> optimizer, which holds its zero statistics from the start
    :param scheduler: optimizer -> schedule, which counts the swarm's epochs
    :param names: of the parameters, in the order of the groups
    :param codec: of a run's first step; None: it is the same at all steps
    :ivar parameters: in the order of the groups
    :ivar codec: of the next step
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None,
        names: Sequence[str],
        codec: StepCodec | None = None,
    ):
        groups = groups_of(params)
        for group in groups:
            group["params"] = [_own_copy(parameter) for parameter in group["params"]]
        self.parameters: list[torch.nn.Parameter] = [p for group in groups for p in group["params"]]
        self.names = tuple(names)
        if len(self.names) != len(self.parameters):
            raise ValueError(f"{len(self.names)} names for {len(self.parameters)} parameters")
        self._gradient = torch.zeros(self.elements, **FLOAT32)  # a script may have another default
        for parameter, gradient in zip(self.parameters, self.split(self._gradient), strict=True):
            parameter.grad = gradient
        self._optimizer = optimizer(groups)
        self._scheduler = scheduler(self._optimizer) if scheduler is not None else None
        self._at_first = [
            {name: deepcopy(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]
        self._schedule_at_first = deepcopy(self._scheduler.state_dict()) if self._scheduler is not None else {}
        self.lineage, self.epoch = b"", 0
        self.codec = codec

    @property
    def elements(self) -> int:
        """Numbers of all parameters together, N."""
        return sum(parameter.numel() for parameter in self.parameters)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a flat vector (N,), shaped as the parameters are."""
        parts = torch.split(flat, [parameter.numel() for parameter in self.parameters])
        return [part.view(parameter.shape) for part, parameter in zip(parts, self.parameters, strict=True)]

    # --- a step ---

    def step(self, gradient: Iterable[tuple[slice, torch.Tensor]]) -> None:
        """One step of the optimizer.

        :param gradient: places in the flat vector (N,) and the mean gradient there; it is zero elsewhere
        """
        self._gradient.zero_()
        for place, values in gradient:
            self._gradient[place] = values
        self._optimizer.step()

    def move_to(self, lineage: bytes, epoch: int) -> None:
        """What is here is the state at this lineage; the schedule follows the epoch, also back."""
        self.lineage, self.epoch = lineage, epoch
        if self._scheduler is None:
            return
        if self._scheduler.last_epoch > epoch:
            self._scheduler.load_state_dict(deepcopy(self._schedule_at_first))
            for group, kept in zip(self._optimizer.param_groups, self._at_first, strict=True):
                group.update(deepcopy(kept))
        with warnings.catch_warnings():  # torch expects a step of the optimizer before the first one of a schedule
            warnings.simplefilter("ignore", UserWarning)
            while self._scheduler.last_epoch < epoch:
                self._scheduler.step()

    def sketch(self) -> float:
        """A number near 0 that equal parameters share up to rounding, and others do not: a projection on random signs,
        beside the parameters' norm. The signs follow from the lineage, so that no difference stays unseen for long."""
        seed = int.from_bytes(hashlib.sha256(self.lineage).digest()[:8], "little")
        numbers = np.frombuffer(sketch(self.parameters, seed), "<f4").astype(np.float64)
        norm = math.hypot(*(float(norm) for norm in torch._foreach_norm([p.detach() for p in self.parameters])))
        signs = np.where(np.arange(len(numbers)) % 2, -1.0, 1.0)
        if norm == 0:
            return 0.0
        value = float(numbers @ signs) / norm if math.isfinite(norm) else math.nan
        return value if math.isfinite(value) else NOT_FINITE

    # --- out and in ---

    def _statistics(self) -> Iterator[tuple[int, str, Any]]:
        """(place of the parameter, name, value) of each statistic, in an order that is equal on all peers."""
        for place, parameter in enumerate(self.parameters):
            state = self._optimizer.state.get(parameter, {})
            for name in sorted(state):
                yield place, name, state[name]

    def _numbers(self) -> list[tuple[dict[str, Any], str]]:
        """Statistics that are plain numbers: (where they are kept, name)."""
        return [
            (self._optimizer.state[self.parameters[place]], name)
            for place, name, value in self._statistics()
            if not isinstance(value, torch.Tensor)
        ]

    def named(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """The tensors themselves: parameters by name, statistics as "optimizer/NAME/STATISTIC", as checkpoints have
        them, and what the codec of gradients goes by."""
        codec = self.codec.state_tensors() if self.codec is not None else {}
        return self._learnt(names) | {f"{CODEC}{name}": tensor for name, tensor in codec.items()}

    def _learnt(self, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Parameters and statistics."""
        names = self.names if names is None else names
        tensors = {name: p.detach() for name, p in zip(names, self.parameters, strict=True)}
        for place, key, value in self._statistics():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{names[place]}/{key}"] = value
        return tensors

    def about(self) -> dict[str, Any]:
        """What belongs to the tensors: lineage in hex, epoch, and the statistics that are plain numbers."""
        numbers = [state[name] for state, name in self._numbers()]
        return {"epoch": self.epoch, "lineage": self.lineage.hex(), "numbers": numbers}

    def digest(self) -> bytes:
        """SHA-256 of all tensors and numbers: equal on two peers if and only if they hold the same to the last bit."""
        hasher = hashlib.sha256(json.dumps([self.epoch, self.about()["numbers"]]).encode())
        for tensor in self.named().values():
            hasher.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        return hasher.digest()

    def save(self, path: Path) -> bytes:
        """Write a safetensors file, there whole or not at all. :returns: its SHA-256. Raises OSError."""
        return self.write(path, self.named(), self.about())

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> bytes:
        """As save, of another state: what `named` and `about` gave for it. More than that is left out. Raises OSError,
        and KeyError for what lacks something."""
        chosen = {name: tensors[name].contiguous() for name in self.named()}
        text = json.dumps({name: about[name] for name in self.about()}, sort_keys=True)
        with part_folder(path) as part:
            written = part / "state"
            try:
                save_file(chosen, written, metadata={ABOUT: text})
            except SafetensorError as error:  # a full disk is one, too
                raise OSError(str(error)) from error
            digest = hashlib.sha256()
            with written.open("rb", buffering=0) as file:
                while block := file.read(2**20):
                    digest.update(block)
            put_in_place(written, path)
        return digest.digest()

    def check(self, path: Path) -> About:
        """Look at a file that a stranger may have written. Raises UnusableState.

        Its size has to be that of this state, so that what is read is bounded by what is here already.
        """
        try:
            return self._check(path)
        except (OSError, SafetensorError, UnicodeDecodeError) as error:
            raise UnusableState(f"it cannot be read: {brief(error)}") from error

    def parameters_in(self, path: Path) -> list[torch.Tensor]:
        """The parameters of a file that was checked, in the order of the groups."""
        with safe_open(path, framework="pt") as opened:
            return [opened.get_tensor(name) for name in self.names]

    def _check(self, path: Path) -> About:
        expected = self.named()
        self._check_size(path, expected)
        with safe_open(path, framework="pt") as opened:
            about = self._read_about(opened.metadata())
            if set(opened.keys()) != expected.keys():
                raise UnusableState("it holds other tensors than this run's state")
            for name, own in expected.items():
                self._check_values(name, own, opened.get_tensor(name))
            self._codec_in(opened.get_tensor)
        return about

    def _codec_in(self, tensor_of: Callable[[str], torch.Tensor]) -> StepCodec | None:
        """Raises UnusableState."""
        if self.codec is None:
            return None
        try:
            return self.codec.with_state({name: tensor_of(CODEC + name) for name in self.codec.state_tensors()})
        except ValueError as error:
            raise UnusableState(f"no gradients can travel by it: {error}") from error

    def load(self, path: Path, lineage: bytes, epoch: int) -> None:
        """Take the state in this file, which has to be the one at `lineage`. Nothing changes if it cannot be used.

        Raises UnusableState.
        """
        about = self.check(path)
        if (about.lineage, about.epoch) != (lineage, epoch):
            raise UnusableState(f"it is of epoch {about.epoch}, and not of epoch {epoch} of this branch")
        with safe_open(path, framework="pt") as opened:
            codec = self._codec_in(opened.get_tensor)
            self._take(opened.get_tensor, about.numbers)
        self.codec = codec
        self.move_to(lineage, epoch)

    def take(self, names: Sequence[str], tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
        """Take what `named` and `about` gave, from a checkpoint that a run begins with: the codec's first step is to
        come. Raises UnusableState, with nothing changed."""
        epoch, own = about.get("epoch"), self._learnt(names)
        if type(epoch) is not int or not 0 <= epoch < MAX_EPOCH:
            raise UnusableState(f"its epoch is {brief(epoch)}")
        if missing := own.keys() - tensors.keys():
            raise UnusableState(f"it lacks {sorted(missing)[0]} and {len(missing) - 1} more")
        for name, tensor in own.items():
            self._check_values(name, tensor, tensors[name])
        numbers = self._checked_numbers(about.get("numbers"))
        theirs = dict(zip(self._learnt(), own, strict=True))
        self._take(lambda name: tensors[theirs[name]], numbers)
        self.codec = self.codec.at_beginning() if self.codec is not None else None
        self.move_to(self.lineage, epoch)

    @torch.no_grad()
    def _take(self, tensor_of: Callable[[str], torch.Tensor], numbers: Sequence[float]) -> None:
        for name, own in self._learnt().items():
            own.copy_(tensor_of(name))
        for (state, name), number in zip(self._numbers(), numbers, strict=True):
            state[name] = number

    def _check_size(self, path: Path, expected: Mapping[str, torch.Tensor]) -> None:
        data = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
        longest = HEADER_BASE + HEADER_NUMBER * len(self._numbers())
        longest += sum(HEADER_TENSOR + 6 * len(name) for name in expected)  # a character is 6 bytes at most in JSON
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if not header <= longest:
            raise UnusableState(f"its header has {header:,} bytes")
        if path.stat().st_size != 8 + header + data:
            raise UnusableState(f"it has {path.stat().st_size:,} bytes instead of {8 + header + data:,}")

    def _check_values(self, name: str, own: torch.Tensor, theirs: torch.Tensor) -> None:
        if theirs.shape != own.shape or theirs.dtype != own.dtype:
            raise UnusableState(f"{name} is {theirs.dtype} {tuple(theirs.shape)}")
        if theirs.is_floating_point() and theirs.numel():
            low, high = (float(bound) for bound in torch.aminmax(theirs))  # NaN goes through both
            if not (math.isfinite(low) and math.isfinite(high)):
                raise UnusableState(f"{name} is not finite")
            if low < 0 and name.rpartition("/")[2] in getattr(self._optimizer, "non_negative", ()):
                raise UnusableState(f"{name} is negative, and its root is no number")

    def _read_about(self, metadata: Any) -> About:
        try:
            said = json.loads((metadata or {}).get(ABOUT, ""))
        except (ValueError, RecursionError) as error:
            raise UnusableState("it does not say what it is") from error
        said = said if isinstance(said, dict) else {}
        lineage, epoch = said.get("lineage"), said.get("epoch")
        if type(epoch) is not int or not 0 <= epoch < MAX_EPOCH:
            raise UnusableState(f"its epoch is {brief(epoch)}")
        if not isinstance(lineage, str) or not re.fullmatch("([0-9a-f]{2}){0,64}", lineage):
            raise UnusableState(f"its lineage is {brief(lineage)}")
        return About(bytes.fromhex(lineage), epoch, self._checked_numbers(said.get("numbers")))

    def _checked_numbers(self, numbers: Any) -> list[float]:
        own = [state[name] for state, name in self._numbers()]
        if not isinstance(numbers, list) or len(numbers) != len(own):
            raise UnusableState("its counters are another optimizer's")
        for number, mine in zip(numbers, own, strict=True):
            if type(number) is not type(mine) or not 0 <= number < MAX_NUMBER:
                raise UnusableState(f"a counter is {brief(number)}")
        return numbers


def codec_tensors_in(path: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Read the tensors of a state's codec from a file that was checked.

    :param names: as StepCodec.state_tensors has them
    :raises UnusableState: if it cannot be read, or lacks one
    """
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(CODEC + name) for name in names}
    except (OSError, SafetensorError) as error:
        raise UnusableState(f"{path} cannot be read: {brief(error)}") from error


def groups_of(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameters, or groups of them, as groups; the caller may write into these."""
    given = list(params)
    if all(isinstance(each, dict) for each in given):
        return [{**group, "params": list(group["params"])} for group in given]
    return [{"params": given}]


def _own_copy(parameter: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().to("cpu", torch.float32, copy=True).contiguous())
