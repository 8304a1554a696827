"""How a round's work is shared out, for groups of thousands: what hivemind's linear program finds, in closed form."""

from __future__ import annotations

import numpy as np


def shares(bandwidths: np.ndarray) -> np.ndarray:
    """The share of the vector that each member reduces, so that the busiest line is done as early as it can be.

    Member i carries 1 + (n - 2) w_i vectors in b_i's time, as hivemind's load_balance_peers counts (see there). For a
    time x, w_i = (x b_i - 1) / (n - 2) at most; the k fastest have all of it when x = (n - 2 + k) / (their sum), and
    k is the largest for which the k-th of them gets any. Where even the slowest line's own vector takes longer than
    that, hivemind's solution is one of many, and here all others get less in proportion.

    :param bandwidths: (n,) in any unit; 0: reduces nothing
    :returns: (n,), 1 together
    """
    n, able = len(bandwidths), bandwidths > 0
    if not able.any():
        raise ValueError("nobody reduces anything")
    if n <= 2:
        return able / able.sum()
    order = np.argsort(-bandwidths, kind="stable")
    fastest = bandwidths[order][: able.sum()]  # (m,)
    times = (n - 2 + np.arange(1, len(fastest) + 1)) / np.cumsum(fastest)  # (m,) x, were the k fastest the reducers
    time = max(times[times * fastest >= 1][-1], 1 / fastest[-1])
    found = np.zeros(n)
    found[order[: len(fastest)]] = np.maximum(0.0, time * fastest - 1) / (n - 2)
    return found / found.sum()


def whole_parts(shares: np.ndarray, part_values: np.ndarray) -> np.ndarray:
    """Whose slice each part is in. As hivemind cuts: a part that lies across borders is its who has most of it.

    :param shares: (n,)
    :param part_values: (P,) values of each part, in order
    :returns: (P,) places of members
    """
    ends = np.cumsum(part_values)
    borders = np.floor(np.cumsum(shares) / shares.sum() * ends[-1])
    borders[-1] = ends[-1]
    owners = np.empty(len(part_values), dtype=np.int64)
    for part, (begin, end) in enumerate(zip(ends - part_values, ends, strict=True)):
        # hivemind's walk never goes back: a border at the very end of a part keeps its place
        first = int(np.searchsorted(borders, begin, side="right"))
        last = int(np.searchsorted(borders, end, side="left"))
        first = min(first, last)
        inner = np.minimum(borders[first : last + 1], end)
        owners[part] = first + int(np.argmax(np.diff(inner, prepend=begin)))
    return owners
