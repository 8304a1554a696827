"""Ask other members what they hold at the lineage of a state, before a peer takes that state.

Members write their states at the same epochs (`states.py`). Where their processors round alike the files are equal to
the last bit, and the root of the file's chunks says all: parameters and optimizer statistics. Elsewhere a sketch of the
parameters has to do. The peer draws its seed after the state has come: a sketch is some linear sums, and a donor that
knows the seed in advance can make another model with the same sums. So the sketches in votes are no witnesses: all
peers know their seed, the lineage.

A member attests to one peer, on a stream that libp2p has bound to the member's key, and this decides nothing for
others, so it needs no signature of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from volunteer_kit.checkpoint import OPTIMIZER
from volunteer_kit.swarm.state.agreement import FRESH_SIZE, distance, fresh_sketch

WITNESSES: Final = 8  # accounts that are asked
MOST_SEED: Final = 2**63


class Question(NamedTuple):
    """Ask a peer what state it holds at this lineage."""

    lineage: bytes
    seed: int = 0  # of the sketch that is wanted; 0: none


class Testimony(NamedTuple):
    """A peer's testimony about the state that it holds at a lineage."""

    epoch: int  # where it is; -1: it has no parameters
    settled: bool  # whether it is with its quorum, neither joining nor catching up
    knows: bool  # whether the lineage is in its log
    root: bytes = b""  # of the chunks of its state at that lineage; empty: it has none on its disk
    size: int = 0  # bytes of it
    sketch: bytes = b""  # of that state's parameters


class Held(NamedTuple):
    """A state that has come, as witnesses are compared with it."""

    epoch: int
    root: bytes  # empty: the run's beginning, which needs no bytes
    sketch: bytes = b""


@dataclass(frozen=True)
class Attestation:
    """The number of accounts that confirm a state, deny it or are silent, beside the one that offered it."""

    confirmed: int = 0
    denied: int = 0
    silent: int = 0  # they are with their quorum, and cannot say

    @property
    def why_refused(self) -> str | None:
        """Why the state is not taken; None: more than half of the accounts stand by it, the one that offered it among
        them. In a run of two that one is all there is."""
        if 2 * (self.confirmed + 1) > 1 + self.confirmed + self.denied + self.silent:
            return None
        told = f"{self.denied} hold another one, and {self.silent} cannot say" if self.silent else "the others do not"
        return f"of {self.confirmed + self.denied + self.silent} other members {self.confirmed} hold it; {told}"


def attest(held: Held, said: Mapping[str, Testimony], tolerance: float) -> Attestation:
    """Count what witnesses said.

    :param said: by account
    :param tolerance: relative distance of sketches up to which parameters are equal
    """
    found = [judged for each in said.values() if (judged := _judge(held, each, tolerance)) is not None]
    return Attestation(found.count("confirmed"), found.count("denied"), found.count("silent"))


def _judge(held: Held, said: Testimony, tolerance: float) -> str | None:
    """None: it does not count, since it has no parameters of its own, or looks for newer ones as well."""
    if not said.settled or said.epoch < 0:
        return None
    if not said.knows:
        return "denied" if said.epoch >= held.epoch else "silent"  # on another branch; or a step behind
    if not held.root or said.root == held.root:
        return "confirmed"
    ours, theirs = _read(held.sketch), _read(said.sketch)
    if ours is None or theirs is None:
        return "silent"
    return "confirmed" if distance(ours, theirs) <= tolerance else "denied"


def most_held(own: str, roots: Mapping[str, bytes]) -> tuple[bytes, frozenset[str]]:
    """The root that most peers have, and who has it; in a tie that of `own`, which is one of them."""
    by_root: dict[bytes, set[str]] = {}
    for peer, root in roots.items():
        by_root.setdefault(root, set()).add(peer)
    best = max(by_root, key=lambda root: (len(by_root[root]), own in by_root[root], root))
    return best, frozenset(by_root[best])


def sketch_of(path: Path, seed: int) -> bytes:
    """The sketch of the parameters in a state's file; empty if it cannot be read.

    :param seed: above 0, and below MOST_SEED
    """
    try:
        with safe_open(path, framework="pt") as opened:
            names = sorted(name for name in opened.keys() if not name.startswith(OPTIMIZER))
            return fresh_sketch((opened.get_tensor(name) for name in names), seed)
    except (OSError, SafetensorError, UnicodeDecodeError, ValueError):
        return b""


def _read(sketch: bytes) -> np.ndarray | None:
    if len(sketch) != 4 * FRESH_SIZE:
        return None
    numbers = np.frombuffer(sketch, "<f4").astype(np.float64)
    return numbers if np.isfinite(numbers).all() else None


def one_for_each(accounts: Mapping[str, str], but: Iterable[str]) -> dict[str, str]:
    """Account -> one peer of it, the first, without the accounts in `but`.

    :param accounts: peer -> account
    """
    left_out, found = set(but), dict[str, str]()
    for peer, account in accounts.items():
        if account not in left_out:
            found.setdefault(account, peer)
    return found
