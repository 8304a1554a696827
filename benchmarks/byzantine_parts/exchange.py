"""One round's bytes beside the state machine: what was sent, what came back, and its numbers along a direction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.byzantine_parts.defences import Piece
from volunteer_kit.robust.checks import Part
from volunteer_kit.robust.reducing import DISTANCE, NORM, SUMS, UNKNOWN
from volunteer_kit.robust.sketch import DRAWS, SIGN, sketch


@dataclass
class Exchange:
    """One round's bytes: what was sent, as it arrived, and what came back."""

    group: tuple[int, ...]
    vectors: dict[int, torch.Tensor]  # as they arrived
    pieces: list[Piece]
    parts: list[Part]
    answers: dict[int, list[torch.Tensor | None]]  # receiver -> of each piece
    counted: dict[int, tuple[int, ...]]  # reducer -> of each place, in how many of its parts it is

    def numbers(self, sender: int, rows: np.ndarray) -> np.ndarray:
        """What an honest statement of `sender` says, along `rows` (sums, size)."""
        lines = [self.line(sender, position, sender, rows) for position in range(len(self.pieces))]
        return np.asarray(lines, np.float32).reshape(len(lines), SUMS + len(rows))

    def line(self, sender: int, position: int, receiver: int, rows: np.ndarray) -> np.ndarray:
        """Of one part that `sender` sent, beside the answer that `receiver` had."""
        piece, answer = self.pieces[position], self.answers[receiver][position]
        values = self.vectors[sender][piece.place]
        numbers = np.zeros(SUMS + len(rows))
        numbers[NORM] = float(values.norm())
        numbers[DISTANCE] = float((values - answer).norm()) if answer is not None else UNKNOWN
        numbers[SUMS:] = rows[:, piece.place] @ values.double().numpy()
        return numbers

    def answered(self, receiver: int, rows: np.ndarray) -> np.ndarray:
        sums = np.full((len(self.pieces), 1 + len(rows)), np.nan)
        for position, (piece, answer) in enumerate(zip(self.pieces, self.answers[receiver], strict=True)):
            if answer is not None:
                sums[position] = float(answer.norm()), *(rows[:, piece.place] @ answer.double().numpy())
        return sums


class Held(Mapping[int, np.ndarray]):
    """Place of a sender -> numbers of our parts that it sent, made when asked for."""

    def __init__(self, exchange: Exchange, rows: np.ndarray, own: Sequence[int]):
        self._exchange, self._rows, self._own = exchange, rows, own

    def __getitem__(self, place: int) -> np.ndarray:
        exchange, sender = self._exchange, self._exchange.group[place]
        receiver = exchange.pieces[self._own[0]].reducer
        return np.stack([exchange.line(sender, position, receiver, self._rows) for position in self._own])

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._exchange.group)))

    def __len__(self) -> int:
        return len(self._exchange.group)


def directions(seed: bytes, size: int, sums: int) -> np.ndarray:
    """The rows (sums, size) that robust/sketch.py multiplies a vector with: here many vectors meet the same ones."""
    raw = np.random.PCG64(int.from_bytes(seed[:16], "little")).random_raw(-(-size // DRAWS))
    drawn = np.atleast_1d(raw).astype("<u8").view("<u2")[:size]
    rows = np.zeros((sums, size))
    rows[drawn % sums, np.arange(size)] = 1.0 - 2.0 * (drawn >> SIGN)
    probe = torch.arange(size, dtype=torch.float32)
    if not np.allclose(rows @ probe.double().numpy(), sketch(probe, seed, size=sums)):
        raise RuntimeError("these are not the directions of robust/sketch.py")
    return rows


def digests(exchange: Exchange, receiver: int) -> tuple[list[bytes], tuple[int, ...]]:
    """Of each member's answers as they arrived, b"" where one is missing; and whom our own parts have counted."""
    hashes = {place: hashlib.blake2b(digest_size=16) for place in range(len(exchange.group))}
    silent = set(hashes) - {part.reducer for part in exchange.parts}
    for part, answer in zip(exchange.parts, exchange.answers[receiver], strict=True):
        if answer is None:
            silent.add(part.reducer)
        else:
            hashes[part.reducer].update(answer.numpy().tobytes())
    answers = [b"" if place in silent else digest.digest() for place, digest in hashes.items()]
    return answers, exchange.counted.get(receiver, tuple([0] * len(exchange.group)))
