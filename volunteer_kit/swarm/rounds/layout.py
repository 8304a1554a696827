"""Cut the vector of all parameters into cells, and encode the values of a cell as bytes.

A cell holds pieces of tensors. Those of small tensors (norms, biases) are few bytes and much influence, so they have a
codec of their own. A codec with one scale for many values gets one tensor's values at a time: tensors differ in the
size of their gradients by orders of magnitude.

Where matrices travel as low-rank factors, a cell holds them whole, and a layout is that of one step: it holds the
factors that are fixed in it, and gives the layout of the next one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Final, NamedTuple

import numpy as np
import torch
from hivemind.compression import CompressionBase, CompressionInfo, NoCompression
from hivemind.proto import runtime_pb2

from volunteer_kit.swarm.codecs.dense import BlockwiseCodec, Float16Codec, UniformCodec
from volunteer_kit.swarm.codecs.low_rank import cell_ends, matrix_of
from volunteer_kit.swarm.codecs.registry import SizeAdaptiveCodec, decode, identity_of, leaves_out
from volunteer_kit.swarm.codecs.topk import SparseCodec
from volunteer_kit.swarm.codecs.wire import FLOAT32
from volunteer_kit.swarm.rounds.bases import RIGHT, Array, Bases, Matrix, place_matrices

CHUNK: Final = 2**17  # values that are encoded at once: they stay in a core's cache, and the sparse codec bears them
_AS_IT_IS: Final = NoCompression()
_LENGTH: Final = 4  # bytes before an encoding whose size does not follow from its number of values
_KNOWN: Final = (NoCompression, Float16Codec, UniformCodec, BlockwiseCodec, SparseCodec)
_SPARSE_HEAD: Final = 20  # bytes: its header, and three streams that are filled up


class Chunk(NamedTuple):
    """Values of a cell that one call of a codec encodes."""

    codec: CompressionBase
    places: tuple[slice, ...]  # in the cell
    numel: int


class Layout:
    """Where a run's cells are, and their codecs; equal on all its peers.

    :param shapes: of the parameters that are averaged, in the optimizer's order
    :param cells: that the vector is cut into: of one size, or with `rank` of about as many bytes each
    :param codec: as `swarm.codec.make_codec` makes it
    :param origins: of each shape, the size of the tensor that it is a piece of, by which its codec is chosen; 0: it
        travels as it is. None: all are whole tensors
    :param most_weight: that the first number of a cell may be, the weight of what follows (see `weighed`); 0: cells
        have none
    :param rank: of the factors that matrices travel as, in `codec` or its part for large tensors; 0: they travel as
        they are. A new layout is that of a run's first step
    :param ends: (cells + 1,) where the cells end, with `rank` between matrices; (): as `swarm.low_rank` cuts them
    :raises ValueError: for a codec that is none of `swarm.codec.CODECS`, or of two of them by size; with `rank` for one
        that sends fewer than 16 bits of a number, and for an end within a matrix
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size] | Sequence[tuple[int, ...]],
        cells: int,
        codec: CompressionBase,
        origins: Sequence[int] | None = None,
        most_weight: float = 0.0,
        rank: int = 0,
        ends: Sequence[int] = (),
    ):
        if cells < 1:
            raise ValueError(f"the vector is cut into one cell at least, not {cells}")
        self.num_cells = cells
        self._shapes = [list(shape) for shape in shapes]
        self._sizes = [math.prod(shape) for shape in shapes]
        self._origins = [*(self._sizes if origins is None else origins)]
        if len(self._origins) != len(self._sizes):
            raise ValueError(f"{len(self._origins)} origins of {len(self._sizes)} pieces")
        self.elements, self.most_weight = sum(self._sizes), most_weight
        self._codec, self._rank = codec, rank
        self._ends = [self.elements * cell // cells for cell in range(cells + 1)]
        if rank:
            self._ends = list(ends or cell_ends(shapes, rank, cells))
            if len(self._ends) != cells + 1 or self._ends != sorted(self._ends) or self._ends[-1] != self.elements:
                raise ValueError(f"{cells} cells of {self.elements} numbers do not end at {self._ends}")
        self._matrices = place_matrices(self._find_matrices(), rank)
        self._factor_codec = codec.large if isinstance(codec, SizeAdaptiveCodec) else codec
        self._chunks = self._cut()
        used = [self._factor_codec, *(chunk.codec for chunks in self._chunks for chunk in chunks)]
        if rank and not all(isinstance(each, (NoCompression, Float16Codec)) for each in used):
            raise ValueError("beside factors, and in them, each number travels in 16 or 32 bits")
        self._most = [sum(_most_bytes(chunk.codec, chunk.numel) for chunk in chunks) for chunks in self._chunks]
        for cell, matrices in enumerate(self._matrices):
            if matrices:
                self._most[cell] += _size_of(self._factor_codec, rank * sum(max(m.rows, m.columns) for m in matrices))
        has_bases = any(self._matrices)
        self._bases = Bases.beginning(self._matrices, rank, self.identity()) if has_bases else None

    def cell(self, cell: int) -> slice:
        """Return where a cell is in the vector. With `rank` it may be empty."""
        return slice(self._ends[cell], self._ends[cell + 1])

    def cells_of(self, mask: int) -> list[int]:
        """The cells of a bit mask, in their order; bits that are no cell's are left out."""
        return [cell for cell in range(self.num_cells) if mask >> cell & 1]

    def identity(self) -> bytes:
        """Equal for two layouts whose cells and bytes mean the same (SHA-256)."""
        pieces = [self._shapes, self._origins, self.most_weight]
        content = ["layout", pieces, self.num_cells, identity_of(self._codec), CHUNK]
        if self._rank:
            content += ["powersgd", self._rank, self._ends]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).digest()

    def learnt(self, cell: int) -> list[slice]:
        """Return where a cell has gradients; what else it has travels as it is."""
        bounds, begin, found = self.cell(cell), 0, []
        for size, origin in zip(self._sizes, self._origins, strict=True):
            start, stop = max(begin, bounds.start), min(begin + size, bounds.stop)
            if origin and start < stop:
                found.append(slice(start - bounds.start, stop - bounds.start))
            begin += size
        return found

    @property
    def leaves_out(self) -> bool:
        """Whether encoding leaves so much out that it has to come later: see `error_feedback`."""
        return self._bases is not None or self.answers_leave_out

    @property
    def answers_leave_out(self) -> bool:
        """Return whether encoding the average of parts leaves out so much, too.

        The average of projections on one subspace lies in that subspace, so projecting leaves out nothing of it.
        """
        used = {id(chunk.codec): chunk.codec for chunks in self._chunks for chunk in chunks}
        return any(leaves_out(codec) for codec in used.values())

    def most_bytes(self, cell: int) -> int:
        """Bytes that an encoded cell has at most."""
        return self._most[cell]

    def most_answer_bytes(self, cells: int) -> int:
        """Bytes that an answer for these cells has at most."""
        return sum(self._most[cell] + _LENGTH for cell in self.cells_of(cells))

    @property
    def largest_answer(self) -> int:
        """Bytes of the largest answer that there can be: one for all cells."""
        return self.most_answer_bytes((1 << self.num_cells) - 1)

    def encode_cell(self, cell: int, values: torch.Tensor) -> bytes:
        """Encode a cell; on all machines it decodes to the same.

        :param values: (n,) of the cell, float32
        :raises ValueError: for values that are not finite, or as many as the cell has
        """
        place = self.cell(cell)
        if values.shape != (place.stop - place.start,):
            raise ValueError(f"values of shape {tuple(values.shape)} for cell {cell}")
        if not is_finite(values):
            raise ValueError("values that are not finite")
        parts: list[bytes] = []
        for chunk in self._chunks[cell]:
            pieces = [values[place] for place in chunk.places]
            vector = pieces[0] if len(pieces) == 1 else torch.cat(pieces)  # (count,)
            parts.append(_encode(chunk.codec, vector))
        if self._bases is not None and self._matrices[cell]:
            factors = [
                torch.from_numpy(self._factor_of(cell, matrix, values).reshape(-1)) for matrix in self._matrices[cell]
            ]
            vector = torch.cat(factors)
            if not is_finite(vector):
                raise ValueError("factors that are not finite")
            parts.append(_encode(self._factor_codec, vector))
        return b"".join(parts)

    def decode_cell(self, cell: int, data: bytes) -> torch.Tensor:
        """Decode a stranger's cell.

        :returns: (n,), float32, finite
        :raises ValueError: if these are not the bytes of this cell
        """
        if len(data) > self._most[cell]:
            raise ValueError(f"{len(data)} bytes for cell {cell}, which has {self._most[cell]} at most")
        bounds, begin = self.cell(cell), 0
        values = torch.empty(bounds.stop - bounds.start, **FLOAT32)
        view = memoryview(data)
        for chunk in self._chunks[cell]:
            size = _fixed_size(chunk.codec, chunk.numel)
            if size is None:
                size = int.from_bytes(view[begin : begin + _LENGTH], "little")
                begin += _LENGTH
            if begin + size > len(data):
                raise ValueError(f"cell {cell} ends too early")
            vector = _decode(chunk.codec, view[begin : begin + size], chunk.numel)  # (count,)
            begin += size
            passed = 0
            for place in chunk.places:
                length = place.stop - place.start
                values[place] = vector[passed : passed + length]
                passed += length
        if self._bases is not None and self._matrices[cell]:
            for matrix, factor in zip(self._matrices[cell], self._factors_in(cell, view[begin:]), strict=True):
                fixed = self._bases.fixed(cell, matrix)
                left, right = (factor, fixed) if self._bases.side(cell) == RIGHT else (fixed, factor)
                out = values[matrix.place].numpy().reshape(matrix.rows, matrix.columns)
                with np.errstate(all="ignore"):
                    np.matmul(left, right.T, out=out)
        elif begin != len(data):
            raise ValueError(f"{len(data) - begin} bytes behind cell {cell}")
        if not is_finite(values):
            raise ValueError("values that are not finite")
        return values

    def split_answer(self, cells: int, data: bytes) -> dict[int, bytes]:
        """The encoded cells of an answer; b"": no member had anything.

        :param cells: of the slice, a bit per cell
        :raises ValueError: if these are not the bytes of such an answer
        """
        if len(data) > self.most_answer_bytes(cells):
            raise ValueError(f"{len(data)} bytes, and {self.most_answer_bytes(cells)} are the most")
        found, begin = {}, 0
        view = memoryview(data)
        for cell in self.cells_of(cells):
            size = int.from_bytes(view[begin : begin + _LENGTH], "little")
            begin += _LENGTH
            if begin + size > len(data):
                raise ValueError(f"it ends within cell {cell}")
            found[cell] = bytes(view[begin : begin + size])
            begin += size
        if begin != len(data):
            raise ValueError(f"{len(data) - begin} bytes too many")
        return found

    # --- from step to step ---

    @property
    def goes_by_steps(self) -> bool:
        """Return whether a cell's bytes mean another thing after each step."""
        return self._bases is not None

    def after(self, answers: Iterable[tuple[int, bytes]]) -> Layout:
        """The layout of the step behind the one that has these answers.

        :param answers: cells and bytes
        :raises ValueError: if these are no answers of this step
        """
        if self._bases is None:
            return self
        factors = {}
        for cells, data in answers:
            for cell, encoded in self.split_answer(cells, data).items():
                if encoded and self._matrices[cell]:
                    begin = sum(_size_of(chunk.codec, chunk.numel) for chunk in self._chunks[cell])
                    factors[cell] = self._factors_in(cell, memoryview(encoded)[begin:])
        return self._with(self._bases.after(factors))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return what the state at this step holds of the layout, by name; nothing if it is the same at all steps."""
        return self._bases.tensors() if self._bases is not None else {}

    def with_state(self, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """The layout of the step whose state holds these.

        :raises ValueError: if no state can
        """
        return self._with(self._bases.taken(tensors)) if self._bases is not None else self

    def at_beginning(self) -> Layout:
        """The layout of a run's first step."""
        if self._bases is None:
            return self
        return self._with(Bases.beginning(self._matrices, self._rank, self.identity()))

    def _with(self, bases: Bases) -> Layout:
        made = copy(self)
        made._bases = bases
        return made

    def _factor_of(self, cell: int, matrix: Matrix, values: torch.Tensor) -> Array:
        """Return the factor that is sent of a matrix, (n, r)."""
        assert self._bases is not None
        whole = values[matrix.place].numpy().reshape(matrix.rows, matrix.columns)
        fixed = self._bases.fixed(cell, matrix)
        # not by torch: a script may have lowered the precision of its products
        with np.errstate(all="ignore"):
            factor: Array = (whole if self._bases.side(cell) == RIGHT else whole.T) @ fixed
        return factor

    def _factors_in(self, cell: int, data: memoryview) -> list[Array]:
        """The factors that were sent of a cell, (n, r) each.

        :raises ValueError: if these are not their bytes
        """
        assert self._bases is not None
        side = self._bases.side(cell)
        heights = [matrix.rows if side == RIGHT else matrix.columns for matrix in self._matrices[cell]]
        count = self._rank * sum(heights)
        if len(data) != _size_of(self._factor_codec, count):
            raise ValueError(f"{len(data)} bytes of factors in cell {cell}")
        vector = _decode(self._factor_codec, data, count)
        if not is_finite(vector):
            raise ValueError("values that are not finite")
        parts = np.split(vector.numpy(), np.cumsum([self._rank * height for height in heights])[:-1])
        return [part.reshape(height, self._rank) for part, height in zip(parts, heights, strict=True)]

    def _factors_of(self, shape: Sequence[int], origin: int) -> tuple[int, int] | None:
        """Rows and columns of a piece that travels as a factor; None: its numbers do."""
        return matrix_of(shape, self._rank) if self._rank and origin else None

    def _find_matrices(self) -> list[list[tuple[slice, tuple[int, int]]]]:
        """Find the matrices of each cell that travel as factors: places in it, rows and columns.

        :raises ValueError: for one that is not in one cell
        """
        found: list[list[tuple[slice, tuple[int, int]]]] = [[] for _ in range(self.num_cells)]
        begin, cell = 0, 0
        for shape, size, origin in zip(self._shapes, self._sizes, self._origins, strict=True):
            matrix = self._factors_of(shape, origin)
            if matrix is not None:
                while self._ends[cell + 1] <= begin:
                    cell += 1
                if begin + size > self._ends[cell + 1]:
                    raise ValueError(f"a matrix of {size} numbers does not lie in one cell")
                start = begin - self._ends[cell]
                found[cell].append((slice(start, start + size), matrix))
            begin += size
        return found

    def _cut(self) -> list[list[Chunk]]:
        """The chunks of each cell."""
        tensors, begin = [], 0
        for shape, size, origin in zip(self._shapes, self._sizes, self._origins, strict=True):
            if self._factors_of(shape, origin) is None:
                codec = _codec_for(self._codec, origin) if origin else _AS_IT_IS
                tensors.append((begin, begin + size, codec))
            begin += size
        chunks, first = [], 0
        for cell in range(self.num_cells):
            bounds = self.cell(cell)
            while first < len(tensors) and tensors[first][1] <= bounds.start:
                first += 1
            pieces: list[tuple[CompressionBase, slice]] = []
            for start, stop, codec in tensors[first:]:
                if start >= bounds.stop:
                    break
                if start < stop:
                    here = slice(max(start, bounds.start) - bounds.start, min(stop, bounds.stop) - bounds.start)
                    pieces.append((codec, here))
            chunks.append(_chunks_of(pieces))
        return chunks


