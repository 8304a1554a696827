"""A member's part: what it holds, what it may claim, and how large things travel."""

from __future__ import annotations

import asyncio

import pytest
import torch

from volunteer_kit.swarm.codecs.registry import CODECS
from volunteer_kit.swarm.rounds.blobs import FRAME, Garbled, receive_blob, send_blob
from volunteer_kit.swarm.rounds.layout import Layout
from volunteer_kit.swarm.rounds.parts import (
    MOST_SHARES,
    mean_of,
    shares_within,
    weights_of,
    why_not_taken,
)
from volunteer_kit.swarm.sync.contributions import Accounts, Answer, Share

LAYOUT = Layout([torch.Size([40])], 4, CODECS["none"])
FRESH = Share("me", 5, birth=9, samples=30, cells=0b0011)
LATE = Share("me", 4, birth=8, samples=20, cells=0b0110)


def test_a_part_of_a_slice_has_the_shares_that_are_in_it():
    assert shares_within([FRESH, LATE], 0b0001) == (FRESH._replace(cells=0b0001),)
    assert shares_within([FRESH, LATE], 0b1000) == ()


def test_late_samples_weigh_less():
    assert weights_of(LAYOUT, [FRESH, LATE], epoch=9) == {0: 30.0, 1: 40.0, 2: 10.0}
    assert list(weights_of(LAYOUT, [LATE, FRESH], epoch=9)) == [0, 1, 2]


def test_a_part_is_the_mean_over_its_weight():
    sums = {5: torch.randn(40), 4: torch.randn(40)}
    both = mean_of(LAYOUT, [FRESH, LATE], 9, 1, sums.__getitem__)
    torch.testing.assert_close(both, (sums[5] + sums[4] / 2)[10:20] / 40)
    one = mean_of(LAYOUT, [FRESH, LATE], 9, 2, sums.__getitem__, owed=torch.full((10,), 5.0))
    torch.testing.assert_close(one, (sums[4][20:30] / 2 + 5) / 10)


def reason(*shares: Share, limit: float = 1000, spent: Accounts | None = None, cells: int = 0b0111) -> str | None:
    return why_not_taken(shares, "me", cells, 9, 2, limit, spent or Accounts())


def test_honest_parts_are_taken():
    assert reason() is None
    assert reason(FRESH, LATE) is None
    assert reason(FRESH, LATE, limit=50) is None
    assert reason(FRESH._replace(birth=7)) is None


@pytest.mark.parametrize(
    "shares, words",
    [
        ((FRESH._replace(peer="other"),), "somebody else"),
        ((FRESH._replace(cells=0),), "not in the slice"),
        ((FRESH._replace(cells=-1),), "not in the slice"),
        ((FRESH._replace(cells=0b1001),), "not in the slice"),
        ((FRESH._replace(samples=0),), "samples"),
        ((FRESH._replace(samples=-3),), "samples"),
        ((FRESH._replace(number=-1),), "contribution -1"),
        ((FRESH._replace(birth=10),), "epoch 10"),
        ((FRESH._replace(birth=6),), "epoch 6"),
        ((FRESH, FRESH._replace(cells=0b0100)), "twice"),
        ((FRESH, LATE._replace(samples=10**12)), "believed"),
        (tuple(FRESH._replace(number=number) for number in range(MOST_SHARES + 1)), "shares"),
    ],
)
def test_parts_that_cannot_be_true_are_not_taken(shares, words):
    assert words in reason(*shares)


def test_more_than_is_believed_is_not_taken():
    assert "believed" in reason(FRESH, LATE, limit=49.5)
    assert "believed" in reason(FRESH, limit=float("nan"))


def test_what_is_committed_is_not_taken_again():
    spent = Accounts().after([Answer(0b0011, "r", b"", (FRESH._replace(cells=0b0010),))], 10, 2)
    assert "committed" in reason(FRESH, spent=spent)
    assert reason(FRESH._replace(cells=0b0001), spent=spent) is None


class Pipe:
    """Frames that were sent are received."""

    peer, head = "other", b""

    def __init__(self, *frames: bytes):
        self.frames = list(frames)

    async def send(self, data: bytes, more: bool = False) -> None:
        self.frames.append(data)

    async def receive(self, timeout: float) -> bytes:
        return self.frames.pop(0)

    async def end(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("size", [0, 1, FRAME, 3 * FRAME + 5])
def test_a_blob_travels_in_frames(size):
    async def story():
        pipe, data = Pipe(), bytes(index % 251 for index in range(size))
        await send_blob(pipe, data)
        assert max(map(len, pipe.frames)) <= FRAME
        assert await receive_blob(pipe, size, 1.0) == data
        assert not pipe.frames

    asyncio.run(story())


@pytest.mark.parametrize(
    "frames",
    [
        [(101).to_bytes(8, "little")],
        [(2**63).to_bytes(8, "little")],
        [b"\1"],
        [bytes(9)],
        [(10).to_bytes(8, "little"), bytes(11)],
        [(10).to_bytes(8, "little"), bytes(9), b""],
    ],
)
def test_a_blob_that_is_none_is_refused_at_once(frames):
    with pytest.raises(Garbled):
        asyncio.run(receive_blob(Pipe(*frames), 100, 1.0))
