"""A reducer's slice: parts held until all senders' are in, checked one by one, and reduced by one rule."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence

import torch
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.compression import CompressionBase, CompressionInfo
from hivemind.proto import averaging_pb2, runtime_pb2

from volunteer_kit.robust.bounds import bound_norms
from volunteer_kit.swarm.codec import decode
from volunteer_kit.swarm.errors import brief

Reduce = Callable[[Sequence[torch.Tensor], Sequence[float]], torch.Tensor]  # parts and weights -> one part


class RefusedPart(AllreduceException):
    """A sender's part or weight cannot be true. The sender loses the rest of the round, the others lose nothing."""


def size_of(message: averaging_pb2.AveragingData | averaging_pb2.DownloadData) -> int:
    """Bytes of values in a message; what surrounds them is under a percent."""
    return len(message.tensor_part.buffer)


def read_values(
    message: runtime_pb2.Tensor, shape: Sequence[int] | None = None, codec: CompressionBase | None = None
) -> torch.Tensor:
    """A stranger's tensor, in float32 if it is floating point. Raises ValueError for what `decode` refuses.

    :param shape: that is expected; None: not known
    :param codec: that is in use; None: any
    """
    tensor = decode(message, shape, codec)
    return tensor.float() if tensor.is_floating_point() else tensor


async def with_shapes(
    messages: AsyncIterator[averaging_pb2.AveragingData], shapes: Sequence[torch.Size]
) -> AsyncIterator[tuple[averaging_pb2.AveragingData, torch.Size]]:
    """Each message with the shape that its part must have. Raises RefusedPart for one more than there are shapes."""
    remaining = iter(shapes)
    async for message in messages:
        shape = next(remaining, None)
        if shape is None:
            raise RefusedPart("more parts than the slice has")
        yield message, shape


def reason_to_refuse(
    part: torch.Tensor,
    shape: torch.Size,
    weight: float,
    first_weight: float | None,
    max_weight: float,
    own_limit: float | None = None,
) -> str | None:
    """Why a sender's part must not enter the average, in words, or None if it may.

    :param own_limit: of this sender, by its device and the time; None: not known
    """
    if part.shape != shape:
        return f"shape {tuple(part.shape)} instead of {tuple(shape)}"
    if not part.is_floating_point():
        return f"values of type {str(part.dtype).removeprefix('torch.')}"
    if not math.isfinite(weight) or weight < 0:
        return f"weight {weight}"
    if weight > max_weight:
        return f"weight {weight:g}, more than the {max_weight:g} that anyone can have earned"
    if own_limit is not None and weight > own_limit:
        return f"weight {weight:g}, more than the {own_limit:g} that its device can have earned in the time"
    if first_weight is not None and weight != first_weight:
        return "a weight that changes between parts"
    if not torch.isfinite(part.float()).all():  # 1e300 in float64 is finite, and not in what it is averaged in
        return "values that are not finite"
    return None


def check_average(average: torch.Tensor, shape: torch.Size, reducer: object) -> None:
    """Raises AllreduceException for what cannot be the answer to a part of this shape."""
    if average.shape != shape:
        raise AllreduceException(f"{reducer} answered with parts that nobody sent")
    if not average.is_floating_point() or not torch.isfinite(average).all():
        raise AllreduceException(f"{reducer} answered with values that are not finite")


