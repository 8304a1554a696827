"""Ask another peer to call this one back, by libp2p's AutoNAT, which every p2pd of a run answers.

One message each way on a stream of its own. The other takes the address from which our call came, with the ports that
we name, and dials it from a fresh socket; it does so for public addresses only, and few times a minute.
Source: libp2p specs, autonat/autonat-v1.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

PROTOCOL = "/libp2p/autonat/1.0.0"
REACHED, NOT_REACHED = 0, 100  # of the response's status; the others say why nobody tried
WHY_NOT = {101: "the peer calls public addresses only, or was asked too often", 200: "the peer did not understand"}
SILENT = "no answer in time"  # the peer may still be trying
MAX_MESSAGE = 8192  # bytes


class Answer(NamedTuple):
    """`status` "reached", "not reached", SILENT, or why it was not tried; `address`: under which it was reached."""

    status: str
    address: str = ""


async def call_back(p2p: P2P, peer: PeerID, addresses: Sequence[str], timeout: float = 20.0) -> Answer:
    """Have a connected `peer` dial us at these addresses' ports."""
    try:
        return await asyncio.wait_for(_ask(p2p, peer, addresses), timeout)
    except asyncio.TimeoutError:
        return Answer(SILENT)
    except Exception as error:  # the peer's p2pd has none of it, or the stream broke
        return Answer(f"the peer cannot be asked: {str(error)[:120] or type(error).__name__}")


async def _ask(p2p: P2P, peer: PeerID, addresses: Sequence[str]) -> Answer:
    _, reader, writer = await p2p._client.stream_open(peer, [PROTOCOL])
    try:
        us = _field(1, p2p.peer_id.to_bytes()) + b"".join(_field(2, Multiaddr(a).to_bytes()) for a in addresses)
        message = b"\x08\x00" + _field(2, _field(1, us))  # type DIAL, dial.peer
        writer.write(_varint(len(message)) + message)
        await writer.drain()
        return read_answer(await _message(reader))
    finally:
        writer.close()


def read_answer(message: bytes) -> Answer:
    """A response as a stranger sent it. Raises ValueError."""
    response = next((value for number, value in _fields(message) if number == 3 and isinstance(value, bytes)), b"")
    found = dict(_fields(response))
    status = found.get(1, 0)
    if status == REACHED:
        raw = found.get(3, b"")
        return Answer("reached", str(Multiaddr(raw)) if isinstance(raw, bytes) and raw else "")
    if status == NOT_REACHED:
        return Answer("not reached")
    return Answer(WHY_NOT.get(status, f"the peer answered with status {status}"))


async def _message(reader: asyncio.StreamReader) -> bytes:
    length = shift = 0
    while shift < 28:
        byte = (await reader.readexactly(1))[0]
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    if not 0 < length <= MAX_MESSAGE:
        raise ValueError(f"an answer of {length} bytes")
    return await reader.readexactly(length)


# --- protocol buffers, as far as these messages go ---


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Raises ValueError for what is cut off, or of another kind."""
    position = 0
    while position < len(data):
        tag, position = _number(data, position)
        value, position = _number(data, position)
        if tag & 7 == 2:
            if position + value > len(data):
                raise ValueError("a message that is cut off")
            yield tag >> 3, data[position : position + value]
            position += value
        elif tag & 7 == 0:
            yield tag >> 3, value
        else:
            raise ValueError("a message of another kind")


def _number(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
    raise ValueError("a message that is cut off")


def _field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])