def is_finite(values: torch.Tensor) -> bool:
    """Whether all values are."""
    if not values.numel():
        return True
    ends = torch.stack(torch.aminmax(values))  # a NaN is both
    return bool(torch.isfinite(ends).all())


def _chunks_of(pieces: Sequence[tuple[CompressionBase, slice]]) -> list[Chunk]:
    chunks: list[Chunk] = []
    joined: dict[int, tuple[CompressionBase, list[slice]]] = {}
    for codec, piece in pieces:
        if isinstance(codec, (NoCompression, Float16Codec)):  # each value for itself
            joined.setdefault(id(codec), (codec, []))[1].append(piece)
        else:
            for begin in range(piece.start, piece.stop, CHUNK):
                end = min(begin + CHUNK, piece.stop)
                chunks.append(Chunk(codec, (slice(begin, end),), end - begin))
    for codec, places in joined.values():
        chunks += _joined_chunks(codec, places)
    return chunks


def _joined_chunks(codec: CompressionBase, places: Sequence[slice]) -> list[Chunk]:
    """Chunks of many pieces; neighbours are one piece."""
    chunks: list[Chunk] = []
    taken: list[slice] = []
    free = CHUNK
    for place in places:
        begin = place.start
        while begin < place.stop:
            end = min(begin + free, place.stop)
            if taken and taken[-1].stop == begin:
                taken[-1] = slice(taken[-1].start, end)
            else:
                taken.append(slice(begin, end))
            free -= end - begin
            begin = end
            if not free:
                chunks.append(Chunk(codec, tuple(taken), CHUNK))
                taken, free = [], CHUNK
    if taken:
        chunks.append(Chunk(codec, tuple(taken), CHUNK - free))
    return chunks


