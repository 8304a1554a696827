"""The training state between peers: what a joiner downloads, and keeping everybody's copy the same.

A joiner takes parameters and optimizer statistics in their own types, into its own tensors: nothing of the donor's
settings (learning rate, betas) is adopted, and what does not fit or is not finite is refused and the next donor asked.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import math
import multiprocessing as mp
import random
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, AsyncIterator  # noqa: UP035  hivemind reads the hint's typing name

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import CompressionInfo, TensorRole, deserialize_torch_tensor
from hivemind.optim.state_averager import TrainingStateAverager
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, ValueWithExpiration, get_dht_time
from hivemind.utils.asyncio import aiter_with_timeout
from hivemind.utils.logging import get_logger
from hivemind.utils.streaming import combine_from_streaming

from volunteer_kit.swarm.agreement import MAX_EPOCH, SKETCH_SIZE, prevailing, rank_donors, read_all, sketch
from volunteer_kit.swarm.averager import SwarmAverager

logger = get_logger(__name__)
MAX_PEER_ID_BYTES = 64  # an RSA key's is 34
MAX_METADATA_BYTES = 2**16
# a joiner waits for a step under way, this share of what it waits for bytes: the state before it is behind on arrival
STEP_PATIENCE = 0.8
UPDATE_PATIENCE = 900.0  # s; longer than any round, which has its own timeouts
TOLD = struct.Struct(f"<q{4 * SKETCH_SIZE}s")  # what the averager's process must know: epoch, sketch


class StateRefused(ValueError):
    """A donor's state does not fit this run, or is not finite."""


