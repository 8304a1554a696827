"""Send bytes of any length over a channel: their size, then frames. Sizes are bounded before anything is read."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Final, Protocol

FRAME: Final = 2**18  # bytes that travel at once
_SIZE: Final = 8  # bytes of a size


class Urgency(IntEnum):
    """Bulk by what waits for it; what is more urgent goes out first. A round's answers wait for all of its parts, and
    nobody but its receiver waits for a state."""

    PARTS = 0
    ANSWERS = 1
    OTHER = 2


class Channel(Protocol):
    """A stream of frames to one peer. All but `close` raise an exception when the stream has ended."""

    peer: str
    head: bytes  # of who opened it
    urgency: Urgency  # of what this side sends

    async def send(self, data: bytes, more: bool = False) -> None:
        """Send one frame, at the line's pace.

        :param more: whether another frame or the end follows soon
        """

    async def receive(self, timeout: float) -> bytes:
        """The next frame.

        :param timeout: s
        """

    async def end(self) -> None:
        """Nothing more is sent."""

    def close(self) -> None:
        """Drop the stream."""


class Garbled(ValueError):
    """A stream holds what nobody sends."""


async def send_size(channel: Channel, size: int, more: bool = True) -> None:
    """Announce how many bytes follow.

    :param more: whether they, or the end, follow soon
    """
    await channel.send(size.to_bytes(_SIZE, "little"), more)


async def send_blob(
    channel: Channel, data: bytes, stop: Callable[[], bool] = lambda: False, more: bool = False
) -> None:
    """Send bytes of any length: their size, then frames.

    :param stop: whether no more frames are sent, so that the other side does not take it
    :param more: whether another frame or the end follows soon
    """
    await send_size(channel, len(data), more or bool(data))
    for begin in range(0, len(data), FRAME):
        if stop():
            break
        await channel.send(data[begin : begin + FRAME], more or begin + FRAME < len(data))


async def receive_size(channel: Channel, most: int, timeout: float) -> int:
    """Receive what `send_size` sent.

    :param most: bytes
    :param timeout: s
    :raises Garbled: if it is larger, or no size
    """
    head = await channel.receive(timeout)
    size = int.from_bytes(head, "little")
    if len(head) != _SIZE or size > most:
        raise Garbled(f"{size if len(head) == _SIZE else 'no'} bytes are announced, {most} are the most")
    return size


async def receive_frame(channel: Channel, left: int, timeout: float) -> bytes:
    """Receive the next frame of a blob.

    :param left: bytes that are not here yet
    :param timeout: s
    :raises Garbled: if it is empty or has more
    """
    frame = await channel.receive(timeout)
    if not 0 < len(frame) <= left:
        raise Garbled(f"{len(frame)} bytes came where {left} are left of those that were announced")
    return frame


async def receive_blob(
    channel: Channel, most: int, timeout: float, on_part: Callable[[int], None] = lambda size: None
) -> bytes:
    """Receive what `send_blob` sent.

    :param most: bytes
    :param timeout: s, for each frame
    :param on_part: told how many bytes came, with each frame
    :raises Garbled: if it is longer
    """
    size = await receive_size(channel, most, timeout)
    frames, here = [], 0
    while here < size:
        frames.append(await receive_frame(channel, size - here, timeout))
        here += len(frames[-1])
        on_part(len(frames[-1]))
    return b"".join(frames)