def _encode(codec: CompressionBase, vector: torch.Tensor) -> bytes:
    """Bytes of a vector (count,), with their number before them if it does not follow from `count`."""
    buffer: bytes = codec.compress(vector, CompressionInfo.from_tensor(vector)).buffer
    if _fixed_size(codec, vector.numel()) is None:
        return len(buffer).to_bytes(_LENGTH, "little") + buffer
    return buffer


def _decode(codec: CompressionBase, data: memoryview, count: int) -> torch.Tensor:
    """A stranger's vector (count,), without the number of its bytes. Raises ValueError."""
    message = runtime_pb2.Tensor(
        compression=codec.compression_type, buffer=bytes(data), size=(count,), dtype="float32"
    )
    return decode(message, (count,), codec)


def _codec_for(codec: CompressionBase, size: int) -> CompressionBase:
    """What encodes a tensor of so many elements."""
    if isinstance(codec, SizeAdaptiveCodec):
        codec = codec.large if size > codec.threshold else codec.small
    if not isinstance(codec, _KNOWN):
        raise ValueError(f"gradients cannot travel in a {type(codec).__name__}")
    return codec


def _fixed_size(codec: CompressionBase, count: int) -> int | None:
    """Bytes of so many encoded values; None: they depend on the values."""
    if isinstance(codec, Float16Codec):
        return 2 * count
    if isinstance(codec, UniformCodec):
        return int(4 * 2**codec.bits) + math.ceil(count * codec.bits / 8)
    if isinstance(codec, BlockwiseCodec):
        return 4 + 4 * math.ceil(count / int(codec.block_size)) + math.ceil(count * codec.bits / 8)
    if isinstance(codec, NoCompression):
        return 4 * count
    return None


def _size_of(codec: CompressionBase, count: int) -> int:
    """Return _fixed_size of a codec that has one."""
    size = _fixed_size(codec, count)
    assert size is not None
    return size


def _most_bytes(codec: CompressionBase, count: int) -> int:
    """Bytes of so many encoded values at most, with the length before them if there is one."""
    size = _fixed_size(codec, count)
    if size is not None:
        return size
    assert isinstance(codec, SparseCodec)
    kept = min(count, math.ceil(codec.density * count))
    # the best Rice code has under 3 + log2(count / kept) bits for a gap; two more are sign and magnitude
    bits = kept * (5 + math.log2(count / kept)) if kept else 0.0
    return _LENGTH + _SPARSE_HEAD + math.ceil(bits / 8)