def digest(tensors) -> str:
    """Hash of the exact bytes of `tensors`, in order: equal on two peers if and only if they hold the same model."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        # a view of the memory: copying 500 MB a round would cost more than hashing it
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


class SwarmStateAverager(SwarmAverager, TrainingStateAverager):
    """Parameters and statistics of this peer; averages parameters when, and only when, members differ.

    After each step a sketch of the parameters is made: it is told in every round, and declared for those who look for a
    donor. In a round of state averaging nothing is sent while all members hold the same.
    """

    last_donor: str | None = None

    def __init__(self, **kwargs):
        # hivemind counts the epoch before the background step that makes it true: what a joiner would then download
        # is the old model under the new number, and its statistics would differ from everybody's for good
        self._step_done, self._state_epoch = threading.Event(), 0
        self._step_done.set()
        self._told = mp.Array("c", TOLD.size)
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
        """[epoch, sketch of the parameters], of one moment."""
        return list(TOLD.unpack(self._told.raw))

    def describe(self) -> None:
        """Look at the state anew, after it changed; and tell those who look for a donor."""
        epoch = self._state_epoch
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        self._told.raw = TOLD.pack(epoch, sketch(parameters, seed=epoch))
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

    def get_current_state(self) -> tuple[dict, list[torch.Tensor], list[CompressionInfo]]:
        self._step_done.wait(STEP_PATIENCE * self.next_chunk_timeout)
        with torch.no_grad(), self.lock_averaged_tensors:
            tensors = [tensor.detach().cpu().clone() for tensor in self.state_tensors()]
            numbers = [value for _, _, value in self._statistics() if not isinstance(value, torch.Tensor)]
            epoch = self._state_epoch
        num_parameters = len(self.main_parameters)
        infos = [
            CompressionInfo.from_tensor(
                tensor, key=i, role=TensorRole.PARAMETER if i < num_parameters else TensorRole.OPTIMIZER
            )
            for i, tensor in enumerate(tensors)
        ]
        return {"epoch": epoch, "numbers": numbers}, tensors, infos

    def check_state(self, metadata: Any, tensors: list[torch.Tensor]) -> None:
        """Raises StateRefused unless a donor's state fits ours in every shape and type, and is finite."""
        own = self.state_tensors()
        epoch = metadata.get("epoch") if isinstance(metadata, dict) else None
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch < MAX_EPOCH:
            raise StateRefused(f"epoch {epoch!r}")
        numbers = metadata.get("numbers")
        own_numbers = [value for _, _, value in self._statistics() if not isinstance(value, torch.Tensor)]
        if not isinstance(numbers, list) or len(numbers) != len(own_numbers):
            raise StateRefused("another optimizer's counters")
        if not all(isinstance(n, (int, float)) and math.isfinite(n) and n >= 0 for n in numbers):
            raise StateRefused("counters that are not finite")
        if len(tensors) != len(own):
            raise StateRefused(f"{len(tensors)} tensors instead of {len(own)}")
        for index, (theirs, ours) in enumerate(zip(tensors, own, strict=True)):
            if theirs.shape != ours.shape or theirs.dtype != ours.dtype:
                raise StateRefused(f"tensor {index} is {theirs.dtype} {tuple(theirs.shape)}")
            if theirs.is_floating_point() and not torch.isfinite(theirs).all():
                raise StateRefused(f"tensor {index} is not finite")
        non_negative = getattr(self.optimizer, "non_negative", ())
        names = [name for _, name, value in self._statistics() if isinstance(value, torch.Tensor)]
        for name, theirs in zip(reversed(names), reversed(tensors), strict=False):  # statistics come last
            if name in non_negative and (theirs < 0).any():
                raise StateRefused(f"a negative {name}, whose root is no number")

    @torch.no_grad()
    def adopt_state(self, metadata: dict, tensors: list[torch.Tensor]) -> None:
        """Copy a checked state into our own tensors, statistics in their own types, and follow its epoch."""
        with self.lock_averaged_tensors:
            for ours, theirs in zip(self.state_tensors(), tensors, strict=True):
                ours.copy_(theirs)
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            slots = [(i, name) for i, name, value in self._statistics() if not isinstance(value, torch.Tensor)]
            for (index, name), number in zip(slots, metadata["numbers"], strict=True):
                self.optimizer.state[parameters[index]][name] = number
        if self.offload_optimizer:
            self._apply_optimizer_parameters_()
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()
        self.local_epoch = self._state_epoch = metadata["epoch"]
        self._update_scheduler()
        self.describe()

    def load_state_from_peers(
        self, timeout: float | None = None, at_least: int | None = None, donors: Sequence[PeerID] | None = None, **_
    ) -> bool:
        """Download a state that fits. :returns: whether one was adopted.

        :param at_least: the epoch that it must have; by default ours
        :param donors: ask these; by default all that declare themselves, best first
        """
        at_least, refused = self.local_epoch if at_least is None else at_least, []
        asked = None if donors is None else [donor.to_bytes() for donor in donors]
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while time.monotonic() < deadline:
            future = MPFuture()
            self._outer_pipe.send(("_download_state", [], {"future": future, "refused": refused, "donors": asked}))
            found = future.result(timeout=None if math.isinf(deadline) else max(0.1, deadline - time.monotonic()))
            if found is None:
                return False
            donor, metadata, tensors = found
            try:
                self.check_state(metadata, tensors)
                if metadata["epoch"] < at_least:
                    raise StateRefused(f"epoch {metadata['epoch']}, and {at_least} is needed")
            except StateRefused as e:
                logger.info(f"State of {PeerID(donor)} refused: {e}")
                refused.append(donor)
                continue
            self.adopt_state(metadata, tensors)
            self.last_donor = str(PeerID(donor))
            return True
        return False

    # --- in the averager's process ---

    async def _declare_for_download_periodically(self) -> None:
        """Tell that we share our state. hivemind's declaration expires before its next one is stored, and whoever
        looks in between finds no donor."""
        was_shared = False
        while True:
            self._state_updated.clear()
            shared = self.allow_state_sharing
            if shared or was_shared:
                asyncio.create_task(self._declare(self.told if shared else None))
            was_shared = shared
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state_updated.wait(), self.declare_state_period)

    async def _declare(self, told: list | None) -> None:
        with suppress(Exception):  # the next one follows soon
            stored = self.dht.store(
                f"{self.prefix}.all_averagers",
                subkey=self.peer_id.to_bytes(),
                value=told,
                expiration_time=get_dht_time() + 2 * self.declare_state_period,
                return_future=True,
            )
            await asyncio.wait_for(stored, self.declare_state_period)

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        self.doorkeeper.check(context.remote_id, "download_state")
        async for message in super().rpc_download_state(request, context):
            yield message

    async def _download_state(self, future: MPFuture, refused: list[bytes], donors: list[bytes] | None) -> None:
        """One attempt through the donors, best first. Sets (donor, metadata, tensors) or None."""
        try:
            if donors is None:
                found = await self.dht.get(f"{self.prefix}.all_averagers", latest=True, return_future=True)
                told = read_donors(found.value if found else {}, self.peer_id)
                ranked = rank_donors(told, random.sample(sorted(told), len(told)))
            else:
                ranked = [PeerID(donor) for donor in random.sample(donors, len(donors))]
            for donor in ranked:
                if donor.to_bytes() in refused:
                    continue
                try:
                    metadata, tensors = await self._download_from(donor)
                except Exception as e:
                    logger.warning(f"Could not download the state from {donor}: {e!r}")
                    continue
                future.set_result((donor.to_bytes(), metadata, tensors))
                return
        except Exception:
            logger.exception("Could not look for donors")
        finally:
            if not future.done():
                future.set_result(None)

    async def _download_from(self, donor: PeerID) -> tuple[Any, list[torch.Tensor]]:
        stub = self.get_stub(self._p2p, donor, namespace=self.prefix)
        stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
        limit = 2 * sum(t.numel() * t.element_size() for t in self.state_tensors()) + 2**20
        metadata, tensors, parts, size = None, [], [], 0
        async for message in aiter_with_timeout(stream, timeout=self.next_chunk_timeout):
            size += len(message.tensor_part.buffer)
            if size > limit or len(message.metadata) > MAX_METADATA_BYTES:
                raise StateRefused("more bytes than the whole state has")
            if message.metadata:
                metadata = self.serializer.loads(message.metadata)
            if message.tensor_part.dtype and parts:  # a dtype marks the first part of the next tensor
                tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
                parts = []
            parts.append(message.tensor_part)
        if parts:
            tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
        if metadata is None:
            raise StateRefused("it shares no state")
        return metadata, tensors

    # --- keeping parameters equal ---

    def is_in_agreement(self, gathered: dict[PeerID, Any]) -> bool:
        said = read_all(gathered)
        epochs = {one.epoch for one in said.values()}
        return len(epochs) == 1 and prevailing(said, epochs.pop(), said) == frozenset(gathered)

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
            with self.lock_optimizer:
                if optimizer_step:
                    with self.lock_averaged_tensors if self.reuse_tensors else nullcontext():
                        self.optimizer.step()
                        self._state_epoch = self.local_epoch
                self._update_scheduler()
                self.finished_optimizer_step.set()
            self.describe()
            if averaging_round:
                with self.lock_averaging:
                    self._average_parameters(timeout)
        except Exception:
            logger.exception("The delayed update failed")
            self.finished_optimizer_step.set()
        finally:
            self._step_done.set()
            if averaging_round:
                self.finished_averaging_round.set()

    def _average_parameters(self, timeout: float | None) -> None:
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()
        try:
            control = DecentralizedAverager.step(
                self, gather=self.told, timeout=timeout, require_trigger=True, wait=False
            )
            control.allow_allreduce()
            if not control.result(timeout=timeout).in_agreement:
                self.describe()
        except BaseException as e:
            logger.log(self.status_loglevel, f"State averaging failed: {e!r}")


def read_donors(records: Any, own_id: PeerID) -> dict[PeerID, Any]:
    """The DHT's list of donors, ours left out -> what each says that it holds, unread."""
    return {
        PeerID(key): info.value
        for key, info in (records.items() if isinstance(records, dict) else ())
        if isinstance(key, bytes) and 0 < len(key) <= MAX_PEER_ID_BYTES and key != own_id.to_bytes()
        if isinstance(info, ValueWithExpiration) and info.value is not None
    }
