"""PowerSGD: matrices of a gradient go round as two narrow ones, for homes whose uplink is narrow, too.

Source: Vogels et al. 2019, "PowerSGD", arXiv:1905.13727. Of each member's matrix M, P = M Q is averaged and made
orthogonal, then Q = M^T P is averaged; all hold P Q^T then, of rank r, and each keeps what that leaves out of its own.
The shapes and the orthogonal vectors are hivemind's. Its own PowerSGDGradientAverager takes Q from a donor and loses
what was left out with the process; here a group begins from the last round's Q if all of it were in that round, else
from random numbers that its id gives to all, and what was left out is kept as all codecs' is (left_over.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from hivemind.averaging.group_info import GroupInfo
from hivemind.compression import CompressionInfo
from hivemind.utils.math import orthogonalize_

from volunteer_kit.swarm.codec import BESIDE
from volunteer_kit.swarm.codec_wire import FLOAT32
from volunteer_kit.swarm.grad_averager import SwarmGradientAverager
from volunteer_kit.swarm.left_over import LeftOver
from volunteer_kit.swarm.lost_answers import GivenAnswers
from volunteer_kit.swarm.low_rank import matrix_of
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.told_group import DIGEST_SIZE, MARK_SIZE, exchange_id, leaders_id

PHASES = 2  # of one round, one after the other


def second_id(exchanged: bytes) -> bytes:
    """The id under which a group exchanges Q, from that under which it exchanges P."""
    return leaders_id(exchanged) + hashlib.blake2b(exchanged + b"Q", digest_size=DIGEST_SIZE).digest()


class PowerSGDAverager(SwarmGradientAverager):
    """:param rank: r
    :param allreduce_timeout: s for both exchanges of a round
    """

    # Overrides: _beside_exchange

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        rank: int,
        allreduce_timeout: float | None,
        left_over_path: Path | None = None,
        start: bool,
        **kwargs,
    ):
        parameters = tuple(parameters)
        self._rank, self._matrices = rank, [matrix_of(p.shape, rank) for p in parameters]
        if kwargs.get("beside") is not None:  # the last tensor goes as it is
            self._matrices.append(None)
        self._feedback: LeftOver | None = None  # in the averager's process, as what follows
        self._qs: list[torch.Tensor] = []  # (columns, r) each: the last round's
        self._feedback_path = left_over_path
        each = None if allreduce_timeout is None else allreduce_timeout / PHASES
        super().__init__(parameters, allreduce_timeout=each, start=False, **kwargs)
        self._beside_exchange += (PHASES - 1) * (each or 0.0)
        if start:
            self.run_in_background(await_ready=True)

    async def _forget_left_over(self) -> None:
        if self._feedback is not None:
            self._feedback.forget()

    def forget_left_over(self) -> None:
        super().forget_left_over()
        self._outer_pipe.send(("_forget_left_over", [], {}))

    def _note_answers(self, exchange_id: bytes, answers: GivenAnswers, outcome: Round) -> None:
        """Nothing: who has missed a round's two exchanges takes a state."""

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo):
        second = second_id(exchange_id(group_info))
        with super()._register_allreduce_group(group_info):
            self._running_groups[second] = asyncio.Future()  # who is quick sends Q while we wait for P
            try:
                yield
            finally:
                if not (runner := self._running_groups.pop(second)).done():
                    runner.cancel()

    async def _run_allreduce_inplace_(
        self, tensors, group_info: GroupInfo, *, outcome: Round, weight: float = 1.0, tensor_infos=None, **kwargs
    ) -> None:
        if self._feedback is None:
            path = self._feedback_path
            self._feedback = LeftOver(self.total_size, path, f"{self.prefix}.powersgd{self._rank}")
        share = self._feedback.begin(tensors, weight, self.order)  # what we have: this round's, and what was left over
        low = [(m, matrix) for m, matrix in zip(share.tensors, self._matrices, strict=True) if matrix is not None]
        whole = [m.clone() for m, matrix in zip(share.tensors, self._matrices, strict=True) if matrix is None]
        matrices = [m.reshape(matrix) for m, matrix in low]
        qs = self._begin_with(group_info)
        ps = await asyncio.to_thread(lambda: [m @ q for m, q in zip(matrices, qs, strict=True)])
        first = replace(outcome)
        await self._exchange_these(ps, group_info, outcome=first, weight=weight, **kwargs)
        qs = await asyncio.to_thread(_project, matrices, ps)
        second = {"group_id": second_id(group_info.group_id), "outcome": outcome}
        await self._exchange_these([*qs, *whole], group_info, **second, weight=weight, **kwargs)
        _add_up(first, outcome)
        remaining = iter(whole)
        products = iter([p @ q.t() for p, q in zip(ps, qs, strict=True)])
        for tensor, own, matrix in zip(tensors, share.tensors, self._matrices, strict=True):
            if matrix is None:
                tensor.copy_(next(remaining))
                own.zero_()
            else:
                tensor.copy_(product := next(products).view(tensor.shape))
                own.sub_(product)
        share.settle((), sum(outcome.weights.values()), str(self.peer_id) not in outcome.refused)
        self._qs = qs
        self.pace.mark = hashlib.blake2b(outcome.name, digest_size=MARK_SIZE).digest()

    async def _exchange_these(self, tensors: list[torch.Tensor], group_info: GroupInfo, **kwargs) -> None:
        keys: list[int | str] = [*range(len(tensors))]
        if self.beside is not None and "group_id" in kwargs:  # the last one of the second exchange
            keys[-1] = BESIDE
        infos = tuple(CompressionInfo.from_tensor(t, key=key) for t, key in zip(tensors, keys, strict=True))
        await super()._run_allreduce_inplace_(tensors, group_info, tensor_infos=infos, **kwargs)

    def _begin_with(self, group_info: GroupInfo) -> list[torch.Tensor]:
        """Q, equal on all members."""
        if self._qs and self.pace.is_marked_alike(group_info):
            return self._qs
        digest = hashlib.blake2b(group_info.group_id, digest_size=7).digest()
        numbers = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return [torch.randn(matrix[1], self._rank, generator=numbers, **FLOAT32) for matrix in self._matrices if matrix]


def _project(matrices: Sequence[torch.Tensor], ps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """P becomes orthogonal. :returns: M^T P"""
    for p in ps:
        orthogonalize_(p)
    return [m.t() @ p for m, p in zip(matrices, ps, strict=True)]


def _add_up(first: Round, outcome: Round) -> None:
    """What is known of the first exchange into what is known of the second."""
    outcome.received = min(first.received, outcome.received)
    outcome.refused = first.refused | outcome.refused
    outcome.remarks = first.remarks | outcome.remarks
    outcome.lost = first.lost | outcome.lost
    outcome.failed_reducers = (*first.failed_reducers, *outcome.failed_reducers)
    outcome.bytes_sent += first.bytes_sent
    outcome.bytes_received += first.bytes_received
