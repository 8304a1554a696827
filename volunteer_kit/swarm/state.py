"""The training state between peers: what a joiner downloads, and keeping everybody's copy the same.

A joiner takes parameters and optimizer statistics in their own types, into its own tensors: nothing of the donor's
settings (learning rate, betas) is adopted, and what does not fit or is not finite is refused and the next donor asked.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import threading
import time
from collections import Counter
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

from volunteer_kit.swarm.averager import Round, SwarmAverager

logger = get_logger(__name__)
MAX_EPOCH = 2**31
MAX_PEER_ID_BYTES = 64  # an RSA key's is 34
MAX_METADATA_BYTES = 2**16
STEP_PATIENCE = 2.0  # s that a joiner waits for a step under way; the state before it would be behind on arrival


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

    Members first compare digests of their parameters. Equal answers keep them equal, so most rounds send nothing;
    after a lost part or a missed round the digests differ and the parameters are averaged.
    """

    last_round: Round | None = None  # of state averaging, None after a failure
    last_donor: str | None = None

    def __init__(self, **kwargs):
        # hivemind counts the epoch before the background step that makes it true: what a joiner would then download
        # is the old model under the new number, and its statistics would differ from everybody's for good
        self._step_done, self._state_epoch = threading.Event(), 0
        self._step_done.set()
        self.rounds_apart = 0  # comparisons in a row in which most others agreed with each other and not with us
        super().__init__(**kwargs)

    def step(self, *args, optimizer_step: bool = False, **kwargs):
        if optimizer_step:
            self._step_done.clear()
        return super().step(*args, optimizer_step=optimizer_step, **kwargs)

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
        self._step_done.wait(STEP_PATIENCE)
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

    def load_state_from_peers(self, timeout: float | None = None, own_rank: tuple | None = None, **_) -> bool:
        """Download the newest state that fits from the best donor. :returns: whether one was adopted.

        :param own_rank: (priority, peer id) of ourselves: donors that rank lower are not asked, so that of several
            peers that doubt themselves exactly one keeps its state and the others follow it
        """
        refused: list[bytes] = []
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while time.monotonic() < deadline:
            future = MPFuture()
            self._outer_pipe.send(("_download_state", [], {"future": future, "refused": refused, "own_rank": own_rank}))
            found = future.result(timeout=None if math.isinf(deadline) else max(0.1, deadline - time.monotonic()))
            if found is None:
                return False
            donor, metadata, tensors = found
            try:
                self.check_state(metadata, tensors)
                if metadata["epoch"] < self.local_epoch:
                    raise StateRefused(f"epoch {metadata['epoch']} is behind ours")
            except StateRefused as e:
                logger.warning(f"State of {PeerID(donor)} refused: {e}")
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
                asyncio.create_task(self._declare(self.state_sharing_priority if shared else None))
            was_shared = shared
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._state_updated.wait(), self.declare_state_period)

    async def _declare(self, priority: float | None) -> None:
        with suppress(Exception):  # the next one follows soon
            stored = self.dht.store(
                f"{self._matchmaking.group_key_manager.prefix}.all_averagers",
                subkey=self.peer_id.to_bytes(),
                value=priority,
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

    async def _download_state(self, future: MPFuture, refused: list[bytes], own_rank: tuple | None) -> None:
        """One attempt through the donors in order of priority. Sets (donor, metadata, tensors) or None."""
        try:
            prefix = self._matchmaking.group_key_manager.prefix
            found = await self.dht.get(f"{prefix}.all_averagers", latest=True, return_future=True)
            for donor in rank_donors(found.value if found else {}, self.peer_id, refused, own_rank):
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
        held = {held_digest(told) for told in gathered.values()}
        return len(held) == 1 and None not in held

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
                self._step_done.set()
                self.finished_optimizer_step.set()
            if averaging_round:
                with self.lock_averaging:
                    self._average_parameters(timeout)
                self.finished_averaging_round.set()
        except Exception:
            logger.exception("The delayed update failed")
            self._step_done.set()
            self.finished_optimizer_step.set()
            self.finished_averaging_round.set()

    def _average_parameters(self, timeout: float | None) -> None:
        if not self.reuse_tensors:
            self._load_local_tensors_into_averager_()
        with self.get_tensors() as tensors:
            holds = [self.local_epoch, digest(tensors)]
        self.last_round = None
        try:
            control = DecentralizedAverager.step(self, gather=holds, timeout=timeout, require_trigger=True, wait=False)
            control.allow_allreduce()
            self.last_round = control.result(timeout=timeout)
            apart = is_odd_one_out(self.last_round.gathered, self.dht.peer_id)
            self.rounds_apart = self.rounds_apart + 1 if apart else 0
        except BaseException as e:
            logger.log(self.status_loglevel, f"State averaging failed: {e!r}")


def held_digest(told: Any) -> str | None:
    """The digest in what a member told its group, [epoch, digest]; None for anything else."""
    return told[1] if isinstance(told, list) and len(told) == 2 and isinstance(told[1], str) else None


def is_odd_one_out(gathered: dict[PeerID, Any], own_id: PeerID) -> bool:
    """Do most members of our epoch hold one state, and we another? Between two, the smaller peer id is followed."""
    own = gathered.get(own_id)
    held = {peer: told[1] for peer, told in gathered.items() if held_digest(told) and told[0] == own[0]}
    counts = Counter(held.values())
    most = max(counts.values())
    leading = {value for value, count in counts.items() if count == most}
    if own[1] not in leading:
        return True
    if len(leading) == 1 or most == 1 and len(held) > 2:  # all differ: averaging is what helps
        return False
    return held[min(peer for peer in held if held[peer] in leading)] != own[1]


def rank_donors(
    records: Any, own_id: PeerID, refused: list[bytes], own_rank: tuple[float, bytes] | None = None
) -> list[PeerID]:
    """Donors to ask, best first: by declared priority (the epoch), ties at random; or, when we only doubt our own
    state, those that rank above ourselves by (priority, then smaller peer id)."""
    ranked = []
    for key, info in records.items() if isinstance(records, dict) else ():
        if not isinstance(key, bytes) or len(key) > MAX_PEER_ID_BYTES or not isinstance(info, ValueWithExpiration):
            continue
        if not isinstance(info.value, (int, float)) or not math.isfinite(info.value):
            continue
        if key == own_id.to_bytes() or key in refused:
            continue
        if own_rank is None:
            ranked.append((float(info.value), random.random(), key))
        elif info.value > own_rank[0] or (info.value == own_rank[0] and key < own_rank[1]):
            ranked.append((float(info.value), -int.from_bytes(key, "big") / 2.0 ** (8 * len(key)), key))
    return [PeerID(key) for *_, key in sorted(ranked, reverse=True)]
