"""Error feedback: keep the residual of a lossy encoding per cell, and add it to the next encoding.

Karimireddy et al. 2019, "Error Feedback Fixes SignSGD", arXiv:1901.09847; in both directions, since a reducer keeps the
residual of its answer: Tang et al. 2019, "DoubleSqueeze", arXiv:1905.05957.

The residual of a round is tentative until the round's entry is on the branch: the round may fail, or an entry may hold
only some of its cells. All residuals lie in a mapped file with a note beside it, so that they outlive the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from volunteer_kit.storage import DamagedFile, read_json, write_whole
from volunteer_kit.swarm.codecs.wire import FLOAT32
from volunteer_kit.swarm.rounds.layout import Layout, is_finite

logger = logging.getLogger(__name__)

MAX_AGE: Final = 3600.0  # s; what was left out of a model that others have trained for longer is no help to it
ROUNDS: Final = 4  # tentative rounds whose values are kept
MOST_ROUNDS: Final = 32  # tentative rounds that are remembered


@dataclass
class _Tentative:
    """What one round leaves out."""

    slot: int | None = None  # of the file; None: it has no values
    kept: int = 0  # cells with values
    emptied: int = 0  # cells of which nothing is left over
    weights: dict[int, float] = field(default_factory=dict)


@dataclass
class _Note:
    """What the file beside the values says."""

    at: float = 0.0  # s since 1970
    weights: dict[int, float] = field(default_factory=dict)
    rounds: dict[bytes, _Tentative] = field(default_factory=dict)
    settling: tuple[bytes, int] | None = None  # a round and its cells that are being copied


class ErrorFeedback:
    """One direction's residuals, of a sender or of a reducer. Threads may share it.

    Each residual has a weight: a sender's is a sum, of weight 1; a reducer's is a mean over that weight.

    :param path: of the file; a note lies beside it. None, or where there is no space: in memory
    """

    def __init__(self, path: Path | None, layout: Layout):
        self._path, self._layout = path, layout
        self._about = layout.identity().hex()
        self._lock = threading.Lock()
        self._state = _Note(at=time.time())
        size = (1 + ROUNDS) * layout.elements
        mapped = None if path is None or not size else self._open(path, size)
        values = torch.zeros(size, **FLOAT32) if mapped is None else mapped
        self._values = values.view(1 + ROUNDS, layout.elements)  # settled, then tentative
        if self._state.settling is not None:
            self._finish_settling()
        if not is_finite(self._values[0]):  # a damaged disk
            self.forget()

    def begin(self) -> None:
        """A round begins: residuals of long ago are forgotten."""
        with self._lock:
            is_old = abs(time.time() - self._state.at) > MAX_AGE
        if is_old:
            self.forget()

    def residual(self, cell: int) -> torch.Tensor:
        """What is left over of a cell, (n,); to be read only."""
        return self._values[0, self._layout.cell(cell)]

    def weight(self, cell: int) -> float:
        """Of the cell's residual; 0: nothing is left over."""
        return self._state.weights.get(cell, 0.0)

    def keep(self, fingerprint: bytes, cell: int, left: torch.Tensor | None, weight: float = 1.0) -> None:
        """What a round leaves out of a cell; it replaces the residual when the round settles. Call it before what was
        encoded is sent.

        :param fingerprint: names the round, or another thing that settles: a reducer's answer by its digest
        :param left: (n,); None: nothing
        """
        with self._lock:
            made = self._state.rounds.get(fingerprint)
            if made is None:
                made = self._state.rounds[fingerprint] = _Tentative()
                self._bound_rounds()
            if left is None or not is_finite(left):
                made.emptied, made.kept = made.emptied | 1 << cell, made.kept & ~(1 << cell)
                made.weights.pop(cell, None)
            else:
                if made.slot is None:
                    made.slot = self._take_slot()
                self._reserve(1 + made.slot, cell)
                self._values[1 + made.slot, self._layout.cell(cell)] = left
                made.emptied, made.kept = made.emptied & ~(1 << cell), made.kept | 1 << cell
                made.weights[cell] = weight
            self._write_note()

    def settle(self, fingerprint: bytes, cells: int) -> None:
        """These cells of the round entered an entry of our branch: what it left out is our residual from now on.

        A round that is not known, or has settled before, changes nothing.
        """
        with self._lock:
            if fingerprint in self._state.rounds:
                self._state.settling = (fingerprint, cells)
                self._write_note()
                self._finish_settling()

    def drop_rounds(self) -> None:
        """The rounds that have not settled never will: the residuals stay as they are."""
        with self._lock:
            if self._state.rounds:
                self._state.rounds.clear()
                self._write_note()

    def forget(self) -> None:
        """The parameters are others than those that the residuals belong to."""
        with self._lock:
            self._values[0].zero_()
            self._state = _Note()
            self._write_note()

    # --- rounds ---

    def _finish_settling(self) -> None:
        """Copy what a round left out. A process that dies meanwhile does it again when it starts."""
        assert self._state.settling is not None
        fingerprint, cells = self._state.settling
        made = self._state.rounds.pop(fingerprint)
        for cell in self._layout.cells_of(cells):
            place = self._layout.cell(cell)
            if made.kept >> cell & 1 and made.slot is not None:
                self._values[0, place] = self._values[1 + made.slot, place]
                self._state.weights[cell] = made.weights[cell]
            elif made.emptied >> cell & 1:
                self._values[0, place] = 0.0
                self._state.weights.pop(cell, None)
        self._state.settling = None
        self._write_note()

    def _take_slot(self) -> int:
        used = {made.slot: made for made in self._state.rounds.values() if made.slot is not None}
        for slot in range(ROUNDS):
            if slot not in used:
                return slot
        oldest = next(made for made in self._state.rounds.values() if made.slot is not None)
        assert oldest.slot is not None
        slot = oldest.slot
        oldest.emptied, oldest.kept, oldest.slot = oldest.emptied | oldest.kept, 0, None  # lost, yet not sent twice
        self._write_note()  # before its values are written over
        return slot

    def _bound_rounds(self) -> None:
        while len(self._state.rounds) > MOST_ROUNDS:
            del self._state.rounds[next(iter(self._state.rounds))]

    # --- the file ---

    def _open(self, path: Path, size: int) -> torch.Tensor | None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            note = self._read_note(path, 4 * size)
            if note is None:
                path.unlink(missing_ok=True)
            else:
                self._state = note
            with path.open("ab") as file:
                file.truncate(4 * size)
                _take_space(file.fileno(), 0, 4 * self._layout.elements)
            return torch.from_file(str(path), shared=True, size=size, **FLOAT32)
        except (OSError, RuntimeError) as error:
            self._give_up_file(error)
            self._state = _Note(at=time.time())
            return None

    def _read_note(self, path: Path, size: int) -> _Note | None:
        """The note of a file that is ours and not too old."""
        try:
            about, note = read_json(path.with_suffix(".json"), lambda said: _read(said, self._layout.num_cells))
            if about != self._about or abs(time.time() - note.at) > MAX_AGE or path.stat().st_size != size:
                return None
            return note
        except FileNotFoundError:
            return None
        except (OSError, DamagedFile) as error:
            logger.warning(f"What was left out of rounds cannot be used, and begins anew. {error}")
            return None

    def _reserve(self, row: int, cell: int) -> None:
        """A page of a mapped file for which there is no space on the disk ends the process when it is written."""
        if self._path is None:
            return
        place = self._layout.cell(cell)
        begin = 4 * (row * self._layout.elements + place.start)
        try:
            with self._path.open("r+b") as file:
                _take_space(file.fileno(), begin, 4 * (place.stop - place.start))
        except OSError as error:
            self._values = self._values.clone()
            self._give_up_file(error)

    def _write_note(self) -> None:
        self._state.at = time.time()
        if self._path is None:
            return
        text = json.dumps(_written(self._state, self._about), separators=(",", ":"))
        try:
            write_whole(self._path.with_suffix(".json"), text, durable=False)  # a power cut may cost it
        except OSError as error:
            self._give_up_file(error)

    def _give_up_file(self, error: Exception) -> None:
        logger.warning(f"What is left out of rounds is kept in memory, and lost with this process: {error}")
        path, self._path = self._path, None
        if path is not None:
            for each in (path, path.with_suffix(".json")):
                with contextlib.suppress(OSError):
                    each.unlink(missing_ok=True)


