"""A round of averaging in one process: the kit's cells, parts, reducers and residuals, without sockets.

The round goes as in swarm/rounds/exchange.py: each of n peers reduces a slice; the parts that it sends to the others
are encoded, and so is the answer that everybody gets. Bytes are those of the encoded cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hivemind.compression import CompressionBase

from volunteer_kit.swarm.rounds.error_feedback import ErrorFeedback
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import mean_of, shares_within
from volunteer_kit.swarm.rounds.reducer import SliceReducer, decode_answer
from volunteer_kit.swarm.sync.config import SyncConfig
from volunteer_kit.swarm.sync.contributions import Accounts, Share
from volunteer_kit.swarm.sync.leading import share_out


class Group:
    """Peers of one run, round after round.

    :param shapes: of each tensor
    """

    def __init__(self, peers: int, shapes: Sequence[torch.Size], codec: CompressionBase):
        cells = SyncConfig.__dataclass_fields__["cells"].default
        self.layout = Layout(shapes, cells, codec)
        self.names = [f"peer-{number:02d}" for number in range(peers)]
        self.slices = dict(share_out(cells, [(name, 1.0) for name in self.names], self.names[0]))
        keeps = self.layout.leaves_out  # of other codecs nothing is kept
        self._sent = {name: ErrorFeedback(None, self.layout) if keeps else None for name in self.names}
        self._answered = {name: ErrorFeedback(None, self.layout) if keeps else None for name in self.names}
        self.bytes_sent = [0] * peers  # by each peer, of all rounds
        self.rounds = 0

    def average(self, sums: Sequence[torch.Tensor], samples: Sequence[float]) -> torch.Tensor:
        """Each peer's gradient sum, (elements,), over so many samples, or of that weight -> the mean that everybody
        gets. A peer without samples brings nothing."""
        self.rounds += 1
        mean = torch.empty(self.layout.elements)
        number = self.rounds
        for place, (reducer, cells) in enumerate(self.slices.items()):
            slice_ = SliceReducer(
                self.layout, cells, reducer, epoch=number, max_staleness=1,
                limits=dict.fromkeys(self.names, float("inf")), spent=Accounts(), feedback=self._answered[reducer],
            )  # fmt: skip
            for peer, (name, vector, count) in enumerate(zip(self.names, sums, samples, strict=True)):
                if not count:
                    continue
                shares = shares_within([Share(name, number, number, count, cells)], cells)
                part = slice_.begin(name, shares)
                for cell in self.layout.cells_of(cells):
                    data = self._encode(name, shares, cell, vector)
                    self.bytes_sent[peer] += len(data) if name != reducer else 0
                    slice_.read(part, cell, data)
                slice_.take(part)
            slice_.close()
            found = slice_.reduce()
            assert found is not None
            answer, data = found
            self.bytes_sent[place] += (len(self.names) - 1) * len(data)
            for cell, average in decode_answer(self.layout, cells, data).items():
                mean[self.layout.cell(cell)] = average
            if (kept := self._answered[reducer]) is not None:
                kept.settle(answer.digest, cells)
        for kept in self._sent.values():
            if kept is not None:
                kept.settle(self._fingerprint, (1 << self.layout.num_cells) - 1)
        return mean

    def unsent(self, peer: int) -> torch.Tensor:
        """Return the residual that a peer's parts have left, (elements,): values times weight."""
        return self._left_out(self._sent[self.names[peer]])

    def unanswered(self) -> torch.Tensor:
        """Return the sum of the residuals that all answers have left, (elements,)."""
        return sum((self._left_out(kept) for kept in self._answered.values()), torch.zeros(self.layout.elements))

    def _left_out(self, kept: ErrorFeedback | None) -> torch.Tensor:
        if kept is None:
            return torch.zeros(self.layout.elements)
        return torch.cat([kept.residual(cell) for cell in range(self.layout.num_cells)])

    @property
    def _fingerprint(self) -> bytes:
        return self.rounds.to_bytes(8, "big")

    def _encode(self, name: str, shares: tuple[Share, ...], cell: int, vector: torch.Tensor) -> bytes:
        """A cell of a part; what its encoding leaves out is kept."""
        kept = self._sent[name]
        owed = None if kept is None else kept.residual(cell)
        values = mean_of(self.layout, shares, self.rounds, cell, lambda _: vector, owed)
        data = self.layout.encode_cell(cell, values)
        if kept is not None:
            left = (values - self.layout.decode_cell(cell, data)) * sum(share.samples for share in shares)
            kept.keep(self._fingerprint, cell, left)
        return data