class HeldPartReducer:
    """Collects one slice from all senders, part by part, and reduces each part once everybody's is in or given up.

    :param shapes: the slice's parts
    :param infos: what the codec must know of each part
    :param num_senders: members that send (all but auxiliary ones)
    :param reduce: the rule: parts (each of one shape) and weights -> one part
    :param codec: how the answer is encoded; what the members use is the decoded answer, here as well
    :param left_over: of each part: added to its average, and then what the answer has left out of that; None: nothing
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        infos: Sequence[CompressionInfo],
        num_senders: int,
        reduce: Reduce,
        codec: CompressionBase,
        left_over: Sequence[torch.Tensor] | None = None,
    ):
        self._left_over = left_over
        self.shapes, self.infos, self.num_senders, self.num_parts = shapes, infos, num_senders, len(shapes)
        self._reduce, self._codec = reduce, codec
        self._held: list[dict[int, tuple[torch.Tensor | None, float]]] = [{} for _ in shapes]
        self._answers: list[asyncio.Future] = [asyncio.get_running_loop().create_future() for _ in shapes]
        self._next_part = [0] * num_senders  # of each sender
        self._failed: set[int] = set()
        self._by_half = [asyncio.Event() for _ in shapes]  # of each part: at least half of the senders have given it
        self._given: dict[int, tuple[int, float, bool]] = {}  # parts that entered, weight, is any value not zero
        self.too_long: set[int] = set()  # senders of parts that were scaled down
        self.finished = asyncio.Event()
        if not shapes:
            self.finished.set()

    async def accumulate_part(
        self, sender: int, part_index: int, part: torch.Tensor | None, weight: float
    ) -> tuple[torch.Tensor, runtime_pb2.Tensor]:
        """Hold a sender's next part (None: it sent one that does not count) and wait for the others'.

        :returns: the answer decoded, and as sent to everybody
        """
        if sender in self._failed:
            raise BannedException(f"sender {sender} was given up")
        if part_index != self._next_part[sender] or part_index >= self.num_parts:
            raise AllreduceException(f"part {part_index} of sender {sender} out of turn")
        self._next_part[sender] += 1
        self._held[part_index][sender] = (part, weight)
        if part is not None:
            parts, _, something = self._given.get(sender, (0, 0.0, False))
            self._given[sender] = (parts + 1, weight, something or bool(part.any()))
        self._reduce_if_complete(part_index)
        return await asyncio.shield(self._answers[part_index])

    def on_sender_failed(self, sender: int) -> None:
        """Go on without this sender's missing parts. What it sent in full before stays: it was checked."""
        if sender not in self._failed:
            self._failed.add(sender)
            for part_index in range(self._next_part[sender], self.num_parts):
                self._reduce_if_complete(part_index)

    async def laggards(self, part_index: int, patience: Callable[[], float]) -> list[int]:
        """Who has not given a part that at least half have. Waits until these have, for as long as it takes, and then
        `patience()` s for the others."""
        await self._by_half[part_index].wait()
        answer = self._answers[part_index]
        await asyncio.wait({answer}, timeout=patience())
        late = (s for s in range(self.num_senders) if s not in self._failed and self._next_part[s] <= part_index)
        return [] if answer.done() else list(late)

    def parts_given(self, senders: Sequence[object]) -> dict:
        """Of each of these how many parts count, from the first on."""
        return {senders[place]: parts for place, (parts, *_) in self._given.items()}

    @property
    def weights(self) -> dict[int, float]:
        """Senders that gave all parts of the slice, with their weight. Who gave zeros gave nothing."""
        whole = {sender: given for sender, given in self._given.items() if given[0] == self.num_parts}
        return {sender: weight for sender, (_, weight, something) in whole.items() if something}

    def _reduce_if_complete(self, part_index: int) -> None:
        answer = self._answers[part_index]
        expected = self.num_senders - sum(self._next_part[sender] <= part_index for sender in self._failed)
        held = self._held[part_index]
        if 2 * len(held) >= expected:
            self._by_half[part_index].set()
        if answer.done() or len(held) < expected:
            return
        senders = [sender for sender in sorted(held) if held[sender][0] is not None]
        counted = [held[sender] for sender in senders]
        if not counted:
            answer.set_exception(AllreduceException("nobody sent a part that counts"))
            answer.exception()  # nobody may be waiting for it
        else:
            try:
                weights = [weight for _, weight in counted]
                owes = self._left_over is not None
                parts, too_long = bound_norms([part for part, _ in counted], weights, owes=owes)
                self.too_long.update(senders[place] for place in too_long)
                average = self._reduce(parts, weights)
                answer.set_result(self._encode(part_index, average))
            except Exception as e:  # raised here it would blame the sender whose part was the last
                answer.set_exception(AllreduceException(f"could not reduce: {brief(e)}"))
                answer.exception()
        held.clear()
        if all(future.done() for future in self._answers):
            self.finished.set()

    def _encode(self, part_index: int, average: torch.Tensor) -> tuple[torch.Tensor, runtime_pb2.Tensor]:
        """The answer as everybody will read it, and as it is sent."""
        left_over = None if self._left_over is None else self._left_over[part_index].view(average.shape)
        if left_over is not None:
            average = average + left_over
        message = self._codec.compress(average, self.infos[part_index])
        answer = decode(message)
        if left_over is not None:
            torch.sub(average, answer, out=left_over)
        return answer, message

    def fail(self, why: Exception) -> None:
        """Tell whoever waits that there will be no average."""
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(why)
                answer.exception()  # nobody may be waiting for it
        self._await_no_half()

    def finalize(self) -> None:
        """Drop what is held and wake whoever waits."""
        for answer in self._answers:
            if not answer.done():
                answer.cancel()
        self._held = [{} for _ in self.shapes]
        self._await_no_half()
        self.finished.set()

    def _await_no_half(self) -> None:
        for event in self._by_half:
            event.set()