def _take_space(descriptor: int, begin: int, length: int) -> None:
    if length and hasattr(os, "posix_fallocate"):  # macOS has none
        os.posix_fallocate(descriptor, begin, length)


def _written(note: _Note, about: str) -> dict[str, Any]:
    rounds = [
        [fingerprint.hex(), made.slot, made.kept, made.emptied, list(made.weights.items())]
        for fingerprint, made in note.rounds.items()
    ]
    settling = None if note.settling is None else [note.settling[0].hex(), note.settling[1]]
    weights = list(note.weights.items())
    return {"of": about, "at": note.at, "weights": weights, "rounds": rounds, "settling": settling}


def _read(said: dict[str, Any], cells: int) -> tuple[str, _Note]:
    rounds = {
        bytes.fromhex(name): _Tentative(
            None if slot is None else range(ROUNDS)[int(slot)], int(kept), int(emptied), _weights(weights, cells)
        )
        for name, slot, kept, emptied, weights in said["rounds"]
    }
    note = _Note(float(said["at"]), _weights(said["weights"], cells), rounds)
    if said["settling"] is not None:
        note.settling = (bytes.fromhex(said["settling"][0]), int(said["settling"][1]))
        if note.settling[0] not in rounds:
            raise ValueError("a round that is not there settles")
    for made in rounds.values():
        if made.kept and (made.slot is None or any(made.kept >> c & 1 and c not in made.weights for c in range(cells))):
            raise ValueError("a round without its values")
    return said["of"], note


def _weights(said: list[list[float]], cells: int) -> dict[int, float]:
    return {range(cells)[int(cell)]: float(weight) for cell, weight in said}
