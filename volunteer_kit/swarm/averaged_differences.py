"""Of states that are averaged again and again, what has changed since is sent, not the whole.

A codec rounds in proportion to what it is given: 8 bits of parameters are wrong by more than honest members differ, and
4 bits would ruin the model. Of the few thousandths that they moved since they were last the same it rounds as little.
"""

from __future__ import annotations

import hashlib

import torch
from hivemind.averaging.group_info import GroupInfo

from volunteer_kit.swarm.arrival import ArrivingState
from volunteer_kit.swarm.round import Round
from volunteer_kit.swarm.told_group import MARK_SIZE


class AveragedDifferences(ArrivingState):
    """Averages what members hold beyond that which their last round left with all of them. Where one has not come out
    of it with the same, a newcomer or who lost an answer, they average the whole.

    Costs a copy of the averaged tensors, in the averager's process, once there was a round.
    """

    _base: list[torch.Tensor] | None = None  # equal on all who tell the same mark

    async def _run_allreduce_inplace_(self, tensors, group_info: GroupInfo, *, outcome: Round, **kwargs) -> None:
        base = self._base if self.pace.is_marked_alike(group_info) else None
        sent = tensors if base is None else [own - before for own, before in zip(tensors, base, strict=True)]
        self._base, self.pace.mark = None, b""  # until it is over
        await super()._run_allreduce_inplace_(sent, group_info, outcome=outcome, **kwargs)
        if outcome.kept_own is not None:
            return
        if base is not None:
            for own, before, difference in zip(tensors, base, sent, strict=True):
                torch.add(before, difference, out=own)
        if outcome.received == 1:
            self._base = [own.clone() for own in tensors]
            self.pace.mark = hashlib.blake2b(outcome.name, digest_size=MARK_SIZE).digest()
