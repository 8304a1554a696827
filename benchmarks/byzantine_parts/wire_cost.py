"""Bytes of verified averaging beside those of the gradients, as honest members say them to each other."""

from __future__ import annotations

from volunteer_kit.swarm.rounds.layout import Layout


def gradient_bytes(layout: Layout, peers: int) -> float:
    """Return the bytes that one of so many peers sends and receives in a round.

    It sends parts to all other reducers and receives their answers; as a reducer it does the reverse. The codec is a
    dense one: its cells are of the full size.
    """
    encoded = sum(layout.most_bytes(cell) for cell in range(layout.num_cells))
    return 4 * encoded * (peers - 1) / peers


def extra_bytes_pct(word_bytes: float, layout: Layout, peers: int) -> float:
    """Words in percent of gradients.

    :param word_bytes: of a peer in a round, sent and heard
    """
    return 100 * word_bytes / gradient_bytes(layout, peers)
