"""Rounds of nodes: parts, answers, and how large things travel."""

from __future__ import annotations

from types import SimpleNamespace

import msgpack
import torch

from tests.fuzz.forms import MSGPACK
from tests.fuzz.target import Registry
from tests.fuzz.targets.common import MEMBERS, loop
from volunteer_kit.swarm.codecs.registry import CODECS
from volunteer_kit.swarm.rounds.blobs import Garbled, receive_blob
from volunteer_kit.swarm.rounds.heads import AnswerHead, decode_head, encode_head
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import PartHead, shares_within, weights_of, why_not_taken
from volunteer_kit.swarm.rounds.reducer import RefusedPart, SliceReducer, decode_answer
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Share
from volunteer_kit.swarm.wire import WireError, decode, encode

registry = Registry()
GROUP = tuple(str(peer) for peer in MEMBERS[:3])
SHAPES = [torch.Size([30, 7]), torch.Size([40])]
CELLS, EPOCH, SLICE = 4, 9, 0b0110
SHARES = tuple(Share(name, place, EPOCH, 10, SLICE) for place, name in enumerate(GROUP))
LAYOUTS = {name: Layout(SHAPES, CELLS, codec) for name, codec in CODECS.items()}


def _reducer(codec: str) -> SliceReducer:
    return SliceReducer(
        LAYOUTS[codec], SLICE, GROUP[0], epoch=EPOCH, max_staleness=2, limits=dict.fromkeys(GROUP, 1000.0),
        spent=Accounts(), feedback=None, rule="mean",
    )  # fmt: skip


def _values(layout: Layout) -> torch.Tensor:
    return torch.randn(layout.elements, generator=torch.Generator().manual_seed(1))


def _cells(codec: str) -> list[bytes]:
    layout = LAYOUTS[codec]
    return [layout.encode_cell(cell, _values(layout)[layout.cell(cell)]) for cell in layout.cells_of(SLICE)]


@registry.add(
    lambda: map(encode, (PartHead(b"f" * 32, SHARES[:1]), PartHead(b"f" * 32, SHARES, True), PartHead(b"", ()))),
    WireError,
    form=MSGPACK,
)
def part_head(data: bytes) -> bool:
    """Read the head that a member sends before its part, up to the decision whether the part enters."""
    head: PartHead = decode(PartHead, data)
    if why_not_taken(head.shares, GROUP[0], SLICE, EPOCH, 2, 1000.0, Accounts()) is None:
        weights_of(LAYOUTS["none"], shares_within(head.shares, SLICE), EPOCH)
    try:
        _reducer("none").begin(GROUP[0], head.shares)
    except RefusedPart:
        return not head.shares
    return True


@registry.add(
    lambda: [
        encode_head(AnswerHead(Answer(SLICE, GROUP[0], b"d" * 32, SHARES), b"s" * 64, b"c" * 100), GROUP),
        encode_head(AnswerHead(None), GROUP),
    ],
    WireError,
)
def answer_head(data: bytes) -> bool:
    """Read the compressed head that a reducer sends before its answer."""
    decode_head(data, GROUP)
    return True


def _add(name: str) -> None:
    """A target for one codec: a cell of a part, and an answer of a slice."""

    @registry.add(lambda: _cells(name), ValueError, name=f"cell_{name}")
    def cell(data: bytes) -> bool:
        for number in LAYOUTS[name].cells_of(SLICE):
            try:
                found = LAYOUTS[name].decode_cell(number, data)
            except ValueError:
                continue
            reducer = _reducer(name)
            part = reducer.begin(GROUP[1], (SHARES[1]._replace(cells=1 << number),))
            reducer.read(part, number, data)
            reducer.take(part)
            assert bool(found.isfinite().all()) and reducer.reduce() is not None
            return True
        return False

    @registry.add(lambda: [_answer(name), bytes(8)], ValueError, name=f"answer_{name}")
    def answer(data: bytes) -> bool:
        found = decode_answer(LAYOUTS[name], SLICE, data)
        assert all(bool(average.isfinite().all()) for average in found.values())
        return True


def _answer(codec: str) -> bytes:
    reducer, layout = _reducer(codec), LAYOUTS[codec]
    part = reducer.begin(GROUP[1], (SHARES[1],))
    for number, data in zip(layout.cells_of(SLICE), _cells(codec), strict=True):
        reducer.read(part, number, data)
    reducer.take(part)
    reduced = reducer.reduce()
    assert reduced is not None
    return reduced[1]


for _name in CODECS:
    _add(_name)


def _frames(*frames: bytes) -> bytes:
    return msgpack.packb(frames)


@registry.add(
    lambda: [_frames((5).to_bytes(8, "little"), b"abc", b"de"), _frames(bytes(8))],
    Garbled,
    form=MSGPACK,
)
def blob(data: bytes) -> bool:
    """Frames of a stream that should be one piece of data."""
    try:
        frames = msgpack.unpackb(data, raw=True)
    except Exception:  # noqa: BLE001  the frame is ours: the transport cuts what comes into such
        return False
    frames = [frame for frame in frames if isinstance(frame, bytes)] if isinstance(frames, list) else []

    async def receive(timeout: float) -> bytes:
        return frames.pop(0) if frames else b""

    return len(loop().run_until_complete(receive_blob(SimpleNamespace(receive=receive), 100, 1.0))) <= 100
