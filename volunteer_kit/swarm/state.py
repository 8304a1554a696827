"""The training state between peers: what a joiner downloads, what is told of it, and the step that changes it.

A joiner takes parameters and optimizer statistics in their own types, into its own tensors: nothing of the donor's
settings (learning rate, betas) is adopted, and what does not fit or is not finite is refused and the next donor asked.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from hivemind.compression import CompressionInfo, TensorRole
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import PeerID
from hivemind.utils.logging import get_logger

from volunteer_kit.swarm.agreement import (
    BEGINNING,
    LINEAGE_SIZE,
    PAST,
    SKETCH_SIZE,
    advance,
    last_in_common,
    read_past,
    sketch,
)
from volunteer_kit.swarm.averaged_state import AveragedState
from volunteer_kit.swarm.beside import CameBeside, HeldBuffers
from volunteer_kit.swarm.checked_state import CheckedState
from volunteer_kit.swarm.fork_context import FORK
from volunteer_kit.swarm.last_shared import LastShared
from volunteer_kit.swarm.local_steps import LocalSteps
from volunteer_kit.swarm.schedule import Scheduled
from volunteer_kit.swarm.surviving_lock import SurvivingLock
from volunteer_kit.swarm.transfer import ANY_ORDER, StateRefused, read_donors

logger = get_logger(__name__)
# a joiner waits for a step under way, this share of what it waits for bytes: the state before it is behind on arrival
STEP_PATIENCE = 0.8
UPDATE_PATIENCE = 900.0  # s; longer than any round, which has its own timeouts
TOLD = struct.Struct(f"<q{4 * SKETCH_SIZE}s{LINEAGE_SIZE}sq")  # what the averager's process must know


def _words(told: tuple) -> list:
    """As it is told: an order is part of it once there has been one."""
    return list(told if told[3] else told[:3])


def digest(tensors) -> str:
    """Hash of the exact bytes of `tensors`, in order: equal on two peers if and only if they hold the same model."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        # a view of the memory: copying 500 MB a round would cost more than hashing it
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


