"""The training process's side of a node: it puts gradients into slots, and takes steps from files.

Three threads share it. The loop fills slots and takes new parameters between two microbatches; a listener hears the
node; an optimizer thread takes the steps, on parameters of its own, so that the device never waits for the network.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch

from volunteer_kit.checkpoint import CheckpointError
from volunteer_kit.swarm.errors import SwarmError
from volunteer_kit.swarm.local_sgd import LocalStepsConfig
from volunteer_kit.swarm.net.children import broken
from volunteer_kit.swarm.net.connectivity import Reach
from volunteer_kit.swarm.node.going_back import CHECKPOINTS, checkpoint_file
from volunteer_kit.swarm.node.local_training import LocalTraining
from volunteer_kit.swarm.node.recomputing import Recomputer, Recomputing
from volunteer_kit.swarm.node.talk import (
    Admit,
    Broken,
    Check,
    Checked,
    Compute,
    Delivered,
    Downloading,
    Expired,
    Forgive,
    Founded,
    GiveOrder,
    Granted,
    History,
    Leave,
    Left,
    Load,
    NodeSpec,
    OrderToSign,
    PrepareOrder,
    Progress,
    Recompute,
    SpeedMeasured,
    StateWritten,
    Step,
    StepOf,
    Stepped,
    Told,
    Verdicts,
    WriteState,
)
from volunteer_kit.swarm.node.training_state import About, StepCodec, TrainingState, UnusableState, groups_of
from volunteer_kit.swarm.options import StepReport, SwarmProgress
from volunteer_kit.swarm.records.failures import INCOMPLETE
from volunteer_kit.swarm.rounds.normalised import unit_of
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.entries import RollbackOrder
from volunteer_kit.swarm.sync.phases import Phase
from volunteer_kit.swarm.sync.timing import SLOW_SLACK, comes_too_late

logger = logging.getLogger(__name__)

LISTEN_EVERY: Final = 0.1  # s, between looks whether it should end
SLOT_WITHIN: Final = 5.0  # s that a microbatch waits for a slot when its volunteer leaves
TAKEN_WITHIN: Final = 10.0  # s, for the node to take up what is delivered last
STEPS_WITHIN: Final = 60.0  # s, for steps under way to be taken in the end
ORDER_WITHIN: Final = 30.0  # s, for the node to make an order
LEFT_WITHIN: Final = 10.0  # s, for the goodbye
SPEED_EVERY: Final = 10.0  # s, between words of how fast the device is
JUDGED: Final = 5  # microbatches by whose median a device is judged
SEQUENCE_BITS: Final = 32  # of an order's number; 21 more are left for generations in the JSON of a checkpoint
LEFT, NOT_FINITE = "left", "not finite"  # causes for which samples are lost here
ALONE_AFTER: Final = 10.0  # s without a quorum until people are told
ALONE: Final = (
    "More than half of the swarm cannot be reached from here. This machine keeps what it computes for some epochs, and "
    "brings it along when they are back."
)
TOO_SLOW = (
    "A microbatch takes this machine {seconds:.1f} s, and this run takes a step every {epoch:.1f} s. Gradients that "
    "are more than {most} steps late count nothing, so its work would be lost.\n"
    "1. Compute fewer samples at a time: --batch-size {smaller}\n"
    "2. Ask the run's host for a larger swarm.max_staleness or target_batch_size."
)

Fill = Callable[[torch.Tensor, Sequence["torch.Tensor | None"], float], None]


class NodeLink(Protocol):
    """The pipe to the node process; threads share it."""

    def send(self, message: Any) -> None: ...

    def receive(self, timeout: float | None = None) -> Any | None: ...

    def close(self) -> None: ...


class SlotFile(Protocol):
    """slots.Slots."""

    def view(self, slot: int) -> torch.Tensor: ...

    def close(self) -> None: ...


class Cells(Protocol):
    """The layout of the cells in the flat vector: rounds.layout.Layout."""

    def cell(self, i: int) -> slice: ...


class PeerFinder(Protocol):
    """discovery.Discovery."""

    others: Mapping[Any, Any]

    @property
    def uncallable(self) -> int: ...

    def close(self) -> None: ...


@dataclass
class Filling:
    """A slot that microbatches of one lineage go into."""

    slot: int
    lineage: bytes
    life: int = 0
    samples: int = 0
    names: tuple[str, ...] = ()
    microbatches: int = 0


class NodeOptimizer:
    """The optimizer of the loop, its callbacks and a session.

    :param spec: of the node; a checkpoint that is loaded before join() changes its origin
    :param start: starts the node, in join()
    :param params: the model's trainable parameters, or groups of them
    :param optimizer: parameter groups -> optimizer, which holds its zero statistics from the start
    :param scheduler: optimizer -> schedule, which counts the swarm's epochs
    :param names: of the parameters, in the order of the groups
    :param layout: where cells lie in the flat vector (N,)
    :param decode: (cells, an answer's bytes) -> the mean gradient of each cell; and with `codec` (cells, bytes, the
        step's codec)
    :param codec: of a run's first step, where a codec goes by the steps before; None: it is the same at all steps
    :param discover: makes what finds the run's other peers; None: nothing does
    :param admission: what the run's authority has said by now
    :param judge: of a newcomer, which takes a stranger's state: (its own parameters, their epoch, the state's
        parameters, its epoch) -> why these are not to be believed; None: nobody asks
    :param local_steps: steps on this peer's own model between two of the swarm's, whose `optimizer` is the outer one
        then; None: gradients are averaged, or this peer does not train
    :param fill: adds a microbatch to a slot: (the slot (N,), a gradient or None of each parameter, what they are
        multiplied with); None: the parameters lie in the slot one after another
    :param last_epoch: steps beyond it are not taken, for all peers end with equal parameters; None: there is no last
    :param begins_alike: can every peer of the run make the parameters that it begins with? Else they travel
    :param cause_of: why the node has ended, as it or its pipe says -> what was before that; may take seconds
    :ivar expired: samples of this peer that can no longer count, by cause
    :ivar on_verdicts: told, in a run that verifies, what was found; from another thread
    :ivar on_told: told news for people: a topic and words; from another thread
    :ivar on_steps: told, where the spec says that this peer observes: each step when it is taken, and the log's tail
        where there were steps in between; steps may come again. From another thread
    """

    def __init__(
        self,
        *,
        spec: NodeSpec,
        start: Callable[[NodeSpec], NodeLink],
        params: Iterable[Any],
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        names: Sequence[str],
        slots: SlotFile,
        layout: Cells,
        decode: Callable[..., Mapping[int, torch.Tensor]],
        reach: Reach,
        discover: Callable[[Any], PeerFinder] | None = None,
        admission: Callable[[], Admit] = Admit,
        judge: Callable[[Sequence[torch.Tensor], int, Sequence[torch.Tensor], int], str | None] | None = None,
        local_steps: LocalStepsConfig | None = None,
        fill: Fill | None = None,
        last_epoch: int | None = None,
        codec: StepCodec | None = None,
        cause_of: Callable[[str], str] = str,
        begins_alike: bool = True,
    ):
        params = list(params)
        groups = groups_of(params)
        self.reach = reach
        self.reports: deque[StepReport] = deque(maxlen=1000)
        self.expired: dict[str, float] = {}
        self.on_download: Callable[[int, int], None] | None = None
        self.on_round: Callable[[int], None] | None = None
        self.on_told: Callable[[str, str], None] | None = None
        self.on_steps: Callable[[tuple[StepOf, ...]], None] | None = None
        self.on_verdicts: Callable[[Verdicts], None] | None = None
        self.only_accumulated, self.comes_back = True, False
        self.states_asked_in_vain = 0
        self._spec, self._start, self._discover = spec, start, discover
        self._admission, self._judge = admission, judge
        self._fill, self._last_epoch = fill or self._fill_in_order, last_epoch
        self._cause_of, self._begins_alike = cause_of, begins_alike
        self._config = SyncConfig(**spec.sync)
        self._slots, self._layout, self._decode = slots, layout, decode
        self._model = [parameter for group in groups for parameter in group["params"]]
        self._state = TrainingState(groups, optimizer, scheduler, names, codec)
        self._state_lock = threading.RLock()  # held while a step changes the state
        self._order = 0  # see `order`
        self._recomputing: Recomputing | None = None
        if spec.verification is not None:
            sizes = sum(4 * parameter.numel() for parameter in self._state.parameters)
            sums = spec.verification.sums
            self._recomputing = Recomputing(sizes, self._config.max_staleness, sums, self._send)
        self._ready = [parameter.detach().clone() for parameter in self._state.parameters]
        self._ready_lineage: bytes | None = None  # None: this peer is not in the run yet
        self._ready_epoch = 0
        self._ready_lock = threading.Lock()  # held while these are written or read
        self._model_lineage: bytes | None = None
        self._model_epoch = 0
        self._local = self._local_training(local_steps, params) if local_steps is not None else None
        self._begins_anew = False  # the local steps, with the parameters that are swapped in next
        self._link: NodeLink | None = None
        self._finder: PeerFinder | None = None
        self._threads: list[threading.Thread] = []
        # what follows is shared by the threads, under this condition
        self._changed = threading.Condition()
        self._free: deque[int] = deque()  # slots that were granted
        self._filling: Filling | None = None
        self._undecided = 0  # slots that were delivered, and not taken up yet
        self._waiting: dict[str, tuple[Hashable, int]] = {}  # samples in no step yet: name as told -> name, birth
        self._computes = True
        self._unfinished = 0  # tasks of the optimizer thread
        self._progress: Progress | None = None
        self._download: tuple[int, int] | None = None
        self._joined_others = self._stopping = self._has_left = self._closed = False
        self._broken = ""
        self._tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._to_sign: queue.SimpleQueue[OrderToSign] = queue.SimpleQueue()
        self._owed = 0.0  # part of a sample that was settled and not reported
        self._speed, self._computing_since, self._speed_told = 0.0, 0.0, float("-inf")
        self._microbatches: deque[tuple[float, int]] = deque(maxlen=JUDGED)  # s, samples
        self._heard: dict[type, Callable[[Any], None]] = {
            Granted: self._on_granted,
            Compute: self._on_compute,
            Progress: self._on_progress,
            Downloading: self._on_downloading,
            Expired: self._on_expired,
            Told: self._on_told,
            OrderToSign: lambda message: self._to_sign.put(message),
            Left: self._on_left,
            Broken: lambda message: self._break(self._cause_of(message.why)),
            Recompute: self._on_recompute,
            Verdicts: self._on_verdicts,
            **dict.fromkeys((Step, History, Load, Founded, Check, WriteState), self._on_task),
        }
        self._work: dict[type, Callable[[Any], None]] = {
            Step: self._take_step,
            History: self._hear_history,
            Load: self._load,
            Founded: self._found,
            Check: self._check,
            WriteState: self._write_state,
        }

    def _local_training(self, config: LocalStepsConfig, params: Sequence[Any]) -> LocalTraining:
        if not self._spec.averages_ways:
            raise ValueError("the node of a peer that takes local steps has to average ways")
        return LocalTraining(config, params, lambda: self._model_epoch, unit_of(self._config.target_batch_size))

    # --- how things stand ---

    @property
    def local_epoch(self) -> int:
        """The epoch of the newest parameters; within a microbatch the model may be a step older."""
        with self._ready_lock:
            return self._ready_epoch

    @property
    def lineage(self) -> bytes | None:
        """The lineage of the model's parameters; None before join()."""
        return self._model_lineage

    @property
    def recompute(self) -> Recomputer | None:
        """In a run that verifies: what computes others' samples again, in the loop's thread."""
        return self._recomputing.recompute if self._recomputing is not None else None

    @recompute.setter
    def recompute(self, recompute: Recomputer | None) -> None:
        if self._recomputing is not None:
            self._recomputing.recompute = recompute

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters' names, in the order of the groups."""
        return self._state.names

    @property
    def is_leaving(self) -> bool:
        """No step() waits any more: see stop_waiting()."""
        return self._stopping

    @property
    def model_epoch(self) -> int:
        """The epoch of the model's parameters."""
        return self._model_epoch

    @property
    def order(self) -> int:
        """The last rollback order that is in the state, by a number that grows with each; 0: none."""
        return self._order

    @property
    def why_broken(self) -> str:
        """Why this peer cannot go on, in a sentence without its full stop; "": it can."""
        return self._broken

    @property
    def why_too_slow(self) -> str:
        """Why what this device computes comes too late to count, and what to do; "": it does not, as far as known."""
        epoch = self._progress.epoch_seconds if self._progress is not None else 0.0
        if len(self._microbatches) < JUDGED:
            return ""
        seconds, samples = sorted(self._microbatches)[JUDGED // 2]
        most = self._config.max_staleness
        if not comes_too_late(seconds, epoch, most):
            return ""
        smaller = max(1, int(samples * most * epoch / (SLOW_SLACK * seconds)))
        return TOO_SLOW.format(seconds=seconds, epoch=epoch, most=most, smaller=smaller)

    @property
    def target_batch_size(self) -> int:
        """Samples of one epoch, of all peers together."""
        return self._config.target_batch_size

    @property
    def cut_off(self) -> str | None:
        """Why no step can be committed here for now, in words. The last of two peers may decide by itself: it commits
        steps though nobody answers, and is not cut off."""
        reach, progress = self.reach, self._progress
        if reach.cut_off and (reach.waits_for_itself or progress is None or not progress.decides_alone):
            return reach.cut_off
        is_alone = progress is not None and progress.is_alone and progress.alone_for > ALONE_AFTER
        return ALONE if is_alone else None

    @property
    def cut_off_for(self) -> float:
        """s; 0 unless cut off."""
        why, progress = self.cut_off, self._progress
        if why is None:
            return 0.0
        if why is not ALONE:
            return self.reach.cut_off_for
        return progress.alone_for if progress is not None else 0.0

    def progress(self) -> SwarmProgress:
        """Return the progress of the current epoch."""
        known = self._progress
        with self._changed:
            own = self._filling.samples if self._filling is not None else 0
        own += self._local.gathered if self._local is not None else 0
        uncallable = self._finder.uncallable if self._finder is not None else 0
        if known is None:
            return SwarmProgress(1, own, own, uncallable)
        return SwarmProgress(
            known.num_peers,
            known.swarm_samples + own,
            known.pending + own,
            uncallable,
            known.computing,
            known.place,
            known.epoch_seconds,
        )

    @property
    def totals(self) -> dict[str, float]:
        """Samples of this peer by what became of them: computed, committed, pending, and expired by cause. They are of
        all its stays, and about a second old."""
        return dict(self._progress.totals) if self._progress is not None else {}

    def traffic(self) -> tuple[int, int]:
        """(bytes sent, bytes received) by this peer's node."""
        progress = self._progress
        return (progress.sent, progress.received) if progress is not None else (0, 0)

    # --- a stay in the swarm ---

    def join(self, patience: float = 30.0) -> bool:
        """Start the node, and take the run's parameters. :returns: whether they are others' or an earlier stay's;
        False: this peer has begun the run with its own, or was told to stop.

        :param patience: s without a sign of a state, from anybody
        Raises SwarmError (dead_peers, broken). After dead_peers it may be called again: the node goes on looking.
        """
        if self._link is None:
            self._start_node()
        deadline = time.monotonic() + patience
        while self._ready_lineage is None:
            if self._wait(lambda: self._ready_lineage is not None or self._download is not None, deadline):
                deadline = time.monotonic() + patience
                self._tell_download()
            elif self._stopping:
                return False
            else:
                raise SwarmError(
                    f"Nobody has given this machine the run's model within {patience:g} s.\n"
                    "1. Check that this machine is online, and that the run's host is up.\n2. Join again.",
                    kind="dead_peers",
                )
        self._swap_in()
        return self._joined_others

    def _start_node(self) -> None:
        spec = self._spec
        if self._state.epoch or not self._begins_alike:
            spec = replace(spec, origin=self._state.epoch, state_digest=self._state.digest())
        admit = self._admission()
        self._link = self._start(replace(spec, admit=admit))
        if self._admission() != admit:  # news that came meanwhile found no node
            self.tell_admission()
        self._finder = self._discover(self._link) if self._discover is not None else None
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._listen, "node messages"), (self._work_off, "optimizer"))
        ]
        for thread in self._threads:
            thread.start()

    def tell_admission(self) -> None:
        """The run's authority has said something: the node shows the new token, and cuts those who are banned."""
        if self._link is not None:
            self._link.send(self._admission())

    def forgive(self, peer: str) -> None:
        """A moderator has set aside what was found against a peer, by its id in base58."""
        self._send(Forgive(peer))

    def _send(self, message: Any) -> None:
        if self._link is not None:
            self._link.send(message)

    def come_to(self, epoch: int) -> bool:
        """Whether this peer is at `epoch`; the node brings what it lacks. No step beyond it is taken from now on, for
        all who are told so end with equal parameters."""
        self._last_epoch = epoch
        return self.local_epoch >= epoch

    def stop_waiting(self) -> None:
        """The volunteer leaves: no step() waits any more, but for what would be lost."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def settle(self, patience: float = 0.0) -> str:
        """Deliver what is computed, and take the steps that are here. :returns: digest of parameters and statistics.

        :param patience: s to come to the epoch where the others are
        """
        if not self._broken:
            self._step_with_the_rest()
        self._deliver_all()
        deadline = time.monotonic() + max(STEPS_WITHIN, patience)
        while self._link is not None and not self._broken and time.monotonic() < deadline:
            with self._changed:
                ahead = self._progress is not None and self._up_to_last(self._progress.epoch) > self.local_epoch
                waits_for_others = ahead and time.monotonic() < deadline - STEPS_WITHIN + patience
                if not self._unfinished and not waits_for_others:
                    break
                self._changed.wait(LISTEN_EVERY)
        with self._state_lock:
            return self._state.digest().hex()

    def shutdown(self) -> None:
        """Deliver what is left, say goodbye unless this peer comes back at once or nobody is there to hear it, and end
        the node: after a goodbye it would need another key."""
        if self._link is not None:
            if not self._broken:
                self._step_with_the_rest()
            self._deliver_all()
            if self._finder is not None:
                self._finder.close()
            is_alone = self._progress is not None and self._progress.num_peers == 1
            is_alone = is_alone and self._finder is not None and not self._finder.others
            if not (self.comes_back or is_alone or self._broken):
                self._link.send(Leave())
                with self._changed:
                    self._changed.wait_for(lambda: self._has_left or bool(self._broken), LEFT_WITHIN)
            self._closed = True
            self._tasks.put(None)
            for thread in self._threads:
                thread.join(STEPS_WITHIN)
            self._link.close()
        self._slots.close()
        self.reach.close()

    # --- the loop ---

    def zero_grad(self) -> None:
        """Forget the model's gradients."""
        for parameter in self._model:
            parameter.grad = None

    def step(self, batch_size: int, grad_scale: float = 1.0, names: Sequence[Hashable] = ()) -> bool:
        """Count the gradients in .grad, the mean over `batch_size` samples of these `names`, times `grad_scale`. Then
        take new parameters, if there are some; wait while the device may not compute. :returns: False if the gradients
        are not finite.

        Raises SwarmError (broken).
        """
        self._require_node()
        self.only_accumulated = True
        self._measure_speed(batch_size)
        gradients = [None if parameter.grad is None else parameter.grad.detach() for parameter in self._model]
        is_finite = _are_finite(gradients)
        if is_finite:
            is_finite = self._add(gradients, batch_size, grad_scale, names)
        if self._recomputing is not None and self._recomputing.work_off(self._own_seconds(batch_size)):
            self.only_accumulated = False
        self._tell_download()
        self._await_computing()
        self._swap_in()
        self._computing_since = time.monotonic()
        return is_finite

    def await_step(self, patience: float) -> bool:
        """Wait for newer parameters than the model's, and take them. :returns: whether there were some; False as well
        when the volunteer leaves.

        :param patience: s
        Raises SwarmError (broken).
        """
        self._require_node()
        there = self._wait(
            lambda: self._ready_lineage != self._model_lineage and not self._unfinished, time.monotonic() + patience
        )
        self._swap_in()
        return there

    @contextmanager
    def up_to_date(self) -> Iterator[None]:
        """While it is open, model and training_state() are of one moment, the newest that is here."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._unfinished or bool(self._broken), STEPS_WITHIN)
            with self._state_lock:
                self._swap_in()
                if self._state.lineage == self._model_lineage or self._broken:
                    yield
                    return

    def _add(
        self, gradients: Sequence[torch.Tensor | None], samples: int, grad_scale: float, names: Sequence[Hashable]
    ) -> bool:
        """:returns: False if nothing finite comes of it"""
        assert self._model_lineage is not None
        told = {str(name): (name, self._model_epoch) for name in names}
        with self._changed:
            self._waiting.update(told)
        if self._local is None:
            own = [None if gradient is None else gradient.to("cpu", torch.float32) for gradient in gradients]
            self._hand_over(own, samples / grad_scale, samples, self._model_lineage, tuple(told))
            return True
        self._local.gather(gradients, samples, grad_scale, self._model_lineage, told)
        return not self._local.is_due or self._step_alone(self._local)

    def _step_alone(self, local: LocalTraining) -> bool:
        """A local step by what is gathered. :returns: False if it is not finite: nobody hears of it, and the model
        begins anew from the swarm's."""
        way = local.step()
        if way.tensors:
            self._hand_over(way.tensors, local.unit, way.samples, way.lineage, way.names)
            return True
        logger.warning("A local step led to values that are not finite; this machine goes on from the swarm's model.")
        self._lose(NOT_FINITE, way.samples, way.names)
        self._begins_anew = True
        return False

    def _step_with_the_rest(self) -> None:
        """Take a last local step by the samples gathered so far, so that none is lost unless the node has ended."""
        if self._local is not None and self._local.gathered:
            with suppress(SwarmError):
                self._step_alone(self._local)

    def _lose(self, cause: str, samples: int, names: Iterable[str]) -> None:
        with self._changed:
            self.expired[cause] = self.expired.get(cause, 0.0) + samples
            for name in names:
                self._waiting.pop(name, None)

    def _hand_over(
        self,
        tensors: Sequence[torch.Tensor | None],
        factor: float,
        samples: int,
        lineage: bytes,
        names: tuple[str, ...],
    ) -> None:
        """Add to a slot what these samples came to.

        :param tensors: of each parameter, float32 on the CPU
        :param factor: what they are multiplied with
        """
        with self._changed:
            filling = self._slot_for(lineage)
            if filling is None:  # the volunteer leaves, and the node gives no slot
                self._lose(LEFT, samples, names)
                return
            self._fill(self._slots.view(filling.slot), tensors, factor)
            filling.samples += samples
            filling.names += names
            filling.microbatches += 1
            self._deliver()
            if not self._config.overlap:  # a round may begin with it, and then the device has to stop
                self._wait(lambda: not self._undecided)

    def _fill_in_order(self, slot: torch.Tensor, gradients: Sequence[torch.Tensor | None], factor: float) -> None:
        for total, gradient in zip(self._state.split(slot), gradients, strict=True):
            if gradient is not None:
                total.add_(gradient, alpha=factor)

    def _slot_for(self, lineage: bytes) -> Filling | None:
        """The slot that a microbatch on the parameters of this lineage goes into; waits for one. None: it is time to
        leave, and none came."""
        leave_at: float | None = None
        life = self._local.life if self._local is not None else 0
        while True:
            if self._filling is None and self._free:
                self._filling = Filling(self._free.popleft(), lineage, life)
            if self._filling is not None and (self._filling.lineage, self._filling.life) == (lineage, life):
                return self._filling
            if self._filling is not None and not self._undecided:
                self._deliver()
                continue
            self._raise_if_broken()
            if self._stopping:
                leave_at = leave_at or time.monotonic() + SLOT_WITHIN
                if time.monotonic() > leave_at:
                    return None
            self.only_accumulated = False
            self._changed.wait(LISTEN_EVERY)

    def _deliver(self) -> None:
        """Hand the slot that is being filled over, if the one before is taken up."""
        filling = self._filling
        if filling is None or not filling.samples or self._undecided or self._link is None:
            return
        self._filling = None
        self._undecided += 1
        about = filling.names, filling.life, max(1, filling.microbatches)
        self._link.send(Delivered(filling.slot, filling.samples, filling.lineage, *about))

    def _deliver_all(self) -> None:
        """Nothing that was computed stays here."""
        with self._changed:
            deadline = time.monotonic() + TAKEN_WITHIN
            while self._link is not None and not self._broken:
                self._deliver()
                left = deadline - time.monotonic()
                if (self._filling is None or not self._filling.samples) and not self._undecided or left <= 0:
                    break
                self._changed.wait(left)

    def _await_computing(self) -> None:
        """The device may compute, and if it had to stop, what it stopped for is here."""
        with self._changed:
            if self._computes and (self._config.overlap or not self._unfinished):
                return
            self.only_accumulated = False
            while not (self._computes and not self._unfinished):
                if not self._wait(lambda: (self._computes and not self._unfinished) or self._download is not None):
                    return
                self._tell_download()

    def _swap_in(self) -> None:
        while not self._has_swapped_in():
            self._step_with_the_rest()

    @torch.no_grad()
    def _has_swapped_in(self) -> bool:
        """:returns: False if a local step has to be made first, on the model that its gradients were computed on"""
        with self._ready_lock:
            if self._ready_lineage == self._model_lineage and not self._begins_anew:
                return True
            if self._begins_anew and self._local is not None and self._local.gathered:
                return False
            self._model_lineage, self._model_epoch = self._ready_lineage, self._ready_epoch
            if self._local is None:
                for parameter, ready in zip(self._model, self._ready, strict=True):
                    parameter.copy_(ready)
                return True
            if self._begins_anew:
                self._local.begin_anew()
            self._local.put(self._ready)
            self._begins_anew = False
            return True

    def _measure_speed(self, samples: int) -> None:
        """By the time from the end of one step() to the beginning of the next."""
        now = time.monotonic()
        if not self._computing_since or now <= self._computing_since:
            return
        self._microbatches.append((now - self._computing_since, samples))
        speed = samples / (now - self._computing_since)
        self._speed = 0.9 * self._speed + 0.1 * speed if self._speed else speed
        if now - self._speed_told > SPEED_EVERY and self._link is not None:
            self._speed_told = now
            self._link.send(SpeedMeasured(self._speed))

    def _own_seconds(self, samples: int) -> float:
        """Return the seconds that this device needs for a microbatch of this size; 0 while its speed is not known."""
        return samples / self._speed if self._speed > 0 else 0.0

    def _tell_download(self) -> None:
        """In the loop's thread: who is told may raise."""
        with self._changed:
            download, self._download = self._download, None
        if download is not None and self.on_download is not None:
            self.on_download(*download)

    # --- waiting ---

    def _wait(self, until: Callable[[], bool], deadline: float = float("inf")) -> bool:
        """Until it is so. :returns: False if it is not, by the deadline or because the volunteer leaves."""
        with self._changed:
            while not until():
                self._raise_if_broken()
                left = deadline - time.monotonic()
                if self._stopping or left <= 0:
                    return False
                self._changed.wait(min(left, LISTEN_EVERY))
        return True

    def _require_node(self) -> None:
        if self._link is None or self._model_lineage is None:
            raise RuntimeError("join() comes before the first step()")
        self._raise_if_broken()

    def _raise_if_broken(self) -> None:
        if self._broken:
            raise broken(self._broken)

    def _break(self, why: str) -> None:
        with self._changed:
            self._broken = self._broken or why.rstrip(".")
            self._changed.notify_all()

    # --- what the node says; in the listener's thread ---

    def _listen(self) -> None:
        assert self._link is not None
        while not self._closed:
            try:
                message = self._link.receive(LISTEN_EVERY)
                if message is not None and type(message) in self._heard:
                    self._heard[type(message)](message)
            except Exception as error:
                traceback.print_exc()
                self._break(f"What the process of the swarm's rounds said was not understood ({error!r})")
                return

    def _on_task(self, message: Any) -> None:
        with self._changed:
            self._unfinished += 1
        self._tasks.put(message)

    def _on_granted(self, message: Granted) -> None:
        with self._changed:
            self._free.append(message.slot)
            self._undecided = max(0, self._undecided - 1)
            self._deliver()
            self._changed.notify_all()

    def _on_compute(self, message: Compute) -> None:
        with self._changed:
            self._computes = message.on
            self._changed.notify_all()

    def _on_progress(self, message: Progress) -> None:
        before, self._progress = self._progress, message
        begins = message.phase == Phase.EXCHANGING.value and (before is None or before.phase != message.phase)
        if begins and message.num_peers > 1 and self.on_round is not None:
            self.on_round(message.num_peers)

    def _on_downloading(self, message: Downloading) -> None:
        with self._changed:
            self._download = message.done, message.total
            self._changed.notify_all()

    def _on_expired(self, message: Expired) -> None:
        with self._changed:
            self.expired[message.cause] = self.expired.get(message.cause, 0.0) + message.samples
            for name in message.names:
                self._waiting.pop(name, None)

    def _on_told(self, message: Told) -> None:
        if self.on_told is not None:
            self.on_told(message.topic, message.about)

    def _on_recompute(self, message: Recompute) -> None:
        if self._recomputing is not None:
            self._recomputing.ask(message)

    def _on_verdicts(self, message: Verdicts) -> None:
        if self.on_verdicts is not None:
            self.on_verdicts(message)

    def _on_left(self, message: Left) -> None:
        with self._changed:
            self._has_left = True
            self._changed.notify_all()

    # --- steps and states; in the optimizer's thread ---

    def _work_off(self) -> None:
        while (task := self._tasks.get()) is not None and not self._broken:
            try:
                self._work[type(task)](task)
            except Exception as error:
                traceback.print_exc()
                self._break(f"A step of the swarm could not be taken ({error})")
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()

    def _up_to_last(self, epoch: int) -> int:
        return epoch if self._last_epoch is None else min(epoch, self._last_epoch)

    def _take_step(self, message: Step) -> None:
        if self._up_to_last(message.step.epoch) < message.step.epoch:
            return
        with self._state_lock:
            self._apply(message.step)
        self._report(message)  # before the step is to be seen
        self._publish(message)
        self._tell_steps((message.step,))

    def _tell_steps(self, steps: tuple[StepOf, ...]) -> None:
        if self.on_steps is not None:
            self.on_steps(steps)

    def _hear_history(self, message: History) -> None:
        self._tell_steps(message.steps)

    def _apply(self, step: StepOf) -> None:
        if step.is_step and step.answers:
            if step.parent != self._state.lineage:
                raise ValueError(f"step {step.epoch} does not follow the parameters of epoch {self._state.epoch}")
            answers = ((cells, path.read_bytes()) for cells, path in step.answers)
            codec = self._state.codec
            if codec is None:
                self._state.step(self._mean_gradient(answers, step.scales))
            else:  # two read them, and they are small
                kept = list(answers)
                self._state.step(self._mean_gradient(kept, step.scales, codec))
                self._state.codec = codec.after(kept)
        self._state.move_to(step.lineage, step.epoch)
        self._order = order_number(step.generation, step.sequence)

    def _mean_gradient(
        self, answers: Iterable[tuple[int, bytes]], scales: Sequence[float], *codec: StepCodec
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        for cells, data in answers:
            for cell, values in self._decode(cells, data, *codec).items():
                yield self._layout.cell(cell), values * scales[cell] if scales else values

    @torch.no_grad()
    def _publish(self, step: Step | None = None, begins_anew: bool = False) -> None:
        """A whole step is taken: the loop may have the parameters, and the node their sketch.

        :param step: the one that led there; None: there is none, or it settled nothing of ours
        :param begins_anew: the parameters do not follow the loop's
        """
        state = self._state
        with self._ready_lock:
            for ready, parameter in zip(self._ready, state.parameters, strict=True):
                ready.copy_(parameter)
            self._ready_lineage, self._ready_epoch = state.lineage, state.epoch
            if begins_anew:
                self._begins_anew = True
            if self._local is not None and step is not None:
                self._local.settle(step.life, self._ways_of(step))
        if self._recomputing is not None:
            self._recomputing.keep(state.lineage, state.parameters)
        assert self._link is not None
        self._link.send(Stepped(state.lineage, state.sketch()))

    def _ways_of(self, step: Step) -> Iterator[tuple[slice, torch.Tensor]]:
        """This peer's ways that the step settled."""
        for slot, cells in step.done:
            for cell in range(self._config.cells):
                if cells >> cell & 1:
                    place = self._layout.cell(cell)
                    yield place, self._slots.view(slot)[place]

    def _report(self, message: Step) -> None:
        step = message.step
        with self._changed:
            names = tuple(self._waiting.pop(name, (name, 0))[0] for name in message.names)
            oldest = step.epoch - self._config.max_staleness - 1  # what is older has expired
            self._waiting = {name: about for name, about in self._waiting.items() if about[1] >= oldest}
            waiting = frozenset(name for name, _ in self._waiting.values())
            num_peers = self._progress.num_peers if self._progress is not None else 1
        self._owed += message.own
        samples = int(self._owed + 1e-6)  # cells are settled one by one
        self._owed -= samples
        if not step.is_step and not samples:
            return
        self.reports.append(
            StepReport(
                epoch=step.epoch,
                samples=samples,
                group_size=step.group_size,
                received=step.received,
                seconds=message.seconds,
                bytes_sent=message.sent_bytes,
                bytes_received=message.received_bytes,
                names=names,
                expected=max(step.group_size, num_peers),
                cause=INCOMPLETE if step.is_step and step.received < 1 else None,
                all_samples=step.samples,
                waiting=waiting,
                openings=tuple(each.hex() for each in message.openings),
                is_unconfirmed=message.is_unconfirmed,
            )
        )

    def _load(self, message: Load) -> None:
        with self._state_lock:
            self._state.load(message.path, message.lineage, message.epoch)
            self._order = order_number(message.generation, message.sequence)
            for step in message.steps:
                if self._up_to_last(step.epoch) == step.epoch:
                    self._apply(step)
        self._joined_others, self.states_asked_in_vain = True, 0
        self._publish(begins_anew=self._local is not None and self._model_lineage is not None)
        self._tell_steps(message.steps)

    def _found(self, message: Founded) -> None:
        with self._state_lock:
            self._state.move_to(message.lineage, message.epoch)
        self._publish()

    def _check(self, message: Check) -> None:
        found, error = About(b"", -1, []), ""
        try:
            found = self._state.check(message.path)
            if self._judge is not None and self._ready_lineage is None:
                own, newer = self._state.parameters, self._state.parameters_in(message.path)
                error = self._judge([each.detach() for each in own], self._state.epoch, newer, found.epoch) or ""
        except UnusableState as why:
            error = str(why)
        self.states_asked_in_vain = self.states_asked_in_vain + 1 if error else 0
        assert self._link is not None
        self._link.send(Checked(message.path, error, found.lineage, found.epoch))

    def _write_state(self, message: WriteState) -> None:
        digest, error = b"", ""
        try:
            digest = self._state.save(message.path)
        except OSError as why:
            error = f"The model could not be kept in {message.path}: {why.strerror or why}."
        assert self._link is not None
        self._link.send(StateWritten(self._state.lineage, message.path, digest, error))

    # --- the monitor's orders ---

    def order_back(
        self, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any], sign: Callable[[bytes], bytes]
    ) -> RollbackOrder | None:
        """Order everybody back to a checkpoint, whose state the node gives to all who ask for it.

        :returns: the order; None: this peer is not in the run yet

        :param tensors, about: what named_state() gave for the checkpoint
        :param sign: what is to be signed as kind "order" -> the monitor's signature
        Raises OSError, KeyError for a checkpoint that lacks something, SwarmError (broken), and what `sign` raises.
        """
        self._require_node()
        assert self._link is not None
        folder, lineage = self._spec.folder / CHECKPOINTS, bytes.fromhex(about["lineage"])
        folder.mkdir(parents=True, exist_ok=True)
        digest = self._state.write(folder / "new", tensors, about)
        path = (folder / "new").replace(checkpoint_file(folder, lineage, digest))
        while not self._to_sign.empty():  # of an order that came too late
            self._to_sign.get()
        self._link.send(PrepareOrder(lineage, path, digest))
        try:
            found = self._to_sign.get(timeout=ORDER_WITHIN)
        except queue.Empty:
            self._raise_if_broken()
            return None
        if found.order is not None:
            self._link.send(GiveOrder(found.order, sign(found.digest)))
        return found.order

    # --- out and back ---

    def training_state(self) -> list[torch.Tensor]:
        """Parameters and statistics themselves, float32 and the optimizer's own types, on the CPU."""
        return list(self._state.named().values())

    @property
    def num_parameters(self) -> int:
        """The number of parameters: they come first in training_state()."""
        return len(self._state.parameters)

    def named_state(self, names: Sequence[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A copy of one moment for a checkpoint: tensors by name, and what belongs into its meta."""
        with self._state_lock:
            tensors = {name: tensor.clone() for name, tensor in self._state.named(names).items()}
            return tensors, self._state.about() | {"order": self._order}

    def load_named_state(
        self, names: Sequence[str], tensors: Mapping[str, torch.Tensor], metadata: dict[str, Any]
    ) -> None:
        """Begin with what named_state gave, where nobody else is in the run; to be called before join().

        Raises CheckpointError if it does not fit this model and optimizer.
        """
        if self._link is not None:
            raise RuntimeError("a checkpoint is loaded before join()")
        try:
            self._state.take(names, tensors, metadata)
        except UnusableState as why:
            raise CheckpointError(f"The checkpoint is not of this run: {why}.") from why


def order_number(generation: int, sequence: int) -> int:
    """A number that grows with each rollback order, as `Head.order` does; 0: none was given."""
    return (generation << SEQUENCE_BITS) + sequence


def _are_finite(gradients: Sequence[torch.Tensor | None]) -> bool:
    there = [gradient for gradient in gradients if gradient is not None]
    if not there:
        return False
    norms = torch._foreach_norm(there)
    return bool(torch.isfinite(torch.stack([norm.to(norms[0].device, torch.float32) for norm in norms])).all())
