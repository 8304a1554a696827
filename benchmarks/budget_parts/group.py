"""A round of averaging in one process: the kit's codecs, what is left over, and slices, without sockets.

As swarm/allreduce.py does it: each of n peers reduces a slice; what it sends of the others is encoded, and so is the
answer that everybody gets. Bytes are those of the messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hivemind.compression import CompressionBase, CompressionInfo

from volunteer_kit.robust.mean import weighted_mean
from volunteer_kit.swarm.codec import decode, leaves_out
from volunteer_kit.swarm.left_over import LeftOver, part_size


class Group:
    """Peers of one run, round after round.

    :param sizes: values of each tensor
    """

    def __init__(self, peers: int, sizes: Sequence[int], codec: CompressionBase):
        self.codec, self.numel = codec, sum(sizes)
        self.kept = [LeftOver(self.numel) for _ in range(peers)]
        self.infos = [CompressionInfo.from_tensor(torch.empty(size), key=place) for place, size in enumerate(sizes)]
        self.bytes_sent = [0] * peers  # by each peer, of all rounds
        self.rounds = 0

    def average(self, tensors: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]) -> list[torch.Tensor]:
        """Each peer's tensors -> what all of them get."""
        self.rounds += 1
        if not leaves_out(self.codec):  # of these nothing is kept
            for one in self.kept:
                one.unsent.zero_()
                one.unanswered.zero_()
        begin = [one.begin(own, weight) for one, own, weight in zip(self.kept, tensors, weights, strict=True)]
        parts = [self._parts(share.tensors) for share in begin]  # [peer][reducer] of (part, info)
        left_over = [
            share.take_slice([part for part, _ in parts[reducer][reducer]]) for reducer, share in enumerate(begin)
        ]
        answers = [self._reduce(reducer, parts, begin, left_over[reducer], weights) for reducer in range(len(begin))]
        for share in begin:
            share.settle([], sum(weights), is_counted=True)
        vector = torch.cat([answer.reshape(-1) for of_slice in answers for answer in of_slice])
        cut = vector.split([info.descriptor.numel() for info in self.infos])
        return [values.view(own.shape) for values, own in zip(cut, tensors[0], strict=True)]

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[list[tuple[torch.Tensor, CompressionInfo]]]:
        """By reducer: parts in order, each whole, as near to equal slices as that allows."""
        size, peers = part_size(self.numel), len(self.kept)
        by_reducer: list[list] = [[] for _ in range(peers)]
        place = 0
        for tensor, info in zip(tensors, self.infos, strict=True):
            for index, part in enumerate(tensor.view(-1).split(size)):
                middle = place + part.numel() / 2
                by_reducer[min(peers - 1, int(middle * peers / self.numel))].append((part, info.get_part(index, size)))
                place += part.numel()
        return by_reducer

    def _reduce(self, reducer: int, parts, begin, left_over, weights) -> list[torch.Tensor]:
        received = []
        for peer, share in enumerate(begin):
            if peer == reducer:
                received.append([part for part, _ in parts[peer][reducer]])
                continue
            messages = [share.sending(self.codec).compress(part, info) for part, info in parts[peer][reducer]]
            self.bytes_sent[peer] += sum(map(len, (message.SerializeToString() for message in messages)))
            received.append([decode(message) for message in messages])
        answers = []
        for index, (_, info) in enumerate(parts[reducer][reducer]):
            average = weighted_mean([of_peer[index] for of_peer in received], weights) + left_over[index]
            message = self.codec.compress(average, info)
            answers.append(decode(message))
            torch.sub(average, answers[-1], out=left_over[index])
            self.bytes_sent[reducer] += (len(begin) - 1) * len(message.SerializeToString())
        return answers