class SwarmStateAverager(CheckedState, LastShared, Scheduled, AveragedState, TrainingStateAverager):
    """Parameters and statistics of this peer.

    After each step a sketch of the parameters is made: it is told in every round, and declared for those who look for a
    donor. A state is given with the sketches that it had after its last epochs: who takes it learns by them which of
    its own steps are in it.
    """

    # Overrides: _agreed_at, _lineage, role

    local_steps: LocalSteps | None = None  # the optimizer sets it, if the run takes any
    role = "The process that shares the training state"

    def __init__(self, buffers: HeldBuffers | None = None, **kwargs):
        """:param buffers: of the model, which are part of the state; None: they are not"""
        self.buffers = buffers
        self.came_beside = CameBeside()  # the gradients that the next step is taken by
        if buffers is not None and len(buffers):
            kwargs["extra_tensors"] = (buffers.shared,)
        # hivemind counts the epoch before the background step that makes it true: what a joiner would then download
        # is the old model under the new number, and its statistics would differ from everybody's for good
        self._step_done, self._state_epoch = threading.Event(), 0
        self._step_done.set()
        self._told = FORK.Array("c", TOLD.size, lock=SurvivingLock())
        self._past: tuple[list, ...] = ()  # what we told after the last epochs
        self._own_past: list[list] = []  # those of them that our own steps made
        self._lineage, self._order = BEGINNING, 0
        self.round_name: bytes | None = None  # of the round that the next step comes of; None: it is nobody else's
        self.makes_no_step = False  # the epoch that ends had no gradients
        self.is_postponed = False  # the epoch does not end yet after all
        self.kept_until = -1  # last epoch that we had in common with the state we took
        super().__init__(**kwargs)
        self.describe()

    def step(self, *args, optimizer_step: bool = False, wait_for_delayed_updates: bool | None = None, **kwargs):
        if wait_for_delayed_updates:  # hivemind waits for allreduce_timeout, then goes on beside a step still running
            concurrent.futures.wait(self.pending_updates, timeout=UPDATE_PATIENCE)
        if optimizer_step:
            self._step_done.clear()
        return super().step(
            *args, optimizer_step=optimizer_step, wait_for_delayed_updates=wait_for_delayed_updates, **kwargs
        )

    # --- what we say that we hold ---

    @property
    def is_between_steps(self) -> bool:
        """No step is under way: what we tell is what the next round begins with."""
        return self._step_done.is_set()

    @property
    def told(self) -> list:
        """[epoch, sketch of the parameters, lineage], of one moment; and the order that we have obeyed, if any."""
        return _words(TOLD.unpack(self._told.raw))

    @property
    def lineage(self) -> bytes:
        """Of the steps that this state came of."""
        return self._lineage

    @property
    def obeyed(self) -> int:
        """Sequence of the last order to roll back that is in this state; 0: there was none."""
        return self._order

    def testimony(self, epoch: int) -> list | None:
        raw = self._testimony.raw
        for place in range(int.from_bytes(raw[:4], "little")):
            told = TOLD.unpack_from(raw, 4 + place * TOLD.size)
            if told[0] == epoch:
                return _words(told)
        return None

    def _testify(self, past: Sequence[list]) -> None:
        """What we held by our own steps, and will answer for."""
        records = [TOLD.pack(*told, *[0] * (4 - len(told))) for told in past[-PAST:]]
        data = len(records).to_bytes(4, "little") + b"".join(records)
        with self._testimony.get_lock():
            self._testimony[: len(data)] = data

    def describe(self) -> None:
        """Look at the state anew, after it changed; and tell those who look for a donor."""
        epoch = self._held_epoch.value = self._state_epoch
        parameters = (*(p for group in self.optimizer.param_groups for p in group["params"]), *self.extra_tensors)
        self._told.raw = TOLD.pack(epoch, sketch(parameters, seed=epoch), self._lineage, self._order)
        self._past = (*(told for told in self._past if told[0] < epoch), self.told)[-PAST:]
        self.ask_under.value = self._order if self.trust is not None else ANY_ORDER
        if self.allow_state_sharing and self.is_alive():
            self._outer_pipe.send(("_trigger_declare_load_state", [], {}))

    def declared(self) -> dict[PeerID, Any]:
        """What the other donors say that they hold."""
        found = self.dht.get(f"{self.prefix}.all_averagers", latest=True)
        return read_donors(found.value if found else {}, self.peer_id)

    # --- what is downloaded: own tensors, in a fixed order and in their own types ---

    def _statistics(self) -> Iterator[tuple[int, str, Any]]:
        """(index of the parameter, name, value) of each optimizer statistic, in an order equal on all peers."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            state = self.optimizer.state.get(parameter, {})
            for name in sorted(state):
                yield index, name, state[name]

    def statistic_keys(self, names: Sequence[str]) -> list[str]:
        """Names of the statistics among state_tensors(), made from the parameters' names."""
        statistics = [(i, key) for i, key, value in self._statistics() if isinstance(value, torch.Tensor)]
        return [f"optimizer/{names[index]}/{key}" for index, key in statistics]

    def state_tensors(self) -> list[torch.Tensor]:
        """Parameters, extra tensors, then statistics: all that makes this peer's training state."""
        parameters = [p.detach() for group in self.optimizer.param_groups for p in group["params"]]
        statistics = [value for _, _, value in self._statistics() if isinstance(value, torch.Tensor)]
        return [*parameters, *self.extra_tensors, *statistics]

    @property
    def num_parameters(self) -> int:
        return len(self.main_parameters) + len(self.extra_tensors)

    def get_current_state(self) -> tuple[dict, list[torch.Tensor], list[CompressionInfo]]:
        """For who downloads it: after a step that is under way. Raises StateRefused as state_now."""
        self._step_done.wait(STEP_PATIENCE * self.next_chunk_timeout)
        metadata, tensors = self.state_now()
        infos = [
            CompressionInfo.from_tensor(
                tensor, key=i, role=TensorRole.PARAMETER if i < self.num_parameters else TensorRole.OPTIMIZER
            )
            for i, tensor in enumerate(tensors)
        ]
        return metadata, tensors, infos

    def state_now(self) -> tuple[dict, list[torch.Tensor]]:
        """A copy of one moment, and what belongs to it. While a round is under way that is the state before its step:
        who waited for the next one would wait as long as the network. Raises StateRefused while statistics are on
        their way: it would be of two moments."""
        if not self.complete:
            raise StateRefused("our own statistics are still on their way")
        with torch.no_grad(), self.lock_averaged_tensors:
            tensors = [tensor.detach().cpu().clone() for tensor in self.state_tensors()]
            return {**self.metadata(), "past": list(self._past)}, tensors

    def metadata(self) -> dict[str, Any]:
        """The state's epoch, lineage and order (if there was one), and the statistics that are plain numbers."""
        numbers = [value for _, _, value in self._statistics() if not isinstance(value, torch.Tensor)]
        order = {"order": self._order} if self._order else {}
        return {"epoch": self._state_epoch, "lineage": self._lineage.hex(), "numbers": numbers, **order}

    def adopt_state(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Copy a checked state into our own tensors, statistics in their own types, and follow its epoch."""
        self.abandon_statistics()
        with self.lock_averaged_tensors:
            self._copy(tensors)
            self._copy_numbers(metadata["numbers"])
        self.forget_last_shared()
        self._follow_parameters(metadata)
        self.settle_arrival()

    def go_on_without(self) -> None:
        """Take what we hold for a whole state, though its statistics are older than its parameters."""
        self._state_epoch = self.local_epoch
        self.settle_arrival()
        self.describe()

    def adopt_parameters(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        with self.lock_averaged_tensors:
            self._copy(tensors)
        if metadata.get("order", 0) != self._order:  # what was shared before it led to what the monitor has given up
            self.forget_last_shared()
        self._follow_parameters(metadata)

    def adopt_statistics(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        with self.lock_averaged_tensors:
            self._copy(tensors, first=self.num_parameters)
            self._copy_numbers(metadata["numbers"])

    @torch.no_grad()
    def _copy(self, tensors: Sequence[torch.Tensor], first: int = 0) -> None:
        for ours, theirs in zip(self.state_tensors()[first:], tensors, strict=False):
            ours.copy_(theirs)

    def _copy_numbers(self, numbers: Sequence[float]) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        slots = [(i, name) for i, name, value in self._statistics() if not isinstance(value, torch.Tensor)]
        for (index, name), number in zip(slots, numbers, strict=True):
            self.optimizer.state[parameters[index]][name] = number

    def _follow_parameters(self, metadata: dict) -> None:
        if self.local_steps is not None:
            goes_back = metadata.get("order", 0) != self._order or metadata.get("lineage") == BEGINNING.hex()
            self.local_steps.restart(with_statistics=goes_back)
        past = read_past(metadata.get("past"))
        self.kept_until = last_in_common(read_past(self._past), past)
        self._own_past = [told for told in self._own_past if told[0] <= self.kept_until]
        self._testify(self._own_past)
        self._lineage = bytes.fromhex(metadata.get("lineage", BEGINNING.hex()))
        self._order = metadata.get("order", 0)
        self._past = tuple(said.words() for said in past.values())
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()
        self.local_epoch = self._state_epoch = self._agreed_at = metadata["epoch"]
        self._update_scheduler()
        self.describe()

    # --- a step ---

    def _apply_optimizer_parameters_(self) -> None:
        """What all peers hold -> the model that trains."""
        if self.local_steps is None:
            super()._apply_optimizer_parameters_()
        else:
            self.local_steps.arrive()
        if self.buffers is not None:
            self.buffers.arrive()

    def _take_step(self) -> None:
        """A parameter that nobody used has no gradient while the optimizer steps, as in a plain trainer."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        unused = [(p, p.grad) for p, is_unused in zip(parameters, self.came_beside.unused, strict=False) if is_unused]
        for parameter, _ in unused:
            parameter.grad = None
        try:
            self.optimizer.step()
        finally:
            for parameter, gradient in unused:  # hivemind expects the same tensor there for good
                parameter.grad = gradient
        if self.buffers is not None and self.came_beside.buffers is not None:
            self.buffers.take(self.came_beside.buffers)

    def _do(
        self, wait_for_trigger, optimizer_step, zero_grad, averaging_round, averaging_control, grad_scaler,
        set_to_none, timeout=None, **kwargs,
    ):  # fmt: skip
        """Optimizer step, then (if asked) a round of state averaging; in hivemind's background executor.

        Matchmaking starts after the step, unlike hivemind's: members tell each other what they hold after it.
        """
        try:
            if wait_for_trigger is not None:
                wait_for_trigger()
            if self.is_postponed:
                self.local_epoch -= 1  # hivemind counted it when the round began
                self.finished_optimizer_step.set()
                return
            if optimizer_step:
                self.await_statistics()
            with self.lock_optimizer:
                if optimizer_step:
                    with self.lock_averaged_tensors if self.reuse_tensors else nullcontext():
                        self._note_before_step()
                        if not self.makes_no_step:
                            self._measure(self._take_step)
                        self._state_epoch = self._held_epoch.value = self.local_epoch
                        self._lineage = advance(self._lineage, self.round_name)
                self._update_scheduler()
                self.finished_optimizer_step.set()
            self.describe()
            if optimizer_step:
                self._own_past = [*self._own_past, self.told][-PAST:]
                self._testify(self._own_past)
                self.after_own_step()
            if averaging_round:
                with self.lock_averaging:
                    self._average_parameters(timeout)
        except StateRefused as e:
            logger.warning(f"No step was taken: {e}")
            self.finished_optimizer_step.set()
        except Exception:
            logger.exception("The delayed update failed")
            self.finished_optimizer_step.set()
        finally:
            self.round_name, self.makes_no_step, self.is_postponed = None, False, False
            self.came_beside = CameBeside()
            self._step_done.set()
            if averaging_round:
                self.finished_averaging_round.set()
