"""The bytes of a round's tensors on the wire."""

from __future__ import annotations

from typing import Final

import torch

from volunteer_kit.runs import RunConfig, build_model
from volunteer_kit.session.node_parts import codec_of, rank_of, sync_settings
from volunteer_kit.swarm.codecs.registry import make_codec
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.sync.config import SyncConfig

# Ethernet, IP and TCP have 66 bytes for 1,448; and who receives two such segments acknowledges them by 66 bytes more
HEADERS: Final = 66 / 1448 + 66 / (2 * 1448)


def layout_of(run: RunConfig) -> Layout:
    """Return the layout of the run's gradients."""
    shapes = [parameter.shape for parameter in build_model(run).parameters() if parameter.requires_grad]
    return Layout(shapes, SyncConfig(**sync_settings(run)).cells, make_codec(*codec_of(run)), rank=rank_of(run))


def encoded_bytes(run: RunConfig) -> int:
    """Bytes of one member's gradients as they travel. Answers have as many. Low-rank factors have others in the next
    round: it is the mean of the two."""
    layout, rank = layout_of(run), rank_of(run)
    cells = range(layout.num_cells)
    vector, sizes = torch.randn(layout.elements), []  # (N,)
    for _ in range(2 if rank else 1):
        encoded = [layout.encode_cell(cell, vector[layout.cell(cell)]) for cell in cells]
        sizes.append(sum(map(len, encoded)))
        layout = layout.after((1 << cell, len(data).to_bytes(4, "little") + data) for cell, data in enumerate(encoded))
    return round(sum(sizes) / len(sizes))


def sent_by_all(members: int, size: float) -> float:
    """Bytes that the members of a round send together: of each its part to all other reducers, and of each slice its
    answer to all other members, whoever reduces how much.

    :param size: bytes of one member's whole gradients
    """
    return 2 * (members - 1) * size
